"""Nets of one line: what ``forward`` computes as text, and the parts that it names.

``net("self.a(x) - self.b(x * 3)", a=nn.Linear(32, 32), b=nn.Linear(32, 32))`` is a module with two linears.
"""

from __future__ import annotations

import functools
import linecache
import math
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_CLASSES: dict[str, type[nn.Module]] = {}
_KNOWN = {
    "F": functional,
    "Tensor": Tensor,
    "functools": functools,
    "math": math,
    "nn": nn,
    "torch": torch,
}
"""The names that a text may use."""


def net(text: str, inputs: str = "x", /, **parts: Any) -> nn.Module:
    """A module with these parts, whose forward returns an expression or runs lines that say what they return.

    Its class has source, as one of a notebook's cell has, and can be pickled. Tensors become buffers.
    """
    made = _class_of(text if "return " in text else f"return {text}", inputs)()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def _class_of(body: str, inputs: str) -> type[nn.Module]:
    """The class of a text, one for all modules with it."""
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    key = f"{inputs}\n{lines}"
    if key not in _CLASSES:
        # A module of its own, in which pickle finds the class.
        module = types.ModuleType(f"toy_net_{len(_CLASSES)}")
        file = f"<{module.__name__}>"
        source = f"class Net(nn.Module):\n    def forward(self, {inputs}):\n{lines}\n"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        vars(module).update(_KNOWN)
        exec(compile(source, file, "exec"), vars(module))
        sys.modules[module.__name__] = module
        _CLASSES[key] = module.Net
    return _CLASSES[key]


def linear(inputs: int = 32, outputs: int = 32, **options: Any) -> nn.Linear:
    """The linear of most nets: [..., 32] to [..., 32]."""
    return nn.Linear(inputs, outputs, **options)
