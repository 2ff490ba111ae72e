"""What forwards return: dataclasses, named tuples, mappings, nested ones, outputs of transformers, several sizes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from outsiders.case import Case, noise


@dataclass
class Plain:
    """A dataclass that torch knows nothing of."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Registered:
    """A dataclass that its author registered with torch, as torch asks."""

    logits: Tensor
    hidden: Tensor


torch.export.register_dataclass(Registered, serialized_type_name="outsiders.Registered")


@dataclass
class Optional:
    """A dataclass with a field that is empty and one that is no tensor."""

    logits: Tensor
    loss: Tensor | None = None
    name: str = "classes"


@dataclass
class Output(ModelOutput):
    """An output of transformers."""

    logits: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A dataclass that cannot be changed and has no dictionary."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Outer:
    """A dataclass of others."""

    heads: dict[str, Plain]
    last: list[Fixed]


Pair = namedtuple("Pair", ["logits", "hidden"])


class _Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(32, 32), nn.Linear(32, 16), make

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.a(x))
        return self.make(self.b(hidden), hidden)


_RETURNED = {
    "dataclass": Plain,
    "registered_dataclass": Registered,
    "dataclass_with_none": lambda logits, hidden: Optional(logits),
    "fixed_dataclass": Fixed,
    "nested_dataclass": lambda logits, hidden: Outer({"head": Plain(logits, hidden)}, [Fixed(hidden, logits * 2)]),
    "dataclass_in_a_tuple": lambda logits, hidden: (logits, Plain(logits * 2, hidden)),
    "namespace": lambda logits, hidden: SimpleNamespace(logits=logits, hidden=hidden),
    "mapping_of_a_library": lambda logits, hidden: UserDict(logits=logits, hidden=hidden),
    "model_output": Output,
    "named_tuple": Pair,
    "tuple": lambda logits, hidden: (logits, hidden),
    "list": lambda logits, hidden: [logits, hidden],
    "mapping": lambda logits, hidden: {"logits": logits, "hidden": hidden},
    "ordered_mapping": lambda logits, hidden: OrderedDict(hidden=hidden, logits=logits),
    "nested": lambda logits, hidden: {"heads": [logits, (hidden, hidden * 2)], "none": None},
    "integers_too": lambda logits, hidden: (logits, logits.argmax(-1)),
    "same_twice": lambda logits, hidden: (logits, logits),
    "views": lambda logits, hidden: tuple(logits.unbind(-1))[:4],
}

CASES = {
    name: Case(net=lambda make=make: _Returns(make), batch=lambda rows: noise(rows, 7, 32))
    for name, make in _RETURNED.items()
}
