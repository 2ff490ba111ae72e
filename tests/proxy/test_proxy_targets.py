"""What a target's limits make of a model, told by what calibration saw: the reason and the rule of each site."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp
from torch import Tensor, nn
from torch.nn import functional
from toy_nets import net

from quantizer import Quantizer
from quantizer.config import RunConfig
from quantizer.config.schema import check_run
from quantizer.errors import ConfigError, ExportError
from quantizer.plan.reasons import ReasonCode

TARGET = "target tensorrt"


class Attention(nn.Module):
    """Two heads, written out or fused: [rows, length, 2 * head] to the same."""

    def __init__(self, head: int, *, fused: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(2 * head, 2 * head) for _ in range(3))
        self.head, self.fused = head, fused

    def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
        shape = (x.shape[0], x.shape[1], 2, self.head)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        if steps is not None:
            query = query[:, :, -steps:]
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            mixed = torch.matmul(torch.matmul(query, key.transpose(-2, -1)).softmax(-1), value)
        return mixed.transpose(1, 2).flatten(2)


def reasons(model: nn.Module, *lengths: int, width: int = 64, **options: Any) -> dict[tuple[str, str | None], int]:
    """How many products of two activations have each reason and rule."""
    steps = options.pop("steps", None)
    quantizer = Quantizer(preset="plain", **{"backend": "tensorrt", **options})
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(2, length, width, generator=generator), "steps": steps} for length in lengths]
    quantizer.calibrate(model.eval(), batches, progress=False)
    found: dict[tuple[str, str | None], int] = {}
    for row in quantizer.coverage:
        if row.kind == "matmul" and ReasonCode.of(row.reason) is not ReasonCode.NEVER_RAN:
            found[row.reason, row.rule] = found.get((row.reason, row.rule), 0) + 1
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_head_sizes(fused: bool) -> None:
    sites = 1 if fused else 2
    held = "int8: query, key, probabilities, value" if fused else "int8: lhs, rhs"
    assert reasons(Attention(32, fused=fused), 16, 24) == {(held, TARGET): sites}
    reason = "tensorrt has no fused attention in int8 for head size 24; supported sizes: 16, 32, 64"
    assert reasons(Attention(24, fused=fused), 16, 32, width=48) == {(reason, TARGET): sites}
    # FP8 has kernels for more of them, and neither limit is OpenVINO's.
    fp8 = {(held.replace("int8", "fp8"), TARGET): sites}
    assert reasons(Attention(48, fused=fused), 16, width=96, dtype="fp8") == fp8
    reason = "tensorrt has no fused attention in fp8 for head size 24, which is not a multiple of 16"
    assert reasons(Attention(24, fused=fused), 16, width=48, dtype="fp8") == {(reason, TARGET): sites}
    own = {(held, "target openvino"): sites}
    assert reasons(Attention(24, fused=fused), 16, width=48, backend="openvino") == own


@pytest.mark.parametrize("fused", [False, True])
def test_the_longest_sequence_decides(fused: bool) -> None:
    sites = 1 if fused else 2
    reason = "tensorrt has no fused attention in int8 for 520 tokens; the longest sequence is 512"
    assert reasons(Attention(16, fused=fused), 16, 520, 32, width=32) == {(reason, TARGET): sites}
    assert list(reasons(Attention(16, fused=fused), 512, 32, width=32).values()) == [sites]


class Block(Attention):
    """An attention whose function holds a residual add, too."""

    def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return torch.matmul(torch.matmul(query, key.transpose(-2, -1)).softmax(-1), value + x)


def test_an_add_beside_an_attention_that_stays_float_does_not() -> None:
    model = Block(12).eval()
    quantizer = Quantizer(preset="plain", backend="tensorrt", sites={"residual_add": True})
    quantizer.calibrate(model, [torch.randn(2, 32, 24)])
    products = [entry for entry in quantizer.plan.values() if entry.kind == "matmul"]
    assert len(products) == 2
    assert all("tensorrt has no fused attention in int8 for head size" in entry.reason for entry in products)
    assert not any(operand.quantized for entry in products for operand in entry.operands)
    (add,) = [entry for entry in quantizer.plan.values() if entry.kind == "residual_add"]
    assert add.quantized
    assert all(operand.quantized for operand in add.operands)


def test_the_products_of_each_attention_are_one_group() -> None:
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(nn.Sequential(Attention(16), Attention(16)).eval(), [torch.randn(2, 32, 32)])
    groups = {
        path: {operand.group for operand in entry.operands}
        for path, entry in quantizer.plan.items()
        if entry.kind == "matmul" and entry.quantized
    }
    assert len(groups) == 4
    assert groups["0.forward.matmul_0"] == groups["0.forward.matmul_1"] == {"0.forward.{matmul_0,matmul_1}"}
    assert groups["1.forward.matmul_0"] == groups["1.forward.matmul_1"] == {"1.forward.{matmul_0,matmul_1}"}


def test_a_product_of_two_activations_that_is_no_attention_has_no_head() -> None:
    assert reasons(net("torch.matmul(x, x.transpose(-2, -1))", "x, steps=None"), 16, width=24) == {
        ("int8: lhs, rhs", TARGET): 1
    }


@pytest.mark.parametrize("steps", [1, 2])
def test_attention_of_one_query_is_a_matrix_vector_product(steps: int) -> None:
    found = reasons(Attention(32), 16, 32, steps=steps)
    reason = "M = 1, a matrix-vector multiplication: slower quantized than in float on tensorrt"
    assert found == {(reason if steps == 1 else "int8: lhs, rhs", TARGET): 2}


def test_a_vector_without_a_batch() -> None:
    model = nn.Linear(32, 32).eval()
    for x, quantized in ((torch.randn(32), False), (torch.randn(1, 32), True)):
        quantizer = Quantizer(preset="plain", backend="tensorrt")
        quantizer.calibrate(model, [x], progress=False)
        # A batch of one may well be larger in use.
        assert bool(quantizer.coverage.quantized) == quantized, x.shape


def test_every_site_names_what_decided() -> None:
    # So many values are cut off that INT8 holds neither branch.
    quantizer = Quantizer(
        preset="plain", backend="tensorrt", exclude={"names": ["attention.query"]}, activations={"percentile": 90.0}
    )
    torch.manual_seed(0)
    model = net(
        "x = x + self.out(self.attention(x)); return (x, self.narrow(x))",
        attention=Attention(32),
        narrow=nn.Linear(64, 4),
        out=nn.Linear(64, 64),
    ).eval()
    quantizer.calibrate(model, [torch.randn(4, 16, 64)], progress=False)
    rules = {
        row.name: row.rule
        for row in quantizer.coverage
        if not row.quiet and ReasonCode.of(row.reason) is not ReasonCode.NEVER_RAN
    }
    assert rules.pop("forward.add_0") == "sites.residual_add: auto"
    assert rules.pop("attention.query.forward.linear_0") == "exclude.names: attention.query"
    assert set(rules.values()) == {TARGET}
    amp = quantizer.amp(model)
    amp(torch.randn(4, 16, 64))
    quantizer.fallback(amp, names=["out"])
    row = next(row for row in quantizer.coverage if row.name == "out.forward.linear_0")
    assert (row.quantized, row.rule) == (False, "fallback")
    assert "kept in float by fallback" in row.reason


def test_weights_of_seven_bits_without_vnni(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    steps = {}
    for backend in ("onnxruntime", "onnxruntime-avx2", "openvino", "openvino-avx2"):
        quantizer = Quantizer(preset="plain", backend=backend)
        quantizer.calibrate(model, [x], progress=False)
        frozen = quantizer.quantize(model)
        stored = [value for name, value in frozen.state_dict().items() if value.dtype == torch.int8]
        assert len(stored) == 2
        steps[backend] = max(int(value.short().abs().max()) for value in stored)
        with torch.no_grad():
            noise = (frozen(x) - model(x)).square().sum() / model(x).square().sum()
        assert -10 * torch.log10(noise) > 25
    assert steps == {"onnxruntime": 127, "onnxruntime-avx2": 64, "openvino": 127, "openvino-avx2": 64}


# -- residual adds -----------------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """Adds of an operand that INT8 does not hold and of one that it does, [rows, 32] each."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.wide = nn.Linear(32, 32), nn.Linear(32, 32)
        self.conv, self.norm = nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32)
        with torch.no_grad():
            # Blind to the one value of the input that stretches its range.
            self.held.weight[:, 0] = 0
            self.conv.weight[:, 0] = 0

    def forward(self, x: Tensor) -> list[Tensor]:
        first = x + self.held(x)
        second = self.held(x).view(-1, 4, 8).flatten(1) + x
        third = self.held(x)
        third += x
        fourth = x + self.norm(self.conv(x[:, :, None, None])).flatten(1)
        fifth = functional.gelu(self.wide(x)) + self.held(x)
        both = self.wide(x) + self.held(x)
        computed = x + functional.relu(self.held(x))
        return [first, second, third, fourth, fifth, both, computed]


