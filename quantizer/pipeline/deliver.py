"""Files for serving an engine: config.json, the processor, a Triton model repository, and the GPU check."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantizer.engines import backend
from quantizer.engines.engine_file import copy_content
from quantizer.export.qdq.structure import Signature, read_signature
from quantizer.pipeline.benchmark import NOT_VERIFIED, deployed
from quantizer.pipeline.compare_outputs import Reference, is_cache
from quantizer.pipeline.job import Job
from quantizer.pipeline.layouts import write_layouts
from quantizer.pipeline.load import CONFIG, FORMAT, processor_folder, write_json
from quantizer.pipeline.model_graphs import FLOAT_STEM, GENERATED, QUANTIZED_STEM
from quantizer.pipeline.time_groups import EngineFiles
from quantizer.pipeline.triton import (
    CONFIG_NAME,
    GPU_SCRIPT,
    Expected,
    ServedEngine,
    config_text,
    link_file,
    link_onnx,
    write_gpu_check,
)
from quantizer.plan.targets.base import TritonServer
from quantizer.report import RunRecord, collect_versions
from quantizer.report.model_card import loading
from quantizer.tasks import batch_shape, read_checkpoint, save_processor

_REPOSITORY = "triton"
_VERSION = "1"


def write_serving_files(
    folder: Path,
    served: ServedEngine,
    expected: Expected | None,
    kinds: Collection[str] = ("triton", "gpu_check"),
    *,
    checked_in: Path | None = None,
) -> dict[str, str]:
    """Write the serving files of an engine into its folder, and return their relative paths by kind.

    ``triton`` is the folder of the model in the model repository. ``gpu_check`` is the script that checks and
    benchmarks the engine on a GPU, in the folder ``checked_in``.
    """
    server = served.server
    if server is None:
        return {}
    model = write_triton_model(folder, served) if "triton" in kinds else None
    files = {} if model is None else {"triton": model}
    if "gpu_check" in kinds and server.gpu_tool is not None and expected is not None:
        checked_in = checked_in or folder
        if checked_in != folder:
            checked_in.mkdir(parents=True)
            link_onnx(served.onnx, checked_in / "model.onnx")
            link_file(served.engine, checked_in / "model.engine")
            served = replace(served, onnx=checked_in / "model.onnx", engine=checked_in / "model.engine")
        write_gpu_check(checked_in, served, expected, server.gpu_tool)
        files["gpu_check"] = str((checked_in / GPU_SCRIPT).relative_to(folder))
    return files


def write_triton_model(folder: Path, served: ServedEngine) -> str | None:
    """Write a model into the model repository of a folder, and return its path; None if Triton cannot serve it."""
    server = served.server
    if server is None or server.takes is None:
        return None
    _write_model(folder / _REPOSITORY / served.name, served, server)
    return str(Path(_REPOSITORY) / served.name)


def model_name(name: str) -> str:
    """Return a name with the characters that Triton allows in folder names and URLs."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _write_model(model: Path, served: ServedEngine, server: TritonServer) -> None:
    """Write the configuration and the model file of a repository entry."""
    version = model / _VERSION
    version.mkdir(parents=True)
    (model / CONFIG_NAME).write_text(config_text(served), encoding="utf-8")
    if server.takes == "plan":
        copy_content(served.engine, version / server.file)
    else:
        link_onnx(served.engine if server.takes == "engine" else served.onnx, version / server.file)


ON_GPU = "on_gpu"
"""The folder with the GPU checks of several engines, one subfolder each."""


_SNIPPET = """\
from quantizer import load_converted

model = load_converted({load})
samples = {samples}
print(model{call}(samples))"""


