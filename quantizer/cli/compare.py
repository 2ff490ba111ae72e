"""``quantizer compare``: runs side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console


class Compare:
    """Verb that compares finished runs: a table here, a page, and a CSV file."""

    name = "compare"
    help = "compare finished runs: scores or outputs, speed, size, and what differs; --html FILE writes a page"
    rest: str | None = "runs"
    epilog = """\
examples:
  quantizer compare runs/fast runs/balanced --html runs.html --csv runs.csv
  quantizer compare runs/sst2

Scores on other samples, and times of other machines or shapes, are shown and not compared, and it is said."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "runs",
            metavar="RUN",
            nargs="+",
            type=Path,
            help="folder that `quantizer run` wrote, or its report.json; that of a sweep is all its finished runs",
        )
        parser.add_argument(
            "--html",
            metavar="FILE",
            type=Path,
            help="page to write, with all settings that differ and all pairs (default: none)",
        )
        parser.add_argument("--csv", metavar="FILE", type=Path, help="CSV file to write, a line for each run")

    def __call__(self, args: Namespace, console: Console) -> int:
        from quantizer.report.compare import compare, read_runs
        from quantizer.report.compare_shown import print_comparison, write_comparison

        # After an option these are texts, which argparse did not convert.
        found = compare(read_runs([Path(run) for run in args.runs]))
        write_comparison(found, args.html, args.csv, "comparison" if args.html is None else args.html.stem)
        print_comparison(found, args.html, console)
        return 0
