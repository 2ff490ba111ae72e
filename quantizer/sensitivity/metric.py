"""The user's metric: a function of a model that gives its score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantizer.errors import LostRankError, SensitivityError
from quantizer.proxy.restored_state import untouched

Score = Callable[[nn.Module], float]
"""A function of a model, called like the user's own, that gives one number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A score, and the direction that is better."""

    function: Score
    higher_is_better: bool = True

    def score(self, model: nn.Module, which: str) -> float:
        """Return the score of a model, without gradients; ``which`` names the model in errors.

        Raises:
            SensitivityError: the function raised, or did not return a finite number.
            LostRankError: another process has ended.
        """
        try:
            with torch.no_grad(), untouched(model):
                value = self.function(model)
        except LostRankError:
            raise
        except Exception as error:
            raise SensitivityError(f"the metric raised {type(error).__name__} for {which}: {error}") from error
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        # NumPy's scalars are numbers to Python as well.
        if isinstance(number, bool | Tensor) or not hasattr(number, "__float__"):
            raise SensitivityError(f"the metric gave {type(value).__name__} for {which}; expected one number")
        if not math.isfinite(number):
            raise SensitivityError(f"the metric gave {float(number)} for {which}; expected a finite number")
        return float(number)

    def drop(self, float_score: float, score: float) -> float:
        """Return how much worse ``score`` is than the float model's; negative if it is better."""
        return float_score - score if self.higher_is_better else score - float_score
