"""Engines that are loaded from their folders.

``quantizer.load``: the engine in the folder of a run, called as the model that it was built of.

``quantizer.load_converted``: an engine that reads texts, images or recordings, from its folder alone.
That folder has all that a server needs:

model.onnx     the graph
model.engine   the engine that was built from the graph
tokenizer/     the tokenizer, which makes inputs from texts, or
processor/     the image processor or feature extractor, which makes inputs from images or recordings
config.json    names, types and shapes, labels, lengths, and how the engine was made

The engines of an encoder-decoder model are loaded together. An engine of one decoding step generates, and reads its own
cache of keys and values.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from quantizer.engines import Array, Engine, TensorSpec, backend, load_engine
from quantizer.errors import EngineError, QuantizerError
from quantizer.pipeline.context import engine_run
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.report import collect_machine, read_record
from quantizer.tasks import Recordings, Sample, load_processor, read_image, tasks
from quantizer.tasks.models import empty_model
from quantizer.tasks.seq2seq.parts import ENCODER, PARTS
from quantizer.tasks.seq2seq.writer import Writer, in_parts, written_tokens
from quantizer.utils.dimension_names import CACHE, PRESENT
from quantizer.utils.files import restore_folder
from quantizer.utils.lazy import once_property
from quantizer.utils.paths import is_file, is_folder, regular_file
from quantizer.utils.plain_values import decoded, json_values, yaml_values

CONFIG = "config.json"
ENGINE = "model.engine"
ONNX = "model.onnx"
FORMAT = 1
"""The version of config.json; it rises when readers have to change."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The part of config.json that a server reads."""

    name: str
    task: str
    backend: str
    dimensions: Mapping[str, tuple[int, int, int]]
    labels: tuple[str, ...]
    only_sizes: tuple[Mapping[str, int], ...] = ()
    seconds: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Converted:
    """An engine with its tokenizer, image processor or feature extractor, loaded from its folder alone.

    Attributes:
        config: the content of config.json.
        engine: the engine, ready to run.
        processor: a transformers tokenizer, an image processor or a feature extractor; of speech one with a tokenizer.
    """

    config: dict[str, Any]
    engine: Engine
    processor: Any
    # A fast tokenizer keeps padding and truncation of a call as settings of its own, which others would change.
    _tokenizing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(map(str, self.engine.inputs)), ", ".join(self.engine.output_names)
        told = f"{self.config['name']!r}, {self.config['task']}, {self.config['backend']}"
        return f"Converted({told}: {inputs} -> {outputs})"

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return the engine's inputs for files, or for texts, padded to the longest within the engine's lengths."""
        if self._reads == "audio":
            recordings = Recordings(
                getattr(self.processor, "feature_extractor", self.processor), self.config["seconds"]
            )
            encoded: Any = recordings.arrays([Path(cast(str | Path, sample)) for sample in samples])
        elif self._reads == "image":
            images = [read_image(Path(cast(str | Path, sample))) for sample in samples]
            encoded = {name: value.numpy() for name, value in self.processor(images, return_tensors="pt").items()}
        else:
            encoded = self._tokens(samples)
        given = {**encoded, **empty_cache(self.engine.inputs, len(samples))}
        return {spec.name: given[spec.name].astype(spec.dtype) for spec in self.engine.inputs}

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return the engine's outputs for texts, image files or recordings."""
        fewest, _, most = self.config["dimensions"]["batch"]
        if not fewest <= len(samples) <= most:
            raise QuantizerError(
                f"{len(samples)} {self._reads}s at once, and this engine was built for {fewest} to {most}"
            )
        taken = sorted({sizes["batch"] for sizes in self._only_sizes if "batch" in sizes})
        if taken and len(samples) not in taken:
            told = ", ".join(map(str, taken))
            raise QuantizerError(f"{len(samples)} {self._reads}s at once, and this engine was built for {told} alone")
        return self.engine(self.inputs(samples))

    def labels(self, samples: Sequence[Sample]) -> list[str]:
        """Return a classifier's label of each text, image or recording."""
        names = self.config["labels"]
        if not names or tasks[self.config["task"]].labels == "part":
            raise QuantizerError(f"{self.config['name']} is no classifier: call it for its outputs instead")
        if len(names) == 1:
            raise QuantizerError(
                f"{self.config['name']} has one output and no classes: call it for its outputs instead"
            )
        logits = self(samples)["logits"]
        if logits.shape[-1] != len(names):
            raise QuantizerError(
                f"{CONFIG} has {len(names)} labels, and the engine tells {logits.shape[-1]} classes apart: the folder "
                "is damaged, convert the model again"
            )
        return [names[int(index)] for index in logits.argmax(axis=-1)]

    def generate(self, text: str, tokens: int = 32) -> str:
        """Return a text with what the model writes after it, the likeliest token each time."""
        if self.config["task"] != CACHED:
            raise QuantizerError(
                f"{self.config['name']} is for {self.config['task']}: convert it with --task {CACHED} to generate"
            )
        longest = self.config["dimensions"]["sequence"][-1]
        with self._tokenizing:
            ids = self.processor(text)["input_ids"]
        if len(ids) + tokens > longest:
            raise QuantizerError(
                f"{len(ids)} tokens and {tokens} new ones are more than the {longest} that this engine was built for: "
                "ask for fewer, or convert the model with a larger --seq-len"
            )
        return str(self.processor.decode(greedy(self.engine, ids, tokens, self.processor.eos_token_id)))

    def _tokens(self, texts: Sequence[Sample]) -> Any:
        shortest, _, longest = self.config["dimensions"]["sequence"]
        only = [sizes for sizes in self._only_sizes if sizes.get("batch", len(texts)) == len(texts)]
        lengths = sorted(sizes["sequence"] for sizes in only if "sequence" in sizes)
        longest = lengths[-1] if lengths else longest
        options = {"truncation": True, "return_tensors": "np"}
        with self._tokenizing:
            encoded = self.processor(list(texts), padding="longest", max_length=longest, **options)
            count = encoded["input_ids"].shape[1]
            padded = next((length for length in lengths if length >= count), max(count, shortest))
            if count < padded:
                encoded = self.processor(list(texts), padding="max_length", max_length=padded, **options)
        return encoded

    @property
    def _only_sizes(self) -> Sequence[Mapping[str, int]]:
        """The sizes of dynamic dimensions that the engine takes alone; none: it takes all."""
        found: Sequence[Mapping[str, int]] = self.config.get("only_sizes") or ()
        return found

    @property
    def _reads(self) -> str:
        return tasks[self.config["task"]].reads


