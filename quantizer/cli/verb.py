"""The interface of a verb of the command line, and the parser of several verbs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

from quantizer import __version__

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
