"""Output of errors on the command line."""

from __future__ import annotations

import sys

from quantizer.errors import QuantizerError
from quantizer.report.page.glossary import words_in
from quantizer.runs.ranks.launcher import launched

__all__ = ["print_error"]

_WORDS = 2
"""How many words of an error are explained at most."""


def print_error(error: QuantizerError) -> None:
    """Print ``error: ...`` on standard error, without a traceback, and then what unusual words in it mean.

    Of several processes, all but the first name themselves.
    """
    rank, _ = launched()
    print(f"{'' if rank in ('0', '?') else f'rank {rank}: '}error: {error}", file=sys.stderr)
    for term, sentence in list(words_in(str(error)).items())[:_WORDS]:
        print(f"  ({term}: {sentence})", file=sys.stderr)
