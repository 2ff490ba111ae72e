"""The schedule of a training: it fixes batch statistics first, and scales later.

Parameter groups for an optimizer, in which scales of activations have a learning rate of their own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from quantizer.algorithms.qat import scales
from quantizer.algorithms.qat.scales import fix_scales
from quantizer.errors import QuantizerError
from quantizer.numerics.rounding import GAIN
from quantizer.proxy.build import is_proxy, quantizers_of, sites_of


class Schedule:
    """The schedule of one training; call ``at(step)`` after every step of the optimizer.

    It depends on the step alone: to resume a training, call ``at`` with the step from which it resumes.

    Args:
        proxy: the proxy that ``qat()`` returned.
        steps: the number of steps of the optimizer, 1 or more.
        freeze_scales: the share of the steps after which scales are fixed, 0 to 1; 1: they are never fixed.
        freeze_batch_norm: the share after which batch norms keep their statistics, 0 to 1. From then on they compute
            the same as in the exported file, where they are folded into the convolutions before them.

    Raises:
        QuantizerError: ``proxy`` is not what ``qat()`` returned, or a number is out of bounds.
    """

    def __init__(
        self, proxy: nn.Module, steps: int, *, freeze_scales: float = 0.8, freeze_batch_norm: float = 0.5
    ) -> None:
        if not is_proxy(proxy) or any(site.frozen for site in sites_of(proxy)):
            raise QuantizerError("a Schedule is of the proxy that qat() returns, to be trained")
        if steps < 1:
            raise QuantizerError(f"steps is {steps}, expected 1 or more")
        for name, share in (("freeze_scales", freeze_scales), ("freeze_batch_norm", freeze_batch_norm)):
            if not 0 <= share <= 1:
                raise QuantizerError(f"{name} is {share}, expected a share of the steps, 0 to 1")
        self._proxy = proxy
        self._freeze_scales = steps if freeze_scales == 1 else freeze_scales * steps
        self._freeze_batch_norm = freeze_batch_norm * steps
        self._held: list[Any] = []

    def at(self, step: int) -> None:
        """Bring the proxy to its state after ``step`` steps, 0 or more; a second call at one step has no effect."""
        quantizers = quantizers_of(self._proxy)
        scales.step(quantizers)
        if step >= self._freeze_scales:
            fix_scales(self._proxy)
        if step >= self._freeze_batch_norm and not self._held:
            self._held = [
                module.register_forward_pre_hook(_keep_statistics)
                for module in self._proxy.modules()
                if isinstance(module, _BatchNorm)
            ]


def _keep_statistics(module: nn.Module, _: tuple[Any, ...]) -> None:
    # Training loops call train() on the whole model, often at every step.
    module.training = False


def parameter_groups(
    proxy: nn.Module, learning_rate: float, *, scale_learning_rate: float = 0.2
) -> list[dict[str, Any]]:
    """Return parameter groups for Adam or AdamW.

    Learned scales of activations have a rate of their own: the scale of calibration may be a third of the best one for
    training, and a rate that suits weights would not get there in thousands of steps. Scales of weights fit from the
    start, and are trained at the rate of the weights.

    Args:
        proxy: the proxy that ``qat()`` returned.
        learning_rate: the rate of weights and of learned scales of weights.
        scale_learning_rate: the largest change of a learned scale of an activation in a step, as a share of the scale.

    Returns:
        Groups with ``params`` and ``lr``, none of them empty.

    Raises:
        QuantizerError: ``proxy`` is no proxy, or a rate is not above 0.
    """
    if not is_proxy(proxy):
        raise QuantizerError(f"{type(proxy).__name__} is no proxy: parameter_groups takes what qat() returned")
    for name, rate in (("learning_rate", learning_rate), ("scale_learning_rate", scale_learning_rate)):
        if not 0 < rate < float("inf"):
            raise QuantizerError(f"{name} is {rate}, expected a number above 0")
    ranges = {id(quantizer.change) for quantizer in quantizers_of(proxy) if quantizer.of_samples}
    trained = [parameter for parameter in proxy.parameters() if parameter.requires_grad]
    of_ranges = [parameter for parameter in trained if id(parameter) in ranges]
    rest = [parameter for parameter in trained if id(parameter) not in ranges]
    # At the same rate, a scale moves GAIN times as far as a weight.
    groups = [{"params": rest, "lr": learning_rate}, {"params": of_ranges, "lr": scale_learning_rate / GAIN}]
    return [group for group in groups if group["params"]]
