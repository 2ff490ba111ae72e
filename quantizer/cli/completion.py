"""``quantizer completion``: the script with which a shell completes verbs, options, files and backends."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from quantizer.cli.output import Verb, parser_of
from quantizer.targets import AUTO, profiles

_SHELLS = ("bash", "zsh", "fish", "tcsh")

_FILES = {"config", "overrides", "model", "weights", "calibration", "tuning", "evaluation"}
"""Arguments that may name a file and are texts."""


class Completion:
    """Verb that prints the completion script of a shell, which shtab makes from the parser."""

    name = "completion"
    help = "print what makes bash, zsh, fish or tcsh complete verbs, options, files and backends"
    rest: str | None = None
    epilog = """\
example:
  quantizer completion bash

The line  eval "$(quantizer completion bash)"  in ~/.bashrc loads it into every shell, or with zsh in ~/.zshrc, after
compinit. With fish, write it to ~/.config/fish/completions/quantizer.fish."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._verbs = verbs

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"one of {', '.join(_SHELLS)}")

    def __call__(self, args: Namespace, console: Console) -> int:
        # Imported here because no other verb needs it.
        import shtab

        parser = parser_of([*self._verbs, self])
        for action in _actions(parser):
            if action.dest in ("backend", "target"):
                action.choices = [AUTO, *profiles.names()] if action.dest == "backend" else profiles.names()
            elif action.type is Path or action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        # Not by the console, which breaks lines at the width of the terminal.
        print(shtab.complete(parser, args.shell))
        return 0


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    """Yield the arguments of a parser and of those of its verbs."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action
