"""The whole way with the model on a GPU: proxies, calibration, sensitivity, training in bfloat16, several GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import ConvNet, batch, tiny
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quantizer import Quantizer, load, quantize_model
from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.export.exporter import export_onnx
from quantizer.tasks.metrics import sqnr_db

pytestmark = pytest.mark.gpu

Inputs = dict[str, Tensor]


@pytest.fixture
def device() -> str:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    return "cuda"


def _batches(device: str) -> list[Inputs]:
    return [{name: value.to(device) for name, value in batch("bert", seed=seed).items()} for seed in range(4)]


def _pictures(device: str) -> list[Tensor]:
    return [torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in range(4)]


def _first(model: nn.Module, given: Inputs | Tensor) -> Tensor:
    if isinstance(given, dict):
        return _hidden(model, given)
    with torch.no_grad():
        found: Tensor = model(given)
    return found


def _model(device: str) -> nn.Module:
    return tiny("bert").to(device)


def _hidden(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).last_hidden_state
    return found


def test_a_proxy_that_is_off_is_the_model_bit_for_bit(device: str) -> None:
    model = _model(device)
    inputs = _batches(device)[0]
    proxy = Quantizer(backend="openvino").calib(model)
    assert torch.equal(_hidden(proxy, inputs), _hidden(model, inputs))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_calibration_and_the_frozen_model_are_those_of_a_cpu(device: str, dtype: str) -> None:
    backend = "openvino" if dtype == "int8" else "tensorrt"
    here = make_calibrated(_model("cpu"), _batches("cpu"), backend=backend, dtype=dtype)
    there = make_calibrated(_model(device), _batches(device), backend=backend, dtype=dtype)
    scales = there.scales()
    assert scales.keys() == here.scales().keys()
    for name, value in here.scales().items():
        # Products of a GPU add in another order, with TF32 switched off by default.
        torch.testing.assert_close(scales[name].cpu(), value, rtol=1e-3, atol=1e-6, msg=name)
    frozen, expected = there.quantize(_model(device)), here.quantize(_model("cpu"))
    found = _hidden(frozen, _batches(device)[0])
    assert found.device.type == device
    assert sqnr_db(_hidden(expected, _batches("cpu")[0]).numpy(), found.cpu().numpy()) > 25


def test_sensitivity_ranks_as_on_a_cpu(device: str) -> None:
    ranked = {}
    for place in ("cpu", device):
        model = _model(place)
        q = make_calibrated(model, _batches(place), backend="openvino", sites={"residual_add": True})
        amp = q.amp(model)
        for inputs in _batches(place)[:2]:
            _hidden(amp, inputs)
        q.fallback(amp, num=2)
        ranked[place] = [row.group for row in q.sensitivity]
        assert len(q.fallback(amp, num=2).groups) == 2
    assert set(ranked[device]) == set(ranked["cpu"])
    assert set(ranked[device][:2]) & set(ranked["cpu"][:3])


def test_training_in_bfloat16_lowers_the_loss(device: str) -> None:
    model = _model(device).train()
    q = make_calibrated(tiny("bert").to(device), _batches(device), backend="openvino")
    proxy = q.qat(model, scales="learned")
    target = torch.randn_like(_hidden(model, _batches(device)[0]))
    optimizer = torch.optim.AdamW(proxy.parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (proxy(**_batches(device)[0]).last_hidden_state - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    frozen = q.quantize(model)
    assert torch.isfinite(_hidden(frozen, _batches(device)[0])).all()


@pytest.mark.parametrize("preset", ["balanced", "accurate"])
@pytest.mark.parametrize("kind", ["bert", "convolutions"])
def test_presets_are_as_near_to_the_model_as_on_a_cpu(device: str, preset: str, kind: str) -> None:
    near = {}
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = (tiny("bert") if kind == "bert" else ConvNet().eval()).to(place)
        data = _batches(place) if kind == "bert" else _pictures(place)
        q = Quantizer(backend="openvino", preset=preset)
        q.calibrate(model, data, progress=False)
        found, expected = _first(q.quantize(model), data[0]), _first(model, data[0])
        near[place] = sqnr_db(expected.cpu().numpy(), found.cpu().numpy())
    assert abs(near[device] - near["cpu"]) < 2


def test_a_saved_quantizer_and_batches_of_a_loader_are_moved_to_the_model(device: str, tmp_path: Path) -> None:
    model = _model(device)
    q = make_calibrated(model, _batches("cpu"), backend="onnxruntime")
    q.save(tmp_path / "saved")
    again = Quantizer.load(tmp_path / "saved")
    inputs = _batches(device)[0]
    assert torch.equal(_hidden(again.quantize(model), inputs), _hidden(q.quantize(model), inputs))
    amp = again.amp(model)
    _hidden(amp, inputs)
    assert len(again.fallback(amp, num=2).groups) == 2
    places = {tensor.device.type for tensor in again.qat(model).state_dict().values()}
    assert places == {device}


def test_a_file_is_that_of_the_model_on_a_cpu(device: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    make_calibrated(_model("cpu"), _batches("cpu"), backend="onnxruntime").save(tmp_path / "saved")
    written = {}
    for place in ("cpu", device):
        q, model = Quantizer.load(tmp_path / "saved"), _model(place)
        frozen = q.quantize(model)
        before = _hidden(frozen, _batches(place)[0])
        path = q.export(frozen, tmp_path / f"{place}.onnx", _batches("cpu")[0])
        assert torch.equal(_hidden(frozen, _batches(place)[0]), before)
        written[place] = path.read_bytes()
        assert {tensor.device.type for tensor in model.state_dict().values()} == {place}
    assert written[device] == written["cpu"]


def test_an_engine_of_a_model_on_a_gpu(device: str) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = _model(device)
    made = quantize_model(model, _batches("cpu"), backend="onnxruntime", progress=False)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert made.engine is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_lowered_model_in_half_precision(device: str, dtype: str) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    model, inputs = _model(device), _batches(device)[0]
    q = make_calibrated(model, _batches(device), backend="torch" if dtype == "int8" else "tensorrt", dtype=dtype)
    expected, lowered = _hidden(q.quantize(model), inputs), q.lower(model)
    kernel = "aten::_int_mm" if dtype == "int8" else "aten::_scaled_mm"
    assert {row.kernel for row in q.kernels(lowered) if row.operation == "linear"} == {kernel}
    with torch.autocast(device, torch.bfloat16):
        under = _hidden(lowered, inputs)
    assert sqnr_db(expected.cpu().numpy(), under.float().cpu().numpy()) > 25
    half = lowered.bfloat16()
    for layer in half.encoder.layer:
        layer.compile(fullgraph=True)
    found = _hidden(half, inputs)
    assert found.dtype is torch.bfloat16
    assert sqnr_db(expected.cpu().numpy(), found.float().cpu().numpy()) > 25


def test_an_engine_whose_kernels_read_and_write_8_bits(device: str, tmp_path: Path) -> None:
    """Beside its references on the CPU: at a first call, with measured tiles, and as a CUDA graph."""
    pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    from quantizer.engines.torch_engine.gpu_engine import engine_on

    model = tiny("bert")
    q = make_calibrated(model, _batches("cpu"), backend="torch")
    path = q.export(q.quantize(model), tmp_path / "m.onnx", batch("bert"))
    engine, reference = load_engine("torch-cuda", path), engine_on(path, "cpu", triton=False)
    assert [kernel.fallback for kernel in engine.plan.kernels if kernel.fallback] == []
    inputs = {name: value.numpy() for name, value in batch("bert", seed=9).items()}
    expected = reference(inputs)
    for turn in range(4):
        if turn == 1:
            assert engine.tune(inputs, tmp_path / "tiles.json") > 0
        for name, values in engine(inputs).items():
            assert sqnr_db(expected[name], values) > 40
    assert engine.no_graphs is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
def test_an_engine_file_of_torch(device: str, tmp_path: Path, kind: str, compiled: bool) -> None:
    """Measured in its build, and beside its references on the CPU at a shape that was not measured."""
    pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    from quantizer.engines.torch_engine.gpu_engine import engine_on
    from quantizer.engines.torch_engine.gpu_file import read_for_gpu

    model = tiny("bert")
    if kind == "float":
        path = export_onnx(model, tmp_path / "m.onnx", batch("bert"), opset=20, dtype=torch.float32)
    else:
        q = make_calibrated(model, _batches("cpu"), backend="torch-cuda", dtype=kind)
        path = q.export(q.quantize(model), tmp_path / "m.onnx", batch("bert"))
    options = BuildOptions(dynamic={"batch": (1, 2, 4), "sequence": (4, 8, 16)}, compiled=compiled)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", options)
    assert built.warnings == ()
    file = read_for_gpu(built.path)
    assert file.gpu is not None
    assert bool(file.gpu.tiles) is (kind != "float")
    engine, reference = load_engine("torch-cuda", built.path), engine_on(path, "cpu", triton=False)
    inputs = {name: value.numpy() for name, value in batch("bert", seed=9).items()}
    expected = reference(inputs)
    for _ in range(3):
        for name, values in engine(inputs).items():
            assert sqnr_db(expected[name], values) > 35
    inspection = inspect_engine("torch-cuda", built.path, sizes=InputSizes(2, 8))
    formats = {share.precision for share in inspection.shares if share.products}
    assert formats == ({"fp16"} if kind == "float" else {kind, "fp16"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_fastest_engine_for_the_device_of_the_model(device: str, tmp_path: Path, on_gpu: bool) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    pytest.importorskip("onnxruntime", reason="the CPU needs enginequant[onnxruntime]")
    model = _model(device if on_gpu else "cpu")
    made = quantize_model(model, _batches("cpu"), preset="plain", time_budget=None, progress=False)
    choice = made.record.choice
    assert choice is not None
    backends = {entry.backend for entry in choice.candidates}
    if not on_gpu:
        assert choice.gpu is None
        assert not backends & {"torch-cuda", "tensorrt", "tensorrt-rtx"}
        return
    assert choice.gpu is not None
    assert choice.gpu.startswith(torch.cuda.get_device_name())
    formats = {"float16", "int8", *(["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])}
    of_torch = {entry.format: entry for entry in choice.candidates if entry.backend == "torch-cuda"}
    assert of_torch.keys() == formats
    assert all(entry.milliseconds for entry in of_torch.values())
    assert made.record.engine is not None
    assert made.record.engine.backend in {"torch-cuda", "tensorrt", "tensorrt-rtx"}
    inputs = _batches(device)[0]
    with torch.no_grad():
        expected = made.engine(**inputs)
    assert expected.last_hidden_state.device.type == device
    again = load(made.save(tmp_path / "saved"))
    hidden = again(**inputs)["last_hidden_state"]
    assert sqnr_db(expected.last_hidden_state.cpu().numpy(), hidden.cpu().numpy()) > 40


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_methods_of_a_linear_layer_compute_what_the_reference_does(device: str, kind: str) -> None:
    """Each tile, torch's 8-bit matrix multiplication, and float16; with float16 and 8-bit results."""
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    from quantizer.engines.torch_engine.gpu_operators import linear_with, product_of
    from quantizer.numerics.triton_kernels import reference
    from quantizer.numerics.triton_kernels.tiles import methods_for

    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(0)
    a, w = ((40 * torch.randn(rows, 96, generator=generator)).to(dtype).to(device) for rows in (100, 48))
    scales, bias = (torch.rand(48, generator=generator).to(device) / 100 for _ in range(2))
    for result, next_scale in ((torch.float16, None), (dtype, torch.full((1,), 0.01, device=device))):
        operands = (0.02, scales, bias, None, next_scale, 0, "gelu", result, 1)
        expected = reference.linear(a, w, 0.02, scales, bias, None, next_scale, activation="gelu", dtype=result)
        methods = methods_for(product_of(100, w, *operands))
        assert len(methods) == 6
        for method in methods:
            found = linear_with(method, a, w, *operands)
            assert sqnr_db(expected.float().cpu().numpy(), found.float().cpu().numpy()) > 30, method


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
def test_methods_of_an_attention_compute_what_the_reference_does(device: str, width: int, dtype: torch.dtype) -> None:
    """With padding at the end, at the beginning and in between, and 16-bit and 8-bit results."""
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    from quantizer.engines.torch_engine.gpu_operators import OPERATORS, attention_entry, attention_with
    from quantizer.numerics.triton_kernels.tiles import methods_for

    generator, keys = torch.Generator().manual_seed(0), torch.arange(300)
    q, k, v = (torch.randn(4, 300, 3, width, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(3))
    real = torch.stack([keys < 70, keys >= 250, keys % 7 == 3, keys >= 0])
    mask = torch.where(real, 0.0, torch.finfo(dtype).min).to(device, dtype)[:, None, None]
    for options in ((None, None, 0), (torch.int8, torch.full((1,), 0.02, device=device), 5)):
        expected = OPERATORS["padded_attention"].reference(q, k, v, mask, width**-0.5, *options)
        methods = methods_for(attention_entry(q, k, options[0]))
        assert len(methods) == 4
        for method in methods:
            found = attention_with(method, q, k, v, mask, width**-0.5, *options)
            assert sqnr_db(expected.float().cpu().numpy(), found.float().cpu().numpy()) > 35, method


def _in_ranks(rank: int, world: int, device: str, folder: str) -> None:
    """Calibrate on a share of the batches, train a step, and write the plan and the checksum of the parameters."""
    kind = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    place = f"cuda:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    model = tiny("bert").to(place)
    q = make_calibrated(model, _batches(place)[rank::world], backend="openvino")
    scales = {name: value.flatten().tolist() for name, value in q.scales().items()}
    # The pooler gets no gradient here.
    proxy = DistributedDataParallel(q.qat(model), find_unused_parameters=True)
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.01)
    proxy(**_batches(place)[rank]).last_hidden_state.square().mean().backward()
    optimizer.step()
    total = float(sum(parameter.double().sum() for parameter in proxy.parameters()))
    told: dict[str, Any] = {"scales": scales, "parameters": total}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    del proxy  # before the group, see _of_rank in tests/proxy/test_proxy_behaviour.py
    torch.distributed.destroy_process_group()


def test_ranks_have_one_plan_and_one_model(device: str, tmp_path: Path) -> None:
    world = max(torch.cuda.device_count(), 1)
    work: Callable[..., None] = _in_ranks
    torch.multiprocessing.spawn(work, (world, device, str(tmp_path)), nprocs=world)
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
    assert all(one == told[0] for one in told)
    alone = make_calibrated(tiny("bert").to(device), _batches(device), backend="openvino").scales()
    for name, values in told[0]["scales"].items():
        torch.testing.assert_close(torch.tensor(values), alone[name].flatten().cpu(), rtol=1e-3, atol=1e-6)
