"""A rest in half: which modules stay float32, what the file then holds, and the simulation of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from calibrated import make_calibrated
from helpers import assert_same, batch, tiny
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.numerics.formats import FLOAT16_MASK
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.torch_operators import dequantize
from quantizer.observe.float16_modules import Float32Modules, convert_floats
from quantizer.observe.float16_overflow import MaskTaint
from quantizer.proxy import operand_quantizer
from quantizer.proxy.operand_quantizer import OperandQuantizer

LARGEST_HALF = 65504.0


class Norm(nn.Module):
    """Squares its input, as RMSNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """A residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stream(nn.Module):
    """Three blocks; from the second on, the residual stream is beyond float16 where ``factor`` is large."""

    def __init__(self, factor: float, first: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = Norm()
        self.head = nn.Linear(16, 16)
        with torch.no_grad():
            self.first.weight.mul_(first)
            self.blocks[1].down.weight.mul_(factor)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Normed(nn.Module):
    """Adds what its wide child gives to what it has in half, and notes the types that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        total = x + normed
        self.types += [x.dtype, normed.dtype, total.dtype]
        return total


class Framed(nn.Module):
    """``Normed`` between linears, with values of some hundreds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.inner = Normed()
        self.last = nn.Linear(16, 16)
        with torch.no_grad():
            self.first.weight.mul_(1e3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Masks(nn.Module):
    """Squares large values, so it is wide; and makes the additive mask that another reads."""

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1e3
        mask = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, torch.finfo(torch.float32).min)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True)), mask


def attends() -> nn.Module:
    """Reads a mask."""
    return net("x = self.linear(x); return (x @ x.mT + mask).softmax(-1) @ x", "x, mask", linear=nn.Linear(16, 16))


class Masking(nn.Module):
    """A wide module, and an additive mask of -3.4e38 that it hands to one in half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks = Masks()
        self.attend = attends()
        self.eval()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.attend(*self.masks(x, keep))


class Shared(nn.Module):
    """One layer twice, and its caller only hands on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        with torch.no_grad():
            self.layer.weight.mul_(1e3)
            self.last.weight.mul_(1e-6)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.last(self.layer(self.layer(x)))


WIDE = {"blocks.1", "blocks.1.down", "blocks.2", "blocks.2.norm", "norm", ""}


def calibrated(model: nn.Module, x: Tensor, **options: object) -> Quantizer:
    return make_calibrated(model, [x], backend="tensorrt-rtx", **options)


def data() -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


# -- what calibration sees -----------------------------------------------------------------------------------------


class Measured(TorchDispatchMode):
    """The largest magnitude that each module's own operations made, by measuring all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.largest: dict[str, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                path = self.running[-1]
                self.largest[path] = max(self.largest.get(path, 0.0), float(value.abs().max()))
        return result


@pytest.mark.parametrize("factor", [1.0, 30.0, 1e4, 1e6])
def test_no_module_beyond_float16_is_missed_and_none_made_up(factor: float) -> None:
    model, x = Stream(factor), data()
    measured = Measured()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, path=path: measured.running.append(path))
        module.register_forward_hook(lambda *_: measured.running.pop() and None)
    with torch.no_grad(), measured:
        model(x)
    makers = {path for path, largest in measured.largest.items() if largest > LARGEST_HALF}
    wide = calibrated(Stream(factor), x).coverage.regions.wide
    assert makers <= set(wide)
    assert bool(makers) == bool(wide)
    for path in makers:
        # The sites' own observation may differ in the last bit of a sum.
        assert wide[path] == pytest.approx(measured.largest[path], rel=1e-5)


def test_modules_through_which_large_values_travel_are_wide() -> None:
    assert set(calibrated(Stream(1e6), data()).coverage.regions.wide) == WIDE
    for factor in (1.0, 1e6):
        regions = calibrated(Stream(factor), data()).coverage.regions
        assert bool(regions.wide) == (factor > 1)
        assert not regions.masked


def test_a_module_that_only_hands_large_values_on_is_wide() -> None:
    assert set(calibrated(Shared(), data()).coverage.regions.wide) == {"layer", "last", ""}


def test_inputs_beyond_float16_are_taken_as_float32() -> None:
    model, x = nn.Linear(16, 16).eval(), data() * 1e6
    quantizer = calibrated(model, x)
    assert quantizer.coverage.regions.wide_inputs
    with torch.no_grad():
        assert sqnr_db(quantizer.simulate(model)(x), quantizer.quantize(model)(x)) > 100


