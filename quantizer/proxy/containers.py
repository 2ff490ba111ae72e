"""Versions of torch's containers of modules whose items do not include the sites among their children.

A site is a child too, so torch's containers would count it, cut it off instead of the last layer, or renumber it. In
the method resolution order the classes here come after the classes of a model and before torch's own, so that a method
that a model overrides stays overridden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from typing import Any

from torch import nn

from quantizer.proxy.site import SourceCall
from quantizer.rewrite.host_argument import as_written


def _own(container: nn.Module) -> dict[str, nn.Module]:
    """Return a container's children without the sites."""
    modules: dict[str, Any] = container._modules
    return {name: module for name, module in modules.items() if not isinstance(module, SourceCall)}


@contextmanager
def _alone(container: nn.Module) -> Iterator[None]:
    """Remove the sites while a method of torch renumbers the children; add them again at the end."""
    own = _own(container)
    sites = {name: module for name, module in container._modules.items() if name not in own}
    for name in sites:
        del container._modules[name]
    try:
        yield
    finally:
        container._modules.update(sites)


class _Sequence(nn.Module):
    """The methods that ``Sequential`` and ``ModuleList`` share."""

    def __len__(self) -> int:
        return len(_own(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_own(self).values())

    def __delitem__(self, index: Any) -> None:
        with _alone(self):
            super().__delitem__(index)  # type: ignore[misc]

    def insert(self, index: int, module: nn.Module) -> Any:
        """Insert a module and renumber those after it, as torch's ``insert`` does."""
        with _alone(self):
            return super().insert(index, module)  # type: ignore[misc]


class _Sequential(_Sequence, nn.Sequential):
    """A ``Sequential`` without sites as items; a slice is of the original class, so its own products stay float."""

    def __getitem__(self, index: Any) -> Any:
        own = _own(self)
        if isinstance(index, slice):
            return as_written(type(self))(OrderedDict(list(own.items())[index]))
        return self._get_item_by_idx(own.values(), index)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        setattr(self, self._get_item_by_idx(_own(self).keys(), index), module)


class _ModuleList(_Sequence, nn.ModuleList):
    """A ``ModuleList`` without sites as items; a slice is of the original class."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return as_written(type(self))(list(_own(self).values())[index])
        return super().__getitem__(index)


class _ModuleDict(nn.ModuleDict):
    """A ``ModuleDict`` without sites as items."""

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
    """Return the further bases that a generated class with these bases needs so that sites are not its items."""
    return tuple(
        view
        for view in _VIEWS
        if any(issubclass(base, view.__bases__[-1]) for base in bases)
        and not any(issubclass(base, view) for base in bases)
    )
