"""Convolutional nets on ONNX Runtime, one thread: our engine, ``quantize_static`` and float, interleaved.

    python benchmarks/onnxruntime_convolutions.py [NET...] [--preset PRESET] [--rounds N]

The engine is that of ``Quantizer(backend="onnxruntime")`` as it is by default. ``quantize_static`` makes a Q/DQ file
with scales for each channel of a weight, UINT8 activations and INT8 weights, calibrated on the same batches. SQNR is
that of the output, to PyTorch's in float, on batches that calibrated nothing. The time is that of one batch; each ratio
is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from common import SHARED, heading
from convolutional_nets import Detector, MobileNetV2, ResNet18, UNet, Vocoder, settled
from efficientnet_lite import efficientnet_lite0
from onnx_input import Reader, session
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from PIL import Image
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine

CALIBRATION, TEST = 16, 8
INTEGER = {"QLinearConv", "ConvInteger"}
FLOAT = {"Conv", "FusedConv", "NhwcFusedConv"}


def images(size: int, count: int, batch: int) -> list[Tensor]:
    """Batches [batch, 3, size, size] of photographs, about -1 to 1."""
    paths = sorted((SHARED / "data/imagenet1k-sample").glob("*.jpg"))[:: 500 // (count * batch)][: count * batch]
    read = [np.asarray(Image.open(path).convert("RGB").resize((size, size)), np.float32) for path in paths]
    every = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2).sub(127).div(128).contiguous()
    return list(every.split(batch))


def mels(frames: int, count: int) -> list[Tensor]:
    """Smooth random frames [1, 80, frames], as loud as a logarithmic mel spectrogram is."""
    drawn = torch.randn(count, 80, frames)
    smooth = nn.functional.avg_pool1d(nn.functional.avg_pool1d(drawn, 5, 1, 2).transpose(1, 2), 5, 1, 2).transpose(1, 2)
    return list((smooth * 8 - 4).split(1))


def nets(names: list[str]) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]]:
    """Each net, and its batches."""
    total = CALIBRATION + TEST
    every: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
        "ResNet-18": (ResNet18, partial(images, 224, total, 1)),
        "MobileNetV2": (MobileNetV2, partial(images, 224, total, 1)),
        "EfficientNet-Lite0": (efficientnet_lite0, partial(images, 224, total, 1)),
        "U-Net": (UNet, partial(images, 128, total, 1)),
        "Detector": (Detector, partial(images, 256, total, 1)),
        "HiFi-GAN": (Vocoder, partial(mels, 64, total)),
    }
    return {name: made for name, made in every.items() if not names or name in names}


def sqnr_db(found: list[Tensor], expected: list[Tensor]) -> float:
    """The signal-to-noise ratio over all batches, in dB."""
    noise = sum(float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True))
    return 10 * float(np.log10(sum(float(b.double().square().sum()) for b in expected) / max(noise, 1e-30)))


def operators(path: Path) -> collections.Counter[str]:
    """The operators that ONNX Runtime runs of a file."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.optimized_model_filepath = 3, f"{folder}/optimized.onnx"
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return collections.Counter(node.op_type for node in onnx.load(f"{folder}/optimized.onnx").graph.node)


def measured(name: str, model: nn.Module, batches: list[Tensor], preset: str | None, rounds: int, verbose: bool) -> str:
    """Return the row of one net."""
    calibration, test = batches[:CALIBRATION], batches[CALIBRATION:]
    with torch.no_grad():
        expected = [model(batch) for batch in test]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.perf_counter()
        quantizer = Quantizer(backend="onnxruntime", **({} if preset is None else {"preset": preset}))
        quantizer.calibrate(model, calibration, progress=False)
        onnx_file = quantizer.export(quantizer.quantize(model), folder / "ours.onnx", calibration[0])
        build_engine("onnxruntime", onnx_file, folder / "ours.engine", BuildOptions())
        took = time.perf_counter() - started
        engine = load_engine("onnxruntime", folder / "ours.engine", threads=1)
        torch.onnx.export(model, (test[0],), folder / "float.onnx", dynamo=True, input_names=["x"], verbose=False)
        quant_pre_process(str(folder / "float.onnx"), str(folder / "prepared.onnx"))
        quantize_static(
            str(folder / "prepared.onnx"),
            str(folder / "static.onnx"),
            Reader([{"x": batch.numpy()} for batch in calibration]),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        plain, static = session(folder / "float.onnx"), session(folder / "static.onnx")
        (given,) = (spec.name for spec in engine.inputs)
        run: dict[str, Callable[[Tensor], Tensor]] = {
            "float": lambda x: torch.from_numpy(plain.run(None, {"x": x.numpy()})[0]),
            "static": lambda x: torch.from_numpy(static.run(None, {"x": x.numpy()})[0]),
            "ours": lambda x: torch.from_numpy(next(iter(engine({given: x.numpy()}).values()))),
        }
        far = {key: sqnr_db([call(batch) for batch in test], expected) for key, call in run.items()}
        times: dict[str, list[float]] = {key: [] for key in run}
        for turn in range(rounds + 3):
            for key in list(run) if turn % 2 else list(run)[::-1]:
                started = time.perf_counter()
                run[key](test[0])
                times[key].append(time.perf_counter() - started)
        times = {key: each[3:] for key, each in times.items()}
        ratio = {
            key: statistics.median(o / t for o, t in zip(times["ours"], each, strict=True))
            for key, each in times.items()
        }
        middle = {key: 1e3 * statistics.median(each) for key, each in times.items()}
        least = {key: 1e3 * min(each) for key, each in times.items()}
        ran = operators(folder / "ours.engine")
        integer, left = sum(ran[kind] for kind in INTEGER), sum(ran[kind] for kind in FLOAT)
        if verbose:
            print(
                "ours  ",
                dict(ran),
                "\nstatic",
                dict(operators(folder / "static.onnx")),
                f"\n{took:.0f} s; least",
                least,
            )
    figures = [
        f"{integer} of {integer + left}",
        *(f"{middle[key]:.2f}" for key in ("float", "static", "ours")),
        *(f"{ratio[key]:.2f}" for key in ("float", "static")),
        f"{least['ours'] / least['static']:.2f}",
        *(f"{far[key]:.1f}" for key in ("static", "ours")),
    ]
    return f"| {name} | {' | '.join(figures)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--preset")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(heading("Convolutional nets on ONNX Runtime"))
    print(
        "| net | convolutions in INT8 | float, ms | quantize_static, ms | ours, ms | ours / float | ours / static | "
        "least ours / least static | quantize_static, dB | ours, dB |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, (make, load) in nets(options.nets).items():
        torch.manual_seed(0)
        batches = load()
        model = make()
        if name != "EfficientNet-Lite0":
            model = settled(model, batches[:CALIBRATION])
        print(measured(name, model, batches, options.preset, options.rounds, options.verbose), flush=True)


if __name__ == "__main__":
    main()
