"""``quantizer run``: carries out the run or the sweep that a YAML file describes."""

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
"""A sweep of more runs needs a confirmation."""


class Run:
    """Command that calibrates, quantizes, exports, builds, benchmarks and reports, for one run or a sweep."""

    name = "run"
    help = "build the engine and write the report of a YAML file, or of each run of a sweep"
    list_argument: str | None = "overrides"
    epilog = """\
example:
  quantizer run configs/minilm-sentiment-int8.yaml quantizer.activations.percentile=99.9 --output runs/p999

Several values of a key, such as quantizer.backend=openvino,onnxruntime fallback.num=2,4, make a sweep: one run per
combination, each in its own folder, and a comparison of all runs. A list in brackets, [a, b], is one value.

The output folder appears only if the command succeeds. --force does not replace a folder with files that no run
wrote."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        parser.add_argument(
            "overrides",
            metavar="key=value",
            nargs="*",
            help=f"{OVERRIDES_HELP}; a,b without brackets makes one run per value; further .yaml files are further "
            "runs",
        )
        parser.add_argument("--output", metavar="DIR", type=Path, help="output folder (default: `output` in CONFIG)")
        parser.add_argument("--force", action="store_true", help="replace the output folder of an earlier run")
        parser.add_argument(
            "--jobs",
            metavar="N",
            type=int,
            default=1,
            help="parallel processes of a sweep; they slow each other down (default: 1)",
        )
        parser.add_argument(
            "--launcher",
            choices=["submitit"],
            help="submit the N jobs of a sweep to Slurm (default: run on this machine)",
        )
        parser.add_argument(
            "--yes", action="store_true", help=f"start a sweep of more than {_MANY} runs without asking"
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        files, overrides = files_and_overrides(args.overrides)
        paths = [args.config, *files]
        sweep = read_sweep(paths, overrides)
        if args.launcher is not None and sweep.is_single:
            raise QuantizerError(
                "--launcher is only for a sweep, and this is one run; expected several values of a key"
            )
        if not sweep.is_single:
            require_one_process("a sweep")
            return self._sweep(sweep, args, console)
        config = load_run(args.config, overrides)
        # Imported here, so that a mistake in the file is reported before these slow imports.
        from quantizer.pipeline.processes import process_group
        from quantizer.pipeline.run import run

        with process_group():
            run(config, args.output, args.force, console)
        return 0

    def _sweep(self, sweep: Sweep, args: Namespace, console: Console) -> int:
        """Carry out a sweep and return the exit code: 1 if a run failed."""
        if args.jobs < 1:
            raise QuantizerError(f"--jobs {args.jobs}: expected at least 1 process")
        if sweep.count > _MANY and not args.yes:
            _ask(sweep.count, console)
        folder = Path(sweep.folder() if args.output is None else args.output)
        runs = sweep.runs(folder)
        from quantizer.pipeline.sweep import COMPARISON, carry_out_sweep
        from quantizer.report.compare_shown import print_comparison

        comparison = carry_out_sweep(runs, folder, console, force=args.force, jobs=args.jobs, launcher=args.launcher)
        print_comparison(comparison, folder / COMPARISON, console)
        return 1 if comparison.failed else 0


def files_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into names of files and overrides."""
    files = [word for word in words if _is_file(word)]
    return files, [word for word in words if not _is_file(word)]


def _is_file(word: str) -> bool:
    """Return whether an argument names a file, and is not an override."""
    return "=" not in word and not word.startswith("~") and (word.endswith((".yaml", ".yml")) or is_file(Path(word)))


def _ask(count: int, console: Console) -> None:
    """Ask for a confirmation of many runs."""
    summary = f"this sweep has {count:,} runs"
    if not sys.stdin.isatty():
        raise QuantizerError(f"{summary}, more than {_MANY}; use fewer values, or confirm with --yes")
    if console.input(f"{summary}. Run all of them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise QuantizerError(f"{summary}; nothing was started")
