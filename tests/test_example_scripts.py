"""The scripts among the examples: they run as their reader would run them, and print figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import NEEDED, printed_here, skip_without
from example_runs import printed as printed_by
from tiny_run import tiny_run, write_rows


def test_bert_ptq_of_a_model_of_ones_own_shows_every_step_and_scores_in_pairs(tmp_path: Path) -> None:
    skip_without(*NEEDED[1:])
    from transformers import BertConfig, BertForSequenceClassification

    tiny_run(tmp_path)
    # The script's rows are as long as a task's are where nothing is said.
    config = BertConfig.from_pretrained(tmp_path / "model", max_position_embeddings=128)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "calibration.csv", 128, seed=1)
    words = [f"--{name}={tmp_path / name}.csv" for name in ("calibration", "evaluation")]
    flips, decibels = _figures(printed_here("bert_ptq.py", "--fallback=1", f"--model={tmp_path / 'model'}", *words))
    assert flips["float"] == 0
    assert min(decibels.values()) > 5


# A minute of MiniLM, whose engine the notebook of test_examples.py shows too.
@pytest.mark.nightly
def test_bert_ptq_of_minilm_is_close_to_float() -> None:
    skip_without(*NEEDED)
    printed = printed_by("bert_ptq.py", "--fallback", "1")
    assert "linear 38 of 38, matmul 12 of 12" in printed
    flips, decibels = _figures(printed)
    assert flips["float"] == 0
    assert max(flips.values()) < 0.1
    assert min(decibels.values()) > 15


def _figures(printed: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share of changed labels and the decibels of each model that was scored."""
    costs = printed.split("## What each group costs")[1].split("## The engine")[0]
    assert sum(line.rstrip().endswith(" yes") for line in costs.splitlines()) == 1
    rows = {line.split(":")[0]: line for line in printed.splitlines() if "label_flips" in line}
    assert list(rows) == ["float", "frozen", "engine"]
    flips = {name: float(line.split("label_flips ")[1].split(",")[0]) for name, line in rows.items()}
    decibels = {name: float(line.split("sqnr_db ")[1]) for name, line in rows.items()}
    return flips, decibels


@pytest.mark.nightly
def test_gpt2_scales_agree_with_model_optimizer() -> None:
    skip_without("transformers", "modelopt")
    rows = [line.split() for line in printed_by("gpt2_tripy_scales.py").splitlines() if line.startswith("transformer.")]
    assert [row[0] for row in rows] == [
        f"transformer.h.{block}.{name}"
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert {row[5] for row in rows} == {"0"}
    assert max(float(row[6]) for row in rows) < 1e-6
