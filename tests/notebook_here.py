"""A notebook run in the process of the tests: a kernel of its own takes ten seconds to import what is there already."""

from __future__ import annotations

import io
import warnings
from base64 import b64encode
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_output
from traitlets.config import Config


def executed_here(path: Path) -> Any:
    """A notebook after its run from top to bottom, in the folder where it lies, with the names that it defines alone.

    Raises:
        Exception: a cell's own.
    """
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    with _shell() as shell, chdir(path.parent), warnings.catch_warnings():
        warnings.simplefilter("default")
        for count, cell in enumerate(cells, 1):
            cell.execution_count, cell.outputs = count, _run(shell, cell.source, count)
    return notebook


@contextmanager
def _shell() -> Iterator[Any]:
    """A shell with no history, and no settings of whoever runs the tests."""
    with TemporaryDirectory() as folder:
        config = Config({"HistoryManager": {"enabled": False}})
        shell = InteractiveShell.instance(ipython_dir=folder, config=config)
        shell.display_pub = CapturingDisplayPublisher()
        try:
            yield shell
        finally:
            shell.restore_sys_module_state()
            InteractiveShell.clear_instance()


def _run(shell: Any, source: str, count: int) -> list[Any]:
    """What a cell prints and shows, as a kernel would send it."""
    printed, said, shown = io.StringIO(), io.StringIO(), shell.display_pub.outputs
    shown.clear()

    def show(result: Any = None) -> None:
        if result is not None:
            data, metadata = shell.display_formatter.format(result)
            shown.append({"data": data, "metadata": metadata, "result": True})

    shell.display_trap.hook = show
    with redirect_stdout(printed), redirect_stderr(said):
        done = shell.run_cell(source)
    done.raise_error()
    streams = [("stdout", printed.getvalue()), ("stderr", said.getvalue())]
    return [
        *(new_output("stream", name=name, text=text) for name, text in streams if text),
        *(_output(one, count) for one in shown),
    ]


def _output(one: dict[str, Any], count: int) -> Any:
    encoded = {kind: b64encode(held).decode() for kind, held in one["data"].items() if isinstance(held, bytes)}
    data, metadata = one["data"] | encoded, one["metadata"] or {}
    if one.get("result"):
        return new_output("execute_result", data=data, metadata=metadata, execution_count=count)
    return new_output("display_data", data=data, metadata=metadata)
