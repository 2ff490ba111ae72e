"""The version counter of a tensor, which shows a later pass if the tensor was changed in place."""

from __future__ import annotations

from torch import Tensor

__all__ = ["tensor_version"]


def tensor_version(tensor: Tensor) -> int:
    """Return torch's count of in-place changes, without those by ``.data``; 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else tensor._version
