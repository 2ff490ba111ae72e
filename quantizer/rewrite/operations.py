"""The catalogue of quantizable operations, as data: functions of torch, their operands, and their sizes.

A new operation is an entry in ``CATALOGUE``, or is added by ``register_operation``. The search compares the object that
a name refers to, so it recognizes an operation under any imported name.

The file also has a grouped matrix multiplication for graphs, because torch's ``grouped_mm`` supports only bfloat16 in a
traced graph, and has no translation to ONNX. Legend: S rows, sorted by expert; E experts; K and N as in a matrix
multiplication.

    result[s] = rows[s] @ weight[e]    for offs[e - 1] <= s < offs[e]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from quantizer.rewrite import product_sizes

# Partials, because the source of functions would be searched for sites.
input_product = partial(functional.linear)
"""``input_product(x, weight, bias)`` with x [T, B, I]: one linear for all steps."""

recurrent_product = partial(functional.linear)
"""``recurrent_product(hidden, weight, bias)`` with hidden [B, P]: one linear in each step."""


_ATEN = "torch.ops.aten."

Kind = Literal["linear", "conv", "matmul", "residual_add", "embedding", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """An operand of an operation that can be quantized.

    Attributes:
        index: its position among the arguments; None: it is computed inside the operation.
        keyword: the name of its argument in torch; None: positional only.
    """

    name: str
    index: int | None
    keyword: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A quantizable operation and all its spellings in Python code.

    Attributes:
        geometry: returns the size of a call; None: the operation has no multiply-adds.
        functions: dotted names of callables. Those of ATen are overloads, and include the operator.
        methods: names of ``Tensor`` methods; those with a trailing ``_`` work in place.
        operators: names of classes in ``ast``, such as ``MatMult`` for ``@``.
        equation: whether the first argument is an equation as in ``einsum``, which must be a literal in the source.
        bias: the argument that is added to the result, one number per channel, and is not quantized; None: no bias.
        channels: the axis of these channels in the result, from the end.
        grouped: the argument with the ends of the groups of rows, each multiplied by its own matrix, an index of the
            weight's first axis; None: no groups.
        in_graphs: the dotted name of the replacement of the function in a traced graph; None: no replacement.
        is_place: whether its calls are not sites, but may have a site for their result, see ``proxy/site.py``.
        is_gate: whether it is a place that engines compute in float. Its quantized result is useful only for a place
            that computes in integers, such as a multiplication.
        where_loaded: dotted names of callables in optional packages, which count once they are imported.
    """

    name: str
    kind: Kind
    operands: tuple[Operand, ...]
    geometry: product_sizes.GeometryOf | None = None
    functions: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    equation: bool = False
    bias: Operand | None = None
    channels: int = -1
    grouped: Operand | None = None
    in_graphs: str | None = None
    is_place: bool = False
    is_gate: bool = False
    where_loaded: tuple[str, ...] = ()


def _product(
    name: str,
    first: str,
    second: str,
    start: int = 0,
    *,
    functions: tuple[str, ...],
    methods: tuple[str, ...],
    operators: tuple[str, ...] = (),
) -> Operation:
    """Return the entry of a matrix multiplication; arguments before ``start`` are added to it and not quantized."""
    operands = (
        Operand(name="lhs", index=start, keyword=first),
        Operand(name="rhs", index=start + 1, keyword=second),
    )
    bias = Operand(name="bias", index=0, keyword="input") if start else None
    return Operation(
        name=name,
        kind="matmul",
        operands=operands,
        geometry=product_sizes.product,
        functions=functions,
        methods=methods,
        operators=operators,
        bias=bias,
    )


def _both(name: str) -> tuple[str, str]:
    """Return the spellings of a function of torch and of its ATen operator."""
    return f"torch.{name}", f"{_ATEN}{name}.default"


def _added(name: str, first: str, second: str) -> Operation:
    """Return the entry of ``f(input, first, second)``, a matrix multiplication plus ``input``, with two methods."""
    return _product(name, first, second, 1, functions=_both(name), methods=(name, f"{name}_"))


def _weighted(name: str, kind: Kind, size: product_sizes.GeometryOf, *functions: str, channels: int = -1) -> Operation:
    """Return the entry of ``f(input, weight, bias, ...)``."""
    operands = (
        Operand(name="input", index=0, keyword="input"),
        Operand(name="weight", index=1, keyword="weight"),
    )
    bias = Operand(name="bias", index=2, keyword="bias")
    return Operation(
        name=name, kind=kind, operands=operands, geometry=size, functions=functions, bias=bias, channels=channels
    )


def _convolution(name: str, size: product_sizes.GeometryOf, axes: int) -> Operation:
    overload = "input" if name in ("conv_transpose2d", "conv_transpose3d") else "default"
    return _weighted(
        name,
        "conv",
        size,
        f"torch.nn.functional.{name}",
        f"torch.{name}",
        f"{_ATEN}{name}.{overload}",
        channels=-1 - axes,
    )


