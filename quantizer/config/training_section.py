"""The ``qat:`` section: training of the model with rounded operands, on the outputs of the float model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WrapValidator
from pydantic_core import PydanticCustomError

from quantizer.config.section import Expects, Section

_Kind = Literal["fixed", "average", "learned"]


def _scales(value: Any) -> str | dict[str, str]:
    kinds = get_args(_Kind)
    given = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(pattern, str) for pattern in value)
    if not given or not named or not all(isinstance(kind, str) and kind in kinds for kind in given):
        raise PydanticCustomError("scales", f"Input should be one of {', '.join(kinds)}, or such by pattern")
    return value  # type: ignore[no-any-return]


class QatConfig(Section):
    """A short training on data.training towards the outputs of the float model; labels are not used."""

    epochs: float = Field(
        default=0.5,
        gt=0,
        description="Passes over data.training: a tenth, or some more, of those that the model was fine-tuned with.",
    )
    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        lt=1,
        description="The highest rate, about 1% of that of a training from scratch; it rises over the first tenth of "
        "the steps and falls with a cosine.",
    )
    scale_learning_rate: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="The highest rate of learned scales of activations: how far a step moves one at most, as a share "
        "of it. Learned scales of weights have the rate of the weights.",
    )
    scales: Annotated[
        _Kind | dict[str, _Kind],
        WrapValidator(lambda value, _: _scales(value)),
        Expects("fixed, average or learned, or a mapping of patterns to these"),
    ] = Field(
        default="learned",
        description="What becomes of the scales: 'fixed' as calibrated, 'average' follows the values, 'learned' is "
        "trained; or these by pattern of sites and operands ('**.weight': fixed), of which the last that matches "
        "decides.",
    )
    freeze_scales: float = Field(default=0.8, ge=0, le=1, description="Share of the steps after which scales stay.")
    temperature: float = Field(
        default=1.0, gt=0, description="Both models' logits are divided by it before they are compared."
    )
    hidden: float = Field(
        default=10.0, ge=0, description="Weight of the hidden states beside the output; 0: the output alone."
    )
    evaluations: int = Field(
        default=5, ge=1, description="How often the score on data.tuning is taken, with a checkpoint each time."
    )
    tolerance: float = Field(
        default=0.005,
        ge=0,
        description="The state that is kept is the last whose score is at most so much worse than the best: scores of "
        "some hundred rows differ by that much by chance, and the later state is nearer to the float model.",
    )
    patience: int | None = Field(
        default=None, ge=1, description="Stop after so many scores that are none to keep; null: never."
    )
    seed: int = Field(default=0, ge=0, lt=2**47, description="Decides the order of the rows; below 2^47.")