def load_converted(
    folder: str | Path, *, threads: int = 1, verify: bool = True, trust: bool = False
) -> Converted | ConvertedParts:
    """Return the engine that ``quantizer convert`` wrote for one backend, or those of a model in parts."""
    path = Path(folder)
    # A conversion is put in place as a whole, and so is a run of a model in parts, which lies in the folder itself.
    for place in (path.parent, path):
        restore_folder(place)
    try:
        config = json_values(regular_file(path / CONFIG).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        if config.get("format") == FORMAT:
            _check(config)
    except (OSError, ValueError) as error:
        raise QuantizerError(
            f"{path} holds no {CONFIG} that can be read ({type(error).__name__}: {error}); expected a folder "
            "OUT/BACKEND that `quantizer convert` wrote"
        ) from error
    if config.get("format") != FORMAT:
        raise QuantizerError(
            f"{path / CONFIG} has format {config.get('format')!r}, expected {FORMAT}: convert the model again"
        )
    other = config.get("chosen_on") not in (None, here := collect_machine()["instructions"])
    if other:
        warnings.warn(
            f"{path}: its engine was chosen as the fastest on a CPU with {config['chosen_on']}, and this one has "
            f"{here or 'instructions that are not known'}: another may be faster here; convert the model again",
            stacklevel=2,
        )
    task = config["task"]
    processor = load_processor(str(path / processor_folder(task)), task)
    # One warning is enough.
    load = backend(config["backend"]).load if other else partial(load_engine, config["backend"])
    load = partial(load, threads=threads, verify=verify, trust=trust)
    if not tasks[task].in_parts:
        return Converted(config, load(path / config["files"]["engine"]), processor)
    engines = {name: load(path / config["parts"][name]["engine"]) for name in PARTS}
    inputs = Converted(config, engines[ENCODER], processor).inputs
    return ConvertedParts(config, engines, processor, inputs, path / config["files"]["model"])


def _check(config: dict[str, Any]) -> None:
    """Check the fields of config.json that are read here."""
    told: _Told = decoded(_Told, {name: config[name] for name in _Told.__annotations__ if name in config}, CONFIG)
    if told.task not in tasks.names():
        raise ValueError(f"{CONFIG}.task: expected one of {', '.join(tasks.names())}, got {told.task!r}")
    expected = {"batch", "sequence"} if tasks[told.task].reads == "text" else {"batch"}
    if set(told.dimensions) != expected:
        raise ValueError(f"{CONFIG}.dimensions: expected sizes of {' and '.join(sorted(expected))}")
    if tasks[told.task].in_parts and (told.tokens is None or told.tokens < 1):
        raise ValueError(f"{CONFIG}.tokens: expected 1 or more, got {told.tokens}")
    for name, (least, usual, most) in told.dimensions.items():
        if not 1 <= least <= usual <= most:
            raise ValueError(f"{CONFIG}.dimensions.{name}: expected 1 <= least <= usual <= most")


def processor_folder(task: str) -> str:
    """Return the name of the folder of a task's tokenizer, image processor or feature extractor."""
    return "tokenizer" if tasks[task].reads == "text" else "processor"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document as indented JSON."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ConvertedParts:
    """The engines of a model in parts with its tokenizer or processor, loaded from their folder alone.

    Attributes:
        config: the content of config.json.
        engines: the engine of each part, by its name.
        processor: a transformers tokenizer, or a processor of recordings that has one.
        inputs: makes the encoder's inputs of texts or recordings.
        folder: the folder with the model's own config.
    """

    config: dict[str, Any]
    engines: dict[str, Engine]
    processor: Any
    inputs: Callable[[Sequence[Sample]], dict[str, Array]]
    folder: Path

    @once_property
    def model(self) -> Any:
        """A model of transformers whose ``generate`` runs the engines: it takes all that this method does."""
        runs = {name: partial(engine_run, one) for name, one in self.engines.items()}
        return in_parts(empty_model(str(self.folder), self.config["task"]), runs)

    def generate(self, samples: Sequence[Sample], tokens: int | None = None) -> list[str]:
        """Return what the model writes for texts or recordings, as its own generation config says, without sampling."""
        if isinstance(samples, str):
            raise QuantizerError("generate() takes a list of texts or paths, and was given one: put it into a list")
        (fewest, _, most), longest = self.config["dimensions"]["batch"], self.config["tokens"]
        if not fewest <= len(samples) <= most:
            raise QuantizerError(f"{len(samples)} samples at once, and these engines were built for {fewest} to {most}")
        if tokens is not None and not 1 <= tokens <= longest:
            raise QuantizerError(
                f"{tokens} tokens, and these engines were built to write 1 to {longest}: ask for fewer, or make them "
                "with a larger --new-tokens, or model.new_tokens in a run"
            )
        batch = {name: torch.from_numpy(value) for name, value in self.inputs(samples).items()}
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        with torch.no_grad():
            made = Writer(self.model, tokens or longest)(**batch)["sequences"]
        rows = [row.tolist() for row in written_tokens(made, tokenizer.pad_token_id)]
        return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


CACHED = "text-generation-with-past"
"""The task of such engines."""


def empty_cache(inputs: Sequence[TensorSpec], rows: int) -> dict[str, Array]:
    """Return keys and values [rows x heads x 0 x width] of no tokens, for those of the inputs that are a cache."""
    cached = [spec for spec in inputs if spec.name.startswith(CACHE)]
    return {spec.name: np.zeros((rows, spec.shape[1] or 0, 0, spec.shape[3] or 0), spec.dtype) for spec in cached}


def greedy(engine: Engine, ids: Sequence[int], tokens: int, end: int | None) -> list[int]:
    """Return token ids with at most ``tokens`` more, the likeliest each time, up to and without ``end``."""
    whole, read = list(ids), list(ids)
    cache = empty_cache(engine.inputs, 1)
    for _ in range(tokens):
        given = {"input_ids": np.array([read]), "attention_mask": np.ones((1, len(whole)), dtype=np.int64), **cache}
        made = engine({spec.name: given[spec.name].astype(spec.dtype, copy=False) for spec in engine.inputs})
        cache = {name: made[f"{PRESENT}{name.removeprefix(CACHE)}"] for name in cache}
        token = int(made["logits"][0, -1].argmax())
        if token == end:
            break
        whole.append(token)
        read = [token]
    return whole


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
