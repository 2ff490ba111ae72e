"""A source file whose functions are searched, rewritten and compiled."""

from __future__ import annotations
import __future__

import ast
import difflib
import linecache
import types
import warnings
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

from quantizer.errors import SourceError
from quantizer.rewrite.find_sites import find_functions
from quantizer.rewrite.operations import registered_operations
from quantizer.rewrite.operator_patches import apply_operator_patches, changes
from quantizer.rewrite.source_sites import FunctionSource, HelperCall
from quantizer.rewrite.text_edits import LineIndex, apply_edits, first_line

Key = tuple[str, int]


class SourceFile:
    """A file whose functions can be rewritten.

    Attributes:
        path: the file in the functions' code objects.
        module_name: the ``__name__`` in the globals of its functions.
        text: the original source.
        functions: every function, with its sites, by (qualified name, first line).
        refused: why operator patches for this file were not applied.
        rewritten_name: the synthetic file name under which the rewritten source is compiled and listed.

    With ``qualified``, names of sites contain the class or module of their function, for modules in which two sites
    would otherwise have the same name.
    """

    def __init__(self, path: str, namespace: dict[str, Any], flags: int = 0, *, qualified: bool = False) -> None:
        self.path = path
        self._flags = flags
        self.module_name = str(namespace.get("__name__", "?"))
        self.text = read_source(path, namespace)
        try:
            tree = _compiled(self.text, path, ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            raise SourceError(f"{path}: cannot be parsed: {error}") from error
        patched = apply_operator_patches(self.text, tree, self.module_name)
        if patched.applied:
            tree = _compiled(patched.text, path, ast.PyCF_ONLY_AST)
        # A module may also run source from elsewhere, such as code generated from an ONNX file, with its own name.
        name = self.module_name if self.module_name != "__main__" and namespace.get("__file__") == path else path
        added = registered_operations()
        again = f", patches {changes()}" if patched.applied else f", operations {added}" if added else ""
        variant = f"{', qualified' if qualified else ''}{again}"
        self.rewritten_name = f"<quantizer {name}{variant}>"
        self._index = LineIndex(patched.text)
        self._loaded = _Compilation(self.text, path, flags)
        self.functions: dict[Key, FunctionSource] = find_functions(
            tree, self._index, namespace, path, qualified, self._loaded.by_key
        )
        for key, patches in patched.applied.items():
            self.functions[key].patches = patches
        self.refused = patched.refused
        self._codes: dict[Key, types.CodeType] | None = None

    def find(self, function: types.FunctionType) -> FunctionSource:
        code = function.__code__
        key = (code.co_qualname, code.co_firstlineno)
        if not self.holds(function):
            raise SourceError(f"{self.path}: {key[0]} differs from the loaded code; was the file changed after import?")
        if key not in self.functions:
            raise SourceError(
                f"{self.path}: {key[0]} is a lambda or defined inside another function, so its operations stay in "
                "float; to quantize them, define it with def at the top of its file"
            )
        return self.functions[key]

    def holds(self, function: types.FunctionType) -> bool:
        """Return whether a function was loaded from the present source."""
        return self.holds_code(function.__code__)

    def holds_code(self, code: types.CodeType) -> bool:
        """Return whether ``code`` was compiled from the present source."""
        return self._loaded.holds(code)

    def rewritten_text(self, only: Collection[Key] | None = None) -> str:
        """Return the source with the sites of all functions, or only of ``only``, wrapped."""
        chosen = self.functions.values() if only is None else [self.functions[key] for key in only]
        return apply_edits(self._index.data, (edit for function in chosen for edit in function.edits()))

    def pass_host(self, call: HelperCall) -> None:
        """Make a call pass its host from now on."""
        if not call.active:
            call.active = True
            self._codes = None

    def code(self, key: Key) -> types.CodeType:
        """Return the compiled code of a rewritten function.

        The complete source is compiled, so that line numbers, ``super()`` and closures equal the original's. It is
        registered in ``linecache``, so that tracebacks and ``inspect.getsource`` show it.
        """
        if self._codes is None:
            text = self.rewritten_text()
            code = _compiled(text, self.rewritten_name, self._flags)
            lines = text.splitlines(keepends=True)
            # A modification time of None tells linecache.checkcache to keep the entry.
            linecache.cache[self.rewritten_name] = (len(text), None, lines, self.rewritten_name)
            self._codes = _by_key(code)
        return self._codes[key]

    def diff(self, only: Collection[Key]) -> str:
        """Return a unified diff of the original source and the source with only these functions rewritten."""
        before = self.text.splitlines(keepends=True)
        after = self.rewritten_text(only).splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.path, self.rewritten_name))


def read_source(path: str, namespace: dict[str, Any]) -> str:
    """Return the source of a file, also of a notebook cell or a zipped module (through ``linecache``)."""
    linecache.checkcache(path)
    lines = linecache.getlines(path, namespace)
    if not lines:
        raise SourceError(
            f"{path}: the source cannot be read, so its functions are not quantized; define them in a file or a "
            "notebook cell"
        )
    return "".join(lines)


def definition_of(function: types.FunctionType) -> ast.FunctionDef | None:
    """Return the ``def`` of a loaded function; None for a lambda, or if the source differs from the loaded code."""
    code = function.__code__
    text = read_source(code.co_filename, function.__globals__)
    try:
        tree = _compiled(text, code.co_filename, ast.PyCF_ONLY_AST)
        is_current = _Compilation(text, code.co_filename, future_flags(code)).holds(code)
    except SyntaxError:
        return None
    if not is_current:
        return None
    definitions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next((node for node in definitions if first_line(node) == code.co_firstlineno), None)


def future_flags(code: types.CodeType) -> int:
    """Return the compiler flags of ``code``: a notebook cell has the __future__ imports of earlier cells."""
    return code.co_flags & __future__.annotations.compiler_flag


class _Compilation:
    """Compiled functions of a source, to check whether a loaded function was compiled from it."""

    def __init__(self, text: str, path: str, flags: int) -> None:
        self._text, self._path, self._flags = text, path, flags
        self.by_key = _by_key(_compiled(text, path, flags))

    def holds(self, code: types.CodeType) -> bool:
        key = (code.co_qualname, code.co_firstlineno)
        return code == self.by_key.get(key) or code == self._singly.get(key)

    @cached_property
    def _singly(self) -> dict[Key, types.CodeType]:
        """Code of the source compiled statement by statement, as a notebook compiles a cell.

        Its bytecode differs: CPython calls ``F.relu`` in another way if the same source imports ``F``.
        """
        codes: dict[Key, types.CodeType] = {}
        for statement in _compiled(self._text, self._path, ast.PyCF_ONLY_AST).body:
            codes |= _by_key(_compiled(ast.Module([statement], []), self._path, self._flags))
        return codes


def _compiled(text: str | ast.Module, name: str, flags: int) -> Any:
    with warnings.catch_warnings():
        # Python already gave these warnings when it compiled the file, such as for a wrong escape in a string.
        warnings.simplefilter("ignore")
        return compile(text, name, "exec", flags, dont_inherit=True)


def _by_key(code: types.CodeType) -> dict[Key, types.CodeType]:
    return {(inner.co_qualname, inner.co_firstlineno): inner for inner in _codes(code)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
