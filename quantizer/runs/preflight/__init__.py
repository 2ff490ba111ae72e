"""Faults that would keep a command from its end, found before it starts."""

from __future__ import annotations

from quantizer.runs.preflight.rows_and_tools import check_rows, require_tools

__all__ = ["check_rows", "require_tools"]
