"""The measure ``gradient``: a second-order estimate of the output's divergence, for all groups by one backward pass.

Legend: y the output; d_s [.., C] the change of a site's output if a group is quantized, d_st its rows; J_st the
derivative of y with respect to such a row; v a random direction at the output whose covariance is H, the Hessian of the
divergence (see ``metric.py``).

To second order a change J d of the output costs |J d|^2 in the metric H. One backward pass gives g_st = v J_st, and E
(g_st . d_st)^2 is that cost (Hutchinson's estimator). The estimate for a group is the sum of (g_st . d_st)^2 over the
rows of its sites. It assumes that errors of rows are independent, so thousands of rows average out the variance of a
single random direction. With a loss, g is the gradient of the loss, and the estimate is that of the empirical Fisher
matrix.

Autograd keeps only the inputs of blocks; the backward pass computes each block again, so memory does not grow with the
layers but with their inputs (``RepeatedCalls``).

The result omits three kinds of groups:

- No gradient reaches them: a rounding, an argmax or a block without gradients follows.
- Their changes are not small: a range clips a few rows on which the network depends (the first token of many decoders).
The second order is no estimate then, because the true cost is bounded, or far larger.
- The model overwrites their operands before the backward pass, which computes the changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from quantizer.algorithms.sensitivity.groups import Changes, Group, Pending, watched
from quantizer.algorithms.sensitivity.metric import Divergence, Probe
from quantizer.errors import SensitivityError
from quantizer.observe.statistics import padding_mask
from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site
from quantizer.utils.batches import copied
from quantizer.utils.structure import leaves

_SMALL = 0.25
"""The largest ratio of the square of a row's change to the square of the row."""

Loss = Callable[[Any], Tensor]
"""A function from the model's output to a scalar."""


def gradient(
    proxy: nn.Module,
    groups: Sequence[Group],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    result: Any,
    loss: Loss | None = None,
) -> dict[str, float]:
    """Return the estimate for each group on one batch, by name; ``result`` is the float output."""
    divergence = Divergence(result, padding_mask(keywords, args))

    def run() -> Any:
        positional, by_keyword = copied(args, keywords)
        # Not a replay: the backward pass repeats calls in the state after this one.
        return proxy.forward(*positional, **by_keyword)

    numbered = {group.block for group in groups if group.block.rpartition(".")[2].isdigit()}
    blocks = RepeatedCalls(module for path, module in proxy.named_modules() if path in numbered)
    with unmoved(proxy), blocks:
        costs = _costs(run, groups, divergence, loss, later=True)
    if blocks.held:
        return costs
    try:
        return _costs(run, groups, divergence, loss, later=False)
    except RuntimeError as error:
        if loss is not None or not overwritten(error):
            raise
        # The model overwrites tensors that its own backward pass needs, so it has no gradient.
        return {}


def _costs(
    run: Callable[[], Any], groups: Sequence[Group], divergence: Divergence, loss: Loss | None, *, later: bool
) -> dict[str, float]:
    """Return the estimates from a forward and a backward pass; ``later`` as in ``watched``."""
    costs: dict[str, float] = defaultdict(float)
    large: set[str] = set()
    anchor = torch.zeros((), requires_grad=True)

    def add(changes: Changes, gradient: Tensor) -> None:
        for name, change in changes.by_group.items():
            if loss is None and not _is_small(change, changes.output, gradient):
                large.add(name)
            product = gradient * change
            costs[name] += float((product.sum(-1) if product.dim() else product).double().square().sum())

    def visit(site: Site, output: Tensor, pending: Pending) -> Tensor:
        if not site.source.in_place:
            inputs = (output, anchor, add, pending.compute, *pending.tensors)
            passed: Tensor = _Watch.apply(*inputs)  # type: ignore[no-untyped-call]
            return passed
        # Other code refers to this tensor; a copy would not change with it.
        if output.requires_grad:
            output.register_hook(partial(add, pending.changes()))  # type: ignore[no-untyped-call]
        return output

    # The backward pass repeats calls, in which the sites must compute as in the first pass.
    with torch.enable_grad(), watched(groups, visit, later=later):
        output = run()
        probe = divergence.probe(output) if loss is None else _of_loss(loss, output)
        reached = [pair for pair in zip(probe.tensors, probe.directions, strict=True) if pair[0].requires_grad]
        if reached:
            # The gradient of the anchor is 0. On its way autograd passes every site, but computes none for parameters.
            tensors, directions = zip(*reached, strict=True)
            torch.autograd.grad(tensors, [anchor], directions, allow_unused=True)
    return {name: cost * probe.factor for name, cost in costs.items() if name not in large}


