"""Operator patches: hand-written changes of a model's source, for operators that a target or the exporter rejects.

A patch names a function, a part of its source, and the replacement. It is applied in memory before the search for
sites, wherever source is rewritten: in every proxy, and in models built in a ``patched`` block. Both versions compute
the same floats, so a patch is applied for every target.

If the function's source differs from the expected one, the patch is refused and reported.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantizer.errors import SourceError
from quantizer.rewrite.names import FunctionNode, functions_in
from quantizer.rewrite.operations import registered_operations
from quantizer.rewrite.text_edits import first_line


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPatch:
    """A change of source.

    Attributes:
        name: its name in reports.
        function: ``package.module:function`` or ``package.module:Class.method``.
        before: text that occurs exactly once in the function, with the indentation of all lines but the first.
        after: its replacement, with the same number of lines, so that tracebacks stay correct.
        target: the tool that rejects the original (``tensorrt-rtx``, ``openvino``, ``onnxruntime``, ``onnx`` for the
            exporter).
        reason: the tool's message, or the wrong result.
    """

    name: str
    function: str
    before: str
    after: str
    target: str
    reason: str


@dataclass(kw_only=True, slots=True)
class PatchedText:
    """Source of a file with patches applied.

    Attributes:
        text: the source, with as many lines as before.
        applied: patches by (qualified name, first line) of the function that each changed.
        refused: why other patches were not applied.
    """

    text: str
    applied: dict[tuple[str, int], list[OperatorPatch]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class _Registered:
    """Patches by name. ``changes`` counts registrations and removals, after which source is rewritten again."""

    def __init__(self) -> None:
        self.patches: dict[str, OperatorPatch] = {}
        self.changes = 0


_REGISTERED = _Registered()


def register_operator_patch(patch: OperatorPatch) -> OperatorPatch:
    """Apply ``patch`` in every new proxy.

    Raises:
        SourceError: the patch is invalid or its name is already registered.
    """
    problem = _problem(patch)
    if problem is not None:
        raise SourceError(f"operator patch {patch.name!r}: {problem}")
    _REGISTERED.patches[patch.name] = patch
    _REGISTERED.changes += 1
    return patch


def unregister_operator_patch(name: str) -> None:
    """Remove a patch; existing proxies keep it.

    Raises:
        SourceError: there is no patch of this name.
    """
    if name not in _REGISTERED.patches:
        raise SourceError(f"unknown operator patch {name!r}; known: {', '.join(_REGISTERED.patches) or 'none'}")
    del _REGISTERED.patches[name]
    _REGISTERED.changes += 1


def operator_patches() -> Mapping[str, OperatorPatch]:
    """Return all patches, by name."""
    return dict(_REGISTERED.patches)


def changes() -> int:
    """Return the number of registrations and removals of patches and operations so far."""
    return _REGISTERED.changes + registered_operations()


def apply_operator_patches(text: str, tree: ast.Module, module_name: str) -> PatchedText:
    """Return the source of a module's file with the patches of its functions applied."""
    patches = [patch for patch in _REGISTERED.patches.values() if _split(patch)[0] == module_name]
    result = PatchedText(text=text)
    functions = list(functions_in(tree)) if patches else []
    for patch in patches:
        matches = [node for qualname, node, _ in functions if qualname == _split(patch)[1] and not _is_overload(node)]
        try:
            if len(matches) != 1:
                raise SourceError(f"expected 1 function of this name, found {len(matches)}")
            result.text = _replaced(result.text, matches[0], patch)
        except SourceError as error:
            result.refused.append(f"operator patch {patch.name!r} is refused in {patch.function}: {error}")
        else:
            result.applied.setdefault((_split(patch)[1], first_line(matches[0])), []).append(patch)
    return result


def _is_overload(node: FunctionNode) -> bool:
    """Return whether a function is only a signature, for a type checker or TorchScript."""
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def _replaced(text: str, node: FunctionNode, patch: OperatorPatch) -> str:
    lines = text.split("\n")
    body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    count = body.count(patch.before)
    if count != 1:
        times = "not found" if count == 0 else f"found {count} times"
        raise SourceError(f"{textwrap.shorten(patch.before, 80)!r} is {times}, expected once")
    lines[node.lineno - 1 : node.end_lineno] = body.replace(patch.before, patch.after).split("\n")
    changed = "\n".join(lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(changed)
    except SyntaxError as error:
        raise SourceError(f"with {textwrap.shorten(patch.after, 80)!r} it is not valid Python: {error}") from error
    return changed


def _split(patch: OperatorPatch) -> tuple[str, str]:
    module, _, function = patch.function.partition(":")
    return module, function


def _problem(patch: OperatorPatch) -> str | None:
    if patch.name in _REGISTERED.patches:
        return "the name is already registered; call unregister_operator_patch() first"
    if not all(_split(patch)):
        return f"function must be 'package.module:function', got {patch.function!r}"
    if not patch.before.strip() or patch.before == patch.after:
        return "before must not be empty, and after must differ from it"
    if patch.before.count("\n") != patch.after.count("\n"):
        lines = [text.count("\n") + 1 for text in (patch.before, patch.after)]
        return f"before has {lines[0]} lines and after {lines[1]}; use the same number, so that tracebacks stay correct"
    if not patch.reason or not patch.target:
        return "target and reason must not be empty: state which tool rejects the original, and its message"
    return None
