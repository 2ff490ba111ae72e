"""The options of ``quantizer convert``, translated to run configurations; conversion of ONNX files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from os import fspath
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.config import RunConfig, quantizer_config
from quantizer.config.describe import nearest
from quantizer.config.layouts import LAYOUTS, backends_of, layout_of
from quantizer.config.load import Draft, finished_run, run_draft
from quantizer.config.yaml_file import read_yaml
from quantizer.engines import backends
from quantizer.errors import CalibrationError, ConfigError, TaskError
from quantizer.pipeline.open_axes import WRITTEN_BATCH_SIZES
from quantizer.pipeline.preflight_checks import Faults
from quantizer.pipeline.quantize_model import SENSITIVITY_BATCHES, quantize_model
from quantizer.pipeline.run import RUN
from quantizer.plan.targets import AUTO, profile, profiles
from quantizer.plan.targets.clients import OF_ANY_BACKEND, OF_MODULES
from quantizer.report import print_record
from quantizer.report.tables import plain_text
from quantizer.tasks import datasets, folder_holds, is_coco, load_examples, read_checkpoint, tasks, text_files
from quantizer.tasks.from_onnx import OnnxModule, from_onnx
from quantizer.tasks.models import Checkpoint
from quantizer.utils.batches import ARRAY_FILES, array_batches
from quantizer.utils.files import checked_folder
from quantizer.utils.paths import is_file, is_folder

SUFFIX = ".onnx"

_BATCH_ROWS = 8
"""Samples per batch from a file, which is also the batch size of benchmarks."""

_ONNX_OPTIONS = frozenset(
    {
        *("model", "output", "quantization", "calibration", "samples", "fixed", "backend", "device", "dtype"),
        *("threads", "diagnose"),
    }
)
_EXPECTED = (
    f"a file of arrays ({' or '.join(ARRAY_FILES)}), with one array per input, by name, or a folder of such files"
)


def convert_onnx(options: Mapping[str, Any], force: bool, console: Console) -> Path:
    """Quantize a float ONNX file for the fastest correct engine, and return the output folder."""
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
        device=options.get("device"),
        threads=options.get("threads", 1),
        progress=True,
        diagnose=options.get("diagnose", False),
        backend=backend,
        **({"dtype": options["dtype"]} if "dtype" in options else {}),
    )
    result.save(folder, replace=force)
    summary = plain_text(partial(print_record, result.record, result.saved, form="options"), 100)
    console.print(summary, highlight=False, markup=False)
    console.print(f"written to {folder}", highlight=False, markup=False)
    return folder


def _onnx_problems(options: Mapping[str, Any]) -> list[str]:
    problems = [
        f"--{name.replace('_', '-')} is only for checkpoints, but {options['model']} is an ONNX file; remove it"
        for name in options
        if name not in _ONNX_OPTIONS
    ]
    if not options.get("quantization"):
        problems.append(f"{options['model']} is already an ONNX file; add --quantization to quantize it")
    if "calibration" not in options:
        problems.append(f"--calibration is missing; expected {_EXPECTED}")
    if len(options.get("backend", (AUTO,))) != 1:
        problems.append(f"--backend {' '.join(options['backend'])}: expected one backend, or auto, for an ONNX file")
    times = Counter(_fixed(text)[0] for text in options.get("fixed", ()))
    problems += [f"--fixed {name}: got {count} numbers; expected one" for name, count in times.items() if count > 1]
    for text in options.get("fixed", ()):
        name, number = _fixed(text)
        if not name or number is None:
            problems.append(f"--fixed {text}: expected NAME=NUMBER for a constant input or a named axis")
    examples = options.get("samples", 1)
    if examples < 1:
        problems.append(f"--samples {examples}: expected at least 1")
    return problems


def _fixed(text: str) -> tuple[str, float | None]:
    """Return the name and the number in ``sr=16000``; None for a missing number."""
    name, _, value = text.rpartition("=")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, None


def _by_argument(model: OnnxModule, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch by the argument names of ``forward``."""
    if set(batch) != set(model.arguments):
        raise CalibrationError(
            f"the calibration data has the arrays {', '.join(sorted(batch))}, but {model.source} has the inputs "
            f"{', '.join(model.arguments)}; expected exactly one array per input"
        )
    return {argument: batch[name] for name, argument in model.arguments.items()}


