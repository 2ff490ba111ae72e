"""Engines of a GPU, on a CPU: Triton's interpreter runs their kernels, and one kernel fails."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batch, tiny
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.engines.torch_engine import gpu_engine, gpu_operators
from quantizer.engines.torch_engine.gpu_engine import create_on, engine_on
from quantizer.engines.torch_engine.gpu_lowering import lower_for_gpu
from quantizer.engines.torch_engine.graph_file import program
from quantizer.errors import EngineError, MissingDependencyError
from quantizer.export.onnx_import.importer import import_onnx
from quantizer.numerics.triton_kernels.tiles import TileTable, first_tile
from quantizer.tasks.metrics import sqnr_db
from quantizer.utils import lazy

pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")


def _exported(folder: Path, layers: int, **settings: Any) -> Path:
    """A Q/DQ file of a tiny encoder."""
    q, model = Quantizer(preset="plain", **settings), tiny("bert")
    model.encoder.layer = model.encoder.layer[:layers]
    q.calibrate(model, [batch("bert", seed=seed) for seed in range(4)])
    return q.export(q.quantize(model), folder / "m.onnx", batch("bert"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two layers."""
    return _exported(tmp_path_factory.mktemp("gpu"), 2, backend="torch")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one layer: Triton's interpreter takes a second for each."""
    return _exported(tmp_path_factory.mktemp("one"), 1, backend="torch")


def _outputs(engine: Any) -> Any:
    return next(iter(engine({name: value.numpy() for name, value in batch("bert", seed=9).items()}).values()))


def _needs_interpreter() -> None:
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton does not interpret its kernels")


def test_kernels_compute_what_their_references_do(one_layer: Path) -> None:
    _needs_interpreter()
    kernels, references = (engine_on(one_layer, "cpu", triton=triton) for triton in (True, False))
    assert not [kernel for kernel in kernels.plan.kernels if kernel.fallback]
    assert [kernel.sites for kernel in kernels.plan.kernels] == [kernel.sites for kernel in references.plan.kernels]
    assert sqnr_db(_outputs(references), _outputs(kernels)) > 40


@pytest.fixture(scope="module")
def fp8_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one layer in FP8, as for TensorRT."""
    return _exported(tmp_path_factory.mktemp("fp8"), 1, backend="tensorrt", dtype="fp8", sites={"matmul": False})


def test_kernels_of_fp8_compute_what_their_references_do(fp8_path: Path) -> None:
    _needs_interpreter()
    kernels, references = (engine_on(fp8_path, "cpu", triton=triton) for triton in (True, False))
    assert not [kernel for kernel in kernels.plan.kernels if kernel.fallback]
    assert sqnr_db(*(_outputs(engine).astype("float32") for engine in (references, kernels))) > 35


def test_fp8_on_a_gpu_without_it(fp8_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(
        EngineError, match=r"in FP8, which needs compute capability 8\.9 or later, but the GPU has 8\.6"
    ):
        engine_on(fp8_path, "cuda")
    assert gpu_engine.no_fp8(import_onnx(path).module) is None


def test_a_kernel_that_fails_is_replaced_and_the_plan_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_error(*_: Any) -> Any:
        raise NotImplementedError("no wgmma on this GPU\nat line 3")

    for name in gpu_operators.KERNELS:
        monkeypatch.setitem(gpu_operators.KERNELS, name, compile_error)
    engine = engine_on(path, "cpu", triton=True)
    replaced = [kernel for kernel in engine.plan.kernels if kernel.kernel != "attention"]
    reason = "its kernel failed: NotImplementedError: no wgmma on this GPU"
    assert {kernel.fallback for kernel in replaced} == {reason}
    assert f"computed by operations of torch: {reason}" in str(engine.plan)
    assert (_outputs(engine) == _outputs(engine_on(path, "cpu", triton=False))).all()


def test_only_the_layer_whose_kernel_fails_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_interpreter()
    compute = gpu_operators.KERNELS["linear_8bit"]

    def fail_at_gelu(a: torch.Tensor, *operands: Any) -> Any:
        if "gelu" in operands:
            raise RuntimeError("PassManager::run failed")
        return compute(a, *operands)

    monkeypatch.setitem(gpu_operators.KERNELS, "linear_8bit", fail_at_gelu)
    plan = engine_on(path, "cpu", triton=True).plan
    assert [kernel.sites for kernel in plan.kernels if kernel.fallback] == [
        (f"encoder.layer.{layer}.intermediate.dense",) for layer in (0, 1)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_operator_runs_on_the_device_of_the_graph(path: Path, dtype: torch.dtype) -> None:
    """With tensors without data, for which torch raises if devices or types do not fit."""
    imported = import_onnx(path)
    lower_for_gpu(imported, dtype=dtype)
    module = imported.module
    create_on(module, "cuda")
    with FakeTensorMode():
        for name, tensor in list(module.named_buffers()):
            setattr(module, name, torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
        inputs = [torch.zeros(2, 8, dtype=torch.int64, device="cuda") for _ in imported.inputs]
        outputs = program(module)(*inputs)
    assert {(output.device.type, output.dtype) for output in outputs} == {("cuda", torch.float32)}


def test_an_engine_of_a_gpu_without_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="torch sees no GPU"):
        load_engine("torch", path, device="cuda")


def test_a_gpu_that_is_too_old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(EngineError, match=r"compute capability 7\.5, but the kernels need 8\.0 or later"):
        load_engine("torch", path, device="cuda")


def test_without_triton_the_error_names_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = lazy.importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return imported(name, *rest)

    monkeypatch.setattr(gpu_engine, "no_gpu", lambda: None)
    monkeypatch.setattr(lazy.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="enginequant\\[triton\\]"):
        load_engine("torch", path, device="cuda")


def test_an_engine_file_is_not_loaded_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="pass its ONNX file"):
        load_engine("torch", tmp_path / "m.engine", device="cuda")


def test_a_device_that_a_backend_lacks(path: Path) -> None:
    with pytest.raises(EngineError, match="its engines run on cpu, not on 'cuda'"):
        load_engine("onnxruntime", path, device="cuda")
    with pytest.raises(EngineError, match="its engines run on cpu or cuda, not on 'tpu'"):
        load_engine("torch", path, device="tpu")


_ON_A_CPU = """
import sys
from pathlib import Path
from quantizer.engines import BuildOptions, build_engine, load_engine

