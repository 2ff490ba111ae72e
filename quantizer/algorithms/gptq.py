"""GPTQ: choose the integers of weights from data, tensor by tensor in the order in which the model computes.

The inputs of a weight come from stored batches without padding, with all preceding weights already rounded by GPTQ and
activations quantized (and smoothed) as planned. Weights that multiply one tensor are rounded together, so memory holds
H (see ``numerics/weight_codes.py``) of one tensor at a time. A weight keeps rounding to nearest unless its integers
reduce the error of its own output.

INT4 has only 15 values per scale, so the range matters as much as the integers. With calibrator ``max`` the range is
the share of the largest magnitude with the least sum of c (w_r - w)^2, where c is the cost of an error in that column
for GPTQ. Finally ranges are multiplied so that outputs keep the magnitude of float outputs (``output_gains``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from quantizer.algorithms.algorithm import (
    UNREACHED,
    Algorithm,
    Work,
    nearest,
    progress,
    record,
    stored_weights,
    why_nearest,
    with_all_batches,
)
from quantizer.algorithms.replay import Replay, quantized
from quantizer.functional import fake_quantize
from quantizer.numerics.formats import INT4, INT8, qtype
from quantizer.numerics.granularity import scale_of_each
from quantizer.numerics.weight_codes import column_costs, gptq_codes, output_error, output_gains
from quantizer.observe.range_group import RangeGroup, RoundedWeight
from quantizer.observe.replay_batches import MANY
from quantizer.observe.statistics import with_zeroed_padding
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import as_rounded, least_error_amax, over_scale, with_range
from quantizer.proxy.site import Site
from quantizer.proxy.weight import laid_out
from quantizer.rewrite.product_sizes import labels
from quantizer.utils.progress import counted

_PRODUCT = 2  # operands

_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""The shares of the largest magnitude that are compared as ranges of INT4."""

