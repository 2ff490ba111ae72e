"""Run batches through a proxy again: completely, or up to the calls of one module after another.

Legend: y the float output of a batch, all floating tensors of it together and without padding; z the output with
quantized operands. The error of a plan is the sum over batches of |z - y|^2 / |y|^2, without the values of y that are
masks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from quantizer.observe.replay_batches import Batch, Known, ReplayBatches
from quantizer.observe.statistics import flat_output, floats, is_no_mask, padding_mask, without_padding
from quantizer.plan.apply import apply_plan, float_weights, switch_on
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.proxy.call_numbers import current_call, numbered
from quantizer.proxy.eager_attention import attention_of, observed_probabilities
from quantizer.proxy.lower import with_kernels
from quantizer.proxy.recorded_calls import RecordedCalls
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import CallOverride, Site
from quantizer.utils.batches import copied
from quantizer.utils.distributed import exact_sums
from quantizer.utils.fingerprint import tensors_digest
from quantizer.utils.progress import counted

if TYPE_CHECKING:
    from quantizer.algorithms.algorithm import Proxied

Called = TypeVar("Called", bound=nn.Module)

Visit = Callable[[Any, Any, Any, Tensor | None], None]
"""A function of a call: its site or module, its arguments, and the mask [B, S] of real tokens (None: all are real)."""


_COUNT: ContextVar[Counter[str] | None] = ContextVar("_COUNT", default=None)
"""The number of batches that ``run`` has run, inside ``counted_runs``."""


@contextmanager
def counted_runs() -> Iterator[Counter[str]]:
    """Yield a counter, whose ``batches`` become the number of batches that run in the block, not in a block within."""
    count: Counter[str] = Counter()
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def _count() -> None:
    if (count := _COUNT.get()) is not None:
        count["batches"] += 1


def run(proxy: nn.Module, batch: Batch, override: CallOverride | None = None, sites: Collection[Site] = ()) -> Any:
    """Return the output for a copy of a batch; ``override`` replaces the calls of ``sites``, active or not."""
    _count()
    args, keywords = copied(*batch)
    # forward() instead of a call: the hooks of the proxy are for calibration.
    with _overridden(sites, override), unmoved(proxy), numbered(proxy):
        return proxy.forward(*args, **keywords)


@contextmanager
def _overridden(sites: Collection[Site], override: CallOverride | None) -> Iterator[None]:
    """Replace the calls of sites by ``override``; None: they compute in float."""
    active = {site: site.active for site in sites}
    try:
        for site in sites:
            # An active site ignores its judge.
            site.active, site.judge = False, override
        yield
    finally:
        for site, was in active.items():
            site.active, site.judge = was, None


@contextmanager
def quantized(proxy: Proxied, plan: Plan) -> Iterator[None]:
    """Apply a plan to the proxy, with weights as float parameters; switch all quantizers off afterwards."""
    apply_plan(proxy.module, plan)
    try:
        switch_on(proxy.module, plan)
        yield
    finally:
        for site in proxy.sites:
            site.reset()


class Replay:
    """Batches that run again, where each pass continues to the calls of one more site or module.

    Results before these calls are recorded and not computed again, so all passes together cost little more than one.
    Memory holds the outputs of the outermost finished modules, for every batch; if a model passes objects such as a
    cache between modules, of the innermost ones.

    Attributes:
        batches: the batches.
    """

    def __init__(self, proxy: Proxied, batches: Iterable[Batch]) -> None:
        self.batches = list(batches)
        self._proxy, self._sites = proxy.module, proxy.sites
        self._calls: list[Counter[nn.Module]] = []
        self._ended: dict[tuple[int, bool], RecordedCalls] = {}

    def in_order(self, modules: Collection[Called], *, in_float: bool = False) -> list[Called]:
        """Return the sites or modules that the batches call, in the order of their first calls."""
        order: list[Called] = []
        for batch in self.batches:
            # The proxy itself is not called, because its hooks are for calibration.
            called = [module for module in modules if module is self._proxy]
            self._pass(batch, modules, lambda module, *_, called=called: called.append(module), in_float)
            _count()
            self._calls.append(Counter(called))
            # A module that no earlier batch reached follows the module called before it.
            position = 0
            for module in dict.fromkeys(called):
                if module not in order:
                    order.insert(position, module)
                position = order.index(module) + 1
        return order

    def calls(self, place: int, module: nn.Module) -> int:
        return self._calls[place][module]

    def stop_at(self, place: int, module: nn.Module, visit: Visit, *, in_float: bool = False) -> None:
        """Call ``visit`` with the calls of a module, in a pass of batch ``place`` that ends with the last of them.

        Call ``in_order`` first, and then this in that order. The inputs of the module must not change any more.
        """
        remaining = self.calls(place, module)
        if remaining == 0:
            return
        ended = self._ended.setdefault((place, in_float), RecordedCalls(self._proxy, outermost=True))

        def counted(module: nn.Module, args: Any, keywords: Mapping[str, Any], mask: Tensor | None) -> None:
            nonlocal remaining
            # Results from now on are not final.
            ended.records = False
            visit(module, args, keywords, mask)
            remaining -= 1
            if remaining == 0:
                raise Reached

        # Together, the parts of a batch are about one more pass, which ``in_order`` counts: this count is not used.
        with counted_runs(), ended, suppress(Reached):
            self._pass(self.batches[place], [module], counted, in_float)

    def in_float(self) -> AbstractContextManager[None]:
        return _overridden(self._sites, None)

    def visit(self, module: nn.Module, visit: Visit) -> None:
        """Call ``stop_at`` for every batch."""
        for place in range(len(self.batches)):
            self.stop_at(place, module, visit)

    def _pass(self, batch: Batch, modules: Collection[nn.Module], visit: Any, in_float: bool) -> None:
        """Run a batch; visited sites are quantized, other sites run in float if ``in_float``."""
        mask = padding_mask(batch[1], batch[0])
        sites = [module for module in modules if isinstance(module, Site)]
        others = [module for module in modules if not isinstance(module, Site)]

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            visit(site, args, keywords, mask)
            return site.rounded(function, args, keywords)

        def hook(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            visit(module, args, keywords, mask)

        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in others]
        try:
            with self.in_float() if in_float else nullcontext():
                run(self._proxy, batch, judge, sites)
        finally:
            for handle in handles:
                handle.remove()


_ROWS = 512
"""The number of rows of a linear layer's input that are used: enough to compare ranges, and cheaper than all."""

