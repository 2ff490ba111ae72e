"""Saturation of byte products on CPUs that accumulate them in 16 bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quantizer.engines.cpu import cpu_flags
from quantizer.engines.inspection.onnx_graph import read_graph
from quantizer.numerics.qtype import UINT8
from quantizer.targets import profile

EXACT_QMAX = 2**15 // (2 * UINT8.qmax)
"""The largest code of a weight with which two products of bytes fit into 16 bits."""


def saturates() -> bool:
    """Return whether this is an x86 CPU without VNNI; False if the system does not tell.

    OpenVINO and ONNX Runtime multiply bytes by VPMADDUBSW there, which adds two products in 16 bits and saturates: a
    linear with full ranges kept an SQNR of 19 dB.
    """
    flags = cpu_flags()
    return "avx2" in flags and not any("vnni" in flag for flag in flags)


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
