"""Choose the integers of weights and the ranges of activations by the outputs of blocks, by signed gradient descent.

    integer = clamp(round(w / scale + v)),  v in [-1/2, 1/2]        v <- v - rate * sign(d error / d v)

The error compares the quantized with the float output of a block; labels are not read. Blocks are processed in the
order in which the model computes. The inputs of each block have everything before it quantized with the chosen
integers. Each parameter moves by the sign of its gradient, so ``rate`` is its distance per step.

The error of blocks is from BRECQ (Li et al. 2021, arXiv:2102.05426), the descent from AutoRound (Cheng et al. 2023,
arXiv:2309.05516): it always evaluates integers, and some hundred steps suffice where AdaRound (Nagel et al. 2020,
arXiv:2004.10568) takes ten thousand. Leaving some inputs and activations in float (QDrop, Wei et al. 2022,
arXiv:2203.05740) gained nothing (docs/design/calibration.md).

Some batches are reserved for checks, on which the integers must have a smaller error than rounding to nearest.

Containers that list blocks (``encoder.layer``, the stages of a convolutional network), and modules around them, are
split into their children. Each remaining module is a block with all sites that it calls: an encoder layer, an inverted
residual, a head.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantizer.algorithms.algorithm import (
    Algorithm,
    Proxied,
    Work,
    progress,
    record,
    stored_weights,
    why_nearest,
    with_all_batches,
)
from quantizer.algorithms.replay import Replay, quantized
from quantizer.errors import CalibrationError
from quantizer.functional import fake_quantize, quantize
from quantizer.numerics.formats import INT8, qtype
from quantizer.numerics.granularity import scale_of_each
from quantizer.numerics.rounding import GAIN
from quantizer.observe.range_group import RangeGroup, RoundedWeight
from quantizer.observe.replay_batches import MANY, Batch
from quantizer.observe.statistics import (
    RoundingProgress,
    Seen,
    floats,
    is_no_mask,
    output_without_padding,
    padding_mask,
)
from quantizer.plan.decide_operands import PlanSettings
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.plan.weight_scales import as_rounded, scale_of
from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site, SourceCall
from quantizer.utils.batches import copied
from quantizer.utils.progress import counted
from quantizer.utils.torch_modes import Autocast

_WITHIN = 0.45
"""The largest distance from an integer, in units of the scale, at which rounding to it is certain."""


Block = tuple[str, nn.Module, tuple[Site, ...]]
"""The path of a block, the block, and its sites."""


def blocks_of(model: nn.Module, sites: Collection[Site]) -> list[Block]:
    """Return the blocks of a proxy with any of ``sites``, in the order of its modules.

    Sites of modules that are split, such as a residual add between blocks, belong to no block.
    """
    site_ids = {id(site) for site in sites}

    def inside(module: nn.Module) -> tuple[Site, ...]:
        return tuple(entry for entry in module.modules() if isinstance(entry, Site) and id(entry) in site_ids)

    def parts(path: str, module: nn.Module) -> Iterator[Block]:
        if not _lists_blocks_within(module):
            yield path, module, inside(module)
            return
        for name, child in module.named_children():
            if not isinstance(child, SourceCall) and inside(child):
                yield from parts(f"{path}.{name}" if path else name, child)

    return list(parts("", model)) if site_ids else []


def _lists_blocks_within(module: nn.Module) -> bool:
    return any(isinstance(entry, nn.Sequential | nn.ModuleList) and _lists_blocks(entry) for entry in module.modules())


def _lists_blocks(container: nn.Module) -> bool:
    """Return whether a container holds modules with submodules, not only layers."""
    return any(_has_modules(child) for child in container.children())


def _has_modules(module: nn.Module) -> bool:
    return any(not isinstance(child, SourceCall | OperandQuantizer) for child in module.children())


class _CallInputs(NamedTuple):
    """The (positional, keyword) arguments of a call, and the autocast state and call counts before it."""

    arguments: Batch
    autocast: Autocast
    before: Mapping[str, int]

    @classmethod
    def now(cls, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> _CallInputs:
        return cls(copied(args, keywords), Autocast.now(), calls_so_far() or {})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCall:
    """One call of a block.

    Attributes:
        given: its arguments, with everything before the block quantized.
        mask: the real tokens of the batch, [B, S]; None: all are real.
        expected: the floating tensors of its float output, without padding.
        power: the sum of their squares without masks, which is not 0.
    """

    given: _CallInputs
    mask: Tensor | None
    expected: list[Tensor]
    power: float

    def error(self, run: Callable[..., Any]) -> Tensor:
        """Return the error |z - y|^2 / |y|^2 of the block's output; ``run`` computes the block."""
        outputs = _outputs(run, self.given, self.mask)
        squares = [
            (actual - expected)[is_no_mask(expected)].float().square().sum()
            for actual, expected in zip(outputs, self.expected, strict=True)
        ]
        return torch.stack(squares).sum() / self.power


