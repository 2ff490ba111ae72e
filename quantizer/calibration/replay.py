"""A second pass of kept batches, in which the calls of some sites show the error that candidate ranges make.

Legend: y the site's float output, as rows; y_c the output with the operands rounded that the caller has switched on.
The error is the mean over rows of |y_c - y|^2 / |y|^2. It is relative to each row, because in the absolute error a few
rows with huge values would outweigh all others. A row is the last axis; for a convolution it is one image.

Passes of batches through a quantized proxy in stages: each stage goes on to the calls of one more site.

What ended before these calls is recorded and not computed again in later stages, so that all stages together cost
little more than one pass. In memory are the outputs of the outermost modules that have ended, of every batch; a model
that hands objects from module to module, such as a cache, has those of the innermost ones.

A product with a weight, written as x W^T: the rows of the weight, and the rows that they multiply.

Legend: W [G, N, K] the weight, N outputs of K inputs each; x [G, M, K] what it multiplies, one row for each position;
G products of their own: the groups of a convolution, or the matrices of a batched product.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.common.batches import copied
from quantizer.common.progress import counted
from quantizer.observe.replay_batches import Batch
from quantizer.observe.site_statistics import padding_mask, without_padding
from quantizer.operations.gemm_shape import labels
from quantizer.proxy.call_numbers import current_call, numbered
from quantizer.proxy.eager_attention import observed_probabilities
from quantizer.proxy.recorded_calls import RecordedCall, RecordedCalls
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import CallOverride, Site
from quantizer.proxy.weight import laid_out

_ROWS = 512
"""The number of rows of a linear's input that are tried: enough to tell ranges apart, and cheaper than all."""

_BATCHED = 3  # the number of axes from which the first one is taken for the batch

_ITEMS = 4
"""The number of items of a batch that are tried if rows depend on each other."""


