"""The models of one pair of versions, in the environment that has them: ``check.py ROWS.json``.

What a model came to is written as soon as it is known: where a process dies, the rows before it are there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from compat_models import MODELS, PATCHES, subject
from guess import said
from stages import Ended, Tell, passed, stage
from zoo_models import Made
from zoo_steps import run, unequal

from quantizer import Quantizer, QuantizerConfig
from quantizer.engines import load_engine
from quantizer.rewrite.operator_patches import apply_operator_patches
from quantizer.rewrite.patches import TORCH_PATCHES, TRANSFORMERS_PATCHES
from quantizer.tasks.metrics import sqnr_db

_ENOUGH = 20.0  # dB: less between engine and proxy is worth a look, as the verdict of a run says


def main(path: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    rows: dict[str, dict[str, Any]] = {PATCHES: {"refused": _refused()}}
    for name in MODELS:
        row = rows[name] = {}
        _through(name, row.__setitem__)
        print(f"{name}: {json.dumps(row)}", flush=True)
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _refused() -> list[str]:
    """The operator patches of ours that do not fit the installed sources, and are not applied."""
    found = []
    for patch in (*TORCH_PATCHES, *TRANSFORMERS_PATCHES):
        text = inspect.getsource(importlib.import_module(patch.function.partition(":")[0]))
        patched = apply_operator_patches(text, ast.parse(text), patch.function.partition(":")[0])
        found += [patch.name for reason in patched.refused if repr(patch.name) in reason]
    return found


def _through(name: str, tell: Tell) -> None:
    try:
        quantizer, made = passed(subject(name), tell)
        stage("plug-in", tell, lambda: _from_pretrained(made))
        stage("engine", tell, lambda: tell("engine_db", _engine(quantizer, made)))
    except Ended:
        return


def _from_pretrained(made: Made) -> None:
    """Float folder, calibrated, quantized, saved and loaded by the plug-in: the same outputs bit for bit."""
    from quantizer.integrations.transformers.plugin import quantizer_of

    batch = made.batch(0)
    with tempfile.TemporaryDirectory() as folder:
        made.model.save_pretrained(f"{folder}/float")
        config = QuantizerConfig(preset="plain", backend="openvino")
        model = transformers.AutoModel.from_pretrained(f"{folder}/float", quantization_config=config)
        quantizer = quantizer_of(model)
        quantizer.calibrate(model, [batch], progress=False)
        frozen = quantizer.quantize(model)
        frozen.save_pretrained(f"{folder}/quantized")
        again = transformers.AutoModel.from_pretrained(f"{folder}/quantized")
        different = unequal(run(again, batch), run(frozen, batch))
    if different:
        raise AssertionError(f"loaded by from_pretrained, other values in {', '.join(different[:3])}")


def _engine(quantizer: Quantizer, made: Made) -> float:
    """SQNR in dB of the engine's first floating output, against the frozen proxy's, on a batch that is new to both."""
    frozen, batch = quantizer.quantize(made.model), made.batch(2)
    expected = next(value for value in run(frozen, batch).values() if value.is_floating_point())
    with tempfile.TemporaryDirectory() as folder:
        path = quantizer.export(frozen, Path(folder) / "model.onnx", made.batch(0))
        engine = load_engine(quantizer.config.backend, quantizer.build(path, Path(folder) / "model.engine").path)
        given = engine({name: batch[name].numpy() for name in engine.input_names})
    first = next(value for value in given.values() if value.dtype.kind == "f")
    decibels = min(sqnr_db(expected.double().numpy(), first.astype("float64")), 999.0)
    if not decibels >= _ENOUGH:
        raise AssertionError(f"the engine differs from the proxy: {decibels:.1f} dB")
    return decibels


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:
        raise SystemExit(said(error)) from error
