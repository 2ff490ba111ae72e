"""``quantizer show``: prints the result or the coverage of a finished run, or the precision of an engine's layers."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantizer.errors import QuantizerError
from quantizer.utils.files import restore_folder
from quantizer.utils.paths import is_file, is_folder


class Show:
    """Command that prints the report of a run folder, or the layers of an engine or ONNX file."""

    name = "show"
    help = "print the result or the coverage of a finished run, or the precision of an engine's layers"
    list_argument: str | None = None
    epilog = """\
examples:
  quantizer show runs/minilm-sentiment-int8
  quantizer show runs/minilm-sentiment-int8 --layers
  quantizer show runs/minilm-sentiment-int8 --coverage
  quantizer show runs/minilm-sentiment-int8/model.engine
  quantizer show model.onnx --backend onnxruntime

For the folder of a sweep, the commands that show its runs are printed.

An engine file is run on generated inputs. If it cannot run on this machine, the precisions that its ONNX file requests
are printed instead, unverified. An ONNX file without --backend shows the precisions that its Q/DQ nodes request."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("path", metavar="PATH", type=Path, help="folder of a run, an engine file or an ONNX file")
        parser.add_argument("--backend", metavar="NAME", help="backend of the engine (default: read from the file)")
        parser.add_argument("--batch", metavar="N", type=int, default=8, help="samples per batch (default: 8)")
        parser.add_argument("--sequence", metavar="N", type=int, default=128, help="tokens per text (default: 128)")
        parser.add_argument(
            "--layers", action="store_true", help="for a run: precisions and slowest layers of its engine"
        )
        parser.add_argument(
            "--coverage", action="store_true", help="for a run: the sites that are not quantized, with their reasons"
        )
        parser.add_argument("--threads", metavar="N", type=int, default=1, help="CPU threads (default: 1)")
        parser.add_argument(
            ("--trust"),
            action="store_true",
            help="run the native code of a compiled torch engine; use it only for engines that you trust",
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        path: Path = args.path
        restore_folder(path)
        if is_file(path):
            from quantizer.engines import InputSizes, inspect_file
            from quantizer.report.terminal import print_inspection

            sizes = InputSizes(args.batch, args.sequence)
            inspection = inspect_file(path, args.backend, threads=args.threads, sizes=sizes, trust=args.trust)
            print_inspection(inspection, console)
            return 0
        if not is_file(path / "report.json"):
            from quantizer.report.compare import run_folders

            if runs := run_folders(path):
                _print_runs(path, runs, console)
                return 0
            problem = "does not contain report.json" if is_folder(path) else "is not a folder"
            raise QuantizerError(
                f"{path} {problem}; expected the folder of a run, such as runs/NAME, or an engine file"
            )
        if args.layers:
            from quantizer.report.terminal import print_layers

            print_layers(path, console)
            return 0
        if args.coverage:
            from quantizer.report import read_record
            from quantizer.report.notebook import run_coverage

            record = read_record(path / "report.json")
            if not record.coverage:
                raise QuantizerError(f"{path}: the run quantized nothing, so there is no coverage to show")
            # As wide as the names need.
            console.print(run_coverage(record, console.width), markup=False, highlight=False, soft_wrap=True)
            return 0
        from quantizer.report.terminal import print_summary

        print_summary(path, console)
        return 0


def _print_runs(folder: Path, runs: Sequence[Path], console: Console) -> None:
    """Print the commands that show and compare the runs in a folder."""
    lines = [f"{folder} contains {len(runs)} finished {'run' if len(runs) == 1 else 'runs'}:"]
    lines += [f"  quantizer show {shlex.quote(str(run))}" for run in runs]
    lines += [f"  quantizer compare {shlex.quote(str(folder))}"] if len(runs) > 1 else []
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
