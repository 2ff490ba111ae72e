"""A model that a function returns, from YAML and from the command line: runs, conversions, sweeps, and what is refused.

The functions are written into a folder, as a user has them, and imported by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

for _package in ("onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[onnx,onnxruntime,report]")

from quantizer.algorithms.sensitivity import fingerprint
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import load_engine
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.pipeline.budget import EngineBudget
from quantizer.pipeline.scores import FunctionMetric, FunctionScorer
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, read_record

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))

pytestmark = [
    pytest.mark.usefixtures("exact_byte_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU auto is tensorrt"),
]

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        hidden = torch.relu(self.norm(self.first(image)))
        return self.head(self.drop(hidden.mean((2, 3))))


def build():
    torch.manual_seed(3)
    return Net()


def fails():
    raise ValueError("no such width")


def nothing():
    return None


module = Net()
number = 3
"""

DATA = """
import torch


def calibration():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3])) for _ in range(3)]


def score(model):
    with torch.no_grad():
        return torch.cat([model(image).softmax(1).gather(1, label[:, None]) for image, label in calibration()]).mean()


def empty():
    return []


def none():
    return None


def wrong():
    return [{"picture": torch.ones(2, 3, 8, 8)}]


def small():
    return [torch.ones(2, 1, 8, 8)]


def broken():
    yield torch.ones(2, 3, 8, 8)
    raise OSError("disk gone")


def word(model):
    return "good"


def silent(model):
    model(torch.ones(2, 3, 8, 8))


def endless(model):
    return float("nan")


def raises(model):
    raise KeyError("label")
"""

FUNCTIONS = {"source": "my_pkg.nets:build", "inputs": "my_pkg.data:calibration", "metric": "my_pkg.data:score"}
CONVERT = ("convert", "-m", FUNCTIONS["source"], "--inputs", FUNCTIONS["inputs"], "--quantization", "-o", "out")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the user's package and a file of a run; modules and paths are as before at the end."""
    _written(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


def _written(folder: Path) -> None:
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg/nets.py").write_text(NETS)
    (folder / "my_pkg/data.py").write_text(DATA)
    run = {"model": FUNCTIONS, "quantizer": {"backend": ONNXRUNTIME, "preset": "plain"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def _net() -> nn.Module:
    """The module that ``build`` returns, made here."""
    names: dict[str, object] = {}
    exec(compile(NETS, "nets", "exec"), names)
    made = names["build"]()  # type: ignore[operator]
    assert isinstance(made, nn.Module)
    return made.eval()


def _record(folder: str = "out") -> RunRecord:
    return read_record(Path(folder) / "report.json")


# -- from end to end -----------------------------------------------------------------------------------------------


def test_a_run_of_functions(capsys: pytest.CaptureFixture[str]) -> None:
    weights = {name: value + 0.5 for name, value in _net().state_dict().items()}
    save_file(weights, "w.safetensors")
    assert main(["run", "run.yaml", "model.weights=w.safetensors", "--output", "out"]) == 0
    said, record = capsys.readouterr().out, _record()
    assert "[2/15] " in said
    assert "verdict " in said
    assert str(Path("out/model.engine").absolute()) in said.replace("\n", "")
    assert [score.which for score in record.scores] == ["float", "proxy", "engine"]
    assert {score.metric for score in record.scores} == {"score"}
    assert (record.model.source, record.model.task) == (FUNCTIONS["source"], "module")
    assert {"model.engine", "float.engine", "model.onnx", "report.html", "README.md", "config.yaml", "quantizer"} <= {
        path.name for path in Path("out").iterdir()
    }
    assert record.latency is not None
    assert record.latency.batch == 4
    # The float engine is the module in eval mode, with the weights of the file.
    model = _net()
    model.load_state_dict(weights)
    image = torch.randn(4, 3, 8, 8)
    (given,) = load_engine(ONNXRUNTIME, Path("out/float.engine"))({"image": image.numpy()}).values()
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(given), model(image), rtol=1e-4, atol=1e-5)
    # The file in the folder makes the same run again.
    config = load_run("out/config.yaml")
    assert config.export.dynamic.batch == (1, 4, 32)
    assert config.model.weights == str(Path("w.safetensors").absolute())
    assert main(["validate", "out/config.yaml"]) == 0


def test_a_conversion_of_functions(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*CONVERT, "--score", FUNCTIONS["metric"], "--backend", ONNXRUNTIME, "--batch-size", "1", "2", "8"]) == 0
    )
    said, record = capsys.readouterr().out, _record()
    assert "verdict " in said
    assert [score.which for score in record.scores] == ["float", "proxy", "engine"]
    assert record.config["export"]["dynamic"]["batch"] == [1, 2, 8]
    assert record.sensitivity
    # It is replaced with --force only.
    again = (*CONVERT, "--backend", ONNXRUNTIME)
    assert main(again) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert not _record().scores
    assert _record().outputs


