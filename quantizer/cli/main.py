"""Entry point of ``quantizer``: parses the command line, runs a command, and handles signals.

Exit codes: 0 success, 1 an error with a message, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. Temporary files
are removed in all cases.
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
from quantizer.cli.diagnose import Diagnose
from quantizer.cli.inspect import Inspect
from quantizer.cli.output import Verb, parser_of, print_error, standard_output, warnings_without_place
from quantizer.cli.run import Run
from quantizer.cli.show import Show
from quantizer.cli.validate import Validate
from quantizer.config.describe import nearest
from quantizer.errors import QuantizerError, is_out_of_memory
from quantizer.plan.targets import AUTO, profiles

_SHELLS = ("bash", "zsh", "fish", "tcsh")

_FILES = {"config", "overrides", "model", "weights", "calibration", "tuning", "evaluation"}
"""Text arguments that may name a file."""


class Completion:
    """Command that prints a shell completion script, which shtab generates from the parser."""

    name = "completion"
    help = "print the completion script for bash, zsh, fish or tcsh"
    list_argument: str | None = None
    epilog = """\
example:
  quantizer completion bash

To load it into every shell, add  eval "$(quantizer completion bash)"  to ~/.bashrc. For zsh, add the line to ~/.zshrc
after compinit. For fish, write the script to ~/.config/fish/completions/quantizer.fish."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._verbs = verbs

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"one of {', '.join(_SHELLS)}")

    def __call__(self, args: Namespace, console: Console) -> int:
        # Imported here because no other command needs it.
        import shtab

        parser = parser_of([*self._verbs, self])
        for action in _actions(parser):
            if action.dest in ("backend", "target"):
                action.choices = [AUTO, *profiles.names()] if action.dest == "backend" else profiles.names()
            elif action.type is Path or action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        # Not printed by the console, which would break lines at the width of the terminal.
        print(shtab.complete(parser, args.shell))
        return 0


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    """Yield all arguments of a parser and its subparsers."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, when a supervisor or a shutdown ends the process."""

    number = signal.SIGTERM


class HungUp(Terminated):
    """Raised on SIGHUP, when the process loses its terminal."""

    number = signal.SIGHUP


_KINDS = {kind.number: kind for kind in (Terminated, HungUp)}


@contextmanager
def end_as_on_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` on the first SIGTERM or SIGHUP, and ignore later signals, which would stop the cleanup.

    Signals with another handler, or ignored as under ``nohup``, are left alone.
    """
    process, raised = os.getpid(), False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal raised
        if os.getpid() != process:
            # A forked worker inherits this handler, but the sender expects the default action: the process ends.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not raised:
            raised = True
            raise _KINDS[signal.Signals(number)]

    handled: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in _KINDS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, end)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


_WORKING: tuple[Verb, ...] = (Convert(), Run(), Diagnose(), Compare(), Validate(), Inspect(), Show(), Check())
VERBS: tuple[Verb, ...] = (*_WORKING, Completion(_WORKING))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
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
        print_error(QuantizerError(f"there is too little memory: use smaller batches or a smaller model ({first})"))
        return 1
    except KeyboardInterrupt as stop:
        name, number = ("terminated", stop.number) if isinstance(stop, Terminated) else ("interrupted", signal.SIGINT)
        # Printing fails if the terminal is closed.
        with suppress(OSError):
            outcome = stop.args[0] if stop.args else "nothing was written"
            print(f"{name}: {outcome}", file=sys.stderr)
        return 128 + number


def _carried_out(verb: Verb, args: Namespace) -> int:
    """Run a command and print its error here, before a SIGTERM of torchrun can prevent it."""
    try:
        with standard_output(), warnings_without_place():
            return verb(args, Console())
    except QuantizerError as error:
        print_error(error)
        return 1


def _suggestion(parser: ArgumentParser, unknown: Sequence[str]) -> str:
    """Return a question with the option that the first unknown one may mean; empty if none is similar."""
    word = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    meant = nearest(word.lstrip("-"), [option.lstrip("-") for option in options])
    return f"; did you mean --{meant}?" if meant else ""


def _parse(argv: Sequence[str] | None) -> tuple[Verb, Namespace]:
    args, more = parser_of(VERBS).parse_known_args(argv)
    chosen: Verb = args.verb
    # argparse ends a list of arguments at the first option. Arguments after the option also belong to the list.
    if more and (chosen.list_argument is None or any(word.startswith("-") for word in more)):
        args.parser.error(f"unrecognized arguments: {' '.join(more)}{_suggestion(args.parser, more)}")
    if more and chosen.list_argument is not None:
        setattr(args, chosen.list_argument, [*getattr(args, chosen.list_argument), *more])
    return chosen, args
