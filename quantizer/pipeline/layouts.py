"""The layouts of ``deliver``: folders that other clients load without this package; see ``plan/targets/clients.py``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from quantizer.config import ModelConfig, RunConfig
from quantizer.config.layouts import backends_of, layout_of
from quantizer.engines import GraphWriter, backend
from quantizer.errors import QuantizerError, TaskError
from quantizer.export.onnx_storage import rename_dimensions
from quantizer.export.qdq.structure import read_signature
from quantizer.pipeline.benchmark import deployed
from quantizer.pipeline.client_code import client_code, yolo_code
from quantizer.pipeline.job import Job
from quantizer.pipeline.load import processor_folder, write_json
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.pipeline.triton import link_file, link_onnx
from quantizer.pipeline.ultralytics_layout import ultralytics_model, write_ultralytics
from quantizer.plan.compressed_tensors import compressed_checkpoint
from quantizer.plan.targets.clients import OF_ANY_BACKEND, OF_MODULES, Layout
from quantizer.report import RunRecord
from quantizer.report.model_card import CardClient, write_layout_card
from quantizer.tasks import save_processor
from quantizer.tasks.checkpoints import read_prompts
from quantizer.tasks.outputs import MEAN, SentencePooling
from quantizer.tasks.zero_shot import TextTower
from quantizer.utils.dimension_names import CACHE
from quantizer.utils.paths import is_file, is_folder
from quantizer.utils.plain_values import json_values

_NEEDS_FAST_TOKENIZER = "transformers-js"
_SENTENCES = "SentenceTransformer"
_MODULES = "sentence_transformers.models"


def check_layouts(job: Job) -> None:
    """Raise if the loaded model or its tokenizer does not fit a layout of a backend that may be chosen."""
    for backend_name in job.among or (job.config.quantizer.backend,):
        _check(job, _layouts(job, backend_name))


def _check(job: Job, layouts: Mapping[str, Layout]) -> None:
    model: Any = job.model
    for name, layout in layouts.items():
        if name in OF_MODULES:
            ultralytics_model(model)
            continue
        # Modules of functions have no task.
        task, source = job.context.task.name, job.config.model.source
        if layout.classes and isinstance(model, TextTower):
            raise TaskError(
                f"deliver: {name!r} has no class for the text tower of {model.config.model_type}; remove it"
            )
        if task in layout.unmasked and "attention_mask" in job.context.feed.example():
            raise TaskError(
                f"deliver: {name!r} loads task {task!r} with {layout.classes[task]}, which passes no attention mask, "
                f"but {source} needs one; remove it, or use another backend"
            )
        if name == _NEEDS_FAST_TOKENIZER and not getattr(job.context.processor, "is_fast", True):
            raise TaskError(
                f"deliver: {name!r} needs a tokenizer.json, but the tokenizer of {source} is "
                f"{type(job.context.processor).__name__}, which writes none; remove it, or use a fast tokenizer"
            )


def write_layouts(job: Job, graphs: Mapping[str, Path], *, quantized: bool) -> None:
    """Write the layouts of a run into its folder, from the ONNX file of each graph."""
    model: Any = job.model
    written: dict[str, Path] = {}
    for name, layout in _layouts(job, job.config.quantizer.backend).items():
        if name in OF_ANY_BACKEND:
            _write_weights(job, name)
            continue
        if name in OF_MODULES:
            (onnx,) = graphs.values()
            batch = batch_of(job.config, job.alone.values())
            write_ultralytics(job.target / name, job.name, model, job.config.quantizer.backend, onnx, batch)
            continue
        if job.only_sizes:
            # These files are compiled for all sizes.
            job.timer.say(f"warning: deliver: {name!r} is not written, because the engine accepts only some sizes")
            continue
        folder = job.target / name
        pattern = layout.file if quantized else layout.file.replace("_quantized", "")
        for graph, onnx in graphs.items():
            _write_graph(job, onnx, folder / pattern.format(graph=graph), written.get(graph), layout.dimensions)
            written.setdefault(graph, folder / pattern.format(graph=graph))
        # Clients of a graph alone load the tokenizer or processor from a folder beside it, also after an upload.
        place = folder if layout.classes else folder / processor_folder(job.context.task.name)
        save_processor(job.context.processor, model.config, place)
        _adapt_tokenizer(place / "tokenizer_config.json")
        if layout.classes and (generation := getattr(model, "generation_config", None)) is not None:
            generation.save_pretrained(folder)
        if layout.classes.get(job.context.task.name) == _SENTENCES:
            pooling = getattr(model, "sentence_pooling", MEAN)
            _write_modules(folder, pooling, model.config.hidden_size, job.config.model)


_LIMITED_BATCH = re.compile(r"the engine accepts only [^,]*\bbatch \d")


def batch_of(config: RunConfig, fixed_sizes: Iterable[str]) -> int:
    """Return the batch size of a graph with one size.

    It is the smallest batch size, or the usual one if the engine accepts only some batch sizes.

    Args:
        config: the configuration of the run.
        fixed_sizes: sentences on input sizes, as in the record of the run.
    """
    smallest, usual, _ = config.export.dynamic.batch
    return usual if any(map(_LIMITED_BATCH.match, fixed_sizes)) else max(smallest, 1)


def _write_graph(job: Job, onnx: Path, path: Path, written: Path | None, dimensions: Mapping[str, str]) -> None:
    """Write the graph of an ONNX file to ``path``, or link it to the file of an earlier layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path == onnx:
        # The ONNX files of several graphs lie in the folder of this layout already.
        return
    if path.suffix == ".onnx":
        link_onnx(onnx, path)
        if dimensions and any(value.name.startswith(CACHE) for value in read_signature(onnx).inputs):
            rename_dimensions(path, dimensions)
    elif written is None:
        writer = backend(job.config.quantizer.backend)
        assert isinstance(writer, GraphWriter)
        writer.write_graph(onnx, path)
    else:
        for suffix in (".xml", ".bin"):
            link_file(written.with_suffix(suffix), path.with_suffix(suffix))