def test_a_budget_by_the_function() -> None:
    budget = ["amp={batches: 1}", "fallback={max_drop: 0.5}"]
    assert main(["run", "run.yaml", *budget, "--output", "out"]) == 0
    record = _record()
    assert record.fallback is not None
    assert record.fallback.max_drop == 0.5
    (check,) = record.fallback.checks
    assert check.rows is None
    assert check.drop == pytest.approx(-(record.scores[2].difference or 0.0))
    assert record.fallback.outcome is not None
    assert record.fallback.outcome.verdict == "met"
    # No score is kept beside a complete run.
    assert not Path("out.search").exists()


@pytest.mark.nightly
def test_a_sweep_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr("quantizer.pipeline.function_source.returned_module", _counted(built))
    assert main(["run", "run.yaml", "quantizer.activations.calibrator=max,mse", "--output", "out"]) == 0
    runs = sorted(path.name for path in Path("out").iterdir() if (path / "report.json").is_file())
    assert runs == ["calibrator=max", "calibrator=mse"]
    # Both are of one module, with one score of it.
    assert built == [FUNCTIONS["source"]]
    first, second = (_record(f"out/{name}") for name in runs)
    assert first.scores[0].value == second.scores[0].value
    page = Path("out/comparison.html").read_text()
    assert "not compared" not in page


def _counted(built: list[str]):  # type: ignore[no-untyped-def]
    from quantizer.pipeline.function_source import returned_module

    def counted(model):  # type: ignore[no-untyped-def]
        built.append(model.source)
        return returned_module(model)

    return counted


def test_validate_and_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "run.yaml"]) == 0
    assert main(["inspect", "run.yaml"]) == 0
    assert "first._conv_forward.conv2d" in capsys.readouterr().out
    assert main(["validate", "run.yaml", "out.yaml"]) == 1


# -- what is refused, before the calibration -----------------------------------------------------------------------


