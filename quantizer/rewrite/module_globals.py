"""Synthetic modules: the globals of rewritten functions."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantizer.rewrite.host_argument import (
    PADDED,
    PASS_HOST,
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
from quantizer.rewrite.padded_output import padded
from quantizer.rewrite.source_sites import SiteSource


class _Receiver(Protocol):
    """Result of rewriting a function, as far as it is used here."""

    function: Any
    host_is_argument: bool

    @property
    def sites(self) -> list[SiteSource]: ...


@dataclass(kw_only=True, slots=True)
class _Synthetic:
    """Synthetic module."""

    module: types.ModuleType
    original: dict[str, Any]
    replaced: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    receivers: Receivers = field(default_factory=dict)
    waiting: list[tuple[types.FunctionType, _Receiver]] = field(default_factory=list)
    twins: dict[types.FunctionType, Any] = field(default_factory=dict)

    def refresh(self) -> None:
        # A helper that was replaced since then is used as it is: its sites are not known.
        names = {name: new for name, (old, new) in self.replaced.items() if self.original.get(name) is old}
        self.module.__dict__.update({**self.original, "__name__": self.module.__name__, **names})


class SyntheticModules:
    """Synthetic modules, one for each module whose functions were rewritten."""

    def __init__(self, hidden: tuple[type, ...]) -> None:
        self._hidden = hidden
        self._made: dict[int, _Synthetic] = {}

    def namespace(
        self,
        original: dict[str, Any],
        replaced: Mapping[str, Any],
        receivers: Mapping[int, tuple[types.FunctionType, _Receiver]],
    ) -> dict[str, Any]:
        """Return the globals of a rewritten function, brought up to date with the original's."""
        if id(original) not in self._made:
            self._made[id(original)] = self._make(original)
        made = self._made[id(original)]
        made.replaced.update({name: (original[name], helper) for name, helper in replaced.items()})
        made.twins.update({original[name]: helper for name, helper in replaced.items()})
        made.waiting += receivers.values()
        made.refresh()
        return made.module.__dict__

    def _make(self, original: dict[str, Any]) -> _Synthetic:
        name = f"quantizer.rewritten.{original.get('__name__', 'unnamed')}"
        while name in sys.modules:
            name += "_"
        made = _Synthetic(module=types.ModuleType(name), original=original)
        made.module.__dict__.update(
            {
                PASS_HOST: pass_host(made.receivers),
                LIVE: _live(original),
                NOW: _now(made.twins),
                PADDED: padded,
                RECURRENT: recurrent,
                TAKES_APART: takes_apart,
                VISIBLE: viewer(self._hidden),
                WRITTEN_CLASS: as_written,
            }
        )
        sys.modules[name] = made.module
        return made

    def settle(self) -> None:
        """Let callers pass a host to functions that were built after them."""
        for made in self._made.values():
            for function, rebuilt in made.waiting:
                if rebuilt.function is not None:
                    mark = next((site.mark for site in rebuilt.sites if site.edits), None)
                    entry = (rebuilt.function, mark, rebuilt.host_is_argument)
                    known = made.receivers.get(function, ())
                    # The latest first: the text may have been rewritten again, with more calls that pass the host.
                    made.receivers[function] = (entry, *(other for other in known if other != entry))
            made.waiting.clear()

    def add_variant(self, function: types.FunctionType, rebuilt: _Receiver) -> None:
        """Let callers of ``function`` pass a host to this variant of it too."""
        for made in self._made.values():
            if function in made.receivers or any(function is waiting for waiting, _ in made.waiting):
                made.waiting.append((function, rebuilt))

    def refresh(self) -> None:
        """Bring all synthetic modules up to date: globals may have been set since they were made."""
        for made in self._made.values():
            made.refresh()


def _live(original: dict[str, Any]) -> Any:
    """Return the module that owns these globals, or an object that reads and writes them as a module does."""
    module = sys.modules.get(str(original.get("__name__")))
    return module if module is not None and vars(module) is original else _Namespace(original)


class _Namespace:
    """Globals of a file that is no imported module, as attributes."""

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
    """Return the function that rewritten text calls ``_quantizer_now``."""

    def now(function: Any) -> Any:
        """Return the rewritten twin that replaces a function; the function itself if it has none."""
        return twins.get(function, function) if isinstance(function, types.FunctionType) else function

    return now
