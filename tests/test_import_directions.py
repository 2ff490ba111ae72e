"""Who may import whom: read from the source with ``ast``, so that lazy imports inside functions count too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structure import FILES, imports, room_of

# A line may import from lines above it only.
ORDER = (
    "errors",
    "reasons",
    "common",
    "files",
    "targets",
    "numerics",
    "functional",
    "operations",
    "config",
    "qdq",
    "rewrite",
    "patches",
    "calibrators",
    "proxy",
    "float16",
    "observe",
    "plan",
    "calibration",
    "sensitivity",
    "qat",
    "export",
    "graph_check",
    "engines",
    "tasks",
    "settings",
    "causes",
    "model_session",
    "quantizer",
    "report",
    "pipeline",
    # Integrations, which nothing imports but the command line and the public names.
    "interop",
    "cli",
    "__main__",
)
RANK = {part: rank for rank, part in enumerate(ORDER)}

# Engines take a path or bytes and know no proxy; the schema does not enter the library. A report shows records: what
# computes them is below it, and knows nothing of it.
_FLOOR = ("errors", "reasons", "common", "files", "targets")
FORBIDDEN = {
    "report": {part for part in ORDER if part not in (*_FLOOR, "report")},
    "engines": {"proxy", "rewrite", "observe", "plan", "calibration", "export", "sensitivity"},
    **{
        part: {"config"}
        for part in (
            "qdq",
            "rewrite",
            "patches",
            "calibrators",
            "proxy",
            "float16",
            "observe",
            "plan",
            "calibration",
            "sensitivity",
            "qat",
            "export",
            "engines",
        )
    },
}

ROOMS = {
    "tensorrt": {"engines"},
    "tensorrt_rtx": {"engines"},
    "openvino": {"engines"},
    "onnxruntime": {"engines"},
    "onnx": {"export", "qdq", "graph_check", "engines"},
    "onnxscript": {"export"},
    "onnx_ir": {"export", "qdq", "graph_check"},
    "transformers": {"tasks", "interop", "qat"},
    "PIL": {"tasks"},
    "sklearn": {"tasks", "interop"},
    "scipy": {"tasks", "interop"},
    "datasets": {"tasks", "interop"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "mlflow": {"report"},
    "wandb": {"report"},
    "rich": {"report", "cli", "pipeline", "engines"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "nncf": set(),
}


def _against_the_order(file: Path) -> Iterator[str]:
    part = room_of(file)
    if not part:
        return
    if part not in RANK:
        yield f"{file.name}: give the new part {part} its place in ORDER"
        return
    for line, name in imports(file):
        other = name.split(".")[1] if name.startswith("quantizer.") else part
        if other == part or other.startswith("__") or other not in RANK:
            continue
        if RANK[other] >= RANK[part] or other in FORBIDDEN.get(part, ()):
            yield f"{file.name}:{line}: {part} must not import {other}"


def test_imports_go_one_way() -> None:
    assert not [found for file in FILES for found in _against_the_order(file)]


OF_ONE_ENGINE = {
    # A server's configuration repeats what ONNX Runtime is told when it loads the file.
    "pipeline/triton.py",
}


def test_what_serves_every_backend_imports_none_of_them() -> None:
    libraries = tuple(f"quantizer.engines.{name}" for name in ("onnxruntime", "openvino", "tensorrt", "torch_engine"))
    found = {
        path
        for file in FILES
        if not (path := file.as_posix().rpartition("/quantizer/")[2]).startswith("engines/")
        and any(name.startswith(libraries) for _, name in imports(file))
    }
    assert found == OF_ONE_ENGINE


def _outside_of_their_room(file: Path) -> Iterator[str]:
    for line, name in imports(file):
        top = name.partition(".")[0]
        rooms = next(
            (rooms for package, rooms in ROOMS.items() if top == package or top.startswith(f"{package}_")), None
        )
        if rooms is not None and room_of(file) not in rooms:
            yield f"{file.name}:{line}: {top} belongs in {sorted(rooms)}"


def test_heavy_imports_stay_in_their_room() -> None:
    assert not [found for file in FILES for found in _outside_of_their_room(file)]


def test_torch_does_not_enter_the_config() -> None:
    for file in FILES:
        if room_of(file) == "config":
            assert not [name for _, name in imports(file) if name.partition(".")[0] == "torch"], file


_WITHOUT = """
import importlib.abc
import sys

BLOCKED = {names!r}


class Blocker(importlib.abc.MetaPathFinder):
    # Finds what another finder finds, except for what is blocked: that is not there.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Blocker(finder) for finder in sys.meta_path]
import torch
from quantizer import Quantizer

model = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
x = torch.randn(32, 32)
q = Quantizer(preset="plain")
q.calibrate(model, [x])
amp = q.amp(model)
amp(x)
q.fallback(amp, num=0)
q.quantize(model)(x)
str(q.coverage), q.coverage._repr_html_(), str(q.ranges), str(q.sensitivity), q.diff(model)
assert not BLOCKED & {{name.partition(".")[0] for name in sys.modules}}
"""


@pytest.mark.promise("`import quantizer` needs none of the extras; a step that needs one says which.")
def test_the_library_works_without_any_optional_package() -> None:
    names = {
        *("tensorrt", "tensorrt_rtx", "openvino", "onnxruntime", "onnx", "onnxscript", "onnx_ir", "transformers"),
        *("sklearn", "scipy", "matplotlib", "jinja2", "datasets", "tokenizers", "nncf", "IPython", "ipywidgets"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _WITHOUT.format(names=names)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_heavy_library() -> None:
    names = sorted(set(ROOMS) - {"rich", "pydantic", "pydantic_core"})
    script = f"import quantizer, sys; found = set({names!r}) & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
