"""Backends and variants of engines for the GPU of this machine, from which a benchmark chooses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from quantizer.engines.backends import backends
from quantizer.engines.base import BuildOptions
from quantizer.engines.for_this_cpu import Variant
from quantizer.errors import EngineError, MissingDependencyError
from quantizer.plan.targets import profile, profiles
from quantizer.utils import gpu


def gpu_candidates(among: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the backends that run on this GPU, and the reasons why others do not.

    Raises:
        EngineError: there is no GPU, or none of the backends runs on it.
    """
    if not gpu.is_present():
        raise EngineError(
            "torch sees no NVIDIA GPU on this machine, so that no engine can be chosen for one; use device cpu, or "
            "name one backend, such as tensorrt-rtx or torch-cuda, whose engine is then built but not run"
        )
    names = among or [name for name in backends.names() if backends[name].device == "cuda"]
    # Without measurements, the first backend is used.
    names = sorted(names, key=lambda name: (profile(name).auto_rank, list(profiles).index(name)))
    reasons = {name: _missing_reason(name) for name in names}
    usable = tuple(name for name, reason in reasons.items() if reason is None)
    missing = tuple(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    if not usable:
        raise EngineError(f"no engine runs on {gpu.description()}: {'; '.join(missing)}; use device cpu for the CPU")
    return usable, missing


def gpu_variants(
    names: Sequence[str], *, dtypes: Sequence[str], precision: str | None = None, compiled: bool | None = None
) -> tuple[Variant, ...]:
    """Return the engines to choose from, by backend: float first, then quantized.

    Args:
        names: the backends.
        dtypes: formats of quantized operands; empty: only float engines. A GPU without FP8 gets no FP8 engines.
        precision: type of non-quantized operations; None: float16, and bfloat16 if the outputs of the engine in float16
            are wrong, because values may exceed float16.
        compiled: as in ``BuildOptions``.
    """
    formats = [dtype for dtype in dtypes if dtype != "fp8" or gpu.has_fp8()]
    if dtypes and not formats:
        raise EngineError(f"{gpu.description()} has no FP8, which needs compute capability 8.9 or later; use int8")
    variants = []
    for name in names:
        precisions = profile(name).inference_precisions
        spare = "bfloat16" if precision is None and "bfloat16" in precisions else None
        for dtype in (None, *formats):
            own = precision if precisions else None
            variants.append(Variant(backend=name, dtype=dtype, precision=own, compiled=compiled))
            if spare is not None:
                variants.append(Variant(backend=name, dtype=dtype, precision=spare, compiled=compiled, is_spare=True))
    return tuple(variants)


def _missing_reason(name: str) -> str | None:
    """Return why a backend does not run here; None if it runs."""
    library = profile(name).library
    if library is not None and find_spec(library) is None:
        return str(MissingDependencyError(library, library))
    if library == "triton":
        # It imports torch.
        from quantizer.engines.torch_engine.gpu_engine import no_gpu

        return no_gpu()
    try:
        backends[name].check(BuildOptions())
    except (EngineError, MissingDependencyError) as error:
        return str(error)
    return None