path, engine = map(Path, sys.argv[1:])
build_engine("torch", path, engine, BuildOptions(compiled=False))
for file in (path, engine):
    load_engine("torch", file)
engines = "quantizer.engines.torch_engine"
names = (f"{engines}.gpu", f"{engines}.kernel_plan", "quantizer.numerics.triton")
print([name for name in sys.modules if name.startswith(names)])
"""


def test_engines_of_a_cpu_import_nothing_of_a_gpu(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ON_A_CPU, str(path), str(tmp_path / "m.engine")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("fastest", [0, -1], ids=["a_tile", "torch"])
def test_tiles_are_measured_once_and_kept(
    one_layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: int
) -> None:
    _needs_interpreter()
    inputs = {name: value.numpy() for name, value in batch("bert", seed=9).items()}
    table, measured = TileTable(), list[list[Tensor]]()
    for module in (gpu_engine, gpu_operators):
        monkeypatch.setattr(module, "TABLE", table)
    engine = engine_on(one_layer, "cpu", triton=True)
    before, turns = _outputs(engine), itertools.count()

    def seconds(call: Any) -> float:
        """Run a candidate. The first is the fastest for a tile, the last for operations of torch."""
        result, (tile, *_) = call(), call.args
        assert isinstance(result, Tensor)
        if tile == first_tile(1):
            measured.append([])
        measured[-1].append(result)
        return float(next(turns) if fastest == 0 else -next(turns))

    # 24 tokens and 3 rows of the pooler; q, k and v, attention's output, up, down.
    assert engine.tune(inputs, tmp_path / "tiles.json", seconds=seconds) == 5
    assert {product.rows for product in table} == {16, 32}
    tiles = {table.tile(product, 1) for product in table}
    assert tiles == ({first_tile(1)} if fastest == 0 else {None})
    # Few rows leave one tile. Its results differ from those of torch only by the order of sums.
    assert len(measured) == 5
    for candidates in measured:
        of_tile, of_torch = (result.float().numpy() for result in candidates)
        assert sqnr_db(of_torch, of_tile) > 40
    assert sqnr_db(before, _outputs(engine)) > 40
    fresh = TileTable()
    for module in (gpu_engine, gpu_operators):
        monkeypatch.setattr(module, "TABLE", fresh)
    assert engine.tune(inputs, tmp_path / "tiles.json", seconds=lambda call: pytest.fail("measured again")) == 0
    assert {product: fresh.tile(product, 1) for product in fresh} == {
        product: table.tile(product, 1) for product in table
    }


def test_a_cpu_has_no_graphs(path: Path) -> None:
    engine = engine_on(path, "cpu", triton=False)
    first = _outputs(engine)
    assert (_outputs(engine) == first).all()
    assert engine.no_graphs == "a CPU has no CUDA graphs"
