"""Sweeps in files and overrides: which values are several, how runs are named, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.config import load_run
from quantizer.config.sweep import read_sweep, split_values
from quantizer.errors import ConfigError

PLAIN = """\
model: {source: some/model, task: sequence-classification}
data:
  calibration: {name: text-csv, path: train.csv}
  evaluation: {name: text-csv, path: dev.csv}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(PLAIN)
    return "a.yaml"


def names(paths: list[str], *overrides: str) -> list[str]:
    return [run.name for run in read_sweep(paths, overrides).runs(Path("out"))]


def problem(paths: list[str], *overrides: str) -> str:
    with pytest.raises(ConfigError, match=r"problems? in the configuration") as caught:
        read_sweep(paths, overrides).runs(Path("out"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("a", ["a"]),
        ("", [""]),
        ("[a, b]", ["[a, b]"]),
        ("[a, b],[c]", ["[a, b]", "[c]"]),
        ("{num: 4, costs: {a: 1, b: 2}}", ["{num: 4, costs: {a: 1, b: 2}}"]),
        ("'a,b'", ["'a,b'"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("it's,b", ["it's", "b"]),
        ("['x,]', y],b", ["['x,]', y]", "b"]),
        ("a,", ["a", ""]),
    ],
)
def test_commas_outside_brackets_and_quotes_part_values(written: str, parts: list[str]) -> None:
    assert split_values(written) == parts


def test_each_combination_is_a_run_with_a_folder_of_its_own(file: str) -> None:
    sweep = read_sweep([file], ["quantizer.backend=openvino,onnxruntime", "quantizer.activations.percentile=99.9,99"])
    assert sweep.count == 4
    runs = sweep.runs(Path("out"))
    assert [run.name for run in runs] == [
        "backend=openvino,percentile=99.9",
        "backend=openvino,percentile=99",
        "backend=onnxruntime,percentile=99.9",
        "backend=onnxruntime,percentile=99",
    ]
    assert runs[3].config.quantizer.backend == "onnxruntime"
    assert runs[3].config.quantizer.activations.percentile == 99
    assert runs[3].config.output == "out/backend=onnxruntime,percentile=99"
    assert sweep.folder() == "runs/a"


def test_one_file_without_lists_is_no_sweep(file: str) -> None:
    assert read_sweep([file], ["quantizer.activations.percentile=[99.9, 99.99]"]).is_single
    assert not read_sweep([file], ["engine.threads=1,2"]).is_single


def test_a_section_and_overrides_of_it(file: str) -> None:
    section = "sweep:\n  engine.threads: [1, 2]\n  quantizer.activations.percentile: [99.9, [99, 98]]\n"
    Path(file).write_text(PLAIN + section)
    assert names([file], "quantizer.backend=openvino") == [
        "threads=1,percentile=99.9",
        "threads=1,percentile=99_98",
        "threads=2,percentile=99.9",
        "threads=2,percentile=99_98",
    ]
    # What is set on the command line is not varied by the file any more, or varied otherwise.
    assert names([file], "engine.threads=4") == ["percentile=99.9", "percentile=99_98"]
    assert names([file], "engine.threads=4,8", "~sweep") == ["threads=4", "threads=8"]
    with pytest.raises(ConfigError, match=r"a\.yaml:5: sweep: makes several runs, but this command expects one"):
        load_run(file)
    assert load_run(file, ["~sweep"]).engine.threads == 1


def test_several_files_are_runs_too(file: str) -> None:
    Path("b.yaml").write_text(PLAIN)
    sweep = read_sweep([file, "b.yaml"], ["engine.threads=1,2"])
    assert sweep.folder() == "runs/a+b"
    assert [run.name for run in sweep.runs(Path("o"))] == ["a,threads=1", "a,threads=2", "b,threads=1", "b,threads=2"]
    assert names([file, "b.yaml"]) == ["a", "b"]


def test_keys_that_end_alike_are_written_in_full(file: str) -> None:
    assert names([file], "quantizer.activations.percentile=99,98", "quantizer.weights.percentile=99") == [
        "percentile=99",
        "percentile=98",
    ]
    both = names([file], "quantizer.activations.percentile=99,98", "quantizer.weights.percentile=99,98")
    assert both[0] == "quantizer.activations.percentile=99,quantizer.weights.percentile=99"


def test_the_name_of_a_run_is_short_enough_for_a_folder(file: str) -> None:
    for letter in ("a", "\u00e9", "\u6587", "\U00020000"):
        first, second = names([file], f"data.calibration.path={letter * 100}1,{letter * 100}2")
        assert first != second
        assert len(first.encode()) <= 159
        assert first.startswith(f"path={letter * 36}")


def test_thousands_of_runs_are_counted_without_being_made(file: str) -> None:
    many = ",".join(map(str, range(1, 1001)))
    assert read_sweep([file], [f"engine.threads={many}", f"data.batch_size={many}"] * 2).count == 10**6


def test_mistakes(file: str) -> None:
    unknown = problem([file], "quantizer.bakend=openvino,onnxruntime", "engine.threads=1,2")
    # Once, although every combination has it.
    assert unknown.count("unknown key") == 1
    assert "override 'quantizer.bakend=openvino,onnxruntime': quantizer.bakend: unknown key" in unknown
    assert "did you mean 'backend'?" in unknown
    assert "got the text 'openvinno'" in problem([file], "quantizer.backend=openvinno,onnxruntime")
    twice = problem([file], "engine.threads=1,1")
    assert "two runs have the name 'threads=1': a.yaml with engine.threads=1, and a.yaml with engine.threads=1" in twice
    Path("other").mkdir()
    Path("other/a.yaml").write_text(PLAIN)
    assert "two runs have the name 'a': a.yaml, and other/a.yaml" in problem([file, "other/a.yaml"])
    assert "a value in the list is empty" in problem([file], "engine.threads=1,")
    assert "each run of a sweep gets its own folder" in problem([file], "output=a,b")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("sweep: [1, 2]", "a.yaml:5: sweep: got a list; expected a section"),
        ("sweep: {engine.threads: []}", "a.yaml:5: sweep.engine.threads: is an empty list; expected a list of values"),
        ("sweep: {engine.threads: 2}", "a.yaml:5: sweep.engine.threads: got the whole number 2; expected a list"),
        ("sweep:\n  engine.treads: [1, 2]", "a.yaml:6: engine.treads: unknown key"),
    ],
)
def test_mistakes_in_the_section(file: str, section: str, text: str) -> None:
    Path(file).write_text(f"{PLAIN}{section}\n")
    assert text in problem([file])