def _is_small(change: Tensor, value: Tensor, gradient: Tensor) -> bool:
    """Return whether all changes are small, among rows of at least mean power that affect the output."""
    if value.dim() == 0:
        return True
    power = value.square().sum(-1)
    counts = (power >= power.mean()) & gradient.ne(0).any(-1)
    return not bool((counts & (change.square().sum(-1) > _SMALL * power)).any())


class _Watch(torch.autograd.Function):
    """The identity; its backward pass calls ``show`` with the changes and the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        anchor: Tensor,
        show: Callable[[Changes, Tensor], None],
        compute: Callable[..., Changes],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.show, ctx.compute = show, compute
        # Not as attributes: if a call is repeated, autograd frees its saved tensors and saves new ones.
        ctx.save_for_backward(*tensors)
        # A copy, because autograd forbids in-place changes of an input that a function returns.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Read once, because each access would repeat the call.
        tensors = ctx.saved_tensors
        ctx.show(ctx.compute(*tensors), gradient)
        return gradient, torch.zeros(()), None, None, *[None] * len(tensors)


def _of_loss(loss: Loss, output: Any) -> Probe:
    value = loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SensitivityError(f"loss(output) returned {shown}; expected one floating-point number as a tensor")
    if not value.requires_grad:
        raise SensitivityError(
            "loss(output) does not depend on the model's output in a way that torch can differentiate"
        )
    return Probe(tensors=[value], directions=[torch.ones_like(value)], factor=0.5)


_PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def overwritten(error: BaseException) -> bool:
    """Return whether an error of autograd says that the model overwrote tensors that the backward pass needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


class RepeatedCalls:
    """Calls of modules of which autograd keeps only the inputs: the backward pass repeats each call once.

    Calls with arguments other than tensors and plain values, such as a cache that they fill, are not repeated. An error
    of a repeated call ends the block without an error, because the call depends on state that changed.

    Attributes:
        held: whether every repeated call gave its first result again, bit for bit.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = []
        self._repeating = False
        self.held = True

    def __enter__(self) -> Self:
        for module in self._modules:
            self._kept.append((module, {name: value for name, value in vars(module).items() if name == "forward"}))
            vars(module)["forward"] = partial(self._call, module.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for module, own in self._kept:
            del vars(module)["forward"]
            vars(module).update(own)
        self._kept.clear()
        if not isinstance(error, Exception):
            return False
        ended = self._repeating or isinstance(error, CheckpointError) or overwritten(error)
        self.held = self.held and not ended
        return ended

    def _call(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if not all(isinstance(value, _PLAIN) for value in leaves((args, keywords))):
            return forward(*args, **keywords)
        first: list[Any] = []
        before = calls_so_far()

        def run(*args: Any, **keywords: Any) -> Any:
            self._repeating = bool(first)
            with numbered(self, before) if first and before is not None else nullcontext():
                result = forward(*args, **keywords)
            results = [value.detach() if isinstance(value, Tensor) else value for value in leaves(result)]
            if first:
                self.held = self.held and all(map(_same, first, results)) and len(first) == len(results)
                self._repeating = False
            first[:] = results
            return result

        # Otherwise a repeated call would end before its result exists.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **keywords)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and (first is second or not isinstance(first, _PLAIN) or bool(first == second))
