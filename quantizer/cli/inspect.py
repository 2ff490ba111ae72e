"""``quantizer inspect``: lists the sites that a run would quantize, without calibration."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from quantizer.cli.output import OVERRIDES_HELP
from quantizer.config import RunConfig, load_run


class Inspect:
    """Command that loads the model of a run file and lists its sites."""

    name = "inspect"
    help = "list the sites of a model that a YAML file would quantize, and why others are not quantized"
    list_argument: str | None = "overrides"
    epilog = """\
example:
  quantizer inspect configs/minilm-sentiment-int8.yaml quantizer.sites.matmul=false --diff"""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
        parser.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES_HELP)
        parser.add_argument(
            "--diff", action="store_true", help="also print the rewritten source code as a unified diff"
        )

    def __call__(self, args: Namespace, console: Console) -> int:
        config = load_run(args.config, args.overrides)
        inspect_model(config, args.diff, console)
        return 0


def inspect_model(config: RunConfig, diff: bool, console: Console) -> None:
    """Print the sites that would be quantized, and with ``diff`` also the rewritten source code."""
    # Imported here, so that a mistake in the file is reported before these slow imports.
    from rich.syntax import Syntax

    from quantizer.pipeline.function_source import returned_module
    from quantizer.quantizer import Quantizer
    from quantizer.tasks import load_model

    model_config = config.model
    if model_config.task is None:
        model = returned_module(model_config)
    else:
        model = load_model(model_config.source, model_config.task, model_config.attention, model_config.texts)
    quantizer = Quantizer(config.quantizer)
    console.print(quantizer.inspect(model).text(), markup=False, highlight=False, soft_wrap=True)
    if diff and console.is_terminal:
        console.print(Syntax(quantizer.diff(model), "diff", background_color="default", word_wrap=True))
    elif diff:
        # For a file or a pipe, lines must not be cut or wrapped.
        console.out(quantizer.diff(model), highlight=False)
