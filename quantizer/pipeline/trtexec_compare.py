"""Comparison of what trtexec exported with what was expected; it needs Python 3.8 or later, and no package.

python3 compare.py CASE EXPORTED: CASE is a folder with case.json and the expected outputs, EXPORTED the file of
``trtexec --exportOutput``. It exits with 0 if all outputs are within the tolerance, with 1 if one is not, and with 2 if
something cannot be read.
"""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NOTHING_DB = -1000.0
_WRONG, _UNREADABLE = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Compare all outputs of a case, print a line for each, and return the exit code."""
    folder, exported = Path(arguments[0]), Path(arguments[1])
    try:
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        given = read_exported(exported)
        lines = [compare(folder, output, given, case["tolerance"]) for output in case["outputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{exported}: cannot be compared: {type(error).__name__}: {error}", file=sys.stderr)
        return _UNREADABLE
    for line, _ in lines:
        print(line)
    return 0 if all(passed for _, passed in lines) else _WRONG


def read_exported(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return dimensions and values of each tensor, by name."""
    text = path.read_text(encoding="utf-8")
    # trtexec writes these as C++ does, which is no JSON.
    text = re.sub(r"(?<=[\[,\s])-?nan(?=[\],\s])", "NaN", text)
    text = re.sub(r"(?<=[\[,\s-])inf(?=[\],\s])", "Infinity", text)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for entry in json.loads(text):
        told = entry["dimensions"]
        sizes = [int(size) for size in (told.split("x") if isinstance(told, str) else told)]
        if math.prod(sizes) != len(entry["values"]):
            raise ValueError(f"{entry['name']} has {len(entry['values'])} values and the dimensions {told}")
        found[entry["name"]] = (sizes, entry["values"])
    return found


def compare(
    folder: Path,
    output: Mapping[str, Any],
    given: Mapping[str, tuple[list[int], list[float]]],
    tolerance: Mapping[str, Any],
) -> tuple[str, bool]:
    """Return a line on one output, and whether it is within the tolerance."""
    name = output["name"]
    if name not in given:
        raise ValueError(f"output {name!r} is missing; there are {', '.join(given) or 'none'}")
    sizes, values = given[name]
    if sizes != output["dimensions"]:
        raise ValueError(f"output {name!r} has the dimensions {sizes}, expected {output['dimensions']}")
    got = kept(values, sizes, output)
    right = read_npy(folder / output["expected"])
    plain = read_npy(folder / output["float"])
    if not len(got) == len(right) == len(plain):
        raise ValueError(f"output {name!r}: {len(got)} values to compare with {len(right)} and {len(plain)}")
    if not alike_where_not_finite(got, right):
        return f"  {name}: WRONG: NaN or infinite values where PyTorch has none, or the reverse", False
    far, to_float, own = decibels(right, got), decibels(plain, got), decibels(plain, right)
    passed = far >= tolerance["decibels"]
    beyond = tolerance["beyond_db"]
    if beyond is not None:
        passed = passed or to_float >= own - beyond
    told = f"SQNR {shown(far)} against PyTorch, {shown(to_float)} against the float model (PyTorch: {shown(own)})"
    return f"  {name}: {'ok' if passed else 'WRONG'}: {told}; expected {tolerance['text']}", passed


def kept(values: Sequence[float], sizes: Sequence[int], output: Mapping[str, Any]) -> list[float]:
    """Return the values of the rows that were computed in PyTorch, without those of masked tokens."""
    width = math.prod(sizes[1:])
    rows = [values[row * width : (row + 1) * width] for row in output["rows"]]
    if output["mask"] is None:
        return [value for row in rows for value in row]
    token = math.prod(sizes[2:])
    return [
        value
        for row, mask in zip(rows, output["mask"])  # noqa: B905 - Python 3.8 has no strict
        for place, real in enumerate(mask)
        if real
        for value in row[place * token : (place + 1) * token]
    ]


def alike_where_not_finite(got: Sequence[float], right: Sequence[float]) -> bool:
    """Return whether there is no NaN, and infinite values are the same."""
    pairs = zip(got, right)  # noqa: B905 - Python 3.8 has no strict
    return all(one == other for one, other in pairs if not (math.isfinite(one) and math.isfinite(other)))


def decibels(right: Sequence[float], got: Sequence[float]) -> float:
    """Return the ratio of signal to noise in dB; infinite values have no part in it."""
    signal = noise = 0.0
    for one, other in zip(right, got):  # noqa: B905 - Python 3.8 has no strict
        if math.isfinite(one) and math.isfinite(other):
            signal += one * one
            noise += (one - other) * (one - other)
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else _NOTHING_DB


def shown(value: float) -> str:
    """Return decibels as text."""
    return "equal" if value == math.inf else f"{value:.1f} dB"


def read_npy(path: Path) -> array[float]:
    """Return the float32 values of a NumPy file of version 1."""
    content = path.read_bytes()
    values = array("f")
    values.frombytes(content[10 + int.from_bytes(content[8:10], "little") :])
    if sys.byteorder == "big":
        values.byteswap()
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
