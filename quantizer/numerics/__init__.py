"""Number formats, rounding, and the torch operators that quantize."""

from __future__ import annotations
