"""The choice of the codes of weights by data: GPTQ, tensor by tensor in the order in which the model computes.

The inputs of a weight are those that it will have: of kept batches, without padding, with everything before in low
precision and with its chosen codes, and themselves rounded (and smoothed) as planned. Weights that multiply one tensor
are rounded together, so that in memory there is H (see ``numerics/gptq.py``) of one tensor at a time.

A weight whose codes make no smaller error at the output of its own product than the nearest ones keeps the nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from quantizer.calibration.output_error import quantized
from quantizer.calibration.product_rows import ProductRows
from quantizer.calibration.product_rows import product_rows
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.rounding.progress import UNREACHED
from quantizer.calibration.rounding.progress import nearest
from quantizer.calibration.rounding.progress import one_process
from quantizer.calibration.rounding.progress import progress
from quantizer.calibration.rounding.progress import record
from quantizer.calibration.rounding.progress import stored_weights
from quantizer.calibration.rounding.progress import why_nearest
from quantizer.calibration.staged_passes import StagedPasses
from quantizer.functional import quantize
from quantizer.numerics.gptq import gptq_codes
from quantizer.numerics.gptq import output_error
from quantizer.numerics.granularity import beside
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import INT8
from quantizer.numerics.qtype import qtype
from quantizer.observe.padding import with_zeroed_padding
from quantizer.observe.range_group import RangeGroup
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.site_plan import Plan
from quantizer.plan.weight_scales import as_rounded
from quantizer.proxy.site import Site

__all__ = ["round_weights"]


_PRODUCT = 2  # operands

_Refused = dict[str, str]
"""Why weights keep the nearest codes, by ``SITE.OPERAND``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Weighted:
    """A site whose weight is rounded.

    Attributes:
        site: the site, of a weight and one other operand.
        place: the place of the weight among its operands.
        weight: the plan of the weight.
        other: the plan of the other operand.
        group: the operands that read the same tensor as the other operand; None: it is not known.
        read: a function that returns the weight as the site reads it.
    """

    site: Site
    place: int
    weight: OperandPlan
    other: OperandPlan
    group: RangeGroup | None
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        """The name of the weight, ``SITE.OPERAND``."""
        return f"{self.site.path}.{self.weight.name}"

    @property
    def shares(self) -> tuple[Any, ...]:
        """The key of weights with one H; only linears all read their input by its last axis."""
        alone = self.site if self.group is None or self.site.operation.name != "linear" else None
        return self.group, self.other.quantized, self.other.dtype, alone


def round_weights(proxy: Proxied, observation: Seen, plan: Plan, *, qmax: int | None, by_size: bool) -> None:
    """Choose the codes of all weights that a plan quantizes: set ``rounded`` of their records.

    After an interrupt the next call goes on with the tensor that was not finished, if nothing else changed.

    Args:
        proxy: the calibrated proxy, its sites inactive and unobserved.
        observation: the statistics, with kept batches.
        plan: the plan without codes.
        qmax: the largest code of a weight in INT8 on the target; None: that of the format.
        by_size: whether input channels with large values are rounded first.

    Raises:
        CalibrationError: several processes calibrate together.
    """
    assert observation.kept is not None
    one_process("gptq")
    refused: _Refused = {}
    weights = list(_weights(proxy, observation, plan, refused))
    done = progress(proxy, observation, plan).weights
    with torch.no_grad(), quantized(proxy, plan):
        passes = StagedPasses(proxy.module, observation.kept)
        units = _units(weights, passes)
        for unit in tqdm(units, "rounding weights", unit="tensor", leave=False, disable=None):
            if any(one.name not in done for one in unit):
                done.update(_rounded(unit, passes, qmax, by_size))
            for one in unit:
                one.site.quantizer(one.place).set_codes(done[one.name].codes)
    reached = {one.name for unit in units for one in unit}
    refused |= {one.name: UNREACHED for one in weights if one.name not in reached}
    record(observation, {**{name: nearest(why) for name, why in refused.items()}, **done})


