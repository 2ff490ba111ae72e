"""The quantizer of one operand of a site: off, observing, rounding, or frozen.

A frozen site computes with its stored integers, whatever tensor its call gets. Code that selects a weight at run time
(``self.experts[i]``, ``self.table[:n]``) may pass another weight than in calibration, so frozen operands check it.

Legend: x [*] the operand; scale [] or [C]; factor [K]; stored [*] the integer weight, in the storage type of its dtype.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer.errors import ProxyError
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import qtype
from quantizer.numerics.rounding import as_held, held_scale, learned, trained_scale
from quantizer.numerics.torch_operators import fake_quantize_dynamic
from quantizer.proxy.call_numbers import current_call
from quantizer.proxy.weight import WeightView, laid_out

_SAMPLE = 256
"""Approximate number of values of a computed weight that are compared."""

_DIFFERENT_WEIGHT = 0.5
"""Relative error of the sample from which it is another weight. Other floats of the same weight differ by far less, and
two different weights by 1.4."""


class FrozenOperand:
    """Check that the weight of a call is the frozen parameter, or the frozen part of a parameter.

    Copies and casts of the proxy have other tensors, in which the parameter cannot be recognized, so they do not check.
    """

    def __init__(self, name: str = "", parameter: nn.Parameter | None = None, view: WeightView | None = None) -> None:
        self._name = name
        self._parameter = None if parameter is None else weakref.ref(parameter)
        self._view = view

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not the frozen weight, possibly expanded over a batch."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        view = self._view
        shape = tuple(parameter.shape) if view is None else tuple(view.shape[axis] for axis in view.order)
        same = value.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        offset = value.storage_offset() - parameter.storage_offset() if same else -1
        if tuple(value.shape) == shape and offset == (0 if view is None else view.offset):
            return
        weight = parameter if view is None else view.of(parameter)
        _require_alike(self._name, shape, _sample(weight), value)

    def follow(self, replaced: Mapping[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Check the replacement of the frozen parameter from now on; ``replaced`` maps ids to (old, new)."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is not None and id(parameter) in replaced:
            self._parameter = weakref.ref(replaced[id(parameter)][1])

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOperand:
        return FrozenOperand()

    def __reduce__(self) -> tuple[type[FrozenOperand], tuple[()]]:
        return FrozenOperand, ()


class ComputedOperand(FrozenOperand):
    """Check that the weight of a call, which the model computes, equals a sample of the frozen one."""

    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__(name)
        self._shape, self._values = tuple(weight.shape), _sample(weight)

    def check(self, value: Tensor) -> None:
        """Raise if ``value`` is not close to the frozen weight, possibly expanded over a batch."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        _require_alike(self._name, self._shape, self._values, value)


def expanded_as(weight: Tensor, value: Tensor) -> Tensor:
    """Return a weight [*] with its axes of length 1 expanded to the shape of the operand of the call."""
    if weight.dim() != value.dim():
        return weight
    sizes: list[Any] = [-1] * weight.dim()
    for axis, size in enumerate(_fixed_shape(weight)):
        # A symbolic size of a graph is not compared, because that would fix it.
        if size == 1 and not (isinstance(value.shape[axis], int) and value.shape[axis] == 1):
            sizes[axis] = value.shape[axis]
    return weight if all(isinstance(size, int) and size == -1 for size in sizes) else weight.expand(sizes)


def _fixed_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a stored weight as numbers; in ``torch.jit.trace`` sizes are tensors of the graph."""
    tracing = torch._C._get_tracing_state()
    if tracing is None:
        return tuple(weight.shape)
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return tuple(weight.shape)
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _require_alike(name: str, shape: tuple[int, ...], sample: Tensor, value: Tensor) -> None:
    """Raise if an operand has other values than a weight, or another shape except for expanded axes of length 1."""
    fits = value.dim() == len(shape) and all(
        size in (1, actual) for size, actual in zip(shape, value.shape, strict=True)
    )
    if fits:
        entry = value
        for axis, size in enumerate(shape):
            entry = entry.narrow(axis, 0, 1) if size == 1 else entry
        difference = torch.linalg.vector_norm(_sample(entry) - sample)
        fits = not bool(difference > _DIFFERENT_WEIGHT * torch.linalg.vector_norm(sample))
    if not fits:
        raise ProxyError(
            f"{name}: the weight of this call, {list(value.shape)}, is not the frozen one, {list(shape)}: the model "
            "selects it at run time. Exclude this site to keep it in float, or calibrate with data that reaches every "
            "choice, so that it is kept in float automatically"
        )


def _sample(value: Tensor) -> Tensor:
    """Return evenly spaced values of a weight [*], float32 on the CPU."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float32)


