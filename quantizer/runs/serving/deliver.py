"""All files for servers beside an engine, in one step."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from quantizer.engines.engine_file import copy_content
from quantizer.runs.serving.gpu_check import GPU_SCRIPT, Expected, write_gpu_check
from quantizer.runs.serving.linked_files import link_file, link_onnx
from quantizer.runs.serving.model_config import CONFIG_NAME, ServedEngine, config_text
from quantizer.targets.base import TritonServer

_REPOSITORY = "triton"
_VERSION = "1"


def write_serving_files(
    folder: Path,
    served: ServedEngine,
    expected: Expected | None,
    wanted: Collection[str] = ("triton", "gpu_check"),
    *,
    checked_in: Path | None = None,
) -> dict[str, str]:
    """Write the files with which others serve an engine into its folder; return their places there, by kind.

    ``triton`` is the folder of the model in the model repository, ``gpu_check`` the script that checks and times the
    engine on a GPU, in the folder ``checked_in``.
    """
    server = served.server
    if server is None:
        return {}
    model = write_triton_model(folder, served) if "triton" in wanted else None
    files = {} if model is None else {"triton": model}
    if "gpu_check" in wanted and server.gpu_tool is not None and expected is not None:
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
