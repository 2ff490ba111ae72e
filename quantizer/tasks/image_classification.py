"""The task ``image-classification``: a fine-tuned image classifier, whose label is the class of the largest logit."""

from __future__ import annotations

from typing import Any

import torch

from quantizer.tasks.datasets.rows import Image
from quantizer.tasks.file_classification import FileClassification
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.tasks.inputs import Inputs
from quantizer.tasks.task import tasks


@tasks.add("image-classification")
class ImageClassification(FileClassification):
    """Images to logits [N x C], to labels [N] by the largest logit, scored by accuracy."""

    name = "image-classification"
    reads = "image"
    auto_class = "AutoModelForImageClassification"
    kind = Image

    def file_inputs(self, model: torch.nn.Module, processor: Any) -> Inputs:
        return ImageInputs(model, processor)