def test_masks_are_no_values() -> None:
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx")
    model, inputs = tiny("bert"), dict(batch("bert"))
    inputs["attention_mask"] = inputs["attention_mask"].clone()
    inputs["attention_mask"][:, -2:] = 0
    quantizer.calibrate(model, [inputs], progress=False)
    assert not quantizer.coverage.regions.wide


def test_the_variance_of_a_normalization_counts() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval()
    with torch.no_grad():
        model[0].weight.mul_(2e3)
    assert set(calibrated(model, data()).coverage.regions.wide) == {"1"}


def test_the_largest_value_is_told_with_its_module() -> None:
    said = "2 modules stay float32: their values exceed float16, the largest is 9e+05 in "
    assert Float32Modules(wide={"first": 9e5, "last": 7e4}).text() == f"{said}first"
    assert Float32Modules(wide={"": 9e5, "last": 7e4}).text() == f"{said}the model itself"


def test_what_stays_float32_is_said_and_kept(tmp_path: Path) -> None:
    quantizer = calibrated(Stream(1e6), data())
    said = "6 modules stay float32: their values exceed float16, the largest"
    assert said in quantizer.coverage.text()
    loaded = Quantizer.load(quantizer.save(tmp_path / "saved"))
    assert loaded.coverage.regions.wide == quantizer.coverage.regions.wide
    assert said in loaded.coverage.text()
    resumed = loaded.calib(model := Stream(1e6), resume=True)
    with torch.no_grad():
        resumed(data())
    assert set(loaded.coverage.regions.wide) == WIDE
    assert loaded.plan["blocks.1.down.forward.linear_0"].beyond_half == pytest.approx(
        loaded.coverage.regions.wide["blocks.1.down"]
    )
    del model


def test_low_values_that_are_no_mask_stay_before_a_softmax() -> None:
    softmax, low, keep = (
        torch.ops.aten._softmax.default,
        torch.tensor([-5e4, -4.5e4]).half(),
        torch.tensor([True, False]),
    )
    taint, total = MaskTaint(), low + 0
    taint.follow(torch.ops.aten.add.Tensor, (low, torch.zeros(2).half()), {}, total)
    assert taint.read(softmax, (total, -1, False), {})[0][0] is total
    masked = low.masked_fill(keep, -math.inf)
    taint.follow(torch.ops.aten.masked_fill.Scalar, (low, keep, -math.inf), {}, masked)
    (raised, *_), _ = taint.read(softmax, (masked, -1, False), {})
    assert raised.min() == FLOAT16_MASK
    # What is no softmax is given the mask as it is.
    assert taint.read(torch.ops.aten.exp.default, (masked,), {})[0][0] is masked


class Pairs(nn.Module):
    """Gives two tensors in a list of a dictionary."""

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"both": [x * 1e3, x]}


class Takes(nn.Module):
    """Adds the tensors of ``Pairs``, and notes the types that it meets."""

    def forward(self, values: dict[str, list[Tensor]]) -> Tensor:
        self.types = [value.dtype for value in values["both"]]
        return sum(values["both"])


def test_tensors_in_a_structure_are_cast_where_they_leave_a_wide_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Pairs(), Takes())
    convert_floats(model, torch.float16, Float32Modules(wide={"1": 1e6}, computing=("0", "1", "2")))
    with torch.no_grad():
        assert model(torch.randn(2, 4).half()).dtype == torch.float16
    assert model[2].types == [torch.float16] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_of_a_wide_and_of_another_module_trains_as_before(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight.requires_grad_(trains)
    convert_floats(model, torch.float16, Float32Modules(wide={"1": 1e6}, computing=("0", "1")))
    assert [layer.weight.dtype for layer in model] == [torch.float16, torch.float32]
    assert [layer.weight.requires_grad for layer in model] == [trains] * 2


# -- the simulation ------------------------------------------------------------------------------------------------


def test_the_rest_is_computed_in_half_and_summed_in_float32() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 8).eval(), torch.randn(4, 64)
    quantizer = calibrated(model, x, sites={"linear": False})
    with torch.no_grad():
        found = quantizer.simulate(model)(x)
        halves = [value.half().float() for value in (x, model.weight, model.bias)]
        expected = functional.linear(*halves).half().float()
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
        assert not torch.equal(found, quantizer.quantize(model)(x))


