"""Parameter groups for an optimizer, in which scales of activations have a learning rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from quantizer.errors import QuantizerError
from quantizer.numerics.log_scale import GAIN
from quantizer.proxy.build import is_proxy, quantizers_of


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
