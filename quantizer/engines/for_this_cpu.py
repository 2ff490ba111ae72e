"""The engines for this machine's CPU, of which the fastest can be chosen by measuring.

Byte products saturate on CPUs that accumulate them in 16 bits. There a build warns of a file that they spoil.
"""

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
from quantizer.plan.targets import AUTO, profile, profiles
from quantizer.utils.cpu import cpu_flags, saturates

EXACT_QMAX = 2**15 // (2 * UINT8.qmax)
"""The largest code of a weight with which two products of bytes fit into 16 bits."""


def saturation_warnings(backend: str, onnx_path: Path) -> tuple[str, ...]:
    """Return the warnings for a quantized file built for ``backend`` on this CPU; none without the package onnx."""
    exact = profile(backend).exact_variant
    if exact is None or not saturates() or find_spec("onnx") is None:
        return ()
    if all(node.op_type != "DequantizeLinear" for node in read_graph(onnx_path).graph.node):
        return ()
    return (
        "this CPU has no VNNI and adds products of bytes in 16 bits, which saturate: the engine is less accurate here "
        f"than on a CPU with VNNI; for CPUs without it quantize for backend {exact}",
    )


_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to build an engine with one backend.

    Attributes:
        backend: the backend.
        dtype: the format of quantized operands; None: the engine is of the float model.
        precision: the type in which all else is computed; None: that of the file.
        dynamic: whether the ranges of activations are taken at run time.
        compiled: as in ``BuildOptions``.
    """

    backend: str
    dtype: str | None
    precision: str | None = None
    dynamic: bool = False
    compiled: bool | None = None

    @property
    def format(self) -> str:
        """The format of products: ``float32``, ``int8``, ``int8 dynamic``, ``int8+bfloat16`` with such a rest."""
        rest = self.precision or profile(self.backend).float_dtype
        if self.dtype is None:
            return rest
        told = self.dtype if rest == profile(self.backend).float_dtype else f"{self.dtype}+{rest}"
        return f"{told} dynamic" if self.dynamic else told

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"

    @property
    def file_name(self) -> str:
        """The name as that of a file or folder."""
        return self.name.replace(" ", "-")


def cpu_candidates(among: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the backends that run here on the CPU, and what the others lack.

    Where the CPU adds products of bytes in 16 bits, the variant of a backend that is exact there stands for it.
    """
    for name in among:
        if backends[name].device != "cpu":
            raise EngineError(
                f"{AUTO} times engines on this CPU, and {name}'s run elsewhere; leave it out of the choice, or name "
                "it alone"
            )
    names = list(among)
    if not among:
        names = [name for name in backends.names() if backends[name].device == "cpu"]
        variants = {profile(name).exact_variant for name in names}
        names = [name for name in names if name not in variants]
        # Where nothing is measured, the first stands for all.
        names.sort(key=lambda name: (profile(_variant_here(name)).auto_rank, list(profiles).index(name)))
    found, missing = [], []
    for name in names:
        why = _lacking(name)
        if why is None:
            found.append(_variant_here(name))
        else:
            missing.append(why)
    if not found:
        raise EngineError(
            f"no engine for a CPU is installed, so that there is nothing to choose from: {'; '.join(missing)}"
        )
    return tuple(dict.fromkeys(found)), tuple(missing)


def cpu_variants(
    names: Sequence[str],
    *,
    dtype: str | None,
    precision: str | None = None,
    dynamic: bool = False,
    compiled: bool | None = None,
    named: bool = True,
) -> tuple[Variant, ...]:
    """Return all engines to choose from, by backend: in float, then quantized.

    Args:
        names: the backends.
        dtype: the format of quantized operands; None: nothing is quantized, and all are in the types of the model.
        precision: what is not quantized, if that is set already; None: float32, and bfloat16 where the CPU has it.
        dynamic: whether ranges that are taken at run time are tried, too.
        compiled: as in ``BuildOptions``, if that is set already.
        named: whether somebody asked for these backends. If not, torch builds on its eager road, which takes seconds
            where the compiled one takes half a minute a file, and is the slower engine in most shapes.
    """
    variants = []
    for name in names:
        target = profile(name)
        quick = not named and target.library == "torch" and len(names) > 1
        road = False if compiled is None and quick else compiled
        given = precision if target.inference_precisions else None
        rests = [given]
        if dtype is not None and precision is None and "bfloat16" in target.inference_precisions and _has_bf16():
            rests.append("bfloat16")
        for one in (None,) if dtype is None else (None, dtype):
            variants += [Variant(backend=name, dtype=one, precision=rest, compiled=road) for rest in rests]
        if dtype == "int8" and dynamic and target.dynamic is not None:
            variants.append(Variant(backend=name, dtype=dtype, precision=given, dynamic=True, compiled=road))
    return tuple(variants)


def _variant_here(name: str) -> str:
    return profile(name).exact_variant or name if saturates() else name


def _lacking(name: str) -> str | None:
    """Return what keeps a backend from running here, and what installs it; None: it runs."""
    library = profile(name).library
    if library is not None and find_spec(library) is None:
        return f"{name}: {install_command(library)}"
    if library == "torch":
        # It is always there, but may lack the kernels.
        try:
            backends[name].check(BuildOptions())
        except EngineError as error:
            return f"{name}: {error}"
    return None


def _has_bf16() -> bool:
    return not _BF16_FLAGS.isdisjoint(cpu_flags())
