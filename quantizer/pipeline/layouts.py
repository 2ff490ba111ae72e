"""The layouts of ``deliver``: folders that other clients load without this package; see ``plan/targets/clients.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizer.config.layouts import client
from quantizer.engines import GraphWriter, backend
from quantizer.errors import TaskError
from quantizer.pipeline.job import Job
from quantizer.pipeline.load import write_json
from quantizer.pipeline.triton import link_file, link_onnx
from quantizer.plan.targets.clients import Client
from quantizer.tasks import save_processor
from quantizer.tasks.outputs import MEAN, SentencePooling
from quantizer.tasks.zero_shot import TextTower
from quantizer.utils.paths import is_file
from quantizer.utils.plain_values import json_values

_NEEDS_FAST_TOKENIZER = "transformers-js"
_SENTENCES = "SentenceTransformer"
_MODULES = "sentence_transformers.models"


def check_layouts(job: Job) -> None:
    """Raise if the loaded model or its tokenizer does not fit a layout."""
    model: Any = job.model
    for layout, known in _layouts(job).items():
        # A module of a function has no task, and no layouts.
        task, source = job.context.task.name, job.config.model.source
        if known.classes and isinstance(model, TextTower):
            raise TaskError(
                f"deliver: {layout!r} has no class for the text tower of {model.config.model_type}; remove it"
            )
        if task in known.unmasked and "attention_mask" in job.context.feed.example():
            raise TaskError(
                f"deliver: {layout!r} loads task {task!r} with {known.classes[task]}, which passes no attention mask, "
                f"but {source} needs one; remove it, or use another backend"
            )
        if layout == _NEEDS_FAST_TOKENIZER and not getattr(job.context.processor, "is_fast", True):
            raise TaskError(
                f"deliver: {layout!r} needs a tokenizer.json, but the tokenizer of {source} is "
                f"{type(job.context.processor).__name__}, which writes none; remove it, or use a fast tokenizer"
            )


def write_layouts(job: Job, onnx: Path, *, quantized: bool) -> None:
    """Write the layouts of a run into its folder, from the ONNX file of the engine."""
    model: Any = job.model
    task = job.context.task
    first: Path | None = None
    for layout, known in _layouts(job).items():
        if job.only_sizes:
            # These files are compiled for all sizes.
            job.timer.say(f"warning: deliver: {layout!r} is not written, because the engine accepts only some sizes")
            continue
        folder = job.target / layout
        graph = folder / (known.file if quantized else known.file.replace("_quantized", ""))
        graph.parent.mkdir(parents=True, exist_ok=True)
        if graph.suffix == ".onnx":
            link_onnx(onnx, graph)
        elif first is None:
            writer = backend(job.config.quantizer.backend)
            assert isinstance(writer, GraphWriter)
            writer.write_graph(onnx, graph)
            first = graph
        else:
            for suffix in (".xml", ".bin"):
                link_file(first.with_suffix(suffix), graph.with_suffix(suffix))
        if known.classes:
            model.config.save_pretrained(folder)
            save_processor(job.context.processor, model.config, folder)
            _adapt_tokenizer(folder / "tokenizer_config.json")
        if known.classes.get(task.name) == _SENTENCES:
            pooling = getattr(model, "sentence_pooling", MEAN)
            _write_modules(folder, pooling, model.config.hidden_size, job.config.model.max_length)


def _layouts(job: Job) -> dict[str, Client]:
    """Return the layouts of a run, by name."""
    found = {name: client(name, job.config.quantizer.backend) for name in job.config.deliver}
    return {name: known for name, known in found.items() if known is not None}


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


def _write_modules(folder: Path, pooling: SentencePooling, width: int, max_length: int) -> None:
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
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode": modes})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    known = {"default": pooling.prompt, "query": pooling.query_prompt, "document": pooling.document_prompt}
    prompts = {name: text for name, text in known.items() if text}
    settings: dict[str, Any] = {"prompts": prompts} if prompts else {}
    settings |= {"default_prompt_name": "default"} if pooling.prompt else {}
    write_json(folder / "config_sentence_transformers.json", {**settings, "similarity_fn_name": pooling.similarity})
