"""The common part of text and image classifiers: logits, labels, and figures against the float model.

Shapes: N rows, B rows of a batch, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.metrics import kl_divergence, label_flips, sqnr_db

if TYPE_CHECKING:
    from quantizer.tasks.task import Predictions


def class_names(config: Any) -> tuple[str, ...]:
    """Return the class names in a model's config, in the order of the class numbers; () if it has none."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def require_one_label(config: Any, task: str) -> None:
    """Raise if by its config a model's label is not the class of its largest logit.

    Raises:
        TaskError: the model gives a score (regression), or several labels at once.
    """
    count, problem = len(class_names(config)), getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        what = "gives several labels at once (problem_type: multi_label_classification)"
    elif problem == "regression" or count == 1:
        what = "gives a score and no class (one label, or problem_type: regression)"
    else:
        return
    raise TaskError(
        f"task {task!r} takes the class of the largest logit for the answer, and the model {what}: quantize it with "
        "the Quantizer, which needs no task, and score it with a metric of its own"
    )


def checked_logits(output: torch.Tensor) -> torch.Tensor:
    """Return logits [B x C] unchanged.

    Raises:
        TaskError: the output has another shape.
    """
    if output.dim() != 2:
        raise TaskError(
            f"the model's output has the shape {tuple(output.shape)}, expected logits [batch, classes]: is this a "
            "classifier?"
        )
    return output


def largest_logit(outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return the label of each row [N] of logits [N x C]."""
    return np.asarray(outputs.argmax(axis=-1))


def compare_classifiers(float_predictions: Predictions, other: Predictions) -> dict[str, float]:
    """Return the share of changed labels, the KL divergence from the float model in nats, the logits' SQNR in dB."""
    return {
        "label_flips": label_flips(float_predictions.decisions, other.decisions),
        "kl_divergence": kl_divergence(float_predictions.outputs, other.outputs),
        "sqnr_db": sqnr_db(float_predictions.outputs, other.outputs),
    }
