"""Twenty architectures of the test zoo: exported, checked, run beside the proxy, and built by TensorRT-RTX.

    python benchmarks/export_architectures.py [ARCHITECTURE ...]

The rule: of the zoo's text encoders, vision models, decoders and encoder-decoders, each sorted by name, the five at the
places 0, n / 5, 2n / 5 and so on. Random tiny models of 32 tokens, that a product of attention is as wide as TensorRT
wants it. A cell says ok, or what went wrong; "float too" stands where the float graph fails as well. Sites are those in
INT8; checks are ``onnx.checker`` and our own, for TensorRT-RTX.

SQNR is that of the worst output of an FP32-rest file of the INT8 plan, run by ONNX Runtime or OpenVINO (the better),
against the frozen proxy on a batch that calibration has not seen.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from common import heading
from torch import Tensor
from torch import nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions
from quantizer.engines import build_engine
from quantizer.engines import load_engine
from quantizer.errors import QuantizerError
from quantizer.export import export_onnx
from quantizer.graph_check import check_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "zoo"))

import architectures

_TOKENS = 32
_SETS = {
    "text encoder": architectures.TEXT_ENCODERS,
    "vision": architectures.VISION,
    "decoder": architectures.DECODERS,
    "encoder-decoder": architectures.ENCODER_DECODERS,
}
_INT8 = ("sm80", "sm89", "sm120")
_FP8 = ("sm89", "sm120")
_ENOUGH = 30.0
_SHOWN = 3


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("quantizer").setLevel(logging.ERROR)
    architectures.TOKENS = _TOKENS
    print(heading("Export of 20 architectures"))
    columns = ["kind", "architecture", "sites", "shapes", "export", "checks", "SQNR dB"]
    columns += [f"INT8 {' / '.join(_INT8)}", f"FP8 {' / '.join(_FP8)}"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    notes: list[str] = []
    for kind, entries in _SETS.items():
        for entry in chosen(entries, names):
            with tempfile.TemporaryDirectory() as folder:
                row = Trial(entry, Path(folder), notes).row()
            print(f"| {kind} | {entry.name} | {' | '.join(row)} |", flush=True)
            gc.collect()
    print("\n" + "\n".join(notes))


def chosen(entries: Sequence[architectures.Architecture], names: Sequence[str]) -> list[architectures.Architecture]:
    """Five at equal distances in the order of names, or those that were asked for."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    if names:
        return [entry for entry in ordered if entry.name in names]
    return [ordered[place * len(ordered) // 5] for place in range(5)]


class Trial:
    """One architecture through everything; what goes wrong is kept as a note."""

    def __init__(self, entry: architectures.Architecture, folder: Path, notes: list[str]) -> None:
        self._entry, self._folder, self._notes = entry, folder, notes
        self._model = entry.build()
        if hasattr(self._model, "config"):
            self._model.config.use_cache = False  # a cache is an object, which no graph gives back
        self._batches = [entry.batch(seed) for seed in range(4)]
        self._axes: dict[str, dict[int, str]] | None = None

    def row(self) -> list[str]:
        """The cells behind the name."""
        int8, fp8 = self._quantized("int8"), self._quantized("fp8")
        half = self._first(int8[1])
        if half is None:
            return ["", "", "float too" if self._float() is None else "failed", "", "", "", ""]
        exact = self._exported("int8-fp32", int8[1], torch.float32)
        half8 = self._exported("fp8", fp8[1], torch.float16)
        return [
            str(sum(row.quantized for row in int8[0].coverage)),
            "dynamic" if self._axes is None else "fixed",
            "ok" if exact and half and half8 else "failed",
            self._checked(half, half8, exact),
            self._agreement(exact, int8[1]),
            " / ".join(self._built(half, capability) for capability in _INT8),
            " / ".join(self._built(half8, capability) for capability in _FP8),
        ]

    def _quantized(self, dtype: str) -> tuple[Quantizer, nn.Module]:
        quantizer = Quantizer(backend="tensorrt-rtx", dtype=dtype)
        quantizer.calibrate(self._model, self._batches[:3], progress=False)
        return quantizer, quantizer.quantize(self._model)

    def _first(self, frozen: nn.Module) -> Path | None:
        """The INT8 file, of dynamic shapes; of the batch's own where the float model has no dynamic ones either."""
        path = self._exported("int8", frozen, torch.float16)
        if path is None and self._float() is None:
            self._axes = {}
            path = self._exported("int8", frozen, torch.float16)
        return path

    def _float(self) -> Path | None:
        """The float model's file; None where it does not export."""
        path = self._folder / "float.onnx"
        return path if path.exists() else self._exported("float", self._eager(), torch.float16)

    def _eager(self) -> nn.Module:
        model = copy.deepcopy(self._model)
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")
        return model

    def _write(self, name: str, model: nn.Module, dtype: torch.dtype) -> Path:
        path = self._folder / f"{name}.onnx"
        return export_onnx(model, path, self._batches[0], opset=20, dtype=dtype, axes=self._axes)

    def _exported(self, name: str, model: nn.Module, dtype: torch.dtype) -> Path | None:
        try:
            return self._write(name, model, dtype)
        except QuantizerError as error:
            self._note(f"{name}: {_line(error)}")
            return None

    def _checked(self, *paths: Path | None) -> str:
        """What the checker, by an error, and the target's linter have against the files."""
        findings = []
        for path in paths:
            if path is None:
                return "-"
            onnx.checker.check_model(str(path), full_check=True)
            if path.stem != "int8-fp32":
                findings += [f"{path.stem}: {finding}" for finding in check_file(path, "tensorrt-rtx")]
        for finding in findings[:_SHOWN]:
            self._note(finding)
        return f"{len(findings)} findings" if findings else "ok"

    def _agreement(self, path: Path | None, frozen: nn.Module) -> str:
        if path is None:
            return "-"
        batch = self._batches[3]
        with torch.no_grad():
            expected = [value.double().numpy() for value in _tensors(frozen(**batch)) if value.is_floating_point()]
        found = {}
        for engine in ("onnxruntime", "openvino"):
            try:
                given = self._run(engine, path, batch)
            except QuantizerError as error:
                self._note(f"{engine}: {_line(error)}")
                continue
            floating = [value for value in given if value.dtype.kind == "f"]
            found[engine] = min(_sqnr(a, b) for a, b in zip(expected, floating, strict=True))
        if not found:
            return "neither runs"
        best = max(found.values())
        if best < _ENOUGH:
            self._note(f"SQNR {', '.join(f'{name} {value:.1f}' for name, value in found.items())}")
        return f"{best:.1f}"

    def _run(self, engine: str, path: Path, batch: dict[str, Tensor]) -> list[Any]:
        built = build_engine(engine, path, path.with_suffix(f".{engine}"), BuildOptions())
        loaded = load_engine(engine, built.path)
        outputs = loaded({name: batch[name].numpy() for name in loaded.input_names})
        return list(outputs.values())

    def _built(self, path: Path | None, capability: str) -> str:
        if path is None:
            return "-"
        reason = self._refusal(path, capability)
        if reason is None:
            return "ok"
        unquantized = self._float()
        if unquantized is not None and self._refusal(unquantized, capability) is not None:
            return "float too"
        self._note(f"{path.stem} {capability}: {reason}")
        return "failed"

    def _refusal(self, path: Path, capability: str) -> str | None:
        options = BuildOptions(dynamic=_ranges(path, self._batches[0]), compute_capability=capability)
        try:
            build_engine("tensorrt-rtx", path, path.with_suffix(".engine"), options)
        except QuantizerError as error:
            return _line(error)
        return None

    def _note(self, text: str) -> None:
        self._notes.append(f"- {self._entry.name}: {text}")


def _ranges(path: Path, batch: dict[str, Tensor]) -> dict[str, tuple[int, int, int]]:
    """Half, once and twice the example's length for each dynamic dimension."""
    found = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.dim_param:
                size = int(batch[value.name].shape[axis])
                found[dimension.dim_param] = (size // 2, size, 2 * size)
    return found


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of an output in the exporter's order."""
    return [value for value in torch.utils._pytree.tree_leaves(output) if isinstance(value, Tensor)]


def _sqnr(expected: np.ndarray, given: np.ndarray) -> float:
    noise = np.square(expected - given.astype(np.float64)).sum()
    return float(10 * np.log10(np.square(expected).sum() / noise)) if noise else np.inf


def _line(error: BaseException) -> str:
    """An error in one line, cut short."""
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
