"""The error of the model's output with a plan, on kept calibration batches: the measure for choices between plans."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.proxied import Proxied
from quantizer.common.digest import tensors_digest
from quantizer.common.distributed import exact_sums
from quantizer.common.own_inputs import copied
from quantizer.observe.outputs import flat_output, floats, is_no_mask
from quantizer.observe.padding import padding_mask
from quantizer.observe.replay_batches import Batch, ReplayBatches
from quantizer.plan.apply import apply_plan, switch_on
from quantizer.plan.site_plan import Plan, plan_digest
from quantizer.proxy.call_numbers import numbered
from quantizer.proxy.eager_attention import attention_of
from quantizer.proxy.restored_state import unmoved

_OTHER = 0.01
"""From this error on, two implementations of attention compute something else: bfloat16 makes 0.0001."""


class OutputError:
    """The error of quantized models on batches; float outputs, and the errors of a plan, are computed once a batch.

    A plan of another backend may be the same, and its error is known then: for the same float output, to the bit.

    Legend: y the float output of a batch, all floating tensors of it together and without padding; z the output with
    the operands rounded. The error of a plan is the sum over batches of |z - y|^2 / |y|^2, without those values of y
    that are masks.
    """

    def __init__(self, proxy: Proxied, known: dict[tuple[str, Hashable, str], float] | None = None) -> None:
        """
        Args:
            proxy: the calibrated proxy, its sites inactive and unobserved.
            known: errors by plan, batch and float output, to which new ones are added; None: none.
        """
        self._proxy = proxy
        self._expected: dict[Hashable, Tensor] = {}
        self._digests: dict[Hashable, str] = {}
        self._known = {} if known is None else known

    def of(self, plan: Plan, batches: Mapping[Hashable, Batch]) -> float:
        """Return the error of the model quantized by a plan; the proxy is float again afterwards.

        Args:
            plan: the plan.
            batches: inputs of the proxy, each under a name that no other has.
        """
        return math.fsum(self._terms(plan, batches))

    def of_all_ranks(self, plan: Plan, kept: ReplayBatches, limit: float = math.inf) -> float:
        """Return the error by the batches of all ranks, with the bits of one process that has all of them.

        Beyond ``limit`` it is that of some of the batches.
        """
        (error,) = exact_sums([self._terms(plan, kept.mine(), limit)])
        return error

    def _terms(self, plan: Plan, batches: Mapping[Hashable, Batch], limit: float = math.inf) -> list[float]:
        terms: list[float] = []
        digest = plan_digest(plan)
        with torch.no_grad():
            for name in [name for name in batches if name not in self._expected]:
                self._expected[name] = _output(self._proxy.module, batches[name])
                self._digests[name] = tensors_digest({"output": self._expected[name]})
            with quantized(self._proxy, plan):
                for name, batch in batches.items():
                    key = digest, name, self._digests[name]
                    if key not in self._known:
                        self._known[key] = _error(_output(self._proxy.module, batch), self._expected[name])
                    terms.append(self._known[key])
                    if math.fsum(terms) > limit:
                        break
        return terms


def other_attention_error(model: nn.Module, proxy: nn.Module, batch: Batch) -> float | None:
    """Return the error of a proxy's output, if the attention which its model is set to computes something else.

    Args:
        model: the model.
        proxy: its float proxy, which computes attention by separate products; unobserved.
        batch: inputs of the proxy.

    Returns:
        None where both give the same but for the rounding of float types, or there is nothing to compare: outputs of
        other shapes, or others each time.
    """
    with torch.no_grad():
        with attention_of(model, proxy) as other:
            if not other or not floats(expected := _raw_output(proxy, batch)):
                return None
        given = _output(proxy, batch)
        expected = flat_output(expected, padding_mask(batch[1], batch[0]))
        error = _error(given, expected) if given.shape == expected.shape else 0.0
        return error if error > _OTHER and torch.equal(_output(proxy, batch), given) else None


@contextmanager
def quantized(proxy: Proxied, plan: Plan) -> Iterator[None]:
    """Apply a plan to the proxy, with weights as float parameters; switch all quantizers off again afterwards."""
    apply_plan(proxy.module, plan)
    try:
        switch_on(proxy.module, plan)
        yield
    finally:
        for site in proxy.sites:
            site.reset()


def _output(proxy: nn.Module, batch: Batch) -> Tensor:
    return flat_output(_raw_output(proxy, batch), padding_mask(batch[1], batch[0]))


def _raw_output(proxy: nn.Module, batch: Batch) -> Any:
    args, keywords = copied(*batch)
    # forward() instead of a call: the hooks of the proxy are for calibration.
    with unmoved(proxy), numbered(proxy):
        return proxy.forward(*args, **keywords)


def _error(output: Tensor, expected: Tensor) -> float:
    seen = is_no_mask(expected)
    if not bool(seen.all()):
        expected, output = expected[seen], output[seen]
    # In place, as the logits of a decoder are 200 MB a batch.
    power, error = float(expected.square().sum()), float((output - expected).square_().sum())
    if math.isnan(error):
        return math.inf
    return error / power if power else 0.0
