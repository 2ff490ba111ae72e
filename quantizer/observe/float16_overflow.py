"""Find values beyond float16, and let masks and constants follow the type of a half-precision model.

``MadeFloats``: constants such as ``mask.float()`` or ``torch.arange(n).float()`` are float32 because the model was. If
one meets a half tensor, torch would compute in float32 from there on. So it is cast to the type of the model. A tensor
is *made* if it depends on no parameter and no floating input of the model; made tensors compute in their own types
among each other. Tensors that the forward casts on purpose (``x.float()`` in a normalization) keep their type.

``MaskTaint``: in an exported file the constant of a mask is ``FLOAT16_MASK``, see ``ClampMasks``. In a pass, a low
constant keeps its value, is tracked, and is raised only when a softmax reads it. Other low numbers keep their values.

``OverflowTracker``: the bound of a result follows from the bounds of the operands, without reading any tensor. If it
exceeds float16, the operands (if smaller) or the result are measured, and their bounds are exact. So the record of wide
modules is complete and correct. Values such as -3.4e38 or -inf belong to masks and do not count.

Legend: |x| the largest magnitude in x; K the contracted length of a matrix multiplication. A multiplication of x [..,
K] and w [K, N] is at most sqrt(K) |x| times the largest norm of a column of w (Cauchy-Schwarz).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from quantizer.numerics.formats import FLOAT16_MASK, FLOAT16_MAX
from quantizer.numerics.granularity import in_memory_order
from quantizer.observe.float16_modules import Float32Modules
from quantizer.rewrite.torch_products import product_name
from quantizer.utils.fingerprint import tensor_version
from quantizer.utils.structure import leaves

_ONE_TYPE = frozenset(
    function
    for place, names in (
        (torch, "matmul mm bmm mv dot addmm baddbmm addbmm addmv einsum bilinear conv1d conv2d conv3d"),
        (torch, "conv_transpose1d conv_transpose2d conv_transpose3d convolution batch_norm instance_norm tensordot"),
        (Tensor, "matmul __matmul__ __rmatmul__ mm bmm mv dot addmm baddbmm addbmm addmv"),
        (functional, "linear bilinear scaled_dot_product_attention layer_norm group_norm rms_norm batch_norm"),
        (functional, "instance_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    )
    for name in names.split()
    if (function := getattr(place, name, None)) is not None
)
"""Operations that compute in one type; during tracing some of them silently accept several."""


_OF_SITES = frozenset({"multi_head_attention_forward"})
"""Python functions of torch that have sites in a proxy: this mode is off inside them, and a failed call cannot be
traced again."""


class MadeFloats(TorchFunctionMode):
    """A mode in which the tensors that a forward creates follow the type of the model."""

    def __init__(self, dtype: torch.dtype, masked: bool, made: Iterable[Tensor]) -> None:
        super().__init__()
        self._dtype = dtype
        self._masked = masked and dtype is torch.float16
        self._made: Any = WeakTensorKeyDictionary()
        for tensor in made:
            self._made[tensor] = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        floats = _float_leaves((args, kwargs))
        if all(tensor in self._made for tensor in floats):
            result = func(*args, **kwargs)
            for tensor in _float_leaves(result):
                self._made[tensor] = True
            return result
        if len({tensor.dtype for tensor in floats}) == 1 or _is_ours(func):
            return func(*args, **kwargs)
        if _writes(func, kwargs):
            return _with_one_type_on_error(func, args, kwargs, floats[0].dtype)
        # A scalar tensor does not change the type of the other operand.
        if any(tensor.dtype == self._dtype and tensor.dim() and tensor not in self._made for tensor in floats):
            args, kwargs = _pytree.tree_map_only(Tensor, self._as_model, (args, kwargs))
        if func in _ONE_TYPE or getattr(func, "__name__", "") in _OF_SITES:
            args, kwargs = _in_type((args, kwargs), self._dtype)
        return _with_one_type_on_error(func, args, kwargs, self._dtype)

    def _as_model(self, value: Tensor) -> Tensor:
        if not (value.dim() and value.is_floating_point() and value in self._made) or value.dtype == self._dtype:
            return value
        value = torch.where(value < -FLOAT16_MAX, FLOAT16_MASK, value) if self._masked else value
        return value.to(self._dtype)


def with_one_type(model: nn.Module, dtype: torch.dtype, masked: bool) -> None:
    """Let the ``forward`` of a model run in ``MadeFloats``, in place."""
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **keywords: Any) -> Any:
        # During tracing the buffers are not the original ones.
        with MadeFloats(dtype, masked, (buffer for buffer in model.buffers() if buffer.is_floating_point())):
            return forward(*args, **keywords)

    vars(model)["forward"] = run


def _float_leaves(values: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _in_type(values: Any, dtype: torch.dtype) -> Any:
    cast = lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf  # noqa: E731
    return _pytree.tree_map_only(Tensor, cast, values)


def _is_ours(func: Any) -> bool:
    """Return whether a function is an operator of ``quantizer::``, whose scales have their own types."""
    return str(getattr(func, "_qualified_op_name", getattr(func, "namespace", ""))).startswith("quantizer")


def _writes(func: Any, keywords: Any) -> bool:
    """Return whether a function writes into its first argument or into ``out``."""
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_") or keywords.get("out") is not None


_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod"))


def _with_one_type_on_error(func: Any, args: Any, keywords: Any, dtype: torch.dtype) -> Any:
    """Return the result of a function; if it rejects mixed types, with all floats in ``dtype``."""
    try:
        return func(*args, **keywords)
    except RuntimeError:
        if len({tensor.dtype for tensor in _float_leaves((args, keywords))}) < 2:
            raise
        args, keywords = _in_type((args, keywords), dtype)
        return func(*args, **keywords)


_CONSTANTS = frozenset({"fill_", "fill", "full", "full_like", "lift_fresh", "new_full", "scalar_tensor", "_to_copy"})
_MOVES = frozenset(
    {
        *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "cat", "clone", "constant_pad_nd"),
        *("copy_", "detach", "expand", "index", "index_select", "lift_fresh", "permute", "repeat", "reshape", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "tril", "triu", "tril_", "triu_"),
        *("unbind", "unsqueeze", "view", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    }
)
_FACTORS = frozenset({"mul", "mul_", "div", "div_", "sub", "sub_"})
_MASKS = frozenset(
    {
        *("add", "add_", "index_fill", "index_fill_", "index_put", "index_put_", "masked_fill", "masked_fill_"),
        *("masked_scatter", "masked_scatter_", "scatter", "scatter_", "where"),
    }
)
_BOUNDS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax", "softmax"})


class MaskTaint:
    """The tensors of one pass that contain low numbers, each with a flag whether they mask other values."""

    def __init__(self) -> None:
        self._flags: Any = WeakIdKeyDictionary()

    def read(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an operation, with masks raised to FLOAT16_MASK for softmax and fused attention."""
        name = _name(func)
        if not (name in _SOFTMAX or "attention" in name) or not any(map(self._masks, _leaves(args, kwargs))):
            return args, kwargs
        raised: tuple[Any, Any] = _pytree.tree_map(
            lambda leaf: leaf.clamp(min=FLOAT16_MASK) if self._masks(leaf) else leaf, (args, kwargs)
        )
        return raised

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record whether the result of an operation contains low numbers, and whether they mask other values."""
        name = _name(func)
        if product_name(func) is not None or name not in _MOVES | _FACTORS | _MASKS | _CONSTANTS:
            return
        number = name not in _BOUNDS and any(
            isinstance(leaf, float) and leaf < FLOAT16_MASK for leaf in _leaves(args, kwargs)
        )
        constant = name in _CONSTANTS and any(map(_is_low, _pytree.tree_leaves(result)))
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor) and leaf in self._flags]
        if not (number or constant or tensors):
            return
        masks = name in _MASKS or any(self._masks(tensor) for tensor in tensors)
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._flags[leaf] = masks

    def _masks(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and bool(self._flags.get(leaf, False))


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0]
    return name.removeprefix("aten::")


def _leaves(*values: Any) -> Iterator[Any]:
    for value in values:
        yield from _pytree.tree_leaves(value)


def _is_low(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype is torch.float16 and bool(leaf < FLOAT16_MASK)


MASKS = -1e8
"""Lower values are masks: no activation is this low unless others are as high."""

# fmt: off
_KEEP = {
    f"aten::{name}"
    for name in (
        "abs", "_adaptive_avg_pool2d", "amax", "amin", "avg_pool2d", "cat", "clone", "constant_pad_nd",
        "copy_", "embedding", "flip", "gather", "gelu", "hardswish_", "index", "index_select",
        "lift_fresh", "masked_fill", "masked_fill_", "max_pool2d_with_indices", "maximum", "mean",
        "minimum", "native_dropout", "neg", "relu", "relu_", "repeat", "roll", "silu", "silu_", "stack",
        "_to_copy", "tril", "triu", "_unsafe_view", "where",
    )
}
# fmt: on
"""Operations whose result is at most as large as their operands."""

_SUMS = {f"aten::{name}" for name in ("add", "add_", "sub", "sub_", "rsub")}
_ONES = {
    f"aten::{name}"
    for name in ("_softmax", "_safe_softmax", "sigmoid", "sigmoid_", "tanh", "tanh_", "sin", "cos", "erf")
}
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix multiplications, with the position of their left operand."""

