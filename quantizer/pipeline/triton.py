"""Files for a Triton server, and the check of an engine on a GPU.

gpu/settings.sh     settings of the script: files, profile shapes, names of the cases
gpu/compare.py      the comparison, which needs only the standard library
gpu/config.pbtxt    for a model repository with the engine that the script builds
gpu/BATCHxTOKENS/   a case: raw inputs (.bin), expected outputs (.npy), and ``case.json`` on their comparison
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.engine_file import content_bytes
from quantizer.engines.onnxruntime import needs_basic_level
from quantizer.errors import EngineError
from quantizer.export.qdq.structure import Signature, Value, external_files
from quantizer.pipeline.compare_outputs import Reference, Tolerance, token_outputs
from quantizer.pipeline.context import as_array
from quantizer.plan.targets import profile
from quantizer.plan.targets.base import TritonServer
from quantizer.tasks import batch_shape

CONFIG_NAME = "config.pbtxt"

_TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{kind}int{bits}": f"TYPE_{kind.upper()}INT{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "TYPE_BF16",
}


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """An engine in its folder, with the facts that a server needs.

    Attributes:
        name: the name of the model.
        backend: the backend of the engine.
        onnx: the ONNX file.
        engine: the engine file.
        signature: the inputs and outputs of the ONNX file.
        dimensions: [min, opt, max] of each dynamic dimension, by name.
        threads: the number of CPU threads in the benchmarks.
        precision: the inference precision of the build; None: float32, or the types of the file.
        capability: the GPU of an ahead-of-time build; None for this machine's GPU or a CPU.
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
        """The Triton backend that runs such engines; None without one."""
        return profile(self.backend).triton

    @property
    def batch(self) -> Sequence[int] | None:
        """The sizes of the batch dimension; None unless all inputs and outputs start with the same dynamic axis."""
        values = (*self.signature.inputs, *self.signature.outputs)
        if not all(value.shape and not isinstance(value.shape[0], int) for value in values):
            return None
        first = {value.shape[0] for value in self.signature.inputs}
        return self.dimensions.get(str(first.pop())) if len(first) == 1 else None


def config_text(served: ServedEngine) -> str:
    """Return the text of config.pbtxt for an engine that Triton can run."""
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
            raise EngineError(f"{field} {value.name!r} has type {value.dtype}, which Triton does not support")
        sizes = [size if isinstance(size, int) else -1 for size in value.shape[1 if batched else 0 :]]
        lines = [
            f"name: {_quoted(value.name)}",
            f"data_type: {_TYPES[value.dtype]}",
            # Triton rejects an empty list.
            f"dims: [ {', '.join(map(str, sizes or [1]))} ]",
            *([] if sizes else ["reshape { shape: [ ] }"]),
        ]
        entries += _block("{", lines, "}" if value is values[-1] else "},")
    yield from _block(f"{field} [", entries, "]")


def _batching(batch: Sequence[int] | None) -> Iterator[str]:
    """Yield the dynamic batcher, which combines requests to the benchmarked batch sizes."""
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
    """Link or copy an ONNX file and its external weight files to another path."""
    link_file(path, place)
    for name in external_files(path):
        link_file(path.with_name(name), place.with_name(name))


def link_file(path: Path, place: Path) -> None:
    """Link a file to another path, or copy it if the file system has no links."""
    try:
        # A hard link remains valid if the folder is moved or one of the names is removed.
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)