@pytest.mark.promise("A function that fails ends the command before the calibration, with a message that names it")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"source": "my_pgk.nets:build"}, "my_pgk.nets:build: there is no module 'my_pgk', neither in "),
        ({"source": "my_pkg.net:build"}, "my_pkg.net:build: there is no module 'my_pkg.net', neither in "),
        ({"source": "my_pkg.nets:buidl"}, "nets.py has no 'buidl'; did you mean 'build'?"),
        ({"source": "my_pkg.nets:number"}, "my_pkg.nets:number is a int; expected a function, which is called"),
        ({"source": "my_pkg.nets:module"}, "my_pkg.nets:module is a module itself, a Net; expected a function"),
        ({"source": "my_pkg.nets:fails"}, "my_pkg.nets:fails() failed, with ValueError: no such width ("),
        (
            {"source": "my_pkg.nets:nothing"},
            "my_pkg.nets:nothing() returned a NoneType; expected a float model, a torch.",
        ),
        ({"source": "bad:build"}, "bad:build: importing bad failed, with NameError: name 'undefined' is not defined ("),
        (
            {"source": "needs:build"},
            "needs:build: importing needs failed, with ModuleNotFoundError: No module named 'abse",
        ),
        ({"source": "exits:build"}, "exits:build: importing exits failed, with SystemExit: 2"),
        ({"inputs": "my_pkg.data:none"}, "my_pkg.data:none(): the calibration data is a NoneType; give an iterable of"),
        ({"inputs": "my_pkg.data:empty"}, "my_pkg.data:empty(): the calibration data is empty: at least one batch"),
        ({"inputs": "my_pkg.data:wrong"}, "my_pkg.data:wrong(): batch 0 does not fit Net.forward"),
        (
            {"inputs": "my_pkg.data:broken"},
            "my_pkg.data:broken(): the calibration data failed after 1 batch, with OSErr",
        ),
        ({"inputs": "my_pkg.data:small"}, "my_pkg.nets:build: forward() failed, with RuntimeError: "),
        ({"metric": "my_pkg.data:word"}, "word() returned a str; expected a number, or one for each row"),
        ({"metric": "my_pkg.data:silent"}, "silent() returned a NoneType; expected a number"),
        ({"metric": "my_pkg.data:endless"}, "the score of the float is nan; expected a finite number"),
        ({"metric": "my_pkg.data:raises"}, "my_pkg.data:raises() failed, with KeyError: 'label' ("),
        ({"weights": "none.safetensors"}, "none.safetensors: there is no such file"),
        ({"weights": "w.bin"}, "w.bin: expected a file that ends in .safetensors, .pt, .pth"),
        ({"weights": "less.pt"}, "less.pt do not fit Net: head.bias is missing. Expected the state_dict() of a module"),
        ({"weights": "more.safetensors"}, "more.safetensors do not fit Net: tail.bias is unexpected."),
        ({"weights": "other.pt"}, "other.pt do not fit Net: size mismatch for head.weight"),
        (
            {"weights": "nested.pth"},
            "nested.pth: the file holds no state dict, but epoch, model; write it by torch.save",
        ),
        (
            {"weights": "code.pt"},
            "code.pt: the file is damaged, or does not hold tensors alone (UnpicklingError); write",
        ),
        (
            {"weights": "torn.safetensors"},
            "torn.safetensors: the file is damaged, or does not hold tensors alone (Safe",
        ),
        ({"source": "both:build"}, "model source 'both:build' is the name of a function, and of a file or folder here"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_is_told_before_the_calibration(
    model: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text("undefined\n")
    Path("needs.py").write_text("import absent_package\n")
    Path("exits.py").write_text("import sys\nsys.exit(2)\n")
    Path("both:build").mkdir()
    _write_weights()
    monkeypatch.setattr(Quantizer, "calibrate", lambda *_: pytest.fail("calibrated"))
    words = [f"model.{key}={value}" for key, value in model.items()]
    assert main(["run", "run.yaml", *words, "--output", "out"]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not Path("out").exists()
    assert not Path("ran").exists()


class _Code:
    """An object that makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("ran"),)


def _write_weights() -> None:
    state = _net().state_dict()
    Path("w.bin").touch()
    torch.save({name: value for name, value in state.items() if name != "head.bias"}, "less.pt")
    save_file({**state, "tail.bias": torch.ones(2)}, "more.safetensors")
    torch.save({**state, "head.weight": torch.ones(2, 2)}, "other.pt")
    torch.save({"epoch": 3, "model": state}, "nested.pth")
    torch.save({"head.bias": _Code()}, "code.pt")
    Path("torn.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")


def test_all_that_cannot_be_imported_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.source=no:build", "model.inputs=my_pkg.data:nothing", "model.weights=w.bin"]
    assert main(["run", "run.yaml", *words]) == 1
    told = capsys.readouterr().err
    assert "for 3 reasons" in told
    assert all(name in told for name in ("no:build", "my_pkg.data:nothing", "w.bin"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("-m", "my-net", "--score", "a:b"),
            "--score is for a module that a function returns, and -m my-net is the name",
        ),
        (
            ("-m", "nets.py:build", "--inputs", "a:b", "--quantization"),
            "-m nets.py:build: model.source: got 'nets.py:bu",
        ),
        (("-m", "a:b", "--quantization"), "--inputs is missing: -m a:b is a function, and its module needs batches"),
        (
            ("-m", "a:b", "--inputs", "a:c", "--max-drop", "1"),
            "--max-drop 1.0 is a drop of a score, and --score is mis",
        ),
        (
            ("-m", "a:b", "--inputs", "a:c", "--tuning", "text-csv:x"),
            "--tuning is for checkpoints, and -m a:b is a func",
        ),
        (
            ("-m", "a:b", "--backend", "openvino", "torch"),
            "--backend openvino torch: expected one for -m a:b, or `auto ",
        ),
        (
            ("-m", "a:b", "--inputs", "c.py", "--quantization"),
            "--inputs c.py: model.inputs: got the text 'c.py'; expected the name of a function as Python imports it",
        ),
        (
            ("-m", "a:b", "--inputs", "a:c", "--dtype", "int3", "--quantization"),
            "--dtype int3: quantizer.dtype: got the",
        ),
    ],
)
def test_options_that_do_not_fit_together(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *words]) == 1
    assert said in capsys.readouterr().err


# -- scores and budgets by a function ------------------------------------------------------------------------------


class _Scorer(FunctionScorer):
    """Gives engines the drops that it was made with, one after the other."""

    def __init__(self, drops: list[float]) -> None:
        self._drops = iter(drops)
        self._metric = FunctionMetric(lambda _: 1.0, higher_is_better=True)

    def difference(self, which: str, engine: object) -> float | None:
        return -next(self._drops)


def test_an_engine_that_loses_more_by_the_function_narrows_the_search(folder: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from quantizer.pipeline.context import RunContext
    from quantizer.pipeline.module_feed import ModuleFeed
    from quantizer.pipeline.progress import StageTimer
    from quantizer.pipeline.resume import ResumeFiles

    timer = StageTimer(Console(file=StringIO()))
    feed, kept = ModuleFeed([{"image": torch.ones(2, 3)}]), ResumeFiles(folder, folder, folder)
    context = RunContext(timer=timer, resume=kept, model=_net(), processor=None, feed=feed)
    budget = EngineBudget(context, 0.1, [], checked=True, function=_Scorer([0.15, 0.05]))
    budget.warn("fallback.max_drop")
    engine = object()
    assert budget.next_drop(engine, 1) == pytest.approx(0.05)  # type: ignore[arg-type]
    assert budget.next_drop(engine, 2) is None  # type: ignore[arg-type]
    assert [(check.rows, check.groups) for check in budget.checks] == [(None, 1), (None, 2)]
    unchecked = EngineBudget(context, 0.1, [], checked=False, function=_Scorer([0.15]))
    assert unchecked.next_drop(engine, 1) is None  # type: ignore[arg-type]


def test_kept_scores_are_those_of_the_code_of_a_function() -> None:
    from quantizer.utils.fingerprint import Fingerprint

    def first(_: nn.Module) -> float:
        return 1.0

    def second(_: nn.Module) -> float:
        return 2.0

    weights = Fingerprint.of(_net())
    known = [fingerprint({}, FunctionMetric(one, higher_is_better=True), weights) for one in (first, first, second)]
    assert known[0] == known[1] != known[2]
