"""Construction of a proxy: copy the modules, share their tensors, swap the classes, add the sites.

An ``ExportedProgram`` is replaced by the module that it unlifts to (``module_of``).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pickle import PickleError
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from quantizer.errors import ProxyError, require_supported
from quantizer.plan.reasons import ReasonCode
from quantizer.proxy.eager_attention import use_eager_attention
from quantizer.proxy.generated_classes import (
    REWRITER,
    as_sharer,
    leads_to_forward,
    original_class,
    reachable_in,
    rebind_kept,
    rewritten_method,
    with_forward,
)
from quantizer.proxy.kept_tensors import memory_of, reached_tensors
from quantizer.proxy.model_sharing import share
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.recurrence import add_recurrences
from quantizer.proxy.site import OUTPUT, Place, Site, SourceCall
from quantizer.rewrite import patches as _patches
from quantizer.rewrite.operations import operation
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.rewrite.source_file import Key, SourceFile
from quantizer.rewrite.source_sites import SiteSource

# The import registers the operator patches for every proxy, and for models that are instrumented in place.
del _patches

_MARK = "_quantizer_proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrewrittenSource:
    """A site whose source cannot be rewritten, or a problem of a complete module (``source`` is None)."""

    path: str
    host_type: str
    source: SiteSource | None
    reason: str

    @property
    def kind(self) -> str:
        """The kind of the site; ``source`` for a problem of a complete module."""
        return operation(self.source.operation).kind if self.source else "source"


def is_proxy(model: nn.Module) -> bool:
    """Return whether ``build_proxy`` made the model."""
    return _MARK in model.__dict__


def build_proxy(model: nn.Module, *, eager_attention: bool) -> nn.Module:
    """Return a copy of ``model`` in which a ``Site`` makes every quantizable call; all sites are off.

    Parameters, buffers and other tensors are shared. Everything else (configs, lists of modules, bound methods) is
    copied. The model itself does not change.

    Raises:
        ProxyError: ``model`` is not a module, is or contains a proxy, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise ProxyError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if is_proxy(model):
        raise ProxyError("the model is already a proxy; pass the float model that it was made from")
    for path, module in model.named_modules():
        if is_proxy(module) or isinstance(module, SourceCall):
            raise ProxyError(f"{path} is already part of a proxy; replace it by the float module that it was made from")
    proxy = _copied(model, _shared_tensors(model))
    instrument(proxy)
    for module in proxy.modules():
        if next(itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)), None) is not None:
            as_sharer(module)
    share(proxy)
    if eager_attention:
        use_eager_attention(proxy)
    return proxy


