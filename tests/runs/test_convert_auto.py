"""``quantizer convert`` for whatever is fastest: what is tried, what is kept, and what is told of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

for _package in ("transformers", "scipy", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from tiny_run import tiny_run

import quantizer.algorithms.range_search as attention
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import BuildOptions, BuildResult, for_this_cpu
from quantizer.engines.for_this_cpu import Variant, cpu_candidates, cpu_variants
from quantizer.errors import EngineError
from quantizer.pipeline import benchmark, choose_engine, rough_plan
from quantizer.pipeline import fastest_engine as run_variants
from quantizer.pipeline import load_converted as folders
from quantizer.pipeline.load_converted import load_converted
from quantizer.report import RunRecord, read_record

SIZES = ("--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32")
OPENVINO, ONNXRUNTIME, TORCH = sorted(cpu_candidates()[0], key=lambda name: ("torch" in name, "onnx" in name))
ORDER = ("--backend", "auto", OPENVINO, ONNXRUNTIME)
"""Both in this order, whichever is the faster one on such a CPU as a rule."""
TIMES = {f"{OPENVINO} float32": 4.0, f"{OPENVINO} int8": 2.5, f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    torch.set_num_threads(1)
    tiny_run(folder)
    (folder / "settings.yaml").write_text("preset: plain\n")
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

        monkeypatch.setattr(run_variants, "cpu_variants", variants)
        for module in (benchmark, rough_plan):
            monkeypatch.setattr(module, "interleaved_latency", taken)
        data = ("--quantization", "--calibration", f"text-csv:{place / 'calibration.csv'}", "--rows", "12")
        settings = ("--config", str(place / "settings.yaml"))
        code = main(["convert", "-m", str(place / "model"), *data, *settings, *SIZES, "-o", "out", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def _read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


def _record(backend: str) -> RunRecord:
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {backend}
    return read_record(Path("out") / backend / "report.json")


@pytest.mark.promise("times all of them in turns, and writes the fastest to `converted/my-model`")
@pytest.mark.promise("compares their outputs with PyTorch's, times them in turns, and keeps the fastest.")
def test_the_fastest_is_kept(convert: Callable[..., tuple[int, str]], place: Path) -> None:
    budget = ("--max-drop", "0.5", "--tuning", f"text-csv:{place / 'calibration.csv'}")
    code, said = convert(TIMES, "--evaluation", f"text-csv:{place / 'evaluation.csv'}", *budget)
    assert code == 0, said
    gain = f"{ONNXRUNTIME} int8 is the fastest; in float it is {OPENVINO} float32"
    assert gain in " ".join(said.split())
    record = _record(ONNXRUNTIME)
    choice = record.choice
    assert choice is not None
    assert choice.headline == gain
    assert choice.shapes == ("2 x 24", "1 x 16", "4 x 32")
    # What takes 1.5 times as long as another one of its kind is not timed at the largest size.
    times = {one.name: len(one.milliseconds) for one in choice.candidates}
    assert times == dict.fromkeys(TIMES, 3)
    assert [one.name for one in choice.candidates] == sorted(TIMES, key=lambda name: TIMES[name])
    # Engines in float have the float model's score, to the last row.
    assert [one.score_difference for one in choice.candidates if one.format == "float32"] == [0.0, 0.0]
    assert [entry.which for entry in record.scores] == ["float", "proxy", "engine"]
    assert record.fallback is None or record.fallback.checks[0].drop <= 0.5
    assert {entry.name for entry in record.other_latencies[0].engines} == {"PyTorch float", "float", "engine"}
    assert Quantizer.load(f"out/{ONNXRUNTIME}/quantizer").config.backend == ONNXRUNTIME
    assert _read(f"out/{ONNXRUNTIME}/config.json")["chosen_on"] == choice.instructions


def test_one_that_is_too_slow_is_not_timed_at_the_largest_size(convert: Callable[..., tuple[int, str]]) -> None:
    code, said = convert({**TIMES, f"{OPENVINO} int8": 8.0})
    assert code == 0, said
    choice = _record(ONNXRUNTIME).choice
    assert choice is not None
    (slow,) = (one for one in choice.candidates if one.name == f"{OPENVINO} int8")
    assert len(slow.milliseconds) == 2
    assert slow.verdict == "4.00x the time at 2 x 24 and 1 x 16: too slow to go on"


@pytest.mark.promise(
    "Where nothing in INT8 is faster than float, the first line says so and what bounds it, and the engine in float is "
    "delivered."
)
@pytest.mark.promise("`load_converted` warns on another kind of CPU.")
def test_float_is_delivered_where_it_is_faster(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = choose_engine.tried_build

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if engine.parent.name == f"{OPENVINO}-int8":
            engine.write_bytes(b"half of an engine")
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(choose_engine, "tried_build", tried)
    code, said = convert({**TIMES, f"{ONNXRUNTIME} int8": 8.0}, "--backend", "auto", OPENVINO, ONNXRUNTIME)
    assert code == 0, said
    record = _record(OPENVINO)
    choice = record.choice
    assert choice is not None
    assert choice.headline.startswith(
        f"nothing in INT8 is faster than float here, and {OPENVINO} float32 is delivered: {ONNXRUNTIME} int8 takes "
        f"2.00x its time in the choice. This CPU ({choice.instructions})"
    )
    assert f"the time of {ONNXRUNTIME} int8 is spent " in choice.headline
    assert choice.candidates[-1].verdict == "failed: building it crashed"
    folder = Path("out") / OPENVINO
    assert _read(str(folder / "config.json"))["quantization"] is None
    assert not list(folder.glob("float.*"))
    assert not load_run(folder / "config.yaml").quantize
    served = load_converted(folder)
    assert served(["a good film", "dull"])["logits"].shape[0] == 2
    monkeypatch.setattr(folders, "collect_machine", lambda: {"instructions": "neon"})
    with pytest.warns(UserWarning, match="chosen as the fastest on a CPU with .* and this one has neon"):
        load_converted(folder)


@pytest.mark.skipif(not for_this_cpu._has_bf16(), reason="this CPU has no BF16")
@pytest.mark.nightly
def test_a_rest_in_bf16_competes(convert: Callable[..., tuple[int, str]]) -> None:
    times = {"float32": 5.0, "bfloat16": 4.0, "int8": 2.0, "int8+bfloat16": 1.5}
    code, said = convert({f"{OPENVINO} {form}": value for form, value in times.items()})
    assert code == 0, said
    gain = f"{OPENVINO} int8+bfloat16 is the fastest; in float it is {OPENVINO} bfloat16"
    assert gain in " ".join(said.split())
    config = _read(f"out/{OPENVINO}/config.json")
    assert config["inference_precision"] == "bfloat16"
    assert config["quantization"]["ranges"] == "static"
    choice = _record(OPENVINO).choice
    assert choice is not None
    decibels = {one.format: one.sqnr_db for one in choice.candidates}
    assert 30 <= (decibels["bfloat16"] or 0) < (decibels["float32"] or math.inf)


@pytest.mark.promise("torch is built on its eager road, in seconds")
@pytest.mark.nightly
def test_torch_competes_on_its_eager_road(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    roads: dict[str, bool | None] = {}
    built = choose_engine.tried_build

    def tried(name: str, onnx: Path, engine: Path, options: BuildOptions, **more: Any) -> BuildResult:
        roads[engine.parent.name] = options.compiled
        return built(name, onnx, engine, options, **more)

    monkeypatch.setattr(choose_engine, "tried_build", tried)
    code, said = convert({f"{TORCH} float32": 5.0, f"{TORCH} int8": 2.0})
    assert code == 0, said
    assert set(roads.values()) == {False}
    assert _read(f"out/{TORCH}/config.json")["backend"] == TORCH
    assert load_converted(f"out/{TORCH}")(["a good film"])["logits"].shape[0] == 1