Sizes = tuple[int, int, int]
"""Minimum, usual and maximum size."""

BATCH_SIZES: Sizes = (1, 8, 32)
SEQUENCE_LENGTHS: Sizes = (16, 128, 512)

CALIBRATION_SAMPLES = 128
"""Default maximum number of calibration samples."""

_LARGEST_OUTPUT = 1 << 27
"""Maximum number of output values for default sizes: 0.5 GiB in float32; a check holds several outputs."""

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
    "device": "engine.device",
    "threads": "engine.threads",
    "tolerance": "report.tolerance",
    "diagnose": "report.diagnose",
}
"""The configuration key of each option that sets one."""

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
    "deliver",
)
_SERVING = ("processor", "triton", "gpu_check")
"""Files for servers that each conversion of a checkpoint writes."""
_OF_FUNCTIONS = ("inputs", "weights", "score")
_OF_QUANTIZATION = ("calibration", "samples", "dtype", "max_drop", "tuning")
_PLAIN = {"texts": "text", "images": "image", "recordings": "audio"}
"""Kinds of sample in the data sets without labels."""

_NEEDED = {
    "text": f"a file of texts ({', '.join(text_files)})",
    "image": "a folder of images",
    "audio": "a folder of recordings (.wav)",
}


def convertible_tasks() -> list[str]:
    """Return the tasks that a conversion supports: all without a fitted head."""
    return [name for name in tasks.names() if not tasks[name].needs_head]


