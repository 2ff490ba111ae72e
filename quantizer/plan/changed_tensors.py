"""The check that tensors that a frozen proxy shares with the user's model have not changed since its codes were made.

Copies of all of them would take the memory of the float model again. So the proxy copies small tensors, and detects
changes of the others by torch's version counter, which every in-place operation increases, and by a checksum of a
sample, for writes through ``.data``.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.fingerprint import tensor_version
from quantizer.errors import ProxyError
from quantizer.proxy.local_hook import LocalHook

SMALL = 2**16
"""The most elements of a tensor that is copied: a bias, a normalization, the head of a classifier."""

_SAMPLE = 256


class WatchedTensor:
    """A parameter, with the version, address and checksum of a sample that it had."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path = path
        self._tensor = weakref.ref(tensor)
        self._version, self._place = tensor_version(tensor), tensor.data_ptr()
        self._sample = _sample(tensor)
        self._checksum = self._checked()

    def changed(self) -> bool:
        """Return whether the parameter is there and has other values than it had."""
        tensor = self._tensor()
        if tensor is None:
            return False
        moved = tensor_version(tensor) != self._version or tensor.data_ptr() != self._place
        return moved or self._checked() != self._checksum

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return whether a tensor is this one, with the values that it had."""
        return self._tensor() is tensor and not self.changed()

    def is_of(self, module: nn.Module, name: str) -> bool:
        """Return whether a module still has the tensor or its memory: a cast gives the module its own."""
        tensor, held = self._tensor(), dict(module._parameters.items()).get(name)
        if tensor is held or tensor is None or held is None or tensor.layout is not torch.strided:
            return held is tensor
        return held.layout is torch.strided and held.untyped_storage()._cdata == tensor.untyped_storage()._cdata

    def _checked(self) -> int:
        # Not an operation of torch: a trace would record it, and a dispatch mode would count it.
        return 0 if self._sample is None else zlib.crc32(self._sample.tobytes())


def watch(proxy: nn.Module, verb: str, wanted: Callable[[Tensor], bool]) -> None:
    """Make each module of a proxy check its own parameters when it is called, and raise if one changed."""
    checks: list[tuple[nn.Module, _Check]] = []
    for path, module in proxy.named_modules():
        watched = {
            name: WatchedTensor(f"{path}.{name}" if path else name, parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_meta and wanted(parameter)
        }
        if watched:
            checks.append((module, _Check(watched, verb)))
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(LocalHook(checks[-1][1]))
    if any(module is not proxy for module, _ in checks):
        # Other modules may read a parameter whose own module is never called; TorchScript runs no hooks of its parts.
        proxy.register_forward_pre_hook(LocalHook(partial(_check_all, checks)))


def _check_all(checks: Sequence[tuple[nn.Module, _Check]], proxy: nn.Module, args: Any) -> None:
    for module, check in checks:
        check(module, args)


class _Check:
    def __init__(self, watched: dict[str, WatchedTensor], verb: str) -> None:
        self._watched = watched
        self._verb = verb

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for name, watched in list(self._watched.items()):
            if not watched.is_of(module, name):
                del self._watched[name]
            elif watched.changed():
                raise ProxyError(
                    f"{watched.path} changed since {self._verb}(model): this proxy shares it with the model, and its "
                    f"integers are of the weights before; call {self._verb}(model) again, or take copy.deepcopy() of "
                    "the proxy before the model changes"
                )


def _sample(tensor: Tensor) -> Any:
    """Return a numpy view of elements spread over a tensor; None unless it is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    stride = max(1, len(flat) // _SAMPLE)
    return flat.view(torch.uint8).view(-1, tensor.element_size()).numpy()[::stride]