_ATTENTION = "aten::_scaled_dot_product_"
_LAYER_NORM = "aten::native_layer_norm"


def passes_masks_on(name: str) -> bool:
    """Return whether a mask among the operands of an operation remains a mask in its result."""
    return name in _KEEP or name in _SUMS


def result_bound(
    name: str,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    bounds: Sequence[float],
    column: Callable[[int], float],
) -> float:
    """Return a bound of the first result of an operation; infinity if no bound is known."""
    # Integers count because a tensor may be filled with one; an axis or index only loosens the bound.
    numbers = [abs(value) for value in args if type(value) in (int, float) and not is_mask(value)]
    factors: list[float] = [abs(value) for value in args if type(value) in (int, float)]
    factor: float = max([1.0, *(abs(value) for value in keywords.values() if type(value) in (int, float))])
    if name in _ONES:
        return 1.0
    if not bounds:
        return math.inf
    if name in _KEEP and not _overrides_divisor(name, args):
        return float(max([*bounds, *numbers]))
    if name in _SUMS:
        return factor * sum(bounds) + sum(factors)
    if name in ("aten::mul", "aten::mul_"):
        return math.prod([*bounds, *factors])
    if name in ("aten::div", "aten::div_") and len(args) > 1 and isinstance(args[1], int | float):
        return bounds[0] / abs(args[1]) if args[1] else math.inf
    if name == _LAYER_NORM:
        # The distance of a value of a row from the mean is at most sqrt(length) times the standard deviation.
        farthest: float = math.sqrt(math.prod(args[1]))
        return farthest * (bounds[1] if len(bounds) > 1 else 1.0) + sum(bounds[2:])
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        root: float = math.sqrt(args[first].shape[-1])
        return factor * (sum(bounds[:first]) + root * bounds[first] * column(first + 1))
    if name == "aten::convolution" and not args[6]:
        patch: int = math.prod(args[1].shape[1:])
        return patch * bounds[0] * bounds[1] + sum(bounds[2:])
    return bounds[2] if name.startswith(_ATTENTION) else math.inf