def test_a_float32_target_is_simulated_by_the_frozen_proxy() -> None:
    model, x = Stream(1.0), data()
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [x], progress=False)
    with torch.no_grad():
        assert torch.equal(quantizer.simulate(model)(x), quantizer.quantize(model)(x))


def test_wide_modules_stay_float32_in_the_simulation() -> None:
    model, x = Stream(1e6), data()
    quantizer = calibrated(model, x)
    simulated, types = quantizer.simulate(model), {}
    for path, module in simulated.named_modules():
        if isinstance(module, Block | Norm):
            module.register_forward_hook(lambda m, a, r, path=path: types.update({path: a[0].dtype}))
    with torch.no_grad():
        found, expected = simulated(x), quantizer.quantize(model)(x)
    assert types["blocks.0"] is torch.float16
    assert types["blocks.2"] is torch.float32
    assert simulated.blocks[0].norm.weight.dtype is torch.float16
    assert simulated.blocks[2].norm.weight.dtype is torch.float32
    assert bool(found.isfinite().all())
    assert sqnr_db(found, expected) > 30
    assert model.first.weight.dtype is torch.float32


def test_what_a_wide_module_gives_is_half_for_its_caller() -> None:
    model, x = Framed(), data()
    quantizer = calibrated(model, x)
    assert set(quantizer.coverage.regions.wide) == {"inner.norm"}
    simulated = quantizer.simulate(model)
    simulated.inner.types.clear()
    with torch.no_grad():
        found, expected = simulated(x), quantizer.quantize(model)(x)
    assert simulated.inner.types == [torch.float16] * 3
    assert sqnr_db(found, expected) > 30


def test_masks_that_come_from_a_wide_module_are_clamped() -> None:
    model, x = Masking(), torch.randn(4, 5, 16)
    keep = torch.ones(4, 5, 5, dtype=torch.bool).tril()
    keep[0, 2] = False  # a query that may look at nothing
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx")
    quantizer.calibrate(model, [(x, keep)], progress=False)
    regions = quantizer.coverage.regions
    assert set(regions.wide) == {"masks"}
    assert "attend" in regions.masked
    with torch.no_grad():
        found, expected = quantizer.simulate(model)(x, keep), quantizer.quantize(model)(x, keep)
    assert bool(found.isfinite().all())
    assert sqnr_db(found, expected) > 30


