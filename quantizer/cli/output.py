"""The interface of a command (``Verb``), the parser of all commands, and their error output."""

from __future__ import annotations

import os
import sys
import warnings
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
    """Raise if a launcher such as ``torchrun`` started several processes of this command."""
    rank, size = launched()
    if size > 1:
        raise QuantizerError(
            f"{command} runs in one process, and this is rank {rank} of {size}: every process would write the same "
            "folder. Start it without torchrun; only  quantizer run CONFIG  works in several processes"
        )


_WORDS = 2
"""Maximum number of glossary terms explained below an error."""


def print_error(error: QuantizerError) -> None:
    """Print ``error: ...`` on standard error without a traceback, and explain glossary terms in it.

    With several processes, every rank but the first prints its number.
    """
    rank, _ = launched()
    print(f"{'' if rank in ('0', '?') else f'rank {rank}: '}error: {visible(str(error))}", file=sys.stderr)
    for term, sentence in list(words_in(str(error)).items())[:_WORDS]:
        print(f"  ({term}: {sentence})", file=sys.stderr)


@contextmanager
def warnings_without_place() -> Iterator[None]:
    """Print warnings as ``warning: ...``, because their place in the code of the command helps no user of it."""

    def plain(message: Warning | str, *_: object, **__: object) -> str:
        return f"warning: {message}\n"

    before = warnings.formatwarning
    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def standard_output() -> Iterator[None]:
    """Escape characters that standard output cannot encode, and raise ``QuantizerError`` if it cannot be written."""
    stream = sys.stdout
    if stream is None:
        yield
        return
    # With LC_ALL=C, for example, the encoding lacks characters.
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
        # An error while printing may arrive as the cause of another error.
        refused = error.__cause__ if isinstance(error, QuantizerError) else error
        if not isinstance(refused, OSError) or not any(refused is refusal for refusal in refusals):
            raise
        # Python would flush again at exit and print a second error.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise QuantizerError(
            f"cannot write to standard output: {refused.strerror}; free some space, or redirect the output"
        ) from error


@contextmanager
def _watched(stream: TextIO, refusals: list[OSError]) -> Iterator[None]:
    """Collect the write errors of a stream, to tell them from other errors."""

    def watched(method: Callable[..., int | None]) -> Callable[..., int | None]:
        def call(*args: Any) -> int | None:
            try:
                return method(*args)
            except OSError as error:
                refusals.append(error)
                raise

        return call

    # The stream object stays the same, because other code refers to it.
    attributes = vars(stream)
    original = dict(attributes)
    attributes.update(write=watched(stream.write), flush=watched(stream.flush))
    try:
        yield
    finally:
        del attributes["write"], attributes["flush"]
        attributes.update({name: original[name] for name in ("write", "flush") if name in original})


OVERRIDES_HELP = "set a key of CONFIG to a YAML value, or remove it with ~key: quantizer.backend=openvino ~fallback"


class Verb(Protocol):
    """A command: ``quantizer NAME ...``."""

    name: str
    """The name of the command."""

    help: str
    """One line for the list of commands, and the first line of the command's help."""

    epilog: str
    """Examples and notes at the end of the command's help."""

    list_argument: str | None
    """The list argument that also accepts values after an option, which argparse would reject; None without one."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def __call__(self, args: Namespace, console: Console) -> int:
        """Run the command.

        Args:
            args: the parsed arguments.
            console: standard output.

        Returns:
            The exit code.

        Raises:
            QuantizerError: an error that the user can fix; its message is printed.
        """


def parser_of(verbs: Sequence[Verb]) -> ArgumentParser:
    """Return the parser of the command line; it sets ``verb`` to the command and ``parser`` to its subparser."""
    parser = ArgumentParser(
        prog="quantizer",
        description="Post-training INT8 quantization of PyTorch models for TensorRT and CPU engines.",
        epilog="`quantizer COMMAND --help` shows the arguments of a command, and an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
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
