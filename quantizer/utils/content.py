"""SHA-256 of the content of Python objects, equal in every process: of a module with its weights and its code.

Code of the user is read as bytecode, together with the functions, classes and constants that it names. For code of an
installed package, its name and the version of the package are enough.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, range, torch.dtype, torch.device, torch.Size)
_OF_TORCH = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Attributes of every module that contain its children, parameters, hooks and the like."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SKIPPED = _OF_TORCH | {"training"}
"""Attributes that do not change what a module in eval mode computes."""


def content_digest(*values: object) -> str:
    """Return the SHA-256 (hexadecimal) of values: tensors, containers, modules, functions, classes and plain objects.

    Of an object without readable content, the type counts. Objects are followed once, also in cycles.
    """
    digest = hashlib.sha256()
    places: dict[int, int] = {}
    # Values stay referenced until the end, so that no other object gets the same id.
    followed: list[object] = []
    # A list instead of recursion, because nodes of a graph may be linked in a long chain.
    waiting: list[object] = [*reversed(values)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN):
            digest.update(f"{type(value).__qualname__} {value!r}\0".encode(errors="backslashreplace"))
        elif id(value) in places:
            digest.update(f"again {places[id(value)]}\0".encode())
        else:
            # Whether equal tuples are one object is up to Python.
            if type(value) is not tuple:
                places[id(value)] = len(places)
            followed.append(value)
            parts = list(_parts(value))
            digest.update(f"{type(value).__qualname__} {len(parts)}\0".encode())
            for part in parts:
                if isinstance(part, memoryview):
                    digest.update(part)
            waiting += reversed([part for part in parts if not isinstance(part, memoryview)])
    return digest.hexdigest()


def code_parts(code: CodeType) -> list[str]:
    """Return the bytecode, names and constants of a function, also of the functions in it."""
    inner = [part for const in code.co_consts if isinstance(const, CodeType) for part in code_parts(const)]
    constants = [_constant(const) for const in code.co_consts if not isinstance(const, CodeType)]
    return [code.co_code.hex(), repr(code.co_names), *constants, *inner]


def _constant(value: object) -> str:
    # The order of a set of strings differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _parts(value: Any) -> Iterator[object]:
    """Yield the parts of a value; bytes that are hashed as they are come as a memoryview."""
    match value:
        case Tensor():
            yield from _of_tensor(value)
        case np.ndarray():
            yield from (str(value.dtype), value.shape)
            flat = np.ascontiguousarray(value).reshape(-1)
            yield flat.tolist() if value.dtype == object else flat.view(np.uint8).data
        case nn.Module():
            yield from _of_module(value)
        case Mapping():
            yield from (part for item in value.items() for part in item)
        case list() | tuple():
            yield from value
        case set() | frozenset():
            yield from sorted(content_digest(part) for part in value)
        case partial():
            yield from (value.func, value.args, value.keywords)
        case MethodType():
            yield from (value.__func__, value.__self__)
        case FunctionType():
            yield from _of_function(value)
        case type():
            yield from _of_class(value)
        case ModuleType():
            yield value.__name__
        case _:
            yield from _of_object(value)


def _of_tensor(value: Tensor) -> Iterator[object]:
    yield from (value.dtype, tuple(value.shape), value.device.type)
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return
    flat = value.detach().cpu().contiguous().flatten()
    if type(flat) in (Tensor, nn.Parameter):
        yield flat.view(torch.uint8).numpy().data


def _of_module(module: nn.Module) -> Iterator[object]:
    yield type(module)
    yield {name: value for name, value in vars(module).items() if name not in _SKIPPED}
    yield dict(module.named_parameters(recurse=False))
    yield dict(module.named_buffers(recurse=False))
    # The keys of hooks are numbers of a process.
    yield from ([*getattr(module, name).values()] for name in _HOOKS)
    if isinstance(module, torch.jit.ScriptModule):
        yield str(getattr(module, "code", ""))
    yield dict(module.named_children())


def _of_function(function: FunctionType) -> Iterator[object]:
    yield f"{function.__module__}.{function.__qualname__}"
    if _is_installed(function.__code__.co_filename):
        yield _version(function.__module__)
        return
    yield from code_parts(function.__code__)
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        # A cell may be empty.
        yield from [] if _is_empty(cell) else [cell.cell_contents]
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _of_class(cls: type) -> Iterator[object]:
    yield f"{cls.__module__}.{cls.__qualname__}"
    yield _version(cls.__module__)
    for base in cls.__mro__[1:]:
        if base is not object:
            yield base
    for name, attribute in vars(cls).items():
        inner = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
        # A class that code generated, such as that of a torch.fx graph, is in an installed file, and its code is not.
        is_code = isinstance(inner, FunctionType) and not _is_installed(inner.__code__.co_filename)
        if is_code or (isinstance(inner, _PLAIN) and not name.startswith("__")):
            yield from (name, inner)


def _of_object(value: Any) -> Iterator[object]:
    cls = type(value)
    yield f"{cls.__module__}.{cls.__qualname__} {getattr(value, '__qualname__', '')}"
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        yield wrapped
    if is_dataclass(value):
        yield from (getattr(value, field.name, None) for field in fields(value))
    elif _is_installed(getattr(sys.modules.get(cls.__module__), "__file__", None)):
        text = repr(value)
        # Without a content, Python writes an address.
        yield None if " at 0x" in text else text
    else:
        yield from (cls, dict(getattr(value, "__dict__", {})))


_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@cache
def _is_installed(file: str | None) -> bool:
    """Return whether a file belongs to an installed package or to Python; a built-in module has none."""
    return file is None or file.startswith((*_INSTALLED, "<frozen ")) or "site-packages" in file


def _version(module: str) -> str:
    version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
    return version if isinstance(version, str) else ""
