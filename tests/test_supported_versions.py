"""A version of torch or transformers that is not supported ends with what is, from the metadata alone."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from torch import nn

from quantizer import Quantizer, errors
from quantizer.errors import DISTRIBUTION, UnsupportedVersionError, require_supported
from quantizer.tasks.checkpoints import transformers_package

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED = ["torch>=2.10", "torchmetrics>=1.6; extra == 'hf'", "transformers!=5.1,>=5; extra == 'hf'"]


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], asked: list[str] | None = ASKED) -> None:
    """Let the metadata say that these distributions are installed, and no others."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    errors._check_version.cache_clear()
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: {DISTRIBUTION: asked}[name])


def _distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("found", ["2.9.1", "2.9.1+cu128", "2.10.0a0+b4e4ee8", "1.13"])
def test_an_older_version_is_refused_with_what_is_supported(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    _installed(monkeypatch, {"torch": found})
    said = f"torch {found} is installed, and enginequant supports torch>=2.10: run  pip install 'torch>=2.10'"
    with pytest.raises(UnsupportedVersionError, match=f"^{re.escape(said)}$") as error:
        require_supported("torch")
    assert (error.value.package, error.value.found, error.value.supported) == ("torch", found, ">=2.10")


@pytest.mark.parametrize("found", ["2.10.0", "2.13.0+cpu", "2.15.0.dev20261101", "3.0"])
def test_supported_and_later_versions_are_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    _installed(monkeypatch, {"torch": found})
    require_supported("torch")


def test_the_range_of_an_extra_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"transformers": "5.1"})
    with pytest.raises(UnsupportedVersionError, match=r"transformers 5\.1 is installed, .* transformers!=5\.1,>=5"):
        require_supported("transformers")


def test_without_metadata_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {}, None)
    require_supported("torch")
    _installed(monkeypatch, {"torch": "1.0"}, None)
    require_supported("torch")

    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    errors._check_version.cache_clear()
    monkeypatch.setattr(metadata, "requires", requires)
    require_supported("torch")


@pytest.mark.parametrize(
    ("module", "package", "found"),
    [
        ("quantizer", "torch", "2.4.1"),
        ("quantizer.integrations.transformers.plugin", "transformers", "4.57.6"),
    ],
)
def test_an_import_ends_with_it(tmp_path: Path, module: str, package: str, found: str) -> None:
    asked = f"{package}>=999"
    _distribution(tmp_path, package, found)
    _distribution(tmp_path, DISTRIBUTION, "0.1.0", asked)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"quantizer.errors.UnsupportedVersionError: {package} {found} is installed, and enginequant supports {asked}: "
        f"run  pip install '{asked}'"
    )


def test_a_model_and_a_task_of_transformers_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"transformers": "4.57.6"})
    with pytest.raises(UnsupportedVersionError, match=r"transformers 4\.57\.6"):
        transformers_package()
    monkeypatch.delitem(sys.modules, "quantizer.algorithms.qat.callback", raising=False)
    with pytest.raises(UnsupportedVersionError, match=r"transformers 4\.57\.6"):
        importlib.import_module("quantizer.algorithms.qat.callback")
    layer = type("Layer", (nn.Linear,), {"__module__": "transformers.models.made_up"})
    quantizer = Quantizer(preset="plain", backend="openvino")
    with pytest.raises(UnsupportedVersionError, match=r"transformers 4\.57\.6"):
        quantizer.proxy(nn.Sequential(layer(2, 2)))
    quantizer.proxy(nn.Sequential(nn.Linear(2, 2)))


