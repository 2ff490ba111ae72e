"""The backends whose engines are for this machine's CPU, of which the fastest can be chosen by measuring."""

from __future__ import annotations

from importlib.util import find_spec

from quantizer.engines.backends import backends
from quantizer.engines.int8_saturation import saturates
from quantizer.errors import EngineError
from quantizer.targets import profile
from quantizer.targets import profiles

__all__ = ["cpu_candidates"]


def cpu_candidates() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the installed backends for this CPU, and what installs the others.

    Where the CPU adds products of bytes in 16 bits, the variant of a backend that is exact there stands for it.

    Raises:
        EngineError: none is installed.
    """
    names = [name for name in backends.names() if backends[name].device == "cpu" and profile(name).in_auto]
    # In the order of the profiles: where nothing is measured, the first stands for all.
    names.sort(key=list(profiles).index)
    variants = {profile(name).exact_variant for name in names}
    found, missing = [], []
    for name in (name for name in names if name not in variants):
        library = profile(name).library
        if library is not None and find_spec(library) is None:
            missing.append(f"{name}: pip install 'quantizer[{library}]'")
        else:
            found.append(profile(name).exact_variant or name if saturates() else name)
    if not found:
        raise EngineError(
            "no engine for a CPU is installed, so that there is nothing to choose from; install one or all of "
            f"{'; '.join(missing)}"
        )
    return tuple(found), tuple(missing)
