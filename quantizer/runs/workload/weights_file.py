"""The weights of a module, from a file of tensors alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantizer.common.paths import is_file, regular_file
from quantizer.errors import TaskError

_FORMS = (".safetensors", ".pt", ".pth")
_NAMED = 6
"""So many names of tensors are listed."""


def check_weights(path: Path) -> None:
    """Raise if a path is no file of weights, without reading it."""
    if path.suffix not in _FORMS:
        raise TaskError(f"weights {path}: expected a file that ends in {', '.join(_FORMS)}")
    if not is_file(path):
        raise TaskError(f"weights {path}: there is no such file")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all weights of a module. No code in the file is run."""
    check_weights(path)
    state = _state_dict(path)
    where = f"weights {path} do not fit {type(model).__name__}"
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise TaskError(f"{where}: {_listed(lines) if lines else error}") from error
    # Files of safetensors hold a tensor that two modules share once.
    tensors = model.state_dict(keep_vars=True)
    given = {id(tensors[name]) for name in tensors.keys() & state.keys()}
    missing = [name for name in missing if id(tensors.get(name)) not in given]
    found = {"missing": missing, "unexpected": unexpected}
    problems = [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in found.items() if names
    ]
    if problems:
        raise TaskError(f"{where}: {'; '.join(problems)}. Expected the state_dict() of a module of this class")


def _state_dict(path: Path) -> Mapping[str, Any]:
    try:
        regular_file(path)
        loaded = load_file(path) if path.suffix == ".safetensors" else _load_pickled(path)
    except OSError as error:
        raise TaskError(f"weights {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # torch's own message advises weights_only=False, which runs any code in the file.
        raise TaskError(
            f"weights {path}: the file is damaged, or does not hold tensors alone ({type(error).__name__}); write it "
            "by torch.save(model.state_dict(), path)"
        ) from error
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        held = f"{_listed([str(key) for key in loaded])}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise TaskError(
            f"weights {path}: the file holds no state dict, but {held or 'nothing'}; write it by "
            "torch.save(model.state_dict(), path)"
        )
    return loaded


def _load_pickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
