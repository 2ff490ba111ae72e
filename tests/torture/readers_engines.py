"""Engine files: one that is damaged is refused, or computes what it did."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from quantizer import Quantizer
from quantizer.engines import BuildOptions
from quantizer.engines import build_engine
from quantizer.engines import load_engine
from quantizer.engines.engine_file import write_engine
from quantizer.engines.tensorrt.engine import _read_rtx
from quantizer.targets.tensorrt_rtx import RTX_MAGIC
from torture import mutations
from torture.kinds import Kind
from torture.kinds import kind
from torture.readers_plans import data
from torture.readers_plans import model

ENGINE = "model.engine"


def exported(backend: str, path: Path) -> Path:
    """The Q/DQ file of a small model."""
    q, small = Quantizer(preset="plain", backend=backend), model()
    q.calibrate(small, [data()], progress=False)
    return q.export(q.quantize(small), path, (data(),))


def _make(backend: str, folder: Path) -> None:
    build_engine(backend, exported(backend, folder / "model.onnx"), folder / ENGINE, BuildOptions())


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


for _backend in ("openvino", "onnxruntime"):
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
kind(Kind(name="tensorrt-rtx", make=_make_head, files=(ENGINE,), how=(mutations.raw,), read=_look_at_head, exact=True))
