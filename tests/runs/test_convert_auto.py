"""``quantizer convert`` for whatever is fastest: what is tried, what is kept, and what is told of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

for _package in ("transformers", "scipy", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs quantizer[hf,onnx,openvino,onnxruntime]")

from tiny_run import tiny_run  # noqa: E402

import quantizer.calibration.costly_attention as attention  # noqa: E402
import quantizer.runs.convert.engine_maker as maker  # noqa: E402
from quantizer import Quantizer  # noqa: E402
from quantizer.cli.main import main  # noqa: E402
from quantizer.engines import BuildResult  # noqa: E402
from quantizer.engines import candidates  # noqa: E402
from quantizer.engines.candidates import Variant  # noqa: E402
from quantizer.engines.candidates import cpu_candidates  # noqa: E402
from quantizer.engines.candidates import cpu_variants  # noqa: E402
from quantizer.errors import EngineError  # noqa: E402
from quantizer.report.record import EngineCheck  # noqa: E402
from quantizer.runs.convert import folder as folders  # noqa: E402
from quantizer.runs.convert import load_converted  # noqa: E402
from quantizer.runs.convert import measure  # noqa: E402
from quantizer.runs.convert import request  # noqa: E402
from quantizer.runs.engine_budget import EngineBudget  # noqa: E402

SIZES = ("--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32")
OPENVINO, ONNXRUNTIME, TORCH = sorted(cpu_candidates()[0], key=lambda name: ("torch" in name, "onnx" in name))
TIMES = {f"{OPENVINO} float32": 4.0, f"{OPENVINO} int8": 2.5, f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    torch.set_num_threads(1)
    tiny_run(folder)
    return folder


@pytest.fixture
def convert(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Converts the tiny model with times that are given; its exit code and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attention, "_GAIN_DB", math.inf)

    def run(times: Mapping[str, float], *words: str) -> tuple[int, str]:
        def variants(*given: Any, **more: Any) -> tuple[Variant, ...]:
            # Each takes seconds to build: those that have a time.
            return tuple(variant for variant in cpu_variants(*given, **more) if variant.name in times)

        def taken(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
            for call in calls.values():
                call()
            return {name: [times.get(name, 9.0)] for name in calls}

        monkeypatch.setattr(request, "cpu_variants", variants)
        monkeypatch.setattr(measure, "interleaved_latency", taken)
        data = ("--quantization", "--calibration", f"text-csv:{place / 'calibration.csv'}", "--rows", "12")
        code = main(["convert", "-m", str(place / "model"), *data, *SIZES, "-o", "out", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def _read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


@pytest.mark.promise("times all of them in turns, and writes the fastest to `converted/my-model`")
@pytest.mark.promise("compares their outputs with PyTorch's, times them in turns, and keeps the fastest.")
@pytest.mark.promise("`conversion.json` has the table as `choice`")
def test_the_fastest_is_kept(convert: Callable[..., tuple[int, str]], place: Path) -> None:
    budget = ("--max-drop", "0.5", "--tuning", f"text-csv:{place / 'calibration.csv'}")
    code, said = convert(TIMES, "--evaluation", f"text-csv:{place / 'evaluation.csv'}", *budget)
    assert code == 0, said
    gain = f"{ONNXRUNTIME} int8 is the fastest, 2.00x as fast as the fastest engine in float, {OPENVINO} float32"
    assert gain in said
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {ONNXRUNTIME, "quantizer"}
    document = _read("out/conversion.json")
    choice = document["choice"]
    assert choice["headline"] == gain
    assert choice["shapes"] == ["1 x 16", "2 x 24", "4 x 32"]
    found = [(f"{one['backend']} {one['format']}", one["verdict"]) for one in choice["candidates"]]
    order = sorted(TIMES, key=lambda name: TIMES[name])
    assert found == [(name, f"{TIMES[name] / 2:.2f}x the time" if TIMES[name] > 2 else "chosen") for name in order]
    assert all(len(one["milliseconds"]) == 3 and one["sqnr_db"] for one in choice["candidates"])
    # Engines in float have the float model's score, to the last row.
    assert [one["score_difference"] for one in choice["candidates"] if one["format"] == "float32"] == [0.0, 0.0]
    assert all(one["score_difference"] is not None for one in choice["candidates"])
    (entry,) = document["backends"]
    assert list(entry["latency"][0]["milliseconds"]) == ["PyTorch float", "float engine", "engine"]
    assert [score["which"] for score in entry["scores"]] == ["float", "proxy", "engine"]
    assert entry["quantization"]["budget"][0]["drop"] <= 0.5
    saved = Quantizer.load("out/quantizer")
    assert saved.config.backend == ONNXRUNTIME
    assert saved.chosen_fallback is None


@pytest.mark.promise(
    "Where nothing in INT8 is faster than float, the first line says so and what bounds it, and the engine in float is "
    "delivered."
)
@pytest.mark.promise("`load_converted` warns on another kind of CPU.")
def test_float_is_delivered_where_it_is_faster(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = maker.tried_build

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if engine.parent.name == f"{OPENVINO}-int8":
            engine.write_bytes(b"half of an engine")
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(maker, "tried_build", tried)
    code, said = convert({**TIMES, f"{ONNXRUNTIME} int8": 8.0}, "--backend", "auto", OPENVINO, ONNXRUNTIME)
    assert code == 0, said
    choice = _read("out/conversion.json")["choice"]
    assert choice["headline"].startswith(
        f"nothing in INT8 is faster than float here, and {OPENVINO} float32 is delivered: {ONNXRUNTIME} int8 takes "
        f"2.00x its time. This CPU ({choice['instructions']})"
    )
    assert f"the time of {ONNXRUNTIME} int8 is spent " in choice["headline"]
    assert choice["candidates"][-1]["verdict"] == "failed: building it crashed"
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {OPENVINO, "quantizer"}
    assert _read(f"out/{OPENVINO}/config.json")["quantization"] is None
    served = load_converted(f"out/{OPENVINO}")
    assert served(["a good film", "dull"])["logits"].shape[0] == 2
    monkeypatch.setattr(folders, "collect_machine", lambda: {"instructions": "avx2"})
    with pytest.warns(UserWarning, match="chosen as the fastest on a CPU with .* and this one has avx2"):
        load_converted(f"out/{OPENVINO}")


def test_all_fail(convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> BuildResult:
        raise EngineError("building it crashed")

    monkeypatch.setattr(maker, "tried_build", crash)
    monkeypatch.setattr(maker, "export_onnx", lambda _, path, *__, **___: path)
    monkeypatch.setattr(Quantizer, "export", lambda _, __, path, ___: path)
    code, said = convert(TIMES)
    assert code == 1
    assert f"no engine is right and runs here: {OPENVINO} float32: failed: building it crashed; " in said
    assert not list(Path.cwd().iterdir())


def test_what_is_not_installed(convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = candidates.find_spec
    monkeypatch.setattr(candidates, "find_spec", lambda name: None if name == "openvino" else found(name))
    assert cpu_candidates() == ((ONNXRUNTIME, TORCH), ("openvino: pip install 'quantizer[openvino]'",))
    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    code, said = convert(TIMES)
    assert code == 1
    assert "no engine for a CPU is installed" in said
    assert "pip install 'quantizer[onnxruntime]'" in said
    assert "was built without oneDNN" in said


@pytest.mark.promise("one that misses `--max-drop` is not chosen.")
def test_a_budget_that_is_missed(
    convert: Callable[..., tuple[int, str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misses(self: EngineBudget, engine: object, groups: int) -> None:
        self.checks.append(EngineCheck(allowed=0.01, groups=groups, drop=0.2, rows=4))

    monkeypatch.setattr(EngineBudget, "next_drop", misses)
    budget = ("--max-drop", "0.01", "--tuning", f"text-csv:{place / 'calibration.csv'}")
    # Named beside auto, it is the only one that is tried.
    code, said = convert(TIMES, "--backend", "auto", ONNXRUNTIME, *budget)
    assert code == 0, said
    choice = _read("out/conversion.json")["choice"]
    assert [(one["backend"], one["format"], one["verdict"]) for one in choice["candidates"]] == [
        (ONNXRUNTIME, "float32", "chosen"),
        (ONNXRUNTIME, "int8", "failed: its score drops by 0.20000, and --max-drop allows 0.01"),
    ]
