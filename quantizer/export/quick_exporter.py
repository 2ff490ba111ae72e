"""torch's exporter in half its time: no work twice, and decompositions of its own kept as they are.

The exporter decomposes a graph by tracing it anew, twice: half of the time of an export, most of it for operators of
which the graph of a transformer has always the same few, and which another operator replaces one for one. A graph with
any other operator to decompose, or with one that changes in place what others may read, is left to the exporter.

The file is the same after constants are folded, but for names of values and for shapes, which can be simpler here.

Sums of embeddings in a file: of a matrix of indices they are a Gather and a reduction.

torch writes ``embedding_bag`` as a Loop over sequences, which no engine here takes.
"""

from __future__ import annotations

import gc
import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock, get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from quantizer.errors import ExportError

_read: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What was read of each of the exporter's 500 translations, which live as long as the process, by what was asked."""

# Of two threads one would restore what the other has patched.
_one_at_a_time = RLock()


@contextmanager
def exporter_cache() -> Iterator[None]:
    """Let the exporter find out once what it would again and again.

    The signature of a translation is read from its source once in a process. The operators of torch that are made of
    others are looked up once in this context, instead of once for each library that has operators: more may be
    registered later. Where types are promoted, what stands for a result since the graph was captured is not computed
    again, as a promotion leaves its type. A release of torch that works in another way is left as it is.
    """
    with _one_at_a_time, ExitStack() as replaced:
        try:
            remembering = _remembering()
        except (ImportError, AttributeError):
            remembering = []
        for owner, name, value in remembering:
            replaced.enter_context(patch.object(owner, name, value))
        yield


def _remembering() -> list[tuple[Any, str, Any]]:
    """Return what stands for parts of the exporter: where each is, its name, and what does the same and remembers."""
    from onnxscript.values import TracedOnnxFunction
    from torch._export import utils
    from torch.onnx._internal.exporter import _schemas
    from torch.onnx._internal.fx.passes import type_promotion

    read_source = inspect.getattr_static(TracedOnnxFunction, "function_ir").fget
    read_annotations = _schemas.op_signature_from_function

    def annotations(function: Any, *args: Any, **keywords: Any) -> Any:
        asked = (args, *sorted(keywords.items()))
        return _once(function, asked, lambda: read_annotations(function, *args, **keywords))

    promoting, rule_of = type_promotion._TypePromotionInterpreter, type_promotion.get_type_promotion_rule
    run_node = promoting.run_node

    def promoted(interpreter: Any, node: Any) -> Any:
        if node.op != "call_function" or node.meta.get("val") is None:
            return run_node(interpreter, node)
        with interpreter._set_current_node(node):
            rule = rule_of(node, interpreter.type_promotion_table)
            if rule is not None:
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    source = property(lambda function: _once(function, "source", lambda: read_source(function)))
    return [
        (TracedOnnxFunction, "function_ir", source),
        (_schemas, "op_signature_from_function", annotations),
        (utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops)),
        (promoting, "run_node", promoted),
    ]


def _once(function: Any, asked: Any, read: Callable[[], Any]) -> Any:
    of_function = _read.setdefault(function, {})
    if asked not in of_function:
        of_function[asked] = read()
    return of_function[asked]


_aten = torch.ops.aten
_OF_CONVOLUTION = len(_aten.convolution.default._schema.arguments)

Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""An operator with what it is called with."""


@contextmanager
def replaced_in_place() -> Iterator[None]:
    """Let the exporter decompose no graph anew in which replacing operators is enough.

    A release of torch that works in another way is left as it is.
    """
    try:
        from torch.onnx._internal.exporter import _decomp, _fx_passes

        decompose = _fx_passes.decompose_with_registry
        translated, table_without = (
            _decomp.get_onnx_implemented_overloads,
            _decomp.create_onnx_friendly_decomposition_table,
        )
        preserved, thread = _preserved(), get_ident()
    except (ImportError, AttributeError):
        yield
        return

    def decomposed(program: Any, registry: Any) -> Any:
        if get_ident() != thread:
            # Another thread may go on with the program that it exports, which is changed here.
            return _without_restrides(decompose(program, registry))
        _without_settings(program)
        table = table_without(set(translated(registry)))
        if not all(_is_plain(node, table, preserved) for node in _nodes(program.graph_module)):
            return _without_restrides(decompose(program, registry))
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.target in _REPLACED:
                _replace(node)
        program.graph_module.recompile()
        # What the exporter makes of a reshape itself: a view.
        for known in registry.get_decomps(_aten.view.default):
            registry.register_op(_aten.reshape.default, known.onnx_function, known.is_complex)
        return program

    with patch.object(_fx_passes, "decompose_with_registry", decomposed):
        yield


def _without_settings(program: Any) -> None:
    """Replace convolutions with settings of cuDNN, which traced modules have, by those that have a translation."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is _aten._convolution.default:
            node.target, node.args = _aten.convolution.default, node.args[:_OF_CONVOLUTION]