GPU_SCRIPT = "run_on_gpu.sh"
CASES = "gpu"
_HERE = Path(__file__).parent
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected outputs of an engine, one reference per batch.

    Attributes:
        outputs: the outputs of the frozen proxy, or of the float model.
        of_float: the outputs of the float model.
        bound: the tolerance.
    """

    outputs: Sequence[Reference]
    of_float: Sequence[Reference]
    bound: Tolerance


def write_gpu_check(folder: Path, served: ServedEngine, expected: Expected, tool: str) -> None:
    """Write the GPU check into the folder of an engine, which the program ``tool`` runs."""
    place = folder / CASES
    place.mkdir()
    cases = dict(_cases(place, served, expected))
    (place / "settings.sh").write_text(_settings(served, list(cases), tool), encoding="utf-8")
    (place / CONFIG_NAME).write_text(config_text(served), encoding="utf-8")
    for name, source in ((f"{CASES}/compare.py", "trtexec_compare.py"), (GPU_SCRIPT, GPU_SCRIPT)):
        (folder / name).write_text((_HERE / source).read_text(encoding="utf-8"), encoding="utf-8")


def _settings(served: ServedEngine, cases: Sequence[str], tool: str) -> str:
    """Return the shell variables of the script."""
    values = {
        "NAME": served.name,
        "OWN_TOOL": tool,
        "ONNX": served.onnx.name,
        "ENGINE": served.engine.name,
        "ENGINE_BYTES": str(content_bytes(served.engine)),
        "CAPABILITY": served.capability or "",
        **{f"{which}_SHAPES": _profile(served, place) for place, which in enumerate(("MIN", "OPT", "MAX"))},
        "CASES": " ".join(cases),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _profile(served: ServedEngine, place: int) -> str:
    """Return the min, opt or max shapes of the inputs, for which the engine was built."""
    return ",".join(
        f"{_spelt(value.name)}:{'x'.join(str(_size(served, size, place)) for size in value.shape)}"
        for value in _dynamic(served)
    )


def _size(served: ServedEngine, size: int | str | None, place: int) -> int:
    return size if isinstance(size, int) else served.dimensions[str(size)][place]


def _dynamic(served: ServedEngine) -> list[Value]:
    """Return the inputs with a dynamic dimension; trtexec accepts shapes only for them."""
    return [value for value in served.signature.inputs if not all(isinstance(size, int) for size in value.shape)]


def _cases(place: Path, served: ServedEngine, expected: Expected) -> Iterator[tuple[str, Path]]:
    """Write each case into its folder, and yield its name and folder."""
    of_tokens = token_outputs(expected.outputs)
    for reference, plain in zip(expected.outputs, expected.of_float, strict=True):
        name = "x".join(str(size) for size in batch_shape(reference.inputs) if size is not None)
        folder = place / name
        folder.mkdir()
        files, shapes = [], []
        for index, value in enumerate(served.signature.inputs):
            array = as_array(reference.inputs[value.name], value.dtype)
            file = folder / f"{_file_stem(index, value.name)}.bin"
            file.write_bytes(np.ascontiguousarray(array).tobytes())
            files.append(f"{_spelt(value.name)}:{file.relative_to(place.parent)}")
            if value in _dynamic(served):
                shapes.append(f"{_spelt(value.name)}:{'x'.join(map(str, array.shape))}")
        (folder / "inputs").write_text(",".join(files) + "\n", encoding="utf-8")
        (folder / "shapes").write_text(",".join(shapes) + "\n", encoding="utf-8")
        document = {
            "tolerance": {
                "decibels": expected.bound.decibels,
                "beyond_db": expected.bound.beyond_db,
                "text": str(expected.bound),
            },
            "outputs": [
                _output(folder, index, value, reference, plain, value.name in of_tokens)
                for index, value in enumerate(served.signature.outputs)
                if value.name in reference.outputs
            ],
        }
        (folder / "case.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        yield name, folder


def _output(
    folder: Path, index: int, value: Value, reference: Reference, plain: Reference, of_tokens: bool
) -> dict[str, Any]:
    """Write the expected values of one output, and return the description of its comparison."""
    assert reference.rows is not None
    rows, mask = list(reference.rows), reference.inputs.get("attention_mask")
    unmasked = mask[rows].numpy().astype(bool) if mask is not None and of_tokens else None
    files = {}
    for which, outputs in (("expected", reference.outputs), ("float", plain.outputs)):
        array = outputs[value.name] if unmasked is None else outputs[value.name][unmasked]
        files[which] = f"{_file_stem(index, value.name)}.{which}.npy"
        np.save(folder / files[which], np.ascontiguousarray(array, dtype="<f4"))
    return {
        "name": value.name,
        "dimensions": [batch_shape(reference.inputs)[0], *reference.outputs[value.name].shape[1:]],
        "rows": rows,
        "mask": None if unmasked is None else unmasked.astype(int).tolist(),
        **files,
    }


def _file_stem(index: int, name: str) -> str:
    """Return a valid file name for a tensor."""
    return f"{index}.{re.sub(r'[^A-Za-z0-9_]', '-', name)}"


def _spelt(name: str) -> str:
    """Return a tensor name for trtexec, quoted if necessary."""
    return name if _PLAIN.fullmatch(name) else f"'{name}'"
