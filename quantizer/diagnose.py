"""Diagnosis of accuracy: the groups that reduce the SQNR most, the cause of each, and the setting that fixes it.

Each candidate setting is tried on calibration batches. The second half of the file detects outliers in activations:
large channels, massive tokens, two branches with one range, and clipping.

Legend: x [N, K] the rows of an activation that linears read; m_j the largest magnitude of channel j.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from quantizer.algorithms.algorithm import proxied_copy
from quantizer.algorithms.calibration_session import CalibrationSession
from quantizer.algorithms.replay import OutputError, SiteCall, visit_calls
from quantizer.algorithms.sensitivity import operands_of
from quantizer.algorithms.sensitivity.session import SensitivitySession
from quantizer.config import QuantizerConfig, quantizer_config
from quantizer.errors import CalibrationWarning
from quantizer.numerics.formats import qtype
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan, with_fallback
from quantizer.rewrite.operations import operation
from quantizer.settings import settings_of
from quantizer.utils.batches import arguments, run_batches
from quantizer.utils.display import Rows
from quantizer.utils.records import Diagnosis, Fix

_MEASURED_PER_RESULT = 2
"""Factor between the groups that are measured and those that are returned: the ranking by gradients is an estimate."""

_LEAST_GAIN_DB = 1.0
"""The least gain of a setting in dB with only the group quantized; half of it for the whole model."""

_CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"activations": {"calibrator": "max"}},
    {"activations": {"calibrator": "percentile", "percentile": 99.9}},
    {"activations": {"smoothquant_alpha": 0.7}},
    {"activations": {"calibrator": "max", "smoothquant_alpha": 0.7}},
)

_SEARCHED = {"calibrator": "output", "smoothquant_alpha": "auto"}
"""Values of a configuration with which calibration itself already tried the candidates for this key."""


class Diagnoses(Rows[Diagnosis]):
    """The groups with the lowest SQNR, the worst first, each with its cause and its fix."""

    look = "diagnoses"


def diagnose_groups(
    config: QuantizerConfig,
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    num: int,
    ranked: Sequence[str] = (),
) -> tuple[Diagnosis, ...]:
    """Return the ``num`` groups of a plan with the lowest SQNR, with causes and fixes."""
    if not any(entry.quantized for entry in plan.values()):
        return ()
    known = operands_of(plan)
    candidates = ([group for group in ranked if group in known] or _ranked(model, plan, batches))[
        : _MEASURED_PER_RESULT * num
    ]
    trial = _Trial(config, model, plan, batches)
    group_sqnr = {group: trial.sqnr(plan, group) for group in candidates}
    worst = sorted(candidates, key=lambda group: group_sqnr[group])[:num]
    findings = trial.findings(worst)
    return tuple(trial.cause(group, group_sqnr[group], findings[group]) for group in worst)


def _ranked(model: nn.Module, plan: Plan, batches: Sequence[Any]) -> list[str]:
    session = SensitivitySession(model, plan, "gradient", "group", None, None)
    for batch in batches:
        args, keywords = arguments(batch)
        session.proxy(*args, **keywords)
    return [entry.group for entry in session.ranking()]


def with_setting(config: QuantizerConfig, setting: Mapping[str, Any]) -> QuantizerConfig:
    """Return a configuration with one more setting; the lists of excluded sites are joined."""
    ((section, values),) = setting.items()
    current = config.model_dump(mode="json")[section]
    if section == "exclude":
        values = {"sites": list(dict.fromkeys([*current["sites"], *values["sites"]]))}
    return quantizer_config(config, **{section: {**current, **values}})


def with_section_values(config: QuantizerConfig, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with the other non-default values of its section, because a section is given completely."""
    ((section, _),) = setting.items()
    new_values = with_setting(config, setting).model_dump(mode="json")[section]
    defaults = QuantizerConfig(preset=config.preset).model_dump(mode="json")[section]
    return {
        section: {key: value for key, value in new_values.items() if value != defaults[key] or key in setting[section]}
    }


