"""The text of Triton's config.pbtxt: names, types and shapes of an engine, and the settings in which it runs here.

What each of Triton's backends reads is from their own documents and sources. Two things follow from the latter:
- The backend for OpenVINO fixes the batch of a model at ``max_batch_size`` and pads each request to it. A model with a
  dynamic batch runs requests of any size only where that is 0 and the batch is one of its dimensions.
- Its only precision is ``HINT_BF16``. Without it, OpenVINO itself chooses, and on a CPU with BF16 it chooses BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import Literal

from quantizer.engines.onnxruntime.slow_fusions import needs_basic_level
from quantizer.errors import EngineError
from quantizer.qdq.signature import Signature
from quantizer.qdq.signature import Value

__all__ = ["CONFIG_NAME", "GPU", "SERVERS", "ServedEngine", "Server", "config_text"]

CONFIG_NAME = "config.pbtxt"
GPU, _CPU = "KIND_GPU", "KIND_CPU"

_TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{kind}int{bits}": f"TYPE_{kind.upper()}INT{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "TYPE_BF16",
}
_BASIC = "-1"
"""Triton's number of ONNX Runtime's level of basic optimizations."""


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """An engine in its folder, as a server sees it.

    Attributes:
        name: the name of the model.
        backend: the backend of the engine.
        onnx: the file that the engine was built from.
        engine: the engine's file.
        signature: the inputs and outputs of the ONNX file.
        dimensions: smallest, usual and largest size of each dynamic dimension, by its name.
        threads: the number of CPU threads that it ran on here.
        precision: the precision of OpenVINO's computations that are not quantized; None: float32, or another backend.
        capability: the GPU that it was built for ahead of time; None: that of the machine, or it runs on a CPU.
    """

    name: str
    backend: str
    onnx: Path
    engine: Path
    signature: Signature
    dimensions: Mapping[str, Sequence[int]]
    threads: int
    precision: str | None = None
    capability: str | None = None

    @property
    def batch(self) -> Sequence[int] | None:
        """The sizes of the batch; None: some input or output does not begin with one dimension that is dynamic."""
        values = (*self.signature.inputs, *self.signature.outputs)
        if not all(value.shape and not isinstance(value.shape[0], int) for value in values):
            return None
        first = {value.shape[0] for value in self.signature.inputs}
        return self.dimensions.get(str(first.pop())) if len(first) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Server:
    """How one of Triton's backends takes the engines of a backend of ours.

    Attributes:
        chosen_by: the line of the configuration that names it.
        file: the name of the file that it loads.
        takes: what that file is: our engine's, the ONNX file, or the engine without the line after it; None: another
            one, which has to be built on a GPU.
        kind: the kind of its instances.
        batches: whether requests of any size up to ``max_batch_size`` run as they are, and may be put together.
        level: its number of the level of graph optimizations; None: its default.
        parameters: its parameters by name.
        remarks: what the configuration says about itself, as comments.
    """

    chosen_by: str
    file: str
    takes: Literal["engine", "onnx", "plan"] | None
    kind: str
    batches: bool
    level: Callable[[ServedEngine], str | None] = lambda _: None
    parameters: Callable[[ServedEngine], Mapping[str, str]] = lambda _: {}
    remarks: Callable[[ServedEngine], Sequence[str]] = lambda _: ()


def _onnxruntime(served: ServedEngine) -> Mapping[str, str]:
    return {"intra_op_thread_count": str(served.threads), "inter_op_thread_count": "1", "execution_mode": "0"}


def _openvino(served: ServedEngine) -> Mapping[str, str]:
    hint = {"HINT_BF16": "YES"} if served.precision == "bfloat16" else {}
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(served.threads),
        **hint,
    }


def _about_openvino(served: ServedEngine) -> Sequence[str]:
    batch = (
        "max_batch_size is 0, and the batch is the first of dims: with another number this backend pads each request",
        "to that many rows.",
    )
    if served.precision == "bfloat16":
        return batch
    return (
        *batch,
        "What is not quantized was measured in float32, for which this backend has no setting: on a CPU with BF16 it",
        "takes bfloat16. Convert with --inference-precision bfloat16 to have that measured.",
    )


_ONNXRUNTIME = Server(
    chosen_by='backend: "onnxruntime"',
    file="model.onnx",
    takes="engine",
    kind=_CPU,
    batches=True,
    # The file has all further ones already.
    level=lambda served: _BASIC if needs_basic_level(served.engine) else None,
    parameters=_onnxruntime,
)
_OPENVINO = Server(
    chosen_by='backend: "openvino"',
    file="model.onnx",
    takes="onnx",
    kind=_CPU,
    batches=False,
    parameters=_openvino,
    remarks=_about_openvino,
)
_TENSORRT = Server(chosen_by='platform: "tensorrt_plan"', file="model.plan", takes="plan", kind=GPU, batches=True)

SERVERS: Mapping[str, Server] = {
    "onnxruntime": _ONNXRUNTIME,
    "onnxruntime-avx2": _ONNXRUNTIME,
    "openvino": _OPENVINO,
    "openvino-avx2": _OPENVINO,
    "tensorrt": _TENSORRT,
    # Its own engines are another library's; what Triton takes is built of the same ONNX file on the GPU.
    "tensorrt-rtx": replace(_TENSORRT, takes=None),
}
"""How engines are served, by backend. Those of other backends are not."""


def config_text(served: ServedEngine) -> str:
    """Return the text of a model's config.pbtxt.

    Raises:
        EngineError: an input or output has a type that Triton does not know.
    """
    server = SERVERS[served.backend]
    batch, level = served.batch if server.batches else None, server.level(served)
    return "\n".join(
        [
            *(f"# {line}" for line in server.remarks(served)),
            f"name: {_quoted(served.name)}",
            server.chosen_by,
            f"default_model_filename: {_quoted(server.file)}",
            f"max_batch_size: {0 if batch is None else batch[-1]}",
            *_tensors("input", served.signature.inputs, batch is not None),
            *_tensors("output", served.signature.outputs, batch is not None),
            *_batching(batch),
            *_block("instance_group [", [*_block("{", ["count: 1", f"kind: {server.kind}"], "}")], "]"),
            *([] if level is None else [f"optimization {{ graph {{ level: {level} }} }}"]),
            *(line for name, value in server.parameters(served).items() for line in _parameter(name, value)),
            "",
        ]
    )


def _tensors(field: str, values: Sequence[Value], batched: bool) -> Iterator[str]:
    entries: list[str] = []
    for value in values:
        if value.dtype not in _TYPES:
            raise EngineError(f"{field} {value.name!r} is of type {value.dtype}, which Triton does not know")
        sizes = [size if isinstance(size, int) else -1 for size in value.shape[1 if batched else 0 :]]
        lines = [
            f"name: {_quoted(value.name)}",
            f"data_type: {_TYPES[value.dtype]}",
            # Triton takes no empty list.
            f"dims: [ {', '.join(map(str, sizes or [1]))} ]",
            *([] if sizes else ["reshape { shape: [ ] }"]),
        ]
        entries += _block("{", lines, "}" if value is values[-1] else "},")
    yield from _block(f"{field} [", entries, "]")


def _batching(batch: Sequence[int] | None) -> Iterator[str]:
    """Yield the batcher: it puts requests together to the sizes that the engine was measured at."""
    if batch is None or batch[-1] == 1:
        return
    preferred = ", ".join(str(size) for size in dict.fromkeys(batch[1:]) if size > 1)
    yield from _block("dynamic_batching {", [f"preferred_batch_size: [ {preferred} ]"], "}")


def _parameter(name: str, value: str) -> Iterator[str]:
    yield from _block("parameters {", [f"key: {_quoted(name)}", f"value {{ string_value: {_quoted(value)} }}"], "}")


def _block(head: str, lines: Iterable[str], foot: str) -> Iterator[str]:
    yield head
    yield from (f"  {line}" for line in lines)
    yield foot


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
