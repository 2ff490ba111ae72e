"""The command ``quantizer inspect``: what would be quantized in a model."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax

from quantizer.config import RunConfig
from quantizer.pipeline.function_source import returned_module
from quantizer.quantizer import Quantizer
from quantizer.tasks import load_model


def inspect(config: RunConfig, diff: bool, console: Console) -> None:
    """Print what would be quantized in the model, or with ``diff`` also the rewritten source."""
    named = config.model
    if named.task is None:
        model = returned_module(named)
    else:
        model = load_model(named.source, named.task, named.attention, named.texts)
    quantizer = Quantizer(config.quantizer)
    console.print(quantizer.inspect(model).text(), markup=False, highlight=False, soft_wrap=True)
    if diff and console.is_terminal:
        console.print(Syntax(quantizer.diff(model), "diff", background_color="default", word_wrap=True))
    elif diff:
        # For a file or a pipe, lines must not be cut or wrapped.
        console.out(quantizer.diff(model), highlight=False)
