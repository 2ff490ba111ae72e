"""The codes of weights and the ranges of activations that are learned with a block, each with one parameter.

A parameter is moved by the sign of its gradient, whatever the gradient's size, so that ``rate`` is how far it gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.functional import fake_quantize, quantize
from quantizer.numerics.granularity import scale_of_each
from quantizer.numerics.log_scale import GAIN
from quantizer.numerics.qtype import INT8, qtype
from quantizer.observe.range_group import RangeGroup, RoundedWeight
from quantizer.plan.site_plan import OperandPlan
from quantizer.proxy.operand_quantizer import OperandQuantizer

_WITHIN = 0.45
"""How far from a code, in steps, a number may be that is to be rounded to it whatever floats do."""


class Learned(ABC):
    """Something with a parameter.

    Attributes:
        parameter: the parameter, 0 at first.
    """

    parameter: Tensor

    @abstractmethod
    def move(self, gradient: Tensor, share: float) -> None:
        """Move the parameter against a gradient by a share, 0 to 1, of its first rate."""

    @abstractmethod
    def in_use(self) -> Any:
        """Return a context in which the block computes with the current value."""


class LearnedCodes(Learned):
    """The codes of a weight: clamp(round(u + v)), v [*] in [-1/2, 1/2] being the parameter.

    u is w / scale; if the plan has codes, it is the number next to that which is rounded to them.

    Args:
        name: ``SITE.OPERAND``.
        quantizer: the quantizer of the weight.
        weight: the plan of the weight.
        values: w [*], as it is rounded: multiplied by its factors.
        qmax: the largest code of a weight in INT8 on the target; None: that of the format.

    Attributes:
        name, quantizer: as given.
    """

    _RATE = 5e-3  # falling to 0 over 200 steps, v gets as far as it may (AutoRound)

    def __init__(
        self, name: str, quantizer: OperandQuantizer, weight: OperandPlan, values: Tensor, qmax: int | None
    ) -> None:
        assert weight.scale is not None
        self.name = name
        self.parameter = torch.zeros_like(values).requires_grad_()
        self.quantizer = quantizer
        self._weight = weight
        self._steps = scale_of_each(weight.scale, values.shape, weight.axis, weight.block_size)
        self._start = values
        if weight.codes is not None:
            lowest, highest = ((weight.codes + sign * _WITHIN) * self._steps for sign in (-1, 1))
            self._start = values.clamp(lowest, highest)
        self._largest = None if qmax is None or qtype(weight.dtype) != INT8 else self._steps * qmax

    def move(self, gradient: Tensor, share: float) -> None:
        self.parameter.sub_(self._RATE * share * gradient.sign()).clamp_(-0.5, 0.5)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        handle = self.quantizer.register_forward_hook(lambda _, __, usual: self._on(fake_quantize).to(usual.dtype))
        try:
            yield
        finally:
            handle.remove()

    def codes(self) -> Tensor:
        """Return the current codes, int8 [*]."""
        with torch.no_grad():
            return self._on(quantize)

    def rounded(self, codes: Tensor, where: str, share: float) -> RoundedWeight:
        """Return the record of codes with a share of the former error at the output of a block."""
        former = "rounding to nearest" if self._weight.codes is None else "gptq"
        text = f"reconstruct, {where}: {share:.2f} of the error of {former}"
        return RoundedWeight(codes=codes, text=text, amax=self._chosen)

    def as_before(self, why: str) -> RoundedWeight:
        """Return the record of the codes to begin with, and why there are no others."""
        former = self._weight.rounding or "rounded to nearest"
        text = f"{former}; not reconstructed: {why}"
        return RoundedWeight(codes=self._weight.codes, text=text, amax=self._chosen)

    @property
    def _chosen(self) -> Tensor | None:
        """The range that was chosen with the codes to begin with."""
        return None if self._weight.codes is None else self._weight.amax

    def _on(self, rounding: Callable[..., Tensor]) -> Tensor:
        """Return the weight with v added before ``rounding``."""
        weight = self._weight
        return rounding(self._moved(), weight.scale, weight.dtype, axis=weight.axis, block_size=weight.block_size)

    def _moved(self) -> Tensor:
        moved = self._start + self.parameter * self._steps
        return moved if self._largest is None else moved.clamp(-self._largest, self._largest)


class LearnedRange(Learned):
    """The range of a tensor in a symmetric format: its scale times exp(GAIN * v), v [] being the parameter.

    Args:
        group: the operands that read the tensor.
        quantizers: their quantizers.

    Attributes:
        group: as given.
    """

    _RATE = 1e-3  # of the scale, a step

    def __init__(self, group: RangeGroup, quantizers: Sequence[OperandQuantizer]) -> None:
        assert quantizers[0].scale is not None
        self.group = group
        self.parameter = nn.Parameter(torch.zeros_like(quantizers[0].scale))
        self._quantizers = quantizers
        self._amax = group.amax(quantizers[0].dtype)

    def move(self, gradient: Tensor, share: float) -> None:
        self.parameter.sub_(self._RATE / GAIN * share * gradient.sign())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        for quantizer in self._quantizers:
            quantizer.of_samples = True
            quantizer.learn_scale(self.parameter)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for quantizer in self._quantizers:
                quantizer.of_samples, quantizer.change = False, None

    def amax(self) -> float:
        """Return the current magnitude that maps to the largest code."""
        return self._amax * float((GAIN * self.parameter.detach().double()).exp())
