"""The notebooks of ``examples/``: run as their reader would run them, and stored with what they show.

    make gallery                              # all of them, into examples/
    python tests/gallery.py own_net           # one

What is stored goes to the documentation's site: no progress bars, no log, no codes of colours.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from example_runs import EXAMPLES, TIMEOUT_S

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_INSTALLED = re.compile(r"/\S*/site-packages/")
_WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(path: Path) -> Any:
    """A notebook after its run from top to bottom, in a kernel of its own."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    with warnings.catch_warnings():
        # Jupyter's own warnings about its transport; those of the notebook's code stay in the kernel's process.
        warnings.simplefilter("ignore")
        return client.execute()


def shown(notebook: Any) -> Any:
    """The notebook with the outputs that a reader is to see, and nothing of the machine and the time of its run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_plain(output) for output in cell.outputs if _is_shown(output)]
    return notebook


def _is_shown(output: Any) -> bool:
    if output.output_type == "stream":
        return bool(output.name == "stdout")
    return _WIDGET not in output.data


def _plain(output: Any) -> Any:
    if output.output_type == "stream":
        output.text = _INSTALLED.sub("", _COLOURS.sub("", output.text))
        return output
    output.metadata = {}
    if "image/png" in output.data:
        output.data.pop("image/jpeg", None)  # Pillow gives its pictures twice
    return output


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all, and store them with their outputs."""
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            print(path.name, flush=True)
            nbformat.write(shown(executed(path)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
