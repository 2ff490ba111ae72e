"""The backends from which ``auto`` chooses, on the CPU or on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.engines.backends import backends
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import EngineError
from quantizer.plan.targets import AUTO


def usable_backends(among: Sequence[str] = (), device: str | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the backends that run on a device of this machine, and the reasons why others do not.

    Args:
        among: backends of one device; empty: all backends of ``device``.
        device: ``cpu`` or ``cuda``; None: that of ``among``, else ``cpu``.

    Raises:
        EngineError: the backends have different devices, or none of them runs here.
    """
    devices = {backends[name].device for name in among} or {device or "cpu"}
    if len(devices) > 1:
        on_gpu = [name for name in among if backends[name].device == "cuda"]
        raise EngineError(
            f"{AUTO} compares engines on one device, but {' and '.join(on_gpu)} runs on a GPU and the others on the "
            "CPU; name backends of one device"
        )
    if devices == {"cuda"}:
        # Nothing of it is imported for an engine on the CPU.
        from quantizer.engines.for_this_gpu import gpu_candidates

        return gpu_candidates(among)
    return cpu_candidates(among)
