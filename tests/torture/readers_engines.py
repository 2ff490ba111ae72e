"""Engine files: one that is damaged is refused, or computes what it did; with a right checksum it is at least refused
by an error of ours. One engine in several threads computes what it does in one."""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from quantizer import Quantizer
from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.engines.engine_file import _MARK, _footer, read_engine, sign_onnx, write_engine
from quantizer.engines.tensorrt import _read_rtx
from quantizer.plan.targets.tensorrt import RTX_MAGIC
from torture import mutations
from torture.kinds import Kind, kind
from torture.readers_plans import data, model

ENGINE = "model.engine"


def exported(backend: str, path: Path) -> Path:
    """The Q/DQ file of a small model."""
    q, small = Quantizer(preset="plain", backend=backend), model()
    q.calibrate(small, [data()], progress=False)
    return q.export(q.quantize(small), path, (data(),))


def _make(backend: str, folder: Path) -> None:
    build_engine(backend, exported(backend, folder / "model.onnx"), folder / ENGINE, BuildOptions(compiled=False))


def _run(backend: str, folder: Path) -> list[bytes]:
    engine = load_engine(backend, folder / ENGINE)
    inputs = {spec.name: data().numpy().astype(spec.dtype) for spec in engine.inputs}
    return [np.ascontiguousarray(value).tobytes() for value in engine(inputs).values()]


def _make_head(folder: Path) -> None:
    content = RTX_MAGIC + bytes(12) + (400).to_bytes(8, "little") + bytes(range(256)) + bytes(120)
    write_engine(folder / ENGINE, memoryview(content))


def _look_at_head(folder: Path) -> bytes:
    """What a GPU would be given."""
    return _read_rtx(folder / ENGINE, verify=True)[0]


for _backend in ("openvino", "onnxruntime", "torch"):
    kind(
        Kind(
            name=_backend,
            make=partial(_make, _backend),
            files=(ENGINE,),
            how=(mutations.raw,),
            read=partial(_run, _backend),
            exact=True,
        )
    )


def _signed(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An engine file whose content is another, and whose checksum is right."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ENGINE
        path.write_bytes(content)
        if content.startswith(b"PK") or _MARK in content:
            whole, note = read_engine(path, verify=False)
            write_engine(path, memoryview(change(bytes(whole))), note)
        else:
            path.write_bytes(change(content[: _footer(len(content), content)[0]]))
            sign_onnx(path)
        return path.read_bytes()


def signed_raw(content: bytes, pick: random.Random) -> bytes:
    """Any bytes of what the library wrote."""
    return _signed(content, lambda whole: mutations.raw(whole, pick))


def signed_note(content: bytes, pick: random.Random) -> bytes:
    """What the line after the content says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ENGINE
        path.write_bytes(content)
        whole, note = read_engine(path, verify=False)
        ways = (mutations.raw, mutations.text)
        changed = {
            name: pick.choice(ways)(str(value).encode(), pick).decode(errors="replace") for name, value in note.items()
        }
        write_engine(path, whole, changed)
        return path.read_bytes()


def signed_parts(content: bytes, pick: random.Random) -> bytes:
    """A part of a torch engine: its description, or its tensors."""

    def change(whole: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        name = pick.choice(("engine.json", "engine.json", "engine.json", "weights.safetensors"))
        ways = {"engine.json": mutations.json_text, "weights.safetensors": mutations.safetensors_header}
        parts[name] = pick.choice((ways[name], ways[name], ways[name], mutations.raw))(parts[name], pick)
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for part, held in parts.items():
                archive.writestr(part, held)
        return stream.getvalue()

    return _signed(content, change)


def _load_run_and_inspect(backend: str, folder: Path) -> list[bytes]:
    made = _run(backend, folder)
    inspect_engine(backend, folder / ENGINE, sizes=InputSizes(2, 4), runs=1)
    return made


for _backend, _how in (
    ("openvino", (signed_raw, signed_raw, signed_note)),
    ("onnxruntime", (signed_raw,)),
    ("torch", (signed_parts, signed_parts, signed_raw)),
):
    kind(
        Kind(
            name=f"{_backend}-signed",
            make=partial(_make, _backend),
            files=(ENGINE,),
            how=_how,
            read=partial(_load_run_and_inspect, _backend),
        )
    )


_THREADS, _CALLS = 8, 5


def _make_for_threads(backend: str, folder: Path) -> None:
    _make(backend, folder)
    (folder / "inputs.bin").write_bytes(data().numpy().tobytes())


def _call_in_threads(backend: str, folder: Path) -> int:
    """Every thread has inputs of its own, of sizes of their own, made of a file that no two cases have alike."""
    engine = load_engine(backend, folder / ENGINE)
    (spec,) = engine.inputs
    seed = int.from_bytes(hashlib.sha256((folder / "inputs.bin").read_bytes()).digest()[:8], "little")
    draw = np.random.default_rng(seed)
    shape = data().shape
    given = [draw.standard_normal((1 + thread % 3, *shape[1:])).astype(spec.dtype) for thread in range(_THREADS)]
    expected = [list(engine({spec.name: array}).values()) for array in given]

    def work(thread: int) -> int:
        wrong = 0
        for _ in range(_CALLS):
            found = list(engine({spec.name: given[thread]}).values())
            wrong += not all(map(np.array_equal, found, expected[thread]))
        return wrong

    with ThreadPoolExecutor(_THREADS) as pool:
        wrong = sum(pool.map(work, range(_THREADS)))
    assert wrong == 0, f"{wrong} of {_THREADS * _CALLS} calls have results of others"
    return wrong


for _backend in ("openvino", "onnxruntime", "torch"):
    kind(
        Kind(
            name=f"{_backend}-threads",
            make=partial(_make_for_threads, _backend),
            files=("inputs.bin",),
            how=(mutations.raw,),
            read=partial(_call_in_threads, _backend),
        )
    )
kind(Kind(name="tensorrt-rtx", make=_make_head, files=(ENGINE,), how=(mutations.raw,), read=_look_at_head, exact=True))