def spiky(rows: int = 1000) -> Tensor:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 500.0
    return x


def add_model() -> nn.Module:
    torch.manual_seed(0)
    return Adds().eval()


def adds_of(backend: str, model: nn.Module | None = None, **options: Any) -> Quantizer:
    return make_calibrated(
        model or add_model(), [spiky()], backend=backend, activations={"calibrator": "max"}, **options
    )


def held(quantizer: Quantizer) -> list[str]:
    """Which operands of each add are quantized."""
    adds = [entry for name, entry in quantizer.plan.items() if name.startswith("forward.add_")]
    return [" ".join(operand.name for operand in entry.operands if operand.quantized) for entry in adds]


EACH_ALONE = ["rhs", "lhs", "lhs", "rhs", "rhs", "rhs", "rhs"]
PRODUCTS_FLOAT = ["", "", "", "", "", "rhs", "rhs"]


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_the_product_alone_of_a_residual_add_stays_float(backend: str) -> None:
    quantizer = adds_of(backend)
    assert held(quantizer) == PRODUCTS_FLOAT
    rows = {row.name: row for row in quantizer.coverage}
    for place, skipping in enumerate(["lhs", "rhs", "rhs", "lhs", "lhs"]):
        row = rows[f"forward.add_{place}"]
        assert row.reason.startswith(f"its skip connection {skipping} is not quantized (SQNR in int8 is ")
        limit = " dB, below the limit of 33 dB): "
        assert row.reason.endswith(f"{limit}on {backend} quantizing only the other operand gains nothing")
        assert row.rule == f"target {backend}"
    assert "not: SQNR in int8 is" in rows["forward.add_5"].reason


