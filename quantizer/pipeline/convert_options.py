"""``quantizer convert``: its options as configurations of runs; ONNX files as models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from os import fspath
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.config import RunConfig, quantizer_config
from quantizer.config.describe import nearest
from quantizer.config.load import Draft, finished_run, run_draft
from quantizer.config.yaml_file import read_yaml
from quantizer.engines import backends
from quantizer.errors import CalibrationError, ConfigError, TaskError
from quantizer.pipeline.faults import Faults
from quantizer.pipeline.open_axes import WRITTEN_BATCH_SIZES
from quantizer.pipeline.quantize_model import SENSITIVITY_BATCHES, quantize_model
from quantizer.pipeline.run import RUN
from quantizer.plan.targets import AUTO, profile, profiles
from quantizer.tasks import datasets, folder_holds, load_examples, read_checkpoint, tasks, text_files
from quantizer.tasks.from_onnx import OnnxModule, from_onnx
from quantizer.tasks.models import Checkpoint
from quantizer.utils.batches import ARRAY_FILES, array_batches
from quantizer.utils.files import checked_folder
from quantizer.utils.paths import is_file, is_folder

SUFFIX = ".onnx"

_BATCH_ROWS = 8
"""The rows of a batch that is cut from a file, which is also what engines are timed at."""

_TAKEN = frozenset(
    {"model", "output", "quantization", "calibration", "samples", "fixed", "backend", "dtype", "threads"}
)
_EXPECTED = f"a file of arrays ({' or '.join(ARRAY_FILES)}), one for each input by its name, or a folder of such files"


def convert_onnx(options: Mapping[str, Any], force: bool, console: Console) -> Path:
    """Quantize a float ONNX file for the fastest engine that is right, and return the folder that was written."""
    problems = _onnx_problems(options)
    if problems:
        raise ConfigError(problems)
    folder: Path = options["output"]
    checked_folder(folder, RUN, replace=force)
    model = from_onnx(options["model"], fixed=dict(map(_fixed, options.get("fixed", ()))))
    batches = array_batches(Path(options["calibration"]), _BATCH_ROWS, options.get("samples"))
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


def _onnx_problems(options: Mapping[str, Any]) -> list[str]:
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
    rows = options.get("samples", 1)
    if rows < 1:
        found.append(f"--samples {rows}: expected 1 or more")
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


Sizes = tuple[int, int, int]
"""Least, usual and most."""

BATCH_SIZES: Sizes = (1, 8, 32)
SEQUENCE_LENGTHS: Sizes = (16, 128, 512)

CALIBRATION_SAMPLES = 128
"""The default number of calibration samples, if there are so many."""

_LARGEST_OUTPUT = 1 << 27
"""The most values of an output in the default sizes: half a gigabyte in float32, of which a check holds several."""

_AMP_BATCHES = 4
"""Sensitivity is measured on so many batches unless a file says otherwise."""

_KEYS = {
    "inputs": "model.inputs",
    "weights": "model.weights",
    "score": "model.metric",
    "task": "model.task",
    "new_tokens": "model.new_tokens",
    "seconds": "model.seconds",
    "labels": "model.labels",
    "template": "model.template",
    "dtype": "quantizer.dtype",
    "max_drop": "fallback.max_drop",
    "batch_size": "export.dynamic.batch",
    "seq_len": "export.dynamic.sequence",
    "threads": "engine.threads",
    "tolerance": "report.tolerance",
}
"""The key of a run's configuration for each option that is one."""

_OF_CHECKPOINTS = (
    "task",
    "calibration",
    "samples",
    "column",
    "tuning",
    "evaluation",
    "seconds",
    "new_tokens",
    "labels",
)
_OF_FUNCTIONS = ("inputs", "weights", "score")
_OF_QUANTIZATION = ("calibration", "samples", "dtype", "max_drop", "tuning")
_PLAIN = {"texts": "text", "images": "image", "recordings": "audio"}
"""The data sets without labels, and what they hold."""

_NEEDED = {
    "text": f"a file of texts ({', '.join(text_files)})",
    "image": "a folder of images",
    "audio": "a folder of recordings (.wav)",
}


def convertible_tasks() -> list[str]:
    """Return the tasks that need nothing besides their model: those without a fitted head."""
    return [name for name in tasks.names() if not tasks[name].needs_head]