def conversion_configs(given: Mapping[str, Any], *, function: bool = False) -> list[RunConfig]:
    """Return one run configuration per backend, or a single one if an engine is chosen.

    Args:
        given: the options by their names without dashes. ``config`` is the path of a YAML file with further keys of the
            quantizer section or of a whole run. ``set`` holds overrides such as ``qat.epochs=1``.
        function: the model is a module that a function returns.

    Raises:
        ConfigError: a list of all problems of the options.
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
    elif "deliver" in given:
        _set(base, "deliver", list(given["deliver"]), "deliver")
        _default(base, "quantizer.backend", backends_of(given["deliver"]))
    if function and ("max_drop" in given or "diagnose" in given):
        _default(base, "amp.batches", SENSITIVITY_BATCHES)
    configs: list[RunConfig] = []
    for backend in (None,) if not names else (names,) if AUTO in names else [(name,) for name in names]:
        draft = deepcopy(base)
        try:
            configs.append(_finished(draft, given, backend))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return configs


def _base(given: Mapping[str, Any]) -> Draft:
    """Return a draft with the keys of ``--config``."""
    draft = Draft({}, "quantizer convert") if "config" not in given else _of_file(given["config"])
    draft.set(("model", "source"), given["model"], f"-m {given['model']}")
    return draft


def _of_file(file: Path) -> Draft:
    document = read_yaml(file)
    if isinstance(document.value, dict) and not RunConfig.model_fields.keys().isdisjoint(document.value):
        return run_draft(file, document)
    return Draft({"quantizer": quantizer_config(file).model_dump(exclude_unset=True)}, f"--config {file}")


def _checkpoint(draft: Draft, given: Mapping[str, Any]) -> None:
    """Add the defaults of a checkpoint: its task, data and sizes, and the serving files."""
    faults, source, task_option = Faults(), given["model"], draft.value["model"].get("task")
    checkpoint, _ = faults.of(lambda: read_checkpoint(source, task_option)), faults.of(lambda: _data(draft, given))
    faults.raise_all("the conversion cannot start")
    assert checkpoint is not None
    task = task_option or checkpoint.task
    if task not in convertible_tasks():
        raise TaskError(
            f"model source {source!r}: cannot derive the task from the architecture "
            f"{checkpoint.architecture or '(unknown)'}; set --task to one of {', '.join(convertible_tasks())}"
        )
    _default(draft, "model.task", task)
    _require_kind(draft, given, tasks[task].reads)
    _sizes(draft, given, task, checkpoint)
    _default(draft, "report.latency_shapes", "all")
    _default(draft, "report.formats", ["json", *(["html"] if find_spec("jinja2") is not None else [])])
    if "deliver" in given:
        _set(draft, "deliver", [*_SERVING, *given["deliver"]], "deliver")
        if "backend" not in given and not set(given["deliver"]) <= set(OF_ANY_BACKEND):
            # Not all backends of this CPU write these layouts.
            _default(draft, "quantizer.backend", backends_of(given["deliver"]))
    _default(draft, "deliver", list(_SERVING))


def _require_kind(draft: Draft, given: Mapping[str, Any], reads: str) -> None:
    """Raise if the calibration data does not fit the task."""
    calibration = draft.value["data"].get("calibration") or {}
    if "calibration" in given and (holds := _PLAIN.get(calibration["name"], reads)) != reads:
        raise TaskError(
            f"--calibration {given['calibration']} contains {holds} data, but task {draft.value['model']['task']} "
            f"reads {reads} data; expected {_NEEDED[reads]}"
        )


def _data(draft: Draft, given: Mapping[str, Any]) -> None:
    """Add the data sections: the first samples calibrate, and the output check uses others if possible."""
    for option in ("tuning", "evaluation"):
        if option in given:
            section = data_source(given[option], f"--{option}")
            if section["name"] in _PLAIN:
                raise TaskError(_unlabelled(option, section))
            _set(draft, f"data.{option}", section, option)
    if "calibration" not in given:
        draft.value.setdefault("data", {})
        return
    section = data_source(given["calibration"], "--calibration")
    if section["name"] == "texts" and "column" in given:
        section["subset"] = given["column"]
    available, requested = (
        len(load_examples(section["name"], path=section["path"], subset=section.get("subset"))),
        given.get("samples"),
    )
    if requested is not None and requested > available:
        raise TaskError(
            f"{given['calibration']} has {available} samples, fewer than --samples {requested}: lower it, or "
            "provide more data"
        )
    count = requested or min(CALIBRATION_SAMPLES, available)
    _set(draft, "data.calibration", {**section, "samples": count}, "calibration")
    if count < available:
        _default(draft, "data.check", {**section, "offset": count})


def _unlabelled(option: str, section: Mapping[str, Any]) -> str:
    path, kind = Path(section["path"]), _PLAIN[section["name"]]
    example = f"text-csv:{path.with_suffix('.csv').name}" if kind == "text" else f"{kind}-csv:labels.csv"
    return (
        f"--{option} {path}: {kind} data without labels cannot be scored; expected NAME:PATH with labels, such as "
        f"{example} (data sets: {', '.join(datasets.names())})"
    )


def data_source(text: str, option: str) -> dict[str, Any]:
    """Return the data section for ``NAME:PATH``, a file of texts or COCO, or a folder of images or recordings."""
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
    problem = ""
    if plain.suffix.lower() == ".json" and is_file(plain):
        if is_coco(plain):
            return {"name": "coco-json", "path": text}
        problem = "the file is not in the format of COCO (an object with images, annotations and categories); "
    raise ConfigError(
        [
            f"{option} {text}: {problem}expected a file of texts ({', '.join(text_files)}), a .json file of COCO, an "
            "existing folder of images or recordings (.wav), or NAME:PATH with one of the data sets "
            f"{', '.join(datasets.names())}"
        ]
    )


def _sizes(draft: Draft, given: Mapping[str, Any], task: str, checkpoint: Checkpoint) -> None:
    """Add the sizes of builds and benchmarks, limited by the model and the memory."""
    kind, dynamic = tasks[task], draft.value.get("export", {}).get("dynamic", {})
    usual = WRITTEN_BATCH_SIZES if kind.in_parts else BATCH_SIZES
    if "seconds" in given and kind.reads != "audio":
        raise TaskError(
            f"--seconds {given['seconds']:g} is for recordings, but task {task} reads {kind.reads} data; remove it"
        )
    if "new_tokens" in given and not kind.in_parts:
        raise TaskError(f"--new-tokens {given['new_tokens']}: task {task} does not generate text; remove it")
    if kind.reads != "text":
        if "seq_len" in given:
            lengths = " ".join(map(str, given["seq_len"]))
            raise TaskError(f"--seq-len {lengths}: task {task} reads {_WITHOUT_TOKENS[kind.reads]}")
        batch = dynamic.get("batch", usual)
    else:
        positions = checkpoint.positions
        sequence = dynamic.get("sequence", _lowered(SEQUENCE_LENGTHS, positions))
        if positions is not None and sequence[2] > positions:
            lengths = " ".join(map(str, sequence))
            raise TaskError(
                f"--seq-len {lengths}: the model has {positions} positions; lower the last number to at most "
                f"{positions}"
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
    "image": "images, which have no tokens; remove it (the image processor of the model decides their size)",
    "audio": "recordings, which have no tokens; use --seconds for the longest",
}


def _most_rows(values: int) -> int | None:
    """Return the largest power-of-two batch whose output fits the limit, at least 1; None without a limit."""
    return None if values == 0 else 1 << max(_LARGEST_OUTPUT // values, 1).bit_length() - 1


def _lowered(sizes: Sizes, limit: int | None) -> Sizes:
    minimum, usual, largest = (size if limit is None else min(size, limit) for size in sizes)
    return minimum, usual, largest


def _finished(draft: Draft, given: Mapping[str, Any], backend: tuple[str, ...] | None) -> RunConfig:
    """Return the configuration for a backend, for ``auto`` with its candidates, or of the file (None)."""
    if backend is not None and backend[0] != AUTO and "deliver" in given:
        # Of several backends, each writes the layouts that it has.
        own = [name for name in given["deliver"] if layout_of(name, backend[0]) is not None]
        servers = [] if set(own) & set(OF_MODULES) else _SERVING
        _set(draft, "deliver", [*servers, *own], "deliver")
    option_text = f"--backend {' '.join(given.get('backend', ()))}"
    if backend is not None:
        candidates = [name for name in backend if name != AUTO]
        draft.set(("quantizer", "backend"), candidates if AUTO in backend and candidates else backend[0], option_text)
    for option, kinds in (("inference_precision", "inference_precisions"), ("compute_capability", "capabilities")):
        fit = [name for name in given.get("backend", ()) if name != AUTO and getattr(profile(name), kinds)]
        # Of several backends, only those that know the option get it.
        if option in given and (not fit or backend is None or AUTO in backend or backend[0] in fit):
            _set(draft, f"engine.{option}", given[option], option)
    for text in given.get("set", ()):
        draft.override(text)
    draft.set(("output",), fspath(given["output"]), f"-o {given['output']}")
    return finished_run(draft, given["output"])


def _set(draft: Draft, key: str, value: Any, option: str) -> None:
    """Set a key to the value of an option; errors name the option."""
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    shown = shown.get("path") if isinstance(shown, Mapping) else shown
    plain = list(value) if isinstance(value, tuple) else value
    draft.set(tuple(key.split(".")), plain, f"--{option.replace('_', '-')} {shown}")


def _default(draft: Draft, key: str, value: Any) -> None:
    """Set a key unless a file or an option has set it."""
    section, (*above, last) = draft.value, key.split(".")
    for name in above:
        section = section.get(name) or {} if isinstance(section, dict) else {}
    if isinstance(section, dict) and last not in section:
        draft.set(tuple(key.split(".")), list(value) if isinstance(value, tuple) else value, "default")


def _problems(given: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the problems of options that all kinds of models share."""
    if "diagnose" in given and not given.get("quantization"):
        yield "--diagnose is only used with --quantization; add --quantization, or remove it"
    for name in dict.fromkeys(names):
        if name not in (*backends.names(), AUTO):
            yield f"--backend {name}: unknown; expected {AUTO}, or one or more of {', '.join(backends.names())}"
    if "backend" in given and (not names or len(set(names)) < len(names)):
        yield f"--backend {' '.join(names) or '(none)'}: expected at least one backend, without duplicates"
    ahead_of_time = [name for name in profiles.names() if profile(name).capabilities]
    if "compute_capability" in given and not set(ahead_of_time) & set(names):
        option_text = f"--compute-capability {given['compute_capability']}"
        yield f"{option_text} is only for --backend {' or '.join(ahead_of_time)}; remove it"


