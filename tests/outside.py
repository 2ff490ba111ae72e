"""Scripts in processes of their own that need not import torch first, and the modules that guide pages add.

Importing torch, transformers, ONNX and this package takes most of the time of a short script, so each process is forked
from a server that has them. The server runs nothing of this package: what a script registers or patches ends with its
process.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

GUIDES = Path(__file__).parents[1] / "docs" / "extending"
_TIMEOUT_S = 600
# Libraries that start no threads: a fork has none of them. OpenVINO starts some.
_PRELOADED = (
    *("torch", "torch._dynamo", "transformers", "transformers.modeling_utils", "onnx.reference", "onnxscript"),
    *("quantizer.cli.convert", "quantizer.pipeline.run"),
)


def write_guide_module(folder: Path, page: str, *names: str) -> None:
    """Write the blocks of Python of a page as modules."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (GUIDES / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for name, block in zip(names, blocks, strict=True):
        (folder / f"{name}.py").write_text(block, encoding="utf-8")


def apply_guide_changes(folder: Path, page: str) -> list[str]:
    """Make the changes of a page's diffs in a folder, and return their files; each hunk must fit at one place."""
    blocks = re.findall(r"^```diff\n(.*?)^```$", (GUIDES / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    changed = []
    for block in blocks:
        head, *hunks = block.split("@@\n")
        (name,) = re.findall(r"^\+\+\+ (.+)$", head, flags=re.M)
        text = (folder / name).read_text(encoding="utf-8")
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            assert text.count(before) == 1, f"{page}: {before!r} is not once in {name}"
            text = text.replace(before, after)
        (folder / name).write_text(text, encoding="utf-8")
        changed.append(name)
    return changed


def run_outside(folder: Path, text: str) -> str:
    """Return what a script printed that runs in a folder and can import the modules there."""
    (folder / "outside_script.py").write_text(text, encoding="utf-8")
    return run_script(folder, "outside_script.py")


def run_script(folder: Path, name: str, *words: str) -> str:
    """Return what a script of a folder printed, run there as ``python NAME WORDS``; it must end with 0."""
    process, output = begin_script(folder, name, *words)
    process.join(_TIMEOUT_S)
    ended = process.exitcode
    process.kill()
    printed = output.read_text(encoding="utf-8")
    assert ended == 0, f"{name} {' '.join(words)} ended with {ended} (None: not in {_TIMEOUT_S} s):\n{printed}"
    return printed


def begin_script(folder: Path, name: str, *words: str) -> tuple[BaseProcess, Path]:
    """Start a script of a folder there as ``python NAME WORDS``; return its process and the file of what it prints."""
    output = folder.parent / f"{folder.name}.printed"
    process = fork_server().Process(target=_run, args=(folder, name, words, output))
    process.start()
    return process, output


def run_ranks(work: Callable[..., None], folder: Path) -> None:
    """Call ``work(rank, folder)`` in two processes of one training, or skip the test where torch has no gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    fork_server()
    torch.multiprocessing.start_processes(work, (str(folder),), nprocs=2, start_method="forkserver")


@cache
def fork_server() -> ForkServerContext:
    """Return the one that forks processes from a server with torch, transformers and ONNX in it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, "server_start"])
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search)
        forkserver.ensure_running()
    return context


def _run(folder: Path, name: str, words: tuple[str, ...], output: Path) -> None:
    """Run a script in the present process, as the interpreter would."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    # For the processes that the script starts.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    sys.argv = [name, *words]
    # Else processes that a library starts are forked from the server, too, and look for this script as their own.
    multiprocessing.set_start_method(None, force=True)
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
