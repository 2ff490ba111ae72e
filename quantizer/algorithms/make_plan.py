"""The step from statistics to a plan, with the choices of all algorithms; which algorithms there are.

To add one, write a file with an ``Algorithm`` and put it into ``CHOICES``. Their order is that of this list.
Algorithms of other packages, in ``algorithms``, come after them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from quantizer.algorithms import (
    awq,
    bias_correction,
    cross_layer_equalization,
    gptq,
    range_search,
    reconstruction,
    site_ranges,
)
from quantizer.algorithms.algorithm import Algorithm, Proxied, Work, algorithms
from quantizer.algorithms.settings import Settings
from quantizer.errors import CalibrationError
from quantizer.observe.batch_pass import Watched, calls_together
from quantizer.observe.completeness import Explanations
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import Enough, Known, ReplayBatches
from quantizer.observe.snapshot import snapshot
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.utils.distributed import get_world_size
from quantizer.utils.fingerprint import Fingerprint, tensors_digest
from quantizer.utils.registry import named_in_errors

CHOICES = (
    range_search.ALGORITHM,
    cross_layer_equalization.ALGORITHM,
    site_ranges.ALGORITHM,
    gptq.ALGORITHM,
    reconstruction.ALGORITHM,
    awq.ALGORITHM,
)
"""The algorithms that choose ranges, factors and codes, which a folder keeps with the statistics."""

AFTERWARDS = (bias_correction.ALGORITHM,)
"""Those that measure with ranges and codes as they came out, of which a folder keeps the plan alone."""


def _choices(settings: Settings) -> dict[str, Algorithm]:
    """Return the algorithms that choose and that settings ask for, in their order, by what errors call them."""
    named = {one.run.__module__: one for one in CHOICES} | {repr(name): algorithms[name] for name in algorithms}
    return {name: one for name, one in named.items() if one.wanted(settings)}


def _afterwards(settings: Settings) -> dict[str, Algorithm]:
    return {one.run.__module__: one for one in AFTERWARDS if one.wanted(settings)}


def _wanted(settings: Settings) -> list[Algorithm]:
    return [*_choices(settings).values(), *_afterwards(settings).values()]


def make_observation(proxy: Proxied) -> Observation:
    """Return an observation of a proxy, not attached yet."""
    settings, enough = proxy.settings, _kept(proxy.settings)
    watched = Watched(
        make=settings.make_calibrator,
        refused=proxy.excluded,
        off=settings.off,
        channels=_channels(settings),
        all_experts=settings.all_experts,
        together=calls_together(proxy.sites, settings.all_experts),
        explanations=Explanations(proxy.skipped),
    )
    return Observation(proxy.sites, watched, None if enough is None else ReplayBatches(enough=enough))


def _kept(settings: Settings) -> Enough | None:
    return max((one.batches for one in _wanted(settings)), key=lambda enough: enough.most, default=None)


def _channels(settings: Settings) -> tuple[str, ...]:
    """Return the kinds of site for whose inputs the range of each channel is needed."""
    return tuple(dict.fromkeys(kind for one in _wanted(settings) for kind in one.channels(settings)))


def replays_batches(settings: Settings) -> bool:
    """Return whether the model is run again to choose ranges or codes, for which batches are kept."""
    return bool(_choices(settings))


def keeps_batches(settings: Settings) -> bool:
    """Return whether batches are kept, since a plan takes runs of the model for ranges, codes or biases."""
    return _kept(settings) is not None


def needs_batches(settings: Settings) -> bool:
    """Return whether there is no plan without kept batches; other choices have a default for that case."""
    return any(one.needs_batches(settings) for one in _wanted(settings))


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


def make_plan(proxy: Proxied, observed: Seen) -> Plan:
    """Return the plan of a calibrated proxy, after all algorithms that the settings ask for.

    Their choices are noted in the statistics, and made again after more data. This runs the proxy, so pause its
    observation first. What was chosen for another backend whose plans are alike is taken over.
    """
    work, settings, digest = Work.of(proxy, observed), proxy.settings, None
    known = Known() if observed.kept is None else observed.kept.known
    with torch.no_grad():
        if observed.batches == 0:
            return work.plan()
        is_due = replays_batches(settings) and observed.chosen_at != observed.batches
        if is_due:
            observed.forget_choices()
        plan = work.plan()
        if is_due:
            digest = _digest(plan, work)
            if digest in known.choices:
                observed.take_choices(known.choices[digest])
                plan = work.plan()
            else:
                plan = _carried_out(_choices(settings), plan, work)
            observed.chosen_at, observed.rounding = observed.batches, None
        plan = _carried_out(_afterwards(settings), plan, work)
    if digest is not None and digest not in known.choices:
        known.keep(digest, observed)
    return plan


def _carried_out(wanted: Mapping[str, Algorithm], plan: Plan, work: Work) -> Plan:
    for name, algorithm in wanted.items():
        with named_in_errors(f"algorithm {name}"):
            plan = algorithm.run(plan, work)
        if not isinstance(plan, dict):
            raise CalibrationError(f"algorithm {name}: run() returned {plan!r}; expected a plan, such as work.plan()")
    return plan


def _digest(plan: Plan, work: Work) -> str | None:
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
        repr(list(algorithms)),
        repr(traits),
        plan_digest(plan),
        kept.digest,
        repr(Fingerprint.of(proxy.module).plain()),
        hashlib.sha256(snapshot(work.observed)).hexdigest(),
    ]
    return tensors_digest(buffers, "\0".join(parts))


def _has_plain_values(tensor: torch.Tensor) -> bool:
    """Return whether all values of a tensor lie in memory as they are, none left out and none in codes."""
    held = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return held and not tensor.is_meta and not tensor.is_quantized
