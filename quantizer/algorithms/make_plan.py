"""The step from statistics to a plan, with the choices of all algorithms; which algorithms there are.

To add one, write a file with an ``Algorithm`` and put it into ``ALGORITHMS``. Their order is that of this list.
"""

from __future__ import annotations

import hashlib

import torch

from quantizer.algorithms import awq, cross_layer_equalization, gptq, range_search, reconstruction, site_ranges
from quantizer.algorithms.algorithm import Work
from quantizer.algorithms.bias_correction import corrected
from quantizer.algorithms.proxied import Proxied
from quantizer.algorithms.replay import OutputError
from quantizer.algorithms.settings import Settings
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import FEW, Enough, Known
from quantizer.observe.snapshot import snapshot
from quantizer.observe.statistics import Seen
from quantizer.plan.decide_operands import PlanSettings, formats_for
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.utils.distributed import get_world_size
from quantizer.utils.fingerprint import Fingerprint, tensors_digest

ALGORITHMS = (
    range_search.ALGORITHM,
    cross_layer_equalization.ALGORITHM,
    site_ranges.ALGORITHM,
    gptq.ALGORITHM,
    reconstruction.ALGORITHM,
    awq.ALGORITHM,
)
"""All algorithms but the correction of biases, which is measured with ranges and codes as they came out."""


def make_observation(proxy: Proxied) -> Observation:
    """Return an observation of a proxy, not attached yet."""
    settings = proxy.settings
    return Observation(
        proxy.sites,
        proxy.excluded,
        settings.make_calibrator,
        settings.off,
        proxy.skipped,
        keep=_kept(settings),
        channels=_channels(settings),
        all_experts=settings.all_experts,
    )


def _kept(settings: Settings) -> Enough | None:
    wanted = [algorithm.batches for algorithm in ALGORITHMS if algorithm.wanted(settings)]
    return max([*wanted, *([FEW] if settings.bias_correction else [])], key=lambda enough: enough.most, default=None)


def _channels(settings: Settings) -> tuple[str, ...]:
    """Return the kinds of site for whose inputs the range of each channel is needed."""
    wanted = (kind for algorithm in ALGORITHMS if algorithm.wanted(settings) for kind in algorithm.channels(settings))
    return tuple(dict.fromkeys(wanted))


def replays_batches(settings: Settings) -> bool:
    """Return whether the model is run again to choose ranges or codes, for which batches are kept."""
    return any(algorithm.wanted(settings) for algorithm in ALGORITHMS)


def keeps_batches(settings: Settings) -> bool:
    """Return whether batches are kept, since a plan takes runs of the model for ranges, codes or biases."""
    return _kept(settings) is not None


def needs_batches(settings: Settings) -> bool:
    """Return whether there is no plan without kept batches; other choices have a default for that case."""
    return any(algorithm.wanted(settings) and algorithm.needs_batches(settings) for algorithm in ALGORITHMS)


def sees_the_same(first: Settings, second: Settings, *, convolves: bool = True) -> bool:
    """Return whether calibration sees the same with both settings, so that its statistics serve either.

    The percentile of a range is taken from them later, and so is what the target of a backend wants.
    """
    results = not convolves or first.target.quantizes_outputs == second.target.quantizes_outputs
    return results and _seen_with(first) == _seen_with(second)


def _seen_with(settings: Settings) -> tuple[object, ...]:
    calibrator = settings.make_calibrator()
    kept = (type(calibrator), calibrator.histogram is None, _kept(settings), _channels(settings))
    return (settings.off, settings.include, settings.exclude, settings.all_experts, *kept)


def plan_settings(proxy: Proxied) -> PlanSettings:
    """Return the settings of a plan for ``proxy``: all that the plan depends on besides the data."""
    settings = proxy.settings
    return PlanSettings(
        formats=formats_for(
            proxy.module, proxy.sites, settings.default, settings.rules, settings.target, zero_point=settings.zero_point
        ),
        per_channel=settings.per_channel,
        weight_estimate=settings.weight_estimate,
        switches=settings.switches,
        scale_dtype=settings.target.torch_dtype,
        profile=settings.target,
        weights=proxy.weights,
    )


def make_plan(proxy: Proxied, observation: Seen) -> Plan:
    """Return the plan of a calibrated proxy, after the choices on kept batches that the configuration asks for.

    Ranges and codes of weights are chosen once, and again after more data; so are the shifts of biases, with ranges and
    codes as they came out. This runs the proxy, so pause its observation first. What was chosen for another backend
    whose plans are alike is taken over.
    """
    known = Known() if observation.kept is None else observation.kept.known
    work = Work(proxy=proxy, observed=observation, error=OutputError(proxy, known.errors), planned=plan_settings(proxy))
    digest = None
    if replays_batches(work.settings) and observation.batches not in (0, observation.chosen_at):
        observation.forget_choices()
        digest = _digest(work)
        chosen = None if digest is None else known.choices.get(digest)
        if chosen is None:
            with torch.no_grad():
                for algorithm in ALGORITHMS:
                    if algorithm.wanted(work.settings):
                        algorithm.choose(work)
        else:
            observation.take_choices(chosen)
        observation.chosen_at, observation.rounding = observation.batches, None
    plan = work.plan()
    if work.settings.bias_correction:
        plan = corrected(proxy, plan, observation, work.error, work.planned.scale_dtype)
    if digest is not None and digest not in known.choices:
        known.keep(digest, observation)
    return plan


def _digest(work: Work) -> str | None:
    """Return the SHA-256 of all that choices by running batches depend on; None: they are of this quantizer alone."""
    proxy, kept, buffers = work.proxy, work.observed.kept, dict(work.proxy.module.named_buffers())
    if kept is None or get_world_size() > 1 or not all(map(_has_plain_values, buffers.values())):
        return None
    traits = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in work.settings.target.plan_traits.items()
    }
    parts = [
        work.settings.alike,
        repr(traits),
        plan_digest(work.plan()),
        kept.digest,
        repr(Fingerprint.of(proxy.module).plain()),
        hashlib.sha256(snapshot(work.observed)).hexdigest(),
    ]
    return tensors_digest(buffers, "\0".join(parts))


def _has_plain_values(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor lie in memory as they are, none left out and none in codes."""
    held = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return held and not tensor.is_meta and not tensor.is_quantized
