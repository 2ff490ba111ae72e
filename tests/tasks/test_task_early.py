"""What is told before anything runs: code of others, labels, files and packages."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import tiny_run

from quantizer.errors import ConfigError, EngineError, MissingDependencyError, TaskError
from quantizer.tasks import Image, Text, build_task, load_model, load_tokenizer, read_checkpoint

pytest.importorskip("transformers", reason="the tasks are of transformers models: install enginequant[hf]")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny_run(folder)
    return folder


@pytest.fixture
def with_code(made: Path, tmp_path: Path) -> Path:
    """A checkpoint that brings a Python file, which says so if it runs."""
    folder = Path(shutil.copytree(made / "model", tmp_path / "model"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


def test_code_of_a_checkpoint_never_runs_and_nobody_is_asked(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "input", lambda *_: "yes")
    for read in (read_checkpoint, lambda source: load_model(source, "sequence-classification")):
        with pytest.raises(TaskError, match=r"config\.json has an auto_map, .* which is never run"):
            read(str(with_code))
    with pytest.raises(TaskError, match="cannot load the tokenizer"):
        load_tokenizer(str(with_code))
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_known_architecture_is_refused_too(with_code: Path) -> None:
    """transformers would read such a checkpoint by its own class, which may not be what it was trained as."""
    config = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(TaskError, match="has an auto_map"):
        read_checkpoint(str(with_code))


def test_a_label_beyond_the_classes_is_told_before_anything_runs(made: Path) -> None:
    model = load_model(str(made / "model"), "sequence-classification")
    task = build_task("sequence-classification", model, load_tokenizer(str(made / "model")), max_length=16)
    assert np.array_equal(task.targets([Text("a", 1), Text("b", 0)]), [1, 0])
    with pytest.raises(TaskError, match=r"the samples have label 7, but the model has 2 classes \(0 to 1\)"):
        task.targets([Text("a", 1), Text("b", 7)])


def test_names_that_no_file_can_have() -> None:
    with pytest.raises(TaskError, match="is neither a folder nor a model name"):
        read_checkpoint("\0" + "x" * 300)


def test_damage_that_transformers_raises_anything_for(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "model", tmp_path / "model"))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokens, "pre_tokenizer": {"type": "none such"}}))
    with pytest.raises(TaskError, match="cannot load the tokenizer of model source"):
        load_tokenizer(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(TaskError, match="cannot load the config of model source"):
        read_checkpoint(str(folder))


def _run_file(made: Path, tmp_path: Path, **changes: Any) -> Any:
    from quantizer.config import load_run

    run = {**tiny_run(tmp_path), **changes}
    (tmp_path / "run.json").write_text(json.dumps(run))  # JSON is YAML
    return load_run(tmp_path / "run.json")


def _carried_out(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that may not begin to calibrate."""
    from rich.console import Console

    from quantizer.pipeline import run as pipeline
    from quantizer.quantizer import Quantizer

    def no_pass(*_: object, **__: object) -> None:
        raise AssertionError("it calibrates, and the mistake was not told")

    monkeypatch.setattr(Quantizer, "calibrate", no_pass)
    pipeline.run(config, tmp_path / "out", False, Console(quiet=True))


def test_a_run_tells_of_labels_before_it_calibrates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _run_file(made, tmp_path)
    rows = (tmp_path / "evaluation.csv").read_text().splitlines()
    (tmp_path / "evaluation.csv").write_text("\n".join([*rows, "the film,7"]))
    with pytest.raises(TaskError, match="the samples have label 7"):
        _carried_out(config, tmp_path, monkeypatch)


def test_a_run_tells_of_missing_packages_before_it_calibrates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantizer.report import page as html

    def missing() -> None:
        raise MissingDependencyError("jinja2", "report")

    monkeypatch.setattr(html, "_environment", missing)
    with pytest.raises(MissingDependencyError, match="'jinja2' is not installed"):
        _carried_out(_run_file(made, tmp_path), tmp_path, monkeypatch)


def test_a_run_tells_of_a_missing_gpu_before_it_calibrates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU to build on")
    config = _run_file(made, tmp_path, quantizer={"backend": "tensorrt"})
    with pytest.raises((EngineError, MissingDependencyError), match="tensorrt"):
        _carried_out(config, tmp_path, monkeypatch)


def test_a_run_tells_of_a_rule_that_matches_nothing_before_it_calibrates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = [{"names": ["no_such_module"], "weights": "int8"}]
    config = _run_file(made, tmp_path, quantizer={"backend": "openvino", "formats": formats})
    with pytest.raises(ConfigError, match="no_such_module"):
        _carried_out(config, tmp_path, monkeypatch)


def test_a_run_tells_of_more_tokens_than_positions_before_it_calibrates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _run_file(
        made,
        tmp_path,
        export={"dynamic": {"batch": [1, 2, 8], "sequence": [16, 16, 128]}},
        report={"latency_batch": 2, "latency_sequence": 100},
    )
    with pytest.raises(TaskError, match="sequence=100, but the model has 64 positions"):
        _carried_out(config, tmp_path, monkeypatch)


def test_a_file_that_is_no_image_is_told_before_anything_runs(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from quantizer.tasks.image_inputs import ImageInputs

    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(TaskError, match=r"a\.png cannot be read as an image"):
        ImageInputs.check(object.__new__(ImageInputs), [Image(tmp_path / "a.png", "0").path])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3_000}, "num_hidden_layers is 3000, expected at most 2000 layers"),
        ({"text_config": {"depths": [2, 2**63]}}, r"depths is \[2, 9223372036854775808\], expected at most"),
    ],
)
def test_a_config_with_endless_layers_is_refused_before_they_are_built(
    made: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = Path(shutil.copytree(made / "model", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(TaskError, match=said):
        read_checkpoint(str(folder))
