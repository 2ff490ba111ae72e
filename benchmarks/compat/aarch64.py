"""Which packages of each extra have no wheel for Linux on aarch64, by the index alone: nothing is installed or run.

    python benchmarks/compat/aarch64.py [EXTRA]...

Packages that an extra needs are followed through the metadata of their wheels, with the versions of
``constraints.txt``; the CUDA packages of torch are left out, since its CPU build needs none of them. A package without
a wheel for x86_64 either is installed from its source on both.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_DEVELOPMENT = ("test", "lint", "bench", "docs", "mutation")
_CUDA = re.compile("cuda-|nvidia-|triton$")
_PYTHON = "3.11"
_GLIBC = range(17, 37)  # 2.17 is that of manylinux2014, 2.36 that of Debian 12
_MARKERS = {
    "platform_machine": "aarch64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
    "python_version": _PYTHON,
    "python_full_version": f"{_PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
_wheels: dict[tuple[str, str], list[str] | None] = {}
"""By requirement and machine: what the wheel that pip takes requires, or None where there is no wheel."""


def main(extras: list[str]) -> None:
    groups = {"none": _PROJECT["dependencies"], **_PROJECT["optional-dependencies"]}
    print(f"| extra | packages | without a wheel for aarch64 and Python {_PYTHON} |\n|---|---|---|")
    for extra in extras or [name for name in groups if name not in _DEVELOPMENT]:
        packages = _needed(groups[extra])
        without = {name: line for name, line in packages.items() if _wheels[line, "aarch64"] is None}
        _ask(without.values(), "x86_64")
        named = [
            name if _wheels[line, "x86_64"] is not None else f"{name} (nor for x86_64)"
            for name, line in without.items()
        ]
        print(f"| `{extra}` | {len(packages)} | {', '.join(named)} |", flush=True)


def _needed(lines: Iterable[str]) -> dict[str, str]:
    """Return the requirements that pip would meet on aarch64, by name."""
    packages: dict[str, str] = {}
    level = [(Requirement(line), "") for line in lines]
    while level:
        needs = {}
        for need, extra in level:
            name = canonicalize_name(need.name)
            of_torch_for_gpus = "torch" in packages and _CUDA.match(name)
            applies = not need.marker or need.marker.evaluate(_MARKERS | {"extra": extra})
            if applies and name not in packages and not of_torch_for_gpus:
                needs[name] = need
        packages |= {name: f"{need.name}{need.specifier}" for name, need in needs.items()}
        _ask([packages[name] for name in needs], "aarch64")
        level = [
            (Requirement(line), extra)
            for name, need in needs.items()
            for line in _wheels[packages[name], "aarch64"] or ()
            for extra in ("", *need.extras)
        ]
    return packages


def _ask(lines: Iterable[str], machine: str) -> None:
    """Have pip look for wheels, all at once, and again without those that it does not find."""
    lines = [line for line in lines if (line, machine) not in _wheels]
    platforms = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in _GLIBC), "linux"]
    while lines:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
            command += ["--no-deps", "--only-binary=:all:", "--use-feature=fast-deps", "--python-version", _PYTHON]
            command += ["--target", folder, "--report", str(report), "-c", str(_ROOT / "constraints.txt")]
            command += [f"--platform={platform}_{machine}" for platform in platforms]
            done = subprocess.run([*command, *lines], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found = [one["metadata"] for one in json.loads(report.read_text(encoding="utf-8"))["install"]]
                requires = {canonicalize_name(one["name"]): one.get("requires_dist", []) for one in found}
                for line in lines:
                    _wheels[line, machine] = requires[canonicalize_name(Requirement(line).name)]
                return
        missing = re.search(r"(?:No matching distribution found for|Cannot install) ([^\s,]+)", done.stderr)
        if missing is None:
            raise SystemExit(f"pip could not look for {' '.join(lines)}:\n{done.stderr}")
        name = canonicalize_name(Requirement(missing[1]).name)
        for line in [line for line in lines if canonicalize_name(Requirement(line).name) == name]:
            lines.remove(line)
            _wheels[line, machine] = None


if __name__ == "__main__":
    main(sys.argv[1:])
