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

import onnx as onnx_library
from onnx import numpy_helper
from tiny_run import tiny_run

import quantizer.calibration.output_search as attention
import quantizer.runs.convert.engine_maker as maker
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.common.records import EngineCheck
from quantizer.engines import BuildOptions, BuildResult, Engine, candidates
from quantizer.engines import measure as trial
from quantizer.engines.candidates import Variant, cpu_candidates, cpu_variants
from quantizer.engines.engine_file import read_engine
from quantizer.errors import EngineError
from quantizer.runs.budget.engine_budget import EngineBudget
from quantizer.runs.convert import choose, load_converted, measure, request
from quantizer.runs.convert import folder as folders
from quantizer.runs.convert.engine_maker import EngineMaker, Made
from quantizer.runs.placement import rough_plan
from quantizer.runs.saved import kept_engines
from quantizer.sensitivity import Fallback, operands_of

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

        monkeypatch.setattr(request, "cpu_variants", variants)
        for module in (measure, rough_plan):
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


@pytest.mark.promise("times all of them in turns, and writes the fastest to `converted/my-model`")
@pytest.mark.promise("compares their outputs with PyTorch's, times them in turns, and keeps the fastest.")
@pytest.mark.promise("`conversion.json` has the table as `choice`")
def test_the_fastest_is_kept(convert: Callable[..., tuple[int, str]], place: Path) -> None:
    budget = ("--max-drop", "0.5", "--tuning", f"text-csv:{place / 'calibration.csv'}")
    code, said = convert(TIMES, "--evaluation", f"text-csv:{place / 'evaluation.csv'}", *budget)
    assert code == 0, said
    gain = f"{ONNXRUNTIME} int8 is the fastest; in float it is {OPENVINO} float32"
    assert gain in " ".join(said.split())
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
    assert list(entry["latency"][0]["milliseconds"]) == ["PyTorch float", f"{ONNXRUNTIME} float32", "engine"]
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
    build = kept_engines.tried_build

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if engine.parent.name == f"{OPENVINO}-int8":
            engine.write_bytes(b"half of an engine")
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(kept_engines, "tried_build", tried)
    code, said = convert({**TIMES, f"{ONNXRUNTIME} int8": 8.0}, "--backend", "auto", OPENVINO, ONNXRUNTIME)
    assert code == 0, said
    choice = _read("out/conversion.json")["choice"]
    assert choice["headline"].startswith(
        f"nothing in INT8 is faster than float here, and {OPENVINO} float32 is delivered: {ONNXRUNTIME} int8 takes "
        f"2.00x its time in the choice. This CPU ({choice['instructions']})"
    )
    assert f"the time of {ONNXRUNTIME} int8 is spent " in choice["headline"]
    assert choice["candidates"][-1]["verdict"] == "failed: building it crashed"
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {OPENVINO, "quantizer"}
    assert _read(f"out/{OPENVINO}/config.json")["quantization"] is None
    served = load_converted(f"out/{OPENVINO}")
    assert served(["a good film", "dull"])["logits"].shape[0] == 2
    monkeypatch.setattr(folders, "collect_machine", lambda: {"instructions": "neon"})
    with pytest.warns(UserWarning, match="chosen as the fastest on a CPU with .* and this one has neon"):
        load_converted(f"out/{OPENVINO}")


