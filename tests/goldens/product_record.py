"""What users get of a command or a call: its folder, its printed lines and its exit code, as text to be compared.

See ``README.md`` beside this file for what is masked.

    make goldens CASES="sweep run_qat"       # record these cases anew; without CASES everything
"""

from __future__ import annotations

import collections
import contextlib
import csv
import difflib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from golden_record import machine
from translated import translate_once
from trials_here import trials_here

import quantizer.engines.measure as benchmark
from quantizer.cli.main import main
from quantizer.engines.backends import backend
from quantizer.engines.inspection import inspection_from_layers, is_product
from quantizer.utils.records import Inspection, Layer

FOLDER = Path(__file__).resolve().parent / "recorded" / "product"
_REPOSITORY = Path(__file__).resolve().parents[2]
_SHOWN = 60
"""Lines of a difference that are shown."""
_WIDTH = 110
_LONGEST = 8
"""Longer lists of numbers are recorded by their length."""

# -- masking -----------------------------------------------------------------------------------------------------------

_MEASURED = re.compile(r".*(_ms|_us|_mib|_gib|seconds|milliseconds|bytes|created|file_ratio)$")
"""Keys of JSON whose numbers differ from run to run, or from machine to machine."""
_OF_THE_MACHINE = frozenset({"versions", "machine", "sha256", "fingerprint"})
_TOO_LONG = frozenset({"diff"})
_ENGINES_OWN = frozenset({"layers"})
"""Lists that an engine's library decides on: their first two entries show their keys."""

_UNITS = r"ms|us|µs|s|min|h|KiB|MiB|GiB|kB|MB|GB|bytes"
_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z| UTC)?"), "<date>"),
    (re.compile(r"(?<![\w.])(?=\d*[a-f])[0-9a-f]{16,64}\b"), "<checksum>"),
    # What libraries log when they are imported, which happens once in a process.
    (re.compile(r"^(Failed to load /|[IWE]\d{4} [\d:.]+ ).*\n", re.M), ""),
    (re.compile(r"(<repository>)?/\S*?/site-packages/"), "<site-packages>/"),
    # Time that is left: whether it is told depends on how long the stages took.
    (re.compile(r", (about |at least )?[\d.]+ (s|min|h)( left)?(?=$|,)", re.M), ""),
    (re.compile(r"^  [\d.]+ (s|min|h)\n", re.M), ""),
    (re.compile(rf"(?<![\w.])-?\d+(\.\d+)? ({_UNITS})\b"), r"# \2"),
    (re.compile(r"(?<=iB \()([\d.]+x \w+|about the same)(?=\))"), "#"),
    # Layers and values that an engine names by counting.
    (re.compile(r"_\d{3,}\b"), "_#"),
    # Of two sizes that are equally far from float the worse one differs from one CPU to the next.
    (re.compile(r"(?<=the output at batch )\d+"), "#"),
    (re.compile(r"[─━]{2,}"), "──"),
    (re.compile(r"(?<=\S) {2,}"), "  "),
    (re.compile(r" +$", re.M), ""),
)
_FIGURE = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(e[-+]?\d+)?")
_LOUD_DB = 80.0
"""From here on a signal-to-noise ratio is one of rounding in float32, which each kernel does in its own order."""


def _masked_text(text: str, folder: Path) -> str:
    for place, word in ((folder, "<folder>"), (_REPOSITORY, "<repository>")):
        text = text.replace(str(place.resolve()), word).replace(str(place), word)
    for pattern, word in _MASKS:
        text = pattern.sub(word, text)
    for cpu in _cpu_names():
        text = text.replace(cpu, "<cpu>")
    return text


def _cpu_names() -> set[str]:
    found = Path("/proc/cpuinfo")
    lines = found.read_text(encoding="utf-8", errors="replace").splitlines() if found.exists() else []
    return {line.partition(":")[2].strip() for line in lines if line.startswith("model name")} - {""}


def _masked(value: Any, folder: Path, key: str = "") -> Any:
    match value:
        case dict() if key in _OF_THE_MACHINE:
            return f"<{key}>"
        case dict() if key == "size":
            return {**value, "bytes": "#", "ratio": "#"}
        case dict():
            return {_masked_text(str(name), folder): _masked(inner, folder, str(name)) for name, inner in value.items()}
        case list() if key in _ENGINES_OWN and len(value) > 2:
            return [*_masked(value[:2], folder), f"<{len(value) - 2} more>"]
        case list() if len(value) > _LONGEST and all(isinstance(one, int | float) for one in value):
            return f"<{len(value)} numbers>"
        case list():
            return [_masked(inner, folder, key) for inner in value]
        case bool() | None:
            return value
        case int() | float() | str() if _MEASURED.match(key):
            return "#"
        case float():
            return float(f"{min(value, _LOUD_DB) if key.endswith('db') else value:.4g}")
        case str() if key in _TOO_LONG:
            return f"<{len(value.splitlines())} lines>"
        case str() if "\n" in value:
            return _masked_text(value, folder).splitlines()
        case str():
            return _masked_text(value, folder)
        case _:
            return value


