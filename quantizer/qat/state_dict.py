"""The part of a state dict that says how a proxy in training rounds, so that only a proxy that rounds alike loads it.

A buffer holds the decisions for all operands, as the bytes of a JSON text. A parameter that several operands share is
in the state dict once, because formats without shared tensors (safetensors) would refuse it twice.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.plain_values import json_values
from quantizer.errors import TrainingError
from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.qat.scales import ScaleKind

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
    """Raise unless the decisions of a checkpoint are those of the proxy that loads it.

    Raises:
        TrainingError: they differ.
    """
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
