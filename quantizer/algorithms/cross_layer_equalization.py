"""Cross-layer equalization of consecutive convolutions (Nagel et al. 2019, arXiv:1906.04721), as factors in the plan.

Legend: W1 [C, ..] and W2 the weights of two convolutions, x [B, C, ..] the input of the second, s [C] the factors of
``numerics/weight_codes.py``.

The quantizer of x divides by s, and W2 * s is quantized. With one scale t for all channels, W1 is quantized as W1 / s,
so its channel i has the scale t * s_i. Export folds 1 / s into the first convolution, whose file then has one scale
again. Every operation in between must treat each channel by itself. If the target quantizes the output of the first
convolution, the quantizer of x replaces that of the output. A batch norm between them is not part of W1.

Pairs are equalized in turn until nothing changes, and only if it may help: weights have one scale, or the channels of
an input differ so much that one scale leaves most of them few quantized values. The factors are kept if they reduce the
error of the model's output on the stored batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.algorithms.algorithm import Algorithm, Work
from quantizer.algorithms.replay import SiteCall, visit_calls
from quantizer.algorithms.smoothquant import held_factors, weight_record
from quantizer.numerics.weight_codes import equalizing_factors
from quantizer.observe.range_group import ChannelRange, Migration, OperandRecord, RangeGroup
from quantizer.observe.snapshot import add_over_ranks
from quantizer.observe.statistics import Seen
from quantizer.plan.reasons import ReasonCode
from quantizer.plan.site_plan import Plan, SitePlan

_RATIO = 8.0
"""The ratio of the largest channel to the median beyond which one scale leaves half of the channels 5 bits."""

_ROUNDS = 20
"""The largest number of rounds over all pairs; the paper repeats until nothing changes."""

_SETTLED = 1e-3


@dataclass(kw_only=True, slots=True, eq=False)
class _Pair:
    """Two consecutive convolutions.

    Attributes:
        first: the weight of the first.
        second: the weight of the second.
        read: the input of the second.
        site: the site of the second.
        operand: the name of its input.
        axis: the axis of the channels in the second weight: 1, or 0 for a depthwise convolution.
        channels: the range of each channel of the input.
        results: the output sites of the first convolution.
        factors: s [C], float64.
    """

    first: OperandRecord
    second: OperandRecord
    read: OperandRecord
    site: str
    operand: str
    axis: int
    channels: ChannelRange
    results: Sequence[str]
    factors: Tensor


def equalize_where_better(plan: Plan, work: Work) -> Plan:
    """Equalize consecutive convolutions if the error of the model's output falls; record why others are not."""
    observation = work.observed
    reasons: dict[str, str] = {}
    pairs = list(_pairs(plan, observation, reasons))
    if work.planned.per_channel and all(_ratio(pair.channels) <= _RATIO for pair in pairs):
        return plan
    for path, reason in reasons.items():
        record = next(record for record in observation.records[path].operands.values() if record.weight is None)
        record.left = f"not equalized: {reason}"
    if not pairs:
        return work.plan()
    _solve(pairs)
    batches = work.kept.few()
    before = work.error.of_all_ranks(plan, batches)
    _use_factors(work, pairs)
    equalized = work.plan()
    if work.error.of_all_ranks(equalized, batches, before) < before:
        return equalized
    for pair in pairs:
        pair.first.spread = pair.read.smoothed = None
        for result in pair.results:
            observation.records[result].left = None
        pair.read.left = "not equalized: the error of the model's output is smaller without"
    return work.plan()


def _pairs(plan: Plan, observation: Seen, reasons: dict[str, str]) -> Iterator[_Pair]:
    """Yield the pairs that can be equalized; add the reason for other convolutions to ``reasons``."""
    for path, entry in plan.items():
        if entry.kind != "conv" or not _quantizes_both(entry):
            continue
        name = next(operand.name for operand in entry.operands if operand.role == "activation")
        pair = _pair(plan, observation, path, name)
        if isinstance(pair, str):
            reasons[path] = pair
        else:
            yield pair


