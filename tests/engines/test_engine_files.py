"""Bad paths and broken files, for every backend alike, before its library is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import BuildOptions, backend, backends, build_engine, load_engine
from quantizer.errors import EngineError, MissingDependencyError
from quantizer.utils.lazy import import_library


@pytest.fixture(params=["openvino", "onnxruntime", "tensorrt", "tensorrt-rtx"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_names() -> None:
    cpu = ["onnxruntime", "onnxruntime-avx2", "openvino", "openvino-avx2"]
    assert backends.names() == [*cpu, "tensorrt", "tensorrt-rtx", "torch", "torch-avx2", "torch-cuda"]
    assert [backend(name).name for name in backends.names()] == backends.names()


def test_importing_the_package_imports_no_engine_library() -> None:
    code = (
        "import sys, types, importlib.util\n"
        "package = types.ModuleType('quantizer')\n"
        "package.__path__ = list(importlib.util.find_spec('quantizer').submodule_search_locations)\n"
        "sys.modules['quantizer'] = package\n"
        "import quantizer.engines\n"
        "print(sorted({'torch', 'onnx', 'openvino', 'onnxruntime', 'tensorrt_rtx_bindings'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_that_loads_openvino_runs_once(tmp_path: Path) -> None:
    """OpenVINO reports its import from a process, which since Python 3.14 imports the script that started it."""
    pytest.importorskip("openvino")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from quantizer.utils.lazy import import_library\n"
        "print('began', flush=True)\n"
        "import_library('openvino', 'openvino').Core()\n"
        "print('openvino_telemetry' in sys.modules, flush=True)\n"
    )
    # It reports nothing from the servers of continuous integration.
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["began", "False"]


def test_unknown_backend(tmp_path: Path) -> None:
    message = "unknown backend 'tensort'; known: onnxruntime, onnxruntime-avx2, openvino, openvino-avx2, tensorrt, "
    with pytest.raises(EngineError, match=message):
        build_engine("tensort", tmp_path / "a.onnx", tmp_path / "a.engine")
    with pytest.raises(EngineError, match=message):
        load_engine("tensort", tmp_path / "a.engine")


@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "tensorrt-rtx"])
def test_onnx_file_damaged_inside(name: str, qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings" if name == "tensorrt-rtx" else name)
    path = tmp_path / "model.onnx"
    content = bytearray(qdq.path.read_bytes())
    content[60:160] = b"\xff" * 100
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"refused .*model\.onnx"):
        build_engine(name, path, tmp_path / "model.engine", BuildOptions(dynamic={"batch": (1, 2, 3)}))
    assert not (tmp_path / "model.engine").exists()


# The content of model.onnx (the file of a product where None stands), where the engine goes, and what is said.
BUILDS: dict[str, tuple[bytes | None, str, str]] = {
    "empty": (b"", "m.engine", r"model\.onnx is empty"),
    "text": (b"hi\n", "m.engine", "is not an ONNX file or is damaged: unexpected data at byte 0"),
    "no graph": (b"\x08\x0a", "m.engine", "contains no graph"),
    "cut in a number": (b"\x08\x0a\x3a", "m.engine", "it ends within a number"),
    "endless number": (b"\x08" + b"\xff" * 12, "m.engine", "a number at byte 11 is too long"),
    "folder missing": (None, "none/m.engine", "does not exist; create it first"),
    "a folder": (None, ".", r"is a folder; expected the name of a file, such as model\.onnx"),
    "dangling link": (None, "nowhere", "is a link to none, which does not exist"),
    "long": (None, "n" * 300, "File name too long"),
    "device": (None, "/dev/null", "is a device, a pipe or a socket"),
}


@pytest.mark.parametrize("fault", BUILDS)
def test_a_build_that_cannot_be_is_told_before_it(name: str, fault: str, qdq: Any, tmp_path: Path) -> None:
    content, place, message = BUILDS[fault]
    path = tmp_path / "model.onnx"
    path.write_bytes(qdq.path.read_bytes() if content is None else content)
    (tmp_path / "nowhere").symlink_to("none")
    with pytest.raises(EngineError, match=message):
        build_engine(name, path, tmp_path / place)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "nowhere"]


def test_files_that_are_not_there(name: str, qdq: Any, tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    with pytest.raises(EngineError, match=r"ONNX file not found: .*nothing\.onnx"):
        build_engine(name, tmp_path / "nothing.onnx", engine)
    with pytest.raises(EngineError, match="is not a file: expected the ONNX file"):
        build_engine(name, tmp_path, engine)
    (tmp_path / "cut.onnx").write_bytes(qdq.path.read_bytes()[:-100])
    with pytest.raises(EngineError, match=r"cut\.onnx is cut short: .* export or copy it again"):
        build_engine(name, tmp_path / "cut.onnx", engine)
    with pytest.raises(EngineError, match="threads is 0, expected 1 or more"):
        load_engine(name, engine, threads=0)
    with pytest.raises(EngineError, match=r"file not found: .*model\.engine"):
        load_engine(name, engine)
    engine.touch()
    with pytest.raises(EngineError, match=r"file .*model\.engine is empty"):
        load_engine(name, engine)


def test_options_that_cannot_be(qdq: Any, tmp_path: Path) -> None:
    for sizes, message in (((1, 8), r"'batch' is \[1, 8\]"), ((8, 1, 32), "<= usual <="), ((0, 1, 2), "1 <= smallest")):
        with pytest.raises(EngineError, match=message):
            BuildOptions(dynamic={"batch": sizes})
    for cpu in ("openvino", "onnxruntime"):
        pytest.importorskip(cpu)
        with pytest.raises(EngineError, match=f"{cpu} builds for the CPU: leave out compute_capability 'sm89'"):
            build_engine(cpu, qdq.path, tmp_path / "model.engine", BuildOptions(compute_capability="sm89"))


def test_output_folder_without_permission(name: str, qdq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permission bits do not stop root, who often runs tests.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(EngineError, match=r"no permission to write in .*; choose another folder"):
        build_engine(name, qdq.path, tmp_path / "model.engine")


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_bindings.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object')")
    (tmp_path / "needs_other.py").write_text("import a_module_that_is_absent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match=r"broken_bindings is installed but cannot be loaded: libnvinfer\.so\.10"):
        import_library("tensorrt", "broken_bindings")
    with pytest.raises(MissingDependencyError, match="'a_module_that_is_absent' is not installed"):
        import_library("tensorrt", "needs_other")
    with pytest.raises(MissingDependencyError, match=r"'absent_one' is not installed: .*enginequant\[tensorrt\]"):
        import_library("tensorrt", "absent_one", "absent_two")


@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "tensorrt-rtx"])
def test_weights_outside_the_models_folder(name: str, write_qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings" if name == "tensorrt-rtx" else name)
    onnx = pytest.importorskip("onnx")
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.onnx"
    model = onnx.load(write_qdq(dtype=np.float16 if name == "tensorrt-rtx" else np.float32).path)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (folder / "w.bin").replace(tmp_path / "w.bin")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "../w.bin"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"(?s)refused .*model\.onnx.*; put the weight file beside the"):
        build_engine(
            name, path, tmp_path / "a.engine", BuildOptions(dynamic={"batch": (1, 2, 3), "sequence": (1, 2, 3)})
        )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "w.bin"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "tensorrt-rtx"])
def test_a_disk_that_fills_up_during_a_build(name: str, write_qdq: Any, small_disk: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings" if name == "tensorrt-rtx" else name)
    model = write_qdq(dtype=np.float16 if name == "tensorrt-rtx" else np.float32, k=512, n=512)
    (small_disk / "a.engine").write_bytes(b"old")
    options = BuildOptions(dynamic={"batch": (1, 2, 3), "sequence": (1, 2, 3)})
    with pytest.raises(EngineError, match=r"cannot write .*a\.engine: No space left on device"):
        build_engine(name, model.path, small_disk / "a.engine", options)
    assert [entry.read_bytes() for entry in small_disk.iterdir()] == [b"old"]


def test_an_engine_does_not_replace_what_it_is_built_from(name: str, qdq: Any, tmp_path: Path) -> None:
    before = qdq.path.read_bytes()
    (tmp_path / "link.engine").symlink_to(qdq.path)
    for path in (qdq.path, tmp_path / "link.engine"):
        with pytest.raises(EngineError, match="is the ONNX file of this build"):
            build_engine(name, qdq.path, path)
    assert qdq.path.read_bytes() == before
