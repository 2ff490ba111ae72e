"""Outputs of a model, a proxy or an engine, as one float32 tensor.

The embedding of a sentence from the values of its tokens, as sentence-transformers computes it.

Shapes: B sequences in a batch, S tokens, D width of a token, E width of an embedding.

The outputs and decisions of tokens, without the padding of their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save

from quantizer.errors import TaskError
from quantizer.tasks.metrics import label_flips
from quantizer.utils.distributed import all_gather_bytes, get_world_size, is_mine
from quantizer.utils.structure import fields_of

if TYPE_CHECKING:
    from quantizer.tasks.inputs import Batch
    from quantizer.tasks.task import Predictions

Chunk = TypeVar("Chunk")


def first_output(result: object, name: str, place: int = 0) -> torch.Tensor:
    """Return the named output, as a float32 tensor on the CPU.

    Args:
        result: a mapping of names to tensors or arrays (a transformers ``ModelOutput`` is one), a tuple or list, or
            one tensor or array.
        name: the output wanted ("last_hidden_state", "logits").
        place: a mapping without this name gives the entry at this place, a tuple its element there.

    Raises:
        TaskError: there is no tensor or array to take.
    """
    value: object = result
    fields = fields_of(result)
    if fields is not None:
        value = fields[name] if name in fields else next(islice(fields.values(), place, None), None)
    elif isinstance(result, (tuple, list)):
        value = result[place] if place < len(result) else None
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=torch.float32)
    if isinstance(value, np.ndarray):
        # NumPy converts to float32, because torch cannot read its bfloat16 extension type.
        return torch.from_numpy(np.array(value, dtype=np.float32))
    raise TaskError(
        f"the model gave {type(result).__name__}, in which there is no tensor or array for {name!r}: expected a "
        f"mapping, a tuple or a tensor"
    )


def dealt(chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """Yield those chunks that this process runs, each with its number, from 1."""
    return ((number, chunk) for number, chunk in enumerate(chunks, start=1) if is_mine(number - 1))


def of_all_ranks(rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the rows of all processes, each of which has some of them; all processes must call this."""
    if get_world_size() == 1:
        return dict(rows)
    mine = save({str(at): row.clone(memory_format=torch.contiguous_format) for at, row in rows.items()})
    return {int(at): row for told in all_gather_bytes(mine) for at, row in load(told).items()}


def stacked(rows: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Return rows as one array; those that are shorter along their first axis end in NaN."""
    if all(row.shape == rows[0].shape for row in rows):
        return np.stack(rows)
    longest = max(len(row) for row in rows)
    whole = np.full((len(rows), longest, *rows[0].shape[1:]), np.nan, dtype=np.float32)
    for at, row in enumerate(rows):
        whole[at, : row.shape[0]] = row
    return whole


SIMILARITIES = ("cosine", "dot")


def _first(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    return hidden_BSD[:, 0]


def _last(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    last_B = mask_BS.shape[1] - 1 - mask_BS.flip(1).argmax(dim=1)
    return hidden_BSD[torch.arange(len(hidden_BSD)), last_B]


def _largest(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    return hidden_BSD.masked_fill(mask_BS.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)


def _sum(hidden_BSD: torch.Tensor, weights_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum over tokens [B x D], and the sum of weights [B x 1]."""
    weights = weights_BS.to(hidden_BSD.dtype).unsqueeze(-1)
    return (hidden_BSD * weights).sum(dim=1), weights.sum(dim=1).clamp(min=1)


def _mean(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    total, count = _sum(hidden_BSD, mask_BS)
    return total / count


def _by_root(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    total, count = _sum(hidden_BSD, mask_BS)
    return total / count.sqrt()


def _later_weighs_more(hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    total, count = _sum(hidden_BSD, mask_BS * torch.arange(1, mask_BS.shape[1] + 1))
    return total / count


MODES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _by_root,
    "weightedmean": _later_weighs_more,
    "lasttoken": _last,
}
"""From the values of tokens [B x S x D] and their mask [B x S] to [B x D], by the names of sentence-transformers."""


@dataclass(frozen=True)
class SentencePooling:
    """The way in which the embedding of a sentence is made, and two of them are compared.

    Attributes:
        modes: names in ``MODES``; several are joined to one embedding.
        normalize: whether embeddings are scaled to length 1.
        similarity: "cosine" or "dot".
        prompt: what stands before each text.
    """

    modes: tuple[str, ...]
    normalize: bool
    similarity: str = SIMILARITIES[0]
    prompt: str = ""

    def embeddings(self, hidden_BSD: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B x E] of sentences."""
        if hidden_BSD.dim() != 3 or hidden_BSD.shape[:2] != mask_BS.shape:
            raise TaskError(
                f"the model's output has the shape {tuple(hidden_BSD.shape)}, expected [batch, sequence, width] with "
                f"batch and sequence {tuple(mask_BS.shape)}: is this an encoder, and the output its last_hidden_state?"
            )
        joined = torch.cat([MODES[mode](hidden_BSD, mask_BS) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(joined, dim=-1) if self.normalize else joined


MEAN = SentencePooling(("mean",), normalize=True)
"""The pooling of a model whose folder says nothing of it."""


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
