"""Number formats, rounding, and the torch operators that carry them."""

from __future__ import annotations
