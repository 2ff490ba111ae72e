"""What a proxy shares with the user's model, and how it stops sharing before a cast would change the model too.

A proxy in training never stops: what is done to its tensors is done to the model's.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from torch import Tensor
from torch import nn

__all__ = ["Sharing", "Twin", "end_sharing", "hand_back", "hand_back_buffers", "share", "share_for_good", "take_small"]

_MARK = "_quantizer_shares"
_TWIN = "_quantizer_twin"


class Sharing:
    """Stands in every module of a proxy whose tensors are the user's, and knows the root.

    Copied or pickled it knows none: a copy of a proxy has copies of its tensors.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        # Weak: a layer that is kept must not keep its proxy.
        self.root = None if root is None else weakref.ref(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        return Sharing()

    def __reduce__(self) -> tuple[type[Sharing], tuple[()]]:
        return Sharing, ()


class Twin:
    """Stands in every module of a proxy in training, and knows the model's module whose tensors it has.

    Copied or pickled it knows none, as a copy of a proxy has copies of its tensors.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        return Twin()

    def __reduce__(self) -> tuple[type[Twin], tuple[()]]:
        return Twin, ()


def share(proxy: nn.Module) -> None:
    """Mark all modules of a new proxy: their tensors are those of the user's model."""
    sharing = Sharing(proxy)
    for module in proxy.modules():
        vars(module)[_MARK] = sharing


def share_for_good(proxy: nn.Module, model: nn.Module) -> None:
    """Let the tensors of a new proxy be those of ``model`` also after ``.to()``, ``.half()`` and the like."""
    twins = dict(model.named_modules())
    for path, module in proxy.named_modules():
        vars(module).pop(_MARK, None)
        if path in twins:
            vars(module)[_TWIN] = Twin(twins[path])


def hand_back(module: nn.Module) -> None:
    """Give the twin of a module, where it has one, the tensors that the module has now."""
    twin = vars(module).get(_TWIN)
    if twin is None or twin.module is None:
        return
    for name in twin.module._parameters.keys() & module._parameters.keys():
        twin.module._parameters[name] = module._parameters[name]
    hand_back_buffers(module)


def hand_back_buffers(module: nn.Module) -> None:
    """Give the twin of a module, where it has one, what a pass put in the place of buffers: ``self.mean = ...``."""
    twin = vars(module).get(_TWIN)
    if twin is None or twin.module is None:
        return
    for name in twin.module._buffers.keys() & module._buffers.keys():
        twin.module._buffers[name] = module._buffers[name]


def end_sharing(module: nn.Module) -> None:
    """Give the whole proxy of ``module`` its own copies of what it shares.

    The whole of it: parameters that are tied to others outside of ``module`` stay tied.
    """
    sharing = vars(module).get(_MARK)
    if sharing is None or sharing.root is None:
        return
    root = sharing.root()
    copies: dict[int, Any] = {}
    # A layer may have been taken out of its proxy, and may have outlived it.
    for member in [*(root.modules() if root is not None else ()), *module.modules()]:
        if vars(member).pop(_MARK, None) is not None:
            _take_own(member, copies)


def take_small(proxy: nn.Module, elements: int) -> None:
    """Give a proxy its own copies of all buffers, and of parameters of at most so many elements; the rest stays shared.

    Buffers of any size: a pass may write into them.
    """
    copies: dict[int, Any] = {}
    for module in proxy.modules():
        _take_own(module, copies, elements)


def _take_own(module: nn.Module, copies: dict[int, Any], elements: float = math.inf) -> None:
    """Replace a module's tensors by copies; ``copies`` holds (copy, original), which keeps the original's id valid."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.numel() <= elements:
            if id(parameter) not in copies:
                copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                copies[id(parameter)] = (copied, parameter)
            module._parameters[name] = copies[id(parameter)][0]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            if id(buffer) not in copies:
                copies[id(buffer)] = (buffer.clone(), buffer)
            module._buffers[name] = copies[id(buffer)][0]
    for name, value in vars(module).items():
        # Recurrent layers keep a list of their parameters besides.
        if isinstance(value, list) and any(isinstance(item, Tensor) and id(item) in copies for item in value):
            vars(module)[name] = [copies[id(item)][0] if id(item) in copies else item for item in value]
