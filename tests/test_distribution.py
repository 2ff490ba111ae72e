"""The name under which this package is installed: one constant, that of pyproject.toml, in every message and page."""

from __future__ import annotations

import ast
import re
import tomllib
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import quantizer
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import DISTRIBUTION, MissingDependencyError, install_command
from quantizer.report import collect_versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
EXAMPLES = [path for path in sorted((ROOT / "examples").iterdir()) if path.is_file()]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *EXAMPLES]


def test_the_name_is_that_of_the_project_file() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert f"share/doc/{DISTRIBUTION}" in PROJECT["tool"]["setuptools"]["data-files"]
    assert PROJECT["project"]["scripts"] == {"quantizer": "quantizer.cli.main:main"}


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "quantizer.__version__"}
    # setuptools reads it without importing the package, which a literal alone allows.
    tree = ast.parse((ROOT / "quantizer/__init__.py").read_text(encoding="utf-8"))
    literals = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__version__"
    ]
    assert literals == [quantizer.__version__]
    assert next(iter(collect_versions().items())) == ("quantizer", quantizer.__version__)


def test_what_is_pinned_takes_every_python_that_the_project_takes() -> None:
    # pip of another Python than the tests' own would find no version, and make demo would end before it begins.
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lines, re.MULTILINE))
    needs = {}
    for name, pin in pins.items():
        with suppress(PackageNotFoundError):
            # An environment that is older than a pin says nothing of it.
            if version(name).partition("+")[0] == pin:
                needs[name] = metadata(name).get("Requires-Python")
    assert len(needs) > len(pins) / 2
    wrong = {name: need for name, need in needs.items() if need and f"{least}.0" not in SpecifierSet(need)}
    assert not wrong, f"pin versions that take Python {least}.0"


def test_messages_name_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("onnx") == "pip install 'enginequant[onnx]'"
    assert str(MissingDependencyError("onnx", "onnx")).endswith(f"run  {install_command('onnx')}")
    here = ModuleSpec("torch", None)
    monkeypatch.setattr("quantizer.engines.for_this_cpu.find_spec", lambda name: here if name == "torch" else None)
    assert f"openvino: {install_command('openvino')}" in cpu_candidates()[1]


def test_no_message_spells_the_command_itself() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "quantizer").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"quantizer\[|enginequant\[|\"enginequant", line) and path.name != "errors.py"
    ]
    assert not wrong, "take quantizer.errors.install_command"


def test_pages_name_the_distribution_and_extras_that_there_are() -> None:
    wrong = []
    for path in PAGES:
        for name, extras in re.findall(
            r"pip install[^\n]*?'([\w./-]+)\[([\w,-]+)\]'", path.read_text(encoding="utf-8")
        ):
            if name not in (".", DISTRIBUTION) and not name.startswith(f"./{DISTRIBUTION}-{quantizer.__version__}-"):
                wrong.append(f"{path.name}: {name} is another project")
            wrong += [f"{path.name}: no extra {extra!r}" for extra in extras.split(",") if extra not in EXTRAS]
    assert not wrong


def test_each_extra_that_an_error_names_exists() -> None:
    named = set()
    for path in (ROOT / "quantizer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "MissingDependencyError" and isinstance(node.args[-1], ast.Constant):
                    named.add(node.args[-1].value)
                if node.func.id in ("import_library", "install_command") and isinstance(node.args[0], ast.Constant):
                    named.add(node.args[0].value)
    assert named >= {"onnx", "report"}
    # torch is no extra: it is always there.
    assert named - {"torch"} <= set(EXTRAS)


def test_what_is_shipped_beside_the_code_is_there() -> None:
    for files in PROJECT["tool"]["setuptools"]["data-files"].values():
        assert all((ROOT / name).is_file() for name in files)
    for pattern in PROJECT["tool"]["setuptools"]["package-data"]["quantizer"]:
        assert list((ROOT / "quantizer").glob(pattern)), f"nothing matches {pattern}"
