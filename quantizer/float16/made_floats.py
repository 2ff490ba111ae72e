"""The float type of tensors that a forward makes itself, in a model that was converted to another type.

``mask.float()``, ``torch.arange(n).float()``, ``torch.zeros(n)`` and linspace are in float32 because the model was, and
not for their range. Where one of them meets a tensor of the converted model, torch computes in the wider type, and all
that follows does too; a product or a normalization refuses the two. So it is cast to the type of the model there.

- A tensor is *made* if it depends on no parameter and no floating input of the model: constants, buffers, masks. Made
  tensors compute in their own types among each other: positions times frequencies stay in float32.
- A tensor of the model that the forward casts on purpose (``x.float()`` in a normalization) keeps its type. An
  operation that takes one type alone computes in that of the model.

Tracking of the low numbers of masks through a pass, so that a softmax reads the same masks as in the exported file.

There the constant of a mask is ``FLOAT16_MASK``, see ``ClampMasks``. During a pass it is unknown if a low constant
will reach a softmax: it keeps its value, is tracked through the operations that pass it on, and is raised only when a
softmax reads it. Low numbers that reach no softmax, such as factors, bounds or infinite results, keep their values, as
in the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from quantizer.numerics.qtype import FLOAT16_MASK, FLOAT16_MAX
from quantizer.operations.aten_products import product_name

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
"""Operations that compute in one type; while a graph is traced, some of them take several without a word."""


_OF_SITES = frozenset({"multi_head_attention_forward"})
"""Functions of torch in Python that have sites in a proxy: within them this mode is off, and a call that failed
half-way cannot be traced again."""


class MadeFloats(TorchFunctionMode):
    """A mode in which the tensors that a forward makes follow the type of the model."""

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
        floats = _floats((args, kwargs))
        if all(tensor in self._made for tensor in floats):
            result = func(*args, **kwargs)
            for tensor in _floats(result):
                self._made[tensor] = True
            return result
        if len({tensor.dtype for tensor in floats}) == 1 or _is_ours(func):
            return func(*args, **kwargs)
        if _writes(func, kwargs):
            return _tried(func, args, kwargs, floats[0].dtype)
        # A number in a tensor does not change the type of what it is computed with.
        if any(tensor.dtype == self._dtype and tensor.dim() and tensor not in self._made for tensor in floats):
            args, kwargs = _pytree.tree_map_only(Tensor, self._as_model, (args, kwargs))
        if func in _ONE_TYPE or getattr(func, "__name__", "") in _OF_SITES:
            args, kwargs = _in_type((args, kwargs), self._dtype)
        return _tried(func, args, kwargs, self._dtype)

    def _as_model(self, value: Tensor) -> Tensor:
        """Return a made tensor in the type of the model; any other one as it is."""
        if not (value.dim() and value.is_floating_point() and value in self._made) or value.dtype == self._dtype:
            return value
        value = torch.where(value < -FLOAT16_MAX, FLOAT16_MASK, value) if self._masked else value
        return value.to(self._dtype)


def with_one_type(model: nn.Module, dtype: torch.dtype, masked: bool) -> None:
    """Let the ``forward`` of a model run in ``MadeFloats``, in place."""
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **keywords: Any) -> Any:
        # While a graph is traced, the buffers are others than those that the model has.
        with MadeFloats(dtype, masked, (buffer for buffer in model.buffers() if buffer.is_floating_point())):
            return forward(*args, **keywords)

    vars(model)["forward"] = run


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _in_type(values: Any, dtype: torch.dtype) -> Any:
    cast = lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf  # noqa: E731
    return _pytree.tree_map_only(Tensor, cast, values)


def _is_ours(func: Any) -> bool:
    """Return whether a function is an operator of ``quantizer::``, whose scales have types of their own."""
    return str(getattr(func, "_qualified_op_name", getattr(func, "namespace", ""))).startswith("quantizer")


def _writes(func: Any, keywords: Any) -> bool:
    """Return whether a function writes into its first argument, or into one that is given as its output."""
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_") or keywords.get("out") is not None


_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod"))


def _tried(func: Any, args: Any, keywords: Any, dtype: torch.dtype) -> Any:
    """Return the result of a function, in one type where it refuses several."""
    try:
        return func(*args, **keywords)
    except RuntimeError:
        if len({tensor.dtype for tensor in _floats((args, keywords))}) < 2:
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
    """The tensors of one pass that contain low numbers, each with a flag if these mask other values."""

    def __init__(self) -> None:
        self._held: Any = WeakIdKeyDictionary()

    def read(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for an operation; for softmax and fused attention masks are raised to FLOAT16_MASK."""
        name = _name(func)
        if not (name in _SOFTMAX or "attention" in name) or not any(map(self._masks, _leaves(args, kwargs))):
            return args, kwargs
        raised: tuple[Any, Any] = _pytree.tree_map(
            lambda leaf: leaf.clamp(min=FLOAT16_MASK) if self._masks(leaf) else leaf, (args, kwargs)
        )
        return raised

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record if the result of an operation contains low numbers, and if they mask other values."""
        name = _name(func)
        if product_name(func) is not None or name not in _MOVES | _FACTORS | _MASKS | _CONSTANTS:
            return
        number = name not in _BOUNDS and any(
            isinstance(leaf, float) and leaf < FLOAT16_MASK for leaf in _leaves(args, kwargs)
        )
        constant = name in _CONSTANTS and any(map(_is_low, _pytree.tree_leaves(result)))
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor) and leaf in self._held]
        if not (number or constant or tensors):
            return
        masks = name in _MASKS or any(self._masks(tensor) for tensor in tensors)
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._held[leaf] = masks

    def _masks(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and bool(self._held.get(leaf, False))


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0]
    return name.removeprefix("aten::")


def _leaves(*values: Any) -> Iterator[Any]:
    for value in values:
        yield from _pytree.tree_leaves(value)


def _is_low(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype is torch.float16 and bool(leaf < FLOAT16_MASK)
