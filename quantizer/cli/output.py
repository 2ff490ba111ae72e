"""Output of the command line: errors, and a standard output that may be full or lack the characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from typing import TextIO

from quantizer.errors import QuantizerError
from quantizer.report.page.glossary import words_in
from quantizer.report.tables.text import visible
from quantizer.runs.ranks.launcher import launched

__all__ = ["print_error", "standard_output"]

_WORDS = 2
"""How many words of an error are explained at most."""


def print_error(error: QuantizerError) -> None:
    """Print ``error: ...`` on standard error, without a traceback, and then what unusual words in it mean.

    Of several processes, all but the first name themselves.
    """
    rank, _ = launched()
    print(f"{'' if rank in ('0', '?') else f'rank {rank}: '}error: {visible(str(error))}", file=sys.stderr)
    for term, sentence in list(words_in(str(error)).items())[:_WORDS]:
        print(f"  ({term}: {sentence})", file=sys.stderr)


@contextmanager
def standard_output() -> Iterator[None]:
    """Let standard output take every character, and raise an error of ours where it takes nothing more.

    Raises:
        QuantizerError: nothing can be written to it; its disk is full, for example.
    """
    stream = sys.stdout
    if stream is None:
        yield
        return
    # What the encoding of the terminal lacks, as that of LC_ALL=C does, is written as an escape.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except (OSError, QuantizerError) as error:
        # What was printed during the work is told as an error of the work.
        refused = error.__cause__ if isinstance(error, QuantizerError) else error
        if not isinstance(refused, OSError) or refused.filename is not None or not _fails(stream):
            raise
        # Python would try again at its end, and print a second error.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise QuantizerError(
            f"standard output takes nothing more: {refused.strerror}; make room, or write to another place"
        ) from error


def _fails(stream: TextIO) -> bool:
    """Return whether a stream fails to take one line more."""
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False
