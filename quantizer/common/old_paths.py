"""Import paths and names of the last release, which still work in this one.

Importing a module by its old path warns, and gives a module with the names of the new one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MOVED = {
    "quantizer.conversion": "quantizer.runs.convert",
    "quantizer.export.check": "quantizer.graph_check",
    "quantizer.qat_calibrate": "quantizer.in_place",
    "quantizer.source": "quantizer.rewrite",
    "quantizer.source.operator_patches": "quantizer.rewrite.operator_patches",
    "quantizer.transformers_plugin": "quantizer.interop.transformers.plugin",
}


class _OldPaths(MetaPathFinder, Loader):
    """The finder and loader of the modules in ``MOVED``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a path in ``MOVED``, None for any other."""
        return spec_from_loader(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill ``module`` with the names of the module at the new path, and warn."""
        new = MOVED[module.__name__]
        # The frames between this one and the import statement are importlib's, which ``warnings`` skips.
        warnings.warn(
            f"{module.__name__} is now {new}; the old path goes with the next release", DeprecationWarning, stacklevel=2
        )
        vars(module).update({name: value for name, value in vars(import_module(new)).items() if name[:2] != "__"})
        vars(module)["__all__"] = import_module(new).__all__
        vars(module)["__getattr__"] = partial(getattr, import_module(new))


def find_old_paths() -> None:
    """Make the modules of ``MOVED`` importable; a second call has no effect."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        # First, because a leftover folder with only bytecode of an earlier release would be imported as a package.
        sys.meta_path.insert(0, _OldPaths())


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module with renamed objects: an old name warns and gives the renamed object.

    Args:
        module: the module's ``__name__``.
        renamed: new names by old ones.
    """

    def get(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        warnings.warn(
            f"{module}.{name} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2
        )
        return getattr(sys.modules[module], new)

    return get
