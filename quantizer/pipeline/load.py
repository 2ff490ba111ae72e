"""Loading of engines from their folders.

- ``quantizer.load``: the engine in the folder of a run, called like the model of which it was built.
- ``quantizer.load_converted``: an engine of ``quantizer convert`` that reads texts, images or recordings.

The folder of a converted engine contains:

model.onnx     the graph
model.engine   the engine built from the graph
tokenizer/     the tokenizer, which turns texts into inputs, or
processor/     the image processor or feature extractor, which turns images or recordings into inputs
config.json    names, types and shapes, labels, lengths, and how the engine was made

The engines of an encoder-decoder model are loaded together. An engine with a cache generates texts.
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
from quantizer.pipeline.engine_sizes import EngineSizes, joined
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.plan.compressed_tensors import is_compressed
from quantizer.plan.targets import profiles
from quantizer.plan.targets.clients import OF_MODULES
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
from quantizer.utils.sizes import SEQUENCE

CONFIG = "config.json"
ENGINE = "model.engine"
ONNX = "model.onnx"
FORMAT = 1
"""The version of config.json; it increases if readers have to change."""


@dataclass(frozen=True, kw_only=True)
class _ServerFields:
    """The fields of config.json that a server needs."""

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
    """An engine with its tokenizer, image processor or feature extractor.

    Attributes:
        config: the content of config.json.
        engine: the loaded engine.
        processor: a transformers tokenizer, image processor or feature extractor; for speech, one with a tokenizer.
    """

    config: dict[str, Any]
    engine: Engine
    processor: Any
    # A fast tokenizer stores padding and truncation of a call as its own state, so threads need a lock.
    _tokenizing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(map(str, self.engine.inputs)), ", ".join(self.engine.output_names)
        description = f"{self.config['name']!r}, {self.config['task']}, {self.config['backend']}"
        return f"Converted({description}: {inputs} -> {outputs})"

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return the engine's inputs for texts, image files or recordings, padded to the longest of the batch."""
        if self._reads == "audio":
            encoded: Any = self._recordings([Path(cast(str | Path, sample)) for sample in samples])
        elif self._reads == "image":
            images = [read_image(Path(cast(str | Path, sample))) for sample in samples]
            encoded = {name: value.numpy() for name, value in self.processor(images, return_tensors="pt").items()}
        else:
            encoded = self._tokens(samples)
        arrays = {**encoded, **empty_cache(self.engine.inputs, len(samples))}
        return {spec.name: arrays[spec.name].astype(spec.dtype) for spec in self.engine.inputs}

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return the engine's outputs for any number of texts, image files or recordings.

        More samples than the engine's maximum run in several batches, all padded to the longest sample.
        """
        self._check(samples)
        if self._reads == "image":
            # Images need no common length, and many of them much memory.
            chunks = [samples[chunk] for chunk, _ in self.sizes.batches(len(samples))]
            return joined([self.sizes.run(self.engine, self.inputs(chunk)) for chunk in chunks])
        inputs = self.inputs(samples)
        return self.sizes.run(self.engine, inputs, self.length(inputs))

    def labels(self, samples: Sequence[Sample]) -> list[str]:
        """Return the predicted label of each text, image or recording; any number of them."""
        names = self.config["labels"]
        if not names or tasks[self.config["task"]].labels == "part":
            raise QuantizerError(f"{self.config['name']} is not a classifier: call it to get its outputs instead")
        if len(names) == 1:
            raise QuantizerError(
                f"{self.config['name']} has one output and no classes: call it to get its outputs instead"
            )
        self._check(samples)
        parts = [self(samples[chunk])["logits"] for chunk, _ in self.sizes.batches(len(samples))]
        logits = np.concatenate(parts)
        if logits.shape[-1] != len(names):
            raise QuantizerError(
                f"{CONFIG} has {len(names)} labels, but the engine has {logits.shape[-1]} classes: the folder is "
                "damaged, convert the model again"
            )
        return [names[int(index)] for index in logits.argmax(axis=-1)]

    def generate(self, text: str, tokens: int = 32) -> str:
        """Return a text continued with greedy decoding by at most ``tokens`` tokens."""
        if self.config["task"] != CACHED:
            raise QuantizerError(
                f"{self.config['name']} has task {self.config['task']}: convert it with --task {CACHED} to "
                "generate texts"
            )
        longest = self.config["dimensions"]["sequence"][-1]
        with self._tokenizing:
            ids = self.processor(text)["input_ids"]
        if len(ids) + tokens > longest:
            raise QuantizerError(
                f"{len(ids)} tokens and {tokens} new tokens exceed the {longest} tokens that this engine was built "
                "for: request fewer, or convert the model with a larger --seq-len"
            )
        return str(self.processor.decode(greedy(self.engine, ids, tokens, self.processor.eos_token_id)))

    def _tokens(self, texts: Sequence[Sample]) -> Any:
        options = {"truncation": True, "return_tensors": "np"}
        with self._tokenizing:
            encoded = self.processor(list(texts), padding="longest", max_length=self.sizes.longest, **options)
            count = encoded["input_ids"].shape[1]
            _, length = self.sizes.fitting(len(texts), count)
            if count < length:
                encoded = self.processor(list(texts), padding="max_length", max_length=length, **options)
        return encoded

    def _recordings(self, paths: Sequence[Path]) -> dict[str, Array]:
        recordings = Recordings(getattr(self.processor, "feature_extractor", self.processor), self.config["seconds"])
        if "sequence" not in self.config["dimensions"]:
            return recordings.arrays(paths)
        most = min(self.sizes.longest, recordings.samples)
        waves = [recordings.wave(path)[:most] for path in paths]
        return recordings.extracted(waves, self.sizes.fitting(len(paths), max(map(len, waves)))[1])

    def length(self, inputs: Mapping[str, Array]) -> int:
        """Return the length of inputs; 0 for an engine of one length."""
        shapes = [(inputs[spec["name"]].shape, spec["shape"]) for spec in self.config["inputs"]]
        return next((has[names.index(SEQUENCE)] for has, names in shapes if SEQUENCE in names), 0)

    @property
    def sizes(self) -> EngineSizes:
        """The batch sizes and lengths that the engine accepts."""
        return sizes_in(self.config)

    def _check(self, samples: Sequence[Sample]) -> None:
        """Raise unless there is a sequence of samples."""
        if isinstance(samples, str):
            raise QuantizerError(f"got one {self._reads}, expected a list of {self._reads}s: pass it in a list")
        if not len(samples):
            raise QuantizerError(f"got no {self._reads}s, expected at least one")

    @property
    def _reads(self) -> str:
        return tasks[self.config["task"]].reads


def load_converted(
    folder: str | Path, *, threads: int = 1, verify: bool = True, trust: bool = False
) -> Converted | ConvertedParts:
    """Load the engine of one backend that ``quantizer convert`` wrote.

    Args:
        folder: the folder OUT/BACKEND.
        threads: the number of CPU threads.
        verify: compare the engine file with its checksum.
        trust: load a compiled torch engine, which is native code, even if this process did not build it.

    Returns:
        The engine with its processor; for an encoder-decoder model, all of its engines.

    Raises:
        QuantizerError: the folder is not a conversion, or is damaged.
        EngineError: the engine does not load on this machine, or contains untrusted native code.
    """
    path = Path(folder)
    # A conversion is renamed into place as one folder; a run of an encoder-decoder model is the folder itself.
    for place in (path.parent, path):
        restore_folder(place)
    _refuse_layout(path)
    try:
        config = json_values(regular_file(path / CONFIG).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        if config.get("format") == FORMAT:
            _check(config)
    except (OSError, ValueError) as error:
        if is_file(path / "config.yaml") and not is_file(path / CONFIG):
            raise QuantizerError(
                f"{path} has no tokenizer and no processor: it holds the engine of a module, or of `quantizer run`; "
                f"load it with quantizer.load({json.dumps(str(path))})"
            ) from error
        raise QuantizerError(
            f"{path} has no readable {CONFIG} ({type(error).__name__}: {error}); expected a folder OUT/BACKEND that "
            "`quantizer convert` wrote"
        ) from error
    if config.get("format") != FORMAT:
        raise QuantizerError(
            f"{path / CONFIG} has format {config.get('format')!r}, expected {FORMAT}: convert the model again"
        )
    machine = collect_machine()
    if backend(config["backend"]).device == "cpu":
        here, before, now = machine["instructions"], "a CPU with ", "this CPU has "
    else:
        # Without a GPU, loading says so.
        here, before, now = machine.get("gpu", config.get("chosen_on")), "", "this machine has "
    is_other = config.get("chosen_on") not in (None, here)
    if is_other:
        warnings.warn(
            f"{path}: the engine was the fastest on {before}{config['chosen_on']}, but {now}"
            f"{here or 'unknown instructions'}; another engine may be faster: convert the model again",
            stacklevel=2,
        )
    task = config["task"]
    processor = load_processor(str(path / processor_folder(task)), task)
    # One warning is enough.
    load = backend(config["backend"]).load if is_other else partial(load_engine, config["backend"])
    load = partial(load, threads=threads, verify=verify, trust=trust)
    if not tasks[task].in_parts:
        return Converted(config, load(path / config["files"]["engine"]), processor)
    engines = {name: load(path / config["parts"][name]["engine"]) for name in PARTS}
    inputs = Converted(config, engines[ENCODER], processor).inputs
    return ConvertedParts(config, engines, processor, inputs, path / config["files"]["model"])


def _check(config: dict[str, Any]) -> None:
    """Check the fields of config.json that this module reads."""
    known = {name: config[name] for name in _ServerFields.__annotations__ if name in config}
    fields: _ServerFields = decoded(_ServerFields, known, CONFIG)
    if fields.task not in tasks.names():
        raise ValueError(f"{CONFIG}.task: expected one of {', '.join(tasks.names())}, got {fields.task!r}")
    reads = tasks[fields.task].reads
    expected = {"batch", "sequence"} if reads == "text" else {"batch"}
    # Recordings of some models have one length.
    if set(fields.dimensions) - ({"sequence"} if reads == "audio" else set()) != expected:
        raise ValueError(f"{CONFIG}.dimensions: expected sizes of {' and '.join(sorted(expected))}")
    if tasks[fields.task].in_parts and (fields.tokens is None or fields.tokens < 1):
        raise ValueError(f"{CONFIG}.tokens: expected 1 or more, got {fields.tokens}")
    for name, (minimum, usual, maximum) in fields.dimensions.items():
        if not 1 <= minimum <= usual <= maximum:
            raise ValueError(f"{CONFIG}.dimensions.{name}: expected 1 <= min <= opt <= max")


def sizes_in(config: Mapping[str, Any]) -> EngineSizes:
    """Return the sizes in the content of a config.json."""
    return EngineSizes(config["dimensions"], config.get("only_sizes") or ())


def processor_folder(task: str) -> str:
    """Return the folder name of a task's tokenizer, image processor or feature extractor."""
    return "tokenizer" if tasks[task].reads == "text" else "processor"


