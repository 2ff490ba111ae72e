"""How long until the result: ``quantize_model`` with all defaults beside NNCF, from the float model to an engine.

    python benchmarks/time_to_result.py [NET]...

Each job runs in a process of its own, first ours and then NNCF, so that no caches are shared. Imports do not count.
NNCF includes the conversion of the model and the compilation in OpenVINO. Processor seconds include child processes.
The networks of a user's own have random weights, with which the time is the same.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from common import SHARED, heading, minilm_sst2, sst2
from data import imagenet_sample
from efficientnet_lite import efficientnet_lite0
from torch import Tensor, nn
from transformers import AutoModel

Job = Callable[[], tuple[nn.Module, Sequence[Any]]]


def _images(size: int, count: int = 16) -> list[Tensor]:
    """Return batches of eight smooth random images."""
    generator = torch.Generator().manual_seed(0)
    coarse = (torch.randn(8, 3, size // 8, size // 8, generator=generator) for _ in range(count))
    return [nn.functional.interpolate(batch, size=(size, size), mode="bilinear") for batch in coarse]


def two_convolutions() -> tuple[nn.Module, Sequence[Any]]:
    """The network of the first example for images."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    return nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval(), _images(32)


class UNet(nn.Module):
    """Two steps down and two up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 32), _block(32, 64), _block(64, 128)])
        self.up = nn.ModuleList([_block(128 + 64, 64), _block(64 + 32, 32)])
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for block, skip in zip(self.up, (second, first), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return self.head(x)


def _block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


def unet() -> tuple[nn.Module, Sequence[Any]]:
    """A U-Net for images of 64 x 64."""
    return UNet().eval(), _images(64)


def depthwise() -> tuple[nn.Module, Sequence[Any]]:
    """A net of depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [_block(3, 32)]
    for width in (32, 64, 128):
        layers += [nn.Conv2d(width, width, 3, padding=1, stride=2, groups=width), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).eval(), _images(64)


class Recurrent(nn.Module):
    """Two LSTM layers and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 32, 64, generator=generator) for _ in range(16)]


def lstm() -> tuple[nn.Module, Sequence[Any]]:
    """An LSTM over sequences of 32 steps."""
    return Recurrent().eval(), _sequences()


class Attention(nn.Module):
    """A transformer block around ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(64, 4, batch_first=True), nn.LayerNorm(64)
        self.feed, self.head = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head((x + self.feed(x)).mean(1))


def attention() -> tuple[nn.Module, Sequence[Any]]:
    """A transformer of the user's own."""
    return Attention().eval(), _sequences()


def minilm() -> tuple[nn.Module, Sequence[Any]]:
    """MiniLM, fine-tuned on SST-2, with 128 texts."""
    model, task = minilm_sst2()
    return model, task.batches(sst2("train", 128))


def efficientnet() -> tuple[nn.Module, Sequence[Any]]:
    """EfficientNet-Lite0 with 128 images."""
    images = imagenet_sample()[0][:128]
    return efficientnet_lite0(), list(images.split(16))


def dinov2() -> tuple[nn.Module, Sequence[Any]]:
    """DINOv2-small with 128 images."""
    images = imagenet_sample()[0][:128]
    model = AutoModel.from_pretrained(SHARED / "models/dinov2-small", dtype=torch.float32).eval()
    return model, list(images.split(16))


NETS: dict[str, Job] = {
    job.__name__: job for job in (two_convolutions, unet, depthwise, lstm, attention, minilm, efficientnet, dinov2)
}


_IMPORTED = {
    "ours": ["quantizer.pipeline.quantize_model", "onnx", "onnxruntime", "onnxscript", "openvino", "torch.export"],
    "nncf": ["nncf", "openvino"],
}
"""Libraries that each tool imports in any job."""


def _ours(model: nn.Module, batches: Sequence[Any]) -> str:
    import quantizer

    result = quantizer.quantize_model(model, batches)
    assert result.record.choice is not None
    return str(result.record.choice.candidates[0].name)


def _nncf(model: nn.Module, batches: Sequence[Any]) -> str:
    import nncf
    import openvino

    arguments = batches[0]
    example = dict(arguments) if isinstance(arguments, dict) else arguments
    with torch.no_grad():
        converted = openvino.convert_model(model, example_input=example)
    data = nncf.Dataset(
        [
            {name: value.numpy() for name, value in batch.items()} if isinstance(batch, dict) else batch
            for batch in batches
        ]
    )
    kind = nncf.ModelType.TRANSFORMER if any("Attention" in type(part).__name__ for part in model.modules()) else None
    quantized = nncf.quantize(converted, data, model_type=kind)
    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(quantized, Path(folder) / "model.xml")
        openvino.compile_model(quantized, "CPU")
    return "NNCF"


def _measured(tool: str, name: str) -> dict[str, Any]:
    """Run a job in this process, and return its seconds."""
    # Imports do not count.
    for module in _IMPORTED[tool]:
        import_module(module)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = NETS[name]()
    began, before = time.perf_counter(), _processor_s()
    engine = {"ours": _ours, "nncf": _nncf}[tool](model, batches)
    return {"engine": engine, "wall_s": time.perf_counter() - began, "processor_s": _processor_s() - before}


def _processor_s() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main(names: Sequence[str]) -> None:
    """Print a row for each network."""
    print(heading("Time to the result"))
    print("| network | ours, s | processor s | NNCF, s | processor s | ours relative to NNCF | engine |")
    print("|---|---|---|---|---|---|---|")
    for name in names or NETS:
        rows = {tool: _in_process(tool, name) for tool in ("ours", "nncf")}
        ours, nncf = rows["ours"], rows["nncf"]
        cells = [f"{row[key]:.1f}" for row in (ours, nncf) for key in ("wall_s", "processor_s")]
        ratio = f"{ours['wall_s'] / nncf['wall_s']:.1f}x"
        print(f"| {name} | {' | '.join(cells)} | {ratio} | {ours['engine']} |", flush=True)


def _in_process(tool: str, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", tool, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tool} on {name} failed: {done.stderr.strip().splitlines()[-1]}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(_measured(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
