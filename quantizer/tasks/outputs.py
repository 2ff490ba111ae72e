"""Outputs of models and engines as float32 tensors, per sample or per token, and the pooling of sentence embeddings.

Shapes: B sequences in a batch, S tokens, D width of a token, E width of an embedding, N samples.
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
        result: a mapping of names to tensors or arrays (a transformers ``ModelOutput`` is one), a tuple or list, or one
            tensor or array.
        name: the output ("last_hidden_state", "logits").
        place: the index of the output in a tuple, or in a mapping without this name.

    Raises:
        TaskError: there is no such tensor or array.
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
        f"the model returned {type(result).__name__} without a tensor or array for {name!r}: expected a "
        f"mapping, a tuple or a tensor"
    )


def dealt(chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks of this process, each with its number, from 1."""
    return ((number, chunk) for number, chunk in enumerate(chunks, start=1) if is_mine(number - 1))


def of_all_ranks(outputs: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the outputs of the samples of all processes; all processes must call this."""
    if get_world_size() == 1:
        return dict(outputs)
    mine = save({str(at): output.clone(memory_format=torch.contiguous_format) for at, output in outputs.items()})
    return {int(at): output for data in all_gather_bytes(mine) for at, output in load(data).items()}


def stacked(outputs: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Return outputs as one array, padded with NaN along their first axis."""
    if all(output.shape == outputs[0].shape for output in outputs):
        return np.stack(outputs)
    longest = max(len(output) for output in outputs)
    padded = np.full((len(outputs), longest, *outputs[0].shape[1:]), np.nan, dtype=np.float32)
    for at, output in enumerate(outputs):
        padded[at, : output.shape[0]] = output
    return padded


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
"""Functions of hidden states [B x S x D] and their mask [B x S] to [B x D], by the names of sentence-transformers."""


@dataclass(frozen=True)
class SentencePooling:
    """The pooling of a model of sentence embeddings, as sentence-transformers defines it.

    Attributes:
        modes: names in ``MODES``; several are joined to one embedding.
        normalize: whether embeddings are scaled to length 1.
        similarity: "cosine" or "dot".
        prompt: the text in front of each sentence.
        query_prompt: the text in front of each query of a search.
        document_prompt: the text in front of each document of a search.
        include_prompt: whether the tokens of a prompt are pooled too; False is only kept for other clients.
    """

    modes: tuple[str, ...]
    normalize: bool
    similarity: str = SIMILARITIES[0]
    prompt: str = ""
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True

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
"""The default pooling."""


def per_token(output: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Return B tensors [S x ...] without padding, from values [B x S x ...]."""
    ids = batch["input_ids"]
    if output.shape[:2] != ids.shape:
        raise TaskError(
            f"the model's output has the shape {tuple(output.shape)}, expected [batch, sequence, ...] with batch and "
            f"sequence {tuple(ids.shape)}: does the model return one value per token?"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [values[own] for values, own in zip(output, mask, strict=True)]


def is_token(outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return a mask [N x S] of the tokens in outputs [N x S x ...], whose padding is NaN."""
    numbers = ~np.isnan(outputs)
    return np.asarray(numbers.reshape(*numbers.shape[:2], -1).all(axis=-1))


def whole_numbers(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return values [N x S] as integers, NaN as -1."""
    return np.where(np.isnan(values), -1, values).astype(np.int64)


def flips(reference: Predictions, other: Predictions, among: npt.NDArray[Any]) -> float:
    """Return the share of the tokens in a mask [N x S] for which two models decide differently."""
    if reference.decisions.shape != other.decisions.shape:
        return label_flips(reference.decisions, other.decisions)
    return label_flips(reference.decisions[among], other.decisions[among])
