"""All files for servers beside an engine, in one step."""

from __future__ import annotations

import re
from pathlib import Path

from quantizer.engines.engine_file import copy_content
from quantizer.runs.serving.gpu_check import GPU_SCRIPT, Expected, write_gpu_check
from quantizer.runs.serving.linked_files import link_onnx
from quantizer.runs.serving.model_config import CONFIG_NAME, ServedEngine, config_text
from quantizer.targets.base import TritonServer

_REPOSITORY = "triton"
_VERSION = "1"


def write_serving_files(folder: Path, served: ServedEngine, expected: Expected | None) -> dict[str, str]:
    """Write the files with which others serve an engine into its folder; return their places there, by kind.

    ``triton`` is the folder of the model in the model repository, ``gpu_check`` the script that checks and times the
    engine on a GPU.
    """
    server = served.server
    if server is None:
        return {}
    model = write_triton_model(folder, served)
    files = {} if model is None else {"triton": model}
    if server.gpu_tool is not None and expected is not None:
        write_gpu_check(folder, served, expected, server.gpu_tool)
        files["gpu_check"] = GPU_SCRIPT
    return files


def write_triton_model(folder: Path, served: ServedEngine) -> str | None:
    """Write a model into the model repository of a folder, and return its place; None: Triton has no such file."""
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
