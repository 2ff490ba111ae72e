"""Habits that a reviewer would otherwise have to look for."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "quantizer").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Where numbers of a format could be spelled out: there they come from qtype.
NUMERIC = ("numerics", "calibrators", "proxy", "sensitivity", "targets", "export", "source")
NO_FORMAT = ("histogram.py", "write.py")  # an exponent of float32; the seven bits of a byte of a varint
LIMITS = {127, -127, 128, -128, 255, 448, 127.5}


def _id(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_broad_excepts_raise_again(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = (
            {"BaseException"} if node.type is None else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
        # The linter wants a reason for a broad except that hands the error on in another way.
        explained = "noqa: BLE001 - " in lines[node.lineno - 1]
        if names & {"Exception", "BaseException"} and not explained:
            assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), f"line {node.lineno}: raise again"


@pytest.mark.parametrize(
    "file",
    [
        file
        for file in FILES
        if file.relative_to(ROOT).parts[1] in NUMERIC and file.name not in ("qtype.py", *NO_FORMAT)
    ],
    ids=_id,
)
def test_ranges_of_formats_come_from_qtype(file: Path) -> None:
    found = [
        node.lineno
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in LIMITS
    ]
    assert not found, f"lines {found}: take the limits from numerics/qtype.py"


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_no_pickle_no_eval_no_prints(file: Path) -> None:
    # A command prints, and so does a script that runs in a process of its own.
    prints = file.parts[-2] == "cli" or "def main(" in file.read_text(encoding="utf-8")
    forbidden = {"eval", "exec"} if prints else {"eval", "exec", "print"}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in forbidden, f"line {node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.unparse(node), f"line {node.lineno}"
            assert not (isinstance(node, ast.ImportFrom) and node.names[0].name == "*"), f"line {node.lineno}"


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_files_and_functions_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 450
    for function in _functions(_tree(file)):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < 60, f"{function.name}, line {function.lineno}"


def test_the_median_file_and_function_are_short() -> None:
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in FILES]
    assert statistics.median(lines) <= 120
    lengths = [(f.end_lineno or 0) - f.lineno + 1 for file in FILES for f in _functions(_tree(file))]
    assert statistics.median(lengths) <= 12


@pytest.mark.parametrize("file", TESTS, ids=_id)
def test_expected_errors_are_matched(file: Path) -> None:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
            if ast.unparse(node.args[0]) in ("KeyboardInterrupt", "NotImplementedError", "SystemExit"):
                continue  # they carry no message
            assert any(keyword.arg == "match" for keyword in node.keywords), f"line {node.lineno}: raises without match"


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_no_model_family_is_named_in_the_core(file: Path) -> None:
    """Generic by construction: what the core does must not depend on who wrote the model."""
    if file.relative_to(ROOT).parts[1] not in ("source", "proxy", "sensitivity", "numerics", "calibrators"):
        return
    tree = _tree(file)
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    families = ("bert", "vit", "dinov2", "mpnet", "roberta", "eager_attention_forward", "gpt", "llama")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words = set(re.findall(r"[a-z0-9_]+", node.value.lower()))
            assert not words & set(families), f"line {node.lineno}: {node.value!r}"
