"""The frozen proxy: integers in the place of weights, and what people do with it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import some_daily
from helpers import ConvNet, Mlp, batch, tiny
from outside import run_outside
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import QTYPES
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.utils.files.temporary import OLD, new_name

HERE = Path(__file__).parent


def _run_in_a_new_process(script: str, *arguments: Path) -> None:
    """Run a script in a process that has imported nothing; it fails by an exception."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys\n{script}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def _frozen(model: nn.Module, *data: Any, **options: Any) -> tuple[Quantizer, Any]:
    q = Quantizer(preset="plain", **{"backend": "openvino", **options})
    q.calibrate(model, data)
    return q, q.quantize(model)


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_weights_are_integers_and_stay_readable(granularity: str) -> None:
    model = Mlp().eval()
    q, frozen = _frozen(model, torch.randn(8, 32), weights={"granularity": granularity})
    stored = {name: value for name, value in frozen.state_dict().items() if value.dtype == torch.int8}
    assert {value.shape for value in stored.values()} == {model.up.weight.shape, model.down.weight.shape}
    assert not [name for name, _ in frozen.named_parameters() if name.endswith("weight")]
    for name in ("up", "down"):
        layer, original = getattr(frozen, name), getattr(model, name).weight
        operand = next(o for o in q.plan[f"{name}.forward.linear_0"].operands if o.name == "weight")
        expected = ops.fake_quantize(original, operand.scale, "int8", operand.axis)
        assert torch.equal(layer.weight, expected)
        assert layer.weight.dtype == original.dtype
        assert layer.weight.shape == original.shape
        assert layer.weight.device == original.device
        assert (layer.weight - original).abs().max() <= operand.scale.max() / 2 * 1.0001
    size = sum(value.numel() * value.element_size() for value in frozen.state_dict().values())
    float_size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert size < float_size / 2


def test_the_frozen_output_is_the_quantized_formula() -> None:
    model = nn.Sequential(nn.Linear(32, 16)).eval()
    x = torch.randn(8, 32)
    q, frozen = _frozen(model, x, activations={"calibrator": "percentile", "percentile": 95})
    operands = {operand.name: operand for operand in q.plan["0.forward.linear_0"].operands}
    rounded = ops.fake_quantize(x, operands["input"].scale, "int8")
    weight = ops.fake_quantize(model[0].weight, operands["weight"].scale, "int8", 0)
    assert torch.equal(frozen(x), F.linear(rounded, weight, model[0].bias))


def test_ranges_are_fixed() -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    _, frozen = _frozen(model, x)
    expected = frozen(x)
    frozen(x * 1000)
    assert torch.equal(frozen(x), expected)
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert torch.equal(frozen(x), expected)


def test_a_frozen_model_is_in_eval_mode() -> None:
    model = ConvNet().train()
    _, frozen = _frozen(model, torch.randn(2, 3, 16, 16))
    assert not any(module.training for module in frozen.modules())
    assert model.training


@pytest.mark.parametrize("dtype", sorted(QTYPES))
def test_a_cast_leaves_stored_steps_alone(dtype: str) -> None:
    weight = torch.randn(4, 8)
    quantizer = OperandQuantizer()
    quantizer.set_scale(weight.abs().amax(1) / QTYPES[dtype].qmax, dtype, 0)
    quantizer.store(weight)
    before = quantizer.stored
    assert before is not None
    assert before.dtype == QTYPES[dtype].storage
    quantizer.half()
    assert quantizer.stored is not None
    assert quantizer.stored.dtype == before.dtype
    assert torch.equal(quantizer.stored.float(), before.float())
    assert quantizer.dequantized().dtype == torch.float16


def test_casting_a_frozen_model() -> None:
    model = Mlp().eval()
    x = torch.randn(8, 32)
    _, frozen = _frozen(model, x)
    expected = frozen(x)
    frozen.half()
    assert frozen.up.weight.dtype == torch.float16
    assert frozen.up.site_forward_linear_0._weight_quantizer.stored.dtype == torch.int8
    assert (frozen(x.half()) - expected).norm() / expected.norm() < 0.02


