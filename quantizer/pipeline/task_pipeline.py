"""``load_pipeline``: a transformers pipeline whose model is a converted engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantizer.engines import Array
from quantizer.errors import QuantizerError
from quantizer.pipeline.load import Converted, ConvertedParts, load_converted, processor_folder
from quantizer.tasks import Recordings, read_image, tasks
from quantizer.tasks.checkpoints import transformers_package
from quantizer.tasks.models import load_config
from quantizer.utils.paths import is_file
from quantizer.utils.sizes import BATCH, SEQUENCE


def load_pipeline(
    folder: str | Path, *, threads: int = 1, verify: bool = True, trust: bool = False, **options: Any
) -> Any:
    """Return the transformers pipeline of a converted engine: texts, images or recordings in, results out.

    The results are those of the transformers pipeline for the task, such as ``[{"label": ..., "score": ...}]``. It
    takes one sample or any number of samples. Texts are cut to the engine's maximum length. Recordings in files and
    arrays are cut to the seconds of the conversion, unless ``chunk_length_s`` cuts them into parts.

    Args:
        folder: the folder OUT/BACKEND that ``quantizer convert`` wrote.
        threads: the number of CPU threads.
        verify: compare the engine file with its checksum.
        trust: load a compiled torch engine, which is native code, even if this process did not build it.
        options: options of the pipeline, such as ``top_k``, ``aggregation_strategy`` or ``batch_size``. The default of
            ``batch_size`` is the usual batch size of the engine, or 1 if padding would change the results.

    Raises:
        QuantizerError: the folder is not a conversion, or is damaged, or transformers has no pipeline for its task.
        EngineError: the engine does not load on this machine, or contains untrusted native code.
        MissingDependencyError: transformers or the library of the backend is not installed.
    """
    converted = load_converted(folder, threads=threads, verify=verify, trust=trust)
    config, processor = converted.config, converted.processor
    task = tasks[config["task"]]
    kind = getattr(transformers_package(), task.pipeline_class or "", None)
    if kind is None:
        method = "generate([...])" if isinstance(converted, ConvertedParts) else "its engine and processor"
        raise QuantizerError(
            f"{folder} has task {task.name}, for which transformers {transformers_package().__version__} has no "
            f"pipeline: use {method} of quantizer.load_converted instead"
        )
    batch = config["dimensions"][BATCH][1]
    defaults: dict[str, Any] = {"batch_size": batch, **task.pipeline_options}
    if task.reads == "text":
        processors = {"tokenizer": processor}
        processor.model_max_length = converted.sizes.longest
    elif task.reads == "image":
        processors = {"image_processor": processor}
    else:
        tokenizer = getattr(processor, "tokenizer", None)
        processors = {"feature_extractor": getattr(processor, "feature_extractor", processor), "tokenizer": tokenizer}
        if SEQUENCE in config["dimensions"]:
            # Padding changes the outputs of models of recordings without a mask.
            defaults["batch_size"] = 1
    if isinstance(converted, ConvertedParts):
        model = converted.model
        defaults |= {"max_new_tokens": config["tokens"], "do_sample": False}
    else:
        model = _model(Path(folder), converted)
    made: type = type("_Pipeline", (_ReadsFiles, kind), {"converted": converted})
    return made(model=model, device=torch.device("cpu"), **processors, **{**defaults, **options})


def _model(folder: Path, converted: Converted) -> Any:
    """Return a transformers model whose forward runs the engine."""
    place = folder / processor_folder(converted.config["task"])
    if not is_file(place / "config.json"):
        raise QuantizerError(
            f"{place} has no config.json, from which a pipeline takes the names of classes: convert the model again"
        )
    model = type("_EngineModel", (_RunsEngine, transformers_package().PreTrainedModel), {})(load_config(str(place)))
    model.converted = converted
    model.main_input_name = converted.engine.input_names[0]
    return model.eval()


class _ReadsFiles:
    """The base of pipelines that read image files and recordings as ``quantizer convert`` did."""

    converted: Converted | ConvertedParts

    def check_model_type(self, supported_models: Any) -> None:
        """Do nothing: the engine was built for the task of the pipeline."""

    def preprocess(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return the model inputs of a sample; paths are read first."""
        config = self.converted.config
        if isinstance(inputs, str | Path) and tasks[config["task"]].reads == "image":
            inputs = read_image(Path(inputs))
        elif isinstance(inputs, str | Path | np.ndarray) and tasks[config["task"]].reads == "audio":
            processor = self.converted.processor
            recordings = Recordings(getattr(processor, "feature_extractor", processor), config["seconds"])
            inputs = inputs if isinstance(inputs, np.ndarray) else recordings.wave(Path(inputs))
            if not options.get("chunk_length_s"):
                inputs = inputs[: recordings.samples]
        return super().preprocess(inputs, *args, **options)  # type: ignore[misc]


class _RunsEngine:
    """The base of a transformers model without layers, whose forward runs an engine."""

    converted: Converted

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of its inputs."""
        return torch.float32

    def forward(self, **inputs: Tensor) -> Any:
        """Return the outputs of the engine by name, for inputs of any length up to its maximum."""
        engine, config = self.converted.engine, self.converted.config
        padded, cut = _padded(self.converted, {name: value.numpy() for name, value in inputs.items()})
        arrays = {spec.name: padded[spec.name].astype(spec.dtype, copy=False) for spec in engine.inputs}
        outputs = self.converted.sizes.run(engine, arrays, self.converted.length(arrays))
        result = transformers_package().utils.ModelOutput()
        for spec in config["outputs"]:
            axes = tuple(cut if size == SEQUENCE else slice(None) for size in spec["shape"])
            result[spec["name"]] = torch.from_numpy(outputs[spec["name"]][axes])
        return result


def _padded(converted: Converted, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], slice]:
    """Return inputs padded to a length that the engine accepts, and the slice of the original positions."""
    reads, processor = tasks[converted.config["task"]].reads, converted.processor
    shapes = {spec["name"]: spec["shape"] for spec in converted.config["inputs"]}
    if reads == "image":
        return dict(inputs), slice(None)
    missing = sorted(set(shapes) - set(inputs))
    if missing:
        raise QuantizerError(
            f"the processor returned {', '.join(inputs)}, but the engine also needs {', '.join(missing)}: the folder "
            "is damaged, convert the model again"
        )
    fill = {"input_ids": getattr(processor, "pad_token_id", 0)}
    left = getattr(processor, "padding_side", "right") == "left"
    count, longest = len(next(iter(inputs.values()))), converted.sizes.longest
    result, cut = {}, slice(None)
    for name, shape in shapes.items():
        value = inputs[name]
        widths = [(0, 0)] * value.ndim
        for axis, size in enumerate(shape):
            have = value.shape[axis]
            if size == SEQUENCE:
                _, size = converted.sizes.fitting(count, min(have, longest))
            if axis == 0 or not isinstance(size, int):
                continue
            if have > size:
                raise QuantizerError(
                    f"{name} has the length {have}, but the engine was built for at most {size}: pass a shorter "
                    f"{reads}, or convert the model for longer ones (--seq-len, --seconds)"
                )
            widths[axis] = (size - have, 0) if left else (0, size - have)
            if shape[axis] == SEQUENCE and reads == "text":
                cut = slice(size - have, size) if left else slice(0, have)
        result[name] = np.pad(value, widths, constant_values=fill.get(name, 0)) if any(map(sum, widths)) else value
    return result, cut
