"""Entry point of the command line.

Exit codes: 0 success; 1 an error that the message explains; 2 wrong usage; 130 ended by Ctrl-C, 143 by SIGTERM, 129 by
SIGHUP, all with the same cleanup.
"""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from quantizer.cli.check import Check
from quantizer.cli.compare import Compare
from quantizer.cli.completion import Completion
from quantizer.cli.convert import Convert
from quantizer.cli.inspect import Inspect
from quantizer.cli.output import print_error, standard_output
from quantizer.cli.run import Run
from quantizer.cli.show import Show
from quantizer.cli.signals import Terminated, end_as_on_ctrl_c
from quantizer.cli.validate import Validate
from quantizer.cli.verb import Verb, parser_of
from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.errors import QuantizerError

_WORKING: tuple[Verb, ...] = (Convert(), Run(), Compare(), Validate(), Inspect(), Show(), Check())
VERBS: tuple[Verb, ...] = (*_WORKING, Completion(_WORKING))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit code.
    """
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
