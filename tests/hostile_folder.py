"""A folder of modules with the names of libraries: each writes down that it was imported, and ends the process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_LIBRARIES = (
    *("_distutils_hack", "cloudpickle", "google", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "openvino"),
    *("pip", "psutil", "pydantic", "quantizer", "rich", "safetensors", "scipy", "sitecustomize", "sklearn", "submitit"),
    *("sympy", "tokenizers", "torch", "transformers", "triton", "typing_extensions", "usercustomize", "yaml"),
)


class HostileFolder:
    """The folder.

    Args:
        path: an empty folder.
        names: of the modules; None: of all libraries.
    """

    def __init__(self, path: Path, names: Sequence[str] | None = None) -> None:
        self.path = path
        self._noted = path / "imported.txt"
        for name in self.names() if names is None else names:
            (path / f"{name}.py").write_text(
                f"with open({str(self._noted)!r}, 'a') as noted: noted.write('{name} ')\nraise SystemExit('hijacked')\n"
            )

    @staticmethod
    def names() -> list[str]:
        """The names of all libraries, without what Python has before it looks at any folder."""
        return sorted((set(sys.stdlib_module_names) - set(sys.builtin_module_names)) | set(_LIBRARIES))

    @property
    def imported(self) -> list[str]:
        """The names of the modules that were imported from it."""
        return self._noted.read_text().split() if self._noted.exists() else []
