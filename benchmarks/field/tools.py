"""The tools that are compared: each makes something that runs a batch, out of a float model and its calibration
samples.

Each has its own defaults, one thread, and the same batches. What runs in ONNX Runtime does so in its own session, and
what runs in OpenVINO for latency in float32, but where the name says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
import torch.nn.functional as F
from engine_speed import openvino_engine, plain_session
from peers import nncf_by_default
from subjects import Batch, Run, Subject
from torch_engine import pt2e

import quantizer
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.benchmark import QUANTIZED_STEM
from quantizer.proxy.build import exportable

__all__ = ["REFERENCE", "TOOLS", "Made", "Tool", "onnx_session"]

REFERENCE = "onnxruntime-float32"
"""The tool beside which the latency of all is measured."""

_DROP = 0.01
"""The drop of the score that NNCF's accuracy control may take."""

_LONGEST = 512
"""The most tokens that every text model here takes."""


@dataclass(frozen=True)
class Made:
    """What a tool made.

    Attributes:
        load: returns what runs a batch; a fresh process can call it where there are files.
        files: what has to be shipped; none: the tool makes a module in Python, each time anew.
        note: what it chose, in a few words.
    """

    load: Callable[[], Run]
    files: tuple[Path, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        title: its name.
        make: makes an engine or a module in a folder.
        needs: the module without which it cannot.
        ours: whether it is this package.
    """

    title: str
    make: Callable[[Subject, Path], Made]
    needs: str = "torch"
    ours: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can run here."""
        return find_spec(self.needs) is not None


def _float_file(subject: Subject, folder: Path) -> Path:
    # Other tools also get the operator patches with which the batch of RT-DETRv2 is variable.
    model = exportable(subject.model)
    return export_onnx(model, folder / "float.onnx", subject.calibration[0], opset=20, dtype=torch.float32)


def _arrays(batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.numpy() for name, value in batch.items()}


def onnx_session(path: Path) -> Run:
    """What runs a file in ONNX Runtime's own session."""
    return _of_arrays(plain_session(path))


def _openvino(path: Path, **settings: object) -> Run:
    return _of_arrays(openvino_engine(path, **settings))


def _of_arrays(run: Callable[[dict[str, np.ndarray[Any, Any]]], Any]) -> Run:
    return lambda batch: run(_arrays(batch))


def _module(module: Any) -> Run:
    def run(batch: Batch) -> Any:
        with torch.no_grad():
            return module(**batch)

    return run


# In float


def _torch(subject: Subject, _: Path) -> Made:
    return Made(lambda: _module(subject.model))


def _torch_compile(subject: Subject, _: Path) -> Made:
    # As torch's manual advises for a CPU, and that of PT2E demands: weights are constants of the graph.
    torch._inductor.config.freezing = True
    return Made(lambda: _module(torch.compile(subject.model)))


def _onnxruntime(subject: Subject, folder: Path) -> Made:
    path = _float_file(subject, folder)
    return Made(partial(onnx_session, path), (path,))


def _openvino_float(subject: Subject, folder: Path, precision: str) -> Made:
    if precision == "bf16" and "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("this CPU computes nothing in bfloat16; OpenVINO takes float32 instead, without a word")
    path = _float_file(subject, folder)
    return Made(partial(_openvino, path, INFERENCE_PRECISION_HINT=precision), (path,))


# Other tools in INT8


def _quantize_dynamic(subject: Subject, folder: Path) -> Made:
    from onnxruntime.quantization import quantize_dynamic

    path = folder / "int8.onnx"
    quantize_dynamic(_float_file(subject, folder), path)
    return Made(partial(onnx_session, path), (path,))


def _quantize_static(subject: Subject, folder: Path) -> Made:
    from onnx_input import Reader
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # As its manual asks: prepared, in Q/DQ, with a scale for each channel of a weight.
    ready, path = folder / "ready.onnx", folder / "int8.onnx"
    quant_pre_process(_float_file(subject, folder), ready, skip_symbolic_shape=True)
    quantize_static(ready, path, Reader([*map(_arrays, subject.calibration)]), per_channel=True)
    return Made(partial(onnx_session, path), (path,))


def _model_optimizer(subject: Subject, folder: Path) -> Made:
    from modelopt.onnx.quantization import quantize

    path = folder / "int8.onnx"
    quantize(
        str(_float_file(subject, folder)),
        quantize_mode="int8",
        calibration_data=_one_batch(subject),
        calibration_eps=["cpu"],
        # Its default, FP16 for what is not quantized, is for GPUs: EfficientNet is at random with it on this CPU.
        high_precision_dtype="fp32",
        output_path=str(path),
    )
    return Made(partial(onnx_session, path), (path,))


def _one_batch(subject: Subject) -> dict[str, np.ndarray[Any, Any]]:
    """All rows, those of texts as long as the longest; what is added is masked."""
    found = {}
    for name in subject.calibration[0]:
        parts = [batch[name] for batch in subject.calibration]
        if parts[0].dim() == 2:
            longest = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, longest - part.shape[1])) for part in parts]
        found[name] = torch.cat(parts).numpy()
    return found


def _nncf(subject: Subject, folder: Path) -> Made:
    arrays = [*map(_arrays, subject.calibration)]
    made = nncf_by_default(_float_file(subject, folder), arrays, transformer=subject.is_transformer)
    return _saved(made, folder)


