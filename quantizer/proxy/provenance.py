"""Where tensors come from, while a proxy observes: what makes an add a *residual* add.

A dispatch mode sees every operation below Python and hands a tensor's origin on to what is computed from it. The
origin is the last site that made it. Tensors themselves carry nothing of ours: the table is keyed by identity and
forgets a tensor when it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from quantizer.proxy.completeness import ProductCounter
from quantizer.proxy.products import PRODUCTS
from quantizer.proxy.products import is_composite
from quantizer.proxy.products import product_name

__all__ = ["Origin", "Provenance"]

_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor was last made by.

    ``kind`` is ``weighted`` (a linear or convolution), ``product`` (of two activations), ``add`` (an add of two
    tensors), ``softmax`` or ``parameter`` (computed from parameters alone); ``name`` tells two of a kind apart.
    """

    kind: str
    name: str


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks origins while it is entered, and tells a counter of every product.

    Attributes:
        origins: by tensor.
    """

    def __init__(self, counter: ProductCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins: Any = WeakIdKeyDictionary()
        self._counter = counter

    def mark(self, value: Any, origin: Origin) -> None:
        """Say that ``value`` was made by a site."""
        if isinstance(value, Tensor):
            self.origins[value] = origin

    def origin(self, value: Tensor) -> Origin | None:
        """The origin of a tensor; None where nothing is known of it."""
        if isinstance(value, nn.Parameter):
            return Origin("parameter", "")
        found: Origin | None = self.origins.get(value)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func) and not any(tensor.is_nested for tensor in _tensors(args)):
            # Only under inference_mode: elsewhere torch took it apart before it came here.
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        name = product_name(func)
        if name is not None:
            origins = map(self.origin, PRODUCTS[name].tensors(args))
            of_parameters = all(origin is not None and origin.kind == "parameter" for origin in origins)
            self._counter.count(name, args, result, of_parameters)
        made = [tensor for tensor in _tensors([result]) if tensor.is_floating_point()]
        if made:
            origin = self._joined([*_tensors(args), *_tensors(kwargs.values())])
            if func in _SOFTMAX:
                origin = Origin("softmax", "")
            for tensor in made if origin is not None else ():
                self.origins[tensor] = origin
        return result

    def _joined(self, inputs: Sequence[Tensor]) -> Origin | None:
        """The origin of what is computed from ``inputs``: that of the first input with one, parameters last.

        Integers count as inputs: what an embedding looks up in a parameter depends on the data.
        """
        known = [origin for origin in map(self.origin, inputs) if origin is not None]
        computed = [origin for origin in known if origin.kind != "parameter"]
        if computed:
            return computed[0]
        return known[0] if known and len(known) == len(inputs) else None


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [item for item in value if isinstance(item, Tensor)]
    return found