def _checkpoint_problems(given: Mapping[str, Any]) -> Iterator[str]:
    model, quantization = given["model"], given.get("quantization")
    if used := [option for option in _OF_FUNCTIONS if option in given]:
        names = " and ".join(f"--{option}" for option in used)
        yield (
            f"{names} is only for a module that a function returns, but -m {model} names a checkpoint; remove it, "
            "or name a function, such as -m my_pkg.nets:build"
        )
    if "deliver" in given:
        yield from _layout_problems(given["deliver"], given.get("backend"))
    task = given.get("task")
    if task is not None and task not in convertible_tasks():
        similar = nearest(task, convertible_tasks())
        hint = f"; did you mean {similar!r}?" if similar else ""
        yield f"--task {task}: unknown; expected one of {', '.join(convertible_tasks())}{hint}"
    if not quantization:
        for option in (one for one in _OF_QUANTIZATION if one in given):
            option_text = f"--{option.replace('_', '-')} {given[option]}"
            yield f"{option_text} is only used with --quantization; add --quantization, or remove it"
    elif "calibration" not in given and "config" not in given:
        yield (
            "--quantization needs calibration data, but --calibration is missing; expected 100 or more samples as in "
            "production: a file with one text per line, such as --calibration texts.txt, or a folder of images or "
            "recordings"
        )
    if "max_drop" in given and "tuning" not in given and "config" not in given:
        yield (
            f"--max-drop {given['max_drop']} limits the drop of the score, but --tuning is missing; expected labelled "
            "samples, such as --tuning text-csv:dev.csv or image-folder:dev"
        )
    if "tuning" in given and given["tuning"] == given.get("evaluation"):
        yield (
            f"--tuning and --evaluation are both {given['tuning']}: a score on samples that the search was scored on "
            "is too good; use other samples for one of them"
        )
    if given.get("samples", 1) < 1:
        yield f"--samples {given['samples']}: expected at least 1"
    if given.get("seq_len", (2,))[0] == 1:
        yield "--seq-len 1 ...: expected at least 2, because a text has at least a first and a last token"


