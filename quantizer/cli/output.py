"""Output of errors on the command line."""

from __future__ import annotations

import sys

from quantizer.errors import QuantizerError

__all__ = ["print_error"]


def print_error(error: QuantizerError) -> None:
    """Print ``error: ...`` on standard error, word for word and without a traceback."""
    print(f"error: {error}", file=sys.stderr)
