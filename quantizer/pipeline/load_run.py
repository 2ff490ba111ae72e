"""``load``: the engine in the folder of a run, called as the model that it was built of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from quantizer.engines import load_engine
from quantizer.errors import EngineError, QuantizerError
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.load_converted import CONFIG
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.report import read_record
from quantizer.tasks.seq2seq.parts import ENCODER
from quantizer.utils.files import restore_folder
from quantizer.utils.paths import is_file, is_folder, regular_file
from quantizer.utils.plain_values import yaml_values


def load(
    folder: str | os.PathLike[str],
    *,
    float_engine: bool = False,
    threads: int | None = None,
    verify: bool = True,
    trust: bool = False,
) -> EngineModule:
    """Return the engine that ``QuantizedModel.save`` or ``quantizer run`` wrote, called as the model is.

    Tensors go in by position or by name, and what the model returned comes out: a tensor, or tensors in tuples, lists
    and mappings (a model output of transformers as a mapping). A checkpoint's engine is called by the names of its
    inputs, and returns a mapping. The model itself is not needed.

    Args:
        folder: the folder.
        float_engine: load the engine of the float model instead of the quantized one.
        threads: the threads of an engine on a CPU; None: as many as it was measured with.
        verify: compare the engine's file with the checksum in it.
        trust: load a compiled torch engine, which is native code, also where this process has not built it.

    Raises:
        QuantizerError: the folder is not that of a run, is of a model in several parts, or is damaged.
        EngineError: the engine was refused, does not load on this machine, or holds native code that is not trusted.
        MissingDependencyError: the library of its backend is not installed.
    """
    path = Path(folder)
    restore_folder(path)
    backend, measured = _settings(path)
    if is_file(path / f"{ENCODER}.engine"):
        raise QuantizerError(
            f"{path} holds a model in several parts, an engine for each, which write text together: "
            f"quantizer.load_converted({json.dumps(str(path))}).generate([...])"
        )
    file = path / f"{FLOAT_STEM if float_engine else QUANTIZED_STEM}.engine"
    _check_refused(path, file, float_engine=float_engine)
    engine = load_engine(backend, file, threads=measured if threads is None else threads, verify=verify, trust=trust)
    call = CallForm.read(path) or CallForm.by_names(path.absolute().name, engine.input_names, engine.output_names)
    return EngineModule(engine, call)


def _settings(folder: Path) -> tuple[str, int]:
    """Return the backend and the threads of a run's engines."""
    config = folder / "config.yaml"
    if not is_file(config):
        raise QuantizerError(
            f"{folder} is not the folder of a run: it has no config.yaml; expected what QuantizedModel.save or "
            f"`quantizer run` wrote{_hint(folder)}"
        )
    try:
        told: Any = yaml_values(regular_file(config).read_bytes())
        backend, threads = told["quantizer"]["backend"], told["engine"]["threads"]
        if not isinstance(backend, str) or not isinstance(threads, int) or isinstance(threads, bool):
            raise ValueError("expected text for quantizer.backend and a number for engine.threads")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuantizerError(
            f"{config} cannot be read ({type(error).__name__}: {error}); it is damaged: save the result again"
        ) from error
    return backend, threads


def _check_refused(folder: Path, file: Path, *, float_engine: bool) -> None:
    """Raise if an engine is missing since the run refused it."""
    report = folder / "report.json"
    if is_file(file) or not is_file(report):
        return
    record = read_record(report)
    why = record.float_engine_refused if float_engine else record.engine_refused
    if why is not None:
        raise EngineError(f"{folder} holds no {file.name}: the run refused it: {why}")


def _hint(folder: Path) -> str:
    """Return what loads a folder that is no run's, or which folders in it can be loaded; empty: nothing is known."""
    if not is_folder(folder):
        return ""
    loads = "quantizer.load_converted"
    if is_file(folder / CONFIG):
        return f"; {loads} loads what `quantizer convert` wrote"
    converted = [
        path.parent for path in sorted(folder.glob("*/config.json")) if (path.parent / "model.engine").exists()
    ]
    if converted:
        return f"; {loads}({json.dumps(str(converted[0]))}) loads the engine that `quantizer convert` wrote there"
    runs = [path.parent for path in sorted(folder.glob("*/config.yaml")) if (path.parent / "model.engine").exists()]
    return f"; a run lies in it: quantizer.load({json.dumps(str(runs[0]))})" if runs else ""