def _without_restrides(program: Any) -> Any:
    """Return a decomposed program without what gives a tensor other strides for axes of one element alone.

    torch does so behind a pooling of channels-last images to one number a channel. In a file it would be a Gather by
    computed indices.
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target is _aten.as_strided.default and _keeps_elements(node):
            node.replace_all_uses_with(node.args[0])
            node.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _keeps_elements(node: fx.Node) -> bool:
    """Return whether a node with new strides has the elements of its operand in their places."""
    before, after = _operand(node), node.meta["val"]
    if before.dim() != after.dim() or not statically_known_true(before.storage_offset() == after.storage_offset()):
        return False
    pairs = zip(before.shape, after.shape, before.stride(), after.stride(), strict=True)
    return all(
        statically_known_true(size == new)
        and (statically_known_true(size == 1) or statically_known_true(step == next_))
        for size, new, step, next_ in pairs
    )


def _preserved() -> Collection[Any]:
    """Return the operators made of others that the exporter's own decomposition keeps as they are."""
    from torch._export.utils import _collect_all_valid_cia_ops

    return _collect_all_valid_cia_ops()


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        yield from part.graph.nodes  # type: ignore[union-attr,misc]


def _is_plain(node: fx.Node, table: Collection[Any], preserved: Collection[Any]) -> bool:
    """Return whether the exporter takes a node as it is, or as what replaces it here."""
    if node.op != "call_function":
        # Parts of a graph are attributes of it.
        return node.op != "get_attr"
    target = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)
    if target in _REPLACED:
        return "val" in node.meta and not (target in _UNLESS and _UNLESS[target](node))
    if target in _BY_STRIDES:
        return False
    kept = not _is_made_of_others(target) or target in preserved
    return not target._schema.is_mutable and target not in table and kept


def _is_made_of_others(target: OpOverload) -> bool:
    """Return whether torch computes an operator by calling others."""
    name = target.name()  # type: ignore[no-untyped-call]
    made: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return made


def _replace(node: fx.Node) -> None:
    """Replace the operator of a node; one that changes nothing goes, as translations look at what made an operand."""
    node.target, node.args, node.kwargs = _REPLACED[node.target](node)  # type: ignore[index]
    if node.target is _aten.clone.default and all(user.op != "output" for user in node.users):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)


def _same(node: fx.Node) -> Arguments:
    return _aten.clone.default, node.args[:1], {}


def _cast(node: fx.Node) -> Arguments:
    made = node.meta["val"].dtype
    if _operand(node).dtype == made:
        return _same(node)
    return _aten._to_copy.default, node.args[:1], {"dtype": made}


def _operand(node: fx.Node) -> torch.Tensor:
    """Return what stands for the first operand of a node while the graph is made."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    value: torch.Tensor = operand.meta["val"]
    return value


def _as_shaped(node: fx.Node) -> Arguments:
    """Return the operand in the shape of the result, of which at most one size is not known."""
    shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    return _aten.reshape.default, (node.args[0], shape), {}


def _reshaped(node: fx.Node) -> Arguments:
    """Return a reshape in place of a view too, which no strides rule out; the operand, if its shape stays."""
    before, after = _operand(node).shape, node.meta["val"].shape
    stays = len(before) == len(after) and all(
        statically_known_true(one == other) for one, other in zip(before, after, strict=True)
    )
    return _same(node) if stays else (_aten.reshape.default, node.args, {})


def _normalized(node: fx.Node) -> Arguments:
    """Return the first result of the exporter's own batch normalization, which is put before the node."""
    x, weight, bias, mean, variance, _, momentum, epsilon, _ = node.args
    with node.graph.inserting_before(node):
        all_three = node.graph.call_function(
            _aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, variance, momentum, epsilon)
        )
    made = node.meta["val"]
    all_three.meta = {**node.meta, "val": (made, made.new_empty(0), made.new_empty(0))}
    return operator.getitem, (all_three, 0), {}


def _trains(node: fx.Node) -> bool:
    """Return whether a batch normalization takes its statistics from the batch."""
    return len(node.args) != 9 or bool(node.args[5]) or node.args[3] is None or node.args[4] is None


def _pools_to_more(node: fx.Node) -> bool:
    return node.args[1] not in ([1, 1], 1)


