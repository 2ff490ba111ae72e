"""Batches in files of named arrays: ``.npz`` and ``.safetensors``, or a folder of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.utils.paths import regular_file

ARRAY_FILES = (".npz", ".safetensors")


def array_batches(path: Path, batch_rows: int, rows: int | None = None) -> list[dict[str, Tensor]]:
    """Return the batches of a file, or of a folder of files: tensors by name, with their rows along axis 0.

    Args:
        path: a file, whose arrays are cut into batches; or a folder, of which each file is one batch, so that batches
            may differ in their shapes.
        batch_rows: how many rows of a file are one batch.
        rows: how many rows are read at most; of a folder the batches that begin before; None: all.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in ARRAY_FILES)
        if not files:
            raise CalibrationError(f"the folder {path} has no file of arrays: expected {' or '.join(ARRAY_FILES)}")
        found, read = [], 0
        for file in files:
            if rows is None or read < rows:
                found.append(_arrays(file))
                read += len(next(iter(found[-1].values())))
        return found
    arrays = _arrays(path)
    count = len(next(iter(arrays.values())))
    count = count if rows is None else min(rows, count)
    return [
        {name: tensor[start : min(start + batch_rows, count)] for name, tensor in arrays.items()}
        for start in range(0, count, batch_rows)
    ]


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix.lower() not in ARRAY_FILES or not path.is_file():
        raise CalibrationError(
            f"{path} is no file of arrays that exists: expected {' or '.join(ARRAY_FILES)}, with an array for each "
            "input of the model, by its name"
        )
    arrays = _of_numpy(path) if path.suffix.lower() == ".npz" else _of_safetensors(path)
    lengths = {name: len(tensor) if tensor.dim() else 0 for name, tensor in arrays.items()}
    if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in arrays.items()) or "none"
        raise CalibrationError(
            f"{path}: the arrays have not one number of rows (axis 0), from 1: {told}; give each input as many rows"
        )
    return arrays


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        regular_file(path)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CalibrationError(f"{path} is damaged, or no .safetensors file: {error}") from error


def _of_numpy(path: Path) -> dict[str, Tensor]:
    try:
        # Objects in such a file are pickled, and are not read.
        with np.load(path, allow_pickle=False) as held:
            if not isinstance(held, Mapping):
                raise CalibrationError(f"{path} holds one array without a name; save it with np.savez and its name")
            return {name: torch.from_numpy(held[name]) for name in held}
    except (OSError, ValueError, EOFError, TypeError, KeyError) as error:
        raise CalibrationError(f"{path} is damaged, or holds what is no array of numbers: {error}") from error
