"""``model.source`` as the name of a function: what such a file needs, what it may not hold, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantizer.config import dump_yaml, load_run
from quantizer.config.data_section import is_function_name
from quantizer.errors import ConfigError

MODEL = {"source": "my_pkg.nets:build", "inputs": "my_pkg.data:calibration"}
SCORED = {**MODEL, "metric": "my_pkg.data:score"}
ROWS = {"name": "text-csv", "path": "rows.csv"}


def _problems(tmp_path: Path, run: dict[str, Any]) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    with pytest.raises(ConfigError, match="in the configuration:") as caught:
        load_run(path)
    return [problem.partition(": ")[2] for problem in caught.value.problems]


def test_a_file_of_functions_needs_no_task_and_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Without quotes, as it is written by hand.
    Path("run.yaml").write_text("model: {source: my_pkg.nets:build, weights: w.pt, inputs: my_pkg.data:calibration}\n")
    config = load_run("run.yaml", ["model.metric=my_pkg.data:score"])
    assert (config.model.source, config.model.task, config.model.metric) == (MODEL["source"], None, SCORED["metric"])
    assert config.model.weights == str(tmp_path / "w.pt")
    assert config.data.calibration is None
    Path("again.yaml").write_text(dump_yaml(config))
    assert load_run("again.yaml") == config


@pytest.mark.parametrize(
    ("run", "problems"),
    [
        ({"model": {"source": MODEL["source"]}}, ["model.inputs: is missing; expected the function that returns the"]),
        ({"model": {"source": MODEL["source"], "metric": "a.b:c"}}, ["model.inputs: is missing; expected the"]),
        (
            {"model": MODEL, "data": {"calibration": ROWS, "evaluation": ROWS, "batch_size": 8}},
            [
                f"data.{key}: is not used, because model.inputs (my_pkg.data:calibration) returns the batches"
                for key in ("batch_size", "calibration", "evaluation")
            ],
        ),
        ({"model": {**MODEL, "task": "sentence-similarity"}}, ["model.task: is for checkpoints, "]),
        (
            {"model": MODEL, "deliver": ["triton"]},
            ["deliver: 'triton' is only for checkpoints; remove it, and load the"],
        ),
        (
            {"model": MODEL, "quantize": False, "fallback": {"names": ["a"]}},
            ["fallback: is not used, because quantize is false"],
        ),
        (
            {"model": {**MODEL, "attention": "sdpa", "max_length": 64}},
            [
                "model.attention: is not used, because the source is a function",
                "model.max_length: is not used, because the source",
            ],
        ),
        ({"model": {**MODEL, "inputs": "data.py"}}, ["model.inputs: got the text 'data.py'; expected the name of a"]),
        # One key that is wrong, and nothing is said of data.
        ({"model": {**MODEL, "metrics": "a:b"}}, ["model.metrics: unknown key; expected one of source, task, "]),
        ({"model": MODEL, "fallback": {"max_drop": 0.1}, "amp": {}}, ["model.metric: is missing; expected a"]),
        ({"model": MODEL, "amp": {"measure": "metric"}}, ["model.metric: is missing; expected a function that"]),
        ({"model": SCORED, "qat": {}}, ["qat: trains only checkpoints; remove it"]),
        (
            {
                "model": MODEL,
                "export": {"dynamic": {"batch": [1, 4, 8]}},
                "report": {"latency_batch": 16},
            },
            ["report.latency_batch: got 16; expected 1 to 8, the range of export.dynamic.batch"],
        ),
    ],
)
def test_what_does_not_fit_together(run: dict[str, Any], problems: list[str], tmp_path: Path) -> None:
    found = sorted(_problems(tmp_path, run))
    assert len(found) == len(problems), found
    for text, expected in zip(found, sorted(problems), strict=True):
        assert text.startswith(expected)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nets.py:build", "'nets:build'"),
        ("./nets.py:build", "'nets:build'"),
        ("my_pkg/nets.py:build", "'my_pkg.nets:build'"),
        ("my_pkg/nets:build", "'my_pkg.nets:build'"),
        ("/home/me/nets.py:build", "'my_pkg.nets:build'"),
    ],
)
def test_the_path_of_a_file_is_no_function(source: str, said: str, tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, {"model": {**MODEL, "source": source}})
    assert problem.startswith(f"model.source: got the file {source!r}; expected its module name, as Python imp")
    assert problem.endswith(f"from the current folder: {said}")


@pytest.mark.parametrize("key", ["weights", "inputs", "metric"])
def test_a_checkpoint_has_none_of_the_keys_of_functions(key: str, tmp_path: Path) -> None:
    data = {"calibration": ROWS, "evaluation": {**ROWS, "path": "dev.csv"}}
    model = {"source": "my-model", key: "my_pkg.data:score"}
    (problem,) = _problems(tmp_path, {"model": {**model, "task": "sequence-classification"}, "data": data})
    assert problem.startswith(
        f"model.{key}: is only for a source that is a function, such as 'my_pkg.nets:build'; remo"
    )
    (problem,) = _problems(tmp_path, {"model": model, "data": data})
    assert problem.startswith(f"model.source: got 'my-model' with {key}; expected a function, such as 'my_pk")


def test_a_checkpoint_still_needs_task_and_data(tmp_path: Path) -> None:
    both = sorted(_problems(tmp_path, {"model": {"source": "my-model"}, "data": {"batch_size": 8}}))
    assert [text.split(";")[0] for text in both] == [
        "data.calibration: is missing",
        "model.task: is missing",
    ]
    (missing,) = _problems(tmp_path, {"model": {"source": "my-model", "task": "sentence-similarity"}})
    assert missing.startswith("data: is missing; expected a section with keys calibration, evaluation")


def test_names_of_functions() -> None:
    assert all(map(is_function_name, ("nets:build", "my_pkg.nets:build", "a.b:C.make")))
    assert not any(
        map(is_function_name, ("package:NAME", "package:NAME/FOLDER", "bert-base", "a/b:c", "nets.py:build", "a:", 3))
    )
