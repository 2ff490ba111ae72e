"""Containers of modules that have sites of their own: their items are their own children, and the sites are none.

A site is a child too, so torch's containers would count it, cut it off instead of the last layer, or renumber it. The
classes here stand behind the classes of a model and before torch's own in the order of resolution, so that a method
that a model overrides stays overridden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from collections.abc import Iterator
from collections.abc import KeysView
from collections.abc import ValuesView
from contextlib import contextmanager
from typing import Any

from torch import nn

from quantizer.proxy.site import Site
from quantizer.rewrite.host_argument import as_written

__all__ = ["container_views"]


def _own(container: nn.Module) -> dict[str, nn.Module]:
    """Return a container's own children."""
    modules: dict[str, Any] = container._modules
    return {name: module for name, module in modules.items() if not isinstance(module, Site)}


@contextmanager
def _alone(container: nn.Module) -> Iterator[None]:
    """Take the sites out while a method of torch's renumbers the children; they come back behind them."""
    own = _own(container)
    sites = {name: module for name, module in container._modules.items() if name not in own}
    for name in sites:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.update(sites)


class _Sequence(nn.Module):
    """The common part of sequences."""

    def __len__(self) -> int:
        return len(_own(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_own(self).values())

    def __delitem__(self, index: Any) -> None:
        with _alone(self):
            super().__delitem__(index)  # type: ignore[misc]

    def insert(self, index: int, module: nn.Module) -> Any:
        """Insert a module; torch's ``insert``, which renumbers those behind it."""
        with _alone(self):
            return super().insert(index, module)  # type: ignore[misc]


class _Sequential(_Sequence, nn.Sequential):
    """A ``Sequential``. A slice is one of the class as it was written: what its own functions compute stays float."""

    def __getitem__(self, index: Any) -> Any:
        own = _own(self)
        if isinstance(index, slice):
            return as_written(type(self))(OrderedDict(list(own.items())[index]))
        return self._get_item_by_idx(own.values(), index)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        setattr(self, self._get_item_by_idx(_own(self).keys(), index), module)


class _ModuleList(_Sequence, nn.ModuleList):
    """A ``ModuleList``, whose items are found by their numbers. A slice is one of the class as it was written."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return as_written(type(self))(list(_own(self).values())[index])
        return super().__getitem__(index)


class _ModuleDict(nn.ModuleDict):
    """A ``ModuleDict``."""

    def __len__(self) -> int:
        return len(_own(self))

    def __iter__(self) -> Iterator[str]:
        return iter(_own(self))

    def __contains__(self, key: str) -> bool:
        return key in _own(self)

    def keys(self) -> KeysView[str]:
        """Return the names of the items."""
        return _own(self).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        """Return the items with their names."""
        return _own(self).items()

    def values(self) -> ValuesView[nn.Module]:
        """Return the items."""
        return _own(self).values()

    def clear(self) -> None:
        """Remove all items."""
        with _alone(self):
            super().clear()


_VIEWS: tuple[type[nn.Module], ...] = (_Sequential, _ModuleList, _ModuleDict)


def container_views(bases: tuple[type, ...]) -> tuple[type, ...]:
    """Return the bases that a generated class of these bases needs besides, so that it shows its own children only."""
    return tuple(
        view
        for view in _VIEWS
        if any(issubclass(base, view.__bases__[-1]) for base in bases)
        and not any(issubclass(base, view) for base in bases)
    )
