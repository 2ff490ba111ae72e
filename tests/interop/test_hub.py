"""Upload to the Hub: what is sent, against a Hub that is a folder, and what is refused."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="the Hub needs enginequant[hf]")

from huggingface_hub.errors import HfHubHTTPError

from quantizer import push_to_hub
from quantizer.errors import QuantizerError

CARD = "---\nlibrary_name: openvino\nbase_model: owner/base\nbase_model_relation: quantized\n---\n\n# a card\n"


class RefusedError(HfHubHTTPError):
    """The error of the Hub without a response, whose class depends on the version."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class Hub:
    """Stands in for ``HfApi``: a repository is a folder."""

    def __init__(self, place: Path, fault: str | None = None) -> None:
        self.place, self.fault = place, fault

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> str:
        if self.fault is not None:
            raise RefusedError(self.fault)
        assert exist_ok
        (self.place / repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: Path,
        commit_message: str,
        path_in_repo: str = ".",
        ignore_patterns: Sequence[str] = (),
    ) -> None:
        assert commit_message.startswith("Upload ")
        for path in filter(Path.is_file, folder_path.rglob("*")):
            name = str(path.relative_to(folder_path))
            if not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                target = self.place / repo_id / path_in_repo / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """The folder of an engine with layouts."""
    names = ["README.md", "model.engine", "tokenizer/tokenizer.json", "triton/m/config.pbtxt"]
    names += [
        "openvino/README.md",
        "openvino/model.xml",
        "openvino/tokenizer/tokenizer.json",
        "optimum/README.md",
        "optimum/tokenizer.json",
    ]
    names += ["compressed-tensors/README.md", "compressed-tensors/model.safetensors"]
    for name in names:
        path = tmp_path / "openvino" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CARD if path.name == "README.md" else name, encoding="utf-8")
    return tmp_path / "openvino"


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        (".", {"README.md", "model.engine", "tokenizer/tokenizer.json", "triton/m/config.pbtxt"}),
        ("openvino", {"README.md", "model.xml", "tokenizer/tokenizer.json"}),
        ("optimum", {"README.md", "tokenizer.json"}),
        ("compressed-tensors", {"README.md", "model.safetensors"}),
    ],
)
def test_what_is_uploaded(converted: Path, tmp_path: Path, folder: str, files: set[str]) -> None:
    hub = Hub(tmp_path / "hub")
    address = push_to_hub(converted / folder, "me/my-model", token="hf_x", api=hub)
    assert address == "https://huggingface.co/me/my-model"
    place = hub.place / "me/my-model"
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == files


def test_a_missing_token(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub = Hub(tmp_path / "hub")
    with pytest.raises(
        QuantizerError, match=r"no token for the hub: me/m cannot .*; run `hf auth login`, set HF_TOKEN"
    ):
        push_to_hub(converted, "me/m")
    # An api of the caller has its own token.
    push_to_hub(converted, "me/m", api=hub)
    assert (hub.place / "me/m/README.md").exists()


def test_a_folder_without_a_card(converted: Path, tmp_path: Path) -> None:
    for folder in (converted / "tokenizer", tmp_path / "missing"):
        with pytest.raises(QuantizerError, match=r"has no README\.md, which is the model card; expected a folder"):
            push_to_hub(folder, "me/m", token="hf_x", api=Hub(tmp_path / "hub"))


def test_a_damaged_card(converted: Path, tmp_path: Path) -> None:
    text = "---\nmodel-index:\n- results: [{task: {type: t}}]\n---\n"
    for damaged in ("---\n- a list\n---\n", "---\na: [\n---\n", text):
        (converted / "README.md").write_text(damaged, encoding="utf-8")
        with pytest.raises(QuantizerError, match=r"README\.md has metadata that the hub rejects: "):
            push_to_hub(converted, "me/m", token="hf_x", api=Hub(tmp_path / "hub"))


@pytest.mark.parametrize("repo_id", ["my-model", "me/my model", "a/b/c", ""])
def test_a_name_that_is_no_repository(converted: Path, tmp_path: Path, repo_id: str) -> None:
    with pytest.raises(QuantizerError, match="is not a repository of the hub; expected OWNER/NAME"):
        push_to_hub(converted, repo_id, token="hf_x", api=Hub(tmp_path / "hub"))


def test_a_refused_upload(converted: Path, tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub", fault="403 Forbidden")
    with pytest.raises(QuantizerError, match="the hub refused them/m: 403 Forbidden; check that the token may write"):
        push_to_hub(converted, "them/m", token="hf_x", api=hub)