def _nncf_control(subject: Subject, folder: Path) -> Made:
    import nncf

    base = subject.predict(_module(subject.model))

    def score(model: Any, _: Any) -> tuple[float, None]:
        names = [port.get_any_name() for port in model.inputs]
        outputs = [port.get_any_name() for port in model.outputs]

        def run(batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
            results = model({name: batch[name].numpy() for name in names})
            return {name: np.array(results[place]) for place, name in enumerate(outputs)}

        # Above 0, as NNCF divides by that of the float model, and better above it, whatever the score is.
        return 1 + subject.figures(base, subject.predict(run))["gained"], None

    data = nncf.Dataset([*map(_arrays, subject.calibration)])
    kind = {"model_type": nncf.ModelType.TRANSFORMER} if subject.is_transformer else {}
    made = nncf.quantize_with_accuracy_control(
        openvino.Core().read_model(_float_file(subject, folder)),
        calibration_dataset=data,
        # What is scored are the subject's own rows.
        validation_dataset=data,
        validation_fn=score,
        max_drop=_DROP,
        subset_size=len(subject.calibration),
        **kind,
    )
    return _saved(made, folder)


def _saved(model: openvino.Model, folder: Path) -> Made:
    path = folder / "int8.xml"
    openvino.save_model(model, path, compress_to_fp16=False)
    return Made(partial(_openvino, path), (path, path.with_suffix(".bin")))


def _pt2e(subject: Subject, _: Path) -> Made:
    torch._inductor.config.freezing = True
    example = subject.calibration[0]
    with torch.no_grad():
        made = subject.model(**example)
    output = None if isinstance(made, torch.Tensor) else next(iter(made))
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=_LONGEST)
    axes = [{0: batch, **({1: length} if value.dim() == 2 else {})} for value in example.values()]
    ready = pt2e(subject.model, subject.calibration, axes)

    def run(given: Batch) -> Any:
        with torch.no_grad():
            first = ready(*(given[name] for name in example))
        return first if output is None else {output: first}

    return Made(lambda: run)


def _quanto(subject: Subject, _: Path) -> Made:
    from optimum.quanto import Calibration, freeze, qint8, quantize

    model = copy.deepcopy(subject.model)
    quantize(model, weights=qint8, activations=qint8)
    with Calibration(), torch.no_grad():
        for batch in subject.calibration:
            model(**batch)
    freeze(model)
    return Made(lambda: _module(model))


# Ours


def _ours(subject: Subject, folder: Path, **settings: object) -> Made:
    result = quantizer.quantize_model(subject.model, subject.calibration, progress=False, **settings)
    at = result.save(folder / "ours")
    record = result.record
    chosen = record.choice.candidates[0].name if record.choice else ""
    return Made(partial(_loaded, at), (at / f"{QUANTIZED_STEM}.engine",), chosen)


def _ours_in(subject: Subject, folder: Path, engine: str, **settings: object) -> Made:
    """Ours in one library: by its backend for this CPU, which without VNNI is another."""
    (backend,), _ = cpu_candidates((engine,))
    made = _ours(subject, folder, backend=backend, **settings)
    return made if backend == engine else replace(made, note=backend)


def _w4a8(subject: Subject, folder: Path) -> Made:
    """Weights of linears in INT4, a scale a channel, and activations in INT8; OpenVINO has no such convolution."""
    four = [{"weights": "int4", "kinds": ["linear"]}]
    return _ours_in(subject, folder, "openvino", preset="accurate", formats=four)


def _loaded(folder: Path) -> Run:
    return _module(quantizer.load(folder))


TOOLS: dict[str, Tool] = {
    "torch-float32": Tool("torch, float32", _torch),
    "torch-compile": Tool("torch.compile, float32", _torch_compile),
    REFERENCE: Tool("ONNX Runtime, float32", _onnxruntime, "onnxruntime"),
    "openvino-float32": Tool("OpenVINO, float32", partial(_openvino_float, precision="f32"), "openvino"),
    "openvino-bfloat16": Tool("OpenVINO, bfloat16", partial(_openvino_float, precision="bf16"), "openvino"),
    "quantize-dynamic": Tool("ONNX Runtime, `quantize_dynamic`", _quantize_dynamic, "onnxruntime"),
    "quantize-static": Tool("ONNX Runtime, `quantize_static`", _quantize_static, "onnxruntime"),
    "model-optimizer": Tool("Model Optimizer, ONNX INT8, in ONNX Runtime", _model_optimizer, "modelopt"),
    "nncf": Tool("NNCF, in OpenVINO", _nncf, "nncf"),
    "nncf-control": Tool("NNCF with accuracy control, in OpenVINO", _nncf_control, "nncf"),
    "pt2e": Tool("torchao PT2E, X86 Inductor", _pt2e, "torchao"),
    "quanto": Tool("optimum-quanto", _quanto, "optimum"),
    "auto": Tool("ours, `backend: auto`", _ours, ours=True),
    "openvino": Tool("ours, OpenVINO", partial(_ours_in, engine="openvino"), ours=True),
    "openvino-fast": Tool(
        "ours, OpenVINO, `preset: fast`", partial(_ours_in, engine="openvino", preset="fast"), ours=True
    ),
    "openvino-accurate": Tool(
        "ours, OpenVINO, `preset: accurate`", partial(_ours_in, engine="openvino", preset="accurate"), ours=True
    ),
    "openvino-w4a8": Tool("ours, OpenVINO, `preset: accurate`, W4A8", _w4a8, ours=True),
    "onnxruntime": Tool("ours, ONNX Runtime", partial(_ours_in, engine="onnxruntime"), ours=True),
    "torch": Tool("ours, torch engine", partial(_ours_in, engine="torch"), ours=True),
}
"""All tools, by the name that the command takes."""
