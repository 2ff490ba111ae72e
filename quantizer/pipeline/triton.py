"""The text of Triton's config.pbtxt: names, types and shapes of an engine, and the settings in which it runs here.

Further names of a file: links, which take no room, and copies where the file system has none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantizer.engines.onnxruntime import needs_basic_level
from quantizer.errors import EngineError
from quantizer.qdq.structure import Signature, Value, external_files
from quantizer.targets import profile
from quantizer.targets.base import TritonServer

CONFIG_NAME = "config.pbtxt"

_TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{kind}int{bits}": f"TYPE_{kind.upper()}INT{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "TYPE_BF16",
}


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
        precision: the inference precision that the engine was built for; None: float32, or that of the file.
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
    def server(self) -> TritonServer | None:
        """The one of Triton's backends that runs such engines; None: there is none."""
        return profile(self.backend).triton

    @property
    def batch(self) -> Sequence[int] | None:
        """The sizes of the batch; None: some input or output does not begin with one dimension that is dynamic."""
        values = (*self.signature.inputs, *self.signature.outputs)
        if not all(value.shape and not isinstance(value.shape[0], int) for value in values):
            return None
        first = {value.shape[0] for value in self.signature.inputs}
        return self.dimensions.get(str(first.pop())) if len(first) == 1 else None


def config_text(served: ServedEngine) -> str:
    """Return the text of the config.pbtxt of an engine that Triton has a backend for."""
    server = served.server
    assert server is not None
    batch = served.batch if server.batches else None
    basic = server.basic_level is not None and needs_basic_level(served.engine)
    hints = server.hints.get(served.precision or "", {})
    remarks = (*server.remarks, *(() if hints else server.unhinted))
    parameters = {**server.parameters, **hints}
    return "\n".join(
        [
            *(f"# {line}" for line in remarks),
            f"name: {_quoted(served.name)}",
            server.chosen_by,
            f"default_model_filename: {_quoted(server.file)}",
            f"max_batch_size: {0 if batch is None else batch[-1]}",
            *_tensors("input", served.signature.inputs, batch is not None),
            *_tensors("output", served.signature.outputs, batch is not None),
            *_batching(batch),
            *_block("instance_group [", [*_block("{", ["count: 1", f"kind: {server.kind}"], "}")], "]"),
            *([f"optimization {{ graph {{ level: {server.basic_level} }} }}"] if basic else []),
            *(
                line
                for name, value in parameters.items()
                for line in _parameter(name, value.format(threads=served.threads))
            ),
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


def link_onnx(path: Path, place: Path) -> None:
    """Give an ONNX file and the files with its weights, which it names, a second place."""
    link_file(path, place)
    for name in external_files(path):
        link_file(path.with_name(name), place.with_name(name))


def link_file(path: Path, place: Path) -> None:
    """Give a file a second place."""
    try:
        # A hard link: it holds when the folder is moved or one of the names is removed.
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)
