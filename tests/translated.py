"""What torch makes of a model for ONNX, kept: it takes nine tenths of a tiny run, and runs of one file repeat it.

A translation is kept by all that it may depend on: tensors, attributes and code of each module, inputs, axes, opset.
Where one differs, or cannot be read, the model is translated anew.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import quantizer.export.exporter as exporter

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Path, enum.Enum)
# Where a model was loaded from.
_OF_THE_PLACE = frozenset({"_name_or_path", "name_or_path"})


@contextmanager
def translate_once(folder: Path) -> Iterator[None]:
    """Keep each translation in a folder and take it from there, in this process and those forked from it."""
    translate = exporter._export

    def known(*given: Any) -> Any:
        import onnx_ir

        digest = _digest(given)
        if digest is None:
            return translate(*given)
        file = folder / f"{digest}.onnx"
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            onnx_ir.save(translate(*given).model, part)
            part.rename(file)
        return SimpleNamespace(model=onnx_ir.load(file))

    with mock.patch.object(exporter, "_export", known):
        yield


def _digest(values: Any) -> str | None:
    """Return a checksum of all that values hold, of their types and code too; None where some cannot be read."""
    found = hashlib.sha256()
    try:
        _Reader(lambda text: found.update(text)).read(values)
    except _UnreadableError:
        return None
    return found.hexdigest()


class _UnreadableError(Exception):
    """A value whose contents are hidden."""


class _Reader:
    """Writes values one after the other as bytes, each object once: then by the number of its first place."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__qualname__, repr(value))
            return
        if id(value) in self._seen:
            self._say("seen", self._seen[id(value)][0])
            return
        # The object is kept, or another one might get its id.
        self._seen[id(value)] = len(self._seen), value
        self._read_new(value)

    def _read_new(self, value: Any) -> None:
        match value:
            case torch.Tensor():
                self._say("tensor", value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
                self._write(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            case dict():
                self._say(type(value).__qualname__, len(value))
                for key, inner in value.items():
                    self.read(key)
                    self.read(None if key in _OF_THE_PLACE else inner)
            case list() | tuple():
                self._say(type(value).__qualname__, len(value))
                for inner in value:
                    self.read(inner)
            case set() | frozenset():
                self._say(type(value).__qualname__, sorted(map(repr, value)))
            case type() | ModuleType() | BuiltinFunctionType():
                self._say(value.__name__, getattr(value, "__module__", ""))
                self._read_class(value)
            case MethodType():
                self.read([value.__func__, value.__self__])
            case FunctionType():
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                self.read([value.__code__, value.__defaults__, value.__kwdefaults__, cells])
            case CodeType():
                self.read([value.co_name, value.co_code, value.co_names, value.co_consts])
            case _:
                self._read_object(value)

    def _read_class(self, value: Any) -> None:
        """Of a class that belongs to no file, as rewritten ones, the code as well."""
        forward = getattr(value, "forward", None)
        if isinstance(forward, FunctionType):
            self.read(forward)

    def _read_object(self, value: Any) -> None:
        """Of any other object what it would be made from again: a partial and an array hide it from their ``vars``."""
        try:
            parts = value.__reduce_ex__(4)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _UnreadableError(type(value)) from error
        self.read(type(value))
        self.read(parts if isinstance(parts, str) else [list(p) if isinstance(p, Iterator) else p for p in parts])

    def _say(self, *words: object) -> None:
        self._write(f"{words}\n".encode())