def test_other_targets_judge_each_operand_by_itself() -> None:
    assert held(adds_of("openvino")) == EACH_ALONE


def test_a_residual_add_that_is_asked_for_is_quantized() -> None:
    forced = adds_of("tensorrt", sites={"residual_add": True}, exclude={"sites": ["forward.add_0.lhs"]})
    assert held(forced) == ["rhs", *["lhs rhs"] * 6]
    left = adds_of("tensorrt", exclude={"sites": ["forward.add_0.lhs"]})
    (reason,) = (row.reason for row in left.coverage if row.name == "forward.add_0")
    assert reason == (
        "its skip connection lhs is not quantized (excluded by rule): on tensorrt quantizing only the other operand "
        "gains nothing"
    )


def test_what_falls_back_of_a_residual_add_is_the_users_choice() -> None:
    torch.manual_seed(0)
    model, x = Mlp().eval(), torch.randn(64, 32)
    quantizer = Quantizer(preset="plain", backend="tensorrt", activations={"calibrator": "max"})
    quantizer.calibrate(model, [x], progress=False)
    assert held(quantizer) == ["lhs rhs"]
    amp = quantizer.amp(model)
    amp(x)
    quantizer.fallback(amp, names=["forward.add_0.lhs"])
    assert held(quantizer) == ["rhs"]


