"""The text of a module with a random model, while it is written.

Proxies rewrite source, so a drawn model is a file of Python. Shapes: B rows, C channels or width, T tokens, H x W.
"""

from __future__ import annotations

import itertools
import math

_HEAD = """\
from __future__ import annotations

from functools import partial

import model_blocks as blocks
import torch
import torch.nn.functional as F
from torch import nn
"""


class ModelText:
    """A class ``Made``, whose forward holds ``x`` [B, *shape] while it is written.

    Attributes:
        shape: that of one row of ``x`` now: (C,), (T, C) or (C, H, W).
        inputs: the shape of one row of each input by name; ``x`` is the first.
        vocabulary: how many ids there are where ``x`` is one of token ids; None where it is of floats.
        result: what forward returns.
        varies: all sizes of the first input but its width may be larger than drawn: forward holds none as a number.
        follows: the sizes of ``x`` but its width follow those of the first input.
        is_as_long: they are those of the first input.
    """

    def __init__(self, shape: tuple[int, ...], vocabulary: int | None = None) -> None:
        self.shape = shape
        self.inputs = {"x": shape}
        self.vocabulary = vocabulary
        self.result = "x"
        self.varies = self.follows = self.is_as_long = len(shape) > 1 or vocabulary is not None
        self._functions: dict[str, None] = {}
        self._made: list[str] = []
        self._forward: list[str] = []
        self._numbers = itertools.count()

    @property
    def width(self) -> int:
        """C: the last size of rows and sequences, the first of images."""
        return self.shape[0] if len(self.shape) == 3 else self.shape[-1]

    @width.setter
    def width(self, width: int) -> None:
        self.shape = (width, *self.shape[1:]) if len(self.shape) == 3 else (*self.shape[:-1], width)

    @property
    def size(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.shape)

    def fix_sizes(self) -> None:
        """Say that forward has a size of ``x`` as a number, beside its width."""
        self.varies = self.varies and not self.follows
        self.follows = False

    def reduce(self, shape: tuple[int, ...]) -> None:
        """Set the shape of ``x`` to one that the sizes of the first input do not change."""
        self.shape, self.follows, self.is_as_long = shape, False, False

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of ``x`` to one with sizes of its own, beside its width."""
        self.shape, self.is_as_long = shape, self.is_as_long and shape[:-1] == self.shape[:-1]

    def name(self, stem: str) -> str:
        """A name that is not taken."""
        return f"{stem}{next(self._numbers)}"

    def part(self, stem: str, value: str) -> str:
        """Give the model a part, and return how forward spells it."""
        name = f"self.{self.name(stem)}"
        self._made.append(f"{name} = {value}")
        return name

    def parameter(self, *sizes: int, scale: float | None = None) -> str:
        """A parameter with random values."""
        factor = scale if scale is not None else 1 / math.sqrt(max(1, max(sizes)))
        return self.part("weight", f"nn.Parameter(torch.randn({', '.join(map(str, sizes))}) * {factor:.3g})")

    def buffer(self, value: str, *, persistent: bool = True) -> str:
        """A registered buffer."""
        name = self.name("buffer")
        self._made.append(f"self.register_buffer({name!r}, {value}, persistent={persistent})")
        return f"self.{name}"

    def made(self, *lines: str) -> None:
        """Add lines to ``__init__``."""
        self._made += lines

    def function(self, text: str) -> None:
        """Put a function before the class, once."""
        self._functions[text] = None

    def do(self, *lines: str) -> None:
        """Add lines to ``forward``."""
        self._forward += lines

    def text(self) -> str:
        """The whole file."""
        inputs = ", ".join(self.inputs)
        body = [
            *(line for function in self._functions for line in ("", "", function)),
            "",
            "",
            "class Made(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in self._made),
            "",
            f"    def forward(self, {inputs}):",
            *(f"        {line}" for line in self._forward),
            f"        return {self.result}",
        ]
        return _HEAD + "\n".join(body) + "\n"
