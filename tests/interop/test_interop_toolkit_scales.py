"""Ranges of Model Optimizer and of pytorch-quantization, read into a plan."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from safetensors.torch import save_file
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError, QuantizerError
from quantizer.integrations.toolkit_scales import read_toolkit_scales
from tests.helpers import Mlp, batch, tiny

UP = "up.forward.linear_0"
DOWN = "down.forward.linear_0"


@pytest.fixture(scope="module")
def mtq() -> Any:
    pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        return pytest.importorskip(
            "modelopt.torch.quantization", reason="reads what Model Optimizer makes: install enginequant[test]"
        )


def _by_model_optimizer(mtq: Any, model: nn.Module, *, attention: bool = False) -> nn.Module:
    """A copy of the model, fake-quantized in INT8 with ranges of three batches."""
    settings = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    if attention:
        quantizers = {"quantizer_name": "*[qkv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}, "enable": True}
        settings["quant_cfg"].append(quantizers)
    settings["quant_cfg"].append({"quantizer_name": "*LayerNorm*", "enable": False})

    def forward_loop(quantized: nn.Module) -> None:
        for seed in range(3):
            quantized(**batch("bert", seed=seed))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names parts of torch that are deprecated
        made: nn.Module = mtq.quantize(copy.deepcopy(model), settings, forward_loop)
    return made


def _calibrated(model: nn.Module, data: Any, **options: Any) -> Quantizer:
    return make_calibrated(model, [data], backend="openvino", activations={"calibrator": "max"}, **options)


def _mlp() -> tuple[nn.Module, Quantizer]:
    model = Mlp().eval()
    return model, _calibrated(model, torch.randn(8, 32))


# -- Model Optimizer, the real one -----------------------------------------------------------------------------------


def test_the_linears_carry_model_optimizers_ranges(mtq: Any, tmp_path: Path) -> None:
    model = tiny("bert-classification")
    theirs = _by_model_optimizer(mtq, model)
    # One small batch of other data: every range must come from the file.
    q = _calibrated(model, batch("bert", seed=9, rows=1), sites={"matmul": False, "residual_add": False})
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    read = read_toolkit_scales(tmp_path / "theirs.pt", q.plan)
    assert read.unmatched == {}
    assert read.scales.keys() == q.scales().keys()
    before = q.scales()
    q.load_scales(read.scales)
    modules = dict(theirs.named_modules())
    linears = [entry for entry in q.plan.values() if entry.quantized]
    assert len(linears) == 14
    moved = 0
    for entry in linears:
        module: Any = modules[entry.name.removesuffix(".forward.linear_0")]
        for operand, quantizer in zip(entry.operands, (module.input_quantizer, module.weight_quantizer), strict=True):
            torch.testing.assert_close(
                operand.amax, quantizer._amax.squeeze(-1) if operand.axis == 0 else quantizer._amax
            )
            moved += not torch.equal(operand.scale, before[f"{entry.name}.{operand.name}"])  # type: ignore[arg-type]
    assert moved >= 12  # the inputs saw other data
    inputs = batch("bert", seed=1)
    with torch.no_grad():
        found, expected, exact = q.quantize(model)(**inputs), theirs(**inputs), model(**inputs)
    ours, other = found.logits, expected.logits
    torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    assert (ours - exact.logits).abs().max() > 20 * (ours - other).abs().max()


def test_its_range_is_as_wide_as_ours_and_no_weight_goes_so_far(mtq: Any) -> None:
    theirs: Any = _by_model_optimizer(mtq, tiny("bert-classification"))
    quantizer = theirs.bert.encoder.layer[0].intermediate.dense.input_quantizer
    assert quantizer.narrow_range is False
    assert (quantizer(torch.tensor([-1e9, 1e9])) / quantizer._amax * 127).round().tolist() == [-128, 127]


def test_attention_in_model_optimizers_order(mtq: Any) -> None:
    model = tiny("bert-classification")
    theirs = _by_model_optimizer(mtq, model, attention=True)
    q = _calibrated(model, batch("bert", seed=9), sites={"residual_add": False})
    read = read_toolkit_scales(theirs.state_dict(), q.plan)
    assert read.unmatched == {}
    attention: Any = theirs.get_submodule("bert.encoder.layer.1.attention.self")
    site = "bert.encoder.layer.1.attention.self.eager_attention_forward.matmul_"
    for place, quantizer in (("0.lhs", "q"), ("0.rhs", "k"), ("1.rhs", "v")):
        amax = getattr(attention, f"{quantizer}_bmm_quantizer")._amax
        torch.testing.assert_close(read.scales[site + place] * 127, amax)
    assert f"{site}1.lhs" not in read.scales
    q.load_scales(read.scales)


def test_what_model_optimizer_saves_is_read_as_tensors(mtq: Any, tmp_path: Path) -> None:
    import modelopt.torch.opt as mto

    model = tiny("bert-classification")
    theirs = _by_model_optimizer(mtq, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mto.save(theirs, tmp_path / "theirs.pth")
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    plan = _calibrated(model, batch("bert"), sites={"residual_add": False}).plan
    one, two = (read_toolkit_scales(tmp_path / name, plan) for name in ("theirs.pth", "theirs.safetensors"))
    assert one.scales.keys() == two.scales.keys()
    assert all(torch.equal(one.scales[name], scale) for name, scale in two.scales.items())


# -- names, by hand ----------------------------------------------------------------------------------------------------


def test_the_names_of_pytorch_quantization() -> None:
    model, q = _mlp()
    state = {
        **model.state_dict(),
        "up._input_quantizer._amax": torch.tensor(2.54),
        "up._weight_quantizer._amax": torch.full((64, 1), 1.27),
        "down._weight_quantizer._amax": torch.tensor([1.27]),
    }
    read = read_toolkit_scales(state, q.plan)
    assert set(read.scales) == {f"{UP}.input", f"{UP}.weight", f"{DOWN}.weight"}
    torch.testing.assert_close(read.scales[f"{UP}.input"], torch.tensor(0.02))
    torch.testing.assert_close(read.scales[f"{UP}.weight"], torch.full((64,), 0.01))
    torch.testing.assert_close(read.scales[f"{DOWN}.weight"], torch.tensor(0.01))
    assert read.unmatched == {}
    q.load_scales(read.scales)


def test_zeros_stay_zeros() -> None:
    _, q = _mlp()
    amax = torch.full((64, 1), 1.27)
    amax[3] = 0
    scale = read_toolkit_scales({"up.weight_quantizer._amax": amax}, q.plan).scales[f"{UP}.weight"]
    assert scale[3] == 1
    q.load_scales({f"{UP}.weight": scale})


UNMATCHED: list[tuple[str, Any, str]] = [
    ("upp.input_quantizer._amax", torch.tensor(1.0), "no quantizable operation belongs to a module of this name"),
    (
        "up.output_quantizer._amax",
        torch.tensor(1.0),
        "this quantizer is not one of a matrix multiplication or convolution",
    ),
    ("up.q_bmm_quantizer._amax", torch.tensor(1.0), "no attention with two quantized matrix multiplications"),
    ("up.input_quantizer._amax", torch.ones(32), r"shape \[32\]; expected one range per tensor"),
    ("up.weight_quantizer._amax", torch.ones(64, 2), "is per block"),
    ("up.input_quantizer._amax", torch.tensor(float("nan")), "finite and at least 0"),
    ("up.input_quantizer._amax", torch.tensor(-1.0), "finite and at least 0"),
    ("up.input_quantizer._amax", torch.tensor(1), "expected a tensor of floats, got torch.int64"),
    ("up.input_quantizer._amax", 1.0, "expected a tensor of floats, got float"),
]


@pytest.mark.parametrize(("key", "amax", "reason"), UNMATCHED)
def test_what_is_not_taken_is_listed(key: str, amax: Any, reason: str) -> None:
    _, q = _mlp()
    with pytest.raises(QuantizerError, match=f"belongs to a quantized operand:\n  - {key}: .*{reason}"):
        read_toolkit_scales({key: amax}, q.plan)
    read = read_toolkit_scales({key: amax, "down.input_quantizer._amax": torch.tensor(1.0)}, q.plan)
    assert list(read.scales) == [f"{DOWN}.input"]
    assert list(read.unmatched) == [key]


def test_a_module_with_two_products_is_not_guessed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(nn.functional.linear(x, self.one), self.two)

    q = _calibrated(Two().eval(), torch.randn(8, 32))
    with pytest.raises(
        QuantizerError, match="its module has 2 matrix multiplications or convolutions, and the name does not say which"
    ):
        read_toolkit_scales({"weight_quantizer._amax": torch.tensor(1.0)}, q.plan)


def test_what_the_plan_leaves_in_float_is_listed() -> None:
    model = Mlp().eval()
    q = _calibrated(model, torch.randn(8, 32), exclude={"names": ["down"]})
    state = {f"{name}.input_quantizer._amax": torch.tensor(1.0) for name in ("up", "down")}
    assert read_toolkit_scales(state, q.plan).unmatched == {
        "down.input_quantizer._amax": f"{DOWN} is not quantized: excluded by rule"
    }


def test_an_input_that_the_toolkit_scales_first() -> None:
    _, q = _mlp()
    state = {
        "up.input_quantizer._amax": torch.tensor(1.0),
        "up.input_quantizer._pre_quant_scale": torch.ones(32),
        "up.weight_quantizer._amax": torch.ones(64, 1),
    }
    read = read_toolkit_scales(state, q.plan)
    assert "scales this tensor before quantization" in read.unmatched["up.input_quantizer._amax"]


def test_two_quantizers_of_one_operand() -> None:
    _, q = _mlp()
    state = {"up.input_quantizer._amax": torch.tensor(1.0), "up._input_quantizer._amax": torch.tensor(2.0)}
    read = read_toolkit_scales(state, q.plan)
    assert read.unmatched == {"up._input_quantizer._amax": f"{UP}.input has a range of another quantizer already"}


def test_a_wrong_number_of_channels_is_refused_when_it_is_loaded() -> None:
    _, q = _mlp()
    read = read_toolkit_scales({"up.weight_quantizer._amax": torch.ones(32, 1)}, q.plan)
    with pytest.raises(CalibrationError, match=r"shape \[32\], expected \[\] or \[64\]"):
        q.load_scales(read.scales)


# -- targets with fewer steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openvino-avx2", "onnxruntime-avx2"])
def test_scales_of_weights_use_the_steps_of_the_target(backend: str) -> None:
    model, x = Mlp().eval(), torch.randn(64, 32)
    q = Quantizer(preset="plain", backend=backend, activations={"calibrator": "max"})
    q.calibrate(model, [x], progress=False)
    before = q.scales()
    weight = model.get_submodule("up").weight.detach()
    ranges = {
        "up.weight_quantizer._amax": weight.abs().amax(1, keepdim=True),
        "up.input_quantizer._amax": x.abs().max(),
    }
    read = read_toolkit_scales(ranges, q.plan).scales
    torch.testing.assert_close(read[f"{UP}.weight"], before[f"{UP}.weight"])
    torch.testing.assert_close(read[f"{UP}.input"], x.abs().max() / 127)
    q.load_scales(read)
    stored = [m.stored for m in q.quantize(model).modules() if getattr(m, "stored", None) is not None]
    assert max(int(steps.abs().max()) for steps in stored) == 64
    # The same by hand, as of a target that uses all steps.
    q.load_scales({f"{UP}.weight": weight.abs().amax(1) / 127})
    with pytest.raises(CalibrationError, match=rf"{UP}\.weight: .* integers up to 127.*saturate beyond 64: use"):
        q.quantize(model)
    q.load_scales({f"{UP}.weight": before[f"{UP}.weight"]})
    q.quantize(model)


# -- files that are none -----------------------------------------------------------------------------------------------


def test_a_state_dict_without_ranges() -> None:
    model, q = _mlp()
    with pytest.raises(QuantizerError, match=r"the state dict has no key that ends in '_quantizer\._amax'"):
        read_toolkit_scales(model.state_dict(), q.plan)


@pytest.mark.parametrize("name", ["no.pt", "no.safetensors", "text.pt", "text.safetensors", "module.pt"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    model, q = _mlp()
    for text in ("text.pt", "text.safetensors"):
        (tmp_path / text).write_text("none of it")
    torch.save(model, tmp_path / "module.pt")  # objects: never read
    with pytest.raises(
        QuantizerError, match=rf"{name} (cannot be read: |contains objects other than tensors .*save the state dict)"
    ):
        read_toolkit_scales(tmp_path / name, q.plan)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    _, q = _mlp()
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(QuantizerError, match="holds a list; expected a state dict"):
        read_toolkit_scales(tmp_path / "list.pt", q.plan)
