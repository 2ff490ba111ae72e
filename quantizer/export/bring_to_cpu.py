"""The move of a model that is exported to the CPU."""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

_STAYS = ("cpu", "meta")


def bring_to_cpu(exported: nn.Module) -> None:
    """Move a copy to the CPU: what is folded into its file is computed as for a model that is there.

    The copy shares parameters with the caller's model, which ``Module.cpu`` would move in place.
    """
    moved: dict[Parameter, Parameter] = {}
    for module in exported.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type not in _STAYS:
                if parameter not in moved:
                    moved[parameter] = Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in _STAYS:
                module._buffers[name] = buffer.cpu()