class BlockCalls:
    """The calls of the blocks of a proxy with a plan, on some batches."""

    def __init__(self, proxy: Proxied, batches: Iterable[Batch]) -> None:
        self._proxy = proxy.module
        self._replay = Replay(proxy, batches)

    def in_order(self, blocks: Collection[nn.Module]) -> list[nn.Module]:
        return self._replay.in_order(blocks, in_float=True)

    def runs(self, block: nn.Module) -> Callable[..., Any]:
        return block.forward if block is self._proxy else block

    def of(self, block: nn.Module) -> Iterator[BlockCall]:
        """Yield the calls of a block, of batches that call it equally often quantized and in float.

        Call ``in_order`` first, and then this in that order. The inputs of the block must not change any more.
        """
        for place, batch in enumerate(self._replay.batches):
            number = self._replay.calls(place, block)
            if number == 0:
                continue
            mask = padding_mask(batch[1], batch[0])
            with self._replay.in_float():
                full = self._given(place, block, in_float=True)
                expected = [_outputs(self.runs(block), inputs, mask) for inputs in full]
            rounded = self._given(place, block)
            for inputs, tensors in zip(rounded, expected, strict=False) if len(rounded) == number else ():
                power = sum(float(tensor[is_no_mask(tensor)].double().square().sum()) for tensor in tensors)
                if power > 0:
                    yield BlockCall(given=inputs, mask=mask, expected=tensors, power=power)

    def _given(self, place: int, block: nn.Module, *, in_float: bool = False) -> list[_CallInputs]:
        if block is self._proxy:
            return [_CallInputs.now(*self._replay.batches[place])]
        inputs: list[_CallInputs] = []
        self._replay.stop_at(
            place,
            block,
            lambda _, args, keywords, __: inputs.append(_CallInputs.now(args, keywords)),
            in_float=in_float,
        )
        return inputs


def _outputs(run: Callable[..., Any], inputs: _CallInputs, mask: Tensor | None) -> list[Tensor]:
    args, keywords = copied(*inputs.arguments)
    with inputs.autocast.restored(), numbered(inputs, inputs.before):
        return [output_without_padding(tensor, mask) for tensor in floats(run(*args, **keywords))]


class Learned(ABC):
    """A learned parameter.

    Attributes:
        parameter: the parameter, 0 at first.
    """

    parameter: Tensor

    @abstractmethod
    def move(self, gradient: Tensor, share: float) -> None:
        """Move the parameter against a gradient, with the learning rate times ``share``, 0 to 1."""

    @abstractmethod
    def in_use(self) -> Any:
        """Return a context in which the block computes with the current value."""


class LearnedCodes(Learned):
    """The integers of a weight: clamp(round(u + v)), with the parameter v [*] in [-1/2, 1/2].

    u is w / scale; if the plan has integers, it is the nearest number that rounds to them.

    Attributes:
        name, quantizer: as given.
    """

    _RATE = 5e-3  # falling to 0 over 200 steps, v can reach its limits (AutoRound)

    def __init__(
        self, name: str, quantizer: OperandQuantizer, weight: OperandPlan, values: Tensor, qmax: int | None
    ) -> None:
        assert weight.scale is not None
        self.name = name
        self.parameter = torch.zeros_like(values).requires_grad_()
        self.quantizer = quantizer
        self._weight = weight
        self._steps = scale_of_each(weight.scale, values.shape, weight.axis, weight.block_size)
        self._start = values
        if weight.codes is not None:
            lowest, highest = ((weight.codes + sign * _WITHIN) * self._steps for sign in (-1, 1))
            self._start = values.clamp(lowest, highest)
        self._largest = None if qmax is None or qtype(weight.dtype) != INT8 else self._steps * qmax

    def move(self, gradient: Tensor, share: float) -> None:
        self.parameter.sub_(self._RATE * share * gradient.sign()).clamp_(-0.5, 0.5)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        handle = self.quantizer.register_forward_hook(lambda _, __, usual: self._on(fake_quantize).to(usual.dtype))
        try:
            yield
        finally:
            handle.remove()

    def codes(self) -> Tensor:
        """Return the current integers, int8 [*]."""
        with torch.no_grad():
            return self._on(quantize)

    def rounded(self, codes: Tensor, where: str, share: float) -> RoundedWeight:
        """Return the record of integers that have ``share`` of the former error at the output of a block."""
        former = "rounding to nearest" if self._weight.codes is None else "gptq"
        text = f"reconstruct, {where}: {share:.2f} of the error of {former}"
        return RoundedWeight(codes=codes, text=text, amax=self._chosen)

    def as_before(self, why: str) -> RoundedWeight:
        """Return the record of the initial integers, and why they did not change."""
        former = self._weight.rounding or "rounded to nearest"
        text = f"{former}; not reconstructed: {why}"
        return RoundedWeight(codes=self._weight.codes, text=text, amax=self._chosen)

    @property
    def _chosen(self) -> Tensor | None:
        """The range that belongs to the initial integers."""
        return None if self._weight.codes is None else self._weight.amax

    def _on(self, rounding: Callable[..., Tensor]) -> Tensor:
        """Return the weight with v added, then rounded by ``rounding``."""
        weight = self._weight
        return rounding(self._moved(), weight.scale, weight.dtype, axis=weight.axis, block_size=weight.block_size)

    def _moved(self) -> Tensor:
        moved = self._start + self.parameter * self._steps
        return moved if self._largest is None else moved.clamp(-self._largest, self._largest)


