"""Temporary virtual environments with one version of torch and of transformers, and this package installed in them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Environment", "environment"]

_ROOT = Path(__file__).resolve().parents[2]
# What another version of torch or transformers asks for in another version.
_FREE = ("torch", "transformers", "tokenizers", "huggingface_hub", "hf-xet", "setuptools")
_IMPORTED = ("benchmarks/compat", "benchmarks/zoo", "tests/zoo", "tests")


class Environment:
    """A virtual environment; what pip and Python print goes to a log."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._python, self._log = folder / "bin" / "python", log
        self._constraints = folder / "constraints.txt"
        self._constraints.write_text("\n".join(_constraints()) + "\n", encoding="utf-8")

    def install(self, *wanted: str) -> str | None:
        """Install packages by pip's words for them; return why not, or None."""
        options = ["--quiet", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
        return self._call("-P", "-m", "pip", "install", *options, "-c", str(self._constraints), *wanted)

    def run(self, script: Path, *arguments: str) -> str | None:
        """Run a script that may import the zoo and the tests' helpers; return why it failed, or None."""
        return self._call(str(script), *arguments)

    def _call(self, *arguments: str) -> str | None:
        paths = os.pathsep.join(str(_ROOT / path) for path in _IMPORTED)
        settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [self._python, *arguments],
                cwd=_ROOT,
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            log.write(done.stderr)
        if done.returncode == 0:
            return None
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        return said[-1][:240] if said else f"its process ended with {done.returncode}"


@contextmanager
def environment(interpreter: str, work: Path, log: Path) -> Iterator[Environment]:
    """An environment of an interpreter in a folder of ``work``, which is deleted at the end: it takes gigabytes."""
    with tempfile.TemporaryDirectory(dir=work, prefix="venv-") as folder:
        subprocess.run([interpreter, "-P", "-m", "venv", folder], check=True)
        yield Environment(Path(folder), log)


def _constraints() -> list[str]:
    lines = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.split("[=# ]", line)[0] not in ("", *_FREE)]
