"""Comparison of trtexec's exported outputs with expected outputs; needs Python 3.8 or later, and no package.

python3 compare.py CASE EXPORTED: CASE is a folder with case.json and the expected outputs, and EXPORTED is the file of
``trtexec --exportOutput``. Exit codes: 0 all outputs are within the tolerance, 1 one is not, 2 a file cannot be read.
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
    """Compare all outputs of a case, print one line for each, and return the exit code."""
    folder, exported = Path(arguments[0]), Path(arguments[1])
    try:
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        exported_tensors = read_exported(exported)
        lines = [compare(folder, output, exported_tensors, case["tolerance"]) for output in case["outputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{exported}: cannot be compared: {type(error).__name__}: {error}", file=sys.stderr)
        return _UNREADABLE
    for line, _ in lines:
        print(line)
    return 0 if all(passed for _, passed in lines) else _WRONG


def read_exported(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return the dimensions and values of each tensor by name."""
    text = path.read_text(encoding="utf-8")
    # trtexec writes C++ notation, which is not JSON.
    text = re.sub(r"(?<=[\[,\s])-?nan(?=[\],\s])", "NaN", text)
    text = re.sub(r"(?<=[\[,\s-])inf(?=[\],\s])", "Infinity", text)
    tensors: dict[str, tuple[list[int], list[float]]] = {}
    for entry in json.loads(text):
        dimensions = entry["dimensions"]
        sizes = [int(size) for size in (dimensions.split("x") if isinstance(dimensions, str) else dimensions)]
        if math.prod(sizes) != len(entry["values"]):
            raise ValueError(f"{entry['name']} has {len(entry['values'])} values, but the dimensions {dimensions}")
        tensors[entry["name"]] = (sizes, entry["values"])
    return tensors


def compare(
    folder: Path,
    output: Mapping[str, Any],
    exported: Mapping[str, tuple[list[int], list[float]]],
    tolerance: Mapping[str, Any],
) -> tuple[str, bool]:
    """Return a line on one output, and whether it passes."""
    name = output["name"]
    if name not in exported:
        raise ValueError(f"output {name!r} is missing; the outputs are {', '.join(exported) or 'none'}")
    sizes, values = exported[name]
    if sizes != output["dimensions"]:
        raise ValueError(f"output {name!r} has the dimensions {sizes}, expected {output['dimensions']}")
    actual = kept(values, sizes, output)
    expected = read_npy(folder / output["expected"])
    float_values = read_npy(folder / output["float"])
    if not len(actual) == len(expected) == len(float_values):
        raise ValueError(
            f"output {name!r}: {len(actual)} values to compare with {len(expected)} and {len(float_values)}"
        )
    if not alike_where_not_finite(actual, expected):
        return f"  {name}: WRONG: NaN or infinite values differ from PyTorch's", False
    to_expected, to_float, own = (
        decibels(expected, actual),
        decibels(float_values, actual),
        decibels(float_values, expected),
    )
    passed = to_expected >= tolerance["decibels"]
    beyond = tolerance["beyond_db"]
    if beyond is not None:
        passed = passed or to_float >= own - beyond
    summary = (
        f"SQNR {shown(to_expected)} against PyTorch, {shown(to_float)} against the float model (PyTorch: {shown(own)})"
    )
    return f"  {name}: {'ok' if passed else 'WRONG'}: {summary}; expected {tolerance['text']}", passed


def kept(values: Sequence[float], sizes: Sequence[int], output: Mapping[str, Any]) -> list[float]:
    """Return the values of the samples that ran in PyTorch, without masked tokens."""
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


def alike_where_not_finite(actual: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether infinite values agree and there is no NaN."""
    pairs = zip(actual, expected)  # noqa: B905 - Python 3.8 has no strict
    return all(
        value == reference for value, reference in pairs if not (math.isfinite(value) and math.isfinite(reference))
    )


def decibels(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the SQNR in dB; infinite values are ignored."""
    signal = noise = 0.0
    for reference, value in zip(expected, actual):  # noqa: B905 - Python 3.8 has no strict
        if math.isfinite(reference) and math.isfinite(value):
            signal += reference * reference
            noise += (reference - value) * (reference - value)
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
