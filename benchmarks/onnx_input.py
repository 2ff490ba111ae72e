"""A float ONNX file on this package's road and on ONNX Runtime's own: distance from float, and speed, one thread.

    python benchmarks/onnx_input.py FILE.onnx NAME=ROWSxSIZExSIZE... [FIXED=NUMBER...]

``x=4x3x48x320`` is the shape of a batch of an input: images are lines of random words, other floats are drawn from a
normal distribution, whole numbers from 0 to 999, 1 for a mask and 0 for a type. Four batches calibrate both roads:
``Quantizer(backend=...)`` as it is by default, and ONNX Runtime's own ``quantize_static`` (MinMax, Q/DQ, its other
defaults, and the same with a scale for each channel of a weight). A fifth batch tells the SQNR to the float file in
ONNX Runtime. Latencies are medians of one interleaved run at the shape of a batch.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from common import heading
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from PIL import Image, ImageDraw, ImageFont

import quantizer
from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, interleaved_latency, load_engine
from quantizer.export.exporter import export_onnx

ROUNDS = 30
BATCHES = 5
Arrays = dict[str, np.ndarray[Any, Any]]


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Batches, one after the other."""

    def __init__(self, batches: list[Arrays]) -> None:
        self.batches = iter(batches)

    def get_next(self) -> Arrays | None:
        """Return the next batch; None after the last."""
        return next(self.batches, None)


def session(path: Path) -> onnxruntime.InferenceSession:
    """Return a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def drawn(name: str, kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Return random values of an input."""
    random = np.random.default_rng(seed)
    if kind == "tensor(float)" and len(shape) == 4 and shape[1] == 3:
        return np.ascontiguousarray(np.stack([words(random, *shape[2:]) for _ in range(shape[0])]))
    if kind == "tensor(float)":
        return random.normal(size=shape).astype(np.float32)
    if "mask" in name or "type" in name:
        return np.full(shape, "mask" in name, np.int64)
    return random.integers(0, 1000, shape)


def words(random: np.random.Generator, height: int, width: int) -> np.ndarray[Any, Any]:
    """Return an image [3, H, W] from -1 to 1 of lines of random letters, on a background of another colour."""
    dark, light = (tuple(random.integers(low, low + 100, 3).tolist()) for low in (0, 150))
    image = Image.new("RGB", (width, height), light)
    size = min(height - 8, 40)
    for top in range(4, height - size, size + 8):
        text = "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz     "), 2 * width // size))
        ImageDraw.Draw(image).text((4, top), text, fill=dark, font=ImageFont.load_default(size))
    noisy = np.asarray(image, np.float32) + random.normal(scale=8, size=(height, width, 3))
    return (noisy.transpose(2, 0, 1) / 127.5 - 1).astype(np.float32)


def sqnr_db(found: list[Any], expected: list[Any]) -> float:
    """Return how far all outputs together are from the expected ones."""
    noise = sum(float(np.square(np.asarray(a, np.float64) - b).sum()) for a, b in zip(found, expected, strict=True))
    return float(10 * np.log10(sum(float(np.square(b.astype(np.float64)).sum()) for b in expected) / max(noise, 1e-30)))


def theirs(path: Path, batches: list[Arrays], folder: Path) -> dict[str, Callable[[Arrays], list[Any]]]:
    """Return what ONNX Runtime makes of the file."""
    found: dict[str, Callable[[Arrays], list[Any]]] = {"ONNX Runtime, float": partial(session(path).run, None)}
    prepared = folder / "prepared.onnx"
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    for name, per_channel in (("quantize_static", False), ("quantize_static, per channel", True)):
        made, started = folder / f"{name}.onnx", time.perf_counter()
        quantize_static(
            str(prepared),
            str(made),
            Reader(batches),
            quant_format=QuantFormat.QDQ,
            calibrate_method=CalibrationMethod.MinMax,
            per_channel=per_channel,
        )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        try:
            found[name] = partial(session(made).run, None)
        except InvalidGraph as error:
            # Scales of channels need opset 13, to which it does not bring older files.
            print(f"{name}: ONNX Runtime does not load its own file: {str(error)[-90:]}", flush=True)
    return found


