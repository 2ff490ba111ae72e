"""Engines of a GPU, on a CPU: Triton's interpreter runs their kernels, and one kernel fails."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batch, tiny
from outside import run_script
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer import Quantizer
from quantizer.engines import BuildOptions, InputSizes, build_engine, detect_backend, inspect_engine, load_engine
from quantizer.engines.engine_file import write_engine
from quantizer.engines.torch_engine import gpu_engine, gpu_file, gpu_operators
from quantizer.engines.torch_engine.gpu_engine import create_on, engine_of, engine_on
from quantizer.engines.torch_engine.gpu_lowering import lower_for_gpu
from quantizer.engines.torch_engine.gpu_operators import attention_entry, linear_with
from quantizer.engines.torch_engine.graph_file import program
from quantizer.errors import EngineError, MissingDependencyError
from quantizer.export.exporter import export_onnx
from quantizer.export.onnx_import.importer import import_onnx
from quantizer.numerics.triton_kernels.tiles import (
    FLOAT16,
    LIBRARY,
    Measured,
    Method,
    Product,
    TileTable,
    first_attention_tile,
    first_tile,
)
from quantizer.tasks.metrics import sqnr_db
from quantizer.utils import gpu, lazy

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


# 18 tokens: norms are a program of the interpreter for each.
INPUTS = {name: value.numpy() for name, value in batch("bert", seed=9, length=6).items()}


def _outputs(engine: Any) -> Any:
    return next(iter(engine(INPUTS).values()))


def _needs_interpreter() -> None:
    pytest.importorskip("triton", reason="kernels need enginequant[triton]")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton does not interpret its kernels")


def test_kernels_compute_what_their_references_do(one_layer: Path, engines: dict[str, Any]) -> None:
    kernels, references = engines["int8"], engine_on(one_layer, "cpu", triton=False)
    assert not [kernel for kernel in kernels.plan.kernels if kernel.fallback]
    assert [kernel.sites for kernel in kernels.plan.kernels] == [kernel.sites for kernel in references.plan.kernels]
    assert sqnr_db(_outputs(references), _outputs(kernels)) > 40


@pytest.fixture(scope="module")
def fp8_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one layer in FP8, as for TensorRT."""
    return _exported(tmp_path_factory.mktemp("fp8"), 1, backend="tensorrt", dtype="fp8", sites={"matmul": False})


def test_kernels_of_fp8_compute_what_their_references_do(fp8_path: Path, engines: dict[str, Any]) -> None:
    kernels, references = engines["fp8"], engine_on(fp8_path, "cpu", triton=False)
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
    with pytest.raises(EngineError, match="torch sees no NVIDIA GPU"):
        load_engine("torch-cuda", path)


def test_a_gpu_that_is_too_old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(EngineError, match=r"compute capability 7\.5, but the kernels need 8\.0 or later"):
        load_engine("torch-cuda", path)


def test_without_triton_the_error_names_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = lazy.importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return imported(name, *rest)

    monkeypatch.setattr(gpu_file, "no_gpu", lambda: None)
    monkeypatch.setattr(lazy.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="enginequant\\[triton\\]"):
        load_engine("torch-cuda", path)


