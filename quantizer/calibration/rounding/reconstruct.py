"""The choice of the codes of weights by the outputs of blocks, by signed gradient descent.

    code = clamp(round(w / scale + v)),  v in [-1/2, 1/2]        v <- v - rate * sign(d error / d v)

The error is that of a block's output, quantized against float; labels are not read. Blocks are taken one after another
in the order in which the model computes. The inputs of each are those that it will have, with everything before in low
precision and with its chosen codes.

The error of blocks is from BRECQ (Li et al. 2021, arXiv:2102.05426), the descent from AutoRound (Cheng et al. 2023,
arXiv:2309.05516): all its steps are with codes, and some hundred suffice where AdaRound (Nagel et al. 2020,
arXiv:2004.10568) takes ten thousand to come to codes. To leave some of the inputs and activations in float (QDrop, Wei
et al. 2022, arXiv:2203.05740) gained nothing (docs/explain/calibration.md).

A part of the batches is only for checks: there the codes must make a smaller error than the nearest ones.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.output_error import quantized
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.rounding.block_passes import BlockCall, BlockPasses
from quantizer.calibration.rounding.blocks import blocks_of
from quantizer.calibration.rounding.learned import LearnedCodes, LearnedRange
from quantizer.calibration.rounding.progress import progress, record, stored_weights, why_nearest
from quantizer.common.progress import counted
from quantizer.errors import CalibrationError
from quantizer.numerics.qtype import qtype
from quantizer.observe.range_group import RangeGroup
from quantizer.observe.statistics import RoundingProgress, Seen
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import as_rounded, scale_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site

_STEPS = 200

_EVERY = 25
"""After how many steps the error is compared with the least so far, on the batches for checks."""

_CHECKED = 8
"""One of so many batches is for checks."""

_LEAST = 2  # batches: one to learn from, one to check on

_LABEL = "reconstruct"

logger = logging.getLogger(__name__)


def reconstruct_blocks(proxy: Proxied, observation: Seen, plan: Plan, settings: PlanSettings) -> None:
    """Choose the codes of all weights that a plan quantizes, and the ranges of what they are computed with.

    Set ``rounded`` of the records of weights, and ``chosen`` of the groups of activations in symmetric formats. After
    an interrupt the next call goes on with the block that was not finished, if nothing else changed.

    Args:
        proxy: the calibrated proxy, its sites inactive and unobserved.
        observation: the statistics, with kept batches.
        plan: the plan, with the codes to begin with.
        settings: the settings of the plan.

    Raises:
        CalibrationError: the model was built under ``torch.inference_mode()``.
    """
    assert observation.kept is not None
    if any(parameter.is_inference() for parameter in proxy.module.parameters()):
        raise CalibrationError(
            "weights.rounding: reconstruct computes gradients, which parameters made under torch.inference_mode() have "
            "none of; build the model outside of it, or calibrate with rounding: gptq"
        )
    if len(observation.kept) < _LEAST:
        logger.warning(
            "weights are not reconstructed, as there is no second batch of calibration data to check their codes on: "
            "gptq is used; calibrate with two batches or more"
        )
        return
    weights = dict(_weights(proxy, plan))
    done = progress(proxy, observation, plan)
    with torch.inference_mode(False), torch.no_grad(), quantized(proxy, plan):
        blocks = {block: (path, sites) for path, block, sites in blocks_of(proxy.module, weights)}
        readers = _readers(proxy, observation, plan)
        passes = BlockPasses(proxy.module, proxy.sites, observation.kept)
        with counted(passes.in_order(blocks), "reconstructing", unit="block") as steps:
            for block in steps:
                path, sites = blocks[block]
                inside = set(block.modules())
                own = {group: read for group, read in readers.items() if inside.issuperset(read)}
                codes = [_codes(observation, site, weights[site], settings) for site in sites]
                if any(one.name not in done.reconstructed for one in codes):
                    ranges = [LearnedRange(group, read) for group, read in own.items()]
                    _reconstruct(path, passes, block, codes, ranges, done)
                for one in codes:
                    one.quantizer.set_codes(done.reconstructed[one.name].codes)
                for group, read in own.items():
                    _use(done.ranges.get(group.operands[0]), group, read, settings)
    record(observation, done.reconstructed)


def _codes(observation: Seen, site: Site, weight: OperandPlan, settings: PlanSettings) -> LearnedCodes:
    seen = observation.records[site.path].operands[weight.name].weight
    assert seen is not None
    values = as_rounded(weight, seen.tensor()).detach().float().clone()
    quantizer = site.quantizer_of(weight.name)
    return LearnedCodes(f"{site.path}.{weight.name}", quantizer, weight, values, settings.profile.weight_qmax)


def _use(amax: float | None, group: RangeGroup, quantizers: Sequence[OperandQuantizer], settings: PlanSettings) -> None:
    """Use a learned range from now on; None: there is none."""
    if amax is not None:
        group.chosen = (amax, _LABEL)
        for quantizer in quantizers:
            dtype = qtype(quantizer.dtype)
            scale = scale_of(torch.tensor(amax, dtype=torch.float32), dtype, settings.scale_dtype)
            quantizer.set_scale(scale, dtype.name, quantizer.axis)


def _readers(proxy: Proxied, observation: Seen, plan: Plan) -> Mapping[RangeGroup, list[OperandQuantizer]]:
    """Return the quantizers of activations by range, without those formats whose range is not one number to learn."""
    found: dict[RangeGroup, list[OperandQuantizer]] = defaultdict(list)
    for site in proxy.planned(plan):
        for operand in plan[site.path].operands:
            kind, group = qtype(operand.dtype), observation.records[site.path].operands[operand.name].range
            # The steps of FP8 are relative to the value, so that its range costs little.
            one = group is not None and not group.told_apart and not kind.is_float and not kind.has_zero_point
            if operand.quantized and group is not None and one:
                found[group].append(site.quantizer_of(operand.name))
    return found


def _reconstruct(
    path: str,
    passes: BlockPasses,
    block: nn.Module,
    codes: Sequence[LearnedCodes],
    ranges: Sequence[LearnedRange],
    done: RoundingProgress,
) -> None:
    """Add the rounding of the weights of a block to ``done``, and the ranges that were learned with them."""

    def unchanged(why: str) -> None:
        done.reconstructed |= {one.name: one.as_before(why) for one in codes}

    where = f"block {path}" if path else "the model as one block"
    run, calls = passes.runs(block), list(passes.calls(block))
    if len(calls) < _LEAST:
        return unchanged(f"{where}: fewer than two batches reach it")
    checks, tried = calls[::_CHECKED], [call for place, call in enumerate(calls) if place % _CHECKED]
    usual = _mean(run, checks)
    with ExitStack() as stack:
        stack.enter_context(unmoved(block))
        for one in (*codes, *ranges):
            stack.enter_context(one.in_use())
        with torch.enable_grad():
            # A model that routes its data may leave all weights of a block out.
            tried = [call for call in tried if call.error(run).requires_grad]
        if not tried:
            return unchanged(f"{where}: it computes without gradients")
        error, found, amax = _descent(run, codes, ranges, tried, checks)
    if not error < usual:
        return unchanged(f"{where}: other codes make no smaller error at its output")
    done.ranges |= {one.group.operands[0]: value for one, value in zip(ranges, amax, strict=True)}
    done.reconstructed |= {
        one.name: one.rounded(best, where, error / usual) for one, best in zip(codes, found, strict=True)
    }
    return None


def _descent(
    run: Callable[..., Any],
    codes: Sequence[LearnedCodes],
    ranges: Sequence[LearnedRange],
    tried: Sequence[BlockCall],
    checks: Sequence[BlockCall],
) -> tuple[float, list[Tensor], list[float]]:
    """Return the least error on ``checks`` that the descent comes by, with its codes and ranges."""
    learned = (*codes, *ranges)
    generator = torch.Generator().manual_seed(0)
    least: tuple[float, list[Tensor], list[float]] = (math.inf, [], [])
    order: list[int] = []
    for step in range(_STEPS):
        order = order or torch.randperm(len(tried), generator=generator).tolist()
        with torch.enable_grad():
            error = tried[order.pop()].error(run)
            gradients = torch.autograd.grad(error, [one.parameter for one in learned], allow_unused=True)
        for one, gradient in zip(learned, gradients, strict=True):
            if gradient is not None:
                one.move(gradient, 1 - step / _STEPS)
        if (step + 1) % _EVERY == 0:
            now = _mean(run, checks)
            if now < least[0]:
                least = now, [one.codes() for one in codes], [one.amax() for one in ranges]
    return least


def _mean(run: Callable[..., Any], calls: Sequence[BlockCall]) -> float:
    return sum(float(call.error(run)) for call in calls) / len(calls)


def _weights(proxy: Proxied, plan: Plan) -> Iterator[tuple[Site, OperandPlan]]:
    """Yield the sites whose weights have a choice of codes, and those weights."""
    stored = stored_weights(plan)
    for site in proxy.planned(plan):
        for weight in plan[site.path].operands:
            # What an embedding looks up is multiplied by nothing: nearest is best.
            weighted = weight.quantized and weight.role == "weight" and plan[site.path].kind != "embedding"
            if weighted and why_nearest(weight, stored, _LABEL) is None:
                yield site, weight
