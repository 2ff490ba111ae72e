"""The task ``zero-shot-image-classification``, and the text and image towers of models such as CLIP.

Shapes: B texts or images in a batch, S tokens, D width of an embedding, C labels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import ImageClassification
from quantizer.tasks.task import tasks

EMBEDDING = "text_embeds"
"""The name of the output in transformers."""

_TYPES = frozenset({"clip", "clipseg", "metaclip_2"})
"""Model types whose embedding is a projection of the pooled output, with positions from 0 and masked padding.

Others pool differently (ALIGN), may lack the weights of the pooling (BLIP), or do not mask padding (SigLIP).
"""


def has_text_tower(config: Any) -> bool:
    """Return whether the text tower of a model with this config can be used alone."""
    return getattr(config, "model_type", None) in _TYPES


class TextTower(torch.nn.Module):
    """The text tower of a model of images and texts, which computes ``text_embeds`` of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text_model = model.text_model
        self.text_projection = model.text_projection
        self.config = copy.deepcopy(model.config.text_config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the embeddings of texts [B x D] by name, from tokens [B x S] and their mask."""
        pooled_BD = self.text_model(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        return {EMBEDDING: torch.nn.functional.normalize(self.text_projection(pooled_BD), dim=-1)}


_LONGEST = 64
"""The tokens of each text in the training of SigLIP, as in the pipeline of transformers."""


class LabelledTower(torch.nn.Module):
    """The image tower of a model of images and texts, with the embeddings of labels as its last layer.

    Its logits equal ``logits_per_image`` of the whole model for the same images and labels.
    """

    def __init__(self, model: Any, tokenizer: Any, texts: Mapping[str, str]) -> None:
        super().__init__()
        if not (hasattr(model, "vision_model") and hasattr(model, "get_text_features")):
            raise TaskError(
                f"{type(model).__name__} has no separate towers for images and texts, such as CLIP and SigLIP: load it "
                "in Python, and pass it with its batches to quantize_model"
            )
        self.vision_model = model.vision_model
        self.visual_projection = getattr(model, "visual_projection", torch.nn.Identity())
        embeds_CD = _text_embeddings(model, tokenizer, list(texts.values()))
        bias = getattr(model, "logit_bias", None)
        self.classifier = torch.nn.Linear(embeds_CD.shape[1], len(embeds_CD), bias=bias is not None)
        with torch.no_grad():
            self.classifier.weight.copy_(embeds_CD * model.logit_scale.exp())
            if bias is not None:
                self.classifier.bias.fill_(float(bias))
        self.config = copy.deepcopy(model.config.vision_config)
        if bias is not None:
            # SigLIP judges each label by itself.
            self.config.problem_type = "multi_label_classification"
        self.config.id2label = dict(enumerate(texts))
        self.config.label2id = {label: number for number, label in enumerate(texts)}

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits of labels [B x C] by name."""
        pooled_BD = self.vision_model(pixel_values=pixel_values).pooler_output
        embeds_BD = self.visual_projection(pooled_BD)
        return {"logits": self.classifier(embeds_BD / embeds_BD.norm(p=2, dim=-1, keepdim=True))}


@tasks.add("zero-shot-image-classification")
class ZeroShotImageClassification(ImageClassification):
    """Images to logits of the configured labels [N x C], to labels [N], scored by accuracy."""

    name = "zero-shot-image-classification"
    auto_class = "AutoModelForZeroShotImageClassification"
    names_labels = True

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        return LabelledTower(model, tokenizer, texts or {})


def _text_embeddings(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return the embeddings of texts [C x D], each of length 1."""
    fixed = "siglip" in model.config.model_type
    options = {"padding": "max_length", "max_length": _LONGEST, "truncation": True} if fixed else {"padding": True}
    with torch.no_grad():
        features = model.get_text_features(**tokenizer(texts, return_tensors="pt", **options))
    embeds: torch.Tensor = getattr(features, "pooler_output", features)
    return torch.nn.functional.normalize(embeds, dim=-1)
