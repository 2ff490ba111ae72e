"""The task ``fill-mask``: the tokens that are hidden in a text, scored by the share that is found again.

Shapes: N rows, B rows of a batch, S tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Plain, Row
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, flips, per_token, whole_numbers
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks

_EVERY = 7
"""One in so many tokens is hidden: the 15% of BERT, at the same places in every run."""


@tasks.add("fill-mask")
class FillMask(CountedTask):
    """Texts with hidden tokens to the likeliest token at each place [N x S], scored by accuracy on those hidden."""

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    output_name = "logits"
    metric_name = "masked_accuracy"
    gives_vocabulary = True

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._masked = _MaskedInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._masked

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Plain, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the token at each hidden place [N x S], with -1 elsewhere."""
        return self._masked.hidden(self.samples(rows))

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        likeliest = first_output(result, self.output_name).argmax(dim=-1)
        return [row.float() for row in per_token(likeliest, batch)]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return whole_numbers(outputs)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return how many hidden tokens of each row were found, and how many there are [N x 2]."""
        targets = self.targets(rows)
        hidden = targets >= 0
        right = (predictions.decisions[:, : targets.shape[1]] == targets) & hidden
        return np.stack([right.sum(axis=-1), hidden.sum(axis=-1)], axis=-1).astype(np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of tokens whose likeliest token differs."""
        return {"label_flips": flips(float_predictions, other, float_predictions.decisions >= 0)}


class _MaskedInputs(TextInputs):
    """The batches of texts in which one token in seven is hidden."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, *, max_length: int, min_length: int) -> None:
        super().__init__(model, tokenizer, max_length=max_length, min_length=min_length)
        if tokenizer.mask_token_id is None:
            raise TaskError(f"{type(tokenizer).__name__} has no mask token, and task 'fill-mask' hides tokens by it")

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch [B x S] with hidden tokens."""
        batch = super().batch(texts, min_length)
        batch["input_ids"][self._places(batch["input_ids"])] = self.tokenizer.mask_token_id
        return batch

    def hidden(self, texts: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the hidden tokens of texts [N x S], with -1 at all other places."""
        ids = self.encoded(texts, padding="longest", max_length=self.max_length, return_tensors="pt")["input_ids"]
        return torch.where(self._places(ids), ids, -1).numpy()

    def _places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which tokens [B x S] are hidden: those of the text, counted from its first one."""
        special = torch.tensor([*self.tokenizer.all_special_ids])
        own = ~torch.isin(ids, special)
        return own & (own.cumsum(dim=-1) % _EVERY == _EVERY // 2)
