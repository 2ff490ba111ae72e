"""What each of the chosen models goes through on its way into files and engines, as facts that are told one by one.

A stage that fails ends what needs its file and nothing else. The models read 32 tokens, that a product of attention is
as wide as TensorRT wants it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import onnx
import torch
from guess import said
from torch import Tensor, nn
from zoo_models import Made, modality_of, subjects
from zoo_steps import run

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import QuantizerError
from quantizer.export.exporter import export_onnx, least_opset
from quantizer.tasks.metrics import sqnr_db

__all__ = ["CAPABILITY", "STAGES", "exported"]

STAGES = ("made", "float_export", "quantized", "export", "check", "onnxruntime", "openvino", "float_build", "build")
"""Each is "ok" or a reason, and nothing where what it needs is missing."""

CAPABILITY = "sm89"
_OK = "ok"
_TARGET = "tensorrt-rtx"
_OPSET = 20
_TOKENS = 32
_MOST_DB = 999.0

Tell = Callable[[str, Any], None]
Axes = dict[str, dict[int, str]] | None


def exported(key: str, tell: Tell) -> None:
    """Tell everything about the subject of a key: its files, their check, their engines and how those agree."""
    architectures.TOKENS = _TOKENS
    subject = next(subject for subject in subjects() if subject.key == key)
    made = _stage("made", tell, lambda: _made(subject.made))
    if made is None:
        return
    tell("modality", modality_of(subject.name, list(made.batch(0))))
    with tempfile.TemporaryDirectory() as folder:
        _Files(made, Path(folder), tell).all()


class _Files:
    """The files of one model, and what becomes of them."""

    def __init__(self, made: Made, folder: Path, tell: Tell) -> None:
        self._made, self._folder, self._tell = made, folder, tell
        self._example = made.batch(0)
        self._axes: Axes = None

    def all(self) -> None:
        unquantized = _stage("float_export", self._tell, self._float)
        frozen = _stage("quantized", self._tell, self._quantized)
        files = frozen and _stage("export", self._tell, lambda: self._both(frozen, fixed=unquantized is None))
        self._tell("shapes", "dynamic" if self._axes is None else "fixed")
        if files:
            half, exact = files
            _stage("check", self._tell, lambda: self._check(half, exact))
            for engine in ("onnxruntime", "openvino"):
                _stage(engine, self._tell, lambda name=engine: self._run(name, exact, frozen))  # type: ignore[misc]
        if unquantized:
            _stage("float_build", self._tell, lambda: self._build(unquantized))
        if files:
            _stage("build", self._tell, lambda: self._build(files[0]))

    def _float(self) -> Path:
        """The float model's file: of dynamic shapes, or of the example's own where it has no dynamic ones."""
        model = copy.deepcopy(self._made.model)
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")
        return self._dynamic_or_fixed("float", model, torch.float16, fixed=True)

    def _quantized(self) -> nn.Module:
        quantizer = Quantizer(backend=_TARGET, dtype="int8")
        quantizer.calibrate(self._made.model, [self._made.batch(seed) for seed in (0, 1)], progress=False)
        self._tell("sites", sum(row.quantized for row in quantizer.coverage))
        return quantizer.quantize(self._made.model)

    def _both(self, frozen: nn.Module, *, fixed: bool) -> tuple[Path, Path]:
        """The quantized file with the rest in FP16, and with it in FP32; ``fixed``: the float model has no file."""
        half = self._dynamic_or_fixed("half", frozen, torch.float16, fixed=fixed)
        return half, self._write("exact", frozen, torch.float32)

    def _dynamic_or_fixed(self, name: str, model: nn.Module, dtype: torch.dtype, *, fixed: bool) -> Path:
        """A file of dynamic shapes; where there is none and one of fixed shapes will do, that one, from then on."""
        try:
            return self._write(name, model, dtype)
        except QuantizerError as error:
            if not fixed or self._axes is not None:
                raise
            self._axes = {}
            try:
                return self._write(name, model, dtype)
            except QuantizerError:
                self._axes = None
                raise error from None

    def _write(self, name: str, model: nn.Module, dtype: torch.dtype) -> Path:
        path = self._folder / f"{name}.onnx"
        opset = max(_OPSET, least_opset(model))
        return export_onnx(model, path, self._example, opset=opset, dtype=dtype, axes=self._axes)

    def _check(self, half: Path, exact: Path) -> None:
        """By ONNX's own checker, and by the rules of the target that the first file is for; warnings are a fact."""
        for path in (half, exact):
            onnx.checker.check_model(str(path), full_check=True)
        findings = check_file(half, _TARGET)
        self._tell("warnings", [str(finding) for finding in findings if finding.severity != "error"])
        errors = [str(finding) for finding in findings if finding.severity == "error"]
        if errors:
            raise AssertionError(f"{len(errors)} errors, the first: {errors[0]}")

    def _run(self, name: str, path: Path, frozen: nn.Module) -> None:
        """Run the file on a batch that calibration has not seen, and tell how far it is from the frozen proxy."""
        batch = self._made.batch(2)
        expected = [value.double().numpy() for value in _floats(_leaves(frozen, batch))]
        engine = load_engine(name, build_engine(name, path, path.with_suffix(f".{name}"), BuildOptions()).path)
        outputs = engine({given: batch[given].numpy() for given in engine.input_names}).values()
        found = [value for value in outputs if value.dtype.kind == "f"]
        if [value.shape for value in found] != [value.shape for value in expected]:
            raise AssertionError(f"outputs of other shapes: {[value.shape for value in found]}")
        if not all((np.isfinite(a) == np.isfinite(b)).all() for a, b in zip(expected, found, strict=True)):
            raise AssertionError("values that are not finite, and are in the proxy")
        pairs = [(a[np.isfinite(a)], b[np.isfinite(a)]) for a, b in zip(expected, found, strict=True)]
        worst = [sqnr_db(a, b.astype(np.float64)) for a, b in pairs if np.any(a)]
        self._tell(f"{name}_db", min([*worst, _MOST_DB]))

    def _build(self, path: Path) -> None:
        options = BuildOptions(dynamic=_ranges(path, self._example), compute_capability=CAPABILITY)
        build_engine(_TARGET, path, path.with_suffix(".engine"), options)


def _made(make: Callable[[], Made]) -> Made:
    """The model without a cache, which is an object that no file can give back; it has run once."""
    made = make()
    for module in made.model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    run(made.model, made.batch(0))
    return made


def _leaves(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The tensors of an output in the exporter's order."""
    torch.manual_seed(2)
    with torch.no_grad():
        return [value for value in torch.utils._pytree.tree_leaves(model(**batch)) if isinstance(value, Tensor)]


def _floats(values: list[Tensor]) -> list[Tensor]:
    return [value for value in values if value.is_floating_point()]


def _ranges(path: Path, batch: Mapping[str, Tensor]) -> dict[str, tuple[int, int, int]]:
    """Half, once and twice the example's length for each dynamic dimension."""
    found = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.dim_param:
                size = int(batch[value.name].shape[axis])
                found[dimension.dim_param] = (max(size // 2, 1), size, 2 * size)
    return found


def _stage(name: str, tell: Tell, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, True for None; None if it failed."""
    tell("stage", name)
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - whatever an exporter or an engine raises is the row's reason
        tell(name, said(error))
        return None
    tell(name, _OK)
    return True if found is None else found