def test_a_file_without_regions_is_refused(tmp_path: Path) -> None:
    folder = calibrated(Framed(), data()).save(tmp_path / "saved")
    document = yaml.safe_load((folder / "quantizer.yaml").read_text(encoding="utf-8"))
    assert document.pop("regions")["wide"]
    (folder / "quantizer.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(QuantizerError, match="regions missing"):
        Quantizer.load(folder)


def test_a_query_that_may_look_at_nothing_does_not_become_nan() -> None:
    model, inputs = tiny("bert"), dict(batch("bert"))
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx")
    quantizer.calibrate(model, [inputs], progress=False)
    inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    with torch.no_grad():
        assert not quantizer.simulate(model)(**inputs)[0].isnan().any()


class _Low(nn.Module):
    """Gives a function of a linear's output, [N, 32]."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        return self.function(self.linear(x))


LOW = {
    "factor": lambda s: (s * 1e-4 * -40000.0).relu() + 1,
    "tensor": lambda s: s * 1e-4 * torch.tensor(-40000.0),
    "divisor": lambda s: s * 1e4 / -50000.0,
    "returned": lambda s: s.masked_fill(s > 0.2, -math.inf),
    "compared": lambda s: (s.masked_fill(s > 0.2, -math.inf) == -math.inf).to(s.dtype) + s,
    "bound": lambda s: (s * 2e4).clamp(min=-31000.0) * 1e-4,
    "softmax": lambda s: s.masked_fill(s > 0.2, -math.inf).softmax(-1),
    "added": lambda s: (s + (s > 0.2).to(s.dtype) * torch.finfo(torch.float32).min).softmax(-1),
    "everywhere": lambda s: s.masked_fill(s > -9, torch.finfo(torch.float32).min).softmax(-1) + s,
    "infinite": lambda s: torch.where(s > -9, -math.inf, s).softmax(-1) + s,
}


@pytest.mark.parametrize("which", LOW)
def test_low_numbers_are_masks_where_a_softmax_alone_sees_them(which: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    torch.manual_seed(0)
    model, x = _Low(LOW[which]).eval(), torch.randn(16, 32)
    quantizer = Quantizer(preset="plain", backend="tensorrt")
    quantizer.calibrate(model, [x], progress=False)
    with torch.no_grad():
        proxy, simulated = quantizer.quantize(model)(x), quantizer.simulate(model)(x)
    path = tmp_path / "model.onnx"
    quantizer.export(quantizer.quantize(model), path, x)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    exported = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.half().numpy()})[0]).float()
    for found in (simulated, exported):
        assert not found.isnan().any()
        infinite = found.isinf()
        if which in ("everywhere", "infinite"):
            assert sqnr_db(found, simulated) > 40
            continue
        # Half rounds what is compared: a value at the border may fall on the other side.
        assert (infinite != proxy.isinf()).float().mean() < 0.02
        both = ~(infinite | proxy.isinf())
        assert sqnr_db(found[both], proxy[both]) > 20


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model, x = Stream(1e6), data()
    quantizer = calibrated(model, x)
    simulated = quantizer.simulate(model)
    with torch.no_grad():
        expected = simulated(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            simulated(x[:, :3])
        assert torch.equal(simulated(x), expected)


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Quantizer, nn.Module, Path]:
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    model, x = Stream(1.0, first=2e3), data()
    quantizer = calibrated(model, x)
    path = tmp_path_factory.mktemp("half") / "model.onnx"
    with pytest.warns(UserWarning, match="4 modules stay float32: their values exceed float16"):
        quantizer.export(quantizer.quantize(model), path, x)
    return quantizer, model, path


def test_the_file_is_half_but_for_the_wide_modules(exported: tuple[Quantizer, nn.Module, Path]) -> None:
    onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
    file = onnx.shape_inference.infer_shapes(onnx.load(exported[2]))
    element = {v.name: v.type.tensor_type.elem_type for v in (*file.graph.value_info, *file.graph.output)}
    nodes = {output: node for node in file.graph.node for output in node.output}
    norms = {"norm", *(f"blocks.{place}.norm" for place in range(3))}
    for node in file.graph.node:
        # A multiplication is a module of its own in the proxy, inside of the norm.
        wide = node.name.split("/")[0].partition(".site_")[0] in norms
        if node.op_type in ("Mul", "ReduceMean", "Gemm", "Add", "Relu"):
            assert element[node.output[0]] == (onnx.TensorProto.FLOAT if wide else onnx.TensorProto.FLOAT16), node.name
        for source in node.input:
            if node.op_type in ("Gemm", "MatMul") and source in nodes:
                assert nodes[source].op_type == "DequantizeLinear"
    # In and out of each of the four norms.
    assert sum(node.op_type == "Cast" for node in file.graph.node) == 8


def test_onnx_runtime_agrees_with_the_simulation(exported: tuple[Quantizer, nn.Module, Path]) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    quantizer, model, path = exported
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    x = data()
    (found,) = session.run(None, {session.get_inputs()[0].name: x.half().numpy()})
    with torch.no_grad():
        simulated, proxy = quantizer.simulate(model)(x), quantizer.quantize(model)(x)
    agreement = sqnr_db(torch.from_numpy(found).float(), simulated)
    assert agreement > 45
    assert agreement > sqnr_db(torch.from_numpy(found).float(), proxy)


def test_tensorrt_rtx_builds_it(exported: tuple[Quantizer, nn.Module, Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX")
    quantizer, _, path = exported
    built = quantizer.build(path, tmp_path / "model.engine", dynamic={"batch": (1, 8, 64)}, compute_capability="sm89")
    assert built.path.stat().st_size > 0


@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (1, None), (-1, None), (1, 4), (0, 5)])
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_a_weight_in_slices_is_the_weight(
    axis: int | None, block_size: int | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    quantizer = OperandQuantizer()
    scale = torch.rand(scale_shape(weight.shape, axis, block_size)) + 0.1
    quantizer.set_scale(scale, dtype, axis, block_size)
    quantizer.store(weight)
    whole = quantizer.dequantized()
    assert quantizer.stored is not None
    exact = dequantize(quantizer.stored, scale, dtype, axis, block_size).to(torch.bfloat16)
    monkeypatch.setattr(operand_quantizer, "_SLICE", 70)
    for found in (whole, quantizer.dequantized()):
        assert_same(found, exact)
        assert found.stride() == exact.stride()
