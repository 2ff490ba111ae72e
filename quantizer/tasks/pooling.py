"""The embedding of a sentence from the values of its tokens, as sentence-transformers computes it.

Shapes: B sequences in a batch, S tokens, D width of a token, E width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantizer.errors import TaskError

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
        """Return the embeddings [B x E] of sentences.

        Args:
            hidden_BSD: the values of their tokens.
            mask_BS: which tokens are none of padding.

        Raises:
            TaskError: there is no value for each token.
        """
        if hidden_BSD.dim() != 3 or hidden_BSD.shape[:2] != mask_BS.shape:
            raise TaskError(
                f"the model's output has the shape {tuple(hidden_BSD.shape)}, expected [batch, sequence, width] with "
                f"batch and sequence {tuple(mask_BS.shape)}: is this an encoder, and the output its last_hidden_state?"
            )
        joined = torch.cat([MODES[mode](hidden_BSD, mask_BS) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(joined, dim=-1) if self.normalize else joined


MEAN = SentencePooling(("mean",), normalize=True)
"""The pooling of a model whose folder says nothing of it."""
