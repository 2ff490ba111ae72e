"""All files for servers beside an engine, in one step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quantizer.engines.engine_file import copy_content
from quantizer.runs.serving.gpu_check import CASES, GPU_SCRIPT, Expected, write_gpu_check
from quantizer.runs.serving.linked_files import link_onnx, own_bytes
from quantizer.runs.serving.model_config import CONFIG_NAME, ServedEngine, config_text
from quantizer.targets.triton_server import TritonServer

_REPOSITORY = "triton"
_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class ServingFiles:
    """The files for servers in the folder of an engine; None: there are none.

    Attributes:
        triton: the folder of the model in the model repository.
        gpu_check: the script that checks and times the engine on a GPU.
        size_bytes: how much room they take, without those that are further names of files of the engine's folder.
    """

    triton: str | None = None
    gpu_check: str | None = None
    size_bytes: int = 0

    @property
    def named(self) -> dict[str, str]:
        """Those that there are, by what they are."""
        return {name: file for name in ("triton", "gpu_check") if (file := getattr(self, name)) is not None}


def write_serving_files(folder: Path, served: ServedEngine, expected: Expected | None) -> ServingFiles:
    """Write the files with which others serve an engine into its folder.

    Args:
        folder: the folder of the engine.
        served: the engine; one of a backend that Triton has no counterpart of gets no files.
        expected: what the outputs of an engine for a GPU are compared with there; None: it gets no script.

    Raises:
        EngineError: an input or output has a type that Triton does not know.
        OSError: the system refused to write.
    """
    server = served.server
    if server is None:
        return ServingFiles()
    model = write_triton_model(folder, served)
    script = None
    if server.gpu_tool is not None and expected is not None:
        write_gpu_check(folder, served, expected, server.gpu_tool)
        script = GPU_SCRIPT
    return ServingFiles(
        triton=model,
        gpu_check=script,
        size_bytes=own_bytes(*(folder / name for name in (_REPOSITORY, CASES, GPU_SCRIPT))),
    )


def write_triton_model(folder: Path, served: ServedEngine) -> str | None:
    """Write a model into the model repository of a folder, and return its place there; None: Triton has no such file.

    Raises:
        EngineError: an input or output has a type that Triton does not know.
        OSError: the system refused to write.
    """
    server = served.server
    if server is None or server.takes is None:
        return None
    _write_model(folder / _REPOSITORY / served.name, served, server)
    return str(Path(_REPOSITORY) / served.name)


def model_name(name: str) -> str:
    """Return a name as Triton takes one: it is that of a folder, and a part of addresses."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _write_model(model: Path, served: ServedEngine, server: TritonServer) -> None:
    """Write the configuration and the file of one model."""
    version = model / _VERSION
    version.mkdir(parents=True)
    (model / CONFIG_NAME).write_text(config_text(served), encoding="utf-8")
    if server.takes == "plan":
        copy_content(served.engine, version / server.file)
    else:
        link_onnx(served.engine if server.takes == "engine" else served.onnx, version / server.file)
