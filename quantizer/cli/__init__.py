"""Command line: one small class per verb, and the entry point that runs one."""

from __future__ import annotations

from quantizer.cli.main import main

__all__ = ["main"]
