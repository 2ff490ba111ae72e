"""The interface of a verb of the command line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Protocol

from rich.console import Console

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
