"""Who may import whom: read from the source with ``ast``, so that lazy imports inside functions count too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from structure import ARROWS, AT_THE_CALL, BOXES, FILES, arrows_of_boxes, imports, room_of

ROOMS = {
    "tensorrt": {"engines"},
    "tensorrt_rtx": {"engines"},
    "openvino": {"engines"},
    "onnxruntime": {"engines"},
    "onnx": {"export", "check", "engines"},
    "onnxscript": {"export"},
    "onnx_ir": {"export", "check"},
    "transformers": {"tasks", "integrations", "algorithms"},
    "PIL": {"tasks"},
    "sklearn": {"tasks", "integrations"},
    "scipy": {"tasks", "integrations"},
    "datasets": {"tasks", "integrations"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "mlflow": {"report"},
    "wandb": {"report"},
    "rich": {"report", "cli", "pipeline", "engines"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "nncf": set(),
}


def test_each_room_is_in_a_box() -> None:
    rooms = [room for some in BOXES.values() for room in some]
    assert sorted(rooms) == sorted({room_of(file) for file in FILES if room_of(file)})


def test_boxes_import_what_the_picture_allows() -> None:
    found = arrows_of_boxes()
    assert not {pair: places for pair, places in found.items() if pair[1] not in ARROWS[pair[0]]}
    # An arrow that nothing uses is none of the picture.
    unused = {(box, other) for box, others in ARROWS.items() for other in others} - found.keys()
    assert {pair for pair in unused if pair[0] not in ("COMMANDS", "INTEGRATIONS", "PIPELINE")} == set()


def test_the_facade_imports_an_engine_only_where_one_is_asked_for() -> None:
    for pair in AT_THE_CALL:
        for place in arrows_of_boxes()[pair]:
            name, line = place.split(":")
            (found,) = (file for file in FILES if file.as_posix().endswith(f"quantizer/{name}"))
            assert found.read_text(encoding="utf-8").splitlines()[int(line) - 1].startswith(" "), place


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
