"""Bounds of the result of an operation, from bounds of its operands.

Legend: |x| the largest magnitude in x; K the contracted length of a product. A product of x [.., K] and w [K, N] is at
most sqrt(K) |x| times the largest norm of a column of w (Cauchy-Schwarz).

Bounds of the values of a pass, and the modules that compute with values beyond float16.

The bound of a result follows from the bounds of the operands, without reading any tensor. If this bound is beyond
float16, the operands (if smaller) or the result are measured, and their bounds are exact. So no value beyond float16 is
missed, and none is reported wrongly.

Masks contain numbers such as -3.4e38 or -inf, which are not values: a tensor with them is marked as a mask, and its
bound is that of its other values.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.fingerprint import tensor_version
from quantizer.common.structure import leaves
from quantizer.float16.float32_modules import Float32Modules
from quantizer.numerics.granularity import in_memory_order
from quantizer.numerics.qtype import FLOAT16_MAX

MASKS = -1e8
"""Lower values are masks: no activation is so low unless others are as high."""

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
"""Products, with the place of their left operand."""

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
    """Return a bound of the first result of an operation; infinity for an operation without a known bound."""
    # Integers too, since a tensor may be filled with one; an axis or an index among them only loosens the bound.
    numbers = [abs(value) for value in args if type(value) in (int, float) and not is_mask(value)]
    factors: list[float] = [abs(value) for value in args if type(value) in (int, float)]
    factor: float = max([1.0, *(abs(value) for value in keywords.values() if type(value) in (int, float))])
    if name in _ONES:
        return 1.0
    if not bounds:
        return math.inf
    if name in _KEEP and not _divides_otherwise(name, args):
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
    """Return the largest value of a tensor that a target has inside an operation; 0 if none can be beyond float16."""
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


def _divides_otherwise(name: str, args: Sequence[Any]) -> bool:
    """Return whether an average pooling divides its sums by a number other than that of their terms."""
    divisor = 6
    return name == "aten::avg_pool2d" and len(args) > divisor and args[divisor] is not None


def beyond(bound: float) -> bool:
    """Return whether a bound is beyond float16; True for NaN, which bounds nothing."""
    return not bound <= FLOAT16_MAX


def is_mask(value: Any) -> bool:
    """Return whether a number is so low that it can only be that of a mask."""
    return isinstance(value, float) and value < MASKS


Frame = tuple[str, int]
"""A running module: its path, and the number of its call."""


class _Seen:
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
        norms: the largest norm of a column, for each parameter or view of one that is the matrix of a product.
        parameters: each parameter with its version and bound, by id.
    """

    def __init__(self) -> None:
        self.norms: dict[Any, float] = {}
        self.parameters: dict[int, tuple[nn.Parameter, int, _Seen]] = {}


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
        self._seen: dict[int, _Seen] = {}
        self._measured = measured
        for value in _floats(inputs):
            seen = self._of(value)
            seen.frames = ()
            self._wide_inputs |= beyond(seen.bound)

    def regions(self) -> Float32Modules:
        """Return the modules that stay float32 in a model of half floats."""
        return Float32Modules(
            wide=dict(self._wide),
            computing=frozenset(self._computing),
            masked=frozenset(self._masked),
            wide_inputs=self._wide_inputs,
        )

    def at_most(self, value: Tensor, bound: float) -> None:
        """Lower the bound of ``value`` to one that was measured elsewhere."""
        seen = self._seen.get(id(value))
        if seen is not None and seen.tensor() is value and not seen.mask and bound < seen.bound:
            seen.bound, seen.exact = bound, True

    def returned(self, result: Any) -> None:
        """Record that the model returned ``result``: its tensors left all modules."""
        for value in _floats(leaves(result)):
            seen = self._of(value)
            if seen.marked:
                self._travelled(seen, ())

    def see(
        self,
        func: Any,
        args: Sequence[Any],
        keywords: Mapping[str, Any],
        result: Any,
        frames: Callable[[], tuple[Frame, ...]],
    ) -> None:
        """Compute the bound of the result of one operation, and record the modules."""
        made = _floats((result,))
        if not made:
            # A comparison, or a number for Python, depends on the values, too.
            for value in _floats((*args, *keywords.values())):
                seen = self._seen.get(id(value))
                if seen is not None and seen.tensor() is value and seen.marked:
                    self._travelled(seen, frames())
            return
        name, shows, writes = _facts(func)
        real = shows and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if real and not (shown := self._of(args[0])).marked:
            # Most operations only return a view.
            for value in made:
                view = self._seen[id(value)] = _Seen(value, shown.bound)
                view.parameter = shown.parameter
            return
        given = _floats((*args, *keywords.values()))
        read = [self._of(value) for value in given]
        new = _Seen(made[0], math.inf)
        if shows and read:
            new.bound, new.parameter, new.mask = read[0].bound, read[0].parameter, read[0].mask
        else:
            new.bound = self._bound(name, args, keywords, read)
            if beyond(new.bound) and self._measured_all(given, read, made[0].numel()):
                new.bound = self._bound(name, args, keywords, read)
            new.mask = passes_masks_on(name) and (any(seen.mask for seen in read) or any(map(is_mask, args)))
        if beyond(new.bound):
            self._measure(new, made[0])
        if writes:
            self._written(made[0], new)
        self._seen[id(made[0])] = new
        here = frames()
        # An operation in a hook of the whole model has no module.
        if here and not shows:
            self._computing.add(here[-1][0])
        for seen in read:
            if seen.marked:
                self._travelled(seen, here)
        if new.marked:
            # Recorded when something reads it: what nothing reads is in no file.
            new.frames = here
        self._note(largest_inside(name, args, [seen.bound for seen in read], made), False, here[-1:])

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _bound(self, name: str, args: Sequence[Any], keywords: Mapping[str, Any], read: Sequence[_Seen]) -> float:
        bounds = [seen.bound for seen in read]
        return result_bound(name, args, keywords, bounds, lambda place: self._column(args[place], read[place]))

    def _column(self, value: Tensor, seen: _Seen) -> float:
        """Return the largest norm of a column of value [.., K, N]; a bound of it unless value is a parameter's."""
        if seen.parameter is None:
            return math.sqrt(value.shape[-2]) * seen.bound
        key = (id(seen.parameter), tensor_version(seen.parameter), value.shape, value.stride(), value.storage_offset())
        if key not in self._measured.norms:
            norms = value.detach().float().norm(dim=-2)
            self._measured.norms[key] = float(norms.max()) if norms.numel() else 0.0
        return self._measured.norms[key]

    def _measured_all(self, given: Sequence[Tensor], read: Sequence[_Seen], limit: int) -> bool:
        """Measure operands without exact bounds if they have fewer than ``limit`` values, and return whether it did."""
        loose = [(value, seen) for value, seen in zip(given, read, strict=True) if not seen.exact]
        if not loose or sum(value.numel() for value, _ in loose) >= limit:
            return False
        for value, seen in loose:
            self._measure(seen, value)
        return True

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _of(self, value: Tensor) -> _Seen:
        seen = self._seen.get(id(value))
        if seen is not None and seen.tensor() is value:
            return seen
        parameter = value if type(value) is not Tensor and isinstance(value, nn.Parameter) else None
        if parameter is not None:
            known = self._measured.parameters.get(id(parameter))
            if known is not None and known[0] is parameter and known[1] == tensor_version(parameter):
                return known[2]
        seen = _Seen(value, math.inf)
        self._measure(seen, value)
        if parameter is not None:
            seen.parameter = parameter
            self._measured.parameters[id(parameter)] = (parameter, tensor_version(parameter), seen)
        else:
            self._seen[id(value)] = seen
        return seen

    def _measure(self, seen: _Seen, value: Tensor) -> None:
        """Measure the bound of a tensor."""
        # Forward-mode gradients use zero tensors without memory, and tensors on the meta device.
        unseen = value.is_meta or value._is_zerotensor()
        if unseen or value.layout is not torch.strided or value.is_nested or value.numel() == 0:
            seen.bound = 0.0
            return
        value = in_memory_order(value.detach())
        low, high = (float(bound) for bound in torch.aminmax(value))
        if not low >= MASKS:
            seen.mask = bool((value < MASKS).any())
            low, high = (float(bound) for bound in torch.aminmax(value.where(value >= MASKS, 0.0)))
        seen.bound, seen.exact = max(-low, high), True

    def _written(self, value: Tensor, new: _Seen) -> None:
        """Apply the bound of a tensor changed in place to all tensors that share its memory."""
        memory = value.untyped_storage()._cdata
        for seen in self._seen.values():
            other = seen.tensor()
            if other is not None and other is not value and other.untyped_storage()._cdata == memory:
                seen.bound, seen.mask = max(seen.bound, new.bound), seen.mask or new.mask
                seen.frames = new.frames if new.marked else seen.frames

    # -- modules ---------------------------------------------------------------------------------------------------

    def _travelled(self, seen: _Seen, here: tuple[Frame, ...]) -> None:
        """Record the modules that a tensor passed: out of those that made it, through their caller, into the reader."""
        if seen.frames is None:
            self._note(seen.bound, seen.mask, here[-1:])
            return
        common = 0
        while common < min(len(here), len(seen.frames)) and here[common] == seen.frames[common]:
            common += 1
        self._note(seen.bound, seen.mask, (*seen.frames[common:], *here[max(common - 1, 0) :]))

    def _note(self, bound: float, mask: bool, modules: Sequence[Frame]) -> None:
        for path, _ in modules:
            if mask:
                self._masked.add(path)
            if beyond(bound):
                self._wide[path] = max(bound, self._wide.get(path, 0.0))


@cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Return the name of an operation, whether its result is a view, and whether it changes an operand in place."""
    return func.name().partition(".")[0], bool(func.is_view), func._schema.is_mutable


def _floats(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _floats(value)
    return found