def _weights(proxy: Proxied, observation: Seen, plan: Plan, refused: _Refused) -> Iterator[_Weighted]:
    """Yield the sites whose weights can be rounded by data, and record why others cannot."""
    stored = stored_weights(plan)
    for site in proxy.sites:
        entry = plan[site.path]
        names = [operand.name for operand in site.operation.operands]
        weight = next((o for o in entry.operands if o.quantized and o.role == "weight"), None)
        # What an embedding looks up is multiplied by nothing: nearest is best.
        if weight is None or entry.kind == "embedding":
            continue
        name, why = f"{site.path}.{weight.name}", why_nearest(weight, stored, "gptq")
        if why is None and len(names) != _PRODUCT:
            why = f"its operation is {site.operation.name}"
        if why is not None:
            refused[name] = why
        else:
            records = observation.records[site.path].operands
            seen, other = records[weight.name].weight, next(o for o in entry.operands if o.name != weight.name)
            assert seen is not None
            yield _Weighted(
                site=site,
                place=names.index(weight.name),
                weight=weight,
                other=other,
                group=records[other.name].group if other.name in records else None,
                read=seen.tensor,
            )


def _units(weights: Iterable[_Weighted], passes: StagedPasses) -> list[list[_Weighted]]:
    """Return the weights that batches reach, those with one H together, in the order of their first calls."""
    by_site = {one.site: one for one in weights}
    units: dict[tuple[Any, ...], list[_Weighted]] = {}
    for site in passes.in_order(by_site):
        units.setdefault(by_site[site].shares, []).append(by_site[site])
    return list(units.values())


@dataclass(kw_only=True, slots=True, eq=False)
class _Inputs:
    """The rows x [G, M, K] that weights multiply.

    Attributes:
        hessian: the sum of x^T x, float64 [G, K, K]; None: there are none yet.
        rows: M, without rows of zeros.
    """

    hessian: Tensor | None = None
    rows: int = 0

    def add(self, x: Tensor) -> None:
        """Add rows x [G, M, K]."""
        added = (x.mT @ x).double()
        self.hessian = added if self.hessian is None else self.hessian.add_(added)
        self.rows += int((x != 0).any(-1).any(0).sum())


def _rounded(unit: list[_Weighted], passes: StagedPasses, qmax: int | None, by_size: bool) -> dict[str, RoundedWeight]:
    """Return the rounding of the weights that multiply one tensor, by name."""
    first, inputs = unit[0], _Inputs()
    products: dict[str, ProductRows | str] = {}

    def visit(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
        x = site.quantizer(1 - first.place)(site.argument(1 - first.place, args, keywords))
        x = with_zeroed_padding(x, mask, channels_last=site.operation.name == "linear")
        for one in unit:
            found = product_rows(one.site, one.place, x, one.read(), args, keywords)
            if products.setdefault(one.name, found) != found:
                products[one.name] = "its product is another one from call to call"
        product = products[first.name]
        if not isinstance(product, str):
            for part in product.inputs(x.float()):
                inputs.add(part)

    passes.visit(first.site, visit)
    # With other codes before it, a model that routes its data may leave the site out.
    return {one.name: _best(one, products.get(one.name, UNREACHED), inputs, qmax, by_size) for one in unit}


def _best(
    one: _Weighted, product: ProductRows | str, inputs: _Inputs, qmax: int | None, by_size: bool
) -> RoundedWeight:
    """Return the codes of a weight by GPTQ, if they make a smaller error than the nearest."""
    if isinstance(product, str) or inputs.hessian is None:
        return nearest(product if isinstance(product, str) else UNREACHED)
    values, kind = as_rounded(one.weight, one.read()), qtype(one.weight.dtype)
    axis, block, scale = one.weight.axis, one.weight.block_size, one.weight.scale
    assert scale is not None
    of_each = torch.ones_like(values)
    in_blocks(of_each, axis, block).mul_(beside(scale, values.dim(), axis, block))
    low, high = (int(kind.qmin), int(kind.qmax)) if qmax is None or kind != INT8 else (-qmax, qmax)
    weight, steps = product.weight(values), product.weight(of_each)
    codes = gptq_codes(weight, inputs.hessian, steps, low, high, rows=inputs.rows, by_size=by_size)
    if codes is None:
        return nearest("what it multiplies has squares beyond float32")
    usual_codes = product.weight(quantize(values, scale, kind.name, axis=axis, block_size=block))
    error, usual = (output_error(weight, found * steps, inputs.hessian) for found in (codes, usual_codes))
    if not error < usual:
        return nearest("gptq makes no smaller error")
    return RoundedWeight(
        codes=product.as_weight(codes), text=f"gptq, {error / usual:.2f} of the error of rounding to nearest"
    )