def _layout_problems(layouts: Sequence[str], names: Sequence[str] | None) -> Iterator[str]:
    """Yield the problems of layouts that are unknown, named twice, or that no backend of the conversion writes."""
    shown = f"--deliver {' '.join(layouts)}"
    if not set(layouts) <= set(LAYOUTS) or len(set(layouts)) < len(layouts):
        yield f"{shown}: expected different names out of {', '.join(LAYOUTS)}"
    elif names is None and not backends_of(layouts):
        yield f"{shown}: no backend writes all of these; name several with --backend, and each writes those that it has"
    elif names is not None and AUTO not in names and set(names) <= set(backends.names()):
        for layout in layouts:
            if all(layout_of(layout, name) is None for name in names):
                yield (
                    f"--deliver {layout} does not exist for --backend {' '.join(names)}; expected "
                    f"{' or '.join(backends_of([layout]))}"
                )


def _function_problems(given: Mapping[str, Any]) -> Iterator[str]:
    model = given["model"]
    if "inputs" not in given:
        yield (
            f"--inputs is missing: the module of the function {model} needs calibration batches; expected the function "
            "that returns them, such as --inputs my_pkg.data:calibration"
        )
    if "max_drop" in given and "score" not in given:
        yield (
            f"--max-drop {given['max_drop']} limits the drop of a score, but --score is missing; expected the function "
            "that takes the module and returns a number, such as --score my_pkg.data:score"
        )
    of_modules = set(given.get("deliver", ())) <= set(OF_MODULES)
    for option in _OF_CHECKPOINTS:
        if option in given and not (option == "deliver" and of_modules):
            yield f"--{option.replace('_', '-')} is only for checkpoints, but -m {model} is a function; remove it"
    if "deliver" in given and of_modules:
        yield from _layout_problems(given["deliver"], given.get("backend"))
    names = given.get("backend", ())
    if len(names) > 1 and AUTO not in names:
        named = " ".join(names)
        yield f"--backend {named}: expected one backend for -m {model}, or `{AUTO} {named}` to keep the fastest"