def test_which_operand_is_the_product_s_is_kept(tmp_path: Path) -> None:
    model = add_model()
    first = adds_of("openvino", model)
    assert held(first.for_backend("tensorrt")) == PRODUCTS_FLOAT
    folder = first.save(tmp_path / "saved")
    loaded = Quantizer.load(folder).for_backend("tensorrt")
    # What was seen later joins what was seen before, whichever the order.
    loaded.calibrate(model, [spiky(10)], resume=True, progress=False)
    assert held(loaded) == PRODUCTS_FLOAT


# -- what a target cannot do is refused before the work ----------------------------------------------------------------

RUN = {
    "model": {"source": "model", "task": "sentence-similarity"},
    "data": {"calibration": {"name": "stsb-csv"}, "evaluation": {"name": "stsb-csv", "split": "dev"}},
}


@pytest.mark.parametrize(
    ("quantizer", "engine", "export", "message"),
    [
        ({"dtype": "fp8"}, {"compute_capability": "sm80"}, {}, r"compute_capability: 'sm80' has no FP8; use sm89"),
        ({"formats": ({"activations": "fp8"},)}, {"compute_capability": "sm86"}, {}, "'sm86' has no FP8"),
        ({}, {"compute_capability": "sm77"}, {}, "tensorrt-rtx does not support 'sm77'; expected one of sm75, sm80"),
        ({"backend": "openvino"}, {"compute_capability": "sm89"}, {}, "openvino runs on a CPU"),
        ({"backend": "tensorrt"}, {"compute_capability": "sm89"}, {}, "tensorrt builds for the GPU of this machine"),
        ({"backend": "openvino", "dtype": "fp8"}, {}, {}, "openvino does not support activations in fp8"),
        (
            {"formats": ({"weights": "int4", "block_size": 32},)},
            {},
            {"opset": 20},
            r"export\.opset: got 20; expected 21 or later, because the formats of quantizer\.formats\[0\]",
        ),
    ],
)
def test_a_run_that_its_target_cannot_do(
    quantizer: dict[str, Any], engine: dict[str, Any], export: dict[str, Any], message: str
) -> None:
    whole = {
        **copy.deepcopy(RUN),
        "quantizer": {"backend": "tensorrt-rtx", **quantizer},
        "engine": engine,
        "export": export,
    }
    with pytest.raises(ConfigError, match=message):
        check_run(RunConfig.model_validate(whole))


def test_a_run_that_its_target_can_do() -> None:
    for capability, dtype in (("sm89", "fp8"), ("sm80", "int8"), ("sm120", "fp8")):
        quantizer = {"backend": "tensorrt-rtx", "dtype": dtype}
        whole = {**copy.deepcopy(RUN), "quantizer": quantizer, "engine": {"compute_capability": capability}}
        check_run(RunConfig.model_validate(whole))


@pytest.mark.parametrize(
    ("options", "opset", "message"),
    [
        ({"dtype": "fp8", "fallback_dtype": "float32"}, 18, r"opset=18: fp8 \(.*\) needs opset 19 or later"),
        (
            {"formats": [{"weights": "int4", "block_size": 16}]},
            20,
            r"opset=20: a scale per block \(.*\) needs opset 21 or later",
        ),
        ({}, 18, r"opset=18: torch\.float16 scales need opset 19 or later"),
    ],
)
def test_an_opset_that_is_too_old_for_a_format(
    options: dict[str, Any], opset: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")
    model, x = nn.Sequential(nn.Linear(32, 32)).eval(), torch.randn(4, 32)
    quantizer = Quantizer(preset="plain", backend="tensorrt", **options)
    quantizer.calibrate(model, [x], progress=False)
    # Before the export starts: nothing is traced.
    monkeypatch.delattr(torch.onnx, "export")
    with pytest.raises(ExportError, match=message):
        quantizer.export(quantizer.quantize(model), tmp_path / "m.onnx", x, opset=opset)