def write_json(path: Path, document: Any) -> None:
    """Write a document as indented JSON."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ConvertedParts:
    """The engines of an encoder-decoder model, with its tokenizer or processor.

    Attributes:
        config: the content of config.json.
        engines: the engines by graph name.
        processor: a transformers tokenizer, or a processor of recordings with a tokenizer.
        inputs: turns texts or recordings into the encoder's inputs.
        folder: the folder with the model's own config.
    """

    config: dict[str, Any]
    engines: dict[str, Engine]
    processor: Any
    inputs: Callable[[Sequence[Sample]], dict[str, Array]]
    folder: Path

    @once_property
    def model(self) -> Any:
        """A transformers model whose ``generate`` runs the engines, with all options of that method."""
        runs = {name: partial(engine_run, one) for name, one in self.engines.items()}
        return in_parts(empty_model(str(self.folder), self.config["task"]), runs)

    def generate(self, samples: Sequence[Sample], tokens: int | None = None) -> list[str]:
        """Return generated texts for texts or recordings, with the model's generation config but without sampling.

        More samples than the engines' maximum run in several batches.
        """
        if isinstance(samples, str):
            raise QuantizerError("generate() takes a list of texts or paths, but got one text: pass it in a list")
        if not len(samples):
            raise QuantizerError("generate() got no samples, expected at least one")
        longest = self.config["tokens"]
        if tokens is not None and not 1 <= tokens <= longest:
            raise QuantizerError(
                f"got {tokens} tokens, but these engines were built to generate 1 to {longest}: request fewer, or "
                "convert with a larger --new-tokens (model.new_tokens in a run)"
            )
        texts = []
        for chunk, size in self.sizes.batches(len(samples)):
            some = list(samples[chunk])
            texts += self._generated(some + some[-1:] * (size - len(some)), tokens or longest)[: len(some)]
        return texts

    @property
    def sizes(self) -> EngineSizes:
        """The batch sizes and lengths that the engines accept."""
        return sizes_in(self.config)

    def _generated(self, samples: Sequence[Sample], tokens: int) -> list[str]:
        """Return the generated texts of one batch."""
        batch = {name: torch.from_numpy(value) for name, value in self.inputs(samples).items()}
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        with torch.no_grad():
            sequences = Writer(self.model, tokens)(**batch)["sequences"]
        rows = [row.tolist() for row in written_tokens(sequences, tokenizer.pad_token_id)]
        return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


CACHED = "text-generation-with-past"
"""The task of engines with a cache of keys and values."""


def empty_cache(inputs: Sequence[TensorSpec], rows: int) -> dict[str, Array]:
    """Return empty keys and values [samples x heads x 0 x width] for all cache inputs."""
    cached = [spec for spec in inputs if spec.name.startswith(CACHE)]
    return {spec.name: np.zeros((rows, spec.shape[1] or 0, 0, spec.shape[3] or 0), spec.dtype) for spec in cached}


def greedy(engine: Engine, ids: Sequence[int], tokens: int, end: int | None) -> list[int]:
    """Return token ids continued with greedy decoding by at most ``tokens`` tokens, up to but without ``end``."""
    all_ids, new_ids = list(ids), list(ids)
    cache = empty_cache(engine.inputs, 1)
    for _ in range(tokens):
        inputs = {
            "input_ids": np.array([new_ids]),
            "attention_mask": np.ones((1, len(all_ids)), dtype=np.int64),
            **cache,
        }
        outputs = engine({spec.name: inputs[spec.name].astype(spec.dtype, copy=False) for spec in engine.inputs})
        cache = {name: outputs[f"{PRESENT}{name.removeprefix(CACHE)}"] for name in cache}
        token = int(outputs["logits"][0, -1].argmax())
        if token == end:
            break
        all_ids.append(token)
        new_ids = [token]
    return all_ids


def load(
    folder: str | os.PathLike[str],
    *,
    float_engine: bool = False,
    threads: int | None = None,
    verify: bool = True,
    trust: bool = False,
) -> EngineModule:
    """Return the engine that ``QuantizedModel.save`` or ``quantizer run`` wrote, called like the model.

    Pass tensors by position or by name. The output has the structure of the model's output: a tensor, or tensors in
    tuples, lists and mappings; an output of transformers becomes a mapping. A checkpoint's engine takes its inputs by
    name, and returns a mapping. The model itself is not needed.

    Args:
        folder: the folder of the run.
        float_engine: load the engine of the float model instead of the quantized engine.
        threads: the number of CPU threads; None for the number with which it was benchmarked.
        verify: compare the engine file with its checksum.
        trust: load a compiled torch engine, which is native code, even if this process did not build it.

    Raises:
        QuantizerError: the folder is not a run, contains an encoder-decoder model, or is damaged.
        EngineError: the engine was refused, does not load on this machine, or contains untrusted native code.
        MissingDependencyError: the library of the backend is not installed.
    """
    path = Path(folder)
    restore_folder(path)
    _refuse_layout(path)
    backend, measured = _settings(path)
    if is_file(path / f"{ENCODER}.engine"):
        raise QuantizerError(
            f"{path} contains the engines of an encoder-decoder model; use "
            f"quantizer.load_converted({json.dumps(str(path))}).generate([...])"
        )
    file = path / f"{FLOAT_STEM if float_engine else QUANTIZED_STEM}.engine"
    _check_refused(path, file, float_engine=float_engine)
    engine = load_engine(backend, file, threads=measured if threads is None else threads, verify=verify, trust=trust)
    call = CallForm.read(path) or CallForm.by_names(path.absolute().name, engine.input_names, engine.output_names)
    return EngineModule(engine, call)


def _refuse_layout(folder: Path) -> None:
    """Raise if a folder is a layout for another client."""
    files = {layout.file for name in profiles.names() for layout in profiles[name].layouts.values()}
    # The files of modules have names of users.
    is_of_module = folder.name in OF_MODULES or folder.name.endswith("_openvino_model")
    graphs = {file.format(graph=graph, name="") for file in files for graph in (QUANTIZED_STEM, ENCODER)}
    if not is_folder(folder) or is_file(folder / "config.yaml") or any(folder.glob("*.engine")):
        return
    if is_of_module or any(is_file(folder / graph) for graph in graphs) or is_compressed(folder):
        raise QuantizerError(
            f"{folder} is a layout for another client, without an engine; load it with that client (see "
            "docs/how-to/serve-with.md), or load the folder above it, which has the engine"
        )


def _settings(folder: Path) -> tuple[str, int]:
    """Return the backend and the number of threads of a run's engines."""
    config = folder / "config.yaml"
    if not is_file(config):
        raise QuantizerError(
            f"{folder} is not the folder of a run: it has no config.yaml; expected a folder that QuantizedModel.save "
            f"or `quantizer run` wrote{_hint(folder)}"
        )
    try:
        document: Any = yaml_values(regular_file(config).read_bytes())
        backend, threads = document["quantizer"]["backend"], document["engine"]["threads"]
        if not isinstance(backend, str) or not isinstance(threads, int) or isinstance(threads, bool):
            raise ValueError("expected text for quantizer.backend and a number for engine.threads")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuantizerError(
            f"{config} cannot be read ({type(error).__name__}: {error}); it is damaged: save the result again"
        ) from error
    return backend, threads


def _check_refused(folder: Path, file: Path, *, float_engine: bool) -> None:
    """Raise if an engine is missing because the run refused it."""
    report = folder / "report.json"
    if is_file(file) or not is_file(report):
        return
    record = read_record(report)
    why = record.float_engine_refused if float_engine else record.engine_refused
    if why is not None:
        raise EngineError(f"{folder} has no {file.name}, because the run refused it: {why}")


def _hint(folder: Path) -> str:
    """Return a hint on how to load another kind of folder; empty if unknown."""
    if not is_folder(folder):
        return ""
    function = "quantizer.load_converted"
    if is_file(folder / CONFIG):
        return f"; {function} loads what `quantizer convert` wrote"
    converted = [
        path.parent for path in sorted(folder.glob("*/config.json")) if (path.parent / "model.engine").exists()
    ]
    if converted:
        return f"; {function}({json.dumps(str(converted[0]))}) loads the engine that `quantizer convert` wrote there"
    runs = [path.parent for path in sorted(folder.glob("*/config.yaml")) if (path.parent / "model.engine").exists()]
    return f"; it contains a run: quantizer.load({json.dumps(str(runs[0]))})" if runs else ""
