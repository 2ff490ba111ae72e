"""A checksum of tensors, because no file format of tensors detects a flipped bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 (hexadecimal) of the name, type, shape and values of every tensor, and of ``text``."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"\0{name}\0{value.dtype}\0{list(value.shape)}\0".encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
