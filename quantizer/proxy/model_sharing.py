"""Tensors that a proxy shares with the user's model, and hooks that copies of a proxy lose.

A proxy in training always shares its tensors: changes apply to the model. A proxy that calibrates, measures or is
frozen shares no buffers, because a forward pass may write into them.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.proxy.kept_tensors import memory_of, replace_tensors, tensors_of_functions
from quantizer.utils.fingerprint import tensor_version


class LocalHook:
    """A callable hook around a function that observes one proxy.

    If the proxy is copied or pickled, the hook loses the function, so that the objects of the function (calibrators,
    dispatch modes) are not copied.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHook:
        return LocalHook()

    def __reduce__(self) -> tuple[type[LocalHook], tuple[()]]:
        return LocalHook, ()


_MARK = "_quantizer_shares"
_TWIN = "_quantizer_twin"


class Sharing:
    """Mark in every module of a proxy that shares the user's tensors, with a reference to the proxy's root.

    A copied or pickled mark has no root, because a copy of a proxy has copies of the tensors.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        # A weak reference: a layer that outlives its proxy must not keep the proxy alive.
        self.root = None if root is None else weakref.ref(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        return Sharing()

    def __reduce__(self) -> tuple[type[Sharing], tuple[()]]:
        return Sharing, ()


class Twin:
    """Mark in every module of a proxy in training, with a reference to the model's module with the same tensors.

    A copied or pickled mark has no module, because a copy of a proxy has copies of the tensors.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        return Twin()

    def __reduce__(self) -> tuple[type[Twin], tuple[()]]:
        return Twin, ()


def share(proxy: nn.Module) -> None:
    """Mark all modules of a new proxy as sharing the tensors of the user's model."""
    sharing = Sharing(proxy)
    for module in proxy.modules():
        vars(module)[_MARK] = sharing


def share_for_good(proxy: nn.Module, model: nn.Module) -> None:
    """Make a new proxy and ``model`` share their tensors also after ``.to()``, ``.half()`` and the like."""
    twins = dict(model.named_modules())
    for path, module in proxy.named_modules():
        vars(module).pop(_MARK, None)
        if path in twins:
            vars(module)[_TWIN] = Twin(twins[path])


