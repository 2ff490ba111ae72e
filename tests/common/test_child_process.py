"""No process that this package starts imports a module of the current folder, whatever lies there."""

from __future__ import annotations

import ast
import os
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hostile_folder import HostileFolder

import quantizer
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.config.sweep import SweepRun
from quantizer.engines import BuildOptions, InputSizes, load_engine, peak_memory_mib
from quantizer.engines import measure as trial
from quantizer.engines.measure import in_own_process, tried_build
from quantizer.errors import TaskError
from quantizer.pipeline.sweep import Outcome, in_jobs, in_processes
from quantizer.tasks.datasets.builtin import fetch_sdist
from quantizer.utils.child_process import child_environment, python_command, safe_children

PACKAGE = Path(quantizer.__file__).parent


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostileFolder:
    """The current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    # An empty entry stands for the current folder, and comes of  export PYTHONPATH=$PYTHONPATH:/a/folder.
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.environ.get("PYTHONPATH", ""))
    return HostileFolder(tmp_path / "here")


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def _runs(folder: Path) -> list[SweepRun]:
    """A run that starts, and fails as soon as it looks for its rows."""
    data = {"name": "text-csv", "path": str(folder / "rows.csv")}
    run = {
        "model": {"source": str(folder / "no_model"), "task": "sequence-classification"},
        "data": {"calibration": data, "evaluation": data},
        "quantizer": {"backend": "onnxruntime"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return [SweepRun("only", load_run(folder / "run.yaml"))]


def _measure_memory(file: Path) -> None:
    assert peak_memory_mib(file, "onnxruntime", sizes=InputSizes(2, 4)).peak_mib > 0


def _try_a_build(file: Path) -> None:
    assert (
        tried_build(
            "onnxruntime", file, file.with_suffix(".engine"), BuildOptions(), sizes=InputSizes(sequence=4)
        ).size_bytes
        > 0
    )


def _fetch(file: Path) -> None:
    with pytest.raises(TaskError, match="pip could not download"):
        fetch_sdist("no-such-package==1.0", "no-such-package-1.0.tar.gz", "0" * 64, file.parent / "cache")


def _sweep(file: Path) -> None:
    _carried_out(in_processes, file.parent)


def _submit(file: Path) -> None:
    pytest.importorskip("submitit", reason="pip install 'enginequant[submitit]'")
    _carried_out(in_jobs, file.parent)


def _carried_out(by: Callable[..., list[Outcome]], folder: Path) -> None:
    (folder / "swept" / "logs").mkdir(parents=True)
    (outcome,) = by(_runs(folder), folder / "swept", False, 2, lambda outcome: None)
    assert "there is no file" in str(outcome.error)


def _run_ranks(file: Path) -> None:
    """As docs/how-to/processes.md says: torchrun itself starts scripts, and modules by ``python -m``."""
    command = Path(sys.executable).with_name("quantizer")
    if not command.exists():
        pytest.skip("the command is not installed beside this Python")
    _runs(file.parent)
    words = ["--nproc-per-node", "1", "--no-python", command, "run", file.parent / "run.yaml"]
    done = subprocess.run(
        python_command("torch.distributed.run", *words),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": child_environment()["PYTHONPATH"]},
    )
    assert "there is no file" in done.stderr


@pytest.mark.parametrize(
    "start",
    [
        _measure_memory,
        _try_a_build,
        _fetch,
        _sweep,
        pytest.param(_submit, marks=pytest.mark.nightly),
        pytest.param(_run_ranks, marks=pytest.mark.nightly),
    ],
)
def test_nothing_of_the_current_folder_is_imported(
    start: Callable[[Path], None], hostile: HostileFolder, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # Tests build in their own process otherwise.
    monkeypatch.setattr(trial, "in_own_process", in_own_process)
    start(onnx_file)
    assert hostile.imported == []


def test_the_folder_is_hostile(hostile: HostileFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the current folder in it not even the interpreter starts.
    monkeypatch.delenv("PYTHONPATH")
    done = subprocess.run([sys.executable, "-c", "import multiprocessing.spawn"], capture_output=True, check=False)
    assert done.returncode != 0
    assert hostile.imported != []


# The C++ compiler takes twenty seconds.
@pytest.mark.nightly
def test_the_processes_of_the_compiler(
    hostile: HostileFolder, onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantizer.engines.torch_engine.compiled import missing_compiler

    if (reason := missing_compiler()) is not None:
        pytest.skip(reason)
    options = BuildOptions(compiled=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "in_own_process", in_own_process)
    assert tried_build("torch", onnx_file, tmp_path / "m.engine", options, sizes=InputSizes(sequence=4)).size_bytes > 0
    assert hostile.imported == []
    # What that process has built is trusted in this one, and in those that it starts.
    load_engine("torch", tmp_path / "m.engine")
    assert peak_memory_mib(tmp_path / "m.engine", "torch", sizes=InputSizes(2, 4)).peak_mib > 0


@pytest.mark.nightly
def test_modules_that_a_file_names_are_still_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They lie in the current folder, where the processes of a sweep find them as the command does."""
    (tmp_path / "mine.py").write_text("def build(): raise KeyError('mine was imported')\ndef rows(): return []\n")
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"model": {"source": "mine:build", "inputs": "mine:rows"}, "quantizer": {"backend": "torch"}})
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "run.yaml", "quantizer.sites.matmul=true,false", "--jobs", "2", "--output", "swept"]) == 1
    printed = "".join(capsys.readouterr())
    assert printed.count("mine was imported") >= 2, printed


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    with safe_children():
        assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ["PYTHONPATH"].endswith(f"{os.pathsep}/a")
    assert dict(os.environ) == before


def test_an_installed_package_is_not_put_before_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder of installed packages may hold backports with names of the standard library.
    root = str(PACKAGE.parent)
    assert root in child_environment()["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setattr(site, "getsitepackages", lambda: [root])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert child_environment()["PYTHONPATH"] == "/elsewhere"


def test_one_module_starts_all_processes() -> None:
    """Whatever starts Python otherwise would import from the current folder."""
    for file in PACKAGE.rglob("*.py"):
        if file.name == "child_process.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("multiprocessing", "concurrent.futures.process"))]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                assert called not in ("sys.executable", "os.system", "os.popen"), f"{file}: {called}"
                assert not called.startswith(("os.exec", "os.spawn", "os.posix_spawn", "os.fork")), f"{file}: {called}"


def test_benchmarks_start_processes_as_safely() -> None:
    """Scripts have their own folder first; modules, code and ``multiprocessing`` would have the current one."""
    started = 0
    for file in (PACKAGE.parent / "benchmarks").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            words = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
            plain = [word.value for word in words if isinstance(word, ast.Constant)]
            starts = "sys.executable" in map(ast.unparse, words[:1]) or plain[1:2] in (
                ["pip"],
                ["torch.distributed.run"],
            )
            if starts and {"-m", "-c"} & {*plain}:
                started += 1
                assert plain[0] == "-P", f"{file}:{node.lineno}"
        assert "get_context(" not in text or "with safe_children()" in text, file
    assert started > 0