class Tied(nn.Module):
    """An embedding and an output head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


def test_tied_weights() -> None:
    model = Tied().eval()
    ids = torch.randint(0, 48, (4, 8))
    q, frozen = _frozen(model, ids)
    assert len(q.coverage.quantized) == 2  # the looked-up rows depend on the data, so the first linear is a site too
    assert torch.equal(frozen.embedding(ids), model.embedding(ids))
    assert torch.equal(frozen.embedding.weight, model.embedding.weight)
    operands = {operand.name: operand for operand in q.plan["head.forward.linear_0"].operands}
    hidden = frozen.body(model.embedding(ids))
    rounded = ops.fake_quantize(hidden, operands["input"].scale, "int8")
    weight = ops.fake_quantize(model.head.weight, operands["weight"].scale, "int8", 0)
    assert torch.equal(frozen(ids), F.linear(rounded, weight))


def two_readers() -> nn.Module:
    """Two sites of one module read one weight."""
    return net(
        "hidden = F.linear(x, self.weight).tanh(); return F.linear(hidden, self.weight)",
        weight=nn.Parameter(torch.randn(32, 32)),
    )


def test_one_of_two_readers_is_excluded_and_keeps_the_float_weight() -> None:
    model = two_readers().eval()
    x = torch.randn(8, 32)
    q, frozen = _frozen(model, x, exclude={"sites": ["forward.linear_1"]})
    operands = {operand.name: operand for operand in q.plan["forward.linear_0"].operands}
    rounded = ops.fake_quantize(x, operands["input"].scale, "int8")
    weight = ops.fake_quantize(model.weight, operands["weight"].scale, "int8", 0)
    assert torch.equal(frozen(x), F.linear(F.linear(rounded, weight).tanh(), model.weight))


class Elsewhere(nn.Module):
    """Products with parameters that are not called ``weight``, or belong to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.projection = nn.Parameter(torch.randn(32, 48))
        self.table = nn.Embedding(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.body(x), self.body.weight)
        return y @ self.projection + F.linear(y, self.table.weight)


def test_weights_of_other_modules_and_of_other_names() -> None:
    model = Elsewhere().eval()
    x = torch.randn(8, 32)
    q, frozen = _frozen(model, x, sites={"residual_add": False})
    assert {row.name for row in q.coverage.quantized} == {
        "body.forward.linear_0",
        "forward.linear_0",
        "forward.matmul_0",
        "forward.linear_1",
    }
    projection = next(o for o in q.plan["forward.matmul_0"].operands if o.name == "rhs")
    assert (projection.role, projection.axis) == ("weight", 1)
    assert projection.scale is not None
    assert projection.scale.shape == (48,)
    expected = model(x)
    assert (frozen(x) - expected).norm() / expected.norm() < 0.05


def test_a_reader_elsewhere_that_is_excluded_keeps_the_float_weight() -> None:
    model = Elsewhere().eval()
    x = torch.randn(8, 32)
    _, frozen = _frozen(model, x, include={"sites": ["body.forward.linear_0"]})
    hidden = frozen.body(x)
    y = F.linear(hidden, model.body.weight)
    assert torch.equal(frozen(x), y @ model.projection + F.linear(y, model.table.weight))


# -- save and load -------------------------------------------------------------------------------------------------

_RELOAD = """
from pathlib import Path
import torch
from helpers import assert_same, batch, tiny
from quantizer import Quantizer
folder = Path()
model = tiny("bert-classification", "sdpa")
q = Quantizer.load(folder / "state")
kept = torch.load(folder / "kept.pt")
with torch.no_grad():
    frozen = q.quantize(model)
    assert_same(dict(frozen(**kept["inputs"])), kept["output"])
assert str(q.coverage) == kept["coverage"], str(q.coverage)
assert str(q.ranges) == kept["ranges"]
assert [row.name for row in q.coverage.quantized] == kept["quantized"]
q.save(folder / "again")
assert (folder / "again/quantizer.yaml").read_bytes() == (folder / "state/quantizer.yaml").read_bytes()
"""


