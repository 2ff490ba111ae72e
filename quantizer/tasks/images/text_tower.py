"""The text tower of models of images and texts, such as CLIP: embeddings of texts beside those of images.

Shapes: B texts of S tokens in a batch, D width of an embedding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

EMBEDDING = "text_embeds"
"""The name of the output, as transformers has it."""

_TYPES = frozenset({"clip", "clipseg", "metaclip_2"})
"""Types whose embedding projects what the tower pools, with positions from 0 and padding that does not count.

Others pool in another way (ALIGN), have weights for it that a checkpoint may lack (BLIP), or count padding (SigLIP).
"""


def has_text_tower(config: Any) -> bool:
    """Return whether the text tower of a model of this config can be taken alone."""
    return getattr(config, "model_type", None) in _TYPES


class TextTower(torch.nn.Module):
    """The text tower of a model of images and texts, which computes its ``text_embeds``, each of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text_model = model.text_model
        self.text_projection = model.text_projection
        self.config = copy.deepcopy(model.config.text_config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the embeddings of texts [B x D], of tokens [B x S] and their mask, by name."""
        pooled_BD = self.text_model(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        return {EMBEDDING: torch.nn.functional.normalize(self.text_projection(pooled_BD), dim=-1)}
