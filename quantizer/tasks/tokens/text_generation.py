"""The task ``text-generation``: the token after each one of a text, scored by perplexity.

Shapes: N rows, B rows of a batch, S tokens, V tokens of the vocabulary.

The task ``text-generation-with-past``: token by token, with keys and values of former tokens as inputs and outputs.

Shapes: B rows of a batch, S tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.counted import CountedTask
from quantizer.tasks.datasets.rows import Plain, Row
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import Predictions, Run, tasks
from quantizer.tasks.tokens.decode_step import CachedInputs, DecodeStep
from quantizer.tasks.tokens.parts import flips, per_token, whole_numbers


@tasks.add("text-generation")
class TextGeneration(CountedTask):
    """Texts to the loss of each next token and the likeliest one [N x S x 2], scored by perplexity.

    The model reads a whole text at once, as it does before it generates (prefill); no token is generated.
    """

    name = "text-generation"
    auto_class = "AutoModelForCausalLM"
    output_name = "logits"
    metric_name = "perplexity"
    higher_is_better = False
    gives_vocabulary = True

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Plain, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the texts [N], whose own tokens are what is right."""
        return np.array([row.text for row in rows_of_kind(rows, Plain, self.name)], dtype=object)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        logits = first_output(result, self.output_name)
        ids = batch["input_ids"]
        rows = zip(per_token(logits, batch), per_token(ids, batch), strict=True)
        return [_next_tokens(row, own) for row, own in rows]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the likeliest next token at each place [N x S]; -1 where there is none."""
        return whole_numbers(outputs[..., 1])

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the sum of the losses of each row's tokens in nats, and their number [N x 2]."""
        losses = predictions.outputs[..., 0]
        there = ~np.isnan(losses)
        if not there.any():
            raise TaskError("no text has two tokens or more, so there is no next token to score: give longer texts")
        return np.stack([np.nansum(losses, axis=-1, dtype=np.float64), there.sum(axis=-1)], axis=-1)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the perplexity: e to the mean loss."""
        return np.exp(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of places where another token is the likeliest."""
        return {"label_flips": flips(float_predictions, other, float_predictions.decisions >= 0)}


def _next_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token after the first, and the likeliest one [S - 1 x 2], of logits [S x V]."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return torch.stack([losses, logits[:-1].argmax(dim=-1).float()], dim=-1)


@tasks.add("text-generation-with-past")
class TextGenerationWithPast(TextGeneration):
    """Texts to the loss of each next token and the likeliest one [N x S x 2], scored by perplexity.

    The first half of a text is read into an empty cache, the second half with the cache that came of it: the score
    covers what a cache in low precision, or an engine that reads it wrongly, would cost.
    """

    name = "text-generation-with-past"
    gives_vocabulary = False  # for one token a row, as it is checked and timed

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        """Return one step of the model, with its cache as inputs and outputs."""
        return DecodeStep(model)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        assert isinstance(model, DecodeStep)
        self._cached = CachedInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._cached

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return the later half of the tokens, with the cache of those before: one token has too few values to tell."""
        return self._cached.later_half(samples, batch, sequence)

    def answer(self, run: Run, batch: Batch) -> Sequence[torch.Tensor]:
        middle = batch["input_ids"].shape[1] // 2
        if not middle:
            return self.collect(run(batch), batch)
        made: list[object] = []

        def kept(first: Batch) -> object:
            made.append(run(first))
            return made[0]

        made.append(run(self._cached.split(batch, middle, kept)))
        logits = torch.cat([first_output(one, self.output_name) for one in made], dim=1)
        return self.collect(logits, batch)
