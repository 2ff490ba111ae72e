"""Conversion in one command: its options as configurations of runs, and what loads the folder."""

from __future__ import annotations

from quantizer.runs.convert.folder import Converted, load_converted

__all__ = ["Converted", "load_converted"]
