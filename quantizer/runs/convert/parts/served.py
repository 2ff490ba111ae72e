"""The files for servers of a model in parts: a model of Triton for each, and checks for a machine with a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quantizer.qdq.structure import Signature
from quantizer.runs.convert.folder import ENGINE, ONNX
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.parts.loaded import MODEL
from quantizer.runs.convert.parts.part_maker import PartMaker, PartsMade
from quantizer.runs.outputs.compare_outputs import Reference, is_cache
from quantizer.runs.serving import Expected, ServedEngine, model_name, write_triton_model
from quantizer.runs.serving.gpu_check import GPU_SCRIPT, write_gpu_check
from quantizer.runs.serving.linked_files import link_file, link_onnx
from quantizer.tasks import batch_shape

ON_GPU = "on_gpu"
"""The folder with what checks each part where there is a GPU, in a folder of its own."""


def serve_parts(
    maker: PartMaker, facts: ConversionInputs, made: PartsMade, signatures: Mapping[str, Signature], folder: Path
) -> dict[str, dict[str, str]]:
    """Write the files for servers of all parts, and return what there is of each, by its name."""
    name = made.variant.backend
    found: dict[str, dict[str, str]] = {}
    for part, signature in signatures.items():
        capability = maker.capability(name)
        served = ServedEngine(
            name=f"{model_name(facts.name)}-{part}",
            backend=name,
            onnx=folder / MODEL / f"{part}.onnx",
            engine=folder / f"{part}.engine",
            signature=signature,
            dimensions=maker.dimensions[part],
            threads=maker.asked.threads,
            precision=made.variant.precision,
            capability=capability if capability is None or isinstance(capability, str) else " ".join(capability),
        )
        triton = write_triton_model(folder, served)
        found[part] = {} if triton is None else {"triton": triton}
        tool = None if served.server is None else served.server.gpu_tool
        if tool is not None:
            found[part] |= {"gpu_check": _gpu_check(maker, made, part, served, folder, tool)}
    return found


def _gpu_check(maker: PartMaker, made: PartsMade, part: str, served: ServedEngine, folder: Path, tool: str) -> str:
    """Write the check of a part into a folder of its own, and return its script."""
    place = folder / ON_GPU / part
    place.mkdir(parents=True)
    link_onnx(served.onnx, place / ONNX)
    link_file(served.engine, place / ENGINE)
    there = replace(served, onnx=place / ONNX, engine=place / ENGINE)
    names = [value.name for value in served.signature.outputs]
    outputs, of_float = maker.references(part, made.quantized, names)
    usual = maker.facts.usual
    expected = Expected(
        outputs=_few(outputs, usual), of_float=_few(of_float, usual), bound=maker.tolerance(made.variant)
    )
    write_gpu_check(place, there, expected, tool)
    return str(Path(ON_GPU) / part / GPU_SCRIPT)


def _few(references: list[Reference], at: int) -> list[Reference]:
    """Return what fits into files: all outputs at the least shape, and those without a cache at the usual one."""
    least, usual = references[0], references[at]
    if batch_shape(usual.inputs) == batch_shape(least.inputs):
        return [least]
    return [least, replace(usual, outputs={name: value for name, value in usual.outputs.items() if not is_cache(name)})]
