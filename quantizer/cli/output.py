"""Output of the commands, and their refusal under a launcher of several processes.

The interface of a verb of the command line, and the parser of several verbs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from rich.console import Console

from quantizer import __version__
from quantizer.errors import QuantizerError
from quantizer.report.page import words_in
from quantizer.report.text import visible
from quantizer.utils.child_process import launched


def require_one_process(command: str) -> None:
    """Raise if a launcher such as ``torchrun`` started this process as one of several."""
    rank, size = launched()
    if size > 1:
        raise QuantizerError(
            f"{command} is one process, and this is rank {rank} of {size}: each would do the whole work, into the same "
            "folder. Start it without torchrun, under which one  quantizer run CONFIG  works in several processes"
        )


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
    """Let standard output take every character, and raise an error of ours where it takes nothing more."""
    stream = sys.stdout
    if stream is None:
        yield
        return
    # What the encoding of the terminal lacks, as that of LC_ALL=C does, is written as an escape.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    refusals: list[OSError] = []
    try:
        with _watched(stream, refusals):
            yield
            stream.flush()
    except BrokenPipeError:
        raise
    except (OSError, QuantizerError) as error:
        # What was printed during the work is told as an error of the work.
        refused = error.__cause__ if isinstance(error, QuantizerError) else error
        if not isinstance(refused, OSError) or not any(refused is one for one in refusals):
            raise
        # Python would try again at its end, and print a second error.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise QuantizerError(
            f"standard output takes nothing more: {refused.strerror}; make room, or write to another place"
        ) from error


@contextmanager
def _watched(stream: TextIO, refusals: list[OSError]) -> Iterator[None]:
    """Collect the errors with which a stream refuses what is written, so that no other error is taken for one."""

    def watched(method: Callable[..., int | None]) -> Callable[..., int | None]:
        def call(*args: Any) -> int | None:
            try:
                return method(*args)
            except OSError as error:
                refusals.append(error)
                raise

        return call

    # The stream itself stays, as others hold it.
    held = vars(stream)
    before = dict(held)
    held.update(write=watched(stream.write), flush=watched(stream.flush))
    try:
        yield
    finally:
        del held["write"], held["flush"]
        held.update({name: before[name] for name in ("write", "flush") if name in before})


OVERRIDES_HELP = (
    "set a key of CONFIG (the value is YAML), or remove one with ~key: quantizer.backend=openvino ~fallback"
)


class Verb(Protocol):
    """A verb of the command line: ``quantizer NAME ...``."""

    name: str
    """The verb's name on the command line."""

    help: str
    """A line for the list of verbs, with which the verb's own help starts too."""

    epilog: str
    """Working examples, and further notes, at the end of the verb's help."""

    rest: str | None
    """The list argument that also takes arguments after an option, which argparse would refuse; None: there is none."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the arguments of the verb."""

    def __call__(self, args: Namespace, console: Console) -> int:
        """Run the verb.

        Args:
            args: the parsed arguments.
            console: standard output.

        Returns:
            The exit code.

        Raises:
            QuantizerError: an error that the user can correct; its message is printed.
        """


def parser_of(verbs: Sequence[Verb]) -> ArgumentParser:
    """Return the parser of the command line; it sets ``verb``, and ``parser`` to the verb's own parser."""
    parser = ArgumentParser(
        prog="quantizer",
        description="INT8 for PyTorch models on TensorRT and CPU engines: calibrated, measured, explained.",
        epilog="`quantizer VERB --help` shows the arguments of a verb, and an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in verbs:
        about = f"{verb.help[0].upper()}{verb.help[1:]}."
        below = subparsers.add_parser(
            verb.name,
            help=verb.help,
            description=about,
            epilog=verb.epilog,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(below)
        below.set_defaults(verb=verb, parser=below)
    return parser
