"""Backends and variants of engines for this CPU, from which a benchmark chooses, and warnings about saturation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quantizer.engines.backends import backends
from quantizer.engines.base import BuildOptions
from quantizer.errors import EngineError, install_command
from quantizer.export.qdq.onnx_file import read_graph
from quantizer.numerics.formats import UINT8
from quantizer.plan.targets import profile, profiles
from quantizer.utils.cpu import cpu_flags, saturates

EXACT_QMAX = 2**15 // (2 * UINT8.qmax)
"""Largest quantized weight with which the sum of two INT8 products fits into 16 bits."""


def saturation_warnings(backend: str, onnx_path: Path) -> tuple[str, ...]:
    """Return warnings for a quantized file on a CPU whose INT8 products saturate; empty without onnx."""
    exact = profile(backend).exact_variant
    if exact is None or not saturates() or find_spec("onnx") is None:
        return ()
    if all(node.op_type != "DequantizeLinear" for node in read_graph(onnx_path).graph.node):
        return ()
    return (
        "this CPU has no VNNI and adds INT8 products in 16 bits, which saturate: the engine is less accurate than on a "
        f"CPU with VNNI; quantize for backend {exact}",
    )


_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Backend, format and precision of an engine.

    Attributes:
        backend: the backend.
        dtype: format of quantized operands; None for the float model.
        precision: type of non-quantized operations; None: that of the file.
        dynamic: whether ranges of activations are computed at run time.
        compiled: as in ``BuildOptions``.
        is_spare: whether it is only built if the outputs of the same engine without ``precision`` are wrong.
    """

    backend: str
    dtype: str | None
    precision: str | None = None
    dynamic: bool = False
    compiled: bool | None = None
    is_spare: bool = False

    @property
    def computed(self) -> str:
        """Type of non-quantized operations."""
        return self.precision or profile(self.backend).float_dtype

    @property
    def format(self) -> str:
        """Format: ``float32``, ``int8``, ``int8 dynamic``, or ``int8+bfloat16`` with non-quantized bfloat16."""
        if self.dtype is None:
            return self.computed
        text = self.dtype if self.computed == profile(self.backend).float_dtype else f"{self.dtype}+{self.computed}"
        return f"{text} dynamic" if self.dynamic else text

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"

    @property
    def file_name(self) -> str:
        """Name for a file or folder."""
        return self.name.replace(" ", "-")


def cpu_candidates(among: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the backends that run on this CPU, and the reasons why others do not.

    On a CPU with saturating INT8 products, the exact variant of a backend replaces it.
    """
    names = list(among)
    if not among:
        names = [name for name in backends.names() if backends[name].device == "cpu"]
        variants = {profile(name).exact_variant for name in names}
        names = [name for name in names if name not in variants]
        # Without measurements, the first backend is used.
        names.sort(key=lambda name: (profile(_variant_here(name)).auto_rank, list(profiles).index(name)))
    usable, missing = [], []
    for name in names:
        reason = _missing_reason(name)
        if reason is None:
            usable.append(_variant_here(name))
        else:
            missing.append(reason)
    if not usable:
        raise EngineError(f"no engine for a CPU is installed: {'; '.join(missing)}")
    return tuple(dict.fromkeys(usable)), tuple(missing)


def cpu_variants(
    names: Sequence[str],
    *,
    dtype: str | None,
    precision: str | None = None,
    dynamic: bool = False,
    compiled: bool | None = None,
    named: bool = True,
) -> tuple[Variant, ...]:
    """Return the engines to choose from, by backend: float first, then quantized.

    Args:
        names: the backends.
        dtype: format of quantized operands; None: only float engines.
        precision: type of non-quantized operations; None: float32, and bfloat16 if the CPU supports it.
        dynamic: whether to add engines with ranges at run time.
        compiled: as in ``BuildOptions``.
        named: whether the user chose these backends. If not, torch is built eager: it takes seconds instead of half a
            minute per file. Compiled torch is the slower engine in most shapes.
    """
    variants = []
    for name in names:
        target = profile(name)
        quick = not named and target.library == "torch" and len(names) > 1
        compile_ = False if compiled is None and quick else compiled
        float_precision = precision if target.inference_precisions else None
        precisions = [float_precision]
        if dtype is not None and precision is None and "bfloat16" in target.inference_precisions and _has_bf16():
            precisions.append("bfloat16")
        for operand_dtype in (None,) if dtype is None else (None, dtype):
            variants += [
                Variant(backend=name, dtype=operand_dtype, precision=float_type, compiled=compile_)
                for float_type in precisions
            ]
        if dtype == "int8" and dynamic and target.dynamic is not None:
            variants.append(
                Variant(backend=name, dtype=dtype, precision=float_precision, dynamic=True, compiled=compile_)
            )
    return tuple(variants)


def _variant_here(name: str) -> str:
    return profile(name).exact_variant or name if saturates() else name


def _missing_reason(name: str) -> str | None:
    """Return why a backend does not run here, and how to install it; None if it runs."""
    library = profile(name).library
    if library is not None and find_spec(library) is None:
        return f"{name}: {install_command(library)}"
    if library == "torch":
        # torch is always installed, but may lack the kernels.
        try:
            backends[name].check(BuildOptions())
        except EngineError as error:
            return f"{name}: {error}"
    return None


def _has_bf16() -> bool:
    return not _BF16_FLAGS.isdisjoint(cpu_flags())
