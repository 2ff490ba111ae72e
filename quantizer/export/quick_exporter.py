"""Faster ``torch.onnx.export``: cached look-ups, and operators replaced in place instead of a second tracing.

The exporter decomposes a graph by tracing it twice, which takes half of the export time. Transformers need only a few
decompositions, each one operator for one. Graphs with other decompositions, or in-place changes, use the exporter's
own. The resulting file is the same after constant folding, except for names of values and simpler shapes.

``embedding_bag`` of a matrix of indices is exported as Gather and a reduction. torch writes a Loop, which engines
refuse.
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

_cached: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Cached signatures of the exporter's 500 translations, by function and arguments."""

# Patches of two threads would restore each other's state.
_patch_lock = RLock()


@contextmanager
def exporter_cache() -> Iterator[None]:
    """Cache torch.onnx operator signatures and decompositions during export.

    Signatures are cached for the process; composite operators for this context, because more may be registered later.
    Type promotion reuses the traced results. Unknown releases of torch are left unpatched.
    """
    with _patch_lock, ExitStack() as replaced:
        try:
            patches = _caching_patches()
        except (ImportError, AttributeError):
            patches = []
        for owner, name, value in patches:
            replaced.enter_context(patch.object(owner, name, value))
        yield


def _caching_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches: owner, attribute name, and the caching replacement."""
    from onnxscript.values import TracedOnnxFunction
    from torch._export import utils
    from torch.onnx._internal.exporter import _schemas
    from torch.onnx._internal.fx.passes import type_promotion

    read_source = inspect.getattr_static(TracedOnnxFunction, "function_ir").fget
    read_annotations = _schemas.op_signature_from_function

    def annotations(function: Any, *args: Any, **keywords: Any) -> Any:
        key = (args, *sorted(keywords.items()))
        return _once(function, key, lambda: read_annotations(function, *args, **keywords))

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


def _once(function: Any, key: Any, read: Callable[[], Any]) -> Any:
    of_function = _cached.setdefault(function, {})
    if key not in of_function:
        of_function[key] = read()
    return of_function[key]


_aten = torch.ops.aten
_OF_CONVOLUTION = len(_aten.convolution.default._schema.arguments)

Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Operator, positional arguments and keyword arguments."""


@contextmanager
def replaced_in_place() -> Iterator[None]:
    """Replace operators in the graph instead of decomposing it, where possible.

    Unknown releases of torch are left unpatched.
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
            # Another thread may still use the program, which is changed below.
            return _without_restrides(decompose(program, registry))
        _without_settings(program)
        table = table_without(set(translated(registry)))
        if not all(_is_plain(node, table, preserved) for node in _nodes(program.graph_module)):
            return _without_restrides(decompose(program, registry))
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.target in _REPLACED:
                _replace(node)
        program.graph_module.recompile()
        # The exporter translates a reshape as a view.
        for known in registry.get_decomps(_aten.view.default):
            registry.register_op(_aten.reshape.default, known.onnx_function, known.is_complex)
        return program

    with patch.object(_fx_passes, "decompose_with_registry", decomposed):
        yield


def _without_settings(program: Any) -> None:
    """Replace convolutions with cuDNN settings, as in traced modules, by the operator with a translation."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is _aten._convolution.default:
            node.target, node.args = _aten.convolution.default, node.args[:_OF_CONVOLUTION]


def _without_restrides(program: Any) -> Any:
    """Return a decomposed program without ``as_strided`` calls that only change strides of axes of size 1.

    torch adds them behind a global pooling of channels-last images. The file would contain a Gather by computed
    indices.
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target is _aten.as_strided.default and _keeps_elements(node):
            node.replace_all_uses_with(node.args[0])
            node.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _keeps_elements(node: fx.Node) -> bool:
    """Return whether a node with new strides keeps all elements of its operand in place."""
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
    """Return the composite operators that the exporter does not decompose."""
    from torch._export.utils import _collect_all_valid_cia_ops

    return _collect_all_valid_cia_ops()


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        yield from part.graph.nodes  # type: ignore[union-attr,misc]


def _is_plain(node: fx.Node, table: Collection[Any], preserved: Collection[Any]) -> bool:
    """Return whether a node needs no decomposition, or has a replacement here."""
    if node.op != "call_function":
        # Subgraphs are attributes of the graph.
        return node.op != "get_attr"
    target = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)
    if target in _REPLACED:
        return "val" in node.meta and not (target in _EXCEPTIONS and _EXCEPTIONS[target](node))
    if target in _BY_STRIDES:
        return False
    atomic = not _is_composite(target) or target in preserved
    return not target._schema.is_mutable and target not in table and atomic


def _is_composite(target: OpOverload) -> bool:
    """Return whether an operator is composite: torch computes it by calling others."""
    name = target.name()  # type: ignore[no-untyped-call]
    composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return composite


def _replace(node: fx.Node) -> None:
    """Replace the operator of a node; erase an identity, because translations look at the producer of an operand."""
    node.target, node.args, node.kwargs = _REPLACED[node.target](node)  # type: ignore[index]
    if node.target is _aten.clone.default and all(user.op != "output" for user in node.users):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)


def _same(node: fx.Node) -> Arguments:
    return _aten.clone.default, node.args[:1], {}


def _cast(node: fx.Node) -> Arguments:
    dtype = node.meta["val"].dtype
    if _operand(node).dtype == dtype:
        return _same(node)
    return _aten._to_copy.default, node.args[:1], {"dtype": dtype}


def _operand(node: fx.Node) -> torch.Tensor:
    """Return the traced value of the first operand of a node."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    value: torch.Tensor = operand.meta["val"]
    return value


