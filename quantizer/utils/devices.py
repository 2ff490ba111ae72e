"""The devices of tensors whose values the CPU cannot read without a copy, which waits for the device."""

from __future__ import annotations

import torch


def is_apart(device: torch.device) -> bool:
    """Return whether the CPU must copy the values of a tensor on a device to read them."""
    return device.type != "cpu"
