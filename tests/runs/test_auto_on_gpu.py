"""The fastest engine on a GPU, which the CPU stands in for: candidates, choice, files, report and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gpu_stand_in import NAME, gpu_stand_in
from rich.console import Console
from torch import Tensor, nn

for _package in ("onnx", "onnxscript", "jinja2"):
    pytest.importorskip(_package, reason="quantize_model needs enginequant[onnx,report]")

import quantizer
from quantizer.config.schema import check_run
from quantizer.engines import for_this_gpu
from quantizer.engines.candidates import usable_backends
from quantizer.engines.for_this_gpu import gpu_candidates, gpu_variants
from quantizer.engines.torch_engine import gpu_file
from quantizer.errors import ConfigError, EngineError, QuantizerError
from quantizer.pipeline import choose_engine, convert_options
from quantizer.pipeline.quantize_model import _device_of
from quantizer.utils import gpu


class Net(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))
        return head


def _data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, 32, generator=generator) for _ in range(8)]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU."""
    with gpu_stand_in() as patch:
        yield patch


def _times(patch: pytest.MonkeyPatch, fastest: str) -> None:
    """Let the engine of a format be the fastest; of others, the fewer bits the faster."""
    usual = {"int8": 2.0, "fp8": 3.0}

    def times(models: Mapping[str, Any], batch: Any, *_: Any, **__: Any) -> dict[str, list[float]]:
        for model in models.values():
            choose_engine.as_predictor(model)(batch)
        return {name: [1.0 if name.endswith(f" {fastest}") else usual.get(name.split()[1], 4.0)] * 3 for name in models}

    patch.setattr(choose_engine, "times_of", times)


def _quantized(**settings: Any) -> Any:
    torch.manual_seed(0)
    return quantizer.quantize_model(Net().eval(), _data(), **{"preset": "plain", "device": "cuda", **settings})


@pytest.fixture(scope="module")
def made() -> Any:
    """A result of a machine with a GPU on which FP8 is the fastest, with its folder."""
    with gpu_stand_in() as patch:
        _times(patch, "fp8")
        result = _quantized()
        # It is loaded at the first access.
        assert result.engine is not None
    return result


def test_all_formats_are_compared_and_the_fastest_is_chosen(made: Any) -> None:
    choice = made.record.choice
    assert [entry.name for entry in choice.candidates] == ["torch-cuda fp8", "torch-cuda int8", "torch-cuda float16"]
    assert all(len(entry.milliseconds) == len(choice.shapes) == 2 for entry in choice.candidates)
    assert choice.headline == "torch-cuda fp8 is the fastest; in float it is torch-cuda float16"
    assert (choice.gpu, choice.instructions) == (NAME, None)
    assert [line.partition(":")[0] for line in choice.missing] == ["tensorrt", "tensorrt-rtx"]
    record = made.record
    assert record.engine.backend == "torch-cuda"
    settings = record.config["quantizer"]
    assert (settings["backend"], settings["dtype"], record.config["engine"]["device"]) == ("torch-cuda", "fp8", "cuda")
    assert record.machine["gpu"] == NAME
    assert {share.precision for share in record.inspection.shares if share.products} == {"fp8"}
    text = made.summary()
    for line in (
        "torch-cuda fp8 is the fastest",
        "not tried: tensorrt: 'tensorrt' is not installed",
        "runs    FP8 100%",
    ):
        assert line in text


def test_the_saved_folder_is_for_the_gpu(made: Any, tmp_path: Path) -> None:
    folder = made.save(tmp_path / "saved")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    settings = config["quantizer"]
    assert (settings["backend"], settings["dtype"], config["engine"]["device"]) == ("torch-cuda", "fp8", "cuda")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["choice"]["gpu"] == NAME
    assert NAME in (folder / "report.html").read_text(encoding="utf-8")
    x = _data()[0]
    with gpu_stand_in():
        loaded = quantizer.load(folder)
        assert torch.equal(loaded(x), made.engine(x))
    with pytest.raises(EngineError, match=r"cannot load .*model\.engine: torch sees no NVIDIA GPU on this machine"):
        quantizer.load(folder)
    assert made.quantizer.config.dtype == "fp8"


