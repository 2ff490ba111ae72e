"""Conversion of a model to float16, except for modules with values beyond float16, which stay float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError, QuantizerError
from quantizer.numerics.formats import FLOAT16_MASK, FLOAT16_MAX, QTYPES
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import SourceCall
from quantizer.utils.plain_values import decoded
from quantizer.utils.structure import leaves, mapped

_STORAGE = {kind.storage for kind in QTYPES.values()}


@dataclass(frozen=True, kw_only=True)
class Float32Modules:
    """The modules that had values beyond float16 in calibration.

    Attributes:
        wide: the largest magnitude in each module that computes or passes on such values, by path.
        computing: paths of modules that compute with floats themselves; all others only pass values on, of any type.
        masked: paths of modules that read masks with values below the range of float16.
        wide_inputs: whether an input of the model has values beyond float16.
    """

    wide: Mapping[str, float] = field(default_factory=dict)
    computing: Collection[str] = ()
    masked: Collection[str] = ()
    wide_inputs: bool = False

    def joined(self, other: Float32Modules) -> Float32Modules:
        """Return the union of both."""
        wide = dict(self.wide)
        for path, largest in other.wide.items():
            wide[path] = max(largest, wide.get(path, 0.0))
        return Float32Modules(
            wide=wide,
            computing=frozenset(self.computing) | frozenset(other.computing),
            masked=frozenset(self.masked) | frozenset(other.masked),
            wide_inputs=self.wide_inputs or other.wide_inputs,
        )

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values, to be saved."""
        return {
            "wide": dict(self.wide),
            "computing": sorted(self.computing),
            "masked": sorted(self.masked),
            "wide_inputs": self.wide_inputs,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any] | None) -> Float32Modules:
        """Return the object from the values of ``plain()``; an empty one for None."""
        if values is None:
            return cls()
        try:
            modules: Float32Modules = decoded(cls, values, "regions")
            missing = sorted(set(cls().plain()) - set(values))
            if missing:
                raise ValueError(f"regions: missing field {missing[0]!r}")
        except ValueError as error:
            raise QuantizerError(
                f"the record of modules beyond float16 is damaged: {error}; calibrate and save again"
            ) from error
        return modules

    def text(self) -> str:
        """Return one line with the number of modules that stay float32, and the reason."""
        path, largest = max(self.wide.items(), key=lambda entry: entry[1])
        return (
            f"{len(self.wide)} modules stay float32: their values exceed float16, the largest is {largest:.3g} in "
            f"{path or 'the model itself'}"
        )

    def io_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the model's inputs if ``dtype`` is the type of its other floats."""
        return torch.float32 if self.applies_to(dtype) and self.wide_inputs else dtype

    def applies_to(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float16 and bool(self.wide)


def convert_floats(model: nn.Module, dtype: torch.dtype, regions: Float32Modules) -> nn.Module:
    """Convert the floats of a model to ``dtype`` in place, and return it.

    Wide modules stay float32, with casts at their inputs and outputs. Stored FP8 values do not change.
    """
    if not regions.applies_to(dtype):
        return _converted(model, dtype, recurse=True)
    modules = dict(model.named_modules())
    unknown = sorted(set(regions.wide) - set(modules))
    if unknown:
        raise ProxyError(
            f"the calibration belongs to another model, which has a module {unknown[0]!r}; calibrate this model with a "
            "new Quantizer"
        )
    types: dict[str, torch.dtype] = {}
    # Parents come before their children; a module that does not compute has the type of its parent.
    for path in modules:
        types[path] = dtype if path == "" else types[path.rpartition(".")[0]]
        if path in regions.wide:
            types[path] = torch.float32
        elif path in regions.computing:
            types[path] = dtype
    _untie({modules[path]: kind for path, kind in types.items()})
    border = _Border(model)
    for path, module in modules.items():
        _converted(module, types[path], recurse=False)
        if not _of_site(module, path, modules):
            computes = path in regions.computing
            border.watch(module, types[path] if computes else None, path in regions.masked)
    return model


def _converted(module: nn.Module, dtype: torch.dtype, *, recurse: bool) -> nn.Module:
    # Models of ultralytics override _apply without the argument.
    options = {} if recurse else {"recurse": False}
    converted: nn.Module = module._apply(partial(_cast, dtype), **options)  # type: ignore[no-untyped-call]
    for part in module.modules() if recurse else [module]:
        if isinstance(part, OperandQuantizer):
            # Half models have half scales; calibration chose scales that half can represent.
            part.cast_scale(dtype)
    return converted


def _cast(dtype: torch.dtype, value: Tensor) -> Tensor:
    # ``Module.to`` would also convert stored FP8 values.
    return value.to(dtype) if value.is_floating_point() and value.dtype not in _STORAGE else value


def _of_site(module: nn.Module, path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is a site or its child; such modules have the type of the surrounding module."""
    return isinstance(module, SourceCall) or isinstance(modules.get(path.rpartition(".")[0]), SourceCall)


def _untie(types: Mapping[nn.Module, torch.dtype]) -> None:
    """Give wide modules a separate copy of each parameter that they share with other modules."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in types:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append((module, name))
    for parameter, places in owners.items():
        wide = [(module, name) for module, name in places if types[module] is torch.float32]
        if len(wide) in (0, len(places)):
            continue
        own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for module, name in wide:
            module._parameters[name] = own


class _Border:
    """Hooks that cast the inputs of a module to its type, and its outputs to the type of its caller."""

    def __init__(self, root: nn.Module) -> None:
        self._running: list[tuple[torch.dtype | None, bool]] = []
        root.register_forward_pre_hook(self._begin)

    def watch(self, module: nn.Module, dtype: torch.dtype | None, masked: bool) -> None:
        """Add the hooks to a module that computes in ``dtype``; None: its values keep their types."""
        module.register_forward_pre_hook(partial(self._enter, dtype, masked), with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _begin(self, root: nn.Module, args: Any) -> None:
        # A failed pass leaves its modules on the stack.
        self._running.clear()

    def _enter(
        self, dtype: torch.dtype | None, masked: bool, module: nn.Module, args: tuple[Any, ...], keywords: Any
    ) -> tuple[Any, Any]:
        self._running.append((dtype, masked))
        if dtype is None:
            return args, keywords
        cast = partial(_at_border, dtype, masked)
        return tuple(map(cast, args)), {name: cast(value) for name, value in keywords.items()}

    def _leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        self._running.pop()
        caller, masked = self._running[-1] if self._running else (None, False)
        return result if caller is None else _at_border(caller, masked, result)


def _at_border(dtype: torch.dtype, masked: bool, value: Any) -> Any:
    """Return a value with the floats of its pytree in ``dtype``; the same object if nothing changes."""
    floats = (torch.float16, torch.float32)

    def foreign(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dtype in floats and leaf.dtype is not dtype

    def cast(leaf: Any) -> Any:
        if not foreign(leaf):
            return leaf
        if masked and dtype is torch.float16:
            leaf = torch.where(leaf < -FLOAT16_MAX, FLOAT16_MASK, leaf)
        return leaf.to(dtype)

    if isinstance(value, Tensor):
        return cast(value)
    return mapped(cast, value) if any(map(foreign, leaves(value))) else value
