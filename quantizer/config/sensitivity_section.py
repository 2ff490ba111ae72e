"""The ``amp:`` and ``fallback:`` sections: the sensitivity of the groups, and the groups that fall back to float."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from quantizer.config.section import Section, TextList, reject, some_and_unique

_MAX_EVALUATIONS = 25
_CHOICES = ("num", "ratio", "names", "max_drop", "min_speedup")


class AmpConfig(Section):
    """The measurement of the sensitivity of each group of sites."""

    measure: Literal["gradient", "output", "local", "metric"] = Field(
        default="gradient",
        description="What a group costs: 'gradient' estimates the error of the model's output (one backward pass for "
        "all groups), 'output' computes it (a pass for each group), 'local' is the error at the group's own sites, "
        "'metric' how much worse the task's score is on data.tuning (an evaluation for each group).",
    )
    granularity: Literal["group", "layer", "block"] = Field(
        default="group",
        description="What is measured and put back together: 'group' is the least that can change precision.",
    )
    # All 128 calibration rows of the shipped files: 'gradient' runs each a few times, for any number of groups.
    batches: int = Field(
        default=4, ge=1, description="Calibration batches that are measured on; 'metric' has its own data."
    )


class FallbackConfig(Section):
    """The groups that fall back to float, by exactly one of the five ways to choose them."""

    num: int | None = Field(default=None, ge=1, description="Put back this many of the most sensitive groups.")
    ratio: float | None = Field(default=None, gt=0, le=1, description="Put back this share of all groups.")
    names: Annotated[TextList, AfterValidator(some_and_unique)] | None = Field(
        default=None,
        description="Put back these: groups, or modules, sites and operands with '*' for one segment and '**' for any "
        "number. Needs no amp.",
    )
    max_drop: float | None = Field(
        default=None,
        ge=0,
        description="Put back as few groups as let the task's score on data.tuning be at most so much worse than the "
        "float model's: 0 or more, where Quantizer.fallback in Python takes a gain below 0, too.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        description="Put back those that cost most accuracy, as long as the engine stays at least so many times as "
        "fast as the float model's: 2.0.",
    )
    # Null, because a file with all defaults filled in must be valid without a search too.
    max_evaluations: int | None = Field(
        default=None,
        ge=2,
        description=f"How many scores a search with max_drop may take, the float model's included; null: "
        f"{_MAX_EVALUATIONS}.",
    )
    costs: Literal["multiply_adds"] | None = Field(
        default=None,
        description="What a group costs in float: those that win most for their cost are put back first; null: with "
        "max_drop the time that it takes longer, where the engine runs here, else all cost the same.",
    )

    @property
    def evaluations(self) -> int:
        """The number of scores that a search may measure."""
        return _MAX_EVALUATIONS if self.max_evaluations is None else self.max_evaluations

    @model_validator(mode="after")
    def _fit_together(self) -> FallbackConfig:
        problems = []
        given = [name for name in _CHOICES if getattr(self, name) is not None]
        if not given:
            known = f"{', '.join(_CHOICES[:-1])} and {_CHOICES[-1]}"
            problems.append(("", f"none of {known} is set; expected exactly one of them, such as num: 4"))
        elif len(given) > 1:
            said = [f"{name} is {_shown(getattr(self, name))}" for name in given]
            rest = "the other" if len(given) == 2 else "the others"
            both = f"{', '.join(said[:-1])} and {said[-1]}"
            problems.append(("", f"{both}; expected exactly one of them: remove {rest}"))
        if given and "max_drop" not in given and self.max_evaluations is not None:
            problems.append(("max_evaluations", "belongs to the search of max_drop, which is not set; remove it"))
        if given == ["names"] and self.costs is not None:
            problems.append(("costs", "orders the groups to choose from, but names chooses them; remove it"))
        if given == ["min_speedup"] and self.costs is not None:
            problems.append(("costs", "min_speedup goes by the measured time of each group; remove it"))
        if problems:
            reject(*problems)
        return self


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
