"""Optional arguments: batches and calls of an engine that omit them, or pass None."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.engines import TensorSpec
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import CalibrationError, EngineError, QuantizerError
from quantizer.pipeline.engine_module import CALL, CallForm, EngineModule
from quantizer.pipeline.function_source import called_form
from quantizer.pipeline.module_feed import named_batches
from quantizer.pipeline.optional_inputs import Omitted, omitted_arguments


class Net(nn.Module):
    """Attention with a mask of padding, which is True where a sample has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Return values [B x S x 4]."""
        hidden = self.inside(x)
        hidden = hidden + self.attention(hidden, hidden, hidden, key_padding_mask=pad_mask, need_weights=False)[0]
        out: Tensor = self.head(hidden)
        return out if scale is None else out * scale


class Positions(nn.Module):
    """Adds positions, by default those of the samples: no constant tensor stands for that."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x plus positions."""
        return x + (torch.arange(x.shape[1]).float() if positions is None else positions)


class Needed(nn.Module):
    """Says that its mask is optional, and fails without."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return x times mask."""
        assert mask is not None, "a mask is needed"
        return x * mask


def _net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def _batch(rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, length - 2 :] = True
    generator = torch.Generator().manual_seed(rows * length)
    return {"x": torch.randn(rows, length, 16, generator=generator), "pad_mask": mask}


def _without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name not in names}


def test_constant_tensors_are_found_by_running_the_model() -> None:
    net = _net()
    batches = [{**_batch(4, 8), "scale": torch.full((4, 1, 1), 3.0)}, {**_batch(3, 6), "scale": torch.ones(3, 1, 1)}]
    assert omitted_arguments(net, batches) == {
        "pad_mask": Omitted(0, "bool", (("x", 0), ("x", 1))),
        "scale": Omitted(1, "float32", (("x", 0), 1, 1)),
    }
    fixed = omitted_arguments(net, [_batch(4, 8), _batch(3, 8)])
    assert fixed == {"pad_mask": Omitted(0, "bool", (("x", 0), 8))}
    assert torch.equal(fixed["pad_mask"].tensor({"x": torch.zeros(5, 8, 16)}), torch.zeros(5, 8, dtype=torch.bool))
    assert omitted_arguments(net, [_without(_batch(), "pad_mask")]) == {}
    # The batches with a mask have one length; it follows the values all the same.
    some = [_batch(4, 8), _without(_batch(4, 12), "pad_mask"), _batch(4, 8)]
    assert omitted_arguments(net, some) == {"pad_mask": Omitted(0, "bool", (("x", 0), ("x", 1)))}
    for other in (Positions(), Needed()):
        (name,) = set(_names(other)) - {"x"}
        assert omitted_arguments(other, [{"x": torch.ones(2, 3), name: torch.full((2, 3), 0.5)}]) == {}


def _names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def test_models_whose_arguments_are_all_optional() -> None:
    transformers = pytest.importorskip("transformers", reason="install enginequant[hf]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes)).eval()
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    batches = [{"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}]
    shape = (("input_ids", 0), ("input_ids", 1))
    assert omitted_arguments(model, batches) == {
        "attention_mask": Omitted(1, "int64", shape),
        "token_type_ids": Omitted(0, "int64", shape),
    }


def test_batches_that_omit_an_argument_are_completed() -> None:
    net, full = _net(), _batch()
    given = named_batches(net, [full["x"], full, (full["x"], None), {**full, "scale": None}])
    completed, call = called_form("here", net, given)
    assert [list(batch) for batch in completed] == [["x", "pad_mask"]] * 4
    assert [bool(batch["pad_mask"].any()) for batch in completed] == [False, True, False, True]
    assert call.inputs == ("x", "pad_mask")
    for before, batch in zip(given, completed, strict=True):
        torch.testing.assert_close(net(**batch), net(**before))
    assert called_form("here", net, given[:1])[0] == [given[0]]
    positions = [{"x": torch.ones(2, 3), "positions": torch.ones(2, 3)}, {"x": torch.ones(2, 3)}]
    with pytest.raises(
        CalibrationError, match="batch 1 omits 'positions', which batch 0 passes, and no tensor of zeros"
    ):
        called_form("here", Positions(), positions)


class _Engine:
    """Returns the mask that it got."""

    name = "fake"
    device = "cpu"
    inputs = (TensorSpec("x", np.dtype(np.float32), (None, 3)), TensorSpec("mask", np.dtype(np.float32), (None, 3)))
    input_names = ("x", "mask")
    output_names = ("y",)

    def __call__(self, inputs: Any) -> dict[str, Any]:
        """Return the mask."""
        return {"y": inputs["mask"]}


def test_calls_that_do_not_fit_the_engine() -> None:
    x, mask = torch.ones(2, 3), torch.full((2, 3), 5.0)
    form = CallForm.of(Needed(), x, ["x", "mask"], {"mask": Omitted(1, "float32", (("x", 0), 3))})
    module = EngineModule(_Engine(), form)  # type: ignore[arg-type]
    for output in (module(x), module(x=x), module(x, None), module(x=x, mask=None)):
        assert torch.equal(output, torch.ones(2, 3))
    assert torch.equal(module(x, mask), mask)
    needing = EngineModule(_Engine(), CallForm.of(Needed(), x, ["x", "mask"]))  # type: ignore[arg-type]
    with pytest.raises(
        EngineError, match="the input omits 'mask', which every calibration batch of Needed passed, and no"
    ):
        needing(x)
    fewer = EngineModule(_Engine(), CallForm.of(Net(), x, ["x", "pad_mask"]))  # type: ignore[arg-type]
    with pytest.raises(
        EngineError, match="engine of Net has no input 'scale', because no calibration batch passed it: omit"
    ):
        fewer(x, mask, scale=mask)


def test_the_form_of_a_call_is_kept_in_a_file(tmp_path: Path) -> None:
    mask = Omitted(0, "bool", (("x", 0), ("x", 1)))
    call = CallForm.of(Net(), torch.empty(0), ["x", "pad_mask"], {"pad_mask": mask})
    call.write(tmp_path)
    read = CallForm.read(tmp_path)
    assert read is not None
    assert (read.inputs, read.omitted) == (("x", "pad_mask"), {"pad_mask": mask})
    document = json.loads((tmp_path / CALL).read_text(encoding="utf-8"))
    for damage in ({"dtype": "load"}, {"shape": [["y", 0], 1]}, {"fill": "0"}):
        shown = {"fill": 0, "dtype": "bool", "shape": [["x", 0], ["x", 1]], **damage}
        (tmp_path / CALL).write_text(json.dumps({**document, "omitted": {"pad_mask": shown}}), encoding="utf-8")
        with pytest.raises(QuantizerError, match=r"call\.json is damaged"):
            CallForm.read(tmp_path)


# The parts of it: above.
@pytest.mark.nightly
def test_a_saved_engine_takes_calls_with_and_without_the_argument(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="an engine needs enginequant[onnx,onnxruntime]")
    torch.set_num_threads(1)
    net = _net()
    batches = [_without(_batch(4, length), *(["pad_mask"] if length % 2 else [])) for length in range(6, 12)]
    onnxruntime = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))
    folder = quantizer.quantize_model(net, batches, backend=onnxruntime).save(tmp_path / "saved")
    engine = quantizer.load(folder)
    for batch in (_batch(2, 9), _without(_batch(2, 9), "pad_mask")):
        with torch.no_grad():
            expected = net(**batch)
        assert (engine(**batch) - expected).norm() < 0.1 * expected.norm()
        assert torch.equal(engine(*batch.values()), engine(**batch))
