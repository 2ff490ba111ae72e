"""``quantizer convert -m model.onnx``: a float ONNX file and a file of arrays, to checked engines in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.common.data.array_files import ARRAY_FILES, array_batches
from quantizer.errors import CalibrationError, ConfigError
from quantizer.files import checked_folder
from quantizer.pipeline.quantize_model import quantize_model
from quantizer.pipeline.run import RUN
from quantizer.targets import AUTO
from quantizer.tasks.from_onnx import OnnxModule, from_onnx

SUFFIX = ".onnx"

_BATCH_ROWS = 8
"""The rows of a batch that is cut from a file, which is also what engines are timed at."""

_TAKEN = frozenset({"model", "output", "quantization", "calibration", "rows", "fixed", "backend", "dtype", "threads"})
_EXPECTED = f"a file of arrays ({' or '.join(ARRAY_FILES)}), one for each input by its name, or a folder of such files"


def convert_onnx(options: Mapping[str, Any], force: bool, console: Console) -> Path:
    """Quantize a float ONNX file for the fastest engine that is right, and return the folder that was written."""
    problems = _problems(options)
    if problems:
        raise ConfigError(problems)
    folder: Path = options["output"]
    checked_folder(folder, RUN, replace=force)
    model = from_onnx(options["model"], fixed=dict(map(_fixed, options.get("fixed", ()))))
    batches = array_batches(Path(options["calibration"]), _BATCH_ROWS, options.get("rows"))
    (backend,) = options.get("backend", (AUTO,))
    result = quantize_model(
        model,
        [_by_argument(model, batch) for batch in batches],
        threads=options.get("threads", 1),
        progress=True,
        backend=backend,
        **({"dtype": options["dtype"]} if "dtype" in options else {}),
    )
    result.save(folder, replace=force)
    console.print(result.summary(), highlight=False, markup=False)
    console.print(f"written to {folder}", highlight=False, markup=False)
    return folder


def _problems(options: Mapping[str, Any]) -> list[str]:
    found = [
        f"--{name.replace('_', '-')} is for checkpoints, and {options['model']} is an ONNX file; leave it out"
        for name in options
        if name not in _TAKEN
    ]
    if not options.get("quantization"):
        found.append(f"{options['model']} is an ONNX file already: give --quantization, to make INT8 of it")
    if "calibration" not in options:
        found.append(f"--calibration is missing: give {_EXPECTED}")
    if len(options.get("backend", (AUTO,))) != 1:
        found.append(f"--backend {' '.join(options['backend'])}: an ONNX file is quantized for one, or for auto")
    times = Counter(_fixed(text)[0] for text in options.get("fixed", ()))
    found += [f"--fixed {name}: got {count} numbers for it, expected one" for name, count in times.items() if count > 1]
    for text in options.get("fixed", ()):
        name, number = _fixed(text)
        if not name or number is None:
            found.append(f"--fixed {text}: expected NAME=NUMBER, of an input that never changes or of a named axis")
    rows = options.get("rows", 1)
    if rows < 1:
        found.append(f"--rows {rows}: expected 1 or more")
    return found


def _fixed(text: str) -> tuple[str, float | None]:
    """Return the name and the number in ``sr=16000``; None: there is no number."""
    name, _, value = text.rpartition("=")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, None


def _by_argument(model: OnnxModule, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch by the names of the arguments of ``forward``."""
    if set(batch) != set(model.arguments):
        raise CalibrationError(
            f"the calibration data has the arrays {', '.join(sorted(batch))}, and {model.source} the inputs "
            f"{', '.join(model.arguments)}: name an array for each input, and none besides"
        )
    return {argument: batch[name] for name, argument in model.arguments.items()}
