"""The outputs and decisions of tokens, without the padding of their batches.

Shapes: N rows, B rows of a batch, S tokens, C classes, T tokens of all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.metrics import label_flips

if TYPE_CHECKING:
    from quantizer.tasks.inputs import Batch
    from quantizer.tasks.task import Predictions


def per_token(output: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Return the values of each row's own tokens, B tensors [S x ...], of values [B x S x ...]."""
    ids = batch["input_ids"]
    if output.shape[:2] != ids.shape:
        raise TaskError(
            f"the model's output has the shape {tuple(output.shape)}, expected [batch, sequence, ...] with batch and "
            f"sequence {tuple(ids.shape)}: is there a value for each token?"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[own] for row, own in zip(output, mask, strict=True)]


def is_token(outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return which places of outputs [N x S x ...] belong to a token [N x S], and are not filled with NaN."""
    found = ~np.isnan(outputs)
    return np.asarray(found.reshape(*found.shape[:2], -1).all(axis=-1))


def whole_numbers(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return values [N x S] as integers; -1 where there is no token."""
    return np.where(np.isnan(values), -1, values).astype(np.int64)


def flips(reference: Predictions, other: Predictions, among: npt.NDArray[Any]) -> float:
    """Return the share of the tokens ``among`` [N x S] for which two models decide differently."""
    if reference.decisions.shape != other.decisions.shape:
        return label_flips(reference.decisions, other.decisions)
    return label_flips(reference.decisions[among], other.decisions[among])