def _write_weights(job: Job, name: str) -> None:
    """Write the weights of the quantized model, and say which of its linear layers stay in floating point."""
    model: Any = job.model
    folder, plan = job.target / name, job.quantizer.plan
    try:
        checkpoint = compressed_checkpoint(model, job.frozen, plan)
    except QuantizerError as error:
        # The engine is finished, and has sites of other kinds.
        job.timer.say(f"warning: deliver: {error}; it is not written")
        return
    save_processor(job.context.processor, model.config, folder)
    _adapt_tokenizer(folder / "tokenizer_config.json")
    checkpoint.save(model, folder)
    left = {path: reason for path, reason in checkpoint.left.items() if plan[path].kind == "linear"}
    if left:
        path, reason = next(iter(left.items()))
        job.timer.say(
            f"warning: deliver: {name!r} keeps {len(left)} of {len(left) + len(checkpoint.linears)} quantized linear "
            f"layers in floating point, such as {path}: {reason}"
        )


def write_layout_cards(job: Job, record: RunRecord, *, quantized: bool) -> None:
    """Write the model card of each layout that was written, from the quantized or the float engine."""
    backend_name = job.config.quantizer.backend
    for name in _layouts(job, backend_name):
        folder = job.target / name
        if not is_folder(folder):
            continue
        if name in OF_MODULES:
            write_module_card(record, folder, job.model, quantized=quantized)
            continue
        place = ".." if name == _NEEDS_FAST_TOKENIZER else "."
        start = first_token(job.model) if job.graphs.several else None
        code = client_code(name, backend_name, job.context.task.name, place, quantized=quantized, start=start)
        if code is not None:
            client = CardClient(library=code.library, layout=name, needs=code.needs, language=code.language)
            graph: Literal["engine", "float"] = "engine" if quantized else "float"
            write_layout_card(record, folder, client, code.code, of="weights" if name in OF_ANY_BACKEND else graph)