_BATCHED = 3  # the number of axes from which the first one counts as the batch

_ITEMS = 4
"""The number of items of a batch that are used if rows depend on each other."""


class SiteCall:
    """One call of a site, with its real operands.

    Legend: y the site's float output, as rows; y_c the output with those operands quantized that the caller switched
    on. The error is the mean over rows of |y_c - y|^2 / |y|^2. It is relative to each row, because in the absolute
    error a few rows with huge values would outweigh all others. A row is the last axis; for a convolution it is one
    image.

    Attributes:
        site: the site that is called.
        number: the index of this call among the site's calls in its pass, from 0.
    """

    def __init__(
        self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.site = site
        self._function = function
        self._all = (args, keywords, mask)
        self.number = current_call(site.path)

    def operand(self, name: str) -> Any:
        """Return the operand before quantization, without padding."""
        args, keywords, mask = self._all
        place = [entry.name for entry in self.site.operation.operands].index(name)
        if self.site.operation.operands[place].index is None:
            # Fused attention computes its probabilities itself; their last two axes have no padding to remove.
            return observed_probabilities(args, keywords)
        value = self.site.argument(place, args, keywords)
        last = self.site.operation.name == "linear"
        return without_padding(value, mask, channels_last=last) if isinstance(value, Tensor) else value

    @cached_property
    def expected(self) -> Tensor | None:
        """The rows of the float output, float64; None if there is no tensor. Read it before a quantizer is on."""
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


def visit_calls(
    proxy: nn.Module, sites: Collection[Site], batches: Iterable[Batch], visit: Callable[[SiteCall], None], title: str
) -> None:
    """Run batches through a proxy in float and pass every call of ``sites`` to ``visit``."""
    with torch.no_grad(), counted(list(batches), title, unit="batch") as steps:
        for batch in steps:
            mask = padding_mask(batch[1], batch[0])

            def watch(site: Site, function: Any, args: list[Any], keywords: dict[str, Any], mask: Any = mask) -> Any:
                visit(SiteCall(site, function, args, keywords, mask))
                # An in-place call writes into the tensor itself, because other code may refer to it.
                return function(*args, **keywords)

            run(proxy, batch, watch, sites)


def _sample(
    site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Return enough of a call's operands to compare ranges, and its mask [B, S]."""
    if site.operation.name == "linear" and args and isinstance(args[0], Tensor):
        rows = without_padding(args[0], mask, channels_last=True).reshape(-1, args[0].shape[-1])
        return [rows[:: max(1, len(rows) // _ROWS)], *args[1:]], keywords, None
    if site.operation.kind == "conv" and args and isinstance(args[0], Tensor):
        weight = args[1] if len(args) > 1 else keywords.get("weight")
        # A single image has no batch axis.
        batched = isinstance(weight, Tensor) and args[0].dim() == weight.dim()
        return [args[0][:_ITEMS] if batched else args[0], *args[1:]], keywords, None
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    same_batch = len({(tensor.dim(), tensor.shape[0] if tensor.dim() else 0) for tensor in tensors}) == 1
    # The first axis of an einsum need not be the batch.
    if not same_batch or tensors[0].dim() < _BATCHED or site.operation.equation:
        return args, keywords, mask

    def first(value: Any) -> Any:
        return value[:_ITEMS] if isinstance(value, Tensor) else value

    first_keywords = {name: first(value) for name, value in keywords.items()}
    return [first(value) for value in args], first_keywords, mask if mask is None else mask[:_ITEMS]


class Reached(BaseException):
    """Ends a pass early. It is not an Exception, so a model that catches errors does not catch it."""


_OTHER_ATTENTION_ERROR = 0.01
"""The error from which two implementations of attention differ in more than rounding; bfloat16 causes 0.0001."""


class OutputError:
    """The error of quantized models on batches; float outputs and errors are computed once per batch.

    A plan of another backend may be the same; its error is reused if the float output has the same bits.
    """

    def __init__(self, proxy: Proxied, known: Known | None = None) -> None:
        """
        Args:
            proxy: the calibrated proxy, its sites inactive and unobserved.
            known: cached results, to which new ones are added; None: none."""
        self._proxy = proxy
        self._expected: dict[Hashable, Tensor] = {}
        self._digests: dict[Hashable, str] = {}
        known = Known() if known is None else known
        self._known, self._takes = known.errors, known.channels_last

    def quick(self, batch: Batch) -> Batch:
        """Return a batch with channels last, if the model takes it; its convolutions are then 1.2 to 3 times as fast.

        Code that views activations in another shape does not take it.
        """
        if not self._takes:
            self._takes.append(_takes_channels_last(self._proxy, batch))
        return _channels_last(batch) if self._takes[0] else batch

    def of(self, plan: Plan, batches: Mapping[Hashable, Batch]) -> float:
        """Return the error of the model quantized by a plan; the proxy is float again afterwards."""
        return math.fsum(self._terms(plan, batches))

    def of_all_ranks(self, plan: Plan, kept: ReplayBatches, limit: float = math.inf) -> float:
        """Return the error on the batches of all ranks, with the same bits as one process with all batches.

        An error above ``limit`` may omit batches.
        """
        (error,) = exact_sums([self._terms(plan, kept.mine(), limit)])
        return error

    def _terms(self, plan: Plan, batches: Mapping[Hashable, Batch], limit: float = math.inf) -> list[float]:
        terms: list[float] = []
        digest = plan_digest(plan)
        with torch.no_grad():
            for name in [name for name in batches if name not in self._expected]:
                self._expected[name] = _output(self._proxy.module, self.quick(batches[name]))
                self._digests[name] = tensors_digest({"output": self._expected[name]})
            keys = {name: (digest, name, self._digests[name]) for name in batches}
            with nullcontext() if self._known.keys() >= {*keys.values()} else self._rounded(plan):
                for name, batch in batches.items():
                    key = keys[name]
                    if key not in self._known:
                        output = _output(self._proxy.module, self.quick(batch))
                        self._known[key] = _error(output, self._expected[name])
                    terms.append(self._known[key])
                    if math.fsum(terms) > limit:
                        break
        return terms

    @contextmanager
    def _rounded(self, plan: Plan) -> Iterator[None]:
        """Apply a plan as ``quantized`` does, with integer kernels where there are any."""
        with quantized(self._proxy, plan), with_kernels(float_weights(self._proxy.module, plan)):
            yield


_SAME = 1e-3
"""Maximum difference of outputs, relative to the largest value, due to the order of float sums."""


def _takes_channels_last(proxy: Proxied, batch: Batch) -> bool:
    """Return whether a model with convolutions computes the same of images with channels last."""
    if not any(site.operation.name == "conv2d" for site in proxy.sites) or _channels_last(batch) is batch:
        return False
    with torch.no_grad():
        expected = _output(proxy.module, batch)
        try:
            found = _output(proxy.module, _channels_last(batch))
        except RuntimeError:
            return False
    same = found.shape == expected.shape and expected.numel() > 0
    return same and float((found - expected).abs().max()) <= _SAME * float(expected.abs().max())


def _channels_last(batch: Batch) -> Batch:
    """Return a batch with its images [B, C, H, W] in channels last; the batch itself without any."""
    images = [value for value in (*batch[0], *batch[1].values()) if _is_image(value)]
    if not images:
        return batch

    def last(value: Any) -> Any:
        return value.contiguous(memory_format=torch.channels_last) if _is_image(value) else value

    return tuple(map(last, batch[0])), {name: last(value) for name, value in batch[1].items()}


def _is_image(value: Any) -> bool:
    return type(value) is Tensor and value.dim() == 4 and value.is_floating_point()


def other_attention_error(model: nn.Module, proxy: nn.Module, batch: Batch) -> float | None:
    """Return the error of a proxy's output, if the model's own attention implementation computes another function.

    Returns:
        None if both agree up to rounding, or cannot be compared: outputs have other shapes, or differ at each run.
    """
    with torch.no_grad():
        with attention_of(model, proxy) as other:
            if not other or not floats(expected := run(proxy, batch)):
                return None
        actual = _output(proxy, batch)
        expected = flat_output(expected, padding_mask(batch[1], batch[0]))
        error = _error(actual, expected) if actual.shape == expected.shape else 0.0
        return error if error > _OTHER_ATTENTION_ERROR and torch.equal(_output(proxy, batch), actual) else None


def _output(proxy: nn.Module, batch: Batch) -> Tensor:
    return flat_output(run(proxy, batch), padding_mask(batch[1], batch[0]))


def _error(output: Tensor, expected: Tensor) -> float:
    no_mask = is_no_mask(expected)
    if not bool(no_mask.all()):
        expected, output = expected[no_mask], output[no_mask]
    # In place, because the logits of a decoder are 200 MB per batch.
    power, error = torch.stack((expected.square().sum(), (output - expected).square_().sum())).tolist()
    if math.isnan(error):
        return math.inf
    return error / power if power else 0.0