class _Trial:
    """SQNR in dB of the model's output with different plans, measured on some batches."""

    def __init__(self, config: QuantizerConfig, model: nn.Module, plan: Plan, batches: Sequence[Any]) -> None:
        self._config = config
        self._model = model
        self._plan = plan
        self._user_batches = batches
        self._batches = [arguments(batch) for batch in batches]
        self._proxied = proxied_copy(settings_of(config), model)
        self._error = OutputError(self._proxied)
        self._whole = self.sqnr(plan)
        chosen = config.activations.model_dump()
        searched = {key for key, value in _SEARCHED.items() if chosen[key] == value}
        # If calibration searched a key, it already rejected these candidates. Each candidate takes a calibration.
        self._settings = [each for each in _CANDIDATES if not searched & each["activations"].keys()]
        self._measured_candidates: list[tuple[Mapping[str, Any], Plan, float]] | None = None

    def sqnr(self, plan: Plan, group: str | None = None) -> float:
        """Return the SQNR of the output in dB with all groups of a plan quantized, or with one group alone."""
        if group is not None:
            plan = with_fallback(plan, {name: "" for name in operands_of(plan) if name != group})
        error = self._error.of(plan, dict(enumerate(self._batches))) / len(self._batches)
        return -10 * math.log10(error) if error else math.inf

    def findings(self, groups: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the problems of the inputs of each group, in words."""
        problems: dict[str, list[str]] = {group: [] for group in groups}
        sites = [site for site in self._proxied.planned(self._plan) if self._groups_of(site.path) & problems.keys()]
        values: dict[tuple[str, str, int | None], list[Tensor]] = {}

        def visit(site_call: SiteCall) -> None:
            path = site_call.site.path
            for operand in self._plan[path].operands:
                if operand.quantized and operand.role == "activation" and operand.group in problems:
                    value = site_call.operand(operand.name)
                    # Calls are examined one by one only if each call has a range of its own.
                    number = site_call.number if operand.several_ranges else None
                    if isinstance(value, Tensor) and value.numel():
                        values.setdefault((path, operand.name, number), []).append(value.detach())

        visit_calls(self._proxied.module, sites, self._batches, visit, "diagnoses")
        for (path, name, number), parts in values.items():
            entry = self._plan[path]
            planned = next(operand for operand in entry.operands if operand.name == name).of_call(number)
            found = outliers([smoothed(part, planned) for part in parts], planned, entry)
            problems[planned.group or ""] += [f"{name}: {text}" for text in found]
        return {group: tuple(dict.fromkeys(texts)) for group, texts in problems.items()}

    def cause(self, group: str, alone: float, findings: tuple[str, ...]) -> Diagnosis:
        """Return the diagnosis of a group with its best fix; without findings, only float is tried."""
        fixes = [*(self._candidate_fixes(group, alone) if findings else ()), *self._float_fix(group)]
        # Keeping the group in float is the last resort.
        settings = [fix for fix in fixes if math.isfinite(fix.gain_alone_db)] or fixes
        best = max(settings, key=lambda fix: fix.gain_db, default=None)
        return Diagnosis(group=group, sqnr_db=alone, findings=findings, fix=best, notes=self._notes(group, findings))

    def _candidate_fixes(self, group: str, alone: float) -> list[Fix]:
        if self._measured_candidates is None:
            self._measured_candidates = [self._try(setting) for setting in self._settings]
        return [
            Fix(
                setting=_text(with_section_values(self._config, setting)),
                gain_db=plan_sqnr - self._whole,
                gain_alone_db=gain,
            )
            for setting, plan, plan_sqnr in self._measured_candidates
            if plan_sqnr - self._whole >= _LEAST_GAIN_DB / 2
            and (gain := self._gain_alone(plan, group, alone)) >= _LEAST_GAIN_DB
        ]

    def _gain_alone(self, plan: Plan, group: str, alone: float) -> float:
        """Return the gain of a plan in dB with only a group quantized; infinite if the plan keeps it in float."""
        if group not in operands_of(plan):
            return math.inf
        gain = self.sqnr(plan, group) - alone
        return gain if math.isfinite(gain) else -math.inf

    def _try(self, setting: Mapping[str, Any]) -> tuple[Mapping[str, Any], Plan, float]:
        session = CalibrationSession(settings_of(with_setting(self._config, setting)), self._model)
        with warnings.catch_warnings():
            # Warnings about few samples do not apply to the full calibration.
            warnings.simplefilter("ignore", CalibrationWarning)
            run_batches(session.proxy, self._user_batches, progress=False)
            plan = session.decide()
        return setting, plan, self.sqnr(plan)

    def _float_fix(self, group: str) -> list[Fix]:
        sites = sorted(path for path in self._plan if group in self._groups_of(path))
        remaining = with_fallback(self._plan, {group: ""})
        if not any(entry.quantized for entry in remaining.values()):
            # Quantizing nothing is not a fix.
            return []
        gain = self.sqnr(remaining) - self._whole
        if gain < _LEAST_GAIN_DB / 2:
            return []
        setting = with_section_values(self._config, {"exclude": {"sites": sites}})
        return [Fix(setting=_text(setting), gain_db=gain, gain_alone_db=math.inf)]

    def _notes(self, group: str, findings: tuple[str, ...]) -> tuple[str, ...]:
        """Return why outliers cannot move into the weights, according to the plans with SmoothQuant."""
        if not findings:
            return ()
        smoothed_plans = [
            plan
            for setting, plan, _ in self._measured_candidates or ()
            if "smoothquant_alpha" in setting["activations"]
        ]
        texts = (
            operand.smoothing
            for plan in (self._plan, *smoothed_plans)
            for path, entry in plan.items()
            if group in self._groups_of(path)
            for operand in entry.operands
        )
        return tuple(dict.fromkeys(text for text in texts if text is not None and text.startswith("not smoothed")))

    def _groups_of(self, path: str) -> set[str]:
        return {operand.group for operand in self._plan[path].operands if operand.quantized and operand.group}


def _text(setting: Mapping[str, Any]) -> str:
    ((section, values),) = setting.items()
    inside = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"{section}: {inside}"


_OUTLIER_RATIO = 8.0
"""Factor over the median from which a channel or a token counts as large: three of the eight bits are lost."""

_LARGE_FRACTION = 4.0
"""A channel counts as large if it exceeds the largest magnitude divided by this."""

_TOKEN_SHARE = 0.01
"""The largest share of the rows that count as single tokens."""

_SHOWN_CHANNELS = 3
"""The most channels that a finding names."""

_HEADS_DIM = 4
"""The dimensions of an operand [B, H, T, D] with heads."""


def smoothed(x: Tensor, planned: OperandPlan) -> Tensor:
    """Return an activation multiplied by its factors [K] along the smoothed axis, as before rounding."""
    if planned.factor is None:
        return x
    assert planned.smooth_axis is not None
    moved = x.movedim(planned.smooth_axis, -1) * planned.factor.to(x.device)
    return moved.movedim(-1, planned.smooth_axis)


def outliers(parts: Sequence[Tensor], planned: OperandPlan, entry: SitePlan) -> list[str]:
    """Return the problems of the range of an activation, in words; empty if nothing stands out."""
    row = "position" if entry.kind == "conv" else "token"
    found: list[str] = []
    for axis in _channel_axes(entry, planned.name):
        views = [_by_channel(part, axis, entry) for part in parts]
        # Tokens have no fixed number, so they are not the channels.
        if not found and len({view.shape[-1] for view in views}) == 1:
            found = _by_structure(torch.cat(views).float().abs(), row)
    return [*found, *_clipped(torch.cat([part.flatten() for part in parts]).double(), planned)]


def _channel_axes(entry: SitePlan, operand: str) -> tuple[int, ...]:
    """Return the axes of an operand that may be its channels, from the end; () if they are unknown."""
    if entry.kind == "conv":
        return (operation(entry.operation).channels,)
    if entry.kind not in ("linear", "matmul") or operand == "probabilities":
        return ()
    # The second factor of a multiplication holds the channels in its rows (keys) or columns (values).
    return (-1, -2) if operand == "rhs" else (-1,)


def _by_channel(x: Tensor, axis: int, entry: SitePlan) -> Tensor:
    """Return an activation as [N, K] with its channels last; those of several heads are numbered one after another."""
    x = x.movedim(axis, -1) if x.dim() >= -axis else x
    if entry.kind == "matmul" and x.dim() == _HEADS_DIM:
        x = x.transpose(1, 2).flatten(2)
    return x.reshape(-1, x.shape[-1])


def _by_structure(x: Tensor, row: str) -> list[str]:
    """Return the finding of massive rows, two branches or a few large channels in magnitudes x [N, K]."""
    by_row = x.amax(1)
    few = max(1, int(_TOKEN_SHARE * len(x)))
    typical_rows = x[by_row <= by_row.sort(descending=True).values[few]] if len(x) > few else x
    largest, typical = float(by_row.max()), float(typical_rows.max())
    if typical > 0 and largest >= _OUTLIER_RATIO * float(by_row.median()) and largest >= _LARGE_FRACTION * typical:
        count = int((by_row >= _LARGE_FRACTION * typical).sum())
        verb = "is" if count == 1 else "are"
        return [f"{count} of {len(x)} {row}s {verb} {largest / typical:.0f}x as large as the others"]
    m = typical_rows.amax(0)
    half = _branches(m)
    if half is not None:
        return [half]
    median = float(m.median())
    if median > 0 and float(m.max()) >= _OUTLIER_RATIO * median:
        large = (m > m.max() / _LARGE_FRACTION).nonzero().flatten().tolist()
        return [f"{_named(large)} up to {float(m.max()) / median:.0f}x as large as the median of {len(m)} channels"]
    return []


def _named(channels: Sequence[int]) -> str:
    """Return channels in words, with at most three numbers, and their verb."""
    shown = ", ".join(map(str, channels[:_SHOWN_CHANNELS]))
    if len(channels) == 1:
        return f"channel {shown} is"
    if len(channels) <= _SHOWN_CHANNELS:
        return f"channels {shown} are"
    return f"{len(channels)} channels ({shown}, ...) are"


def _branches(m: Tensor) -> str | None:
    """Return the finding that two branches share one range: the channels on one side of a cut are much larger."""
    least = max(2, len(m) // 8)
    for cut in range(least, len(m) - least + 1):
        low, high = sorted((m[:cut], m[cut:]), key=lambda side: float(side.max()))
        if float(low.max()) > 0 and float(high.min()) > float(low.max()):
            ratio = float(high.max() / low.max())
            if ratio >= _OUTLIER_RATIO:
                return (
                    f"one range for two branches, the channels before {cut} and from {cut} on, which differ by "
                    f"{ratio:.0f}x"
                )
    return None


def _clipped(x: Tensor, planned: OperandPlan) -> list[str]:
    """Return the finding that clipping causes most of the rounding error."""
    dtype = qtype(planned.dtype)
    if planned.scale is None or planned.scale.numel() > 1 or dtype.is_float:
        return []
    scale, zero = float(planned.scale), planned.zero_point or 0
    beyond = x - x.clamp((dtype.qmin - zero) * scale, (dtype.qmax - zero) * scale)
    # Less than half of a scale beyond the range is rounding, not clipping.
    beyond = beyond[beyond.abs() > scale / 2]
    error = float(beyond.square().sum())
    rounding = x.numel() * scale**2 / 12
    if error <= rounding:
        return []
    share = len(beyond) / x.numel()
    return [f"{100 * share:.2g}% of the values are clipped, {100 * error / (error + rounding):.0f}% of its error"]
