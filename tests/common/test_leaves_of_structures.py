"""Leaves of outputs and inputs in structures that torch knows and in those that it does not."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quantizer.utils.batches import own, own_tensors
from quantizer.utils.structure import fields_of, flattened, leaves, mapped


@dataclass
class Pair:
    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True)
class Fixed:
    first: Any
    second: Any = None


class Listed(list[Any]):
    pass


class Mapped(dict[str, Any]):
    pass


Named = namedtuple("Named", ["first", "second"])

STRUCTURES = [
    (1, 2),
    [1, [2]],
    {"b": 1, "a": 2},
    Pair(1, 2),
    Fixed(1, 2),
    Named(1, 2),
    Listed([1, 2]),
    Mapped(b=1, a=2),
    UserDict(b=1, a=2),
    MappingProxyType({"b": 1, "a": 2}),
    SimpleNamespace(b=1, a=2),
    Pair([1], {"x": Fixed(2, ())}),
    [Pair(1, Pair(2, ()))],
]


@pytest.mark.parametrize("value", STRUCTURES, ids=lambda value: type(value).__name__)
def test_leaves_and_back(value: Any) -> None:
    found, rebuilt = flattened(value)
    assert [leaf for leaf in found if leaf is not None] == [1, 2]
    assert leaves(value) == found
    assert rebuilt(found) == value
    doubled = mapped(lambda leaf: leaf if leaf is None else 2 * leaf, value)
    assert [leaf for leaf in leaves(doubled) if leaf is not None] == [2, 4]
    assert leaves(value) == found
    if not isinstance(value, MappingProxyType):
        assert type(doubled) is type(value)


def test_a_class_of_attrs() -> None:
    attrs = pytest.importorskip("attrs")

    @attrs.define(frozen=True)
    class Made:
        first: Any
        second: Any

    assert fields_of(Made(1, 2)) == {"first": 1, "second": 2}
    assert mapped(lambda leaf: leaf + 1, [Made(1, Made(2, 3))]) == [Made(2, Made(3, 4))]


def test_what_has_no_fields() -> None:
    for value in (Pair, nn.Linear(2, 2), torch.ones(2), {1: 2}, object(), None, "text"):
        assert fields_of(value) is None
        assert leaves(value) == [2] if isinstance(value, dict) else leaves(value)[0] is value


def test_own_copies_keep_what_is_one_tensor_one() -> None:
    x = torch.ones(3, requires_grad=True)
    holder = SimpleNamespace(inside=Pair(x, [x]))
    first, second = own((x, holder))
    assert first is second.inside.first
    assert first is second.inside.second[0]
    assert first is not x
    assert not first.requires_grad
    assert holder.inside.first is x
    own_tensors(x).sum().backward()
    assert x.grad is not None