@pytest.mark.promise("the same command goes on with the engines that are built, which are kept in `OUT.engines`")
def test_a_stopped_conversion_goes_on(convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    build = kept_engines.tried_build
    built: list[str] = []

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if len(built) == 2:
            raise KeyboardInterrupt
        built.append(f"{name} {engine.parent.name}")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(kept_engines, "tried_build", tried)
    times = {name: value for name, value in TIMES.items() if name != f"{OPENVINO} int8"}
    code, said = convert(times, *ORDER)
    assert code == 130
    assert "the engines are kept in " in said
    assert [path.name for path in Path.cwd().iterdir()] == ["out.engines"]
    (first, second), built[:] = tuple(built), []
    code, said = convert(times, *ORDER)
    assert code == 0, said
    # Of the three candidates one was left.
    assert len(built) == 1
    assert built[0] not in (first, second)
    assert not Path("out.engines").exists()
    assert {one["verdict"].partition(":")[0] for one in _read("out/conversion.json")["choice"]["candidates"]} == {
        "chosen",
        "2.50x the time",
        "2.00x the time",
    }


def test_all_fail(convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> BuildResult:
        raise EngineError("building it crashed")

    monkeypatch.setattr(kept_engines, "tried_build", crash)
    monkeypatch.setattr(maker, "export_onnx", lambda _, path, *__, **___: path)
    monkeypatch.setattr(Quantizer, "export", lambda _, __, path, ___: path)
    code, said = convert(TIMES)
    assert code == 1
    assert "no engine is right and runs here: " in said
    assert f"{OPENVINO} float32: failed: building it crashed; " in said
    assert not list(Path.cwd().iterdir())


def test_what_is_not_installed(convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = candidates.find_spec
    monkeypatch.setattr(candidates, "find_spec", lambda name: None if name == "openvino" else found(name))
    assert cpu_candidates() == ((ONNXRUNTIME, TORCH), ("openvino: pip install 'enginequant[openvino]'",))
    monkeypatch.setattr(candidates, "find_spec", lambda name: found(name) if name == "torch" else None)
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    code, said = convert(TIMES)
    assert code == 1
    assert "no engine for a CPU is installed" in said
    assert "pip install 'enginequant[onnxruntime]'" in said
    assert "was built without oneDNN" in said


@pytest.mark.promise("one that misses `--max-drop` is not chosen.")
def test_a_budget_that_is_missed(
    convert: Callable[..., tuple[int, str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misses(self: EngineBudget, engine: object, groups: int) -> None:
        self.checks.append(EngineCheck(groups=groups, drop=0.2, rows=4))

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


class _Breaking:
    """An engine that breaks, at a moment of the test's choice, with an error of its library."""

    def __init__(self, engine: Engine, breaks: Callable[[], bool]) -> None:
        self.name, self.device = engine.name, engine.device
        self.inputs, self.input_names, self.output_names = engine.inputs, engine.input_names, engine.output_names
        self._engine = engine
        self._breaks = breaks

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        if self._breaks():
            raise RuntimeError("the library gave up")
        return self._engine(inputs)


LOSER = f"{OPENVINO}-int8"


def _wrong(onnx: Path) -> None:
    """Make a file compute something else, as a library with a bug does."""
    model = onnx_library.load(str(onnx))
    scales = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for tensor in model.graph.initializer:
        if tensor.name in scales:
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array((values * 3).astype(values.dtype), tensor.name))
    onnx_library.save(model, str(onnx))


@pytest.mark.promise("An engine that crashes, hangs, or computes something else than PyTorch is a row with the reason")
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("wrong", "the engine does not compute what the model computes"),
        ("hangs", "took more than 0.01 s"),
        pytest.param("breaks in the check", "the library gave up", marks=pytest.mark.nightly),
        pytest.param("breaks while it is timed", "the library gave up", marks=pytest.mark.nightly),
    ],
)
def test_one_that_fails_is_a_row_and_leaves_nothing(
    how: str, reason: str, convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, loaded = kept_engines.tried_build, maker.load_engine
    timing: list[str] = []

    def tried(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        with pytest.MonkeyPatch.context() as patch:
            if engine.parent.name == LOSER and how == "hangs":
                patch.setattr(trial, "TIMEOUT_S", 0.01)
            if engine.parent.name == LOSER and how == "wrong":
                _wrong(onnx)
            return built(name, onnx, engine, *more, **options)

    def load(name: str, path: Path, **more: Any) -> Any:
        engine = loaded(name, path, **more)
        if path.parent.name != LOSER or not how.startswith("breaks"):
            return engine
        return _Breaking(engine, lambda: how == "breaks in the check" or bool(timing))

    def latency(*given: Any) -> Any:
        timing.append("begun")
        return measure.measure_latency(*given)

    monkeypatch.setattr(kept_engines, "tried_build", tried)
    monkeypatch.setattr(maker, "load_engine", load)
    monkeypatch.setattr(choose, "measure_latency", latency)
    # Without prices: the engine under test is called by the choice alone.
    monkeypatch.setattr(EngineMaker, "_prices", lambda *_: None)
    times = {f"{OPENVINO} int8": 1.0, f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0}
    code, said = convert(times)
    assert code == 0, said
    choice = _read("out/conversion.json")["choice"]
    verdicts = {f"{one['backend']} {one['format']}": one["verdict"] for one in choice["candidates"]}
    lost = verdicts.pop(f"{OPENVINO} int8")
    assert lost.startswith("failed: ")
    assert reason in lost
    assert verdicts == {f"{ONNXRUNTIME} int8": "chosen", f"{ONNXRUNTIME} float32": "2.50x the time"}
    assert choice["candidates"][-1]["milliseconds"] == []
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {ONNXRUNTIME, "quantizer"}
    assert not list(Path("out").rglob(f"*{LOSER}*"))


@pytest.mark.promise("All are of one calibration, and each starts with nothing put back")
@pytest.mark.nightly
def test_what_went_back_for_one_is_quantized_for_the_next(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    back: dict[str, Fallback | None] = {}
    quantized = EngineMaker.quantized

    def puts_back(self: EngineMaker, variant: Variant, quantizer: Quantizer, *more: Any, **named: Any) -> Made:
        made = quantized(self, variant, quantizer, *more, **named)
        back[variant.backend] = quantizer.chosen_fallback
        groups = tuple(operands_of(quantizer._session.decided()))
        quantizer._session.put_back(Fallback(groups=groups[:1], asked="a test"))
        return made

    monkeypatch.setattr(EngineMaker, "quantized", puts_back)
    monkeypatch.setattr(EngineMaker, "_prices", lambda *_: None)
    code, said = convert({f"{OPENVINO} int8": 1.0, f"{ONNXRUNTIME} int8": 2.0})
    assert code == 0, said
    assert back == {OPENVINO: None, ONNXRUNTIME: None}


@pytest.mark.nightly
@pytest.mark.parametrize(("taken", "plans"), [(1.2, False), (1.19, True)])
def test_a_backend_that_is_far_slower_gets_no_plan(
    taken: float, plans: bool, convert: Callable[..., tuple[int, str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "balanced.yaml").write_text("preset: balanced\n")
    made: list[str] = []
    quantized = EngineMaker._quantized

    def makes(self: EngineMaker, variant: Variant, *more: Any) -> Made:
        made.append(variant.backend)
        return quantized(self, variant, *more)

    monkeypatch.setattr(EngineMaker, "_quantized", makes)
    monkeypatch.setattr(EngineMaker, "_prices", lambda *_: None)
    times = {f"{OPENVINO} int8": 1.0, f"{ONNXRUNTIME} int8": taken}
    code, said = convert(times, "--config", str(place / "balanced.yaml"), *ORDER)
    assert code == 0, said
    assert made == [OPENVINO, *[ONNXRUNTIME] * plans]
    why = f"not built: with ranges by largest values it takes 1.20x the time of {OPENVINO} int8"
    verdicts = {one["backend"]: one["verdict"] for one in _read("out/conversion.json")["choice"]["candidates"]}
    assert verdicts == {OPENVINO: "chosen", ONNXRUNTIME: "1.19x the time" if plans else why}
    assert {path.name for path in Path("out").glob("[!.]*")} == {OPENVINO, "conversion.json", "quantizer"}


@pytest.mark.nightly
def test_a_rough_plan_that_fails_says_nothing(
    convert: Callable[..., tuple[int, str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "balanced.yaml").write_text("preset: balanced\n")
    build = kept_engines.tried_build

    def fails(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> Any:
        if engine.name in (f"{ONNXRUNTIME}-rough.engine", "model.engine") and name == ONNXRUNTIME:
            raise EngineError("building it crashed")
        return build(name, onnx, engine, *more, **options)

    monkeypatch.setattr(kept_engines, "tried_build", fails)
    monkeypatch.setattr(EngineMaker, "_prices", lambda *_: None)
    times = {f"{OPENVINO} int8": 1.0, f"{ONNXRUNTIME} int8": 9.0}
    code, said = convert(times, "--config", str(place / "balanced.yaml"))
    assert code == 0, said
    verdicts = {one["backend"]: one["verdict"] for one in _read("out/conversion.json")["choice"]["candidates"]}
    assert verdicts == {OPENVINO: "chosen", ONNXRUNTIME: "failed: building it crashed"}


@pytest.mark.nightly
def test_ranges_at_run_time_compete_under_a_budget(convert: Callable[..., tuple[int, str]], place: Path) -> None:
    times = {f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0, f"{ONNXRUNTIME} int8 dynamic": 1.5}
    code, said = convert(times)
    assert code == 0, said
    assert f"{ONNXRUNTIME} int8 is the fastest" in said
    choice = _read("out/conversion.json")["choice"]
    assert choice["candidates"][-1]["verdict"] == "not built: no faster than int8"
    budget = ("--max-drop", "0.9", "--tuning", f"text-csv:{place / 'calibration.csv'}")
    code, said = convert(times, *budget, "--force")
    assert code == 0, said
    assert f"{ONNXRUNTIME} int8 dynamic is the fastest" in said
    config = _read(f"out/{ONNXRUNTIME}/config.json")
    assert config["quantization"]["ranges"] == "dynamic"
    model = onnx_library.load(f"out/{ONNXRUNTIME}/model.onnx")
    assert "DynamicQuantizeLinear" in {node.op_type for node in model.graph.node}
    assert load_converted(f"out/{ONNXRUNTIME}")(["a good film"])["logits"].shape[0] == 1
    assert Quantizer.load("out/quantizer").config.activations.ranges == "dynamic"


@pytest.mark.promise("on a CPU with BF16 OpenVINO's engines with a rest in bfloat16 are tried, too")
@pytest.mark.skipif(not candidates._has_bf16(), reason="this CPU has no BF16")
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
    folder = Path("out") / OPENVINO
    assert read_engine(folder / "model.engine")[1].startswith("inference_precision bfloat16")
    files = {
        "model.onnx",
        "model.engine",
        "config.json",
        "tokenizer",
        "README.md",
        "report.json",
        "report.html",
        "triton",
    }
    assert {path.name for path in folder.iterdir()} == files
    choice = _read("out/conversion.json")["choice"]
    decibels = {one["format"]: one["sqnr_db"] for one in choice["candidates"]}
    assert 30 <= decibels["bfloat16"] < decibels["float32"]


@pytest.mark.nightly
def test_torch_competes_on_its_eager_road(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    roads: dict[str, bool | None] = {}
    built = kept_engines.tried_build

    def tried(name: str, onnx: Path, engine: Path, options: BuildOptions, **more: Any) -> BuildResult:
        roads[engine.stem] = options.compiled
        return built(name, onnx, engine, options, **more)

    monkeypatch.setattr(kept_engines, "tried_build", tried)
    monkeypatch.setattr(EngineMaker, "_prices", lambda *_: None)
    code, said = convert({f"{TORCH} float32": 5.0, f"{TORCH} int8": 2.0})
    assert code == 0, said
    assert set(roads.values()) == {False}
    assert _read(f"out/{TORCH}/config.json")["backend"] == TORCH
    assert load_converted(f"out/{TORCH}")(["a good film"])["logits"].shape[0] == 1
