"""Names of a decoder's cache of keys and values, as the usual runtimes know them; engines read them without torch."""

from __future__ import annotations

CACHE = "past_key_values"
"""The beginning of the names of inputs: ``past_key_values.0.key`` [batch x heads x tokens x width] is layer 0's."""

PRESENT = "present"
"""The beginning of the names of outputs, which hold the tokens that were read, too: ``present.0.key``."""

PAST, TOTAL = "past_sequence", "total_sequence"
"""Dimensions: the tokens in the cache, and those with the tokens that are read, whose own is ``sequence``."""