def conversion_configs(given: Mapping[str, Any], *, function: bool = False) -> list[RunConfig]:
    """Return the configuration of the run for each backend that options name; a single one where an engine is chosen.

    Args:
        given: the options that were given, by their names without dashes; ``config`` is the path of a YAML file with
            other keys, of the quantizer or of a whole run, and ``set`` are overrides such as ``qat.epochs=1``.
        function: whether the model is a module that a function returns, and no checkpoint.
    """
    names: tuple[str, ...] = tuple(given.get("backend", ()))
    problems = [*_problems(given, names), *(_function_problems if function else _checkpoint_problems)(given)]
    if problems:
        raise ConfigError(problems)
    base = _base(given)
    for option, key in _KEYS.items():
        if option in given:
            _set(base, key, given[option], option)
    if given.get("quantization"):
        base.set(("quantize",), True, "--quantization")
    _default(base, "quantize", False)
    if not function:
        _checkpoint(base, given)
    if "max_drop" in given or (function and given.get("quantization")):
        _default(base, "amp.batches", SENSITIVITY_BATCHES if function else _AMP_BATCHES)
    found: list[RunConfig] = []
    for backend in (None,) if not names else (names,) if AUTO in names else [(name,) for name in names]:
        draft = deepcopy(base)
        try:
            found.append(_finished(draft, given, backend))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return found


def _base(given: Mapping[str, Any]) -> Draft:
    """Return the keys of ``--config``: those of a whole run, or of its section ``quantizer``."""
    draft = Draft({}, "quantizer convert") if "config" not in given else _of_file(given["config"])
    draft.set(("model", "source"), given["model"], f"-m {given['model']}")
    return draft


def _of_file(file: Path) -> Draft:
    document = read_yaml(file)
    if isinstance(document.value, dict) and not RunConfig.model_fields.keys().isdisjoint(document.value):
        return run_draft(file, document)
    return Draft({"quantizer": quantizer_config(file).model_dump(exclude_unset=True)}, f"--config {file}")


def _checkpoint(draft: Draft, given: Mapping[str, Any]) -> None:
    """Add the keys of a checkpoint: its task, its data, its sizes, and the files for those who serve it."""
    faults, source, told = Faults(), given["model"], draft.value["model"].get("task")
    checkpoint, _ = faults.of(lambda: read_checkpoint(source, told)), faults.of(lambda: _data(draft, given))
    faults.raise_all("the conversion cannot start")
    assert checkpoint is not None
    task = told or checkpoint.task
    if task not in convertible_tasks():
        raise TaskError(
            f"model source {source!r}: its architecture is {checkpoint.architecture or 'not said'}, which does "
            f"not tell the task; give --task with one of {', '.join(convertible_tasks())}"
        )
    _default(draft, "model.task", task)
    _require_kind(draft, given, tasks[task].reads)
    _sizes(draft, given, task, checkpoint)
    _default(draft, "report.latency_shapes", "all")
    _default(draft, "report.formats", ["json", *(["html"] if find_spec("jinja2") is not None else [])])
    _default(draft, "deliver", ["processor", "triton", "gpu_check"])


def _require_kind(draft: Draft, given: Mapping[str, Any], reads: str) -> None:
    """Raise if the calibration data is of another kind than the samples of the task."""
    calibration = draft.value["data"].get("calibration") or {}
    if "calibration" in given and (holds := _PLAIN.get(calibration["name"], reads)) != reads:
        raise TaskError(
            f"--calibration {given['calibration']} is of {holds}s, and task {draft.value['model']['task']} is for "
            f"{reads}s: give {_NEEDED[reads]}"
        )


def _data(draft: Draft, given: Mapping[str, Any]) -> None:
    """Add the data: the first samples calibrate, and the outputs of engines are compared on the others, if any."""
    for option in ("tuning", "evaluation"):
        if option in given:
            found = data_source(given[option], f"--{option}")
            if found["name"] in _PLAIN:
                raise TaskError(_unlabelled(option, found))
            _set(draft, f"data.{option}", found, option)
    if "calibration" not in given:
        draft.value.setdefault("data", {})
        return
    found = data_source(given["calibration"], "--calibration")
    if found["name"] == "texts" and "column" in given:
        found["subset"] = given["column"]
    available = len(load_examples(found["name"], path=found["path"], subset=found.get("subset")))
    samples = given.get("samples")
    if samples is not None and samples > available:
        raise TaskError(
            f"{given['calibration']} has {available} samples, fewer than --samples {samples}: lower it, or give more "
            "data"
        )
    count = samples or min(CALIBRATION_SAMPLES, available)
    _set(draft, "data.calibration", {**found, "samples": count}, "calibration")
    if count < available:
        _default(draft, "data.check", {**found, "offset": count})