def _pair(plan: Plan, observation: Seen, path: str, name: str) -> _Pair | str:
    """Return the pair whose second convolution is ``path``, or why there is none."""
    records = observation.records[path].operands
    read, second = records[name], weight_record(observation, path)
    group, before = read.group, read.layer_before
    sharing = {} if group is None else {other.rpartition(".")[0]: other for other in group.operands}
    results = [other for other in sharing if other in plan and plan[other].kind == "output"]
    # Operations on an output are quantized only if the output is.
    followers = (other for other, entry in plan.items() if any(result in entry.follows for result in results))
    other_readers = [
        other for other, operand in sharing.items() if operand != f"{path}.{name}" and other not in results
    ]
    other_readers += followers
    if other_readers:
        return f"{other_readers[0]} reads the same tensor"
    if not before or any(plan[result].follows != (before,) for result in results):
        return "its input is not a convolution's output followed only by channelwise operations"
    if before not in plan or not _quantizes_both(plan[before]):
        return f"{before} before it is not quantized"
    first = weight_record(observation, before)
    if first is None or second is None or first.weight is None or second.weight is None:
        return "the weight of a convolution is computed, so factors cannot be folded into it"
    rows, shape = first.weight.tensor(), second.weight.tensor().shape
    if first.axis != 0 or second.axis != 0 or group is None or group.channels is None:
        return "a convolution is transposed, or its number of channels varies"
    channels = len(rows)
    axis = 1 if shape[1] == channels else 0 if shape[1] == 1 and shape[0] == channels else None
    if axis is None or len(group.channels.low) != channels:
        return "its groups have several channels each"
    return _Pair(
        first=first,
        second=second,
        read=read,
        site=path,
        operand=name,
        axis=axis,
        channels=group.channels,
        results=results,
        factors=torch.ones(channels, dtype=torch.float64),
    )


def _quantizes_both(entry: SitePlan) -> bool:
    # Weights in blocks have their scales along the input channels.
    all_quantized = all(operand.quantized and operand.block_size is None for operand in entry.operands)
    return entry.quantized and all_quantized


def _ratio(channels: ChannelRange) -> float:
    magnitude = channels.magnitude[channels.magnitude > 0]
    return float(magnitude.max() / magnitude.median()) if len(magnitude) else 1.0


def _solve(pairs: Sequence[_Pair]) -> None:
    """Compute the factors of all pairs; a convolution may be the first of one pair and the second of another."""
    weights = {id(record): _values(record) for pair in pairs for record in (pair.first, pair.second)}
    for _ in range(_ROUNDS):
        largest = 0.0
        for pair in pairs:
            first, second = weights[id(pair.first)], weights[id(pair.second)]
            s = equalizing_factors(_channel_magnitudes(first, 0), _channel_magnitudes(second, pair.axis))
            first /= _along(s, first, 0)
            second *= _along(s, second, pair.axis)
            pair.factors = pair.factors.to(s.device) * s
            largest = max(largest, float(s.log().abs().max()))
        if largest < _SETTLED:
            return


def _values(record: OperandRecord) -> Tensor:
    assert record.weight is not None
    return record.weight.tensor().detach().double().abs()


def _channel_magnitudes(weight: Tensor, axis: int) -> Tensor:
    return weight.movedim(axis, 0).flatten(1).amax(1)


def _along(factors: Tensor, value: Tensor, axis: int) -> Tensor:
    return factors.to(value.device).reshape([-1] + [1] * (value.dim() - 1 - axis))


def _use_factors(work: Work, pairs: Sequence[_Pair]) -> None:
    """Set the factors and the ranges of x / s on the stored batches."""
    by_site = {pair.site: (pair, *_group(pair, work)) for pair in pairs}

    def visit(call: SiteCall) -> None:
        pair, group, factors = by_site[call.site.path]
        x = call.operand(pair.operand)
        if isinstance(x, Tensor):
            divided = x / _along(factors, x, x.dim() + 1 - _weight_axes(pair))
            group.observe(divided, pair.read.tensor_of(call.number))

    sites = [site for site in work.proxy.sites if site.path in by_site]
    visit_calls(work.proxy.module, sites, work.kept.few(), visit, "equalizing")
    add_over_ranks([equalized.calibrator for _, group, _ in by_site.values() for equalized in (group, *group.parts)])
    for pair, group, factors in by_site.values():
        if not group.calibrator.count:
            pair.read.left = "not equalized: no stored batch reaches it"
            continue
        assert pair.read.group is not None
        for original, equalized in zip((pair.read.group, *pair.read.group.parts), (group, *group.parts), strict=True):
            if original.channels is not None and equalized.calibrator.count:
                low, high = original.channels.low / factors, original.channels.high / factors
                equalized.calibrator.widen(float(low.min()), float(high.max()))
        pair.read.smoothed = group
        for result in pair.results:
            work.observed.records[result].left = ReasonCode.EQUALIZED_BEHIND.text()
        if not work.planned.per_channel:
            pair.first.spread = factors


def _group(pair: _Pair, work: Work) -> tuple[RangeGroup, Tensor]:
    """Return an empty range group for x / s, and s rounded to the target's float type."""
    factors = held_factors(pair.factors.reciprocal(), work.planned.scale_dtype)
    migration = Migration(alpha=None, factors=factors, axis=1 - _weight_axes(pair), weight_axis=pair.axis)
    assert pair.read.group is not None
    return pair.read.group.migrated(migration, [f"{pair.site}.{pair.operand}"], work.settings.make_calibrator), factors


def _weight_axes(pair: _Pair) -> int:
    assert pair.second.weight is not None
    return pair.second.weight.tensor().dim()


ALGORITHM = Algorithm(
    wanted=lambda settings: settings.smoothquant_alpha is not None,
    run=equalize_where_better,
    channels=lambda settings: ("conv",),
)