class SiteCall:
    """One call of a site, with its real operands.

    Attributes:
        site: the site that is called.
        number: which of the site's calls in its pass this is, from 0.
    """

    def __init__(
        self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.site = site
        self._function = function
        self._all = (args, keywords, mask)
        self.number = current_call(site.path)

    def operand(self, name: str) -> Any:
        """Return the operand before rounding, without padding."""
        args, keywords, mask = self._all
        place = [entry.name for entry in self.site.operation.operands].index(name)
        if self.site.operation.operands[place].index is None:
            # Fused attention computes its probabilities itself; their last two axes are no tokens to leave out.
            return observed_probabilities(args, keywords)
        value = self.site.argument(place, args, keywords)
        last = self.site.operation.name == "linear"
        return without_padding(value, mask, channels_last=last) if isinstance(value, Tensor) else value

    @cached_property
    def expected(self) -> Tensor | None:
        """The rows of the float output, float64; None if it is no tensor. Read it before any quantizer is on."""
        return self._rows()

    def error(self) -> float:
        """Return the relative error of the output with the site's current quantizers; read ``expected`` first."""
        expected, rows = self.expected, self._rows()
        assert expected is not None
        assert rows is not None
        power = expected.square().sum(1)
        error = (rows - expected).square().sum(1)
        return float((error[power > 0] / power[power > 0]).mean()) if bool((power > 0).any()) else 0.0

    @cached_property
    def _some(self) -> tuple[list[Any], dict[str, Any], Tensor | None]:
        return _sample(self.site, *self._all)

    def _rows(self) -> Tensor | None:
        args, keywords, mask = self._some
        output = self.site.rounded(self._function, args, keywords)
        if not isinstance(output, Tensor):
            return None
        values = without_padding(output, mask, channels_last=self.site.operation.name == "linear")
        by_image = self.site.operation.kind == "conv" and values.dim() > 1
        return (values.flatten(1) if by_image else values.reshape(-1, values.shape[-1] if values.dim() else 1)).double()


def replay(
    proxy: nn.Module, sites: Collection[Site], batches: Iterable[Batch], visit: Callable[[SiteCall], None], title: str
) -> None:
    """Run batches through a proxy and pass every call of ``sites`` to ``visit``."""
    watcher = _Watcher(visit)
    with torch.no_grad(), counted(list(batches), title, unit="batch") as steps:
        for args, keywords in steps:
            watcher.mask = padding_mask(keywords, args)
            run_judged(proxy, sites, (args, keywords), watcher)


def run_judged(proxy: nn.Module, sites: Collection[Site], batch: Batch, judge: CallOverride) -> None:
    """Run a batch with ``judge`` in place of every call of ``sites``, whether they are active or not."""
    active = {site: site.active for site in sites}
    try:
        for site in sites:
            # An active site asks no judge.
            site.active, site.judge = False, judge
        # forward() instead of a call: the hooks of the proxy are for calibration.
        with unmoved(proxy), numbered(proxy):
            proxy.forward(*batch[0], **batch[1])
    finally:
        for site, was in active.items():
            site.active, site.judge = was, None


class _Watcher:
    """An override of the sites' calls, which passes each to ``visit`` and then computes the float result.

    Attributes:
        mask: the real tokens of the batch, [B, S]; None: all tokens are real.
    """

    def __init__(self, visit: Callable[[SiteCall], None]) -> None:
        self.mask: Tensor | None = None
        self._visit = visit

    def __call__(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        self._visit(SiteCall(site, function, args, keywords, self.mask))
        # A call in place writes into the tensor itself, since other code may hold the same tensor.
        return function(*args, **keywords)


def _sample(
    site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Return a part of a call's operands that is enough to compare ranges, and the mask [B, S] of that part."""
    if site.operation.name == "linear" and args and isinstance(args[0], Tensor):
        rows = without_padding(args[0], mask, channels_last=True).reshape(-1, args[0].shape[-1])
        return [rows[:: max(1, len(rows) // _ROWS)], *args[1:]], keywords, None
    if site.operation.kind == "conv" and args and isinstance(args[0], Tensor):
        weight = args[1] if len(args) > 1 else keywords.get("weight")
        # A single image has no batch axis.
        batched = isinstance(weight, Tensor) and args[0].dim() == weight.dim()
        return [args[0][:_ITEMS] if batched else args[0], *args[1:]], keywords, None
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    alike = len({(tensor.dim(), tensor.shape[0] if tensor.dim() else 0) for tensor in tensors}) == 1
    # In an einsum the equation names the axes, and the first need not be the batch.
    if not alike or tensors[0].dim() < _BATCHED or site.operation.equation:
        return args, keywords, mask

    def first(value: Any) -> Any:
        return value[:_ITEMS] if isinstance(value, Tensor) else value

    some = {name: first(value) for name, value in keywords.items()}
    return [first(value) for value in args], some, mask if mask is None else mask[:_ITEMS]


Visit = Callable[[Site, list[Any], dict[str, Any], Tensor | None], None]
"""A function of a call: its site, its arguments, and the mask [B, S] of real tokens of the batch (None: all)."""


class StagedPasses:
    """The passes of some batches."""

    def __init__(self, proxy: nn.Module, batches: Iterable[Batch]) -> None:
        self._proxy = proxy
        self._batches = list(batches)
        self._calls: list[Counter[Site]] = []
        self._ended = [EndedCalls(proxy) for _ in self._batches]

    def in_order(self, sites: Collection[Site]) -> list[Site]:
        """Return those sites that the batches call, in the order of their first calls."""
        order: list[Site] = []
        for batch in self._batches:
            called = self._called(batch, sites)
            self._calls.append(Counter(called))
            # A site that no earlier batch reached follows the one that was called before it.
            place = 0
            for site in dict.fromkeys(called):
                if site not in order:
                    order.insert(place, site)
                place = order.index(site) + 1
        return order

    def visit(self, site: Site, visit: Visit) -> None:
        """Call ``visit`` with every call of a site; call ``in_order`` first, and then this in that order.

        Whatever the site depends on must not change any more.
        """
        for batch, calls, ended in zip(self._batches, self._calls, self._ended, strict=True):
            if calls[site]:
                with ended:
                    self._until_last(batch, site, calls[site], ended, visit)

    def _until_last(self, batch: Batch, site: Site, calls: int, ended: EndedCalls, visit: Visit) -> None:
        left = calls

        def counted(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
            nonlocal left
            ended.reached = True
            visit(site, args, keywords, mask)
            left -= 1
            if left == 0:
                raise Reached

        try:
            self._run(batch, [site], counted)
        except Reached:
            return

    def _called(self, batch: Batch, sites: Collection[Site]) -> list[Site]:
        """Return the sites that a batch calls, in order."""
        called: list[Site] = []
        self._run(batch, sites, lambda site, *_: called.append(site))
        return called

    def _run(self, batch: Batch, sites: Collection[Site], visit: Visit) -> None:
        args, keywords = copied(*batch)
        mask = padding_mask(keywords, args)

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            visit(site, args, keywords, mask)
            return site.rounded(function, args, keywords)

        run_judged(self._proxy, sites, (args, keywords), judge)


class Reached(BaseException):
    """The end of a pass that needs to go no further; no error, so that a model that catches errors lets it through."""


class EndedCalls(RecordedCalls):
    """The module calls of one batch that ended before the last stage.

    Attributes:
        reached: whether this pass has reached its stage, so that what ends from now on is not final.
    """

    def __init__(self, proxy: nn.Module) -> None:
        super().__init__(proxy)
        self.reached = False
        self._calls: dict[tuple[nn.Module, int], RecordedCall] = {}

    def __enter__(self) -> EndedCalls:
        super().__enter__()
        self.reached = False
        self._number.clear()
        return self

    @property
    def _records(self) -> bool:
        return not self.reached

    def _recorded(self, module: nn.Module, number: int) -> RecordedCall | None:
        call = self._calls.get((module, number))
        return call if call is not None and call.holds else None

    def _keep(self, module: nn.Module, number: int, call: RecordedCall) -> None:
        if self.reached or not call.usable:
            return
        for inner, count in call.inside.items():
            after = self._number[inner]
            for place in range(after - count, after):
                # This call is taken as a whole.
                self._calls.pop((inner, place), None)
        self._calls[module, number] = call


class ProductRows(Protocol):
    """A weighted product in rows."""

    def weight(self, values: Tensor) -> Tensor:
        """Return values in the weight's own shape as [G, N, K]."""

    def as_weight(self, rows: Tensor) -> Tensor:
        """Return values [G, N, K] in the weight's own shape, contiguous."""

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield all rows of the other operand, in parts [G, M, K]."""


def product_rows(
    site: Site, place: int, x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]
) -> ProductRows | str:
    """Return the rows of a site's call, or why it has none."""
    name = site.operation.name
    if name in ("conv1d", "conv2d", "conv3d"):
        return _convolution(x, weight, args, keywords)
    equation = site.source.equation or _equation(name, x if place else weight, weight if place else x)
    return f"its operation is {name}" if equation is None else _contraction(equation, place, x, weight)


def _equation(name: str, lhs: Tensor, rhs: Tensor) -> str | None:
    """Return a product of the catalogue as an equation of ``einsum``; None if it is none."""
    if name == "linear":
        return "...k,nk->...n"
    if name == "addbmm":
        return "bmk,bkn->mn"
    if name in ("matmul", "mm", "bmm", "addmm", "baddbmm"):
        first, second = "...mk" if lhs.dim() > 1 else "k", "...kn" if rhs.dim() > 1 else "k"
        kept = ("m" if lhs.dim() > 1 else "") + ("n" if rhs.dim() > 1 else "")
        return f"{first},{second}->...{kept}" if lhs.dim() > 1 or rhs.dim() > 1 else "k,k->"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contraction:
    """A product that an equation describes.

    Attributes:
        weight_axes: the axes of the weight: those of both operands that are kept, its own, and those summed over.
        other_axes: the same of the other operand.
        batch: the number of axes of the first kind.
        summed: the number of axes of the last kind.
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
    found = labels(equation, [tensor.dim() for tensor in tensors])
    own, other = found.operands[place], found.operands[1 - place]
    sizes = found.sizes([tensor.shape for tensor in tensors])
    for names, tensor in zip(found.operands, tensors, strict=True):
        if any(sizes[name] != size for name, size in zip(names, tensor.shape, strict=True)):
            return "one of its operands is broadcast"
    both = [name for name in own if name in other]
    batch = [name for name in both if name in found.output]
    summed = [name for name in both if name not in found.output]
    if found.contracted - set(summed):
        return "it sums over an axis of one operand alone"

    def axes(names: tuple[str, ...]) -> tuple[int, ...]:
        single = [name for name in names if name not in both]
        return tuple(names.index(name) for name in [*batch, *single, *summed])

    return _Contraction(
        weight_axes=axes(own), other_axes=axes(other), batch=len(batch), summed=len(summed), shape=tuple(weight.shape)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Convolution:
    """A convolution: each position of its output is a row of the patch that it reads.

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
        # One image at a time: its patches are as many times as large as the kernel has elements.
        for image in images:
            patches = F.pad(image, self.padding)
            for axis, (size, step, apart) in enumerate(zip(kernel, self.stride, self.dilation, strict=True), start=1):
                patches = patches.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
            # [channels, *positions, *kernel] to [G, positions, channels of a group, kernel].
            positions = math.prod(patches.shape[1 : 1 + len(kernel)])
            grouped = patches.reshape(self.groups, self.shape[1], positions, math.prod(kernel))
            yield grouped.movedim(1, 2).flatten(2)


def _convolution(x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> ProductRows:
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **given, **keywords}
    axes = weight.dim() - 2
    stride, dilation = _by_axis(given["stride"], axes), _by_axis(given["dilation"], axes)
    if given["padding"] == "same":
        total = [apart * (size - 1) for size, apart in zip(weight.shape[2:], dilation, strict=True)]
        sides = [(whole // 2, whole - whole // 2) for whole in total]
    else:
        sides = [(size, size) for size in _by_axis(0 if given["padding"] == "valid" else given["padding"], axes)]
    return _Convolution(
        groups=int(given["groups"]),
        stride=stride,
        dilation=dilation,
        padding=tuple(size for side in reversed(sides) for size in side),
        shape=tuple(weight.shape),
    )


def _by_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return an argument of a convolution for each axis: torch takes one number for all."""
    values = tuple(int(size) for size in value) if isinstance(value, Sequence) else (int(value),)
    return values * axes if len(values) == 1 else values
