"""Names of a decoder's key-value cache in ONNX files, as common runtimes expect them. Imported without torch."""

from __future__ import annotations

CACHE = "past_key_values"
"""Prefix of input names: ``past_key_values.0.key`` [batch x heads x tokens x width] belongs to layer 0."""

PRESENT = "present"
"""Prefix of output names, such as ``present.0.key``; these tensors also contain the new tokens."""

PAST, TOTAL = "past_sequence", "total_sequence"
"""Dimensions: the number of tokens in the cache, and its sum with the new tokens, which are ``sequence``."""