def _as_shaped(node: fx.Node) -> Arguments:
    """Return a reshape to the shape of the result, in which at most one size is unknown."""
    shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    return _aten.reshape.default, (node.args[0], shape), {}


def _reshaped(node: fx.Node) -> Arguments:
    """Return a reshape, also in place of a view; an identity if the shape does not change."""
    before, after = _operand(node).shape, node.meta["val"].shape
    unchanged = len(before) == len(after) and all(
        statically_known_true(old == new) for old, new in zip(before, after, strict=True)
    )
    return _same(node) if unchanged else (_aten.reshape.default, node.args, {})


def _normalized(node: fx.Node) -> Arguments:
    """Return the first output of an inference batch normalization, which is inserted before the node."""
    x, weight, bias, mean, variance, _, momentum, epsilon, _ = node.args
    with node.graph.inserting_before(node):
        all_three = node.graph.call_function(
            _aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, variance, momentum, epsilon)
        )
    result = node.meta["val"]
    all_three.meta = {**node.meta, "val": (result, result.new_empty(0), result.new_empty(0))}
    return operator.getitem, (all_three, 0), {}


def _trains(node: fx.Node) -> bool:
    """Return whether a batch normalization takes its statistics from the batch."""
    return len(node.args) != 9 or bool(node.args[5]) or node.args[3] is None or node.args[4] is None


def _pools_to_more(node: fx.Node) -> bool:
    return node.args[1] not in ([1, 1], 1)


def _may_be_read_elsewhere(node: fx.Node) -> bool:
    """Return whether another node may read the tensor that a node changes, or the result changes type."""
    changed, added = node.args if len(node.args) == 2 else (None, None)
    if not isinstance(changed, fx.Node) or not isinstance(made_by := changed.target, OpOverload):
        return True
    # A composite operator may return a view, which its schema does not show.
    may_be_view = _is_composite(made_by) or any(returned.alias_info for returned in made_by._schema.returns)
    dtype = changed.meta["val"].dtype
    # Adding a size or a number keeps the type of a float tensor.
    added_type = getattr(added.meta["val"], "dtype", None) if isinstance(added, fx.Node) else None
    keeps_type = dtype.is_floating_point if added_type is None else added_type is dtype
    return (may_be_view and made_by not in _RETURN_NEW) or len(changed.users) != 1 or not keeps_type


def _has_unknown_sizes(node: fx.Node) -> bool:
    """Return whether -1 cannot replace all unknown sizes of a shape."""
    result = node.meta["val"]
    known = [size for size in result.shape if isinstance(size, int)]
    return 0 in known or result.dim() - len(known) > 1


def _drops(node: fx.Node) -> bool:
    return bool(node.args[2])


_BY_STRIDES = (_aten.as_strided.default, _aten._unsafe_view.default, _aten.view.dtype, _aten.view_as_complex.default)
"""Operators that depend on the memory layout of their operand, which replacements do not keep."""

_RETURN_NEW = (
    _aten.batch_norm.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.linear.default,
    _aten.matmul.default,
    _aten.max.other,
    _aten.min.other,
)
"""Composite operators that return a new tensor, not a view."""

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
"""Replacement of each operator, with equal results."""

_EXCEPTIONS: dict[OpOverload, Callable[[fx.Node], bool]] = {
    _aten.dropout.default: _drops,
    _aten.flatten.using_ints: _has_unknown_sizes,
    _aten.unflatten.int: _has_unknown_sizes,
    _aten.add_.Tensor: _may_be_read_elsewhere,
    _aten.adaptive_avg_pool2d.default: _pools_to_more,
    _aten.batch_norm.default: _trains,
}
"""Conditions under which an operator is not replaced."""


_MATRIX = 2  # axes


@contextmanager
def bags_as_reductions() -> Iterator[None]:
    """Replace ``torch.nn.functional.embedding_bag`` by ``reduced_bag`` inside the block."""
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
    """Return the sum, mean or maximum [B, D] of embeddings [N, D] selected by a matrix of indices [B, L].

    The arguments are those of ``torch.nn.functional.embedding_bag``. Arguments about gradients are ignored.
    """
    if input.dim() != _MATRIX or max_norm is not None:
        usage = "with max_norm" if max_norm is not None else "of a list of indices with offsets"
        raise ExportError(
            f"embedding_bag {usage} cannot be exported: expected a matrix of indices [B, L], one row per bag, without "
            "max_norm; pad shorter bags with padding_idx"
        )
    embedded = F.embedding(input, weight)
    if per_sample_weights is not None:
        embedded = embedded * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return embedded.amax(1) if mode == "max" else embedded.mean(1) if mode == "mean" else embedded.sum(1)
    valid = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        largest = embedded.masked_fill(~valid, torch.finfo(embedded.dtype).min).amax(1)
        return torch.where(valid.any(1), largest, torch.zeros_like(largest))
    total = embedded.masked_fill(~valid, 0.0).sum(1)
    return total / valid.sum(1).clamp(min=1).to(total.dtype) if mode == "mean" else total


@contextmanager
def quick_exporter() -> Iterator[None]:
    """Cache the exporter's look-ups, replace operators in place, and pause garbage collection."""
    with exporter_cache(), replaced_in_place(), _gc_paused():
        yield


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection, which searches the growing graph repeatedly: 8% of the export time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
