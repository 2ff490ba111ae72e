"""Recurrent layers of torch: float in torch's kernel while off, and else in Python, where their products are sites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from torch import Tensor, nn
from torch.utils import _pytree
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import ExportError
from quantizer.proxy.build import sites_of

Make = Callable[[], nn.Module]

VARIANTS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(24, 16), (5, 3, 24)),
    "lstm-deep": (lambda: nn.LSTM(24, 16, num_layers=2, bidirectional=True, batch_first=True), (3, 5, 24)),
    "lstm-projected": (lambda: nn.LSTM(24, 32, proj_size=16, bidirectional=True), (5, 3, 24)),
    "lstm-unbatched": (lambda: nn.LSTM(24, 16, bias=False), (5, 24)),
    "gru": (lambda: nn.GRU(24, 16, num_layers=2), (5, 3, 24)),
    "gru-backward": (lambda: nn.GRU(24, 16, bidirectional=True, bias=False, batch_first=True), (3, 5, 24)),
    "rnn": (lambda: nn.RNN(24, 16, bidirectional=True), (5, 3, 24)),
    "rnn-relu": (lambda: nn.RNN(24, 16, nonlinearity="relu"), (5, 3, 24)),
    "lstm-cell": (lambda: nn.LSTMCell(24, 16), (3, 24)),
    "gru-cell": (lambda: nn.GRUCell(24, 16, bias=False), (3, 24)),
    "rnn-cell": (lambda: nn.RNNCell(24, 16, nonlinearity="relu"), (3, 24)),
    "cell-unbatched": (lambda: nn.LSTMCell(24, 16), (24,)),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
NAMES = pytest.mark.parametrize("name", VARIANTS)


def _made(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    make, shape = VARIANTS[name]
    return make().eval(), torch.randn(shape)


def _quantizer(model: nn.Module, x: Tensor) -> Quantizer:
    return make_calibrated(model, [x, x * 0.5], backend="tensorrt")


def _state(cell: nn.Module, x: Tensor) -> Any:
    """A state of a cell for x [*, 24]."""
    hidden = torch.randn(*x.shape[:-1], 16).tanh()
    return (hidden, hidden * 2) if isinstance(cell, nn.LSTMCell) else hidden


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _sqnr(wanted: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()).detach())


@NAMES
def test_off_it_is_torchs_kernel(name: str) -> None:
    model, x = _made(name)
    wanted, got = _tensors(model(x)), _tensors(Quantizer().proxy(model)(x))
    assert [torch.equal(*pair) for pair in zip(wanted, got, strict=True)] == [True] * len(wanted)
    assert type(model) is type(_made(name)[0])
    assert list(model.children()) == []


@NAMES
def test_in_python_it_agrees_with_the_kernel(name: str) -> None:
    model, x = _made(name)
    proxy = Quantizer().calib(model)
    for wanted, got in zip(_tensors(model(x)), _tensors(proxy(x)), strict=True):
        assert wanted.shape == got.shape
        assert float((wanted - got).detach().abs().max()) < 1e-6


@NAMES
def test_all_products_are_rounded(name: str) -> None:
    model, x = _made(name)
    # A cell has one step: without a state it multiplies zeros, which are not quantized.
    arguments = (x, _state(model, x)) if "cell" in name else (x,)
    q = make_calibrated(model, [arguments, _pytree.tree_map(lambda part: part * 0.5, arguments)], backend="tensorrt")
    assert q.coverage.share == 1
    got = q.quantize(model)(*arguments)
    for wanted, found in zip(_tensors(model(*arguments)), _tensors(got), strict=True):
        assert wanted.shape == found.shape
        assert 15 < _sqnr(wanted, found) < 80


def test_weights_have_a_scale_for_each_channel() -> None:
    model, x = _made("lstm-deep")
    plan = _quantizer(model, x).plan
    weights = {operand.parameter: operand for entry in plan.values() for operand in entry.operands if operand.parameter}
    assert set(weights) == {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    assert {tuple(operand.scale.shape) for operand in weights.values() if operand.scale is not None} == {(64,)}


def test_a_layer_is_one_group() -> None:
    model, x = _made("lstm-deep")
    q = _quantizer(model, x)
    groups = {operand.group for entry in q.plan.values() if entry.quantized for operand in entry.operands}
    assert len(groups) == 2


def test_a_layer_with_a_product_that_is_excluded_stays_float_whole() -> None:
    model, x = _made("lstm-deep")
    q = make_calibrated(
        model, [x], backend="tensorrt", exclude={"sites": ["recurrence.l0.forward.recurrent_product_0"]}
    )
    ran = {path: entry for path, entry in q.plan.items() if entry.multiply_adds}
    assert {path.split(".")[1] for path, entry in ran.items() if entry.quantized} == {"l1", "l1_reverse"}
    assert (
        "another MatMul of its recurrent layer is not quantized" in ran["recurrence.l0.forward.input_product_0"].reason
    )


def test_states_are_arguments() -> None:
    model, x = _made("lstm-deep")
    states = (torch.randn(4, 3, 16), torch.randn(4, 3, 16))
    proxy = Quantizer().calib(model)
    for wanted, got in zip(_tensors(model(x, states)), _tensors(proxy(x, states)), strict=True):
        assert float((wanted - got).detach().abs().max()) < 1e-6
    with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
        proxy(x, (states[0][:2], states[1]))


def test_training_changes_the_weights_and_drops_between_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(24, 16, num_layers=2, dropout=0.5).eval(), torch.randn(5, 3, 24)
    q = _quantizer(model, x)
    proxy = q.qat(model)
    assert torch.equal(proxy.eval()(x)[0], q.quantize(model)(x)[0])
    proxy.train()
    first, second = proxy(x)[0], proxy(x)[0]
    assert not torch.equal(first, second)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first.square().sum().backward()
    torch.optim.SGD(proxy.parameters(), 0.1).step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_what_is_saved_computes_the_same(tmp_path: Path) -> None:
    model, x = _made("lstm-deep")
    q = _quantizer(model, x)
    wanted = q.quantize(model)(x)[0]
    q.save(tmp_path / "saved")
    assert torch.equal(Quantizer.load(tmp_path / "saved").quantize(model)(x)[0], wanted)


def test_the_models_own_loops_do_not_see_the_layers() -> None:
    model, x = (
        net("torch.matmul(self.layer(x)[0], x.mT) * len(list(self.modules()))", layer=nn.GRU(24, 24)).eval(),
        torch.randn(5, 3, 24),
    )
    proxy = Quantizer().calib(model)
    assert torch.allclose(proxy(x), model(x), atol=1e-5)
    assert len(list(sites_of(proxy))) == 4


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_target_that_gains_nothing_keeps_the_kernel(backend: str) -> None:
    model, x = _made("gru")
    q = make_calibrated(model, [x], backend=backend)
    ran = [entry for entry in q.plan.values() if entry.multiply_adds]
    assert {entry.reason for entry in ran} == {
        f"{backend} runs this gru in one float kernel, and a quantized loop is not faster"
    }
    assert torch.equal(q.quantize(model)(x)[0], model(x)[0])


def test_onnxruntime_takes_the_ranges_of_a_large_layer_at_run_time() -> None:
    torch.manual_seed(0)
    q = make_calibrated(nn.LSTM(24, 128).eval(), [torch.randn(5, 3, 24)], backend="onnxruntime")
    inputs = [o for entry in q.plan.values() if entry.quantized for o in entry.operands if o.role == "activation"]
    assert [(o.dtype, o.dynamic, o.scale) for o in inputs] == [("uint8", True, None)] * 2


def test_a_small_layer_keeps_the_kernel() -> None:
    model, x = _made("lstm")
    q = make_calibrated(model, [x], backend="openvino")
    reasons = {entry.reason for entry in q.plan.values() if entry.multiply_adds}
    assert reasons == {
        "its recurrent weight has 1024 elements, fewer than 131072: on openvino a quantized loop is slower than the "
        "float kernel"
    }


def test_formats_without_a_loop_leave_a_layer_float() -> None:
    model, x = _made("lstm")
    q = make_calibrated(model, [x], backend="tensorrt", formats=[{"activations": "float"}])
    reasons = {entry.reason for entry in q.plan.values() if entry.multiply_adds}
    assert reasons == {"a recurrent layer needs INT8 or FP8 with static ranges for weights and activations"}


def test_a_loop_of_which_a_product_was_switched_off_by_hand_is_not_exported(tmp_path: Path) -> None:
    model, x = _made("lstm")
    q = _quantizer(model, x)
    frozen = q.quantize(model)
    next(iter(sites_of(frozen))).active = False
    with pytest.raises(ExportError, match="input_product_0 is not quantized but other sites of its recurrent layer"):
        q.export(frozen, tmp_path / "model.onnx", (x,))