@pytest.fixture
def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are their references on the CPU."""
    monkeypatch.setattr(gpu, "is_present", lambda: True)
    monkeypatch.setattr(gpu, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_file, "import_library", lambda *_: None)
    monkeypatch.setattr(gpu_file, "engine_of", on_cpu)


def on_cpu(imported: Any, _: str, **options: Any) -> gpu_engine.GpuEngine:
    """Return an engine with reference kernels on the CPU."""
    return engine_of(imported, "cpu", triton=False, **options)


RANGES = {"batch": (1, 2, 4), "sequence": (4, 8, 16)}


@pytest.mark.usefixtures("gpu_stand_in")
@pytest.mark.parametrize(("precision", "dtype"), [(None, torch.float16), ("bfloat16", torch.bfloat16)])
def test_an_engine_file_computes_what_its_onnx_file_does(
    path: Path, tmp_path: Path, precision: str | None, dtype: torch.dtype
) -> None:
    options = BuildOptions(dynamic=RANGES, inference_precision=precision, compiled=False)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", options)
    assert built.warnings == ()
    assert detect_backend(built.path) == "torch-cuda"
    engine = load_engine("torch-cuda", built.path)
    assert engine.name == "torch-cuda"
    expected = engine_on(path, "cpu", dtype=dtype, triton=False)
    assert (_outputs(engine) == _outputs(expected)).all()
    if dtype is torch.float16:
        assert (_outputs(load_engine("torch-cuda", path)) == _outputs(expected)).all()


@pytest.mark.usefixtures("gpu_stand_in")
def test_an_engine_file_in_fp8(fp8_path: Path, tmp_path: Path) -> None:
    built = build_engine("torch-cuda", fp8_path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES, compiled=False))
    assert (_outputs(load_engine("torch-cuda", built.path)) == _outputs(engine_on(fp8_path, "cpu", triton=False))).all()


def test_an_engine_file_is_built_without_a_gpu_and_says_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_present", lambda: False)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES))
    assert built.warnings == ("the engine was neither run nor measured: torch sees no NVIDIA GPU on this machine",)
    with pytest.raises(EngineError, match=r"cannot load .*m\.engine: torch sees no NVIDIA GPU on this machine; use"):
        load_engine("torch-cuda", built.path)
    monkeypatch.setattr(gpu, "is_present", lambda: True)
    monkeypatch.setattr(gpu, "capability", lambda: (7, 5))
    with pytest.raises(EngineError, match=r"compute capability 7\.5, but the kernels need 8\.0 or later; use the CPU"):
        load_engine("torch-cuda", built.path)


def test_an_engine_file_belongs_to_one_backend(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_file, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu_file, "import_library", lambda *_: None)
    cpu_file = build_engine("torch", path, tmp_path / "cpu.engine", BuildOptions(compiled=False)).path
    with pytest.raises(EngineError, match=r"cpu\.engine is an engine of torch, not of torch-cuda: call load_engine\("):
        load_engine("torch-cuda", cpu_file)
    monkeypatch.setattr(gpu_file, "no_gpu", lambda: "none")
    gpu_path = build_engine("torch-cuda", path, tmp_path / "gpu.engine").path
    with pytest.raises(EngineError, match=r"gpu\.engine is an engine of torch-cuda, not of torch: call load_engine\("):
        load_engine("torch", gpu_path)


@pytest.mark.usefixtures("gpu_stand_in")
def test_an_engine_file_keeps_the_measured_methods(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, product, sizes = TileTable(), Product(16, 64, 32, "int8", "none", "9.0"), []
    for module in (gpu_engine, gpu_file):
        monkeypatch.setattr(module, "TABLE", fresh)

    def tune(_: Any, inputs: Any) -> int:
        sizes.append(next(iter(inputs.values())).shape)
        fresh._entries[product] = Measured(FLOAT16, 1.5)
        return 1

    monkeypatch.setattr(gpu_engine.GpuEngine, "tune", tune)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES, compiled=False))
    assert sizes == [(2, 8), (1, 8)]
    fresh._entries.clear()
    load_engine("torch-cuda", built.path)
    assert {each: fresh[each] for each in fresh} == {product: Measured(FLOAT16, 1.5)}
    file = gpu_file.read_for_gpu(built.path)
    assert file.gpu is not None
    other = replace(file, gpu=replace(file.gpu, tiles='{"format": 1}'))
    write_engine(tmp_path / "other.engine", memoryview(other.packed()))
    with pytest.raises(EngineError, match="its measured tiles are damaged or of another release: build it again"):
        load_engine("torch-cuda", tmp_path / "other.engine")


@pytest.mark.usefixtures("gpu_stand_in")
@pytest.mark.parametrize("is_faster", [True, False])
def test_the_graph_is_compiled_if_that_is_faster(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    modules, compile_with = [], torch.compile

    def compile_graph(module: Any, *, dynamic: bool) -> Any:
        assert dynamic
        modules.append(module)
        # Inductor sums in another order.
        return compile_with(module, dynamic=dynamic, backend="aot_eager")

    def seconds(calls: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        assert rounds > 1
        for call in calls.values():
            call()
        return {name: [1.0 if (name == "compiled") == is_faster else 2.0] for name in calls}

    monkeypatch.setattr(torch, "compile", compile_graph)
    monkeypatch.setattr(gpu_file, "interleaved_latency", seconds)
    monkeypatch.setattr(gpu_file, "missing_compiler", lambda: None)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES))
    assert len(modules) == 1
    engine = load_engine("torch-cuda", built.path)
    assert len(modules) == 1 + is_faster
    assert (_outputs(engine) == _outputs(engine_on(path, "cpu", triton=False))).all()


@pytest.mark.usefixtures("gpu_stand_in")
def test_a_graph_that_does_not_compile_is_eager_with_the_reason(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image\nat line 3")

    monkeypatch.setattr(torch, "compile", lambda module, **_: fail)
    monkeypatch.setattr(gpu_file, "missing_compiler", lambda: None)
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES))
    assert "the engine is not compiled, because compilation failed: torch could not run" in built.warnings[0]
    monkeypatch.setattr(gpu_file, "missing_compiler", lambda: "no C++ compiler found")
    built = build_engine("torch-cuda", path, tmp_path / "m.engine", BuildOptions(dynamic=RANGES))
    assert built.warnings == (
        "the engine is not compiled, because no C++ compiler found; a compiled engine may be faster",
    )


@pytest.mark.usefixtures("gpu_stand_in")
def test_a_graph_that_does_not_fit_into_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nof which 1 GiB is free")

    monkeypatch.setattr(gpu_file, "engine_of", fail)
    text = r"m\.onnx does not fit into the free memory of the GPU: CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"
    with pytest.raises(EngineError, match=text):
        load_engine("torch-cuda", path)


@pytest.mark.usefixtures("gpu_stand_in")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_precision_of_each_layer(path: Path, fp8_path: Path, kind: str) -> None:
    found = inspect_engine("torch-cuda", path if kind == "int8" else fp8_path, sizes=InputSizes(2, 16))
    assert found.verified
    precisions = {share.precision: share for share in found.shares}
    # q, k and v are one layer; then attention's output, up and down; and the pooler.
    assert precisions[kind].products == (9 if kind == "int8" else 5)
    assert found.attention_fused == (2 if kind == "int8" else 1)
    assert {layer.precision for layer in found.layers if layer.role == "attention"} == {"fp16"}
    norms = [layer for layer in found.layers if layer.role == "normalization"]
    assert len(norms) == (5 if kind == "int8" else 3)
    assert all(layer.readers for layer in norms[:-1])
    assert found.low_share() == pytest.approx(0.889 if kind == "int8" else 0.875, abs=0.02)


@pytest.mark.usefixtures("gpu_stand_in")
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_an_engine_of_a_float_model(tmp_path: Path, precision: str) -> None:
    model = tiny("bert")
    model.encoder.layer = model.encoder.layer[:1]
    path = export_onnx(model, tmp_path / "m.onnx", batch("bert"), opset=20, dtype=torch.float32)
    options = BuildOptions(dynamic=RANGES, inference_precision=precision, compiled=False)
    engine = load_engine("torch-cuda", build_engine("torch-cuda", path, tmp_path / "m.engine", options).path)
    with torch.no_grad():
        expected = model(**batch("bert", seed=9, length=6)).last_hidden_state
    assert sqnr_db(expected.numpy(), _outputs(engine)) > (55 if precision == "float16" else 40)


def test_options_that_a_gpu_engine_lacks(path: Path, tmp_path: Path) -> None:
    for options, text in (
        (BuildOptions(inference_precision="float32"), "does not support 'float32'; expected bfloat16 or float16"),
        (BuildOptions(strip_weights=True), "torch-cuda always stores the weights in its engines"),
    ):
        with pytest.raises(EngineError, match=text):
            build_engine("torch-cuda", path, tmp_path / "m.engine", options)


_ON_A_CPU = """
import sys
from pathlib import Path
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.engines.candidates import usable_backends
import quantizer.pipeline.quantize_model