def test_a_page_of_pairs_says_what_is_ok_and_why_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "compat")
    page = importlib.import_module("table").page
    done = {"stage": "engine", "engine": "ok", "share": 1.0}
    patches = {"operator patches": {"refused": ["a mask"]}}
    models = {**patches, "bert": done, "vit": {**done, "share": 0.5}, "t5": {"stage": "off", "off": "other | values"}}
    pair = {
        "python": "3.9",
        "torch": "2.10.0",
        "transformers": "5.10.0",
        "day": "2026-01-01",
        "failed": "it ended",
        "rows": models,
    }
    others = {"b": {**pair, "transformers": "5.9.0", "rows": {}}, "d": {**pair, "python": "3.10", "rows": {}}}
    lines = page({"a": pair, **others}, ["a", "c"]).splitlines()
    rows = [line for line in lines if line.startswith("| 3.")]
    assert rows[0] == "| 3.9 | 2.10.0 | 5.9.0 |" + " (1) |" * 8
    assert rows[2] == "| 3.10 | 2.10.0 | 5.10.0 |" + " (1) |" * 8
    assert rows[1] == "| 3.9 | 2.10.0 | 5.10.0 | ok | (1) | (1) | 50.0% | (1) | (2) | (1) | (1) |"
    assert {"| (1) | it ended |", "| (2) | off: other / values |"} < set(lines)
    assert "| torch 2.10.0 and transformers 5.10.0 | a mask |" in lines
    assert [line for line in lines if line in ("- a", "- b", "- c")] == ["- c"]
    assert lines[-1] == "Run: 2026-01-01."


def test_packages_without_a_wheel_for_aarch64_are_named_with_those_that_need_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "compat")
    aarch64 = importlib.import_module("aarch64")
    wheels = {
        "torch": ["sympy>=1", 'triton==3; platform_system == "Linux"', 'x86; platform_machine == "x86_64"'],
        "sympy": [],
        "engine": ["of-the-engine[fast]"],
        "of-the-engine": ['speed; extra == "fast"', 'slowness; extra == "slow"'],
    }

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        there = {**wheels, "speed": []} if "--platform=linux_x86_64" in command else wheels
        lines = command[
            command.index("--platform=linux_x86_64" if "speed" in there else "--platform=linux_aarch64") + 1 :
        ]
        names = [Requirement(line).name for line in lines]
        # With a version in constraints.txt, pip says it the other way.
        why = "Cannot install" if "engine" in names else "No matching distribution found for"
        for name, line in zip(names, lines, strict=True):
            if name not in there:
                return subprocess.CompletedProcess(command, 1, "", f"ERROR: {why} {line}\n\n")
        found = [{"metadata": {"name": name, "requires_dist": there[name]}} for name in names]
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": found}), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    groups = {"dependencies": ["torch>=2"], "optional-dependencies": {"onnx": ["engine", "Seq.eval>=1"], "test": ["a"]}}
    monkeypatch.setattr(aarch64, "_PROJECT", groups)
    monkeypatch.setattr(aarch64.subprocess, "run", pip)
    aarch64.main([])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `none` | 2 |  |",
        "| `onnx` | 4 | seq-eval (nor for x86_64), speed |",
    ]


def test_pages_and_metadata_say_the_same() -> None:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    ranges = {one.name: str(one.specifier) for one in map(Requirement, lines)}
    for page in ("README.md", "docs/install.md", "docs/compatibility.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in ("torch", "transformers"):
            assert f"`{name}{ranges[name]}`" in text, f"{page} does not say {name}{ranges[name]}"


def test_a_version_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="install enginequant[hf]")
    _installed(monkeypatch, {"transformers": "5.24"})
    require_supported("transformers")
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.6")
    assert transformers_package().__name__ == "transformers"


def test_a_version_that_is_refused_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"transformers": "4.57.6"})
    with pytest.raises(UnsupportedVersionError, match=r"transformers 4\.57\.6"):
        require_supported("transformers")
    monkeypatch.setattr(metadata, "version", lambda name: "5.24")
    require_supported("transformers")


def test_a_package_that_is_installed_later_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {})
    require_supported("transformers")
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.6")
    with pytest.raises(UnsupportedVersionError, match=r"transformers 4\.57\.6"):
        require_supported("transformers")