def deliver(job: Job, record: RunRecord) -> str | None:
    """Write the configured serving files; none for a refused engine.

    Return Python code that runs the engine from its folder, if the folder contains the processor.
    """
    kinds = job.config.deliver
    if not kinds or record.engine is None:
        return None
    stem = FLOAT_STEM if deployed(record) == "float" else QUANTIZED_STEM
    places = {name: job.graphs.files(job.target, stem, name) for name in job.graphs.names}
    signatures = {name: read_signature(files.onnx) for name, files in places.items()}
    onnx = {name: files.onnx for name, files in places.items()}
    write_layouts(job, onnx, quantized=job.config.quantize and stem == QUANTIZED_STEM)
    if job.config.model.task is None:
        # Modules have no files for servers.
        return None
    serving = {name: _serving(job, name, places[name], signature) for name, signature in signatures.items()}
    if "processor" not in kinds:
        return None
    model: Any = job.model
    task = job.context.task
    processor = processor_folder(task.name)
    save_processor(job.context.processor, model.config, job.target / processor)
    graphs = {
        name: {
            "onnx": str(files.onnx.relative_to(job.target)),
            "engine": str(files.engine.relative_to(job.target)),
            **serving[name],
        }
        for name, files in places.items()
    }
    files = graphs[job.graphs.names[0]]
    if job.graphs.several:
        folder = places[job.graphs.names[0]].onnx.parent
        for saved_config in (model.config, model.generation_config):
            saved_config.save_pretrained(folder)
        files = {"model": str(folder.relative_to(job.target))}
    document = {"files": {**files, processor: processor}, **_config(job, record)}
    if job.graphs.several:
        document[("parts")] = {
            name: {**graphs[name], **_signature(job, name, entry)} for name, entry in signatures.items()
        }
        document |= _generated(job, record)
    else:
        document |= _signature(job, job.graphs.names[0], signatures[job.graphs.names[0]])
    write_json(job.target / CONFIG, document)
    return _snippet(job, len(document["labels"]))


def _snippet(job: Job, labels: int) -> str:
    task = job.context.task
    call = ".generate" if job.graphs.several else ".labels" if task.labels == "example" and labels > 1 else ""
    sample = {"text": "a text", "image": "an-image.png", "audio": "a-recording.wav"}[task.reads]
    batch_sizes = [sizes[("batch")] for sizes in job.only_sizes if "batch" in sizes] or [
        job.config.export.dynamic.batch[0]
    ]
    return _SNIPPET.format(load=loading(job.target), samples=[sample] * max(min(batch_sizes), 1), call=call)


def _serving(job: Job, name: str, files: EngineFiles, signature: Signature) -> dict[str, str]:
    """Write the serving files of one graph, and return their paths."""
    # A server reads the ONNX file, and would compile a model for all sizes.
    if job.only_sizes:
        return {}
    config, several = job.config, job.graphs.several
    served = ServedEngine(
        name=f"{model_name(job.name)}-{name}" if several else model_name(job.name),
        backend=config.quantizer.backend,
        onnx=files.onnx,
        engine=files.engine,
        signature=signature,
        dimensions=_dimensions(job, name),
        threads=config.engine.threads,
        precision=config.engine.inference_precision,
        capability=_capability(job),
    )
    expected = _expected(job, name, signature) if backend(served.backend).device == "cuda" else None
    folder = job.target / ON_GPU / name if several else job.target
    return write_serving_files(job.target, served, expected, config.deliver, checked_in=folder)


def _capability(job: Job) -> str | None:
    """Return the GPUs that the engine was built for ahead of time; None for a CPU or the GPU of this machine."""
    capability = job.config.engine.compute_capability
    return capability if capability is None or isinstance(capability, str) else " ".join(capability)


def _dimensions(job: Job, name: str) -> dict[str, Sequence[int]]:
    """Return the size range of each dynamic dimension of a graph by name."""
    sizes = dict(job.graphs.dimensions(job.config, name))
    if not job.graphs.several and not job.context.task.has_lengths:
        del sizes["sequence"]
    return sizes


def _expected(job: Job, name: str, signature: Signature) -> Expected:
    """Return PyTorch's outputs, which the GPU check compares with the engine."""
    names, references = [value.name for value in signature.outputs], job.references[name]
    frozen, floats = (job.graphs.modules(model)[name] for model in (job.frozen, job.model))
    outputs, of_float = (_one_a_shape(references.of(module, names)) for module in (frozen, floats))
    if job.graphs.several:
        outputs, of_float = _few(outputs), _few(of_float)
    return Expected(outputs=outputs, of_float=of_float, bound=job.tolerance(quantized=job.config.quantize))


