"""The choice of the codes of weights by data: GPTQ, tensor by tensor in the order in which the model computes.

The inputs of a weight are those that it will have: of kept batches, without padding, with everything before in low
precision and with its chosen codes, and themselves rounded (and smoothed) as planned. Weights that multiply one tensor
are rounded together, so that in memory there is H (see ``numerics/gptq.py``) of one tensor at a time.

A weight whose codes make no smaller error at the output of its own product than the nearest ones keeps the nearest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Collection
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
from quantizer.common.digest import tensors_digest
from quantizer.common.distributed import get_world_size
from quantizer.common.fingerprint import Fingerprint
from quantizer.errors import CalibrationError
from quantizer.functional import quantize
from quantizer.numerics.gptq import gptq_codes
from quantizer.numerics.gptq import output_error
from quantizer.numerics.granularity import beside
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import INT8
from quantizer.numerics.qtype import qtype
from quantizer.observe.padding import padding_mask
from quantizer.observe.padding import with_zeroed_padding
from quantizer.observe.range_group import RangeGroup
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.replay_batches import Batch
from quantizer.observe.replay_batches import copied
from quantizer.observe.statistics import RoundingProgress
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.site_plan import Plan
from quantizer.plan.weight_scales import as_rounded
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site

__all__ = ["round_weights"]


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
    if get_world_size() > 1:
        raise CalibrationError(
            "weights.rounding: gptq needs all that a weight multiplies, which processes do not share; calibrate in one "
            "process, or with rounding: nearest"
        )
    refused: _Refused = {}
    weights = list(_weights(proxy, observation, plan, refused))
    key = _key(proxy, observation, plan)
    if observation.rounding is None or observation.rounding.key != key:
        observation.rounding = RoundingProgress(key=key)
    done = observation.rounding.done
    with torch.no_grad(), quantized(proxy, plan):
        passes = _Passes(proxy, observation.kept)
        units = passes.in_order(weights)
        for unit in tqdm(units, "rounding weights", unit="tensor", leave=False, disable=None):
            if any(one.name not in done for one in unit):
                done.update(_rounded(unit, passes, qmax, by_size))
            for one in unit:
                one.site.quantizer(one.place).set_codes(done[one.name].codes)
    reached = {one.name for unit in units for one in unit}
    refused |= {one.name: "no batch that was kept reaches it" for one in weights if one.name not in reached}
    chosen = {**{name: _nearest(why) for name, why in refused.items()}, **done}
    for name, rounded in chosen.items():
        path, _, operand = name.rpartition(".")
        observation.records[path].operands[operand].rounded = rounded
    observation.rounding = None


def _nearest(why: str) -> RoundedWeight:
    return RoundedWeight(codes=None, text=f"rounded to nearest: {why}")


def _weights(proxy: Proxied, observation: Seen, plan: Plan, refused: _Refused) -> Iterator[_Weighted]:
    """Yield the sites whose weights can be rounded by data, and record why others cannot."""
    operands = [o for entry in plan.values() for o in entry.operands if o.quantized and o.role == "weight"]
    readers = Counter((operand.parameter, operand.view) for operand in operands)
    for site in proxy.sites:
        entry = plan[site.path]
        names = [operand.name for operand in site.operation.operands]
        weight = next((o for o in entry.operands if o.quantized and o.role == "weight"), None)
        # What an embedding looks up is multiplied by nothing: nearest is best.
        if weight is None or entry.kind == "embedding":
            continue
        kind, name = qtype(weight.dtype), f"{site.path}.{weight.name}"
        if kind.is_float:
            refused[name] = f"gptq chooses whole numbers, and those of {kind.name} are none"
        elif readers[weight.parameter, weight.view] > 1:
            refused[name] = "other sites store the same weight, and a file holds it once"
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


def _key(proxy: Proxied, observation: Seen, plan: Plan) -> str:
    """Return a checksum of all that the codes depend on: weights, scales, factors, batches and the configuration."""
    tensors = {
        f"{path}.{operand.name}.{field}": value
        for path, entry in plan.items()
        for operand in entry.operands
        for field, value in (("scale", operand.scale), ("smooth", operand.smooth))
        if operand.quantized and value is not None
    }
    assert observation.kept is not None
    weights = Fingerprint.of(proxy.module).plain()
    return tensors_digest(tensors, f"{weights} {observation.kept.digest} {proxy.config.model_dump_json()}")


class _Passes:
    """Passes of the kept batches through a quantized proxy, each up to the last call of one site."""

    def __init__(self, proxy: Proxied, batches: Iterable[Batch]) -> None:
        self._proxy = proxy
        self._batches = list(batches)
        self._calls: list[Counter[Site]] = []

    def in_order(self, weights: Iterable[_Weighted]) -> list[list[_Weighted]]:
        """Return the weights that batches reach, those with one H together, in the order of their first calls."""
        by_site = {one.site: one for one in weights}
        order: list[Site] = []
        for batch in self._batches:
            called = self._called(batch, by_site)
            self._calls.append(Counter(called))
            # A site that no earlier batch reached follows the one that was called before it.
            place = 0
            for site in dict.fromkeys(called):
                if site not in order:
                    order.insert(place, site)
                place = order.index(site) + 1
        units: dict[tuple[Any, ...], list[_Weighted]] = {}
        for site in order:
            units.setdefault(by_site[site].shares, []).append(by_site[site])
        return list(units.values())

    def _called(self, batch: Batch, sites: Collection[Site]) -> list[Site]:
        """Return the sites that a batch calls, in order."""
        called: list[Site] = []
        self._run(batch, sites, lambda site, *_: called.append(site))
        return called

    def visit(self, site: Site, visit: Callable[..., None]) -> None:
        """Call ``visit`` with the arguments of every call of a site, and with the real tokens of the batch."""
        for batch, calls in zip(self._batches, self._calls, strict=True):
            if calls[site] == 0:
                continue
            left = calls[site]

            def visit_until(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
                nonlocal left
                visit(args, keywords, mask)
                left -= 1
                if left == 0:
                    raise _Reached

            try:
                self._run(batch, [site], visit_until)
            except _Reached:
                continue

    def _run(self, batch: Batch, sites: Iterable[Site], visit: Callable[..., None]) -> None:
        args, keywords = copied(*batch)
        mask = padding_mask(keywords, args)

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            visit(site, args, keywords, mask)
            return site.rounded(function, args, keywords)

        try:
            for site in sites:
                site.active, site.judge = False, judge
            # forward() instead of a call: the hooks of the proxy are for calibration.
            with unmoved(self._proxy.module):
                self._proxy.module.forward(*args, **keywords)
        finally:
            for site in sites:
                site.active, site.judge = True, None


class _Reached(BaseException):
    """The end of a pass that needs to go no further; no error, so that a model that catches errors lets it through."""


def _rounded(unit: list[_Weighted], passes: _Passes, qmax: int | None, by_size: bool) -> dict[str, RoundedWeight]:
    """Return the rounding of the weights that multiply one tensor, by name."""
    first = unit[0]
    rows: dict[str, ProductRows | str] = {}
    hessian: Tensor | None = None

    def visit(args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
        nonlocal hessian
        x = first.site.argument(1 - first.place, args, keywords)
        x = with_zeroed_padding(
            first.site.quantizer(1 - first.place)(x), mask, channels_last=first.site.operation.name == "linear"
        )
        for one in unit:
            found = product_rows(one.site, one.place, x, one.read(), args, keywords)
            if rows.setdefault(one.name, found) != found:
                rows[one.name] = "its product differs from call to call"
        product = rows[first.name]
        if not isinstance(product, str):
            for part in product.inputs(x.float()):
                added = (part.mT @ part).double()
                hessian = added if hessian is None else hessian.add_(added)

    passes.visit(first.site, visit)
    result = {}
    for one in unit:
        product = rows.get(one.name, "no batch that was kept reaches it")
        if isinstance(product, str) or hessian is None:
            result[one.name] = _nearest(str(product))
        else:
            result[one.name] = _best(one.weight, as_rounded(one.weight, one.read()), product, hessian, qmax, by_size)
    return result


def _best(
    planned: OperandPlan, values: Tensor, product: ProductRows, hessian: Tensor, qmax: int | None, by_size: bool
) -> RoundedWeight:
    """Return the codes of a weight by GPTQ, if they make a smaller error than the nearest.

    Args:
        planned: the plan of the weight.
        values: the weight, multiplied by its factors, float32 [*].
        product: the product of the weight.
        hessian: H of what it multiplies, float64 [G, K, K].
        qmax: as in ``round_weights``.
        by_size: as in ``round_weights``.
    """
    kind, axis, block = qtype(planned.dtype), planned.axis, planned.block_size
    assert planned.scale is not None
    scale = torch.ones_like(values)
    in_blocks(scale, axis, block).mul_(beside(planned.scale, values.dim(), axis, block))
    bound = qmax if qmax is not None and kind == INT8 else None
    low, high = (int(kind.qmin), int(kind.qmax)) if bound is None else (-bound, bound)
    weight, scales = product.weight(values), product.weight(scale)
    codes = gptq_codes(weight, hessian, scales, low, high, by_size=by_size)
    if codes is None:
        return _nearest("what it multiplies has squares beyond float32")
    nearest = product.weight(quantize(values, planned.scale, planned.dtype, axis=axis, block_size=block))
    errors = [output_error(weight, found * scales, hessian) for found in (codes, nearest)]
    if not errors[0] < errors[1]:
        return _nearest("gptq makes no smaller error")
    return RoundedWeight(
        codes=product.as_weight(codes), text=f"gptq, {errors[0] / errors[1]:.2f} of the error of rounding to nearest"
    )