@pytest.mark.parametrize("fallback", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_reload_in_a_new_process_is_bit_identical(tmp_path: Path, fallback: bool) -> None:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    model = tiny("bert-classification", "sdpa")
    inputs = batch("bert", padded=True)
    q = Quantizer(preset="plain", exclude={"names": ["classifier"]})
    q.calibrate(model, [inputs, batch("bert", seed=3)])
    with torch.no_grad():
        if fallback:
            amp = q.amp(model)
            amp(**inputs)
            assert len(q.fallback(amp, num=2).groups) == 2
        output = q.quantize(model)(**inputs)
    assert q.save(tmp_path / "state") == tmp_path / "state"
    files = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert files == [".quantizer.json", "observed.safetensors", "quantizer.yaml", "ranges.safetensors"]
    kept = {
        "inputs": inputs,
        "output": dict(output),
        "quantized": [row.name for row in q.coverage.quantized],
        "coverage": str(q.coverage),
        "ranges": str(q.ranges),
    }
    torch.save(kept, tmp_path / "kept.pt")
    path = f"import sys, warnings; warnings.simplefilter('error'); sys.path.insert(0, {str(HERE.parent)!r})"
    run_outside(tmp_path, f"{path}\n{_RELOAD}")


def test_saving_twice_replaces(tmp_path: Path) -> None:
    model = Mlp().eval()
    q, _ = _frozen(model, torch.randn(8, 32))
    q.save(tmp_path / "state")
    q.calibrate(model, [torch.randn(8, 32) * 5])
    q.save(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert str(Quantizer.load(tmp_path / "state").ranges) == str(q.ranges)


def test_saving_keeps_what_was_put_beside(tmp_path: Path) -> None:
    q, _ = _frozen(Mlp().eval(), torch.randn(8, 32))
    q.save(tmp_path / "state")
    (tmp_path / "state" / "notes").write_text("mine")
    with pytest.raises(QuantizerError, match="contains 'notes', which quantizer did not write"):
        q.save(tmp_path / "state")
    assert (tmp_path / "state" / "notes").read_text() == "mine"


def test_loading_puts_back_what_a_kill_left_aside(tmp_path: Path) -> None:
    q, _ = _frozen(Mlp().eval(), torch.randn(8, 32))
    q.save(tmp_path / "state").rename(new_name(tmp_path / "state").with_suffix(OLD))
    assert str(Quantizer.load(tmp_path / "state").ranges) == str(q.ranges)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "quantizer.yaml").unlink(), "is not a folder of Quantizer.save...*yaml is missing"),
        (lambda folder: (folder / "ranges.safetensors").unlink(), "ranges.safetensors is missing|No such file"),
        (lambda folder: (folder / "ranges.safetensors").write_bytes(b"x" * 20), "cannot be read"),
        (lambda folder: (folder / "quantizer.yaml").write_text("a: [1"), "cannot be read"),
        (lambda folder: (folder / "quantizer.yaml").write_text("- 1"), "format None, but this version reads format 1"),
        (
            lambda folder: (folder / "quantizer.yaml").write_text("format: 99"),
            "format 99, but this version reads format 1",
        ),
        (lambda folder: (folder / "quantizer.yaml").write_text("format: 1"), "damaged"),
        (lambda folder: (folder / "quantizer.yaml").write_text("format: 1\nsites: 5"), "damaged"),
        (
            lambda folder: (folder / "quantizer.yaml").write_text("format: 1\nsites: []"),
            "config and scales_replaced and fallback and regions and fingerprint missing",
        ),
    ],
)
def test_a_damaged_folder(tmp_path: Path, damage: Any, message: str) -> None:
    q, _ = _frozen(Mlp().eval(), torch.randn(8, 32))
    folder = q.save(tmp_path / "state")
    damage(folder)
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(folder)