def test_a_named_format_is_the_only_one(patch: pytest.MonkeyPatch) -> None:
    _times(patch, "float16")
    result = _quantized(dtype="int8", backend=["torch-cuda"], device=None)
    names = [entry.name for entry in result.record.choice.candidates]
    assert names == ["torch-cuda float16", "torch-cuda int8"]
    headline = result.record.choice.headline
    assert headline.startswith("no INT8 or FP8 engine is faster than float on this GPU, so torch-cuda float16 is deliv")


class _Large(nn.Module):
    """Values beyond float16 between two layers, and within it elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x) * 1e5 * 1e-5))
        return y


def test_where_float16_overflows_bfloat16_is_compared(patch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="their values exceed float16"):
        result = quantizer.quantize_model(_Large().eval(), _data(), preset="plain", device="cuda", dtype="int8")
    candidates = {entry.name: entry for entry in result.record.choice.candidates}
    assert "does not compute the same as the model" in candidates["torch-cuda float16"].verdict
    assert candidates["torch-cuda bfloat16"].milliseconds


def test_a_model_without_layers_for_the_kernels(patch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv1d(6, 16, 3)).eval()
    with pytest.raises(EngineError, match=r"no quantized engine is correct .*no operation of this model can be quant"):
        quantizer.quantize_model(net, _data(), preset="plain", device="cuda", dtype="int8")


def test_engines_that_do_not_fit_into_memory_are_reported(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    patch.setattr(gpu_file, "engine_of", fail)
    patch.setattr("quantizer.engines.measure.in_own_process", lambda task, name, words, **_: _run(task, name, words))
    with pytest.raises(EngineError, match=r"no engine is correct.*torch-cuda int8: failed: .*free memory of the GPU"):
        _quantized(dtype="int8")


def _run(task: str, name: str, words: Any) -> Any:
    from quantizer.engines import measure

    return measure.carried_out(measure._request(task, name, words))


def test_the_backends_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    missing = ("tensorrt: 'tensorrt' is not installed: run  pip install 'enginequant[tensorrt]'",)
    assert gpu_candidates(["torch-cuda", "tensorrt"]) == (("torch-cuda",), missing)
    patch.setattr(for_this_gpu.backends["tensorrt"].__class__, "check", lambda *_: None)
    assert gpu_candidates()[0] == ("tensorrt", "tensorrt-rtx", "torch-cuda")
    assert usable_backends(["torch-cuda"])[0] == ("torch-cuda",)
    patch.setattr(gpu, "capability", lambda: (7, 5))
    reason = "torch-cuda: the GPU has compute capability 7.5, but the kernels need 8.0 or later; use the CPU"
    assert gpu_candidates() == (("tensorrt", "tensorrt-rtx"), (reason,))


def test_nothing_runs_on_the_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(for_this_gpu, "find_spec", lambda _: None)
    text = r"no engine runs on NVIDIA H200 .*torch-cuda: 'triton' is not installed: run .*; use device cpu for the CPU"
    with pytest.raises(EngineError, match=text):
        _quantized()
    with pytest.raises(EngineError, match=text):
        quantizer.Quantizer(backend=["torch-cuda"])


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_present", lambda: False)
    with pytest.raises(EngineError, match=r"torch sees no NVIDIA GPU on this machine.*use device cpu, or name one b"):
        _quantized()


def test_devices_that_differ() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: got 'cuda', but openvino runs on the CPU; remove it, or"):
        _quantized(backend="openvino")
    with pytest.raises(
        ConfigError, match=r"engine\.device: got 'cpu', but torch-cuda runs on an NVIDIA GPU; remove it"
    ):
        _quantized(backend="torch-cuda", device="cpu")
    with pytest.raises(EngineError, match="auto compares engines on one device, but tensorrt runs on a GPU and the"):
        _quantized(backend=["openvino", "tensorrt"], device=None)


def test_an_engine_for_a_gpu_is_built_without_one() -> None:
    result = _quantized(backend="torch-cuda", device=None)
    record = result.record
    assert (record.engine.backend, record.choice, record.latency) == ("torch-cuda", None, None)
    assert record.engine.verified.startswith("not verified")
    assert "not verified: an engine of torch-cuda needs an NVIDIA GPU, which this machine lacks" in " ".join(
        result.summary().split()
    )
    with pytest.raises(EngineError, match="torch sees no NVIDIA GPU on this machine; use backend torch for the CPU"):
        _ = result.engine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_is_an_option_of_convert(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "my_pkg.net:build", "inputs": "my_pkg.net:batches", "output": tmp_path, "device": device}
    (config,) = convert_options.conversion_configs({**given, "quantization": True}, function=True)
    assert (config.engine.device, config.quantizer.backend) == (device, "auto")
    check_run(config)
    settings: dict[str, Any] = {}

    def stopped(*_: Any, **given: Any) -> Any:
        settings.update(given)
        raise QuantizerError("far enough")

    for name in ("from_onnx", "array_batches"):
        monkeypatch.setattr(convert_options, name, lambda *_, **__: [])
    monkeypatch.setattr(convert_options, "quantize_model", stopped)
    of_onnx = {"model": "net.onnx", "output": tmp_path / "out", "quantization": True, "calibration": "data.npz"}
    with pytest.raises(QuantizerError, match="far enough"):
        convert_options.convert_onnx({**of_onnx, "device": device}, False, Console())
    assert settings["device"] == device


def test_formats_of_a_gpu_are_checked_for_its_backends(tmp_path: Path) -> None:
    given = {"model": "my_pkg.net:build", "inputs": "my_pkg.net:batches", "output": tmp_path, "dtype": "fp8"}
    for device, words in (("cuda", []), ("cpu", ["openvino"])):
        settings = {**given, "device": device, "quantization": True}
        (config,) = convert_options.conversion_configs(settings, function=True)
        if words:
            with pytest.raises(ConfigError, match=words[0]):
                check_run(config)
        else:
            check_run(config)


def test_variants(patch: pytest.MonkeyPatch) -> None:
    names = ("tensorrt", "torch-cuda")
    found = gpu_variants(names, dtypes=("int8", "fp8"))
    assert [each.name for each in found if not each.is_spare] == [
        *("tensorrt float16", "tensorrt int8", "tensorrt fp8"),
        *("torch-cuda float16", "torch-cuda int8", "torch-cuda fp8"),
    ]
    assert [each.name for each in found if each.is_spare] == [
        *("torch-cuda bfloat16", "torch-cuda int8+bfloat16", "torch-cuda fp8+bfloat16"),
    ]
    precise = gpu_variants(names, dtypes=("int8",), precision="bfloat16")
    assert [each.name for each in precise] == [
        *("tensorrt float16", "tensorrt int8", "torch-cuda bfloat16", "torch-cuda int8+bfloat16"),
    ]
    patch.setattr(gpu, "capability", lambda: (8, 6))
    assert {each.dtype for each in gpu_variants(names, dtypes=("int8", "fp8"))} == {None, "int8"}
    with pytest.raises(EngineError, match=r"has no FP8, which needs compute capability 8\.9 or later; use int8"):
        gpu_variants(names, dtypes=("fp8",))


def test_the_device_of_a_model_decides_without_named_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = Net(), quantizer.QuantizerConfig(backend="auto")
    assert _device_of(model, settings) is None
    monkeypatch.setattr(nn.Module, "parameters", lambda _: iter([torch.empty(0, device="meta"), _OnGpu()]))
    assert _device_of(model, settings) == "cuda"
    assert _device_of(model, quantizer.QuantizerConfig(backend="onnxruntime")) is None
    assert _device_of(model, quantizer.QuantizerConfig(backend=["openvino", "torch"])) is None


class _OnGpu:
    device = torch.device("cuda")
