"""Algorithms of ours beside the same ones of other libraries, each on one model with the same rows.

    python benchmarks/reference_algorithms.py [weights | biases]...

weights: MiniLM with the weights of all 37 linears in INT4 with a scale for each output channel, activations in float,
on the texts of ``default_accuracy.py``. GPTQ is compared with NNCF's (which is also asked to estimate scales), and what
learns its rounding with AIMET's AdaRound. AIMET is left out, with the reason, where it cannot be imported: it is best
installed by itself, without its dependencies.

biases: EfficientNet-Lite0 in INT8 for OpenVINO with and without correction, beside NNCF's two ways of it. Libraries
choose other ranges, so what counts is what the correction gains over the row without it.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from calibration_accuracy import image_rows
from common import MINILM, heading
from data import imagenet_sample
from default_accuracy import Bench, ours
from efficientnet_lite import efficientnet_lite0
from torch import nn
from torch.nn import functional as F

from quantizer import Quantizer
from quantizer.tasks import Batch

_BATCH = 32

_ADAROUND_STEPS = 500
"""Of each weight. AIMET's default is 15,000, which would take 30 times as long."""


def weight_rows() -> None:
    print(heading("Rounding of weights: MiniLM, INT4 per channel, activations in float"))
    bench = Bench(MINILM)
    for rounding in ("nearest", "gptq", "reconstruct"):
        ours(
            bench,
            rounding,
            backend="onnxruntime",
            formats=[{"weights": "int4", "activations": "float"}],
            sites={"matmul": False, "residual_add": False},
            weights={"rounding": rounding},
        )
    for name, options in (
        ("nearest", {}),
        ("GPTQ", {"gptq": True}),
        ("GPTQ and scale estimation", {"gptq": True, "scale_estimation": True}),
    ):
        bench.row(f"NNCF, {name}", lambda batches, options=options: (_nncf(bench.model, batches, options), ""))
    try:
        with redirect_stdout(sys.stderr):
            import aimet_torch  # noqa: F401
    except ImportError as error:
        print(f"\nAIMET: not measured, {error}")
        return
    name = f"AIMET, AdaRound, {_ADAROUND_STEPS} steps a weight"
    bench.row(name, lambda batches: (_aimet(bench.model, batches), ""))


def _nncf(model: nn.Module, batches: list[Batch], options: dict[str, bool]) -> Callable[[Batch], object]:
    import nncf

    with redirect_stdout(sys.stderr):
        graph = openvino.convert_model(model, example_input=dict(batches[0]))
        quantized = nncf.compress_weights(
            graph,
            mode=nncf.CompressWeightsMode.INT4_SYM,
            ratio=1.0,
            group_size=-1,
            all_layers=True,
            # What an embedding looks up is not quantized, as in ours.
            ignored_scope=nncf.IgnoredScope(types=["Gather"]),
            dataset=nncf.Dataset(batches, lambda batch: {name: value.numpy() for name, value in batch.items()}),
            subset_size=len(batches),
            **options,
        )
        compiled = openvino.Core().compile_model(quantized, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = [value.get_any_name() for value in compiled.inputs]
    return lambda batch: {"last_hidden_state": compiled({name: batch[name].numpy() for name in names})[0]}


def _aimet(model: nn.Module, batches: list[Batch]) -> Callable[[Batch], object]:
    """Return MiniLM with the weights of its linears rounded by AIMET."""
    import aimet_torch.common.quantsim_config as settings
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters

    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]
            return output

    whole, names = Tuple().eval(), ("input_ids", "attention_mask")
    # It puts inputs of all batches together, which must be of one length.
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    loader = [tuple(F.pad(batch[name], (0, longest - batch[name].shape[1])) for name in names) for batch in batches]
    parameters = AdaroundParameters(
        loader,  # type: ignore[arg-type]
        len(loader),
        default_num_iterations=_ADAROUND_STEPS,
        forward_fn=lambda wrapped, batch: wrapped(*batch),
    )
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        rounded: Any = Adaround.apply_adaround(
            whole,
            loader[0],
            parameters,
            folder,
            "minilm",
            default_param_bw=4,
            default_config_file=str(Path(settings.__file__).with_name("default_config_per_channel.json")),
        )
    return lambda batch: {"last_hidden_state": rounded(*(batch[name] for name in names))}


def bias_rows() -> None:
    print(heading("Bias correction: EfficientNet-Lite0, INT8 for OpenVINO, an ImageNet sample"))
    images, classes, tuned = imagenet_sample()
    model = efficientnet_lite0()
    row = image_rows(model, images[~tuned], classes[~tuned])
    batches = images[tuned].split(_BATCH)
    for preset in ("plain", "balanced"):
        for corrected in (False, True):
            quantizer = Quantizer(preset=preset, backend="openvino", bias_correction=corrected)
            quantizer.calibrate(model, batches, progress=False)
            row(f"ours, {preset}, biases {'corrected' if corrected else 'as they are'}", quantizer.quantize(model))
    for name, options in (
        ("biases as they are", {"disable_bias_correction": True}),
        ("fast_bias_correction", {"fast": True}),
        ("bias_correction", {"fast": False}),
    ):
        row(f"NNCF, {name}", _nncf_images(model, batches, **options))


def _nncf_images(
    model: nn.Module, batches: tuple[torch.Tensor, ...], *, fast: bool = True, disable_bias_correction: bool = False
) -> Any:
    import nncf
    from nncf import AdvancedQuantizationParameters

    with redirect_stdout(sys.stderr):
        quantized = nncf.quantize(
            openvino.convert_model(model, example_input=batches[0]),
            nncf.Dataset(batches, lambda batch: batch.numpy()),
            subset_size=len(batches),
            fast_bias_correction=fast,
            advanced_parameters=AdvancedQuantizationParameters(disable_bias_correction=disable_bias_correction),
        )
        compiled = openvino.Core().compile_model(quantized, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda batch: torch.from_numpy(np.array(compiled(batch.numpy())[0]))


_TABLES = {"weights": weight_rows, "biases": bias_rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for table in sys.argv[1:] or _TABLES:
        _TABLES[table]()
