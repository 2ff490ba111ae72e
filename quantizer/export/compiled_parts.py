"""Parts of a model that TorchScript compiled, so that torch.export can trace them.

torch.export calls each module through a hook, which reads the class of a compiled one wrongly, and it swaps parameters
that a compiled module does not let go. A call of its compiled function avoids both. TorchScript computes sizes that it
needs for gradients as numbers; parameters without gradients need none, so that the axes stay open.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _CompiledPart(nn.Module):
    """Caller of a compiled module, which is not registered as a child."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self)["part"] = part

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return vars(self)["part"]._c._get_method("forward")(*args, **inputs)


def call_compiled_parts(model: nn.Module) -> None:
    """Replace each module of TorchScript in a model by one that calls its compiled function, in place."""
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            for parameter in child.parameters():
                parameter.detach_()
            setattr(model, name, _CompiledPart(child))
        else:
            call_compiled_parts(child)
