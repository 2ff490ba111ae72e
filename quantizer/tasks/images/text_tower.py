"""The text tower of models of images and texts, such as CLIP: embeddings of texts beside those of images.

Shapes: B texts of S tokens in a batch, D width of an embedding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from quantizer.errors import TaskError

__all__ = ["EMBEDDING", "TextTower", "has_text_tower"]

EMBEDDING = "text_embeds"
"""The name of the output, as transformers has it."""


def has_text_tower(model: torch.nn.Module) -> bool:
    """Return whether a model has a tower of texts beside one of images."""
    return hasattr(model, "text_model") and hasattr(model, "get_text_features")


class TextTower(torch.nn.Module):
    """The text tower of a model of images and texts, which computes its ``text_embeds``, each of length 1.

    Args:
        model: the model.

    Raises:
        TaskError: its texts are all of one length, filled up with padding that counts.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if "siglip" in model.config.model_type:
            raise TaskError(
                f"{type(model).__name__} reads texts that are filled up to one length, and padding counts: its text "
                "tower is given in Python, with batches of that length, to quantize_model"
            )
        self.text_model = model.text_model
        self.text_projection = model.text_projection
        self.config = copy.deepcopy(model.config.text_config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the embeddings of texts [B x D], of tokens [B x S] and their mask, by name."""
        pooled_BD = self.text_model(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        return {EMBEDDING: torch.nn.functional.normalize(self.text_projection(pooled_BD), dim=-1)}
