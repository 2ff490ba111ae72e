"""Output of errors and warnings on the command line."""

from __future__ import annotations

import sys

from quantizer.errors import QuantizerError

__all__ = ["print_error", "print_warning"]


def print_error(error: QuantizerError) -> None:
    """Print ``error: ...`` on standard error, word for word and without a traceback."""
    print(f"error: {error}", file=sys.stderr)


def print_warning(line: str) -> None:
    """Print ``warning: ...`` on standard error, word for word."""
    print(f"warning: {line}", file=sys.stderr)
