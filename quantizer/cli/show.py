"""``quantizer show``: the result of a finished run."""

from __future__ import annotations

from argparse import ArgumentParser
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from quantizer.errors import QuantizerError

__all__ = ["Show"]


class Show:
    """Print the summary of the report in a run folder."""

    name = "show"
    help = "print the result of a finished run"
    rest: str | None = None
    epilog = """\
example:
  quantizer show runs/minilm-sentiment-int8"""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", metavar="RUN_FOLDER", type=Path, help="folder that `quantizer run` wrote")

    def __call__(self, args: Namespace, console: Console) -> int:
        folder: Path = args.folder
        if not (folder / "report.json").is_file():
            what = "holds no report.json" if folder.is_dir() else "is no folder"
            raise QuantizerError(f"{folder} {what}; expected a folder that `quantizer run` wrote, such as runs/NAME")
        from quantizer.report.summary import print_summary

        print_summary(folder, console)
        return 0
