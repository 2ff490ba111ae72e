"""How deep a user's call lies when work begins: ``make structure`` prints it, traced on a tiny module.

Frames are those of this package on the stack; a file is one whose functions get a ``RunConfig`` as an argument.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import yaml
from torch import nn

PACKAGE = Path(__file__).parents[1] / "quantizer"

_NETS = """
import frames
import torch


def build():
    torch.manual_seed(3)
    return frames.Net()


def data():
    return [torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
"""

STACKS: list[list[str]] = []
"""The package's functions on the stack at each forward pass, the outermost first."""


class Net(nn.Module):
    """A module that tells who runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 4 numbers for each row."""
        STACKS.append(stack())
        return self.down(self.up(x).relu())


def stack() -> list[str]:
    """Return this package's functions on the stack, the outermost first."""
    found, frame = [], sys._getframe(1)
    walk: FrameType | None = frame
    while walk is not None:
        if walk.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            found.append(f"{Path(walk.f_code.co_filename).relative_to(PACKAGE)}:{walk.f_code.co_name}")
        walk = walk.f_back
    return found[::-1]


@contextmanager
def _tracing(files: set[str]) -> Iterator[None]:
    """Add the files of this package whose functions are called with a ``RunConfig``."""
    from quantizer.config import RunConfig

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            names = frame.f_code.co_varnames[:count]
            if any(isinstance(frame.f_locals.get(name), RunConfig) for name in names):
                files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def traced(backend: str = "onnxruntime") -> tuple[list[str], list[str], set[str]]:
    """Return the stacks at a calibrating pass of a run and at a build, and the files that get a ``RunConfig``."""
    import quantizer
    from quantizer.cli.main import main
    from quantizer.engines import backends

    files: set[str] = set()
    builds: list[list[str]] = []
    settings = {"backend": backend, "preset": "plain"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "traced_nets.py").write_text(_NETS)
        run = {"model": {"source": "traced_nets:build", "inputs": "traced_nets:data"}, "quantizer": settings}
        (Path(folder) / "run.yaml").write_text(yaml.safe_dump({**run, "output": "out"}))
        before = os.getcwd()
        os.chdir(folder)
        try:
            with _tracing(files):
                assert main(["run", "run.yaml"]) == 0
            kind = type(backends[backend])
            build: Callable[..., Any] = kind.build

            def built(self: Any, *given: Any, **options: Any) -> Any:
                builds.append(stack())
                return build(self, *given, **options)

            with mock.patch.object(kind, "build", built):
                rows = [torch.randn(16, 16) for _ in range(2)]
                quantizer.quantize_model(Net().eval(), rows, **settings, progress=False)
        finally:
            os.chdir(before)
    calibrating = [one for one in STACKS if one[0].startswith("cli/") and any(":calibrate" in name for name in one)]
    return min(calibrating, key=len), min(builds, key=len), files


def main() -> None:
    """Print the figures."""
    warnings.simplefilter("ignore")
    pass_, build, files = traced()
    print(f"frames at a calibrating forward pass of a run    {len(pass_)}")
    print(f"frames at a build of quantize_model              {len(build)}")
    print(f"files that a RunConfig passes through            {len(files)}")
    if "-v" in sys.argv:
        print("\n".join(["", *pass_, "", *build, "", *sorted(files)]))


if __name__ == "__main__":
    # Loaded once, by whichever name.
    sys.modules["frames"] = sys.modules["__main__"]
    main()