def largest_inside(name: str, args: Sequence[Any], bounds: Sequence[float], made: Sequence[Tensor]) -> float:
    """Return the largest intermediate value of an operation on a target; 0 if none can exceed float16."""
    if made[0].numel() == 0 or any(isinstance(value, Tensor) and value.numel() == 0 for value in args):
        # For example an expert without tokens.
        return 0.0
    if name == _LAYER_NORM and bounds[0] > math.sqrt(FLOAT16_MAX):
        # The last result is the reciprocal of the standard deviation; its -2nd power is the variance.
        smallest = float(made[-1].min())
        return smallest**-2 if smallest else math.inf
    if name.startswith(_ATTENTION):
        query, key = args[:2]
        if query.shape[-1] * bounds[0] * bounds[1] > FLOAT16_MAX:
            return float(query.norm(dim=-1).max() * key.norm(dim=-1).max())
    return 0.0


def _overrides_divisor(name: str, args: Sequence[Any]) -> bool:
    divisor = 6
    return name == "aten::avg_pool2d" and len(args) > divisor and args[divisor] is not None


def beyond(bound: float) -> bool:
    """Return whether a bound exceeds float16; True for NaN."""
    return not bound <= FLOAT16_MAX


def is_mask(value: Any) -> bool:
    """Return whether a number is low enough to belong to a mask."""
    return isinstance(value, float) and value < MASKS


Frame = tuple[str, int]
"""A running module: its path and the index of its call."""


