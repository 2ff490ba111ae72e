"""The page of versions: a line for each pair, a column for each model, and the reasons of what is not ok."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["page", "supported"]

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_TITLES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "vit": "ViT",
    "gpt2": "GPT-2",
    "t5": "T5",
    "llama": "Llama",
    "whisper": "Whisper",
}
_VERSIONS = ("python", "torch", "transformers")
_ALL = 0.9995  # printed as 100.0%
_HEAD = """# Versions

<!-- Made by `make compat`: change benchmarks/compat, not this page. -->

Supported are Python {python}, {torch} and, for its models, {transformers}.
The metadata of the package says the same, so pip keeps to it. `import quantizer` with another torch ends with an error
that names the version found, the supported ones and the command; so does the first use of another transformers: a proxy
of one of its models, a task, the plug-in. Later versions than those of the table are not refused.

Each line is an environment of its own with these versions of Python, torch and transformers, the other packages as in
`constraints.txt`, and this package installed. Each model is a tiny random one: a proxy that is off gives its outputs
bit for bit; it is calibrated with two batches and quantized for OpenVINO; what was saved and loaded, by the package and
by `save_pretrained`, gives the same outputs bit for bit; the ONNX file is built and run by OpenVINO, with an SQNR of at
least 20 dB against the quantized model. `ok` says that all of this holds and all multiply-adds are in sites; a share is
that of those that are.
"""
_PYTHONS = """
## Later versions of Python

Rewriting reads the source and the code objects of a model, which differ between versions of Python. The tests of
`make test` ran with the packages of `constraints.txt`, and torch as it is on PyPI, without a GPU. Each package with a
wheel for Python 3.11 has one for 3.14.

| Python | folders of `tests` | passed | skipped | day |
|---|---|---|---|---|
| 3.12.1 | `rewrite`, `proxy`, `plan`, `calibration`, `export`, `config` | 3,755 | 4 | 2026-12-01 |
| 3.13.0 | all | 9,708 | 26 | 2026-12-01 |
| 3.14.8 | all | 9,728 | 24 | 2026-12-01 |

- Tests are skipped for packages that `make test` does not install, such as timm, and for syntax of a later Python.
- 24 tests failed with Python 3.14 in their first run and are counted as passed, since they passed alone afterwards:
  after changes of the package and the tests, with the headers of Python where the compiler finds them, and one of them
  only with `GLIBC_TUNABLES=glibc.rtld.execstack=2`, see below.
- In Python 3.13.0, `torch.compile` warns that it may run slower.
- In Python 3.14, a script that imports OpenVINO itself, before `quantizer` does, runs twice: OpenVINO reports its
  import from a process of `multiprocessing`, which imports the script. Put its code below
  `if __name__ == "__main__":`.
- glibc 2.43, with which Python 3.14 ran, refuses the compiled graph of the torch backend: "cannot enable executable
  stack". `GLIBC_TUNABLES=glibc.rtld.execstack=2` in the environment allows it. The C library asks for it, not Python.
"""
_OLDER = """
## What stands in the way of older ones

transformers 4.57 would need code of its own, and is refused:

- DistilBERT and others choose the class of their attention when they are built, and the shape of their masks at each
  call, both by the config. A proxy that is switched to separate products gets a mask of the other kind, and fails.
- The plug-in: `save_pretrained` calls its hooks with other arguments, and `from_pretrained` does not tell them the
  files of a folder, in which the plan of a quantized model lies.

transformers 5.0 loads the integers of T5 as floats, since the policy by which `wo` stays in float32 takes every tensor
there; 5.1 does not.
"""
_PATCHES = """
Operator patches that are refused by name, since the source that they change reads otherwise there. None is applied in
part, and the coverage tells of each; what it is for ([the list](operator-patches.md)) may be refused by its target, or
are not quantized.
"""


def supported(package: str) -> str:
    """The versions of a package that pyproject.toml asks for, such as ``>=5``; of Python for ``python``."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    if package == "python":
        return str(project["requires-python"])
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    return next(str(one.specifier) for one in map(Requirement, lines) if one.name == package)


def page(pairs: Mapping[str, Mapping[str, Any]], wanted: Sequence[str]) -> str:
    """Return the page; ``pairs`` are those of ``docs/compatibility.json``, ``wanted`` the keys that should be there."""
    ordered = sorted(pairs.values(), key=lambda pair: [Version(pair[name]) for name in _VERSIONS])
    ranges = {name: f"`{name}{supported(name)}`" for name in ("torch", "transformers")}
    lines = [_HEAD.format(python=supported("python").removeprefix(">=") + " and later", **ranges)]
    lines += [f"| Python | torch | transformers | {' | '.join(_TITLES.values())} |", f"|{'---|' * (len(_TITLES) + 3)}"]
    reasons: dict[str, int] = {}
    for pair in ordered:
        cells = [_cell(pair, name, reasons) for name in _TITLES]
        lines.append(f"| {' | '.join(pair[name] for name in _VERSIONS)} | {' | '.join(cells)} |")
    lines += ["\n| | reason |", "|---|---|"] if reasons else []
    lines += [f"| ({number}) | {reason} |" for reason, number in reasons.items()]
    missing = [f"- {key}" for key in wanted if key not in pairs]
    lines += ["\nNot run yet:\n", *missing] if missing else []
    lines += [*_patches(ordered), _PYTHONS, _OLDER]
    days = sorted({pair["day"] for pair in ordered})
    lines += [f"Run: {', '.join(days)}."]
    return "\n".join(lines) + "\n"


def _cell(pair: Mapping[str, Any], name: str, reasons: dict[str, int]) -> str:
    row = pair["rows"].get(name, {})
    stage = row.get("stage")
    if stage == "engine" and row["engine"] == "ok":
        return "ok" if row["share"] >= _ALL else f"{row['share']:.1%}"
    reason = f"{stage}: {row[stage]}" if stage in row else f"{pair['failed'] or 'not run'}"
    number = reasons.setdefault(reason.replace("|", "/"), len(reasons) + 1)
    return f"({number})"


def _patches(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which operator patches are refused with which versions."""
    refused: dict[tuple[str, ...], list[str]] = {}
    for pair in pairs:
        names = pair["rows"].get("operator patches", {}).get("refused", [])
        if names:
            refused.setdefault(tuple(names), []).append(
                f"torch {pair['torch']} and transformers {pair['transformers']}"
            )
    rows = [f"| {', '.join(where)} | {', '.join(names)} |" for names, where in refused.items()]
    return [_PATCHES, "| with | refused |", "|---|---|", *rows] if rows else []