def own_copy(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model with its own tensors, whose stored functions refer to the copy."""
    return _copied(model, shared or {})


def _copied(model: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Return a copy of a model; ``copies`` is the memo of ``deepcopy``, with existing copies by id."""
    try:
        copied: nn.Module = copy.deepcopy(model, copies)
    except (TypeError, RuntimeError, PickleError) as error:
        raise ProxyError(
            f"this {type(model).__name__} cannot be copied, so no proxy of it can be made: {error}. A proxy copies the "
            "attributes of modules, except tensors; give the class a __deepcopy__ that skips this attribute"
        ) from error
    original_paths = {id(module): path for path, module in model.named_modules()}
    shared = next((original_paths[id(module)] for module in copied.modules() if id(module) in original_paths), None)
    if shared is not None:
        raise ProxyError(
            f"{shared or 'the model'} returns itself as its copy (in __deepcopy__ or __reduce_ex__), so a proxy would "
            "change the model; let it return a copy, which may share the tensors"
        )
    _copy_compiled_tensors(model, copied, copies)
    copies_of_modules = {id(module): copies[id(module)] for module in model.modules() if id(module) in copies}
    for module in copied.modules():
        # deepcopy does not copy functions, so they would still refer to the user's modules.
        rebind_kept(module, lambda value: copies_of_modules.get(id(value)))
    return copied


def _copy_compiled_tensors(model: nn.Module, copied: nn.Module, copies: dict[int, Any]) -> None:
    """Replace the tensors in copies of TorchScript modules by those in ``copies``, and copy the others.

    TorchScript copies all tensors, including shared ones, and its copy of a parameter is not a leaf.
    """
    copied_modules = dict(copied.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            for originals, own in (
                (module._parameters, copied_modules[path]._parameters),
                (module._buffers, copied_modules[path]._buffers),
            ):
                for name, tensor in originals.items():
                    if tensor is not None and (id(tensor) in copies or tensor.is_leaf):
                        own[name] = copy.deepcopy(tensor, copies)


def instrument(model: nn.Module) -> None:
    """Make a ``Site`` call every quantizable operation of ``model`` itself, in place; all sites are off.

    Parts that were instrumented before become parts of the model: paths of their sites begin at ``model``.
    """
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        require_supported("transformers")
    REWRITER.refresh()
    add_recurrences(model)
    reachable = reachable_in(model)
    for path, module in list(model.named_modules()):
        module.__dict__.pop(_MARK, None)
        rewritten = REWRITER.rewrite(original_class(module), reachable)
        cls = with_forward(rewritten.cls, reachable)
        if cls is not type(module):
            module.__class__ = cls
        for source in rewritten.sites:
            if source.reason is None:
                _attach(module, path, source)
    for module in model.modules():
        rebind_kept(module, rewritten_method)
    model.__dict__[_MARK] = True


def sites_of(proxy: nn.Module) -> Iterator[Site]:
    """Yield all sites of a proxy, in the order of its modules."""
    for module in proxy.modules():
        if isinstance(module, Site):
            yield module


def places_of(proxy: nn.Module) -> Iterator[Place]:
    """Yield all places of a proxy, in the order of its modules."""
    for module in proxy.modules():
        if isinstance(module, Place):
            yield module


def quantizers_of(proxy: nn.Module) -> list[OperandQuantizer]:
    """Return all operand quantizers of a proxy, including quantizers of single calls, in the order of its modules."""
    return [module for module in proxy.modules() if isinstance(module, OperandQuantizer)]


def skipped_sources(model: nn.Module) -> Iterator[UnrewrittenSource]:
    """Yield the sites of a model that cannot be rewritten, problems of modules, and refused patches."""
    reachable = reachable_in(model)
    refused: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if not isinstance(model.get_submodule(path.rpartition(".")[0]), torch.jit.ScriptModule):
                yield UnrewrittenSource(
                    path=path, host_type=module.original_name, source=None, reason=ReasonCode.SCRIPTED.text()
                )
            continue
        rewritten = REWRITER.rewrite(original_class(module), reachable)
        name = rewritten.original.__name__
        for source in rewritten.sites:
            if source.reason is not None and not operation(source.operation).is_place:
                yield UnrewrittenSource(
                    path=_join(path, source.name), host_type=name, source=source, reason=source.reason
                )
        problems = [*rewritten.problems, *(message for message in rewritten.refused if message not in refused)]
        refused.update(rewritten.refused)
        for attribute, value in vars(module).items():
            if attribute == "forward" and not leads_to_forward(value, module):
                problems.append(ReasonCode.REPLACED_FORWARD.text())
            elif REWRITER.holds_sites(value):
                problems.append(ReasonCode.KEPT_FUNCTION.text(name=attribute))
        for problem in problems:
            yield UnrewrittenSource(path=path, host_type=name, source=None, reason=problem)


def source_diff(model: nn.Module) -> str:
    """Return a unified diff, original to rewritten source, of all functions that a proxy of ``model`` replaces."""
    return "".join(file.diff(keys) for file, keys in _rewritten_functions(model))


def applied_patches(model: nn.Module) -> tuple[OperatorPatch, ...]:
    """Return the operator patches in the source of a proxy of ``model``, ordered by name."""
    patches = {
        patch for file, keys in _rewritten_functions(model) for key in keys for patch in file.functions[key].patches
    }
    return tuple(sorted(patches, key=lambda patch: patch.name))


def exportable(model: nn.Module) -> nn.Module:
    """Return a float model, or its proxy with quantizers off if the exporter needs operator patches in its source.

    A proxy, or a part of one, has the patches already.
    """
    if any(is_proxy(module) or isinstance(module, SourceCall) for module in model.modules()):
        return model
    is_patched = any(patch.target == "onnx" for patch in applied_patches(model))
    return build_proxy(model, eager_attention=False) if is_patched else model


def _rewritten_functions(model: nn.Module) -> Iterator[tuple[SourceFile, list[Key]]]:
    reachable = reachable_in(model)
    keys = {key for module in model.modules() for key in REWRITER.rewrite(original_class(module), reachable).keys}
    files = {file.rewritten_name: file for file in REWRITER.files()}
    for name in sorted({name for name, _ in keys}):
        yield files[name], sorted(key for owner, key in keys if owner == name)


def _shared_tensors(model: nn.Module) -> dict[int, Any]:
    """Return a memo with which ``copy.deepcopy`` shares tensors instead of copying them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
        memo.update({id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)})
    # In nested attributes, only parameters and tensors of the same memory are shared.
    parameters = {memory_of(parameter) for parameter in model.parameters()} - {None}
    for tensor in reached_tensors(model.modules()):
        if memory_of(tensor) in parameters or not tensor.is_leaf:
            memo[id(tensor)] = tensor
    return memo


def _attach(module: nn.Module, path: str, source: SiteSource) -> None:
    existing = module._modules.get(source.attribute)
    if isinstance(existing, SourceCall):
        existing.path = _join(path, source.name)
        for inner in existing.children():
            if isinstance(inner, Site):
                inner.path = f"{existing.path}.{OUTPUT}"
        return
    if hasattr(module, source.attribute):
        raise ProxyError(
            f"{path or 'the model'} ({type(module).__name__}) has an attribute {source.attribute!r}, which is the name "
            f"of a site; rename the attribute"
        )
    kind = Place if operation(source.operation).is_place else Site
    site = kind(source, _join(path, source.name))
    site.train(module.training)
    module.add_module(source.attribute, site)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


Model: TypeAlias = nn.Module | ExportedProgram
"""A model that a ``Quantizer`` accepts."""

_MODULES: WeakKeyDictionary[ExportedProgram, nn.Module] = WeakKeyDictionary()


def module_of(model: Model) -> nn.Module:
    """Return the module of an ``ExportedProgram``, the same at each call, with its parameter names; or the module.

    The checks of the program's guards are removed, because they restrict the data to the shapes of the examples.
    """
    if not isinstance(model, ExportedProgram):
        refuse_compiled(model)
        return model
    if model not in _MODULES:
        _MODULES[model] = _with_named_convolutions(model.module(check_guards=False))
    return _MODULES[model]


def refuse_compiled(model: object) -> None:
    """Raise for a TorchScript model, because TorchScript has no source; parts of a model may be TorchScript."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ProxyError(
            f"{model.original_name} is compiled by torch.jit and has no Python source to quantize: pass the module "
            "that was scripted or traced"
        )


def _with_named_convolutions(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``aten.convolution``, which ``run_decompositions`` makes, by the operators of its kinds."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.convolution.default:
            node.target, node.args = _named_convolution(*node.args)
    module.recompile()
    return module


def _named_convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, added: Any, groups: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return operator and arguments for a call of ``aten.convolution``; ``added``: the output padding."""
    axes = len(stride)
    if not transposed:
        return getattr(torch.ops.aten, f"conv{axes}d").default, (x, weight, bias, stride, padding, dilation, groups)
    overloads = getattr(torch.ops.aten, f"conv_transpose{axes}d")
    function = overloads.default if axes == 1 else overloads.input
    return function, (x, weight, bias, stride, padding, added, groups, dilation)
