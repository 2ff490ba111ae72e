"""The diagnosis: the groups that cost most, and the setting that mends each, tried on calibration batches.

The detector of outliers in the values of an activation: channels, tokens, branches, clipping.

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
from quantizer.plan.site_plan import OperandPlan, Plan, with_fallback
from quantizer.settings import settings_of
from quantizer.utils.batches import arguments, run_batches
from quantizer.utils.display import Rows
from quantizer.utils.records import Diagnosis, Fix

_RANKED = 2
"""For each group that is asked for, so many are measured: the ranking by gradients is an estimate."""

_LEAST_DB = 1.0
"""The least gain of a setting in the group's own SQNR; half of it in that of the whole model."""

_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"activations": {"calibrator": "max"}},
    {"activations": {"calibrator": "percentile", "percentile": 99.9}},
    {"activations": {"smoothquant_alpha": 0.7}},
    {"activations": {"calibrator": "max", "smoothquant_alpha": 0.7}},
)

_SEARCHED = {"calibrator": "output", "smoothquant_alpha": "auto"}
"""Values of a configuration with which calibration itself has tried what a setting of this key would try."""


class Diagnoses(Rows[Diagnosis]):
    """The groups that cost most, the worst first, each with its cause and its fix."""

    look = "diagnoses"


def diagnose_groups(
    config: QuantizerConfig,
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    num: int,
    ranked: Sequence[str] = (),
) -> tuple[Diagnosis, ...]:
    """Return the groups of a plan that cost most, with causes and fixes."""
    if not any(entry.quantized for entry in plan.values()):
        return ()
    known = operands_of(plan)
    tried = ([group for group in ranked if group in known] or _ranked(model, plan, batches))[: _RANKED * num]
    trial = _Trial(config, model, plan, batches)
    alone = {group: trial.sqnr(plan, group) for group in tried}
    worst = sorted(tried, key=lambda group: alone[group])[:num]
    findings = trial.findings(worst)
    return tuple(trial.cause(group, alone[group], findings[group]) for group in worst)


def _ranked(model: nn.Module, plan: Plan, batches: Sequence[Any]) -> list[str]:
    session = SensitivitySession(model, plan, "gradient", "group", None, None)
    for batch in batches:
        args, keywords = arguments(batch)
        session.proxy(*args, **keywords)
    return [entry.group for entry in session.ranking()]


def with_setting(config: QuantizerConfig, setting: Mapping[str, Any]) -> QuantizerConfig:
    """Return a configuration with a setting; excluded sites are added to those that are excluded already."""
    ((section, values),) = setting.items()
    held = config.model_dump(mode="json")[section]
    if section == "exclude":
        values = {"sites": list(dict.fromkeys([*held["sites"], *values["sites"]]))}
    return quantizer_config(config, **{section: {**held, **values}})


