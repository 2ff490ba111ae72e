"""``quantizer run``: from a YAML file to a calibrated engine and a report."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantizer.cli.output import OVERRIDES_HELP, require_one_process
from quantizer.config import load_run
from quantizer.config.sweep import Sweep, read_sweep
from quantizer.errors import QuantizerError
from quantizer.utils.paths import is_file

_MANY = 50
"""A sweep of more runs is asked about first."""


class Run:
    """Verb that calibrates, quantizes, exports, builds, measures and reports, as a YAML file says; or several times."""

    name = "run"
    help = "make the engine and the report that a YAML file describes, or those of a sweep"
    rest: str | None = "overrides"
    epilog = """\
example:
  quantizer run configs/minilm-sentiment-int8.yaml quantizer.activations.percentile=99.9 --output runs/p999

Several values, such as quantizer.backend=openvino,onnxruntime fallback.num=2,4, make a sweep: a run for each
combination in a folder of its own, and a comparison of all. In brackets, [a, b] is one value.

The folder is complete when the command ends well, and absent otherwise. One that holds anything that no run wrote is
kept, with --force too."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        parser.add_argument(
            "overrides",
            metavar="key=value",
            nargs="*",
            help=f"{OVERRIDES_HELP}; a,b without brackets makes a run with each; more files (.yaml) are runs too",
        )
        parser.add_argument("--output", metavar="DIR", type=Path, help="folder to write (default: `output` in CONFIG)")
        parser.add_argument("--force", action="store_true", help="replace the folder of a run that stands there")
        parser.add_argument(
            "--jobs", metavar="N", type=int, default=1, help="processes of a sweep, which slow each other (default: 1)"
        )
        parser.add_argument(
            "--launcher", choices=["submitit"], help="hand the N jobs of a sweep to Slurm (default: this machine)"
        )
        parser.add_argument("--yes", action="store_true", help=f"do not ask before a sweep of more than {_MANY} runs")

    def __call__(self, args: Namespace, console: Console) -> int:
        files, overrides = files_and_overrides(args.overrides)
        paths = [args.config, *files]
        sweep = read_sweep(paths, overrides)
        if args.launcher is not None and sweep.is_single:
            raise QuantizerError("--launcher is for a sweep, and this is one run; expected several values of a key")
        if not sweep.is_single:
            require_one_process("a sweep")
            return self._sweep(sweep, args, console)
        config = load_run(args.config, overrides)
        # Imported here, so that a mistake in the file is reported before the seconds that these imports take.
        from quantizer.pipeline.processes import process_group
        from quantizer.pipeline.run import run

        with process_group():
            run(config, args.output, args.force, console)
        return 0

    def _sweep(self, sweep: Sweep, args: Namespace, console: Console) -> int:
        """Carry out a sweep; 1 if one of its runs failed."""
        if args.jobs < 1:
            raise QuantizerError(f"--jobs {args.jobs}: expected a number of processes, 1 or more")
        if sweep.count > _MANY and not args.yes:
            _ask(sweep.count, console)
        folder = Path(sweep.folder() if args.output is None else args.output)
        runs = sweep.runs(folder)
        from quantizer.pipeline.sweep import COMPARISON, carry_out_sweep
        from quantizer.report.compare_shown import print_comparison

        found = carry_out_sweep(runs, folder, console, force=args.force, jobs=args.jobs, launcher=args.launcher)
        print_comparison(found, folder / COMPARISON, console)
        return 1 if found.failed else 0


def files_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that name files, and those that are overrides."""
    files = [word for word in words if _is_file(word)]
    return files, [word for word in words if not _is_file(word)]


def _is_file(word: str) -> bool:
    """Return whether an argument names a file and is no override."""
    return "=" not in word and not word.startswith("~") and (word.endswith((".yaml", ".yml")) or is_file(Path(word)))


def _ask(count: int, console: Console) -> None:
    """Ask whether so many runs are meant."""
    what = f"this sweep has {count:,} runs"
    if not sys.stdin.isatty():
        raise QuantizerError(f"{what}, more than {_MANY}; expected fewer values, or --yes if so many are meant")
    if console.input(f"{what}. Carry out all of them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise QuantizerError(f"{what}; nothing was started")
