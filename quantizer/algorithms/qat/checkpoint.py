"""Checkpoints of a training: the state of a proxy and its optimizer, with facts about them, in a safetensors file.

The state dict of a proxy in training has a buffer with the quantization decisions for all operands, as JSON bytes, so
that only a proxy with equal decisions loads it. A parameter that several operands share is stored once, because formats
without shared tensors (safetensors) reject duplicates.
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
"""The files of a training, in a folder that may contain other files."""

_FACTS = "training"
_SUM = "sha256"


def check_checkpoints(folder: Path) -> None:
    """Raise, before a training, if its checkpoints cannot be written into ``folder``."""
    if folder.is_dir():
        for path in (folder / LAST, folder / BEST):
            checked_file(path, TrainingError)
            if path.exists():
                read_facts(path)
    elif os.path.lexists(folder):
        raise TrainingError(
            f"checkpoints cannot be written to {folder}, which is not a folder; choose another output folder"
        )


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a training, and their folder if nothing else is in it."""
    with suppress(OSError):
        for name in (LAST, BEST):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def write_checkpoint(
    path: Path, proxy: nn.Module, facts: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write the tensors of a proxy, the state of an optimizer, and facts to a file, with a checksum."""
    # A shared parameter is written under each of its names, because the format cannot share tensors.
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
            raise ValueError("its facts are not an object")
        return facts


def read_checkpoint(path: Path, proxy: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a checkpoint into a proxy and an optimizer.

    Raises:
        TrainingError: the file is not a checkpoint, is damaged, or belongs to another model or configuration.
    """
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        recorded = file.metadata()
        if recorded.get(_SUM, "") not in ("", tensors_digest(tensors, recorded[_FACTS])):
            raise ValueError("its SHA-256 does not match its tensors")
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    try:
        proxy.load_state_dict(model)
    except RuntimeError as error:
        raise TrainingError(f"{path} belongs to another model or configuration: {error}") from error
    if optimizer is not None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                state.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def share_checkpoints(folder: Path) -> None:
    """Copy the checkpoints of the first process to all processes, each to its own folder; all must call this."""
    for path in (folder / LAST, folder / BEST):
        content = of_first_rank(lambda path=path: path.read_bytes() if path.is_file() else b"")  # type: ignore[misc]
        if content and get_rank() > 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            if _FACTS not in (file.metadata() or {}):
                raise KeyError(_FACTS)
            yield file
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{path} is not a checkpoint of a training, or is damaged: {error}; remove it to restart the training"
        ) from error


_BUFFER = "quantizer_decisions"


def prepare_state_dict(proxy: nn.Module, kinds: Mapping[str, ScaleKind]) -> None:
    """Add the decisions for all operands to the proxy's state dict, and reject state dicts with other decisions.

    A state dict without decisions, such as the float model's, loads as usual.

    Args:
        proxy: the proxy to train.
        kinds: the kinds of the scales, by ``SITE.OPERAND``; all others are fixed.
    """
    # On the device of the parameters, because NCCL does not send CPU tensors.
    device = next(proxy.parameters()).device
    proxy.register_buffer(_BUFFER, _as_bytes(_decisions(proxy, kinds)).to(device))
    proxy.register_state_dict_pre_hook(partial(_before_saving, kinds))  # type: ignore[no-untyped-call]
    proxy.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
    proxy.register_load_state_dict_pre_hook(partial(_before_loading, kinds))  # type: ignore[no-untyped-call]


def _decisions(proxy: nn.Module, kinds: Mapping[str, ScaleKind]) -> dict[str, str]:
    """Return how each quantized operand is rounded, by ``SITE.OPERAND``, and each bias shift, by ``SITE.bias``."""
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
    """Return how an operand is quantized, without the values of its scale, which a checkpoint stores itself."""
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
            f"the checkpoint is damaged: its {_BUFFER} cannot be read ({error}); use an earlier one"
        ) from error
    if not isinstance(decisions, dict):
        raise TrainingError(f"the checkpoint is damaged: its {_BUFFER} is not a mapping; use an earlier one")
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


def _compare(stored: dict[str, str], current: dict[str, str]) -> None:
    """Raise unless a checkpoint and the proxy that loads it have the same decisions."""
    differing = sorted(name for name in stored.keys() | current.keys() if stored.get(name) != current.get(name))
    if not differing:
        return
    if not current:
        raise TrainingError(
            f"the checkpoint has ranges of {len(stored)} operands, but nothing was calibrated here yet; create the "
            "proxy with the Quantizer of that training, from Quantizer.load() of the folder of its save()"
        )
    first = differing[0]
    count = "1 operand differs, " if len(differing) == 1 else f"{len(differing)} operands differ, the first is "
    raise TrainingError(
        f"the checkpoint belongs to another configuration: {count}{first}: {stored.get(first, 'not quantized')} in the "
        f"checkpoint, {current.get(first, 'not quantized')} here. Create the proxy with the Quantizer of that training "
        "(Quantizer.load() of the folder of its save()) and the same scales=, or train without this checkpoint"
    )


def _shared(proxy: nn.Module) -> dict[str, list[str]]:
    names = defaultdict(list)
    for path, module in proxy.named_modules():
        if isinstance(module, OperandQuantizer) and module.change is not None:
            names[id(module.change)].append(f"{path}.change")
    return {first: others for first, *others in names.values() if others}
