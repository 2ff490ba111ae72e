"""Habits that a reviewer would otherwise have to look for."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from quantizer.plan.targets import profiles

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "quantizer").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Where numbers of a format could be spelled out: there they come from numerics/formats.py.
NUMERIC = (*("numerics", "rewrite", "proxy", "observe", "plan", "algorithms", "export", "check"),)
# An exponent of float32; the columns of a batch; the seven bits of a byte of a varint; the neighbours of a block.
NO_FORMAT = (
    "tiles.py",
    "histograms.py",
    "calibrators.py",
    "weight_codes.py",
    "gptq.py",
    "onnx_storage.py",
    "openvino.py",
)
LIMITS = {127, -127, 128, -128, 255, 448, 127.5}

# Words that ruff's D401 does not know; it leaves out properties, and reads no docstring of a class or module.
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}
NO_VERBS = {"A", "All", "An", "Each", "Every", "It", "No", "Not", "One", "The", "There", "They", "Those"}


def _room(file: Path) -> str:
    return file.relative_to(ROOT).parts[1].removesuffix(".py")


def _at(file: Path, line: int, what: str) -> str:
    return f"{file.relative_to(ROOT)}:{line}: {what}"


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(_text(file))))


def _functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in _nodes(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def _silent_excepts(file: Path) -> Iterator[str]:
    for node in _nodes(file):
        if not isinstance(node, ast.ExceptHandler):
            continue
        named = ast.walk(node.type) if node.type is not None else ()
        names = {n.id for n in named if isinstance(n, ast.Name)} if node.type is not None else {"BaseException"}
        # The linter wants a reason for a broad except that hands the error on in another way.
        explained = "noqa: BLE001 - " in _text(file).splitlines()[node.lineno - 1]
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if names & {"Exception", "BaseException"} and not explained and not raises:
            yield _at(file, node.lineno, "raise again")


def test_broad_excepts_raise_again() -> None:
    assert not [found for file in FILES for found in _silent_excepts(file)]


def test_ranges_of_formats_come_from_one_file() -> None:
    files = [file for file in FILES if _room(file) in NUMERIC and file.name not in ("formats.py", *NO_FORMAT)]
    assert not [
        _at(file, node.lineno, f"take {node.value} from numerics/formats.py")
        for file in files
        for node in _nodes(file)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in LIMITS
    ]


def _forbidden(file: Path) -> Iterator[str]:
    # A command prints, and so does a script that runs in a process of its own.
    prints = file.parts[-2] == "cli" or "def main(" in _text(file)
    calls = {"eval", "exec"} if prints else {"eval", "exec", "print"}
    for node in _nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
            yield _at(file, node.lineno, f"{node.func.id}()")
        if isinstance(node, ast.Import | ast.ImportFrom):
            # The class of its errors reads nothing: copies raise it.
            if "pickle" in ast.unparse(node) and ast.unparse(node) != "from pickle import PickleError":
                yield _at(file, node.lineno, "pickle")
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                yield _at(file, node.lineno, "import *")


def test_no_pickle_no_eval_no_prints() -> None:
    assert not [found for file in FILES for found in _forbidden(file)]


def test_lines_are_short() -> None:
    """With their trailing pragmas, which the linter leaves out of its count."""
    python = [
        file for folder in ("quantizer", "tests", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    ]
    assert not [
        _at(file, number, f"{len(line)} characters")
        for file in python
        for number, line in enumerate(_text(file).splitlines(), start=1)
        if len(line) > 120
    ]


def _unclear_docstrings(file: Path) -> Iterator[str]:
    for node in _nodes(file):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        words = (ast.get_docstring(node) or "").split()
        function = isinstance(node, ast.FunctionDef) and not any(
            "property" in ast.unparse(d) for d in node.decorator_list
        )
        if words and words[0].strip(",:") in (QUESTIONS | NO_VERBS if function else QUESTIONS):
            yield _at(file, getattr(node, "lineno", 1), "begin with a verb, or a noun for a class or property")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert not [found for file in FILES for found in _unclear_docstrings(file)]


def test_the_median_function_is_short() -> None:
    assert statistics.median(_length(function) for file in FILES for function in _functions(file)) <= 12


def _unmatched(file: Path) -> Iterator[str]:
    for node in _nodes(file):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"):
            continue
        # These carry no message.
        silent = ast.unparse(node.args[0]) in ("KeyboardInterrupt", "NotImplementedError", "SystemExit")
        if not silent and not any(keyword.arg == "match" for keyword in node.keywords):
            yield _at(file, node.lineno, "raises without match")


def test_expected_errors_are_matched() -> None:
    assert not [found for file in TESTS for found in _unmatched(file)]


def test_no_model_family_is_named_in_the_core() -> None:
    """Generic by construction: what the core does must not depend on who wrote the model."""
    families = {"bert", "vit", "dinov2", "mpnet", "roberta", "eager_attention_forward", "gpt", "llama"}
    core = [file for file in FILES if _room(file) in NUMERIC]
    for file in core:
        docstrings = {id(node.value) for node in _nodes(file) if isinstance(node, ast.Expr)}
        for node in _nodes(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words = set(re.findall(r"[a-z0-9_]+", node.value.lower()))
                assert not words & families, _at(file, node.lineno, repr(node.value))


def test_a_backend_is_named_in_its_own_files_alone() -> None:
    """One from elsewhere is treated as those of the package: what depends on a backend is in its profile or engine."""
    # Defaults, what people write for a name, and who a patch was made for.
    may = ("convert.py", "describe.py", "quantizer_section.py", "request.py", "settings.py", "patches.py")
    # That of torch is also the name of the library.
    backends = set(profiles.names()) - {"torch"}
    libraries = tuple({re.split("[-_]", name)[0] for name in profiles.names()})
    for file in FILES:
        own = "targets" in file.parts or any(part.startswith(libraries) for part in file.relative_to(ROOT).parts)
        docstrings = {id(node.value) for node in _nodes(file) if isinstance(node, ast.Expr)}
        named = {
            node.value: node.lineno
            for node in _nodes(file)
            if isinstance(node, ast.Constant) and node.value in backends and id(node) not in docstrings
        }
        assert own or file.name in may or not named, _at(file, *reversed(min(named.items())))
        switches = [node for node in _nodes(file) if isinstance(node, ast.Compare | ast.Subscript | ast.MatchValue)]
        inside = [inner for node in switches for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
        assert own or not [inner for inner in inside if inner.value in named], _at(file, 1, "asks for a backend's name")


def test_no_two_test_files_share_a_name() -> None:
    # pytest imports test files by their name alone: the second of a name is not collected.
    names = [file.name for file in TESTS if file.name.startswith("test_")]
    assert not {name for name in names if names.count(name) > 1}
