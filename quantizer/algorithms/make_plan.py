"""The step from statistics to a plan, with the choices of all algorithms.

To add an algorithm, write a file with an ``Algorithm`` and add it to ``CHOICES``, which defines the order. Algorithms
of other packages, in ``algorithms``, run after them.
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
from quantizer.algorithms.replay import counted_runs
from quantizer.algorithms.settings import Settings
from quantizer.errors import CalibrationError
from quantizer.observe.batch_pass import Watched, calls_together
from quantizer.observe.completeness import Explanations
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import Enough, Known, ReplayBatches
from quantizer.observe.snapshot import snapshot
from quantizer.observe.statistics import Seen
from quantizer.observe.stored_choices import choices_bytes, restored_choices
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
"""The algorithms that choose ranges, factors and integers; a folder saves their choices with the statistics."""

AFTERWARDS = (bias_correction.ALGORITHM,)
"""The algorithms that run with the chosen ranges and integers; a folder saves only the resulting plan."""


def _choices(settings: Settings) -> dict[str, Algorithm]:
    """Return the requested algorithms that make choices, in order, by their names in errors."""
    by_name = {algorithm.run.__module__: algorithm for algorithm in CHOICES} | {
        repr(name): algorithms[name] for name in algorithms
    }
    return {name: algorithm for name, algorithm in by_name.items() if algorithm.wanted(settings)}


def _afterwards(settings: Settings) -> dict[str, Algorithm]:
    return {algorithm.run.__module__: algorithm for algorithm in AFTERWARDS if algorithm.wanted(settings)}


def _requested(settings: Settings) -> list[Algorithm]:
    return [*_choices(settings).values(), *_afterwards(settings).values()]


def make_observation(proxy: Proxied) -> Observation:
    """Return an observation of a proxy, not attached yet."""
    settings, enough = proxy.settings, _stored_batches(proxy.settings)
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


def _stored_batches(settings: Settings) -> Enough | None:
    return max((algorithm.batches for algorithm in _requested(settings)), key=lambda enough: enough.most, default=None)


def _channels(settings: Settings) -> tuple[str, ...]:
    """Return the kinds of site whose inputs need a range per channel."""
    return tuple(dict.fromkeys(kind for algorithm in _requested(settings) for kind in algorithm.channels(settings)))


def replays_batches(settings: Settings) -> bool:
    """Return whether stored batches run again to choose ranges or integers."""
    return bool(_choices(settings))


def keeps_batches(settings: Settings) -> bool:
    """Return whether calibration stores batches, because ranges, integers or biases need runs of the model."""
    return _stored_batches(settings) is not None


def needs_batches(settings: Settings) -> bool:
    """Return whether no plan exists without stored batches; other choices have a default."""
    return any(algorithm.needs_batches(settings) for algorithm in _requested(settings))


def sees_the_same(first: Settings, second: Settings, *, convolves: bool = True) -> bool:
    """Return whether calibration with both settings gives the same statistics.

    The percentile of a range and the preferences of a backend are applied later, so they do not matter.
    """
    same_outputs = not convolves or first.target.quantizes_outputs == second.target.quantizes_outputs
    return same_outputs and _statistics_key(first) == _statistics_key(second)


def _statistics_key(settings: Settings) -> tuple[object, ...]:
    calibrator = settings.make_calibrator()
    replay = (type(calibrator), calibrator.histogram is None, _stored_batches(settings), _channels(settings))
    return (settings.off, settings.include, settings.exclude, settings.all_experts, *replay)


def make_plan(proxy: Proxied, observed: Seen) -> Plan:
    """Return the plan of a calibrated proxy, after all algorithms that the settings request.

    Their choices are recorded in the statistics, and made again after more data. This runs the proxy, so pause its
    observation first. Choices for another backend with equivalent plans are reused, and so are stored choices.
    """
    work, settings, digest = Work.of(proxy, observed), proxy.settings, None
    known = Known() if observed.kept is None else observed.kept.known
    with torch.no_grad(), counted_runs() as runs:
        if observed.batches == 0:
            return work.plan()
        is_due = replays_batches(settings) and observed.chosen_at != observed.batches
        if is_due:
            observed.forget_choices()
        plan = work.plan()
        if is_due or (known.store.folder is not None and _needs_shifts(settings, observed)):
            digest = _digest(plan, work)
        if digest is not None and (chosen := _known_choices(known, digest, work)) is not None:
            observed.take_choices(chosen)
            plan = work.plan()
        elif is_due:
            plan = _run_algorithms(_choices(settings), plan, work)
        if is_due:
            observed.chosen_at, observed.rounding = observed.batches, None
        plan = _run_algorithms(_afterwards(settings), plan, work)
    observed.replayed += runs["batches"]
    if digest is not None and digest not in known.choices:
        known.keep(digest, observed)
        if known.store.folder is not None:
            known.store.put_bytes([digest], choices_bytes(observed))
    return plan


def _needs_shifts(settings: Settings, observed: Seen) -> bool:
    """Return whether shifts of biases are due."""
    return bool(_afterwards(settings)) and (observed.bias_shifts is None or observed.bias_shifts[0] != observed.batches)


def _known_choices(known: Known, digest: str, work: Work) -> Seen | None:
    """Return the choices of an earlier plan with equal inputs, from memory or from the store; None without any."""
    if digest not in known.choices and (data := known.store.find_bytes([digest])) is not None:
        paths, make = work.observed.records.keys(), work.settings.make_calibrator
        known.keep(digest, restored_choices(data, work.proxy.module, paths, make))
    return known.choices.get(digest)


def _run_algorithms(requested: Mapping[str, Algorithm], plan: Plan, work: Work) -> Plan:
    for name, algorithm in requested.items():
        with named_in_errors(f"algorithm {name}"):
            plan = algorithm.run(plan, work)
        if not isinstance(plan, dict):
            raise CalibrationError(f"algorithm {name}: run() returned {plan!r}; expected a plan, such as work.plan()")
    return plan


def _digest(plan: Plan, work: Work) -> str | None:
    """Return the SHA-256 of all inputs of choices made by running batches; None if they cannot be shared."""
    proxy, batches, buffers = work.proxy, work.observed.kept, dict(work.proxy.module.named_buffers())
    if batches is None or get_world_size() > 1 or not all(map(_has_plain_values, buffers.values())):
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
        batches.digest,
        repr(Fingerprint.of(proxy.module).plain()),
        hashlib.sha256(snapshot(work.observed)).hexdigest(),
    ]
    return tensors_digest(buffers, "\0".join(parts))


def _has_plain_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and neither quantized nor a subclass."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized
