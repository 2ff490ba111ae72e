"""Checkpoints of a training: the state of a proxy and its optimizer, with facts about them, in a safetensors file.

The part of a state dict that says how a proxy in training rounds, so that only a proxy that rounds alike loads it.

A buffer holds the decisions for all operands, as the bytes of a JSON text. A parameter that several operands share is
in the state dict once, because formats without shared tensors (safetensors) would refuse it twice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quantizer.algorithms.qat.scales import ScaleKind
from quantizer.errors import TrainingError
from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.utils.distributed import get_rank, of_first_rank
from quantizer.utils.files import checked_file, whole_file
from quantizer.utils.fingerprint import tensors_digest
from quantizer.utils.plain_values import json_values

LAST = "last.safetensors"
BEST = "best.safetensors"
"""The files of a training, in a folder that may hold other files too."""

_FACTS = "training"
_SUM = "sha256"


def check_checkpoints(folder: Path) -> None:
    """Raise, before a training, if its checkpoints cannot be written into an existing folder."""
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
    """Write a checkpoint atomically."""
    # A parameter that modules share is written under each of its names: the format cannot share tensors.
    tensors = {f"model.{name}": value.detach().clone().contiguous() for name, value in proxy.state_dict().items()}
    for number, entry in (optimizer.state_dict()["state"] if optimizer is not None else {}).items():
        tensors |= {f"optimizer.{number}.{name}": value.detach().clone() for name, value in entry.items()}
    with whole_file(path, TrainingError) as part:
        text = json.dumps(facts)
        save_file(tensors, part, metadata={_FACTS: text, _SUM: tensors_digest(tensors, text)})


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint without reading its tensors."""
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


_BUFFER = "quantizer_decisions"


def prepare_state_dict(proxy: nn.Module, kinds: Mapping[str, ScaleKind]) -> None:
    """Add the decisions for all operands to the proxy's state dict, and make it refuse a state dict with others.

    A state dict without decisions, such as the float model's, loads as usual.

    Args:
        proxy: the proxy to train.
        kinds: the kinds of the scales, by ``SITE.OPERAND``; all others are fixed.
    """
    # Beside the parameters: NCCL sends no tensor of the CPU.
    device = next(proxy.parameters()).device
    proxy.register_buffer(_BUFFER, _as_bytes(_decisions(proxy, kinds)).to(device))
    proxy.register_state_dict_pre_hook(partial(_before_saving, kinds))  # type: ignore[no-untyped-call]
    proxy.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
    proxy.register_load_state_dict_pre_hook(partial(_before_loading, kinds))  # type: ignore[no-untyped-call]


def _decisions(proxy: nn.Module, kinds: Mapping[str, ScaleKind]) -> dict[str, str]:
    """Return how each quantized operand is rounded, by ``SITE.OPERAND``, and what shifts a bias, by ``SITE.bias``."""
    names = (
        (f"{site.path}.{operand.name}", site.quantizer(position))
        for site in sites_of(proxy)
        if site.active
        for position, operand in enumerate(site.operation.operands)
    )
    rounded = {
        name: _description(quantizer, kinds.get(name, "fixed")) for name, quantizer in names if quantizer.enabled
    }
    shifts = ((f"{site.path}.bias", site.bias_shift) for site in sites_of(proxy) if site.active)
    return rounded | {name: f"shifted by {_checksum(shift)}" for name, shift in shifts if shift is not None}


def _description(quantizer: OperandQuantizer, kind: ScaleKind) -> str:
    """Return how an operand is rounded, without the values of its scale, which a checkpoint holds itself."""
    parts = [quantizer.dtype, "per tensor" if quantizer.axis is None else f"axis {quantizer.axis}"]
    if quantizer.dynamic:
        parts.append("ranges at run time")
    if quantizer.block_size is not None:
        parts.append(f"blocks of {quantizer.block_size}")
    if quantizer.zero_point is not None:
        parts.append(f"zero point {int(quantizer.zero_point)}")
    if quantizer.factor is not None:
        parts.append(f"smoothed by {_checksum(quantizer.factor)}")
    if quantizer.scale is not None:
        parts.append(f"scale [{', '.join(map(str, quantizer.scale.shape))}] {kind}")
    if quantizer.calls:
        parts.append(f"{len(quantizer.calls)} calls apart")
    return ", ".join(parts)


def _checksum(values: Tensor) -> str:
    return f"{zlib.crc32(values.float().cpu().numpy().tobytes()):08x}"


def _as_bytes(decisions: dict[str, str]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(decisions).encode()), dtype=torch.uint8)


def _from_bytes(stored: Tensor) -> dict[str, str]:
    try:
        decisions = json_values(stored.cpu().numpy().tobytes())
    except ValueError as error:
        raise TrainingError(
            f"the checkpoint is damaged: its {_BUFFER} cannot be read ({error}); take an earlier one"
        ) from error
    if not isinstance(decisions, dict):
        raise TrainingError(f"the checkpoint is damaged: its {_BUFFER} holds no mapping; take an earlier one")
    return decisions


def _before_saving(kinds: Mapping[str, ScaleKind], proxy: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Update the decisions, which may have changed with the first batches."""
    buffer = getattr(proxy, _BUFFER)
    setattr(proxy, _BUFFER, _as_bytes(_decisions(proxy, kinds)).to(buffer.device))


def _after_saving(proxy: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for others in _shared(proxy).values():
        for name in others:
            del state_dict[prefix + name]


def _before_loading(
    kinds: Mapping[str, ScaleKind], proxy: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    stored = state_dict.get(prefix + _BUFFER)
    if stored is not None:
        _compare(_from_bytes(stored), _decisions(proxy, kinds))
        setattr(proxy, _BUFFER, stored.clone().to(getattr(proxy, _BUFFER).device))
    for first, others in _shared(proxy).items():
        if prefix + first in state_dict:
            state_dict.update({prefix + name: state_dict[prefix + first] for name in others})


def _compare(there: dict[str, str], here: dict[str, str]) -> None:
    """Raise unless the decisions of a checkpoint are those of the proxy that loads it."""
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not differing:
        return
    if not here:
        raise TrainingError(
            f"the checkpoint holds ranges of {len(there)} operands, and nothing was calibrated here yet: make the "
            "proxy with the Quantizer of that training, Quantizer.load() of the folder that its save() wrote"
        )
    first = differing[0]
    count = "1 operand differs, " if len(differing) == 1 else f"{len(differing)} operands differ, the first is "
    raise TrainingError(
        f"the checkpoint is of another configuration: {count}{first}: {there.get(first, 'not quantized')} in the "
        f"checkpoint, {here.get(first, 'not quantized')} here. Make the proxy with the Quantizer of that training "
        "(Quantizer.load() of the folder that its save() wrote) and the same scales=, or train without this checkpoint"
    )


def _shared(proxy: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter that scales of several operands share: the first name, and the others."""
    names = defaultdict(list)
    for path, module in proxy.named_modules():
        if isinstance(module, OperandQuantizer) and module.change is not None:
            names[id(module.change)].append(f"{path}.change")
    return {first: others for first, *others in names.values() if others}
