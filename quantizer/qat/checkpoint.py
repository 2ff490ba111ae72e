"""Checkpoints of a training: the state of a proxy and its optimizer, with facts about them, in a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quantizer.common.digest import tensors_digest
from quantizer.common.distributed import get_rank, of_first_rank
from quantizer.common.plain_values import json_values
from quantizer.errors import TrainingError
from quantizer.files import checked_file, whole_file

LAST = "last.safetensors"
BEST = "best.safetensors"
"""The files of a training, in a folder that may hold other files too."""

_FACTS = "training"
_SUM = "sha256"


def check_checkpoints(folder: Path) -> None:
    """Raise, before a training, if its checkpoints cannot be written into an existing folder.

    Raises:
        TrainingError: it is no folder, a file with the name of a checkpoint is none, or the system refuses.
    """
    if folder.is_dir():
        for path in (folder / LAST, folder / BEST):
            checked_file(path, TrainingError)
            if path.exists():
                read_facts(path)
    elif os.path.lexists(folder):
        raise TrainingError(
            f"{folder} is no folder, and checkpoints are to be kept there; choose another output folder"
        )


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a training, and their folder if it holds nothing else."""
    with suppress(OSError):
        for name in (LAST, BEST):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def write_checkpoint(
    path: Path, proxy: nn.Module, facts: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write a checkpoint atomically.

    Args:
        path: the file.
        proxy: the proxy that ``qat()`` returned.
        facts: values that JSON can hold.
        optimizer: its state is saved too; learning rates and other options of its groups are not.

    Raises:
        TrainingError: the system refuses to write.
    """
    # A parameter that modules share is written under each of its names: the format cannot share tensors.
    tensors = {f"model.{name}": value.detach().clone().contiguous() for name, value in proxy.state_dict().items()}
    for number, entry in (optimizer.state_dict()["state"] if optimizer is not None else {}).items():
        tensors |= {f"optimizer.{number}.{name}": value.detach().clone() for name, value in entry.items()}
    with whole_file(path, TrainingError) as part:
        text = json.dumps(facts)
        save_file(tensors, part, metadata={_FACTS: text, _SUM: tensors_digest(tensors, text)})


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint without reading its tensors.

    Raises:
        TrainingError: the file is no checkpoint, or damaged.
    """
    with _opened(path) as file:
        facts = json_values(file.metadata()[_FACTS])
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
        return facts


def read_checkpoint(path: Path, proxy: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a checkpoint into a proxy and an optimizer.

    Raises:
        TrainingError: the file is no checkpoint, damaged, or of another model or configuration.
    """
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        told = file.metadata()
        # Checkpoints of older versions have no checksum.
        if told.get(_SUM, "") not in ("", tensors_digest(tensors, told[_FACTS])):
            raise ValueError("its SHA-256 is not that of its tensors")
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    try:
        proxy.load_state_dict(model)
    except RuntimeError as error:
        raise TrainingError(f"{path} is of another model or configuration: {error}") from error
    if optimizer is not None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                state.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def share_checkpoints(folder: Path) -> None:
    """Give all processes the checkpoints of the first one, each in its own folder; all processes must call this."""
    for path in (folder / LAST, folder / BEST):
        told = of_first_rank(lambda path=path: path.read_bytes() if path.is_file() else b"")  # type: ignore[misc]
        if told and get_rank() > 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(told)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            if _FACTS not in (file.metadata() or {}):
                raise KeyError(_FACTS)
            yield file
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{path} is no checkpoint of a training, or damaged: {error}; remove it to begin the training anew"
        ) from error
