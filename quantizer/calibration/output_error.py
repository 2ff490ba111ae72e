"""The error of the model's output with a plan, on kept calibration batches: the measure for choices between plans."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch import nn

from quantizer.calibration.proxied import Proxied
from quantizer.observe.outputs import flat_output
from quantizer.observe.padding import padding_mask
from quantizer.observe.replay_batches import Batch
from quantizer.observe.replay_batches import copied
from quantizer.plan.apply import apply_plan
from quantizer.plan.apply import switch_on
from quantizer.plan.site_plan import Plan
from quantizer.proxy.restored_state import unmoved

__all__ = ["OutputError", "first_of_best", "quantized"]

_T = TypeVar("_T")


class OutputError:
    """The float outputs of some batches, with which those of quantized models are compared.

    Legend: y the float output of a batch, all floating tensors of it together and without padding; z the output with
    the operands rounded. The error of a plan is the sum over batches of |z - y|^2 / |y|^2.
    """

    def __init__(self, proxy: Proxied, batches: Iterable[Batch]) -> None:
        """
        Args:
            proxy: the calibrated proxy, its sites inactive and unobserved.
            batches: inputs of the proxy.
        """
        self._proxy = proxy
        with torch.no_grad():
            self._expected = [(batch, _output(proxy.module, batch)) for batch in batches]

    def of(self, plan: Plan) -> float:
        """Return the error of the model quantized by a plan; the proxy is float again afterwards."""
        with torch.no_grad(), quantized(self._proxy, plan):
            return sum(_error(_output(self._proxy.module, batch), output) for batch, output in self._expected)


def first_of_best(errors: Mapping[_T, float], tolerance_db: float = 0.0) -> _T:
    """Return the first key whose error is at most ``tolerance_db`` above the least."""
    limit = min(errors.values()) * 10 ** (tolerance_db / 10)
    return next(key for key, error in errors.items() if error <= limit)


@contextmanager
def quantized(proxy: Proxied, plan: Plan) -> Iterator[None]:
    """Apply a plan to the proxy, with weights as float parameters; switch all quantizers off again afterwards."""
    apply_plan(proxy.module, plan)
    try:
        switch_on(proxy.module, plan)
        yield
    finally:
        for site in proxy.sites:
            site.active = False
            for place in range(len(site.quantizers)):
                site.quantizer(place).reset()


def _output(proxy: nn.Module, batch: Batch) -> Tensor:
    args, keywords = copied(*batch)
    # forward() instead of a call: the hooks of the proxy are for calibration.
    with unmoved(proxy):
        return flat_output(proxy.forward(*args, **keywords), padding_mask(keywords, args))


def _error(output: Tensor, expected: Tensor) -> float:
    power = float(expected.square().sum())
    return float((output - expected).square().sum()) / power if power else 0.0