def whole_setting(config: QuantizerConfig, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with what its section holds besides that no default is: a section is given as a whole."""
    ((section, _),) = setting.items()
    wanted = with_setting(config, setting).model_dump(mode="json")[section]
    usual = QuantizerConfig(preset=config.preset).model_dump(mode="json")[section]
    return {section: {key: value for key, value in wanted.items() if value != usual[key] or key in setting[section]}}


class _Trial:
    """Measurements of plans on some batches, by the SQNR of the model's output."""

    def __init__(self, config: QuantizerConfig, model: nn.Module, plan: Plan, batches: Sequence[Any]) -> None:
        self._config = config
        self._model = model
        self._plan = plan
        self._given = batches
        self._batches = [arguments(batch) for batch in batches]
        self._proxied = proxied_copy(settings_of(config), model)
        self._error = OutputError(self._proxied)
        self._whole = self.sqnr(plan)
        chosen = config.activations.model_dump()
        searched = {key for key, value in _SEARCHED.items() if chosen[key] == value}
        # A search by the output has lost to it already; to search everything else again takes a calibration each.
        self._settings = [each for each in _SETTINGS if not searched & each["activations"].keys()]
        self._tried: list[tuple[Mapping[str, Any], Plan, float]] | None = None

    def sqnr(self, plan: Plan, group: str | None = None) -> float:
        """Return the SQNR of the output in dB, with all groups of a plan or with one alone."""
        if group is not None:
            plan = with_fallback(plan, {name: "" for name in operands_of(plan) if name != group})
        error = self._error.of(plan, dict(enumerate(self._batches))) / len(self._batches)
        return -10 * math.log10(error) if error else math.inf

    def findings(self, groups: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return what is wrong with the inputs of each group."""
        found: dict[str, list[str]] = {group: [] for group in groups}
        sites = [site for site in self._proxied.planned(self._plan) if self._groups_of(site.path) & found.keys()]
        values: dict[tuple[str, str, int | None], list[Tensor]] = {}

        def visit(site_call: SiteCall) -> None:
            path = site_call.site.path
            for operand in self._plan[path].operands:
                if operand.quantized and operand.role == "activation" and operand.group in found:
                    value = site_call.operand(operand.name)
                    # Only calls with ranges of their own are looked at one by one.
                    number = site_call.number if operand.several_ranges else None
                    if isinstance(value, Tensor) and value.numel():
                        values.setdefault((path, operand.name, number), []).append(value.detach())

        visit_calls(self._proxied.module, sites, self._batches, visit, "diagnoses")
        for (path, name, number), parts in values.items():
            planned = next(operand for operand in self._plan[path].operands if operand.name == name).of_call(number)
            linear = self._plan[path].kind == "linear"
            rounded = [scaled(part, planned) for part in parts]
            flat = torch.cat([part.reshape(-1, part.shape[-1]) if linear else part.flatten() for part in rounded])
            found[planned.group or ""] += outliers(flat, planned, rows=linear)
        return {group: tuple(dict.fromkeys(texts)) for group, texts in found.items()}

    def cause(self, group: str, alone: float, findings: tuple[str, ...]) -> Diagnosis:
        """Return what a group costs, with the setting that gains most; without findings, only float is tried."""
        fixes = [*(self._cures(group, alone) if findings else ()), *self._in_float(group)]
        # What leaves a group in float is the last resort.
        settings = [fix for fix in fixes if math.isfinite(fix.alone_db)] or fixes
        best = max(settings, key=lambda fix: fix.gain_db, default=None)
        return Diagnosis(group=group, sqnr_db=alone, findings=findings, fix=best, notes=self._notes(group, findings))

    def _cures(self, group: str, alone: float) -> list[Fix]:
        if self._tried is None:
            self._tried = [self._try(setting) for setting in self._settings]
        return [
            Fix(setting=_text(whole_setting(self._config, setting)), gain_db=whole - self._whole, alone_db=gain)
            for setting, plan, whole in self._tried
            if whole - self._whole >= _LEAST_DB / 2
            and group in operands_of(plan)
            and math.isfinite(gain := self.sqnr(plan, group) - alone)
            and gain >= _LEAST_DB
        ]

    def _try(self, setting: Mapping[str, Any]) -> tuple[Mapping[str, Any], Plan, float]:
        session = CalibrationSession(settings_of(with_setting(self._config, setting)), self._model)
        with warnings.catch_warnings():
            # A few batches leave doubts that all of them do not.
            warnings.simplefilter("ignore", CalibrationWarning)
            run_batches(session.proxy, self._given, progress=False)
            plan = session.decide()
        return setting, plan, self.sqnr(plan)

    def _in_float(self, group: str) -> list[Fix]:
        sites = sorted(path for path in self._plan if group in self._groups_of(path))
        left = with_fallback(self._plan, {group: ""})
        if not any(entry.quantized for entry in left.values()):
            # To quantize nothing is no fix.
            return []
        gain = self.sqnr(left) - self._whole
        if gain < _LEAST_DB / 2:
            return []
        setting = whole_setting(self._config, {"exclude": {"sites": sites}})
        return [Fix(setting=_text(setting), gain_db=gain, alone_db=math.inf)]

    def _notes(self, group: str, findings: tuple[str, ...]) -> tuple[str, ...]:
        """Return why outliers cannot move into the weights, from the plan and those that tried it."""
        if not findings:
            return ()
        tried = [plan for setting, plan, _ in self._tried or () if "smoothquant_alpha" in setting["activations"]]
        texts = (
            operand.smoothing
            for plan in (self._plan, *tried)
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


_RATIO = 8.0
"""How many times as large as the median a channel or a token must be to count: three of the eight bits are lost."""

_HOLDS = 4.0
"""Channels above the largest magnitude divided by this count as those that hold the range."""

_TOKENS = 0.01
"""The largest share of the rows that count as single tokens."""


def scaled(x: Tensor, planned: OperandPlan) -> Tensor:
    """Return an activation as it is rounded: times its factors [K], which lie along an axis of the whole tensor."""
    if planned.factor is None:
        return x
    assert planned.smooth_axis is not None
    moved = x.movedim(planned.smooth_axis, -1) * planned.factor.to(x.device)
    return moved.movedim(-1, planned.smooth_axis)


def outliers(x: Tensor, planned: OperandPlan, *, rows: bool) -> list[str]:
    """Return what is wrong with the range of an activation, in words; empty if nothing stands out."""
    found = [] if not rows else _by_structure(x.detach().float().reshape(-1, x.shape[-1]).abs())
    return [*found, *_clipped(x.detach().double(), planned)]


def _by_structure(x: Tensor) -> list[str]:
    """Return the finding of massive tokens, of two branches, or of a few large channels, in magnitudes x [N, K]."""
    by_row = x.amax(1)
    few = max(1, int(_TOKENS * len(x)))
    rest = x[by_row <= by_row.sort(descending=True).values[few]] if len(x) > few else x
    largest, typical = float(by_row.max()), float(rest.max())
    if typical > 0 and largest >= _RATIO * float(by_row.median()) and largest >= _HOLDS * typical:
        several = int((by_row > typical).sum())
        return [f"{_counted(several, 'token')} of {len(x)} hold its range, {largest / typical:.0f}x the rest"]
    m = rest.amax(0)
    half = _branches(m)
    if half is not None:
        return [half]
    median = float(m.median())
    if median > 0 and float(m.max()) >= _RATIO * median:
        several = int((m > m.max() / _HOLDS).sum())
        return [f"its channels differ by {float(m.max()) / median:.0f}x: {_counted(several, 'channel')} hold its range"]
    return []


def _branches(m: Tensor) -> str | None:
    """Return the finding of one range for two branches: all channels on one side of a cut far above the other side."""
    least = max(2, len(m) // 8)
    for cut in range(least, len(m) - least + 1):
        low, high = sorted((m[:cut], m[cut:]), key=lambda side: float(side.max()))
        if float(low.max()) > 0 and float(high.min()) > float(low.max()):
            ratio = float(high.max() / low.max())
            if ratio >= _RATIO:
                return (
                    f"one range for two branches: the channels before {cut} and those after it differ by {ratio:.0f}x"
                )
    return None


def _clipped(x: Tensor, planned: OperandPlan) -> list[str]:
    """Return the finding that clipping makes most of the rounding error."""
    dtype = qtype(planned.dtype)
    if planned.scale is None or planned.scale.numel() > 1 or dtype.is_float:
        return []
    scale, zero = float(planned.scale), planned.zero_point or 0
    beyond = x - x.clamp((dtype.qmin - zero) * scale, (dtype.qmax - zero) * scale)
    # Less than half of a step beyond is rounding, not clipping.
    beyond = beyond[beyond.abs() > scale / 2]
    error = float(beyond.square().sum())
    rounding = x.numel() * scale**2 / 12
    if error <= rounding:
        return []
    share = len(beyond) / x.numel()
    return [f"{100 * share:.2g}% of its values are clipped, {100 * error / (error + rounding):.0f}% of its error"]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
