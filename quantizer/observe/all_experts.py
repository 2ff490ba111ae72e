"""Calibration of mixtures of experts in which every expert sees every token, whatever the router chooses.

A mixture runs again with other experts until all have seen all tokens. Those results are dropped: the model goes on
with what its router chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.proxy.local_hook import LocalHook
from quantizer.proxy.site import Site

_ROUTED = 2  # axes of the numbers of the experts of each token


def show_all_experts(proxy: nn.Module, sites: Iterable[Site]) -> list[Callable[[], None]]:
    """Let each mixture of a proxy run with all of its experts in every pass; return what undoes that.

    The mixtures are the modules with grouped products. Each gets the numbers of the experts, integers [T, k] for T
    tokens with k experts, as an argument of ``forward``, and knows how many it has as ``num_experts``.
    """
    hosts = dict.fromkeys(site.host_path for site in sites if site.operation.grouped is not None)
    mixtures = ((path, proxy.get_submodule(path)) for path in hosts)
    return [
        mixture.register_forward_hook(LocalHook(_of_all(path)), with_kwargs=True).remove for path, mixture in mixtures
    ]


def _of_all(path: str) -> Callable[..., None]:
    def run_again(mixture: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        held: dict[Any, Any] = {**dict(enumerate(args)), **keywords}
        routed = [place for place, value in held.items() if _is_routing(value)]
        experts = getattr(mixture, "num_experts", None)
        if len(routed) != 1 or not isinstance(experts, int):
            raise CalibrationError(
                f"{path}: expected one argument with the numbers of the experts, integers [tokens, experts of each], "
                f"and num_experts, got {len(routed)} such arguments and num_experts {experts!r}: "
                "set activations.all_experts to false"
            )
        index = held[routed[0]]
        for first in range(0, experts, index.shape[1]):
            chosen = (torch.arange(index.shape[1], device=index.device) + first) % experts
            given = {**held, routed[0]: chosen.to(index.dtype).expand_as(index).contiguous()}
            mixture.forward(*(given[place] for place in range(len(args))), **{name: given[name] for name in keywords})

    return run_again


def _is_routing(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() == _ROUTED
        and not value.is_floating_point()
        and value.dtype != torch.bool
    )