def _lines(value: Any, head: str = "", indent: int = 0) -> Iterator[str]:
    """The lines of a value as JSON; short ones beside each other share a line."""
    space = " " * indent
    flat = head + json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(flat) + indent <= _WIDTH:
        yield space + flat
        return
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    yield f"{space}{head}{opened}"
    line = ""
    for name, inner in value.items() if isinstance(value, dict) else (("", one) for one in value):
        lines = list(_lines(inner, f"{json.dumps(name)}: " if isinstance(value, dict) else "", indent + 1))
        if line and (len(lines) > 1 or len(line) + len(lines[0]) > _WIDTH):
            yield line
            line = ""
        if len(lines) > 1:
            yield from lines
        else:
            line = f"{line}, {lines[0].strip()}" if line else lines[0]
    yield from [line] if line else []
    yield space + closed


# -- comparing ---------------------------------------------------------------------------------------------------------


def differences(expected: str, given: str, *, figures: bool = True) -> str:
    """Return the lines that differ, as a short diff; empty: none.

    Args:
        expected: what was recorded.
        given: what came now.
        figures: whether numbers with a decimal point count. They may differ by 0.2% and one unit of the last place.
    """
    old, new = expected.splitlines(), given.splitlines()
    bones = [[_FIGURE.sub("#", line) for line in lines] for lines in (old, new)]
    if bones[0] == bones[1]:
        pairs = range(len(old))
        blocks = [(0, 0, len(pairs))]
    else:
        blocks = [tuple(block) for block in difflib.SequenceMatcher(None, *bones, autojunk=False).get_matching_blocks()]
    for first, second, size in blocks:
        for step in range(size):
            if not figures or _near(old[first + step], new[second + step]):
                old[first + step] = new[second + step]
    found = list(difflib.unified_diff(old, new, "recorded", "now", n=2, lineterm=""))
    more = [f"... {len(found) - _SHOWN} more lines"] if len(found) > _SHOWN else []
    return "\n".join([*found[:_SHOWN], *more])


def _near(one: str, two: str) -> bool:
    pairs = zip(_FIGURE.finditer(one), _FIGURE.finditer(two), strict=True)
    return all(_same_figure(first.group(), second.group()) for first, second in pairs)


def _same_figure(one: str, two: str) -> bool:
    unit = max(_unit(one), _unit(two))
    return abs(float(one) - float(two)) <= 0.002 * max(abs(float(one)), abs(float(two))) + 1.01 * unit


def _unit(figure: str) -> float:
    """The last place of a figure as it is written: 0.1 of 31.4."""
    digits, _, exponent = figure.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


# -- running -----------------------------------------------------------------------------------------------------------