_CALLS = "call_quantizers"
_SLICE = 2**20
"""Approximate number of values of a weight that are in float32 at once during a cast."""


class Watcher(Protocol):
    """A listener to values before they are rounded while gradients are recorded."""

    def __call__(self, x: Tensor, quantizer: OperandQuantizer) -> None:
        """Receive x [*], multiplied by the quantizer's factor and not rounded yet."""


_CHECKED: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""The versions of scales that were checked, for as long as the scales exist."""


def _check(scale: Tensor) -> None:
    """Raise if a scale is not positive and finite; scales per channel are checked once, which waits for a GPU."""
    if scale.numel() == 1:
        is_valid = 0 < float(scale) < math.inf
    elif scale.is_inference():
        is_valid = _is_valid(scale)
    else:
        is_valid = _CHECKED.get(scale) == scale._version or _is_valid(scale)
        if is_valid:
            _CHECKED[scale] = scale._version
    if not is_valid:
        raise ValueError("a scale must be positive and finite")


def _is_valid(scale: Tensor) -> bool:
    return bool(((scale > 0) & torch.isfinite(scale)).all())


class OperandQuantizer(nn.Module):
    """A module that rounds one operand of a site to its dtype. Without a range, the operand passes through.

    Attributes:
        enabled: whether the quantizer changes the operand.
        scale: float [] (per tensor), [C] (along ``axis``) or in blocks of ``block_size`` along it; None without a range
            and if ``dynamic``.
        dynamic: whether each call has the range of its values.
        zero_point: uint8 [], the quantized value of 0.0 in an asymmetric format; None: 0.
        factor: float [K] along ``factor_axis``, which multiplies the operand before rounding; None: 1.
        codes: the integers of the weight, of its shape, if an algorithm chose them; None: rounding to nearest.
        stored: the integers of a frozen weight; None for an activation.
        stored_dtype: the float type of the frozen weight.
        frozen: checks that the weight of a call is the stored one; None: no check.
        is_weight: whether the operand is a parameter, or a view of one.
        contiguous: whether the rounded weight, a view, is copied to the layout of the frozen one: with other layouts,
            matrix multiplications sum in another order.
        scale_dtype: the float type of the scale on the target, while training changes the scale; None: the scale is
            fixed and already has that type.
        change: the trained parameter, of the scale's shape, see ``numerics.rounding``; None: the scale is not trained.
        moves: whether ``change`` counts; if False, ``scale`` already includes it and is fixed.
        watcher: receives the values before rounding; None: no watcher.
        of_samples: whether the operand's first axis counts samples; False for a weight.
        site_path: the path of the site, if there are ``calls``.
        handed_over: whether the module's ``weight`` reads from here, with its parameter removed, so that calls pass the
            dequantized weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = False
        self.dynamic = False
        self.dtype = "int8"
        self.axis: int | None = None
        self.block_size: int | None = None
        self.factor_axis = -1
        self.handed_over = False
        self.of_samples = False
        self.is_weight = False
        self.contiguous = False
        self.stored_dtype = torch.float32
        self.frozen: FrozenOperand | None = None
        self.scale_dtype: torch.dtype | None = None
        self.moves = True
        self.watcher: Watcher | None = None
        self.site_path = ""
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)
        self.register_parameter("change", None)
        self.register_buffer("factor", None)
        self.register_buffer("stored", None)
        # Not in a state dict, which contains the weight itself or ``stored``.
        self.register_buffer("codes", None, persistent=False)
        self.scale: Tensor | None
        self.zero_point: Tensor | None
        self.factor: Tensor | None
        self.stored: Tensor | None
        self.codes: Tensor | None
        self.change: nn.Parameter | None

    def set_scale(
        self,
        scale: Tensor,
        dtype: str,
        axis: int | None,
        block_size: int | None = None,
        zero_point: int | None = None,
    ) -> None:
        """Set the range of all calls, and enable the quantizer."""
        _check(scale)
        self.scale = scale.detach().clone()
        self.zero_point = (
            None if zero_point is None else torch.tensor(zero_point, dtype=torch.uint8, device=scale.device)
        )
        self.dtype = dtype
        self.axis = axis
        self.block_size = block_size
        self._modules.pop(_CALLS, None)
        self.enabled = True

    def set_calls(self, site_path: str, ranges: Sequence[tuple[Tensor, int | None]]) -> None:
        """Round each call of a pass with its own (scale, zero point); later calls keep the common range."""
        self.site_path = site_path
        quantizers = [OperandQuantizer() for _ in ranges]
        for quantizer, (scale, zero_point) in zip(quantizers, ranges, strict=True):
            quantizer.set_scale(scale, self.dtype, None, None, zero_point)
            quantizer.train(self.training)
        self.add_module(_CALLS, nn.ModuleList(quantizers))

    @property
    def calls(self) -> Sequence[OperandQuantizer]:
        """Quantizers of calls 0, 1, .. of a pass with their own ranges; other calls are rounded with ``scale``."""
        quantizers: Any = self._modules.get(_CALLS)
        return () if quantizers is None else quantizers

    def of_call(self, number: int | None) -> OperandQuantizer:
        """Return the quantizer with the range of a call, by its number in the pass; None: the common range."""
        return self if number is None or not 0 <= number < len(self.calls) else self.calls[number]

    def set_dynamic(self, dtype: str, block_size: int | None) -> None:
        """Use the range of the values of each call, as ``dynamic_range`` does, and enable the quantizer."""
        self.dtype, self.axis, self.block_size = dtype, None, block_size
        self.dynamic = self.enabled = True

    def set_factor(self, factor: Tensor, axis: int) -> None:
        """Multiply the operand by factor [K] along ``axis`` before rounding, and enable the quantizer."""
        self.factor = factor.detach().clone()
        self.factor_axis = axis
        self.enabled = True

    def set_codes(self, codes: Tensor | None) -> None:
        """Round the weight to these int8 values of its shape from now on; None: to nearest."""
        self.codes = codes

    def learn_scale(self, change: nn.Parameter) -> None:
        """Train the scale from now on by ``change``, the change of its logarithm, of its shape and initially 0."""
        self.change = change

    def current_scale(self) -> Tensor:
        """Return the scale including ``change``, rounded to its type on the target."""
        assert self.scale is not None
        scale = self.scale
        if self.change is not None and self.moves:
            scale = learned(scale, self.change.detach())
        return scale if self.scale_dtype is None else held_scale(scale, self.scale_dtype)

    def cast_scale(self, dtype: torch.dtype) -> None:
        """Cast the scale and the factor to the float type of an exported file.

        ``.to()`` and ``.half()`` keep both in float32, in which scales of channels with small weights do not underflow.
        """
        self.scale = None if self.scale is None else self.scale.to(dtype)
        self.factor = None if self.factor is None else self.factor.to(dtype)

    def fix_scale(self) -> None:
        """Fix the scale at its trained value; the caller then sets a shared ``change`` to 0."""
        if self.scale is not None:
            self.scale.copy_(self.current_scale())
        self.moves, self.watcher = False, None

    def reset(self) -> None:
        """Remove the range and the factor, and disable the quantizer."""
        self.scale = self.zero_point = self.factor = self.codes = None
        self._modules.pop(_CALLS, None)
        self.enabled = self.dynamic = False

    def store(self, weight: Tensor) -> None:
        """Store the weight as integers; from now on the weight of a call is ignored."""
        assert self.scale is not None
        if self.codes is not None:
            # A copy, because the plan that they are from is used for other models.
            self.stored, self.codes = self.codes.to(weight.device, copy=True), None
        else:
            multiplied = self.multiplied(weight.detach().float())
            self.stored = ops.quantize(multiplied, self.scale, self.dtype, self.axis, self.block_size)
        self.stored_dtype = weight.dtype

    def dequantized(self) -> Tensor:
        """Return the stored weight in its own float type, multiplied by its factor."""
        assert self.stored is not None
        assert self.scale is not None
        if self.scale.dtype != self.stored_dtype and self.stored.numel() > _SLICE and not is_recorded():
            return self._in_slices(self.stored, self.scale)
        values = self._values_of(self.stored)
        # An export would keep a conversion to the same type for each weight.
        return values if values.dtype == self.stored_dtype else values.to(self.stored_dtype)

    def rows(self, table: Any, ids: Tensor, lookup: Callable[[], Tensor]) -> Tensor | None:
        """Return only the rows [*, K] of a table that a lookup reads, with the same bits as the rounded table.

        None if the complete table is needed: it has no scale per row, its range is watched, or the call is recorded.
        """
        if not self.enabled or self.scale is None or self.axis != 0 or self.block_size is not None or is_recorded():
            return None
        codes = self.codes if self.stored is None else self.stored
        watched = self.watcher is not None and torch.is_grad_enabled()
        if codes is None and (watched or self.factor is not None or table.dtype != self.scale.dtype):
            return None
        if codes is not None and codes.dtype != torch.int8:
            return None
        if self.frozen is not None:
            self.frozen.check(table)
        read_rows = lookup() if codes is None else functional.embedding(ids, codes)
        flat, rows = ids.reshape(-1), read_rows.reshape(ids.numel(), read_rows.shape[-1])
        if codes is None:
            rounded: Tensor = ops.fake_quantize(rows, self._scale_for(rows, flat), self.dtype, 0)
            return rounded.reshape(read_rows.shape)
        values: Tensor = ops.dequantize(rows, _of_rows(self.scale, flat), self.dtype, 0).reshape(read_rows.shape)
        return values.to(table.dtype if self.stored is None else self.stored_dtype)

    def _in_slices(self, stored: Tensor, scale: Tensor) -> Tensor:
        """Return ``dequantized()`` in slices along the first axis, so that a large weight is never all in float32.

        Getting new memory of that size at each pass takes longer than filling it.
        """
        along = self.axis is not None and (self.axis % stored.dim() == 0) != (self.block_size is not None)
        if self.axis is not None and not along:
            return self._values_of(stored).to(self.stored_dtype)
        result = torch.empty_like(stored, dtype=self.stored_dtype)
        rows = max(1, _SLICE * len(stored) // stored.numel())
        for start in range(0, len(stored), rows):
            part = slice(start, start + rows)
            scales = scale[part] if along else scale
            result[part] = ops.dequantize(stored[part], scales, self.dtype, self.axis, self.block_size)
        return result

    def as_parameter(self) -> Tensor:
        """Return the stored weight as the model's own parameter: in its own float type, without the factor."""
        weight = self.dequantized()
        return weight if self.factor is None else weight / self._shaped_factor(weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``.to()`` and ``.half()``: integers, scale and factor change their device, but not their type.

        FP8 values must not be converted; scale and factor describe the operand and are not part of the model.
        """
        stored, scale, factor = self.stored, self.scale, self.factor
        # A cast makes new tensors, in which the frozen weight cannot be recognized.
        self.frozen = None
        try:
            if stored is not None:
                self.stored = stored.view(torch.uint8)
                self.stored_dtype = fn(torch.empty(1, dtype=self.stored_dtype, device=stored.device)).dtype
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            if stored is not None:
                assert self.stored is not None
                self.stored = self.stored.view(stored.dtype)
        self.scale, self.factor = _in_type_of(scale, self.scale), _in_type_of(factor, self.factor)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Load a state dict; one with ``change`` was saved before the scale was fixed, so ``change`` counts again."""
        super()._load_from_state_dict(state_dict, prefix, *others)
        if f"{prefix}change" in state_dict:
            self.moves = True

    def forward(self, x: Any) -> Any:
        # In a sum that starts from the number 0, the first call gets a number.
        if not self.enabled or self.handed_over or not isinstance(x, Tensor):
            return x
        if self.stored is not None:
            if self.frozen is not None:
                self.frozen.check(x)
            # A forward may cast its weight, so x has the type in which the operation computes.
            weight = expanded_as(self.dequantized(), x)
            return weight if weight.dtype == x.dtype else weight.to(x.dtype)
        if self.codes is not None:
            return expanded_as(self._values_of(self.codes).to(x.dtype), x)
        if self.is_weight:
            # As in ``store``, weight and factor are multiplied in float32, not in half precision.
            rounded = self._rounded(x.float() if self.factor is not None else x).to(x.dtype)
            return laid_out(rounded) if self.contiguous else rounded
        return self._rounded(x)

    def _values_of(self, codes: Tensor) -> Tensor:
        """Return the dequantized values [*] of integers [*], in the type of the scale."""
        assert self.scale is not None
        result: Tensor = ops.dequantize(codes, self.scale, self.dtype, self.axis, self.block_size)
        return result

    def _rounded(self, x: Tensor) -> Tensor:
        x = self.multiplied(x)
        if _CALLS in self._modules:
            # Quantizers of single calls have no factor.
            return self.of_call(current_call(self.site_path))._of_range(x)
        return self._of_range(x)

    def _of_range(self, x: Tensor) -> Tensor:
        if self.dynamic:
            dynamic: Tensor = fake_quantize_dynamic(x, self.dtype, self.block_size)
            return dynamic
        if self.scale is None:
            return x
        if self.watcher is not None and torch.is_grad_enabled():
            self.watcher(x.detach(), self)
        scale = self._scale_for(x)
        result: Tensor = ops.fake_quantize(x, scale, self.dtype, self.axis, self.block_size, self.zero_point)
        return result

    def _scale_for(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the scale [*] for rounding x, with gradients in training; ``rows``: x has only these rows."""
        assert self.scale is not None
        scale = self.scale if rows is None else _of_rows(self.scale, rows)
        if self.change is not None:
            change = self.change if rows is None else _of_rows(self.change, rows)
            sharing = x.shape[0] if self.of_samples else scale.numel()
            # An empty batch has no values.
            values = max(x.numel() // max(sharing, 1), 1)
            scale = trained_scale(scale, change, values, qtype(self.dtype).qmax, moves=self.moves)
        return scale if self.scale_dtype is None else as_held(scale, self.scale_dtype)

    def multiplied(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self._shaped_factor(x)

    def _shaped_factor(self, x: Tensor) -> Tensor:
        """Return the factor [K] as [K, 1, ..] in the dtype of x, to multiply x along its axis."""
        assert self.factor is not None
        after = x.dim() - 1 - self.factor_axis % x.dim()
        return self.factor.to(x.dtype).reshape([-1] + [1] * after)

    def extra_repr(self) -> str:
        migrated = "" if self.factor is None else ", smoothed"
        if self.dynamic:
            return f"{self.dtype}, ranges of each call{migrated}"
        if self.scale is None:
            return "off"
        kind = "per tensor" if self.axis is None else f"per channel, axis {self.axis}"
        if self.block_size is not None:
            kind = f"blocks of {self.block_size}, axis {self.axis}"
        amax = float(self.scale.float().max()) * qtype(self.dtype).qmax
        state = "stored" if self.stored is not None else "rounding" if self.enabled else "off"
        return f"{self.dtype}, {kind}, amax {amax:.4g}, {state}{migrated}"


def is_recorded() -> bool:
    """Return whether an export or a compiler records operators into a graph."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _of_rows(scale: Tensor, rows: Tensor) -> Tensor:
    return functional.embedding(rows, scale[:, None])[:, 0]


def _in_type_of(former: Tensor | None, moved: Tensor | None) -> Tensor | None:
    """Return a tensor after a cast with its new device and its former type; meta tensors have no values."""
    if former is None or moved is None or former.dtype == moved.dtype:
        return moved
    return former.to(moved.device)
