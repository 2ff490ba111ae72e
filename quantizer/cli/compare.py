"""``quantizer compare``: compares finished runs in a table, on a page and in a CSV file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console


class Compare:
    """Command that compares finished runs in a table, and optionally on a page and in a CSV file."""

    name = "compare"
    help = "compare finished runs: scores or outputs, speed, size and settings; --html FILE writes a page"
    list_argument: str | None = "runs"
    epilog = """\
examples:
  quantizer compare runs/fast runs/balanced --html runs.html --csv runs.csv
  quantizer compare runs/sst2

Scores on different samples, and latencies of different machines or shapes, are listed but not compared."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "runs",
            metavar="RUN",
            nargs="+",
            type=Path,
            help="folder of a run, or its report.json; the folder of a sweep stands for all its finished runs",
        )
        parser.add_argument(
            "--html",
            metavar="FILE",
            type=Path,
            help="page to write, with all different settings and pairwise comparisons (default: none)",
        )
        parser.add_argument(
            "--csv", metavar="FILE", type=Path, help="CSV file to write, with one line per run (default: none)"
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        from quantizer.report.compare import compare, read_runs
        from quantizer.report.compare_shown import print_comparison, write_comparison

        # argparse does not convert values after an option to paths.
        comparison = compare(read_runs([Path(run) for run in args.runs]))
        write_comparison(comparison, args.html, args.csv, "comparison" if args.html is None else args.html.stem)
        print_comparison(comparison, args.html, console)
        return 0
