"""Files for a server of Triton, and the check of an engine on a GPU.

Further names of a file: links, which take no room, and copies where the file system has none.

gpu/settings.sh     what the script reads: files, shapes of the profile, names of the cases
gpu/compare.py      the comparison, of the standard library alone
gpu/config.pbtxt    for a model repository with the engine that the script builds
gpu/BATCHxTOKENS/   a case: inputs as raw bytes (.bin), expected outputs (.npy), ``case.json`` says how to compare them
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
    not_quantized = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{not_quantized}"'


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


GPU_SCRIPT = "run_on_gpu.sh"
CASES = "gpu"
_HERE = Path(__file__).parent
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Outputs that an engine is compared with, in one reference for each batch.

    Attributes:
        outputs: those of the model that the engine was made of: the frozen proxy, or the float model.
        of_float: those of the float model.
        bound: the condition on the engine's outputs.
    """

    outputs: Sequence[Reference]
    of_float: Sequence[Reference]
    bound: Tolerance


def write_gpu_check(folder: Path, served: ServedEngine, expected: Expected, tool: str) -> None:
    """Write the script and what it reads into the folder of an engine, which the program ``tool`` runs."""
    place = folder / CASES
    place.mkdir()
    cases = dict(_cases(place, served, expected))
    (place / "settings.sh").write_text(_settings(served, list(cases), tool), encoding="utf-8")
    (place / CONFIG_NAME).write_text(config_text(served), encoding="utf-8")
    for name, source in ((f"{CASES}/compare.py", "trtexec_compare.py"), (GPU_SCRIPT, GPU_SCRIPT)):
        (folder / name).write_text((_HERE / source).read_text(encoding="utf-8"), encoding="utf-8")


def _settings(served: ServedEngine, cases: Sequence[str], tool: str) -> str:
    """Return the shell's assignments that the script reads."""
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
    """Return the smallest, usual or largest shapes of the inputs, as the engine was built for them."""
    return ",".join(
        f"{_spelt(value.name)}:{'x'.join(str(_size(served, size, place)) for size in value.shape)}"
        for value in _dynamic(served)
    )


def _size(served: ServedEngine, size: int | str | None, place: int) -> int:
    return size if isinstance(size, int) else served.dimensions[str(size)][place]


def _dynamic(served: ServedEngine) -> list[Value]:
    """Return the inputs with a dynamic dimension: trtexec takes no shapes of others."""
    return [value for value in served.signature.inputs if not all(isinstance(size, int) for size in value.shape)]


def _cases(place: Path, served: ServedEngine, expected: Expected) -> Iterator[tuple[str, Path]]:
    """Write each case into a folder of its own, and yield its name and that folder."""
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
    """Write what is expected of one output, and return how to compare it."""
    assert reference.rows is not None
    rows, mask = list(reference.rows), reference.inputs.get("attention_mask")
    kept = mask[rows].numpy().astype(bool) if mask is not None and of_tokens else None
    files = {}
    for which, outputs in (("expected", reference.outputs), ("float", plain.outputs)):
        array = outputs[value.name] if kept is None else outputs[value.name][kept]
        files[which] = f"{_file_stem(index, value.name)}.{which}.npy"
        np.save(folder / files[which], np.ascontiguousarray(array, dtype="<f4"))
    return {
        "name": value.name,
        "dimensions": [batch_shape(reference.inputs)[0], *reference.outputs[value.name].shape[1:]],
        "rows": rows,
        "mask": None if kept is None else kept.astype(int).tolist(),
        **files,
    }


def _file_stem(index: int, name: str) -> str:
    """Return a file name for a tensor, which may have a name that no file can have."""
    return f"{index}.{re.sub(r'[^A-Za-z0-9_]', '-', name)}"


def _spelt(name: str) -> str:
    """Return a tensor's name as trtexec reads it: in quotes where it has a colon or another mark."""
    return name if _PLAIN.fullmatch(name) else f"'{name}'"
