"""The conversion of a module that a function returns: the options become the configuration of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.config import RunConfig
from quantizer.config.load import Draft, finished_run
from quantizer.errors import ConfigError
from quantizer.runs.run import run
from quantizer.runs.workload.quantize_model import SENSITIVITY_BATCHES
from quantizer.targets import AUTO

_KEYS = {
    "inputs": "model.inputs",
    "weights": "model.weights",
    "score": "model.metric",
    "dtype": "quantizer.dtype",
    "max_drop": "fallback.max_drop",
    "batch_size": "export.dynamic.batch",
    "seq_len": "export.dynamic.sequence",
    "compute_capability": "engine.compute_capability",
    "inference_precision": "engine.inference_precision",
    "threads": "engine.threads",
}
"""The key of a run's configuration for each option."""

_OF_CHECKPOINTS = ("task", "config", "calibration", "rows", "column", "tuning", "evaluation", "tolerance")


def convert_function(given: Mapping[str, Any], console: Console) -> Path:
    """Carry out the conversion of a module that a function returns, and return the folder, which is that of a run."""
    return run(function_config(given), None, given.get("force", False), console)


def function_config(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run for options."""
    problems = list(_problems(given))
    if problems:
        raise ConfigError(problems)
    draft = Draft({}, "quantizer convert")
    draft.set(("model", "source"), given["model"], f"-m {given['model']}")
    for option, key in _KEYS.items():
        if option in given:
            words = " ".join(map(str, given[option])) if isinstance(given[option], tuple) else given[option]
            draft.set(tuple(key.split(".")), given[option], f"--{option.replace('_', '-')} {words}")
    among = [name for name in given["backend"] if name != AUTO]
    backend = among if AUTO in given["backend"] and among else given["backend"][0]
    draft.set(("quantizer", "backend"), backend, f"--backend {' '.join(given['backend'])}")
    draft.set(("amp", "batches"), SENSITIVITY_BATCHES, "default")
    draft.set(("output",), str(given["output"]), f"-o {given['output']}")
    return finished_run(draft, given["output"])


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    model = given["model"]
    if ":" not in model:
        named = " and ".join(f"--{option}" for option in ("inputs", "weights", "score") if option in given)
        yield (
            f"{named} is for a module that a function returns, and -m {model} is the name of a checkpoint; leave it "
            "out, or name the function, such as -m my_pkg.nets:build"
        )
        return
    if not given.get("quantization"):
        yield (
            f"--quantization is missing: -m {model} is a function, and what is written for it is the folder of a run, "
            "with the quantized engine and the one in float"
        )
    if "inputs" not in given:
        yield (
            f"--inputs is missing: -m {model} is a function, and its module needs batches to calibrate on; expected "
            "the function that returns them, such as --inputs my_pkg.data:calibration"
        )
    if "max_drop" in given and "score" not in given:
        yield (
            f"--max-drop {given['max_drop']} is a drop of a score, and --score is missing; expected the function that "
            "takes the module and returns a number, such as --score my_pkg.data:score"
        )
    for option in _OF_CHECKPOINTS:
        if option in given:
            yield f"--{option} is for checkpoints, and -m {model} is a function; leave it out"
    if len(given["backend"]) > 1 and AUTO not in given["backend"]:
        named = " ".join(given["backend"])
        yield f"--backend {named}: expected one for -m {model}, or `{AUTO} {named}`, of which the fastest is kept"