def test_a_loaded_quantizer_can_be_calibrated_again(tmp_path: Path) -> None:
    model = Mlp().eval()
    q, _ = _frozen(model, torch.randn(8, 32))
    loaded = Quantizer.load(q.save(tmp_path / "state"))
    x = torch.randn(8, 32) * 9
    loaded.calibrate(model, [x])
    fresh, expected = _frozen(model, x)
    assert str(loaded.ranges) == str(fresh.ranges)
    assert torch.equal(loaded.quantize(model)(x), expected(x))


def test_the_weight_of_a_convolution_is_a_plain_tensor() -> None:
    _, frozen = _frozen(ConvNet().eval(), torch.randn(2, 3, 16, 16))
    # That of a table is not: a lookup reads a few rows.
    assert type(frozen.stem.weight) in (Tensor, nn.Parameter)


# -- tracing, compiling, exporting ---------------------------------------------------------------------------------

_LOAD_TRACED = """
import warnings
from pathlib import Path
{imports}
warnings.simplefilter("ignore")  # torch says that torch.jit is deprecated
folder = Path(sys.argv[1])
kept = torch.load(folder / "kept.pt")
traced = torch.jit.load(folder / "traced.pt")
for x, y in zip(kept["inputs"], kept["outputs"]):
    assert torch.equal(traced(x), y)
"""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "imports", some_daily(["import torch; import quantizer", "import quantizer.functional; import torch"], 1)
)
def test_trace_save_and_load_in_a_new_process(tmp_path: Path, imports: str) -> None:
    model = ConvNet().eval()
    inputs = [torch.randn(rows, 3, 16, 16) for rows in (2, 5)]
    _, frozen = _frozen(model, *inputs)
    with torch.no_grad():
        outputs = [frozen(x) for x in inputs]
        traced = torch.jit.trace(frozen, inputs[0])
    torch.jit.save(traced, tmp_path / "traced.pt")
    torch.save({"inputs": inputs, "outputs": outputs}, tmp_path / "kept.pt")
    loaded = torch.jit.load(tmp_path / "traced.pt")
    for x, y in zip(inputs, outputs, strict=True):
        assert torch.equal(loaded(x), y)
    _run_in_a_new_process(_LOAD_TRACED.format(imports=imports), tmp_path)


# Lowered ones are compiled by it in the daily tests.
@pytest.mark.nightly
def test_compile_with_the_default_backend() -> None:
    import shutil

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the default backend needs a C++ compiler")
    model = Mlp().eval()
    x = torch.randn(4, 32)
    _, frozen = _frozen(model, x)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(frozen)
        assert torch.allclose(compiled(x), frozen(x), atol=1e-5)


# -- the classic workflow ------------------------------------------------------------------------------------------


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Mlp, (8, 32)), (_sequential, (8, 32)), (ConvNet, (8, 3, 16, 16))],
    ids=["mlp", "sequential", "conv"],
)
def test_the_classic_workflow(make: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """As people write it: no arguments, no eval(), no no_grad()."""
    model, data = make(), torch.randn(shape)

    quantizer = Quantizer(preset="plain")
    quantizer.calib(model)(data)
    amp_model = quantizer.amp(model)
    amp_model(data)
    quantizer.fallback(amp_model, num=1)
    output = quantizer.quantize(model)(data)

    quant_model = quantizer.quantize(model)
    traced = torch.jit.trace(quant_model, data)
    torch.jit.save(traced, tmp_path / "quant.pt")
    assert torch.equal(torch.jit.load(tmp_path / "quant.pt")(data), output)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(quant_model, backend="eager")(data), output)

    assert model.training
    expected = model.eval()(data)
    assert (output - expected).norm() / expected.norm() < 0.1
    assert not torch.equal(output, expected)
    assert len(quantizer.sensitivity) >= 2
    assert sum(row.fallback for row in quantizer.sensitivity) == 1
