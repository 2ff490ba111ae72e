"""The check of a TensorRT engine where there is a GPU, and neither PyTorch nor this package: run_on_gpu.sh and gpu/.

gpu/settings.sh     what the script reads: files, shapes of the profile, names of the cases
gpu/compare.py      the comparison, of the standard library alone
gpu/config.pbtxt    for a model repository with the engine that the script builds
gpu/BATCHxTOKENS/   a case: inputs as raw bytes (.bin), expected outputs (.npy), ``case.json`` says how to compare them
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.engine_file import content_bytes
from quantizer.pipeline.compare_outputs import Reference, Tolerance, token_outputs
from quantizer.pipeline.context import as_array
from quantizer.pipeline.triton import CONFIG_NAME, ServedEngine, config_text
from quantizer.qdq.structure import Value
from quantizer.tasks import batch_shape

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
    for name, source in ((f"{CASES}/compare.py", "compare_alone.py"), (GPU_SCRIPT, GPU_SCRIPT)):
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