class LearnedRange(Learned):
    """The range of a tensor in a symmetric format: its scale times exp(GAIN * v), with the parameter v [].

    Attributes:
        group: as given.
    """

    _RATE = 1e-3  # relative to the scale, per step

    def __init__(self, group: RangeGroup, quantizers: Sequence[OperandQuantizer]) -> None:
        assert quantizers[0].scale is not None
        self.group = group
        self.parameter = nn.Parameter(torch.zeros_like(quantizers[0].scale))
        self._quantizers = quantizers
        self._amax = group.amax(quantizers[0].dtype)

    def move(self, gradient: Tensor, share: float) -> None:
        self.parameter.sub_(self._RATE / GAIN * share * gradient.sign())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        for quantizer in self._quantizers:
            quantizer.of_samples = True
            quantizer.learn_scale(self.parameter)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for quantizer in self._quantizers:
                quantizer.of_samples, quantizer.change = False, None

    def amax(self) -> float:
        """Return the current magnitude that maps to the largest integer."""
        return self._amax * float((GAIN * self.parameter.detach().double()).exp())


_STEPS = 200

_EVERY = 25
"""The number of steps between checks of the error on the reserved batches."""

_CHECKED = 8
"""One of this many batches is reserved for checks."""

_LEAST = 2  # batches: one to learn from, one to check on

_LABEL = "reconstruct"

logger = logging.getLogger(__name__)


def reconstruct_blocks(plan: Plan, work: Work) -> Plan:
    """Choose the integers of all weights that a plan quantizes, and the ranges of activations.

    Set ``rounded`` of the records of weights, and ``chosen`` of the groups of activations in symmetric formats. After
    an interrupt the next call continues with the unfinished block, if nothing else changed.
    """
    proxy, observation, settings = work.proxy, work.observed, work.planned
    with with_all_batches(work):
        if any(parameter.is_inference() for parameter in proxy.module.parameters()):
            raise CalibrationError(
                "weights.rounding: reconstruct needs gradients, which parameters made under torch.inference_mode() "
                "lack; build the model outside of it, or calibrate with rounding: gptq"
            )
        if len(work.kept) < _LEAST:
            logger.warning(
                "weights are not reconstructed, because there is no second calibration batch to check their integers; "
                "gptq is used; calibrate with two or more batches"
            )
            return plan
        weights = dict(_weights(proxy, plan))
        done = progress(plan, work)
        with torch.inference_mode(False), torch.no_grad(), quantized(proxy, plan):
            blocks = {block: (path, sites) for path, block, sites in blocks_of(proxy.module, weights)}
            readers = _readers(proxy, observation, plan)
            passes = BlockCalls(proxy, work.kept)
            with counted(passes.in_order(blocks), "reconstructing", unit="block") as steps:
                for block in steps:
                    path, sites = blocks[block]
                    inside = set(block.modules())
                    own = {group: read for group, read in readers.items() if inside.issuperset(read)}
                    codes = [_codes(observation, site, weights[site], settings) for site in sites]
                    if any(learned.name not in done.reconstructed for learned in codes):
                        ranges = [LearnedRange(group, read) for group, read in own.items()]
                        _reconstruct(path, passes, block, codes, ranges, done)
                    for learned in codes:
                        learned.quantizer.set_codes(done.reconstructed[learned.name].codes)
                    for group, read in own.items():
                        _use(done.ranges.get(group.operands[0]), group, read, settings)
    record(observation, done.reconstructed)
    return work.plan()


