"""The operator patches that come with the package: what is refused without them, what works with them, equal floats."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import EngineError, ExportError
from quantizer.export.exporter import export_onnx
from quantizer.rewrite import OperatorPatch, register_operator_patch, unregister_operator_patch
from quantizer.rewrite.operator_patches import apply_operator_patches
from quantizer.rewrite.patches import TRANSFORMERS_PATCHES

pytest.importorskip("transformers", reason="install enginequant[hf]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")

from architectures import AUDIO, ENCODER_DECODERS, MIXTURES_OF_EXPERTS, TEXT_ENCODERS
from transformers.models.tapas.modeling_tapas import IndexMap, gather, reduce_min

rtx = pytest.mark.skipif(find_spec("tensorrt_rtx_bindings") is None, reason="install enginequant[tensorrt-rtx]")


# -- in the models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", TRANSFORMERS_PATCHES, ids=lambda patch: patch.name)
def test_the_installed_source_is_the_one_that_is_patched(patch: OperatorPatch) -> None:
    module = importlib.import_module(patch.function.partition(":")[0])
    text = inspect.getsource(module)
    patched = apply_operator_patches(text, ast.parse(text), module.__name__)
    assert patched.refused == []
    assert patch in [patch for patches in patched.applied.values() for patch in patches]
    assert patched.text.count("\n") == text.count("\n")


PATCHED = ["wav2vec2", "hubert", "pegasus_x", "tapas", "xlnet", "bart", "fsmt", "prophetnet", "jetmoe", "longt5"]


@pytest.mark.parametrize("name", PATCHED)
def test_patched_models_give_equal_floats(name: str) -> None:
    families = (*AUDIO, *ENCODER_DECODERS, *TEXT_ENCODERS, *MIXTURES_OF_EXPERTS)
    (architecture,) = [entry for entry in families if entry.name == name]
    model, batch = architecture.build(), architecture.batch(3)
    if "input_values" in batch:
        batch["attention_mask"] = torch.ones(batch["input_values"].shape, dtype=torch.long)
        batch["attention_mask"][1, 500:] = 0
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx")
    with torch.no_grad():
        assert torch.equal(quantizer.proxy(model)(**batch)[0], model(**batch)[0])
    assert quantizer.inspect(model).patches


# -- what they are for -------------------------------------------------------------------------------------------------


class MaskedAssignment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        hidden_states = self.layer(values)
        expand_attention_mask = (mask > 0).unsqueeze(-1).repeat(1, 1, hidden_states.shape[2])
        hidden_states[~expand_attention_mask] = 0
        return hidden_states


class EinsumLetters(nn.Module):
    def forward(self, global_q: Tensor, global_and_local_k: Tensor) -> Tensor:
        return torch.einsum("BHGF,BHXF->BHGX", global_q, global_and_local_k)


class TableCell(nn.Module):
    def forward(self, cells: Tensor) -> Tensor:
        seq_length = cells.shape[1]
        position_ids = torch.arange(seq_length, device=cells.device).unsqueeze(0).expand(cells.shape)
        full_index = IndexMap(cells, 8, batch_dims=1)
        if True:
            if True:
                # shape (max_rows * max_columns,). First absolute position for every cell
                first_position_per_segment = reduce_min(position_ids, full_index)[0]
                # ? shape (batch_size, seq_len). First absolute position of the cell for every token
                first_position = gather(first_position_per_segment, full_index)
        return (position_ids - first_position).float()


class IntegerMask(nn.Module):
    def forward(self, attention_mask: Tensor) -> Tensor:
        input_mask = 1.0 - attention_mask
        return input_mask * 2


class OverflowGuard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(16, elementwise_affine=False)

    def forward(self, values: Tensor) -> Tensor:
        hidden_states = self.layer(values) * values
        if hidden_states.dtype == torch.float16 and not torch.isfinite(hidden_states).all():
            clamp_value = torch.finfo(hidden_states.dtype).max - 1000
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
        return hidden_states


class IntegerCumsum(nn.Module):
    """The position ids of RoBERTa and twenty others, as they are written."""

    def forward(self, input_ids: Tensor) -> Tensor:
        padding_idx = 1
        past_key_values_length = 0
        mask = input_ids.ne(padding_idx).int()
        incremental_indices = (torch.cumsum(mask, dim=1).type_as(mask) + past_key_values_length) * mask
        return (incremental_indices.long() + padding_idx).float()


def _exported(model: nn.Module, example: tuple[Tensor, ...], folder: Path, **options: Any) -> Path:
    proxy = Quantizer(preset="plain", backend="tensorrt-rtx").proxy(model)
    path = folder / "model.onnx"
    return export_onnx(proxy, path, example, opset=20, dtype=torch.float32, **options)


@pytest.fixture
def apply() -> Iterator[Any]:
    made = []

    def register(name: str, net: type[nn.Module]) -> None:
        (known,) = [patch for patch in TRANSFORMERS_PATCHES if patch.name == name]
        patch = OperatorPatch(
            name=f"{name}, in the test",
            function=f"{__name__}:{net.__name__}.forward",
            before=known.before,
            after=known.after,
            target=known.target,
            reason=known.reason,
        )
        made.append(register_operator_patch(patch).name)

    yield register
    for name in made:
        unregister_operator_patch(name)


CELLS = torch.tensor([[0, 1, 1, 2, 0, 2, 3, 3], [0, 0, 0, 0, 5, 5, 1, 0]])

REJECTED = [
    (
        "masked assignment in Wav2Vec2Encoder",
        MaskedAssignment,
        (torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])),
        "NonZero",
    ),
    (
        "einsum letters BHGF,BHXF->BHGX",
        EinsumLetters,
        (torch.randn(2, 2, 4, 16), torch.randn(2, 2, 6, 16)),
        "Einsum",
    ),
    ("first token of a table cell", TableCell, (CELLS,), "reduction type"),
]


@rtx
@pytest.mark.parametrize(("name", "net", "example", "said"), REJECTED, ids=[case[1].__name__ for case in REJECTED])
def test_tensorrt_takes_the_model_with_the_patch_alone(
    apply: Any, tmp_path: Path, name: str, net: type[nn.Module], example: tuple[Tensor, ...], said: str
) -> None:
    model = net().eval()
    path = _exported(model, example, tmp_path, axes={})
    options = BuildOptions(dynamic={}, compute_capability="sm89")
    with pytest.raises(EngineError, match=f"(?i){said}"):
        build_engine("tensorrt-rtx", path, tmp_path / "model.engine", options)
    apply(name, net)
    with torch.no_grad():
        expected = model(*(value.clone() for value in example))
        assert torch.equal(Quantizer(preset="plain", backend="tensorrt-rtx").proxy(model)(*example), expected)
    path = _exported(model, example, tmp_path, axes={})
    build_engine("tensorrt-rtx", path, tmp_path / "model.engine", options)
    engine = load_engine("onnxruntime", path)
    feeds = dict(zip(engine.input_names, (value.numpy() for value in example), strict=True))
    (found,) = engine(feeds).values()
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_exporter_takes_the_model_with_the_patch_alone(apply: Any, tmp_path: Path) -> None:
    model = IntegerMask()
    example = (torch.tensor([[1, 1, 0]]),)
    with pytest.raises(ExportError, match="cannot be exported"):
        _exported(model, example, tmp_path, axes={})
    apply("float minus an integer mask in XLNetModel.forward", IntegerMask)
    assert torch.equal(Quantizer(preset="plain", backend="tensorrt-rtx").proxy(model)(*example), model(*example))
    assert _exported(model, example, tmp_path, axes={}).exists()


def test_a_guard_against_overflow_is_in_a_half_file_with_the_patch_alone(apply: Any, tmp_path: Path) -> None:
    model, values = OverflowGuard().eval(), torch.randn(2, 16)
    options: dict[str, Any] = {"opset": 20, "dtype": torch.float16, "axes": {}}
    with pytest.raises(ExportError, match="depends on the values of its inputs"):
        export_onnx(
            Quantizer(preset="plain", backend="tensorrt-rtx").proxy(model), tmp_path / "m.onnx", (values,), **options
        )
    apply("overflow guard of BartEncoderLayer", OverflowGuard)
    proxy = Quantizer(preset="plain", backend="tensorrt-rtx").proxy(model)
    assert torch.equal(proxy(values), model(values))
    engine = load_engine("onnxruntime", export_onnx(proxy, tmp_path / "m.onnx", (values,), **options))
    with torch.no_grad():
        model.half()
        for given in (values.half(), values.half() * 20000):
            (found,) = engine({engine.input_names[0]: given.numpy()}).values()
            np.testing.assert_allclose(found, model(given).numpy(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "backend",
    ["openvino", "onnxruntime", pytest.param("tensorrt-rtx", marks=rtx)],
)
def test_the_integer_cumsum_of_position_ids_needs_no_patch_today(backend: str, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 1, 1], [5, 1, 6, 7, 8]])
    path = _exported(IntegerCumsum(), (ids,), tmp_path)
    if backend == "tensorrt-rtx":
        options = BuildOptions(dynamic={"batch": (1, 2, 8), "sequence": (2, 5, 64)}, compute_capability="sm89")
        assert build_engine(backend, path, tmp_path / "model.engine", options).path.exists()
        return
    engine = load_engine(backend, path)
    (found,) = engine({engine.input_names[0]: ids.numpy()}).values()
    assert found.tolist() == IntegerCumsum()(ids).tolist()
