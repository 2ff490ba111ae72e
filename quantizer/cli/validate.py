"""``quantizer validate``: lists all problems of YAML files, and of what their runs need on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from quantizer.cli.output import OVERRIDES_HELP, print_error
from quantizer.cli.run import files_and_overrides
from quantizer.config import RunConfig, dump_yaml, load_run
from quantizer.config.load import valid_sections
from quantizer.config.schema import check_run
from quantizer.config.sweep import SweepRun, read_sweep
from quantizer.errors import ConfigError, QuantizerError


class Validate:
    """Command that checks run files without running them.

    It checks the file first, then what the run needs: packages, data and labels, the checkpoint, the output folder and
    the machine. ``quantizer run`` starts with the same checks.
    """

    name = "validate"
    help = "check YAML files and what their runs need on this machine, and estimate memory"
    list_argument: str | None = "overrides"
    epilog = """\
example:
  quantizer validate --file-only configs/minilm-sentiment-int8.yaml quantizer.backend=torch
  ok: configs/minilm-sentiment-int8.yaml"""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of a run")
        parser.add_argument(
            "overrides",
            metavar="key=value",
            nargs="*",
            help=f"{OVERRIDES_HELP}; as for `run`; further .yaml files are also checked",
        )
        parser.add_argument("-v", "--verbose", action="store_true", help="print each file with all defaults filled in")
        parser.add_argument(
            "--file-only",
            action="store_true",
            help="check only the file, not packages, data, checkpoint, output folder and machine",
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        code = 0
        files, overrides = files_and_overrides(args.overrides)
        for path in (args.config, *files):
            try:
                sweep = read_sweep([path], overrides)
                runs = [] if sweep.is_single else sweep.runs(Path(sweep.folder()))
                configs = [run.config for run in runs] or [load_run(path, overrides)]
            except ConfigError as error:
                print_error(error if args.file_only else _with_others(error, path, overrides))
                code = 1
                continue
            try:
                for config in configs if args.file_only or runs else ():
                    check_run(config)
                notes = [] if args.file_only else _sweep_checked_here(runs) if runs else _checked_here(configs[0])
            except ConfigError as error:
                print_error(error)
                code = 1
                continue
            except QuantizerError as error:
                print_error(QuantizerError(f"{path}: {error}"))
                code = 1
                continue
            console.out(f"ok: {path}{f', {len(runs)} runs' if runs else ''}", highlight=False)
            for line in notes:
                console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
            if args.verbose:
                console.out("\n".join(map(dump_yaml, configs)), highlight=False)
        return code


def _with_others(error: ConfigError, path: str, overrides: Sequence[str]) -> ConfigError:
    """Return the problems of an invalid file, with further problems found by checking its valid sections."""
    from quantizer.pipeline.preflight import faults_of

    try:
        others = faults_of(valid_sections(path, overrides))
    except ConfigError:
        # The file cannot be read, or an override has several values.
        return error
    known = "\n".join(error.problems)
    return ConfigError([*error.problems, *(f"{path}: {other}" for other in others if other not in known)])


def _sweep_checked_here(runs: Sequence[SweepRun]) -> list[str]:
    """Check what the runs of a sweep need on this machine, and return notes."""
    from quantizer.pipeline.sweep import ready_to_sweep

    ready = ready_to_sweep(runs)
    if ready.faults:
        raise QuantizerError("; ".join(f"{name} cannot start: {fault}" for name, fault in ready.faults.items()))
    return list(ready.notes)


def _checked_here(config: RunConfig) -> list[str]:
    """Check what a run needs on this machine, and return notes and an estimate."""
    # Imported here, so that a mistake in the file is reported before these slow imports.
    from quantizer.pipeline.preflight import configured_warnings, ready_to_run
    from quantizer.pipeline.run import RUN

    ready = ready_to_run(config, Path(config.output).absolute(), RUN, force=None)
    warned = [f"warning: {line}" for line in configured_warnings(config, len(ready.examples.tuning))]
    return [*warned, *ready.notes, *([ready.estimate] if ready.estimate else [])]