_Refused = dict[str, str]
"""The reasons why weights are rounded to nearest, by ``SITE.OPERAND``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weighted:
    """A site whose weight is rounded."""

    site: Site
    place: int
    weight: OperandPlan
    other: OperandPlan
    group: RangeGroup | None
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        return f"{self.site.path}.{self.weight.name}"

    def round_as(self, chosen: RoundedWeight, settings: PlanSettings) -> None:
        quantizer, plan = self.site.quantizer(self.place), self.ranged(chosen.amax, settings)
        assert plan.scale is not None
        quantizer.set_scale(plan.scale, plan.dtype, plan.axis, plan.block_size)
        quantizer.set_codes(chosen.codes)

    def ranged(self, amax: Tensor | None, settings: PlanSettings) -> OperandPlan:
        return with_range(self.weight, amax, settings.scale_dtype, settings.profile.weight_qmax)

    @property
    def shares(self) -> tuple[Any, ...]:
        """The key of weights with one H; only linear layers always read the last axis of their input."""
        alone = self.site if self.group is None or self.site.operation.name != "linear" else None
        return self.group, self.other.quantized, self.other.dtype, alone


def round_weights(plan: Plan, work: Work) -> Plan:
    """Choose the integers of all weights that a plan quantizes, and the ranges of those in INT4.

    Set ``rounded`` of their records. After an interrupt the next call continues with the unfinished tensor, if nothing
    else changed.
    """
    refused: _Refused = {}
    weights, done = list(_weights(plan, work, refused)), progress(plan, work).weights
    with with_all_batches(work), quantized(work.proxy, plan):
        passes = Replay(work.proxy, work.kept)
        units = _units(weights, passes)
        with counted(units, "rounding weights", unit="tensor") as steps:
            for unit in steps:
                if any(weighted.name not in done for weighted in unit):
                    done.update(_rounded(unit, passes, work.planned, work.settings.act_order))
                for weighted in unit:
                    weighted.round_as(done[weighted.name], work.planned)
    reached = {weighted.name for unit in units for weighted in unit}
    refused |= {weighted.name: UNREACHED for weighted in weights if weighted.name not in reached}
    record(work.observed, {**{name: nearest(why) for name, why in refused.items()}, **done})
    return work.plan()


def _weights(plan: Plan, work: Work, refused: _Refused) -> Iterator[_Weighted]:
    """Yield the sites whose weights can be rounded by data; add the reason for others to ``refused``."""
    stored = stored_weights(plan)
    for site in work.proxy.planned(plan):
        entry = plan[site.path]
        names = [operand.name for operand in site.operation.operands]
        weight = next((o for o in entry.operands if o.quantized and o.role == "weight"), None)
        # The entries of an embedding multiply nothing, so rounding to nearest is best.
        if weight is None or entry.kind == "embedding":
            continue
        name, why = f"{site.path}.{weight.name}", why_nearest(weight, stored, "gptq")
        if why is None and len(names) != _PRODUCT:
            why = f"its operation is {site.operation.name}"
        if why is not None:
            refused[name] = why
        else:
            records = work.observed.records[site.path].operands
            parameter, other = records[weight.name].weight, next(o for o in entry.operands if o.name != weight.name)
            assert parameter is not None
            yield _Weighted(
                site=site,
                place=names.index(weight.name),
                weight=weight,
                other=other,
                group=records[other.name].group if other.name in records else None,
                read=parameter.tensor,
            )


def _units(weights: Iterable[_Weighted], passes: Replay) -> list[list[_Weighted]]:
    """Return the reached weights, grouped by shared H, in the order of their first calls."""
    by_site = {weighted.site: weighted for weighted in weights}
    units: dict[tuple[Any, ...], list[_Weighted]] = {}
    for site in passes.in_order(by_site):
        units.setdefault(by_site[site].shares, []).append(by_site[site])
    return list(units.values())


@dataclass(kw_only=True, slots=True, eq=False)
class _Inputs:
    """The statistics of the rows x [G, M, K] that weights multiply.

    Attributes:
        hessian: the sum of x^T x, float64 [G, K, K]; None: no rows yet.
        total: the sum of x, float64 [G, 1, K].
        rows: M, without rows of zeros.
    """

    hessian: Tensor | None = None
    total: Tensor | None = None
    rows: int = 0

    def add(self, x: Tensor) -> None:
        """Add rows x [G, M, K]."""
        squares, values = (x.mT @ x).double(), x.double().sum(-2, keepdim=True)
        self.hessian = squares if self.hessian is None else self.hessian.add_(squares)
        self.total = values if self.total is None else self.total.add_(values)
        self.rows += int((x != 0).any(-1).any(0).sum())

    @property
    def covariance(self) -> Tensor:
        """The sum of (x - mean)^T (x - mean), float64 [G, K, K]."""
        assert self.hessian is not None
        assert self.total is not None
        return self.hessian - self.total.mT @ self.total / max(self.rows, 1)


def _rounded(unit: list[_Weighted], passes: Replay, settings: PlanSettings, by_size: bool) -> dict[str, RoundedWeight]:
    """Return the rounding of the weights that multiply one tensor, by name."""
    first, inputs = unit[0], _Inputs()
    products: dict[str, ProductRows | str] = {}

    def visit(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
        x = site.quantizer(1 - first.place)(site.argument(1 - first.place, args, keywords))
        x = with_zeroed_padding(x, mask, channels_last=site.operation.name == "linear")
        for weighted in unit:
            rows = product_rows(weighted.site, weighted.place, x, weighted.read(), args, keywords)
            if products.setdefault(weighted.name, rows) != rows:
                products[weighted.name] = "its operation differs between calls"
        product = products[first.name]
        if not isinstance(product, str):
            for part in product.inputs(x.float()):
                inputs.add(part)

    passes.visit(first.site, visit)
    # A model that routes its data may skip the site after preceding weights were rounded.
    return {
        weighted.name: _best(weighted, products.get(weighted.name, UNREACHED), inputs, settings, by_size)
        for weighted in unit
    }


def _best(
    weighted: _Weighted, product: ProductRows | str, inputs: _Inputs, settings: PlanSettings, by_size: bool
) -> RoundedWeight:
    """Return the integers of a weight by GPTQ, if they reduce the error, else rounding to nearest."""
    if isinstance(product, str) or inputs.hessian is None:
        return nearest(product if isinstance(product, str) else UNREACHED)
    values, kind, qmax = (
        as_rounded(weighted.weight, weighted.read()),
        qtype(weighted.weight.dtype),
        settings.profile.weight_qmax,
    )
    costs = column_costs(inputs.hessian, rows=inputs.rows, by_size=by_size)
    if costs is None:
        return nearest("the squares of its inputs exceed float32")
    # With one scale and a factor per channel (equalization) there is no range to choose.
    chooses_range = kind == INT4 and weighted.weight.spread is None
    amax = (
        _range(weighted.weight, values, product, costs) if chooses_range and weighted.weight.estimate is None else None
    )
    weight, steps = product.weight(values), product.weight(_scales_of_values(weighted.ranged(amax, settings), values))
    low, high = (int(kind.qmin), int(kind.qmax)) if qmax is None or kind != INT8 else (-qmax, qmax)
    codes = gptq_codes(weight, inputs.hessian, steps, low, high, rows=inputs.rows, by_size=by_size)
    assert codes is not None
    if chooses_range:
        gains = output_gains(weight, codes * steps, inputs.covariance)[..., None].expand_as(weight)
        amax = _scaled_range(
            weighted.weight if amax is None else replace(weighted.weight, amax=amax), product.as_weight(gains)
        )
        steps = product.weight(_scales_of_values(weighted.ranged(amax, settings), values))
    nearest_values = product.weight(_nearest(weighted.weight, values))
    error, former = (output_error(weight, candidate, inputs.hessian) for candidate in (codes * steps, nearest_values))
    if not error < former:
        return nearest("gptq does not reduce the error")
    text = f"gptq, {error / former:.2f} of the error of rounding to nearest"
    return RoundedWeight(codes=product.as_weight(codes), text=text, amax=amax)


def _range(weight: OperandPlan, values: Tensor, product: ProductRows, costs: Tensor) -> Tensor:
    """Return the range of each scale for which rounding to nearest costs least.

    Args:
        weight: the plan of the weight.
        values: the values to quantize [*].
        product: the layout of the weight as rows.
        costs: the cost of an error in each column of the rows [G, K].
    """
    assert weight.amax is not None
    of_each = product.as_weight(costs[:, None, :].expand(product.weight(values).shape).to(values.dtype))
    kind = qtype(weight.dtype)
    return least_error_amax(values, weight.amax, weight.axis, weight.block_size, kind, _SHARES, of_each)


def _scaled_range(weight: OperandPlan, gains: Tensor) -> Tensor:
    """Return the range of each scale times the mean of its values' gains [*]."""
    assert weight.amax is not None
    return weight.amax * over_scale(gains.to(weight.amax.dtype), weight.axis, weight.block_size, torch.mean)


