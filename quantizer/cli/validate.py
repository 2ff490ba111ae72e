"""``quantizer validate``: all problems of YAML files."""

from __future__ import annotations

from argparse import ArgumentParser
from argparse import Namespace

from rich.console import Console

from quantizer.cli.output import print_error
from quantizer.cli.output import print_warning
from quantizer.config import dump_yaml
from quantizer.config import load_run
from quantizer.config.feasibility import check_run
from quantizer.errors import ConfigError

__all__ = ["Validate"]


class Validate:
    """Verb that checks run files without running them: keys, types, names, and values that contradict each other."""

    name = "validate"
    help = "check YAML files; lists every problem with its line"
    rest: str | None = "configs"
    epilog = """\
example:
  quantizer validate configs/minilm-sentiment-int8.yaml
  ok: configs/minilm-sentiment-int8.yaml"""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML file of a run")
        parser.add_argument("-v", "--verbose", action="store_true", help="print each file with all defaults filled in")

    def __call__(self, args: Namespace, console: Console) -> int:
        code = 0
        for path in args.configs:
            try:
                config = load_run(path)
                check_run(config)
            except ConfigError as error:
                print_error(error)
                code = 1
                continue
            if config.fallback is not None and config.fallback.max_drop is not None:
                # Imported here, as it takes seconds, and most files have no budget.
                from quantizer.runs.budget.configured import configured_warnings

                for line in configured_warnings(config):
                    print_warning(f"{path}: {line}")
            console.out(f"ok: {path}", highlight=False)
            if args.verbose:
                console.out(dump_yaml(config), highlight=False)
        return code
