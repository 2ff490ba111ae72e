"""``quantizer``: the verbs, and the script that completes them in a shell.

Exit codes: 0 success; 1 an error that the message explains; 2 wrong usage; 130 ended by Ctrl-C, 143 by SIGTERM, 129 by
SIGHUP, all with the same cleanup.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from quantizer.cli.check import Check
from quantizer.cli.compare import Compare
from quantizer.cli.convert import Convert
from quantizer.cli.inspect import Inspect
from quantizer.cli.output import Verb, parser_of, print_error, standard_output
from quantizer.cli.run import Run
from quantizer.cli.show import Show
from quantizer.cli.validate import Validate
from quantizer.errors import QuantizerError, is_out_of_memory
from quantizer.plan.targets import AUTO, profiles

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


class Terminated(KeyboardInterrupt):
    """SIGTERM: a supervisor or a shutdown ends the process."""

    number = signal.SIGTERM


class HungUp(Terminated):
    """SIGHUP: the process lost its terminal."""

    number = signal.SIGHUP


_KINDS = {kind.number: kind for kind in (Terminated, HungUp)}


@contextmanager
def end_as_on_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` on the first SIGTERM or SIGHUP, and ignore later ones, which would stop the cleanup.

    A signal that has another handler, or is ignored as under ``nohup``, keeps its handling.
    """
    process, told = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal told
        if os.getpid() != process:
            # A forked worker inherits this handler; its sender expects the default action, which ends the process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not told:
            told = True
            raise _KINDS[signal.Signals(number)]

    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _KINDS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


_WORKING: tuple[Verb, ...] = (Convert(), Run(), Compare(), Validate(), Inspect(), Show(), Check())
VERBS: tuple[Verb, ...] = (*_WORKING, Completion(_WORKING))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    try:
        verb, args = _parse(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        with end_as_on_ctrl_c():
            return _carried_out(verb, args)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).splitlines() or ["MemoryError"])[0]
        print_error(QuantizerError(f"there is too little memory: use smaller batches, or a smaller model ({first})"))
        return 1
    except KeyboardInterrupt as stop:
        name, number = ("terminated", stop.number) if isinstance(stop, Terminated) else ("interrupted", signal.SIGINT)
        # Printing fails if the terminal is gone.
        with suppress(OSError):
            what = stop.args[0] if stop.args else "nothing was written"
            print(f"{name}: {what}", file=sys.stderr)
        return 128 + number


def _carried_out(verb: Verb, args: Namespace) -> int:
    """Carry out a verb; an error is printed here, where the SIGTERM that torchrun sends then cannot keep it back."""
    try:
        with standard_output():
            return verb(args, Console())
    except QuantizerError as error:
        print_error(error)
        return 1


def _parse(argv: Sequence[str] | None) -> tuple[Verb, Namespace]:
    args, more = parser_of(VERBS).parse_known_args(argv)
    chosen: Verb = args.verb
    # argparse ends a list of arguments at the first option; arguments after the option belong to the list too.
    if more and (chosen.rest is None or any(word.startswith("-") for word in more)):
        args.parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more and chosen.rest is not None:
        setattr(args, chosen.rest, [*getattr(args, chosen.rest), *more])
    return chosen, args