def _unlabelled(option: str, found: Mapping[str, Any]) -> str:
    path, kind = Path(found["path"]), _PLAIN[found["name"]]
    named = f"text-csv:{path.with_suffix('.csv').name}" if kind == "text" else f"{kind}-csv:labels.csv"
    return (
        f"--{option} {path}: {kind}s alone cannot be scored; expected NAME:PATH with labelled samples, such as {named} "
        f"(data sets: {', '.join(datasets.names())})"
    )


def data_source(text: str, option: str) -> dict[str, Any]:
    """Return the section of the data that ``NAME:PATH``, a file of texts, or a folder of images or recordings names."""
    name, colon, path = text.partition(":")
    if name in datasets.names():
        if not path:
            raise ConfigError([f"{option} {text}: the path is missing; expected {name}:PATH"])
        return {"name": name, "path": path}
    plain = Path(text)
    if is_folder(plain):
        return {"name": "recordings" if folder_holds(plain) == "audio" else "images", "path": text}
    if plain.suffix.lower() in text_files and (not colon or is_file(plain)):
        return {"name": "texts", "path": text}
    raise ConfigError(
        [
            f"{option} {text}: expected a file of texts ({', '.join(text_files)}), a folder of images that exists or "
            f"one of recordings (.wav), or NAME:PATH with one of the data sets {', '.join(datasets.names())}"
        ]
    )


def _sizes(draft: Draft, given: Mapping[str, Any], task: str, checkpoint: Checkpoint) -> None:
    """Add the sizes that engines are built for and timed at, no larger than the model and the memory allow."""
    kind, dynamic = tasks[task], draft.value.get("export", {}).get("dynamic", {})
    usual = WRITTEN_BATCH_SIZES if kind.in_parts else BATCH_SIZES
    if "seconds" in given and kind.reads != "audio":
        raise TaskError(
            f"--seconds {given['seconds']:g} is for recordings, and task {task} for {kind.reads}s: leave it out"
        )
    if "new_tokens" in given and not kind.in_parts:
        raise TaskError(f"--new-tokens {given['new_tokens']}: task {task} writes no text; leave it out")
    if kind.reads != "text":
        if "seq_len" in given:
            told = " ".join(map(str, given["seq_len"]))
            raise TaskError(f"--seq-len {told}: task {task} is for {_WITHOUT_TOKENS[kind.reads]}")
        batch = dynamic.get("batch", usual)
    else:
        most = checkpoint.positions
        sequence = dynamic.get("sequence", _lowered(SEQUENCE_LENGTHS, most))
        if most is not None and sequence[2] > most:
            told = " ".join(map(str, sequence))
            raise TaskError(
                f"--seq-len {told}: the model has {most} positions; lower the last number to {most} or less"
            )
        values = sequence[2] * (checkpoint.vocabulary or 0) if kind.gives_vocabulary else 0
        batch = dynamic.get("batch", _lowered(usual, _most_rows(values)))
        _default(draft, "export.dynamic.sequence", sequence)
        _default(draft, "model.max_length", sequence[2])
        _default(draft, "report.latency_sequence", sequence[1])
    _default(draft, "export.dynamic.batch", batch)
    _default(draft, "data.batch_size", batch[1])
    _default(draft, "report.latency_batch", batch[1])


_WITHOUT_TOKENS = {
    "image": "images, which have no tokens; leave it out (their size is that which the model's image processor makes)",
    "audio": "recordings, which have no tokens; leave it out, and give --seconds",
}