def _nearest(weight: OperandPlan, values: Tensor) -> Tensor:
    """Return the values [*] rounded to nearest with the scale of the calibrator."""
    assert weight.scale is not None
    return fake_quantize(values, weight.scale, weight.dtype, axis=weight.axis, block_size=weight.block_size)


def _scales_of_values(weight: OperandPlan, values: Tensor) -> Tensor:
    """Return the scale of each value [*]."""
    assert weight.scale is not None
    return scale_of_each(weight.scale, values.shape, weight.axis, weight.block_size)


class ProductRows(Protocol):
    """A multiplication by a weight, laid out as rows."""

    def weight(self, values: Tensor) -> Tensor:
        """Return values in the weight's own shape as [G, N, K]."""

    def as_weight(self, rows: Tensor) -> Tensor:
        """Return values [G, N, K] in the weight's own shape, contiguous."""

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield all rows of the other operand, in parts [G, M, K]."""


def product_rows(
    site: Site, place: int, x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]
) -> ProductRows | str:
    """Return the rows of a site's multiplication by a weight; otherwise the reason why it has none."""
    name = site.operation.name
    if name in ("conv1d", "conv2d", "conv3d"):
        return _convolution(x, weight, args, keywords)
    equation = site.source.equation or _equation(name, x if place else weight, weight if place else x)
    return f"its operation is {name}" if equation is None else _contraction(equation, place, x, weight)