def _is_seen_by_others(node: fx.Node) -> bool:
    """Return whether what a node changes in place may be read but through it, or its result would have another type."""
    changed, added = node.args if len(node.args) == 2 else (None, None)
    if not isinstance(changed, fx.Node) or not isinstance(made_by := changed.target, OpOverload):
        return True
    # What is made of others may be a view, and its schema does not say so.
    may_be_view = _is_made_of_others(made_by) or any(one.alias_info for one in made_by._schema.returns)
    kind = changed.meta["val"].dtype
    # A size is no tensor, and neither is a number; both are added to floats without another type.
    other = getattr(added.meta["val"], "dtype", None) if isinstance(added, fx.Node) else None
    keeps_type = kind.is_floating_point if other is None else other is kind
    return (may_be_view and made_by not in _NEW) or len(changed.users) != 1 or not keeps_type


def _has_unknown_sizes(node: fx.Node) -> bool:
    """Return whether -1 cannot stand for all that is not known of a shape."""
    made = node.meta["val"]
    known = [size for size in made.shape if isinstance(size, int)]
    return 0 in known or made.dim() - len(known) > 1


def _drops(node: fx.Node) -> bool:
    return bool(node.args[2])


_BY_STRIDES = (_aten.as_strided.default, _aten._unsafe_view.default, _aten.view.dtype, _aten.view_as_complex.default)
"""What depends on how its operand lies in memory, which a copy here does not keep."""

_NEW = (
    _aten.batch_norm.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.linear.default,
    _aten.matmul.default,
    _aten.max.other,
    _aten.min.other,
)
"""Operators made of others whose results nothing else reads."""

_IDENTITIES = (
    _aten.alias.default,
    _aten.contiguous.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten.dropout.default,
    _aten.lift_fresh_copy.default,
)
_CASTS = (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other)

_REPLACED: dict[OpOverload, Callable[[fx.Node], Arguments]] = {
    **dict.fromkeys(_IDENTITIES, _same),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys((_aten.flatten.using_ints, _aten.unflatten.int), _as_shaped),
    **dict.fromkeys((_aten.reshape.default, _aten.view.default), _reshaped),
    _aten.mT.default: lambda node: (_aten.transpose.int, (node.args[0], -2, -1), {}),
    _aten.__and__.Tensor: lambda node: (_aten.bitwise_and.Tensor, node.args, {}),
    _aten.__or__.Tensor: lambda node: (_aten.bitwise_or.Tensor, node.args, {}),
    _aten.min.other: lambda node: (_aten.minimum.default, node.args, {}),
    _aten.max.other: lambda node: (_aten.maximum.default, node.args, {}),
    _aten.add_.Tensor: lambda node: (_aten.add.Tensor, node.args, node.kwargs),
    _aten.adaptive_avg_pool2d.default: lambda node: (_aten.mean.dim, (node.args[0], [-1, -2], True), {}),
    _aten.batch_norm.default: _normalized,
}
"""What each operator is replaced by, which gives the same."""

_UNLESS: dict[OpOverload, Callable[[fx.Node], bool]] = {
    _aten.dropout.default: _drops,
    _aten.flatten.using_ints: _has_unknown_sizes,
    _aten.unflatten.int: _has_unknown_sizes,
    _aten.add_.Tensor: _is_seen_by_others,
    _aten.adaptive_avg_pool2d.default: _pools_to_more,
    _aten.batch_norm.default: _trains,
}
"""When an operator is not."""


_MATRIX = 2  # axes


@contextmanager
def bags_as_reductions() -> Iterator[None]:
    """Let ``torch.nn.functional.embedding_bag`` compute by ``reduced_bag`` inside the block."""
    own: Any = F.embedding_bag
    F.embedding_bag = reduced_bag
    try:
        yield
    finally:
        F.embedding_bag = own


def reduced_bag(
    input: Tensor,  # noqa: A002 - the name in torch
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the sum, mean or maximum [B, D] of embeddings [N, D] by a matrix of indices [B, L].

    The arguments are those of ``torch.nn.functional.embedding_bag``; those about gradients do not matter.
    """
    if input.dim() != _MATRIX or max_norm is not None:
        what = "with max_norm" if max_norm is not None else "of a list of indices with offsets"
        raise ExportError(
            f"embedding_bag {what} cannot be written to a file: engines take a matrix of indices [B, L], one row for "
            "each bag, without max_norm; fill shorter bags with padding_idx"
        )
    found = F.embedding(input, weight)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return found.amax(1) if mode == "max" else found.mean(1) if mode == "mean" else found.sum(1)
    kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        largest = found.masked_fill(~kept, torch.finfo(found.dtype).min).amax(1)
        return torch.where(kept.any(1), largest, torch.zeros_like(largest))
    total = found.masked_fill(~kept, 0.0).sum(1)
    return total / kept.sum(1).clamp(min=1).to(total.dtype) if mode == "mean" else total


@contextmanager
def quick_exporter() -> Iterator[None]:
    """Let the exporter find nothing out twice, trace no graph anew without need, and search for no cycles."""
    with exporter_cache(), replaced_in_place(), _without_collection():
        yield


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's search for cycles: it goes again and again through a graph that stays, 8% of an export's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
