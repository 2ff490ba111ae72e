"""What makes the tests quicker: few searches for garbage, tables of exports, few steps, no C++ headers, kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch.fx


def collect_seldom() -> None:
    """Leave what is there to the end of the process, and seldom look for cycles in what is new.

    Models and libraries are millions of objects that stay, and each search goes through them: an eighth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 20, 50)


def quick_compiler() -> AbstractContextManager[None]:
    """Let Inductor compile a few small kernels: headers for many, and a look at the CPU, take ten seconds each."""
    import torch._inductor.config

    headers = dict.fromkeys(("cpp_cache_precompile_headers", "aot_inductor.precompile_headers"), False)
    return torch._inductor.config.patch({**headers, "cpp.vec_isa_ok": True})


def quick_interpreter() -> None:
    """Let Triton's interpreter replace the functions of its language once a launch, not in each call in a kernel.

    To find them it goes through a thousand members of the language: a quarter of the time of small kernels. A tenth are
    the tables of types that it makes for each array.
    """
    from triton.language import pointer_type
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, None

    def replace_once(function: Any) -> Any:
        nonlocal replaced
        if replaced is None:
            scope, replaced = replace(function), set[str]()
            scope.restore = partial(ended, scope.restore)
            return scope
        # Modules have the language under other names. What a call replaces is not restored.
        if function.__module__ not in replaced:
            replaced.add(function.__module__)
            replace(function)
        return None

    def ended(restore: Callable[[], None]) -> None:
        nonlocal replaced
        replaced = None
        restore()

    dtype_of = interpreter._get_np_dtype
    dtype_of_scalar = cache(dtype_of)

    def known_dtype(kind: Any) -> Any:
        return dtype_of(kind) if isinstance(kind.scalar, pointer_type) else dtype_of_scalar(kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, known_dtype


def few_steps() -> AbstractContextManager[int]:
    """Let the reconstruction of weights take a quarter of its steps."""
    return patch("quantizer.algorithms.reconstruction._STEPS", 50)


def keep_tables() -> None:
    """Leave the exports of this process quick, as a fixture leaves those of a file."""
    torch.fx.config.do_not_emit_stack_traces = True
    for name, kept in tables_of_exports().items():
        patch(name, kept).start()


def tables_of_exports() -> Mapping[str, Any]:
    """Return functions of the exporter by their places, each with results that are kept: a tenth of a small export.

    They read which operators have a translation, a decomposition, or neither. No test registers such an operator.
    """
    from torch._export.utils import _is_preservable_cia_op

    kept: dict[str, Any] = {"torch._export.utils._is_preservable_cia_op": cache(_is_preservable_cia_op)}
    if find_spec("onnxscript") is None:
        return kept
    from torch.onnx._internal.exporter import _decomp, _registration

    from quantizer.export.quick_exporter import _preserved

    registered = cache(_registration.ONNXRegistry.from_torchlib)
    decompositions: dict[frozenset[Any], dict[Any, Callable[..., Any]]] = {}
    decompositions_without = _decomp.create_onnx_friendly_decomposition_table

    def from_torchlib(opset_version: int = _registration._constants.TORCHLIB_OPSET) -> Any:
        registry = _registration.ONNXRegistry()
        registry._opset_version = opset_version
        # Each export adds translations of its own.
        registry.functions = {name: [*found] for name, found in registered(opset_version).functions.items()}
        return registry

    def decomposition_table(translated: set[Any]) -> dict[Any, Callable[..., Any]]:
        if (key := frozenset(translated)) not in decompositions:
            decompositions[key] = decompositions_without(translated)
        return {**decompositions[key]}

    place = "torch.onnx._internal.exporter"
    return kept | {
        f"{place}._registration.ONNXRegistry.from_torchlib": staticmethod(from_torchlib),
        f"{place}._decomp.create_onnx_friendly_decomposition_table": decomposition_table,
        "quantizer.export.quick_exporter._preserved": cache(_preserved),
    }
