"""The task ``fill-mask``: predictions of hidden tokens, scored by accuracy.

Shapes: N samples, B samples in a batch, S tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import Example, Plain
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.outputs import first_output, flips, per_token, whole_numbers
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks

_EVERY = 7
"""Every seventh token is hidden: about the 15% of BERT, at the same positions in every run."""


@tasks.add("fill-mask")
class FillMask(CountedTask):
    """Texts with hidden tokens to the most likely token at each position [N x S], scored by accuracy on these."""

    name = "fill-mask"
    auto_class = "AutoModelForMaskedLM"
    pipeline_class = "FillMaskPipeline"
    pipeline_options: ClassVar[Mapping[str, Any]] = {"tokenizer_kwargs": {"truncation": True}}
    output_name = "logits"
    metric_name = "masked_accuracy"
    gives_vocabulary = True

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._masked = _MaskedInputs(model, processor, max_length=max_length, min_length=min_length)
        return self._masked

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.text for example in examples_of_kind(examples, Plain, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the hidden tokens [N x S], with -1 elsewhere."""
        return self._masked.hidden(self.samples(examples))

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        tokens = first_output(result, self.output_name).argmax(dim=-1)
        return [row.float() for row in per_token(tokens, batch)]

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return whole_numbers(outputs)

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the correctly predicted hidden tokens of each sample, and all its hidden tokens [N x 2]."""
        targets = self.targets(examples)
        hidden = targets >= 0
        right = (predictions.decisions[:, : targets.shape[1]] == targets) & hidden
        return np.stack([right.sum(axis=-1), hidden.sum(axis=-1)], axis=-1).astype(np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of positions whose most likely token differs."""
        return {"label_flips": flips(float_predictions, other, float_predictions.decisions >= 0)}


class _MaskedInputs(TextInputs):
    """The batches of texts in which one token in seven is hidden."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, *, max_length: int, min_length: int) -> None:
        super().__init__(model, tokenizer, max_length=max_length, min_length=min_length)
        if tokenizer.mask_token_id is None:
            raise TaskError(f"{type(tokenizer).__name__} has no mask token, which task 'fill-mask' needs")

    def batch(self, texts: Sequence[Any], min_length: int | None = None) -> Batch:
        """Return one batch [B x S] with hidden tokens."""
        batch = super().batch(texts, min_length)
        batch["input_ids"][self._hidden_mask(batch["input_ids"])] = self.tokenizer.mask_token_id
        return batch

    def hidden(self, texts: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the hidden tokens of texts [N x S], with -1 elsewhere."""
        ids = self.encoded(texts, padding="longest", max_length=self.max_length, return_tensors="pt")["input_ids"]
        return torch.where(self._hidden_mask(ids), ids, -1).numpy()

    def _hidden_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask [B x S] of the hidden tokens: every seventh ordinary token."""
        special = torch.tensor([*self.tokenizer.all_special_ids])
        own = ~torch.isin(ids, special)
        return own & (own.cumsum(dim=-1) % _EVERY == _EVERY // 2)
