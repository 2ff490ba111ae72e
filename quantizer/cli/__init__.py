"""Command line: one small class per verb, and the function that picks one."""

from __future__ import annotations

from quantizer.cli.main import main

__all__ = ["main"]