class Place:
    """An empty folder in which a case runs, and what came of it.

    Attributes:
        folder: the folder, which is the current one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._said: list[str] = []
        self._inputs: frozenset[Path] | None = None

    def command(self, *words: str) -> None:
        """Run a command of ``quantizer``."""
        self.call(f"$ quantizer {shlex.join(words)}", lambda: f"exit code {main(list(words))}")

    def call(self, name: str, function: Callable[[], str]) -> None:
        """Call a function, and record what it prints and returns."""
        if self._inputs is None:
            self._inputs = frozenset(self.folder.rglob("*"))
        out, err = io.StringIO(), io.StringIO()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                returned = function()
        ours = [one for one in warned if one.category.__module__.partition(".")[0] == "quantizer"]
        self._section(name, returned)
        self._section("stdout", out.getvalue())
        self._section("stderr", err.getvalue())
        self._section("warnings", "\n".join(dict.fromkeys(f"{one.category.__name__}: {one.message}" for one in ours)))

    def files(self, title: str = "files") -> None:
        """Record the paths that are there, but for those that the case began with."""
        self._section(title, "\n".join(str(path.relative_to(self.folder)) for path in self._written()))

    def text(self) -> str:
        """Return all that was recorded, the files that are there now, and the text of those that have one."""
        self.files()
        for path in self._written():
            reads = _READERS.get(path.suffix)
            if reads is not None and path.is_file() and "tokenizer" not in path.parts:
                self._section(str(path.relative_to(self.folder)), reads(path, self.folder))
        return "\n".join(self._said)

    def _written(self) -> list[Path]:
        known = self._inputs or frozenset()
        found = (path for path in self.folder.rglob("*") if path not in known and "__pycache__" not in path.parts)
        return sorted(found, key=self._place)

    def _place(self, path: Path) -> tuple[str, str]:
        """What a path is sorted by: names of entries of a store differ from one machine to the next."""
        name = _masked_text(str(path.relative_to(self.folder)), self.folder)
        return name, _json(path, self.folder) if path.name == "entry.json" else ""

    def _section(self, title: str, text: str) -> None:
        shown = _masked_text(text, self.folder).rstrip("\n")
        if shown:
            self._said += [f"==== {_masked_text(title, self.folder)} ====", shown, ""]


def _json(path: Path, folder: Path) -> str:
    return "\n".join(_lines(_masked(json.loads(path.read_text(encoding="utf-8")), folder)))


def _yaml(path: Path, folder: Path) -> str:
    return "\n".join(_lines(_masked(yaml.safe_load(path.read_text(encoding="utf-8")), folder)))


def _csv(path: Path, folder: Path) -> str:
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(stream)]
    return "\n".join(_lines(_masked(rows, folder)))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _text(path: Path, _: Path) -> str:
    return path.read_text(encoding="utf-8")


def _onnx(path: Path, _: Path) -> str:
    """The inputs and outputs of a file, and how many nodes it has of each operator."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    counts = collections.Counter(node.op_type for node in graph.node)
    names = [", ".join(value.name for value in values) for values in (graph.input, graph.output)]
    return "\n".join([" -> ".join(names), *(f"{count} {name}" for name, count in sorted(counts.items()))])


_READERS: dict[str, Callable[[Path, Path], str]] = {
    ".json": _json,
    ".yaml": _yaml,
    ".md": _text,
    ".csv": _csv,
    ".pbtxt": _text,
    ".onnx": _onnx,
}


class _Clock:
    """A clock on which each call takes 1/128 s, of which sums have no rest: all engines are equally fast."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self) -> float:
        self._own.ticks = getattr(self._own, "ticks", 0) + 1
        return float(self._own.ticks) / 128


@contextlib.contextmanager
def _timeless() -> Iterator[None]:
    """Nothing depends on how fast this machine is, or on what else it does."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(time, "perf_counter", _Clock()))
        # Signs of life of long stages never come.
        stack.enter_context(mock.patch.object(time, "monotonic", return_value=0.0))
        for name in ("openvino", "onnxruntime", "torch"):
            owner = type(backend(name))
            stack.enter_context(mock.patch.object(owner, "inspect", _with_fixed_times(owner.inspect)))
        memory = {"peak_mib": 3.0, "baseline_mib": 1.0}
        stack.enter_context(mock.patch.object(benchmark, "in_own_process", return_value=memory))
        yield


def _with_fixed_times(inspect: Callable[..., Inspection]) -> Callable[..., Inspection]:
    """An ``inspect`` by which a product takes ten microseconds, four in integers, and any other layer one."""

    def inspected(*given: Any, **more: Any) -> Inspection:
        found = inspect(*given, **more)
        layers = [replace(layer, time_us=_microseconds(layer)) for layer in found.layers]
        return inspection_from_layers(found.backend, layers, verified=found.verified, note=found.note)

    return inspected


def _microseconds(layer: Layer) -> float | None:
    if layer.time_us is None:
        return None
    if not is_product(layer):
        return 1.0
    return 4.0 if layer.precision == "int8" else 10.0


def produced(case: Callable[[Place], None]) -> str:
    """Run a case in a folder of its own; return what came of it, masked."""
    here, path = Path.cwd(), list(sys.path)
    wide = {"COLUMNS": "300", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, wide), _timeless():
        place = Place(Path(name).resolve())
        os.chdir(place.folder)
        try:
            torch.manual_seed(0)
            case(place)
            return place.text()
        finally:
            os.chdir(here)
            sys.path[:] = path


def recorded(name: str) -> tuple[str, str]:
    """Return the kind of machine on which a case was recorded, and what came of it."""
    head, _, text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    return head, text


def _record(cases: Mapping[str, Callable[[Place], None]]) -> None:
    """Write what cases give now."""
    FOLDER.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as translations, trials_here(), translate_once(Path(translations)):
        for name, case in cases.items():
            (FOLDER / f"{name}.txt").write_text(f"{machine()}\n{produced(case)}", encoding="utf-8")


if __name__ == "__main__":
    from product_cases import CASES

    torch.set_num_threads(1)
    _record({name: CASES[name] for name in sys.argv[1:] or CASES})
