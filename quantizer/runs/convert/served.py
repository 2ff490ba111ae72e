"""The files for servers in the folder of a converted engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantizer.engines import backend
from quantizer.qdq.structure import Signature
from quantizer.runs.convert.engine_maker import EngineMaker, Made
from quantizer.runs.convert.folder import ENGINE, ONNX
from quantizer.runs.outputs.compare_outputs import Reference
from quantizer.runs.serving import Expected, ServedEngine, model_name, write_serving_files
from quantizer.tasks import batch_shape


def serving_files(maker: EngineMaker, made: Made, folder: Path, signature: Signature) -> dict[str, str]:
    """Write the files for servers of one engine, and return what there is."""
    facts, name = maker.facts, made.variant.backend
    served = ServedEngine(
        name=model_name(facts.name),
        backend=name,
        onnx=folder / ONNX,
        engine=folder / ENGINE,
        signature=signature,
        dimensions=facts.dimensions,
        threads=maker.asked.threads,
        precision=made.variant.precision,
        capability=maker.capability(name),
    )
    for_gpu = backend(name).device == "cuda"
    return write_serving_files(folder, served, _expected(maker, made, signature) if for_gpu else None)


def _expected(maker: EngineMaker, made: Made, signature: Signature) -> Expected:
    """Return PyTorch's outputs, with which an engine is compared where it runs."""
    names, model = [value.name for value in signature.outputs], maker.context.model
    return Expected(
        outputs=_one_a_shape(maker.references.of(model if made.quantized is None else made.quantized, names)),
        of_float=_one_a_shape(maker.references.of(model, names)),
        bound=maker.tolerance(made.variant),
    )


def _one_a_shape(references: Sequence[Reference]) -> list[Reference]:
    """Return the first reference of each shape, a case of the script: its inputs and outputs are files."""
    by_shape: dict[object, Reference] = {}
    for one in references:
        by_shape.setdefault(batch_shape(one.inputs), one)
    return list(by_shape.values())