def _most_rows(values: int) -> int | None:
    """Return the largest power of two of rows whose output is small enough, at least 1; None: any number is."""
    return None if values == 0 else 1 << max(_LARGEST_OUTPUT // values, 1).bit_length() - 1


def _lowered(sizes: Sizes, most: int | None) -> Sizes:
    least, usual, largest = (size if most is None else min(size, most) for size in sizes)
    return least, usual, largest


def _finished(draft: Draft, given: Mapping[str, Any], backend: tuple[str, ...] | None) -> RunConfig:
    """Return the configuration for a backend, ``auto`` with those to choose from, or what a file says; None: that."""
    told = f"--backend {' '.join(given.get('backend', ()))}"
    if backend is not None:
        among = [name for name in backend if name != AUTO]
        draft.set(("quantizer", "backend"), among if AUTO in backend and among else backend[0], told)
    for option, kinds in (("inference_precision", "inference_precisions"), ("compute_capability", "capabilities")):
        fit = [name for name in given.get("backend", ()) if name != AUTO and getattr(profile(name), kinds)]
        # Of several backends those take it that know it.
        if option in given and (not fit or backend is None or AUTO in backend or backend[0] in fit):
            _set(draft, f"engine.{option}", given[option], option)
    for text in given.get("set", ()):
        draft.override(text)
    draft.set(("output",), fspath(given["output"]), f"-o {given['output']}")
    return finished_run(draft, given["output"])


def _set(draft: Draft, key: str, value: Any, option: str) -> None:
    """Set a key to the value of an option, which an error names."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    words = words.get("path") if isinstance(words, Mapping) else words
    plain = list(value) if isinstance(value, tuple) else value
    draft.set(tuple(key.split(".")), plain, f"--{option.replace('_', '-')} {words}")


def _default(draft: Draft, key: str, value: Any) -> None:
    """Set a key that neither a file nor an option has set."""
    here, (*above, last) = draft.value, key.split(".")
    for name in above:
        here = here.get(name) or {} if isinstance(here, dict) else {}
    if isinstance(here, dict) and last not in here:
        draft.set(tuple(key.split(".")), list(value) if isinstance(value, tuple) else value, "default")


def _problems(given: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with options of all kinds of models."""
    for name in dict.fromkeys(names):
        if name not in (*backends.names(), AUTO):
            yield f"--backend {name}: unknown; expected {AUTO}, or some of {', '.join(backends.names())}"
    if "backend" in given and (not names or len(set(names)) < len(names)):
        yield f"--backend {' '.join(names) or '(none)'}: expected at least one, each of them once"
    ahead_of_time = [name for name in profiles.names() if profile(name).capabilities]
    if "compute_capability" in given and not set(ahead_of_time) & set(names):
        told = f"--compute-capability {given['compute_capability']}"
        yield f"{told} is for --backend {' or '.join(ahead_of_time)}; leave it out"


def _checkpoint_problems(given: Mapping[str, Any]) -> Iterator[str]:
    model, quantization = given["model"], given.get("quantization")
    if used := [option for option in _OF_FUNCTIONS if option in given]:
        named = " and ".join(f"--{option}" for option in used)
        yield (
            f"{named} is for a module that a function returns, and -m {model} is the name of a checkpoint; leave it "
            "out, or name the function, such as -m my_pkg.nets:build"
        )
    task = given.get("task")
    if task is not None and task not in convertible_tasks():
        near = nearest(task, convertible_tasks())
        hint = f"; did you mean {near!r}?" if near else ""
        yield f"--task {task}: unknown; expected one of {', '.join(convertible_tasks())}{hint}"
    if not quantization:
        for option in (one for one in _OF_QUANTIZATION if one in given):
            told = f"--{option.replace('_', '-')} {given[option]}"
            yield f"{told} is used with --quantization only; add that, or leave this out"
    elif "calibration" not in given and "config" not in given:
        yield (
            "--quantization needs data to calibrate on, and --calibration is missing: give 100 or more texts or "
            "images like those that the model will see, such as --calibration texts.txt with one a line, or a "
            "folder of images or recordings"
        )
    if "max_drop" in given and "tuning" not in given and "config" not in given:
        yield (
            f"--max-drop {given['max_drop']} is a drop of the task's score, and there is nothing to score on: give "
            "labelled samples, such as --tuning text-csv:dev.csv or image-folder:dev"
        )
    if "tuning" in given and given["tuning"] == given.get("evaluation"):
        yield (
            f"--tuning and --evaluation are both {given['tuning']}: a score on samples that the choice was made on is "
            "better than the model; give other samples"
        )
    if given.get("samples", 1) < 1:
        yield f"--samples {given['samples']}: expected 1 or more"
    if given.get("seq_len", (2,))[0] == 1:
        yield "--seq-len 1 ...: expected 2 or more; a text has a first and a last token at least"


def _function_problems(given: Mapping[str, Any]) -> Iterator[str]:
    model = given["model"]
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
            yield f"--{option.replace('_', '-')} is for checkpoints, and -m {model} is a function; leave it out"
    names = given.get("backend", ())
    if len(names) > 1 and AUTO not in names:
        named = " ".join(names)
        yield f"--backend {named}: expected one for -m {model}, or `{AUTO} {named}`, of which the fastest is kept"
