"""The operands of one call of a site: which are weights, and why a call cannot be rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.observe.tensor_origin import Origin, OriginTracker
from quantizer.plan.reasons import ReasonCode
from quantizer.proxy.computed_weights import RANDOM, Computation
from quantizer.proxy.site import Site
from quantizer.proxy.weight import Weight, Weights, is_transformed, non_finite
from quantizer.rewrite.product_sizes import labels

_PRODUCT = 2  # operands of a product
_MATRIX = 2  # axes of a weight that is multiplied by ``@``


class CallOperands:
    """The operands of the calls of one pass."""

    def __init__(self, weights: Weights, named: Mapping[str, Tensor], tracker: OriginTracker) -> None:
        self._weights = weights
        self._named = named
        self._tracker = tracker
        self._repeated: set[tuple[str, int]] = set()

    def weights(self, site: Site, values: Sequence[Any]) -> tuple[list[Weight | None], str | None]:
        """Return the weights among the operands, None for others, and why a call has none that can be held.

        What is computed from parameters alone is a weight where a weight belongs, and as an operand of a product of two
        tensors; what it is before it is spread over the batch, if it is. Where that cannot be told, it is rounded as
        any activation, since it may grow with the batch. So is a parameter that is the input of a layer.
        """
        found = [self._weights.find(value) for value in values]
        kind = site.operation.kind
        if kind == "residual_add" or any(map(is_transformed, values)):
            return found, None
        given = [operand.name for operand in site.operation.operands if operand.index is not None]
        own = given.index("weight") if "weight" in given else None
        for place, value in enumerate(values):
            if found[place] is not None or not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            origin = self._tracker.origin(value)
            alone = origin is not None and origin.kind == "parameter"
            if place == own or (alone and own is None):
                computed = self._computed(site, values, place)
                if isinstance(computed, Weight):
                    found[place] = computed
                elif computed is not None and (alone or computed == RANDOM):
                    return found, ReasonCode.FROM_PARAMETERS.text(why=computed)
        if own is not None and found[own] is not None:
            found = [weight if place == own else None for place, weight in enumerate(found)]
        return found, None

    def _computed(self, site: Site, values: Sequence[Any], place: int) -> Weight | str | None:
        """Return a weight that is computed from parameters, or why it cannot be held; None if it is not one."""
        value: Tensor = values[place]
        computation = self._tracker.computation(value, site.host_path)
        if computation is None or isinstance(computation, str):
            return computation
        if not computation.inputs:
            return None
        given = [self._named[path] for path in computation.inputs]
        weight: Weight | None = Weight.computed(computation, given)
        if site.operation.kind == "matmul":
            weight = self._before_spreading(site, values, place, computation)
        if weight is None or (site.path, place) in self._repeated:
            return weight
        problem = non_finite(value)
        if problem is not None:
            raise CalibrationError(
                f"{site.path}: the weight that is computed from {', '.join(computation.inputs)}, shape "
                f"{tuple(value.shape)}, has {problem} among its values; look at these parameters"
            )
        again = weight.tensor()
        if again.dtype != value.dtype or not torch.equal(again.expand_as(value), value.detach()):
            return "in a way that gives other values when it is repeated"
        self._repeated.add((site.path, place))
        return weight

    def _before_spreading(
        self, site: Site, values: Sequence[Any], place: int, computation: Computation
    ) -> Weight | None:
        """Return an operand of a product before it is spread over a batch, as ``w.expand(len(x), -1, -1)`` does.

        None: it is spread in another way, and so may be another one for another batch.
        """
        value: Tensor = values[place]
        given = [self._named[path] for path in computation.inputs]
        try:
            core = computation.without_copies(given)
            made = core.of(given)
        except ValueError:
            return None
        if core == computation:
            return Weight.computed(computation, given)
        spread = [axis for axis, size in enumerate(made.shape) if size != value.shape[axis]] if made.dim() else []
        if made.dim() != value.dim() or any(made.shape[axis] != 1 for axis in spread):
            return None
        if not spread:
            return Weight.computed(computation, given)
        if not set(spread) <= _batch_axes(site, values, place):
            return None
        # Of a batch of one sample it may be a view.
        return self._weights.find(made) or Weight.computed(core, given)

    def unfit(self, site: Site, values: Sequence[Any], weights: Sequence[Weight | None]) -> str | None:
        """Return why the operands of a call cannot be rounded; None if they can."""
        if any(map(is_transformed, values)):
            return ReasonCode.TRANSFORMED.text()
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        if any(tensor.is_nested for tensor in tensors):
            return ReasonCode.NESTED.text()
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return ReasonCode.SPARSE.text()
        if len(tensors) != len(values):
            return ReasonCode.NOT_TENSORS.text()
        if any(tensor.numel() == 0 for tensor in tensors):
            return ReasonCode.EMPTY.text()
        origins = [self._tracker.origin(tensor) for tensor in tensors]
        if site.operation.kind == "residual_add":
            return _why_not_residual(tensors, origins)
        if site.operation.kind == "embedding":
            return None if weights[0] is not None else ReasonCode.TABLE.text()
        alone = all(origin is not None and origin.kind == "parameter" for origin in origins)
        if all(weight is not None for weight in weights) or (alone and not any(weights)):
            return ReasonCode.PARAMETERS_ALONE.text()
        if len(weights) > _PRODUCT and any(weight is not None for weight in weights):
            return ReasonCode.ATTENTION_PARAMETER.text()
        return None


def _batch_axes(site: Site, values: Sequence[Any], place: int) -> set[int]:
    """Return the axes of an operand of a product that are a batch of products, and none of its matrix."""
    if not site.source.equation:
        return set(range(values[place].dim() - _MATRIX))
    found = labels(site.source.equation, [value.dim() for value in values])
    shared = set(found.operands[1 - place]) & found.output
    return {axis for axis, label in enumerate(found.operands[place]) if label in shared}


def _why_not_residual(tensors: Sequence[Tensor], origins: Sequence[Origin | None]) -> str | None:
    """Return why an add does not join two branches of the network; None if it does.

    A residual add has two computed operands of the same shape. At least one comes from a weighted product, and not both
    from the same one (a rotary embedding adds two halves of one projection). A product of two activations gives scores,
    to which a position bias is added; an engine that fuses attention adds both in float.
    """
    first, second = origins
    if tensors[0].shape != tensors[1].shape:
        return ReasonCode.ADD_BROADCASTS.text()
    if any(origin is not None and origin.kind == "parameter" for origin in (first, second)):
        return ReasonCode.ADD_PARAMETER.text()
    if not any(origin is not None and origin.kind == "weighted" for origin in (first, second)):
        return ReasonCode.ADD_UNWEIGHTED.text()
    if first == second:
        return ReasonCode.ADD_ONE_PRODUCT.text()
    if any(origin is not None and origin.kind == "product" for origin in (first, second)):
        return ReasonCode.ADD_SCORES.text()
    return None
