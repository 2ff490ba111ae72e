"""The version counter of a tensor, which tells a later pass whether it was written into."""

from __future__ import annotations

from torch import Tensor

__all__ = ["tensor_version"]


def tensor_version(tensor: Tensor) -> int:
    """Return torch's count of writes into a tensor; 0 for one of inference mode, which has no count.

    A write through ``.data`` is not counted.
    """
    return 0 if tensor.is_inference() else tensor._version