def _one_a_shape(references: Sequence[Reference]) -> list[Reference]:
    """Return one reference per size, because the script stores its inputs and outputs in files."""
    by_shape: dict[object, Reference] = {}
    for entry in references:
        by_shape.setdefault(batch_shape(entry.inputs), entry)
    return list(by_shape.values())


def _few(references: list[Reference]) -> list[Reference]:
    """Return references that fit into files: all outputs at the minimum size, and those without a cache at the usual
    size.
    """
    smallest, usual = min(references, key=lambda output: batch_shape(output.inputs)[0]), references[0]
    if usual is smallest:
        return [smallest]
    return [
        smallest,
        replace(usual, outputs={name: output for name, output in usual.outputs.items() if not is_cache(name)}),
    ]


def _signature(job: Job, name: str, signature: Signature) -> dict[str, Any]:
    """Return the inputs, outputs and output checks of a graph's engine."""
    return {
        "inputs": [asdict(value) for value in signature.inputs],
        "outputs": [asdict(value) for value in signature.outputs],
        "checks": [asdict(check) for check in job.checks.get(name, ())],
    }


def _generated(job: Job, record: RunRecord) -> dict[str, Any]:
    """Return the comparison of generated texts with the float model."""
    return {
        "tokens": job.graphs.tokens,
        "generated": {
            "checks": [asdict(check) for check in job.checks.get(GENERATED, ())],
            "agreement": {entry.form: asdict(entry) for entry in record.agreement},
        },
    }


def _config(job: Job, record: RunRecord) -> dict[str, Any]:
    """Return the fields of config.json for the whole model."""
    config, target, task = job.config, job.config.quantizer.target, job.context.task
    bound = job.tolerance(quantized=config.quantize)
    dynamic = config.export.dynamic
    lengths = {"sequence": list(dynamic.sequence)} if task.has_lengths else {}
    return {
        "format": FORMAT,
        "name": job.name,
        "task": task.name,
        "backend": config.quantizer.backend,
        "compute_capability": config.engine.compute_capability,
        "inference_precision": config.engine.inference_precision,
        "dimensions": {"batch": list(dynamic.batch), **lengths},
        "only_sizes": [dict(sizes) for sizes in job.only_sizes],
        "max_length": dynamic.sequence[2] if task.reads == "text" else None,
        "seconds": config.model.seconds,
        "labels": list(_class_names(job)),
        "float_dtype": target.float_dtype,
        "chosen_on": None if record.choice is None else record.choice.gpu or record.choice.instructions,
        "quantization": quantization_facts(record) if config.quantize else None,
        "verified": f"outputs agree with PyTorch's: {bound}; see checks" if job.checks else NOT_VERIFIED,
        "versions": collect_versions(),
    }


def _class_names(job: Job) -> Sequence[str]:
    """Return the class names of a classifier; none for other models."""
    model, task = job.config.model, job.context.task
    if model.labels or task.labels is None:
        return model.labels
    return read_checkpoint(model.source, model.task).labels


def quantization_facts(record: RunRecord) -> dict[str, Any]:
    """Return figures of the quantization: quantized and executed sites by kind, and the fallback."""
    settings, fallback = record.config["quantizer"], record.fallback
    ran = [site for site in record.coverage if site.ran]
    executed_kinds, quantized = (
        Counter(site.kind for site in some) for some in (ran, [entry for entry in ran if entry.quantized])
    )
    calibration = (record.config["data"]["calibration"] or {}) if record.config.get("data") else {}
    return {
        "dtype": settings["dtype"],
        "ranges": settings["activations"]["ranges"],
        "sites": {kind: (quantized[kind], count) for kind, count in executed_kinds.items()},
        "multiply_adds": record.covered_share,
        "fallback_groups": () if fallback is None else fallback.groups,
        "reason": None if fallback is None else fallback.reason,
        "budget": [] if fallback is None else [asdict(check) for check in fallback.checks],
        "outcome": None if fallback is None or fallback.outcome is None else asdict(fallback.outcome),
        "calibration": calibration.get("path") or calibration.get("name"),
        "samples": calibration.get("samples"),
    }