def first_token(model: Any) -> int | None:
    """Return the token with which the decoder of an encoder-decoder model begins."""
    configs = (getattr(model, "generation_config", None), model.config)
    starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
    return next((start for start in starts if start is not None), None)


def check_module_layouts(names: Sequence[str], config: RunConfig, model: nn.Module) -> None:
    """Raise if a layout of a module cannot be written.

    Raises:
        QuantizerError: a layout is unknown, the backend does not have it, or the model does not fit it.
    """
    backend_name = config.quantizer.backend
    for layout in names:
        if layout not in OF_MODULES:
            raise QuantizerError(f"deliver: {layout!r} is not a layout of a module; expected {', '.join(OF_MODULES)}")
        if layout_of(layout, backend_name) is None:
            writers = backends_of([layout])
            raise QuantizerError(
                f"deliver: {layout!r} does not exist for backend {backend_name}; quantize the model with "
                f"backend={writers!r}"
            )
        ultralytics_model(model)


def write_module_layouts(
    names: Sequence[str], record: RunRecord, config: RunConfig, model: nn.Module, folder: Path, name: str
) -> None:
    """Write layouts of a module, with their model cards, into the folder of its engine.

    Args:
        names: the layouts, which ``check_module_layouts`` accepts.
        record: the record of the run.
        config: the configuration of the run, with the backend of the engine.
        model: the float model.
        folder: the folder with the ONNX files.
        name: the name of the model.
    """
    quantized = deployed(record) != "float"
    for layout in names:
        onnx = folder / f"{QUANTIZED_STEM if quantized else FLOAT_STEM}.onnx"
        batch = batch_of(config, record.fixed_sizes)
        write_ultralytics(folder / layout, name, model, config.quantizer.backend, onnx, batch)
        write_module_card(record, folder / layout, model, quantized=quantized)


def write_module_card(record: RunRecord, folder: Path, model: nn.Module, *, quantized: bool) -> None:
    """Write the model card of a layout of a module, from the quantized or the float engine."""
    (graph,) = (path.name for path in folder.iterdir() if path.suffix == ".onnx" or path.is_dir())
    code = yolo_code(graph, str(ultralytics_model(model).task))
    client = CardClient(library=code.library, layout=folder.name, needs=code.needs, language=code.language)
    write_layout_card(record, folder, client, code.code, of="engine" if quantized else "float")


def _layouts(job: Job, backend_name: str) -> dict[str, Layout]:
    """Return the layouts of a run that a backend has, by name."""
    layouts = {name: layout_of(name, backend_name) for name in job.config.deliver}
    return {name: layout for name, layout in layouts.items() if layout is not None}


def _adapt_tokenizer(path: Path) -> None:
    """Replace what only transformers 5 understands in the settings of a tokenizer, because clients use version 4."""
    if not is_file(path):
        return
    settings = json_values(path.read_bytes())
    assert isinstance(settings, dict)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := settings.get("extra_special_tokens"), list):
        del settings["extra_special_tokens"]
        settings["additional_special_tokens"] = extra
    write_json(path, settings)


def _write_modules(folder: Path, pooling: SentencePooling, width: int, model: ModelConfig) -> None:
    """Write the modules after the graph: pooling, and normalization if the model has it."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if pooling.normalize else {})}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    for path in filter(None, kinds.values()):
        (folder / path).mkdir()
    write_json(folder / "modules.json", modules)
    modes = pooling.modes[0] if len(pooling.modes) == 1 else list(pooling.modes)
    of_pooling = {"word_embedding_dimension": width, "pooling_mode": modes, "include_prompt": pooling.include_prompt}
    write_json(folder / "1_Pooling" / "config.json", of_pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": model.max_length, "do_lower_case": False})
    settings = {**read_prompts(model.source), "similarity_fn_name": pooling.similarity}
    write_json(folder / "config_sentence_transformers.json", settings)
