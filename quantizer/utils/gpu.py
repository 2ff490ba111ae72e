"""The GPU of this machine that torch uses."""

from __future__ import annotations

LEAST_FOR_FP8 = (8, 9)
"""The first compute capability with matrix multiplications in FP8."""


def is_present() -> bool:
    """Return whether torch sees an NVIDIA GPU."""
    # Imported here, because commands without a model do not need torch.
    import torch

    return bool(torch.cuda.is_available())


def capability() -> tuple[int, int]:
    """Return the compute capability of the GPU."""
    import torch

    return torch.cuda.get_device_capability()


def has_fp8() -> bool:
    """Return whether the GPU multiplies matrices in FP8."""
    return capability() >= LEAST_FOR_FP8


def description() -> str:
    """Return the name of the GPU and its compute capability."""
    import torch

    return f"{torch.cuda.get_device_name()} (compute capability {dotted(capability())})"


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as text, such as ``8.9``."""
    return ".".join(map(str, capability))
