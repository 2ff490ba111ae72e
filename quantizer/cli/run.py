"""``quantizer run``: from a YAML file to a calibrated engine and a report."""

from __future__ import annotations

from argparse import ArgumentParser
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from quantizer.cli.one_process import require_one_process
from quantizer.cli.verb import OVERRIDES_HELP
from quantizer.config import load_run

__all__ = ["Run"]


class Run:
    """Verb that calibrates, quantizes, exports, builds, measures and reports, as a YAML file says."""

    name = "run"
    help = "make the engine and the report that a YAML file describes"
    rest: str | None = "overrides"
    epilog = """\
example:
  quantizer run configs/minilm-sentiment-int8.yaml quantizer.activations.percentile=99.9 --output runs/p999

The folder is complete when the command ends well, and absent otherwise. One that holds anything that no run wrote is
kept, with --force too."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        parser.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES_HELP)
        parser.add_argument("--output", metavar="DIR", type=Path, help="folder to write (default: `output` in CONFIG)")
        parser.add_argument("--force", action="store_true", help="replace the folder of a run that stands there")

    def __call__(self, args: Namespace, console: Console) -> int:
        require_one_process("quantizer run")
        config = load_run(args.config, args.overrides)
        # Imported here, so that a mistake in the file is reported before the seconds that these imports take.
        from quantizer.runs.run import run

        run(config, args.output, args.force, console)
        return 0
