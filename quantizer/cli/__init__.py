"""The command line ``quantizer``: one class per command, and the entry point."""

from __future__ import annotations

from quantizer.cli.main import main

__all__ = ["main"]
