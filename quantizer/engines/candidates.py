"""The backends whose engines are for this machine's CPU, of which the fastest can be chosen by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from quantizer.engines.backends import backends
from quantizer.engines.int8_saturation import saturates
from quantizer.errors import EngineError
from quantizer.targets import AUTO
from quantizer.targets import profile
from quantizer.targets import profiles

__all__ = ["cpu_candidates"]


def cpu_candidates(among: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the installed backends for this CPU, and what installs the others.

    Where the CPU adds products of bytes in 16 bits, the variant of a backend that is exact there stands for it.

    Args:
        among: the backends to choose from, in the order of preference; empty: all that ``auto`` tries.

    Raises:
        EngineError: none is installed, or one of them runs elsewhere.
    """
    for name in among:
        if backends[name].device != "cpu":
            raise EngineError(
                f"{AUTO} times engines on this CPU, and {name}'s run elsewhere; leave it out of the choice, or name "
                "it alone"
            )
    names = list(among)
    if not among:
        names = [name for name in backends.names() if backends[name].device == "cpu" and profile(name).in_auto]
        # In the order of the profiles: where nothing is measured, the first stands for all.
        names.sort(key=list(profiles).index)
        variants = {profile(name).exact_variant for name in names}
        names = [name for name in names if name not in variants]
    found, missing = [], []
    for name in names:
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
    return tuple(dict.fromkeys(found)), tuple(missing)
