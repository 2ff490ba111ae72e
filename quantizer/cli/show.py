"""``quantizer show``: the result of a finished run, or the precision of an engine's layers."""

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
    """Verb that prints the summary of the report in a run folder, or the contents of an engine or ONNX file."""

    name = "show"
    help = "print the result of a finished run, or what an engine runs in which precision"
    rest: str | None = None
    epilog = """\
examples:
  quantizer show runs/minilm-sentiment-int8
  quantizer show runs/minilm-sentiment-int8 --layers
  quantizer show runs/minilm-sentiment-int8/model.engine
  quantizer show model.onnx --backend onnxruntime

Of the folder of a sweep, the commands that show its runs are printed.

An engine is run on made-up inputs. One that cannot run here is not verified: what the ONNX file of its name asks for is
printed instead. An ONNX file without --backend shows what its Q/DQ asks for."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "path", metavar="PATH", type=Path, help="folder that `quantizer run` wrote, an engine file or an ONNX file"
        )
        parser.add_argument("--backend", metavar="NAME", help="whose engine it is (default: what the file says)")
        parser.add_argument("--batch", metavar="N", type=int, default=8, help="samples in a batch (default: 8)")
        parser.add_argument("--sequence", metavar="N", type=int, default=128, help="tokens in a sample (default: 128)")
        parser.add_argument(
            "--layers", action="store_true", help="of a run: its engine's precisions and slowest layers"
        )
        parser.add_argument("--threads", metavar="N", type=int, default=1, help="threads of the CPU (default: 1)")
        parser.add_argument(
            "--trust", action="store_true", help="run the native code of a compiled torch engine: you know who built it"
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        path: Path = args.path
        restore_folder(path)
        if is_file(path):
            from quantizer.engines import InputSizes, inspect_file
            from quantizer.report.terminal import print_inspection

            sizes = InputSizes(args.batch, args.sequence)
            found = inspect_file(path, args.backend, threads=args.threads, sizes=sizes, trust=args.trust)
            print_inspection(found, console)
            return 0
        if not is_file(path / "report.json"):
            from quantizer.report.compare import run_folders

            if runs := run_folders(path):
                _print_runs(path, runs, console)
                return 0
            what = "holds no report.json" if is_folder(path) else "is no folder"
            raise QuantizerError(
                f"{path} {what}; expected a folder that `quantizer run` wrote, such as runs/NAME, or an engine file"
            )
        if args.layers:
            from quantizer.report.terminal import print_layers

            print_layers(path, console)
            return 0
        from quantizer.report.terminal import print_summary

        print_summary(path, console)
        return 0


def _print_runs(folder: Path, runs: Sequence[Path], console: Console) -> None:
    """Print the commands that compare the runs in a folder, and that show each."""
    lines = [f"{folder} holds {len(runs)} finished {'run' if len(runs) == 1 else 'runs'}:"]
    lines += [f"  quantizer show {shlex.quote(str(run))}" for run in runs]
    lines += [f"  quantizer compare {shlex.quote(str(folder))}"] if len(runs) > 1 else []
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