def ours(model: Any, batches: list[Arrays], folder: Path) -> dict[str, Callable[[Arrays], list[Any]]]:
    """Return the engines of this package."""
    tensors = [{model.arguments[key]: torch.from_numpy(held) for key, held in batch.items()} for batch in batches]
    found: dict[str, Callable[[Arrays], list[Any]]] = {}
    plain = export_onnx(model, folder / "float.onnx", tensors[0], opset=20, dtype=torch.float32)
    for backend in ("onnxruntime", "openvino"):
        started = time.perf_counter()
        made = Quantizer(backend=backend)
        made.calibrate(model, tensors)
        path = made.export(made.quantize(model), folder / f"{backend}.onnx", tensors[0])
        print(f"ours, {backend}: {time.perf_counter() - started:.0f} s, {counts(made)}", flush=True)
        kinds = {f"ours, {backend}": path} | ({"OpenVINO, float": plain} if backend == "openvino" else {})
        for name, onnx in kinds.items():
            build_engine(backend, onnx, folder / f"{name}.engine", BuildOptions())
            engine = load_engine(backend, folder / f"{name}.engine", threads=1)
            found[name] = partial(_run, engine, model.arguments)
    return found


def counts(made: Quantizer) -> str:
    """Return how many sites of each kind are quantized."""
    kinds = sorted({entry.kind for entry in made.plan.values()})
    quantized = {kind: sum(entry.quantized for entry in made.plan.values() if entry.kind == kind) for kind in kinds}
    return ", ".join(f"{count} {kind}" for kind, count in quantized.items())


def _run(engine: Any, arguments: dict[str, str], batch: Arrays) -> list[Any]:
    made = engine({arguments[name]: array for name, array in batch.items()})
    return [made[name] for name in engine.output_names]


def main() -> None:
    """Print the table of one file."""
    path = Path(sys.argv[1])
    given = dict(word.split("=") for word in sys.argv[2:])
    torch.set_num_threads(1)
    kinds = {value.name: value.type for value in session(path).get_inputs()}
    shapes = {name: tuple(map(int, text.split("x"))) for name, text in given.items() if "x" in text}
    fixed = {name: int(text) for name, text in given.items() if "x" not in text}
    batches = [
        {name: drawn(name, kinds[name], shape, seed) for name, shape in shapes.items()} for seed in range(BATCHES)
    ]
    model = quantizer.from_onnx(path, fixed=fixed)
    whole = [
        {**batch, **{name: np.array(value) for name, value in fixed.items() if name in kinds}} for batch in batches
    ]
    expected = session(path).run(None, whole[-1])
    with torch.no_grad():
        made = model(**{model.arguments[name]: torch.from_numpy(held) for name, held in batches[-1].items()})
    outputs = list(made.values()) if isinstance(made, dict) else [made]
    most = max(float(np.abs(a.numpy() - b).max()) for a, b in zip(outputs, expected, strict=True))
    print(heading(f"{path.name}, {' '.join(sys.argv[2:])}: imported, at most {most:.1e} from ONNX Runtime"))
    with tempfile.TemporaryDirectory() as scratch:
        engines = {name: (run, whole[-1]) for name, run in theirs(path, whole[:-1], Path(scratch)).items()}
        engines |= {name: (run, batches[-1]) for name, run in ours(model, batches[:-1], Path(scratch)).items()}
        samples = interleaved_latency({name: partial(run, batch) for name, (run, batch) in engines.items()}, ROUNDS)
        base = samples["ONNX Runtime, float"]
        for name, (run, batch) in engines.items():
            ratio = statistics.median(a / b for a, b in zip(base, samples[name], strict=True))
            milliseconds = 1000 * statistics.median(samples[name])
            print(f"{name:30} {milliseconds:8.1f} ms  {ratio:5.2f}x  {sqnr_db(run(batch), expected):6.1f} dB")


if __name__ == "__main__":
    main()
