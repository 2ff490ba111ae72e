"""Synthetic modules, which contain the globals of rewritten functions.

The second part fills the padded positions in the output of torch's encoder with 0, for an encoder whose layers run on
padded instead of nested tensors. Legend: src, output [B, S, E]; padding [B, S], the mask of the encoder, 0 at tokens.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantizer.rewrite.host_argument import (
    PADDED,
    PASS_HOST,
    RECORDED,
    RECURRENT,
    TAKES_APART,
    VISIBLE,
    WRITTEN_CLASS,
    Receivers,
    as_written,
    pass_host,
    recurrent,
    takes_apart,
    viewer,
)
from quantizer.rewrite.names import LIVE, NOW
from quantizer.rewrite.source_sites import SiteSource


class _Receiver(Protocol):
    """Result of rewriting a function, with the fields in use here."""

    function: Any
    host_is_argument: bool

    @property
    def sites(self) -> list[SiteSource]: ...


@dataclass(kw_only=True, slots=True)
class _Synthetic:
    """A synthetic module."""

    module: types.ModuleType
    original: dict[str, Any]
    replaced: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    receivers: Receivers = field(default_factory=dict)
    waiting: list[tuple[types.FunctionType, _Receiver]] = field(default_factory=list)
    twins: dict[types.FunctionType, Any] = field(default_factory=dict)

    def refresh(self) -> None:
        # A helper that was replaced in the meantime is used as it is, because its sites are unknown.
        names = {name: new for name, (old, new) in self.replaced.items() if self.original.get(name) is old}
        self.module.__dict__.update({**self.original, "__name__": self.module.__name__, **names})


class SyntheticModules:
    """The synthetic modules, one for each module whose functions were rewritten."""

    def __init__(self, hidden: tuple[type, ...]) -> None:
        self._hidden = hidden
        self._synthetic: dict[int, _Synthetic] = {}

    def namespace(
        self,
        original: dict[str, Any],
        replaced: Mapping[str, Any],
        receivers: Mapping[int, tuple[types.FunctionType, _Receiver]],
    ) -> dict[str, Any]:
        """Return the globals of a rewritten function, updated from the original's."""
        if id(original) not in self._synthetic:
            self._synthetic[id(original)] = self._make(original)
        synthetic = self._synthetic[id(original)]
        synthetic.replaced.update({name: (original[name], helper) for name, helper in replaced.items()})
        synthetic.twins.update({original[name]: helper for name, helper in replaced.items()})
        synthetic.waiting += receivers.values()
        synthetic.refresh()
        return synthetic.module.__dict__

    def _make(self, original: dict[str, Any]) -> _Synthetic:
        name = f"quantizer.rewritten.{original.get('__name__', 'unnamed')}"
        while name in sys.modules:
            name += "_"
        synthetic = _Synthetic(module=types.ModuleType(name), original=original)
        synthetic.module.__dict__.update(
            {
                PASS_HOST: pass_host(synthetic.receivers),
                LIVE: _live(original),
                NOW: _now(synthetic.twins),
                PADDED: padded,
                RECURRENT: recurrent,
                TAKES_APART: takes_apart,
                VISIBLE: viewer(self._hidden),
                WRITTEN_CLASS: as_written,
            }
        )
        sys.modules[name] = synthetic.module
        return synthetic

    def settle(self) -> None:
        """Register newly rewritten functions, so that callers pass them a host."""
        for synthetic in self._synthetic.values():
            for function, rebuilt in synthetic.waiting:
                if rebuilt.function is not None:
                    mark = next((site.mark for site in rebuilt.sites if site.edits), None)
                    entry = (rebuilt.function, mark, rebuilt.host_is_argument)
                    known = synthetic.receivers.get(function, ())
                    # The latest first, because the source may have been rewritten again with more calls that pass it.
                    synthetic.receivers[function] = (entry, *(other for other in known if other != entry))
            synthetic.waiting.clear()

    def add_variant(self, function: types.FunctionType, rebuilt: _Receiver) -> None:
        """Make callers of ``function`` pass a host also to this variant of it."""
        for synthetic in self._synthetic.values():
            if function in synthetic.receivers or any(function is waiting for waiting, _ in synthetic.waiting):
                synthetic.waiting.append((function, rebuilt))

    def refresh(self) -> None:
        """Update all synthetic modules, because globals may have been set in the meantime."""
        for synthetic in self._synthetic.values():
            synthetic.refresh()


def _live(original: dict[str, Any]) -> Any:
    """Return the module that owns these globals, or an object that reads and writes them as a module does."""
    module = sys.modules.get(str(original.get("__name__")))
    return module if module is not None and vars(module) is original else _Namespace(original)


class _Namespace:
    """Globals of a file without an imported module, as attributes."""

    def __init__(self, variables: dict[str, Any]) -> None:
        object.__setattr__(self, "_variables", variables)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_variables")[name]
        except KeyError:
            raise AttributeError(f"name {name!r} is not defined", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_variables")[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del object.__getattribute__(self, "_variables")[name]


def _now(twins: Mapping[types.FunctionType, Any]) -> Any:
    """Return the function that rewritten source calls as ``_quantizer_now``."""

    def now(function: Any) -> Any:
        """Return the rewritten twin of a function; the function itself without one."""
        return twins.get(function, function) if isinstance(function, types.FunctionType) else function

    return now


_BATCHED = 3
_NESTED_ON = ("cpu", "cuda", "xpu")


def padded(host: Any, nested: bool, output: Tensor, src: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the output of all layers with 0 where torch has it; ``_quantizer_padded`` in rewritten source.

    The position of the padding is computed without a branch, so that an exported graph contains it.
    """
    if nested:
        result: Tensor = output.to_padded_tensor(0.0, src.size())
        return result
    if padding is None or not takes_apart(host) or not _would_be_nested(host, src, mask):
        return output
    tokens = padding == 0
    # torch takes this path only if the padding of every sample is behind its tokens.
    places = torch.arange(tokens.shape[1], device=tokens.device)
    behind = ((places < tokens.sum(1, keepdim=True)) == tokens).all()
    return output.masked_fill((~tokens & behind).unsqueeze(-1), 0.0)


def _would_be_nested(encoder: Any, src: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's encoder would run on nested tensors with its fast path; the conditions are torch's."""
    first: nn.Module = encoder.layers[0]
    recorded = getattr(encoder, RECORDED, None)
    recorded = torch.is_grad_enabled() if recorded is None else recorded
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and src.dim() == _BATCHED
        and not src.is_nested
        and mask is None
        and not torch.is_autocast_enabled()
        and src.device.type in _NESTED_ON
        and not (recorded and any(value.requires_grad for value in (src, *first.parameters())))
    )