path, engine = map(Path, sys.argv[1:])
build_engine("torch", path, engine, BuildOptions(compiled=False))
for file in (path, engine):
    load_engine("torch", file)
usable_backends(["torch"])
engines = "quantizer.engines"
names = (f"{engines}.torch_engine.gpu", f"{engines}.torch_engine.kernel_plan", f"{engines}.for_this_gpu")
names += ("quantizer.numerics.triton",)
print([name for name in sys.modules if name.startswith(names)])
"""


def test_engines_of_a_cpu_import_nothing_of_a_gpu(path: Path, tmp_path: Path) -> None:
    (tmp_path / "on_a_cpu.py").write_text(_ON_A_CPU)
    assert run_script(tmp_path, "on_a_cpu.py", str(path), "m.engine").splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def engines(one_layer: Path, fp8_path: Path) -> dict[str, Any]:
    """An engine of one layer in each type, which tries its kernels when it is made. No test changes it."""
    _needs_interpreter()
    return {"int8": engine_on(one_layer, "cpu", triton=True), "fp8": engine_on(fp8_path, "cpu", triton=True)}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[TileTable]:
    """The table of a process that has measured nothing."""
    _needs_interpreter()
    fresh = TileTable()
    for module in (gpu_engine, gpu_operators):
        monkeypatch.setattr(module, "TABLE", fresh)
    monkeypatch.setattr(gpu_operators, "_COPIES", copies := WeakTensorKeyDictionary())
    yield fresh
    copies.clear()


class Clock:
    """Seconds of candidates: 1 for the fastest, 1.5 for tiles, 2 for others. Keeps the results by candidate.

    Attributes:
        results: those of linear layers.
        attentions: those of attentions.
    """

    def __init__(self, fastest: Method) -> None:
        self.fastest = fastest
        self.results: dict[Method, list[Tensor]] = defaultdict(list)
        self.attentions: dict[Method, list[Tensor]] = defaultdict(list)

    def __call__(self, call: Any) -> float:
        """Run a candidate, and return its seconds."""
        method = call.args[0]
        if call.func is linear_with:
            self.results[method].append(call())
        else:
            self.attentions[method].append(call())
        return 1.0 if method == self.fastest else 2.0 if isinstance(method, str) else 1.5


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("fastest", [first_tile(1), LIBRARY, FLOAT16], ids=["a_tile", LIBRARY, FLOAT16])
def test_methods_are_measured_once_and_kept(
    engines: dict[str, Any], tmp_path: Path, table: TileTable, fastest: Method, kind: str
) -> None:
    engine, clock = engines[kind], Clock(fastest)
    before = _outputs(engine).astype("float32")
    # 18 tokens and 3 rows of the pooler; q, k and v, attention, its output, up, down.
    assert engine.tune(INPUTS, tmp_path / "tiles.json", seconds=clock) == 6
    assert {product.rows for product in table.products} == {16, 32}
    # torch._int_mm takes more than 16 rows.
    tile, library = clock.results[first_tile(1)], clock.results[LIBRARY]
    assert len(library) == (4 if kind == "int8" else 5)
    for mine, theirs in zip(library, tile, strict=False):
        # Sums of INT8 are exact; those of FP8 differ by their order.
        assert torch.equal(mine, theirs) if kind == "int8" else _db(theirs, mine) > 30
    assert all(_db(theirs, mine) > 30 for mine, theirs in zip(clock.results[FLOAT16], tile, strict=True))
    methods = [table[product].method for product in table.products]
    assert methods[1:] == [fastest] * 4
    assert methods[0] == (first_tile(1) if fastest == LIBRARY and kind == "int8" else fastest)
    assert _db(before, _outputs(engine).astype("float32")) > 35
    fresh = TileTable()
    fresh.read(tmp_path / "tiles.json")
    assert {product: fresh[product] for product in fresh} == {product: table[product] for product in table}
    assert engine.tune(INPUTS, tmp_path / "tiles.json", seconds=lambda call: pytest.fail("measured again")) == 0


def _db(expected: Any, found: Any) -> float:
    return sqnr_db(*(torch.as_tensor(each).float().numpy() for each in (expected, found)))


def test_a_plan_says_which_layers_are_not_computed_by_the_kernel(
    path: Path, engines: dict[str, Any], table: TileTable
) -> None:
    engine = engine_on(path, "cpu", triton=True)
    assert not any(kernel.measured for kernel in engine.plan.kernels)
    # Both layers are alike.
    assert engine.tune(INPUTS, seconds=Clock(FLOAT16)) == 6
    (up,) = engine.plan.of("encoder.layer.1.intermediate")
    assert up.measured == ("float16: 1.50 times as fast as 8 bits at 17 to 32 tokens",)
    *_, pooler = engine.plan.of("pooler")
    assert pooler.measured == ("float16: 1.50 times as fast as 8 bits at 1 to 16 tokens",)
    assert f"\n    {up.measured[0]}" in str(engine.plan)
    # Another engine in the same process has the same layers in FP8, which were not measured.
    other = engines["fp8"]
    assert not any(kernel.measured for kernel in other.plan.kernels)
    other.tune(INPUTS, seconds=Clock(LIBRARY))
    text = "torch._scaled_mm and a kernel for what follows: 1.50 times as fast as the kernel at 17 to 32 tokens"
    assert other.plan.of("encoder.layer.0.intermediate")[0].measured == (text,)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_attention_is_computed_by_the_fastest_method(engines: dict[str, Any], table: TileTable, kind: str) -> None:
    engine, clock = engines[kind], Clock(LIBRARY)
    (attention,) = engine.plan.of("encoder.layer.0.attention.self")[1:]
    assert (attention.kernel, attention.measured) == ("padded_attention", ())
    before = _outputs(engine)
    engine.tune(INPUTS, seconds=clock)
    (entry,) = table.attentions
    assert (entry.heads, entry.width, entry.samples, entry.queries, entry.keys) == (2, 16, 4, 16, 16)
    assert (entry.operands, entry.result) == ("float16", "int8" if kind == "int8" else "float8_e4m3fn")
    (mine,), (theirs,) = clock.attentions.values()
    assert mine.dtype is theirs.dtype is (torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    assert mine.stride() == theirs.stride()
    assert _db(theirs, mine) > 40
    text = "scaled_dot_product_attention: 1.50 times as fast as the kernel at 3 to 4 samples of 1 to 16 queries and "
    assert engine.plan.of("encoder.layer.0.attention.self")[1].measured == (f"{text}1 to 16 keys",)
    assert _db(before, _outputs(engine)) > 35
    table._entries.clear()
    engine.tune(INPUTS, seconds=Clock(first_attention_tile(8)))
    assert table[entry] == Measured(first_attention_tile(8))
    assert not engine.plan.of("encoder.layer.0.attention.self")[1].measured


def test_padding_does_not_reach_real_tokens(engines: dict[str, Any], table: TileTable) -> None:
    """On either side; in a sample of padding alone, SDPA in float16 differs from the model in float32."""
    engine, inputs = engines["int8"], batch("bert", seed=3, length=20)
    real = torch.stack([torch.arange(20) < 6, torch.arange(20) >= 15, torch.arange(20) < 0])
    inputs["attention_mask"] = real.long()
    found = engine({name: value.numpy() for name, value in inputs.items()})[engine.output_names[0]]
    assert torch.from_numpy(found).isfinite().all()
    operands = torch.empty(3, 2, 20, 16).half()
    table._entries[attention_entry(operands, operands, torch.int8)] = Measured(LIBRARY)
    expected = engine({name: value.numpy() for name, value in inputs.items()})[engine.output_names[0]]
    assert _db(expected[:2], found[:2]) > 40
    table._entries.clear()
    inputs["input_ids"][~real] = 5
    other = engine({name: value.numpy() for name, value in inputs.items()})[engine.output_names[0]]
    assert (other != found).any()
    assert (other[real.numpy()] == found[real.numpy()]).all()


def test_an_attention_that_the_kernel_does_not_take(table: TileTable) -> None:
    """Wide heads and masks of queries, which SDPA computes."""
    generator = torch.Generator().manual_seed(0)
    compute = gpu_operators.OPERATORS["padded_attention"]
    for width, queries in ((144, 1), (16, 5)):
        q, k, v = (torch.randn(2, 3, 5, width, generator=generator).half() for _ in range(3))
        mask = torch.randn(2, 1, queries, 5, generator=generator).half()
        for options in ((None, None, 0), (torch.int8, torch.rand(3 * width, generator=generator) / 20, 3)):
            found, expected = (call(q, k, v, mask, 0.2, *options) for call in (compute.triton, compute.reference))
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


def test_a_plan_joins_neighbouring_numbers_of_tokens(engines: dict[str, Any], table: TileTable) -> None:
    engine = engines["int8"]
    engine.tune(INPUTS, seconds=Clock(FLOAT16))
    (product,) = (each for each in table.products if each.epilogue.startswith("gelu"))
    methods = {16: (FLOAT16, 1.5), 32: (FLOAT16, 1.25), 128: (FLOAT16, 1.2), 256: (LIBRARY, None)}
    table._entries |= {replace(product, rows=rows): Measured(*measured) for rows, measured in methods.items()}
    assert engine.plan.of("encoder.layer.0.intermediate")[0].measured == (
        "float16: 1.25 to 1.50 times as fast as 8 bits at 1 to 32 tokens",
        "float16: 1.20 times as fast as 8 bits at 65 to 128 tokens",
        "torch._int_mm and a kernel for what follows: the kernel did not run at 129 to 256 tokens",
    )


def test_a_copy_of_a_weight_in_float16_exists_only_where_it_is_used(engines: dict[str, Any], table: TileTable) -> None:
    engine = engines["int8"]
    for fastest in (first_tile(1), LIBRARY):
        table._entries.clear()
        engine.tune(INPUTS, seconds=Clock(fastest))
        assert len(gpu_operators._COPIES) == 0
    table._entries.clear()
    engine.tune(INPUTS, seconds=Clock(FLOAT16))
    _outputs(engine)
    assert len(gpu_operators._COPIES) == 5  # four products of the layer, and the pooler
    copies = {copy.data_ptr() for copy in gpu_operators._COPIES.values()}
    _outputs(engine)
    assert {copy.data_ptr() for copy in gpu_operators._COPIES.values()} == copies


def test_a_copy_of_a_weight_is_freed_with_it(table: TileTable) -> None:
    a, weight = (torch.ones(rows, 8, dtype=torch.int8) for rows in (2, 3))
    operands = (0.5, torch.ones(3), None, None, None, 0, "none", torch.float16, 1)
    assert gpu_operators.linear_with(FLOAT16, a, weight, *operands).tolist() == [[4.0] * 3] * 2
    assert [copy.dtype for copy in gpu_operators._COPIES.values()] == [torch.float16]
    del weight
    gc.collect()
    assert len(gpu_operators._COPIES) == 0


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
def test_the_largest_sums_do_not_overflow_in_float16(table: TileTable, storage: torch.dtype) -> None:
    lowest = -128 if storage is torch.int8 else -448
    a, weight = (torch.full((rows, 300), lowest, dtype=torch.float32).to(storage) for rows in (2, 3))
    operands = (1e-3, torch.full((3,), 1e-3), None, None, None, 0, "none", torch.float32, 1)
    found = gpu_operators.linear_with(FLOAT16, a, weight, *operands)
    torch.testing.assert_close(found, torch.full((2, 3), 300 * lowest**2 * 1e-6), rtol=1e-3, atol=0)


@pytest.mark.parametrize("is_captured", [True, False])
def test_methods_are_timed_as_replays_of_a_graph_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    """A call takes 2 ms with its launch, and 1 ms in a graph."""
    milliseconds = [0.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = milliseconds[0]

        def elapsed_time(self, end: Event) -> float:
            return end.time - self.time

    def capture(compute: Any, inputs: list[Tensor]) -> Any:
        if not is_captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        before = milliseconds[0]
        assert compute(*inputs) == []
        calls = (milliseconds[0] - before) / 2

        def replay(given: list[Tensor]) -> list[Tensor]:
            milliseconds[0] += calls
            return given

        return replay

    def call() -> None:
        milliseconds[0] += 2

    monkeypatch.setattr(gpu_engine, "captured", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert gpu_engine.gpu_seconds(call) == pytest.approx(0.001 if is_captured else 0.002)


def test_a_cpu_has_no_graphs(path: Path) -> None:
    engine = engine_on(path, "cpu", triton=False)
    first = _outputs(engine)
    assert (_outputs(engine) == first).all()
    assert engine.no_graphs == "a CPU has no CUDA graphs"