class OwnBuffers:
    """A proxy's own copies of the model's buffers, and of tensors in attributes of its modules.

    A pass of the proxy writes into the copies. Tensors that share memory with a parameter stay shared.
    """

    def __init__(self, proxy: nn.Module, model: nn.Module) -> None:
        modules = dict(proxy.named_modules())
        # Weak references: calibration must not keep the model alive.
        self._twins = [(modules[path], weakref.ref(twin)) for path, twin in model.named_modules()]
        self._known: dict[int, list[tuple[str, Tensor, int]]] = {}
        self.refresh()

    @torch.inference_mode(mode=False)
    def refresh(self) -> None:
        """Copy the buffers again that changed in the model, unless the proxy was cast in the meantime."""
        memo: dict[int, Any] = {}
        for place, (module, reference) in enumerate(self._twins):
            twin = reference()
            if twin is None or _MARK not in vars(module):
                continue
            # A normalization changes its statistics without a new tensor version, but its batch counter with one.
            now = [(name, tensor, tensor_version(tensor)) for name, tensor in _written_to(twin)]
            if not _same(now, self._known.get(place, [])):
                self._known[place] = now
                self._copy(module, twin, memo)

    def _copy(self, module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
        owners = (owner for proxied, _ in self._twins for owner in proxied._parameters.values())
        parameters = {_memory(owner) for owner in owners if owner is not None}
        for name, tensor in _written_to(twin):
            if _memory(tensor) not in parameters:
                holder = module._buffers if name in twin._buffers else module.__dict__
                # With one memo, tensors that share memory still share it in the copies.
                holder[name] = copy.deepcopy(tensor.detach(), memo)


def _same(now: list[tuple[str, Tensor, int]], then: list[tuple[str, Tensor, int]]) -> bool:
    return len(now) == len(then) and all(
        name == other and tensor is known and version == before
        for (name, tensor, version), (other, known, before) in zip(now, then, strict=True)
    )


def _written_to(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module that a pass may write into: all but parameters."""
    for name, value in (*module._buffers.items(), *vars(module).items()):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, value


def _memory(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory; without a plain storage, of the tensor."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        return id(tensor)
    identity: int = tensor.untyped_storage()._cdata
    return identity


def hand_back(module: nn.Module) -> None:
    """Assign the current tensors of a module to its twin, if any."""
    twin = vars(module).get(_TWIN)
    if twin is None or twin.module is None:
        return
    for name in {*twin.module._parameters.keys()} & {*module._parameters.keys()}:
        twin.module._parameters[name] = module._parameters[name]
    hand_back_buffers(module)


def hand_back_buffers(module: nn.Module) -> None:
    """Assign buffers that a pass replaced (``self.mean = ...``) to the module's twin, if any."""
    twin = vars(module).get(_TWIN)
    if twin is None or twin.module is None:
        return
    for name in {*twin.module._buffers.keys()} & {*module._buffers.keys()}:
        twin.module._buffers[name] = module._buffers[name]


def end_sharing(module: nn.Module) -> None:
    """Give the complete proxy of ``module`` its own copies of shared tensors, so that tied parameters stay tied."""
    sharing = vars(module).get(_MARK)
    if sharing is None or sharing.root is None:
        return
    root = sharing.root()
    # A layer may have been removed from its proxy, and may have outlived it.
    members = {id(member): member for member in [*(root.modules() if root is not None else ()), *module.modules()]}
    _take_own([member for member in members.values() if vars(member).pop(_MARK, None) is not None])


def take_small(proxy: nn.Module, elements: int, own: type[nn.Module]) -> None:
    """Give a proxy its own copies of all buffers and of parameters with at most ``elements`` elements.

    Larger parameters stay shared. Buffers of any size are copied, because a pass may write into them, except those of
    modules of the type ``own``: integer weights are a quarter of the model.
    """
    _take_own([module for module in proxy.modules() if not isinstance(module, own)], elements)


def _take_own(modules: list[nn.Module], elements: float = math.inf) -> None:
    """Replace the tensors of modules by copies, wherever the modules reach them; shared memory stays shared."""
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    stores = {memory_of(p): p for p in parameters if _is_plain(p) and _stored_elements(p) <= elements}
    stores.pop(None, None)
    # With the original, so that its id stays valid.
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    memories = {memory: _copied_storage(owner) for memory, owner in stores.items()}

    def twin(tensor: Tensor) -> Tensor | None:
        if id(tensor) in copies:
            return copies[id(tensor)][0]
        memory = memories.get(memory_of(tensor)) if _is_plain(tensor) else None
        if memory is None:
            return None
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        copies[id(tensor)] = _as_parameter(view, tensor), tensor
        return copies[id(tensor)][0]

    for parameter in parameters:
        if parameter.numel() <= elements and twin(parameter) is None:
            copies[id(parameter)] = _as_parameter(parameter.detach().clone(), parameter), parameter
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and twin(buffer) is None:
                copies[id(buffer)] = buffer.clone(), buffer
    shared = {memory_of(p) for p in parameters}
    # A copy of the model has the same functions, with the same tensors.
    for tensor in tensors_of_functions(modules):
        if memory_of(tensor) not in shared and twin(tensor) is None:
            copies[id(tensor)] = _as_parameter(tensor.detach().clone(), tensor), tensor
    with torch.no_grad():
        for module in modules:
            for holder in (module._parameters, module._buffers):
                own: dict[str, Any] = holder
                for name, existing in holder.items():
                    if existing is not None and (other := twin(existing)) is not None:
                        own[name] = other
        replace_tensors(modules, twin)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and memory_of(tensor) is not None and not tensor.is_neg()


def _copied_storage(tensor: Tensor) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = tensor.detach().untyped_storage().clone()  # type: ignore[no-untyped-call]
    return copied


def _stored_elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _as_parameter(value: Tensor, like: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else value