def _place(
    name: str, *functions: str, methods: tuple[str, ...] = (), operators: tuple[str, ...] = (), gate: bool = False
) -> Operation:
    return Operation(
        name=name,
        kind="output",
        operands=(),
        functions=functions,
        methods=methods,
        operators=operators,
        is_place=True,
        is_gate=gate,
    )


CATALOGUE: tuple[Operation, ...] = (
    _weighted("linear", "linear", product_sizes.weighted, "torch.nn.functional.linear", f"{_ATEN}linear.default"),
    *(
        _weighted(name, "linear", product_sizes.recurrent, f"quantizer.rewrite.operations.{name}")
        for name in ("input_product", "recurrent_product")
    ),
    *(_convolution(f"conv{axes}d", product_sizes.weighted, axes) for axes in (1, 2, 3)),
    *(_convolution(f"conv_transpose{axes}d", product_sizes.transposed, axes) for axes in (1, 2, 3)),
    _product(
        "matmul",
        "input",
        "other",
        functions=_both("matmul"),
        methods=("matmul",),
        operators=("MatMult",),
    ),
    _product("mm", "input", "mat2", functions=_both("mm"), methods=("mm",)),
    _product("bmm", "input", "mat2", functions=_both("bmm"), methods=("bmm",)),
    _added("addmm", "mat1", "mat2"),
    _added("baddbmm", "batch1", "batch2"),
    _added("addbmm", "batch1", "batch2"),
    Operation(
        name="einsum",
        kind="matmul",
        operands=(Operand(name="lhs", index=1), Operand(name="rhs", index=2)),
        geometry=product_sizes.einsum,
        functions=("torch.einsum",),
        equation=True,
    ),
    Operation(
        name="grouped_mm",
        kind="matmul",
        operands=(Operand(name="input", index=0, keyword="mat_a"), Operand(name="weight", index=1, keyword="mat_b")),
        geometry=product_sizes.grouped,
        functions=("torch.nn.functional.grouped_mm", "torch._grouped_mm"),
        grouped=Operand(name="offs", index=2, keyword="offs"),
        in_graphs="quantizer.rewrite.operations.as_in_graphs",
        where_loaded=("transformers.integrations.moe._grouped_mm",),
    ),
    Operation(
        name="scaled_dot_product_attention",
        kind="matmul",
        operands=(
            Operand(name="query", index=0, keyword="query"),
            Operand(name="key", index=1, keyword="key"),
            Operand(name="probabilities", index=None),
            Operand(name="value", index=2, keyword="value"),
        ),
        geometry=product_sizes.attention,
        functions=(
            "torch.nn.functional.scaled_dot_product_attention",
            f"{_ATEN}scaled_dot_product_attention.default",
        ),
    ),
    Operation(
        name="embedding",
        kind="embedding",
        operands=(Operand(name="weight", index=1, keyword="weight"),),
        geometry=product_sizes.lookup,
        functions=("torch.nn.functional.embedding",),
    ),
    Operation(
        name="add",
        kind="residual_add",
        operands=(Operand(name="lhs", index=0, keyword="input"), Operand(name="rhs", index=1, keyword="other")),
        functions=("torch.add", f"{_ATEN}add.Tensor"),
        methods=("add", "add_"),
        operators=("Add",),
    ),
    Operation(name="output", kind="output", operands=(Operand(name="input", index=0, keyword="input"),)),
    _place("batch_norm", "torch.nn.functional.batch_norm", f"{_ATEN}batch_norm.default"),
    _place("silu", "torch.nn.functional.silu", f"{_ATEN}silu.default"),
    _place("hardswish", "torch.nn.functional.hardswish", f"{_ATEN}hardswish.default"),
    _place("mish", "torch.nn.functional.mish", f"{_ATEN}mish.default"),
    _place("hardsigmoid", "torch.nn.functional.hardsigmoid", f"{_ATEN}hardsigmoid.default", gate=True),
    _place("leaky_relu", "torch.nn.functional.leaky_relu", f"{_ATEN}leaky_relu.default"),
    _place("sigmoid", "torch.sigmoid", f"{_ATEN}sigmoid.default", methods=("sigmoid",)),
    _place("mul", "torch.mul", f"{_ATEN}mul.Tensor", operators=("Mult",)),
    _place("cat", "torch.cat", "torch.concat", f"{_ATEN}cat.default"),
    _place("avg_pool2d", "torch.nn.functional.avg_pool2d", f"{_ATEN}avg_pool2d.default"),
    _place("adaptive_avg_pool2d", "torch.nn.functional.adaptive_avg_pool2d", f"{_ATEN}adaptive_avg_pool2d.default"),
    _place("interpolate", "torch.nn.functional.interpolate"),
)


def kind_of(entry: Operation, *, weighted: bool) -> Kind:
    """Return the kind of a site; a matrix multiplication with a weight is a linear."""
    return "linear" if weighted and entry.kind == "matmul" else entry.kind


METHODS = {method: entry for entry in CATALOGUE for method in entry.methods}
"""Entries by the name of a ``Tensor`` method."""

OPERATORS = {operator: entry for entry in CATALOGUE for operator in entry.operators}
"""Entries by the name of an operator's class in ``ast``."""