def _equation(name: str, lhs: Tensor, rhs: Tensor) -> str | None:
    """Return a matrix multiplication as an equation of ``einsum``; None for other operations."""
    if name == "linear":
        return "...k,nk->...n"
    if name == "addbmm":
        return "bmk,bkn->mn"
    if name in ("matmul", "mm", "bmm", "addmm", "baddbmm"):
        first, second = "...mk" if lhs.dim() > 1 else "k", "...kn" if rhs.dim() > 1 else "k"
        output = ("m" if lhs.dim() > 1 else "") + ("n" if rhs.dim() > 1 else "")
        return f"{first},{second}->...{output}" if lhs.dim() > 1 or rhs.dim() > 1 else "k,k->"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contraction:
    """A multiplication that an einsum equation describes.

    Attributes:
        weight_axes: the axes of the weight, in the order batch, own, summed.
        other_axes: the same of the other operand.
        batch: the number of batch axes.
        summed: the number of summed axes.
        shape: the shape of the weight.
    """

    weight_axes: tuple[int, ...]
    other_axes: tuple[int, ...]
    batch: int
    summed: int
    shape: tuple[int, ...]

    def weight(self, values: Tensor) -> Tensor:
        return self._rows(values.permute(self.weight_axes))

    def as_weight(self, rows: Tensor) -> Tensor:
        inverse = [self.weight_axes.index(axis) for axis in range(len(self.shape))]
        return laid_out(rows.reshape([self.shape[axis] for axis in self.weight_axes]).permute(inverse))

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        yield self._rows(x.permute(self.other_axes))

    def _rows(self, values: Tensor) -> Tensor:
        depth = math.prod(values.shape[values.dim() - self.summed :])
        groups = math.prod(values.shape[: self.batch])
        return values.reshape(groups, values.numel() // max(groups * depth, 1), depth)


def _contraction(equation: str, place: int, x: Tensor, weight: Tensor) -> ProductRows | str:
    tensors = (x, weight) if place else (weight, x)
    parsed = labels(equation, [tensor.dim() for tensor in tensors])
    own, other = parsed.operands[place], parsed.operands[1 - place]
    sizes = parsed.sizes([tensor.shape for tensor in tensors])
    for names, tensor in zip(parsed.operands, tensors, strict=True):
        if any(sizes[name] != size for name, size in zip(names, tensor.shape, strict=True)):
            return "one of its operands is broadcast"
    both = [name for name in own if name in other]
    batch = [name for name in both if name in parsed.output]
    summed = [name for name in both if name not in parsed.output]
    if parsed.contracted - set(summed):
        return "it sums over an axis of only one operand"

    def axes(names: tuple[str, ...]) -> tuple[int, ...]:
        single = [name for name in names if name not in both]
        return tuple(names.index(name) for name in [*batch, *single, *summed])

    return _Contraction(
        weight_axes=axes(own), other_axes=axes(other), batch=len(batch), summed=len(summed), shape=tuple(weight.shape)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Convolution:
    """A convolution: each position of its output multiplies the patch that it reads, as a row.

    Attributes:
        groups: G.
        stride, dilation: by axis of the image.
        padding: zeros before and after each axis, in the order of ``torch.nn.functional.pad``.
        shape: the shape of the weight, [G * N, channels of a group, *kernel].
    """

    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    shape: tuple[int, ...]

    def weight(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, self.shape[0] // self.groups, math.prod(self.shape[1:]))

    def as_weight(self, rows: Tensor) -> Tensor:
        return laid_out(rows.reshape(self.shape))

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        kernel = self.shape[2:]
        images = x if x.dim() == len(self.shape) else x.unsqueeze(0)
        # One image at a time, because patches multiply its size by the number of kernel elements.
        for image in images:
            patches = F.pad(image, self.padding)
            for axis, (size, step, apart) in enumerate(zip(kernel, self.stride, self.dilation, strict=True), start=1):
                patches = patches.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
            # [channels, *positions, *kernel] to [G, positions, channels of a group, kernel].
            positions = math.prod(patches.shape[1 : 1 + len(kernel)])
            grouped = patches.reshape(self.groups, self.shape[1], positions, math.prod(kernel))
            yield grouped.movedim(1, 2).flatten(2)


def _convolution(x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> ProductRows:
    arguments = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
    arguments = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **arguments, **keywords}
    axes = weight.dim() - 2
    stride, dilation = _by_axis(arguments["stride"], axes), _by_axis(arguments["dilation"], axes)
    if arguments["padding"] == "same":
        total = [apart * (size - 1) for size, apart in zip(weight.shape[2:], dilation, strict=True)]
        sides = [(total_of_axis // 2, total_of_axis - total_of_axis // 2) for total_of_axis in total]
    else:
        sides = [
            (size, size) for size in _by_axis(0 if arguments["padding"] == "valid" else arguments["padding"], axes)
        ]
    return _Convolution(
        groups=int(arguments["groups"]),
        stride=stride,
        dilation=dilation,
        padding=tuple(size for side in reversed(sides) for size in side),
        shape=tuple(weight.shape),
    )


def _by_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return an argument of a convolution for each axis; torch accepts one number for all."""
    values = tuple(int(size) for size in value) if isinstance(value, Sequence) else (int(value),)
    return values * axes if len(values) == 1 else values


ALGORITHM = Algorithm(
    wanted=lambda settings: settings.rounding in ("gptq", "reconstruct"),
    run=round_weights,
    batches=MANY,
    needs_batches=lambda settings: True,
)
