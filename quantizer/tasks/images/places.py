"""Values of each place of an image, at another size.

Shapes: H and W the height and width that there are, h and w those that are wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def at_size(values: npt.NDArray[Any], size: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return values [H x W] at a size [h x w], each place by the nearest one."""
    given = torch.from_numpy(values)[None, None].double()
    # "nearest" takes the place at the upper left, as the resizing of most models does not.
    found = torch.nn.functional.interpolate(given, size=size, mode="nearest-exact")
    return np.asarray(found[0, 0].numpy())