class _TrackedTensor:
    """The bound of one tensor, and its origin."""

    __slots__ = ("bound", "exact", "frames", "mask", "parameter", "tensor")

    def __init__(self, tensor: Tensor, bound: float) -> None:
        self.tensor = weakref.ref(tensor)
        self.bound = bound
        self.exact = False
        self.mask = False
        self.frames: tuple[Frame, ...] | None = None
        self.parameter: nn.Parameter | None = None

    @property
    def marked(self) -> bool:
        """True if the modules that read the tensor must be recorded."""
        return self.mask or beyond(self.bound)


class ParameterMagnitudes:
    """Measurements of parameters, valid for all passes until a parameter changes.

    Attributes:
        norms: the largest norm of a column, for each parameter (or view of one) that is the matrix of a multiplication.
        parameters: each parameter with its version and bound, by id.
    """

    def __init__(self) -> None:
        self.norms: dict[Any, float] = {}
        self.parameters: dict[int, tuple[nn.Parameter, int, _TrackedTensor]] = {}


class OverflowTracker:
    """The bounds of the tensors of one pass."""

    def __init__(self, measured: ParameterMagnitudes, inputs: Iterable[Any] = ()) -> None:
        """
        Args:
            measured: measurements of the parameters, from all passes of the model.
            inputs: the inputs of the model in this pass.
        """
        self._wide: dict[str, float] = {}
        self._wide_inputs = False
        self._masked: set[str] = set()
        self._computing: set[str] = set()
        self._tracked: dict[int, _TrackedTensor] = {}
        self._measured = measured
        for value in _floats(inputs):
            tracked = self._of(value)
            tracked.frames = ()
            self._wide_inputs |= beyond(tracked.bound)

    def regions(self) -> Float32Modules:
        """Return the modules that stay float32 in a half-precision model."""
        return Float32Modules(
            wide=dict(self._wide),
            computing=frozenset(self._computing),
            masked=frozenset(self._masked),
            wide_inputs=self._wide_inputs,
        )

    def at_most(self, value: Tensor, bound: float) -> None:
        """Lower the bound of ``value`` to a measured bound."""
        tracked = self._tracked.get(id(value))
        if tracked is not None and tracked.tensor() is value and not tracked.mask and bound < tracked.bound:
            tracked.bound, tracked.exact = bound, True

    def returned(self, result: Any) -> None:
        """Record that the model returned ``result``: its tensors left all modules."""
        for value in _floats(leaves(result)):
            tracked = self._of(value)
            if tracked.marked:
                self._travelled(tracked, ())

    def see(
        self,
        func: Any,
        args: Sequence[Any],
        keywords: Mapping[str, Any],
        result: Any,
        frames: Callable[[], tuple[Frame, ...]],
    ) -> None:
        """Compute the bound of the result of one operation, and record the modules."""
        results = _floats((result,))
        if not results:
            # A comparison or a Python number also depends on the values.
            for value in _floats((*args, *keywords.values())):
                tracked = self._tracked.get(id(value))
                if tracked is not None and tracked.tensor() is value and tracked.marked:
                    self._travelled(tracked, frames())
            return
        name, shows, writes = _facts(func)
        real = shows and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if real and not (source := self._of(args[0])).marked:
            # Most operations only return a view.
            for value in results:
                view = self._tracked[id(value)] = _TrackedTensor(value, source.bound)
                view.parameter = source.parameter
            return
        operands = _floats((*args, *keywords.values()))
        read = [self._of(value) for value in operands]
        new = _TrackedTensor(results[0], math.inf)
        if shows and read:
            new.bound, new.parameter, new.mask = read[0].bound, read[0].parameter, read[0].mask
        else:
            new.bound = self._bound(name, args, keywords, read)
            if beyond(new.bound) and self._measured_all(operands, read, results[0].numel()):
                new.bound = self._bound(name, args, keywords, read)
            new.mask = passes_masks_on(name) and (any(tracked.mask for tracked in read) or any(map(is_mask, args)))
        if beyond(new.bound):
            self._measure(new, results[0])
        if writes:
            self._written(results[0], new)
        self._tracked[id(results[0])] = new
        here = frames()
        # An operation in a hook of the whole model has no module.
        if here and not shows:
            self._computing.add(here[-1][0])
        for tracked in read:
            if tracked.marked:
                self._travelled(tracked, here)
        if new.marked:
            # Recorded when an operation reads it, because unread results are not exported.
            new.frames = here
        self._note(largest_inside(name, args, [tracked.bound for tracked in read], results), False, here[-1:])

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _bound(
        self, name: str, args: Sequence[Any], keywords: Mapping[str, Any], read: Sequence[_TrackedTensor]
    ) -> float:
        bounds = [tracked.bound for tracked in read]
        return result_bound(name, args, keywords, bounds, lambda place: self._column(args[place], read[place]))

    def _column(self, value: Tensor, tracked: _TrackedTensor) -> float:
        """Return the largest norm of a column of value [.., K, N]; a bound of it if value is no parameter."""
        if tracked.parameter is None:
            return math.sqrt(value.shape[-2]) * tracked.bound
        key = (
            id(tracked.parameter),
            tensor_version(tracked.parameter),
            value.shape,
            value.stride(),
            value.storage_offset(),
        )
        if key not in self._measured.norms:
            norms = value.detach().float().norm(dim=-2)
            self._measured.norms[key] = float(norms.max()) if norms.numel() else 0.0
        return self._measured.norms[key]

    def _measured_all(self, operands: Sequence[Tensor], read: Sequence[_TrackedTensor], limit: int) -> bool:
        """Measure operands without exact bounds if they have fewer than ``limit`` values; return whether it did."""
        loose = [(value, tracked) for value, tracked in zip(operands, read, strict=True) if not tracked.exact]
        if not loose or sum(value.numel() for value, _ in loose) >= limit:
            return False
        for value, tracked in loose:
            self._measure(tracked, value)
        return True

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _of(self, value: Tensor) -> _TrackedTensor:
        tracked = self._tracked.get(id(value))
        if tracked is not None and tracked.tensor() is value:
            return tracked
        parameter = value if type(value) is not Tensor and isinstance(value, nn.Parameter) else None
        if parameter is not None:
            known = self._measured.parameters.get(id(parameter))
            if known is not None and known[0] is parameter and known[1] == tensor_version(parameter):
                return known[2]
        tracked = _TrackedTensor(value, math.inf)
        self._measure(tracked, value)
        if parameter is not None:
            tracked.parameter = parameter
            self._measured.parameters[id(parameter)] = (parameter, tensor_version(parameter), tracked)
        else:
            self._tracked[id(value)] = tracked
        return tracked

    def _measure(self, tracked: _TrackedTensor, value: Tensor) -> None:
        # Forward-mode gradients use zero tensors without memory, and tensors on the meta device.
        without_memory = value.is_meta or value._is_zerotensor()
        if without_memory or value.layout is not torch.strided or value.is_nested or value.numel() == 0:
            tracked.bound = 0.0
            return
        value = in_memory_order(value.detach())
        low, high = (float(bound) for bound in torch.aminmax(value))
        if not low >= MASKS:
            tracked.mask = bool((value < MASKS).any())
            low, high = (float(bound) for bound in torch.aminmax(value.where(value >= MASKS, 0.0)))
        tracked.bound, tracked.exact = max(-low, high), True

    def _written(self, value: Tensor, new: _TrackedTensor) -> None:
        """Apply the bound of a tensor changed in place to all tensors that share its memory."""
        memory = value.untyped_storage()._cdata
        for tracked in self._tracked.values():
            other = tracked.tensor()
            if other is not None and other is not value and other.untyped_storage()._cdata == memory:
                tracked.bound, tracked.mask = max(tracked.bound, new.bound), tracked.mask or new.mask
                tracked.frames = new.frames if new.marked else tracked.frames

    # -- modules ---------------------------------------------------------------------------------------------------

    def _travelled(self, tracked: _TrackedTensor, here: tuple[Frame, ...]) -> None:
        """Record the modules that a tensor passed from its producer, through the common caller, to its reader."""
        if tracked.frames is None:
            self._note(tracked.bound, tracked.mask, here[-1:])
            return
        common = 0
        while common < min(len(here), len(tracked.frames)) and here[common] == tracked.frames[common]:
            common += 1
        self._note(tracked.bound, tracked.mask, (*tracked.frames[common:], *here[max(common - 1, 0) :]))

    def _note(self, bound: float, mask: bool, modules: Sequence[Frame]) -> None:
        for path, _ in modules:
            if mask:
                self._masked.add(path)
            if beyond(bound):
                self._wide[path] = max(bound, self._wide.get(path, 0.0))


@cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Return the name of an operation, whether its result is a view, and whether it writes in place."""
    return func.name().partition(".")[0], bool(func.is_view), func._schema.is_mutable


def _floats(values: Iterable[Any]) -> list[Tensor]:
    floats: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                floats.append(value)
        elif isinstance(value, (tuple, list)):
            floats += _floats(value)
    return floats