_BY_NAME = {entry.name: entry for entry in CATALOGUE}
_OPTIONAL_FUNCTIONS = tuple(name for entry in CATALOGUE for name in entry.where_loaded)


def operation(name: str) -> Operation:
    """Return the entry called ``name``."""
    return _BY_NAME[name]


def register_operation(entry: Operation) -> Operation:
    """Add an operation, whose calls are sites of every new proxy.

    Raises:
        ValueError: the entry is invalid or its name or a spelling is already registered.
    """
    problem = _problem(entry)
    if problem is not None:
        raise ValueError(f"operation {entry.name!r}: {problem}")
    _BY_NAME[entry.name] = entry
    METHODS.update(dict.fromkeys(entry.methods, entry))
    _by_identity.cache_clear()
    return entry


def registered_operations() -> int:
    """Return the number of added entries; if it changes, rewritten sources are out of date."""
    return len(_BY_NAME) - len(CATALOGUE)


def _problem(entry: Operation) -> str | None:
    if entry.name in _BY_NAME:
        return "it is registered twice"
    if entry.kind not in get_args(Kind):
        return f"kind is {entry.kind!r}; expected one of {', '.join(get_args(Kind))}"
    if entry.geometry is None and entry.kind not in ("residual_add", "output"):
        return f"an operation of kind {entry.kind} needs a geometry"
    if entry.operators or any(operand.index is None for operand in entry.operands):
        return "only built-in operations may have operators, or operands without an index"
    for method in entry.methods:
        if method.endswith("_") or not hasattr(Tensor, method):
            return f"{method!r} is not a method of Tensor, or works in place; use another spelling"
    for dotted in entry.functions:
        try:
            _resolve(dotted)
        except (ImportError, AttributeError, ValueError) as error:
            return f"function {dotted!r} does not exist: {error}"
    for function in _functions(entry):
        existing = operation_of(function)
        if existing is not None:
            return f"{function.__name__!r} is a spelling of operation {existing.name!r}"
    return None


def is_fast_path_switch(function: object) -> bool:
    """Return whether torch's transformer layers call ``function`` to ask if fused kernels are allowed."""
    return function is _resolve("torch.backends.mha.get_fastpath_enabled")


def in_graphs(entry: Operation) -> Callable[..., Any] | None:
    """Return the replacement of an operation's function in a traced graph; None without one."""
    return None if entry.in_graphs is None else _resolve(entry.in_graphs)


def _resolve(dotted: str) -> Callable[..., Any]:
    module, _, attribute = dotted.rpartition(".")
    if module.startswith(_ATEN):
        # Namespaces of operators are not modules that can be imported.
        owner: Any = getattr(torch.ops.aten, module.removeprefix(_ATEN))
    else:
        owner = importlib.import_module(module)
    function: Callable[..., Any] = getattr(owner, attribute)
    return function


@lru_cache(maxsize=1)
def _by_identity(loaded: frozenset[str]) -> dict[int, Operation]:
    return {id(function): entry for entry in _BY_NAME.values() for function in _functions(entry, loaded)}


def _loaded() -> frozenset[str]:
    """Return the names of callables in imported optional packages, if their version has them."""
    places = {name: name.rpartition(".") for name in _OPTIONAL_FUNCTIONS}
    return frozenset(name for name, (module, _, own) in places.items() if hasattr(sys.modules.get(module), own))


def _functions(entry: Operation, loaded: frozenset[str] = frozenset()) -> Iterator[Callable[..., Any]]:
    for function in map(_resolve, entry.functions):
        yield function
        if isinstance(function, OpOverload):
            yield function.overloadpacket
    yield from (_resolve(name) for name in entry.where_loaded if name in loaded)
    yield from (getattr(Tensor, method) for method in entry.methods)


def operation_of(function: object) -> Operation | None:
    """Return the entry of which ``function`` is a spelling, or None."""
    return _by_identity(_loaded()).get(id(function))


_MATRIX, _EXPERTS = 2, 3  # axes of the rows, and of the weights


@torch.library.custom_op("quantizer::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return rows [S, K] multiplied by their weight of [E, K, N], [S, N]; rows after the last of ``offs`` [E] are 0."""
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for matrix, end in zip(weight.unbind(), offs.tolist(), strict=True):
        result[start:end] = rows[start:end] @ matrix
        start = end
    return result


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def as_in_graphs(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Return ``F.grouped_mm`` of the arguments for a graph: in any float type, by the operator of this package."""
    plain = all(value is None for value in others.values())
    if offs is None or not plain or mat_a.dim() != _MATRIX or mat_b.dim() != _EXPERTS:
        return F.grouped_mm(mat_a, mat_b, offs=offs, **others)
    result: Tensor = torch.ops.quantizer.grouped_mm(mat_a.to(mat_b.dtype), mat_b, offs)
    return result


def group_sizes(offs: Tensor) -> list[int]:
    """Return the number of rows of each expert, from the ends ``offs`` [E]."""
    ends: list[int] = offs.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
