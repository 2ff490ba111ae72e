"""Interface of a verb of the command line."""

from __future__ import annotations

from argparse import ArgumentParser
from argparse import Namespace
from typing import Protocol

from rich.console import Console

__all__ = ["OVERRIDES_HELP", "Verb"]

OVERRIDES_HELP = (
    "set a key of CONFIG (the value is YAML), or remove one with ~key: quantizer.backend=openvino ~fallback"
)


class Verb(Protocol):
    """Verb: ``quantizer NAME ...``."""

    name: str
    """The word on the command line."""

    help: str
    """One line for the list of verbs; the verb's own help starts with it."""

    epilog: str
    """A command that works, and what it prints."""

    rest: str | None
    """The argument that also takes words after an option, which argparse would refuse; None: there is none."""

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
            QuantizerError: what the user has to change.
        """
