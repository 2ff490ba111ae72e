"""``quantizer inspect``: the sites that would be quantized, before any calibration."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from quantizer.cli.output import OVERRIDES_HELP
from quantizer.config import load_run


class Inspect:
    """Verb that loads the model of a run file and shows its sites."""

    name = "inspect"
    help = "show which sites of the model a YAML file would quantize, and why not the others"
    rest: str | None = "overrides"
    epilog = """\
example:
  quantizer inspect configs/minilm-sentiment-int8.yaml quantizer.sites.matmul=false --diff"""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        parser.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES_HELP)
        parser.add_argument("--diff", action="store_true", help="also print the rewritten source as a unified diff")

    def __call__(self, args: Namespace, console: Console) -> int:
        config = load_run(args.config, args.overrides)
        # Imported here, so that a mistake in the file is reported before the seconds that these imports take.
        from quantizer.pipeline.inspect_model import inspect

        inspect(config, args.diff, console)
        return 0