def _codes(observation: Seen, site: Site, weight: OperandPlan, settings: PlanSettings) -> LearnedCodes:
    parameter = observation.records[site.path].operands[weight.name].weight
    assert parameter is not None
    values = as_rounded(weight, parameter.tensor()).detach().float().clone()
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
    """Return the quantizers of activations by range group, if the format has a single symmetric range to learn."""
    readers: dict[RangeGroup, list[OperandQuantizer]] = defaultdict(list)
    for site in proxy.planned(plan):
        for operand in plan[site.path].operands:
            kind, group = qtype(operand.dtype), observation.records[site.path].operands[operand.name].range
            # The precision of FP8 is relative to the value, so its range matters little.
            is_learnable = group is not None and not group.told_apart and not kind.is_float and not kind.has_zero_point
            if operand.quantized and group is not None and is_learnable:
                readers[group].append(site.quantizer_of(operand.name))
    return readers


def _reconstruct(
    path: str,
    passes: BlockCalls,
    block: nn.Module,
    codes: Sequence[LearnedCodes],
    ranges: Sequence[LearnedRange],
    done: RoundingProgress,
) -> None:
    def unchanged(why: str) -> None:
        done.reconstructed |= {learned.name: learned.as_before(why) for learned in codes}

    where = f"block {path}" if path else "the model as one block"
    run, calls = passes.runs(block), list(passes.of(block))
    if len(calls) < _LEAST:
        return unchanged(f"{where}: fewer than two batches reach it")
    checks, training_calls = calls[::_CHECKED], [call for place, call in enumerate(calls) if place % _CHECKED]
    former_error = _mean(run, checks)
    with ExitStack() as stack:
        stack.enter_context(unmoved(block))
        for learned in (*codes, *ranges):
            stack.enter_context(learned.in_use())
        with torch.enable_grad():
            # A model that routes its data may skip all weights of a block.
            training_calls = [call for call in training_calls if call.error(run).requires_grad]
        if not training_calls:
            return unchanged(f"{where}: it computes without gradients")
        error, integers, amax = _descent(run, codes, ranges, training_calls, checks)
    if not error < former_error:
        return unchanged(f"{where}: learned integers do not reduce the error of its output")
    done.ranges |= {learned.group.operands[0]: value for learned, value in zip(ranges, amax, strict=True)}
    done.reconstructed |= {
        learned.name: learned.rounded(best, where, error / former_error)
        for learned, best in zip(codes, integers, strict=True)
    }
    return None


def _descent(
    run: Callable[..., Any],
    codes: Sequence[LearnedCodes],
    ranges: Sequence[LearnedRange],
    training_calls: Sequence[BlockCall],
    checks: Sequence[BlockCall],
) -> tuple[float, list[Tensor], list[float]]:
    """Return the least error on ``checks`` during the descent, with its integers and ranges."""
    learned = (*codes, *ranges)
    generator = torch.Generator().manual_seed(0)
    least: tuple[float, list[Tensor], list[float]] = (math.inf, [], [])
    order: list[int] = []
    for step in range(_STEPS):
        order = order or torch.randperm(len(training_calls), generator=generator).tolist()
        with torch.enable_grad():
            error = training_calls[order.pop()].error(run)
            gradients = torch.autograd.grad(error, [each.parameter for each in learned], allow_unused=True)
        for each, gradient in zip(learned, gradients, strict=True):
            if gradient is not None:
                each.move(gradient, 1 - step / _STEPS)
        if (step + 1) % _EVERY == 0:
            now = _mean(run, checks)
            if now < least[0]:
                least = now, [each.codes() for each in codes], [each.amax() for each in ranges]
    return least


def _mean(run: Callable[..., Any], calls: Sequence[BlockCall]) -> float:
    return sum(float(call.error(run)) for call in calls) / len(calls)


def _weights(proxy: Proxied, plan: Plan) -> Iterator[tuple[Site, OperandPlan]]:
    """Yield the sites whose weights have a choice of integers, and those weights."""
    stored = stored_weights(plan)
    for site in proxy.planned(plan):
        for weight in plan[site.path].operands:
            # The entries of an embedding multiply nothing, so rounding to nearest is best.
            weighted = weight.quantized and weight.role == "weight" and plan[site.path].kind != "embedding"
            if weighted and why_nearest(weight, stored, _LABEL) is None:
                yield site, weight


ALGORITHM = Algorithm(
    wanted=lambda settings: settings.rounding == "reconstruct",
    run=reconstruct_blocks,
    batches=MANY,
    needs_batches=lambda settings: True,
)
