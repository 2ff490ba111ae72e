"""How many models are drawn: a few in every run of the tests, 2,000 with ``--hypothesis-profile=nightly``."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nightly", max_examples=2000, derandomize=False, print_blob=True)
