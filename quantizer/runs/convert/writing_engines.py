"""The engines of an encoder-decoder model, loaded from their folder alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.common.once_property import once_property
from quantizer.engines import Array, Engine
from quantizer.errors import QuantizerError
from quantizer.runs.run_context import engine_inputs
from quantizer.tasks import Batch, Sample
from quantizer.tasks.models import empty_model
from quantizer.tasks.seq2seq.writer import Writer, in_parts, written_tokens


def engine_run(engine: Engine, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs of a part's engine, of the inputs that it takes, in its types."""
    return {name: torch.from_numpy(value) for name, value in engine(engine_inputs(engine, batch)).items()}


@dataclass(frozen=True)
class ConvertedParts:
    """The engines of a model in parts with its tokenizer or processor, loaded from their folder alone.

    Attributes:
        config: the content of config.json.
        engines: the engine of each part, by its name.
        processor: a transformers tokenizer, or a processor of recordings that has one.
        inputs: makes the encoder's inputs of texts or recordings.
        folder: the folder with the model's own config.
    """

    config: dict[str, Any]
    engines: dict[str, Engine]
    processor: Any
    inputs: Callable[[Sequence[Sample]], dict[str, Array]]
    folder: Path

    @once_property
    def model(self) -> Any:
        """A model of transformers whose ``generate`` runs the engines: it takes all that this method does."""
        runs = {name: partial(engine_run, one) for name, one in self.engines.items()}
        return in_parts(empty_model(str(self.folder), self.config["task"]), runs)

    def generate(self, samples: Sequence[Sample], tokens: int | None = None) -> list[str]:
        """Return what the model writes for texts or recordings, as its own generation config says, without sampling."""
        if isinstance(samples, str):
            raise QuantizerError("generate() takes a list of texts or paths, and was given one: put it into a list")
        (fewest, _, most), longest = self.config["dimensions"]["batch"], self.config["tokens"]
        if not fewest <= len(samples) <= most:
            raise QuantizerError(f"{len(samples)} samples at once, and these engines were built for {fewest} to {most}")
        if tokens is not None and not 1 <= tokens <= longest:
            raise QuantizerError(
                f"{tokens} tokens, and these engines were built to write 1 to {longest}: ask for fewer, or make them "
                "with a larger --new-tokens, or model.new_tokens in a run"
            )
        batch = {name: torch.from_numpy(value) for name, value in self.inputs(samples).items()}
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        with torch.no_grad():
            made = Writer(self.model, tokens or longest)(**batch)["sequences"]
        rows = [row.tolist() for row in written_tokens(made, tokenizer.pad_token_id)]
        return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
