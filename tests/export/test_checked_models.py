"""Export of models that check their tensors, or that count the samples of a batch with ``len()``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.export.exporter import export_onnx
from quantizer.proxy.build import exportable
from quantizer.rewrite import OperatorPatch, register_operator_patch, unregister_operator_patch


class Checked(nn.Module):
    """A layer behind a check of its input, as transformers writes it during tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x < 100)
        return self.layer(x)


class Counted(nn.Module):
    """A layer whose output is shaped by the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(len(x), 2, 3)


def _outputs(path: Path, x: Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: x.numpy()}))


def test_a_check_of_all_values_is_no_part_of_the_file(tmp_path: Path) -> None:
    model = Checked().eval()
    path = export_onnx(model, tmp_path / "model.onnx", (torch.randn(2, 4),), opset=20, dtype=torch.float32)
    for batch in (1, 3):
        x = torch.randn(batch, 4)
        np.testing.assert_allclose(_outputs(path, x)[0], model(x).detach().numpy(), atol=1e-6)
    assert len(_outputs(path, torch.full((2, 4), 200.0))[0]) == 2


def test_a_float_model_is_exported_with_the_patches_that_the_exporter_needs(tmp_path: Path) -> None:
    model, x = Counted().eval(), torch.randn(3, 4)
    assert exportable(model) is model
    patch = OperatorPatch(
        name="length of Counted",
        function=f"{__name__}:Counted.forward",
        before="len(x)",
        after="x.shape[0]",
        target="onnx",
        reason="a length by len() fixes the batch size of the exported file",
    )
    register_operator_patch(patch)
    try:
        patched = exportable(model)
        # A part of a proxy, such as one of its encoders, has the patches already.
        part = nn.Sequential(patched, nn.ReLU())
        assert exportable(patched) is patched
        assert exportable(part) is part
        path = export_onnx(patched, tmp_path / "model.onnx", (torch.randn(2, 4),), opset=20, dtype=torch.float32)
    finally:
        unregister_operator_patch(patch.name)
    assert patched is not model
    assert torch.equal(patched(x), model(x))
    np.testing.assert_allclose(_outputs(path, x)[0], model(x).detach().numpy(), atol=1e-6)


def _rt_detr_v2() -> nn.Module:
    """A detector of five candidates, with weights that tell the candidates apart."""
    torch.manual_seed(0)
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrV2Config(
        backbone_config=backbone,
        encoder_hidden_dim=16,
        encoder_in_channels=[16, 16, 16],
        encoder_layers=1,
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=5,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_n_points=2,
        num_denoising=0,
    )
    model = transformers.RTDetrV2ForObjectDetection(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.mark.nightly
def test_rt_detr_v2_takes_other_batch_sizes_than_the_example(tmp_path: Path) -> None:
    model, quantizer = _rt_detr_v2(), Quantizer(backend="onnxruntime", preset="plain")
    batches = [{"pixel_values": torch.randn(2, 3, 64, 64)} for _ in range(2)]
    quantizer.calibrate(model, batches)
    frozen = quantizer.quantize(model)
    for module, name in ((exportable(model), "float"), (frozen, "int8")):
        path = tmp_path / f"{name}.onnx"
        if name == "float":
            export_onnx(module, path, batches[0], opset=20, dtype=torch.float32)
        else:
            quantizer.export(module, path, batches[0])
        for batch in (1, 3):
            x = torch.randn(batch, 3, 64, 64)
            with torch.no_grad():
                expected = module(pixel_values=x)
            logits, boxes = _outputs(path, x)[:2]
            np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-3)
            np.testing.assert_allclose(boxes, expected.pred_boxes.numpy(), atol=1e-3)
