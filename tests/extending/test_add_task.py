"""A task from outside the package: the one of the guide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

for _package in ("transformers", "onnx", "onnxscript", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino]")

from outside import run_outside, write_guide_module
from tiny_run import tiny_run

NAME = "unbalanced-classification"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the guide's module lies, with a tiny classifier, its rows and a run that names the task."""
    write_guide_module(tmp_path, "add-a-task.md", "macro_f1", "rated_texts", "probability")
    run = tiny_run(tmp_path)
    run["model"]["task"] = NAME
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return tmp_path


@pytest.mark.nightly
def test_a_run_is_scored_with_it(folder: Path) -> None:
    run_outside(folder, "import macro_f1, sys\nsys.exit(macro_f1.main(['run', 'run.yaml', 'output=done']))")
    record = json.loads((folder / "done" / "report.json").read_text(encoding="utf-8"))
    scores = record["scores"]
    assert {score["metric"] for score in scores} == {"macro_f1"}
    assert len(scores) == 3
    assert all(0 <= score["value"] <= 1 for score in scores)
    assert (folder / "done" / "model.onnx").is_file()


@pytest.mark.nightly
def test_a_checkpoint_is_converted_for_it(folder: Path) -> None:
    words = ["convert", "-m", "model", "--quantization", "--calibration", "text-csv:calibration.csv", "--samples", "12"]
    words += ["--backend", "openvino", "--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32"]
    run_outside(
        folder,
        f"""
import macro_f1
from quantizer.pipeline.load import load_converted

assert macro_f1.main({[*words, "--task", NAME, "-o", "converted"]}) == 0
assert load_converted("converted/openvino").config["task"] == "{NAME}"
""",
    )


def test_its_score(folder: Path) -> None:
    run_outside(
        folder,
        """
import macro_f1
import numpy as np
import pytest

metric = macro_f1.UnbalancedClassification.metric
targets = np.array([0, 0, 0, 1])
assert metric(None, targets, targets) == 1
assert metric(None, np.zeros(4), targets) == pytest.approx((6 / 7 + 0) / 2)
both = metric(None, np.stack([targets, np.zeros(4)]), np.stack([targets, targets]))
assert both == pytest.approx([1, 3 / 7])
""",
    )


def test_a_file_may_name_it_once_it_is_there(folder: Path) -> None:
    run_outside(
        folder,
        """
import pytest

from quantizer.config import load_run
from quantizer.errors import ConfigError

with pytest.raises(ConfigError, match="'automatic-speech-recognition' or 'speech-to-text'"):
    load_run("run.yaml")
import macro_f1

assert load_run("run.yaml").model.task == "unbalanced-classification"
with pytest.raises(ConfigError, match="did you mean 'unbalanced-classification'"):
    load_run("run.yaml", ["model.task=unbalanced-classificaton"])
""",
    )


def test_a_checkpoint_is_still_told_to_be_of_the_package_s_own(folder: Path) -> None:
    run_outside(
        folder,
        """
import macro_f1
from quantizer.tasks import read_checkpoint, tasks

@tasks.add("another")
class Another(macro_f1.UnbalancedClassification):
    name, auto_class = "another", "AutoModelForTokenClassification"

assert read_checkpoint("model").task == "sequence-classification"
""",
    )


@pytest.mark.parametrize("name", [NAME, "sequence-classification"])
def test_a_name_is_registered_once(folder: Path, name: str) -> None:
    run_outside(
        folder,
        f"""
import macro_f1
import pytest

with pytest.raises(ValueError, match="task '{name}' is registered twice"):
    macro_f1.tasks.add("{name}")(macro_f1.UnbalancedClassification)
""",
    )


def test_its_errors_name_it(folder: Path) -> None:
    run_outside(
        folder,
        """
import macro_f1
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quantizer.errors import TaskError
from quantizer.tasks import Text, build_task, tasks

Task = macro_f1.UnbalancedClassification
given = AutoModelForSequenceClassification.from_pretrained("model").eval(), AutoTokenizer.from_pretrained("model")
rows = [Text("the film is good", 1), Text("the film is bad", 0)]

def broken(**members):
    made = type("Broken", (Task,), members)
    tasks._entries["unbalanced-classification"] = made
    return build_task("unbalanced-classification", *given, max_length=32)

def raises(*_, **__):
    raise KeyError("boom")

with pytest.raises(KeyError) as caught:
    broken(make_inputs=raises)
assert caught.value.__notes__ == ["in task 'unbalanced-classification'"]
run = lambda batch: given[0](**batch)
for members, words in [
    ({"decide": lambda self, outputs: [0, 1]}, "decide.. returned an object of list; expected an array"),
    ({"metric": lambda self, *_: None}, "metric.. returned an object of NoneType; expected one number"),
    ({"metric": lambda self, *_: np.zeros(2)}, "metric.. returned an array of shape .2,.; expected one number"),
    ({"targets": lambda self, rows: np.zeros(1)}, "targets.. returned 1 for 2 samples"),
]:
    task = broken(**members)
    with pytest.raises(TaskError, match=f"task 'unbalanced-classification': {words}"):
        task.score(task.predict(run, rows), rows)
task = broken(represent=lambda self, output, batch: output[:1])
with pytest.raises(TaskError, match="returned 1 outputs for a batch of 2 texts in task 'unbalanced-classification'"):
    task.predict(run, rows)
with pytest.raises(ValueError, match="task 'own' is an object of Broken; expected a class"):
    tasks.add("own")(task)
""",
    )


def test_a_number_as_target(folder: Path) -> None:
    (folder / "rated.tsv").write_text("0.9\tthe film is good\n0.1\tthe film is bad\n", encoding="utf-8")
    run_outside(
        folder,
        """
import numpy as np
import probability
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quantizer.tasks import Text, build_task, load_examples

model = AutoModelForSequenceClassification.from_pretrained("model").eval()
task = build_task("probability", model, AutoTokenizer.from_pretrained("model"), max_length=32)
examples = load_examples("rated-texts", path="rated.tsv")
assert examples == [Text("the film is good", 0.9), Text("the film is bad", 0.1)]
predictions = task.predict(lambda batch: model(**batch), examples)
expected = np.abs(model(**task.batches(examples)[0]).logits.softmax(-1)[:, 1].detach().numpy() - [0.9, 0.1]).mean()
assert task.score(predictions, examples) == pytest.approx(expected, abs=1e-6)
# Other numbers than probabilities are no classes of the model.
assert task.score(predictions, [Text(example.text, 50.0) for example in examples]) > 48
assert task.paired(predictions, predictions) == {"mean_change": 0}
assert task.difference_interval(predictions, predictions, examples, n=10) == (0, 0)
""",
    )


def test_the_registry_and_the_module_of_data_sets_are_one(folder: Path) -> None:
    run_outside(
        folder,
        """
import rated_texts
import quantizer.tasks.datasets as module
from quantizer.tasks import Text, datasets

assert datasets is module
assert module.Text is Text
assert "rated-texts" in module.names()

@module.add("another")
def another(path, split, subset):
    return []
""",
    )
