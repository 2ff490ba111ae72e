"""Tests of the clients convert their models once in a session, and again in the next."""

from __future__ import annotations

from pathlib import Path

import pytest

for _package in ("transformers", "onnx", "openvino", "PIL", "scipy"):
    pytest.importorskip(_package, reason="the models of the clients need enginequant[hf,onnx,openvino]")

import client_models
from client_models import begin, converted


def test_models_of_another_session_are_removed(tmp_path: Path) -> None:
    made = tmp_path / "clients"
    (made / "fill-mask").mkdir(parents=True)
    begin(made, "first")
    assert [path.name for path in made.iterdir()] == ["session"]
    (made / "fill-mask").mkdir()
    begin(made, "first")
    assert (made / "fill-mask").exists()
    begin(made, "second")
    assert not (made / "fill-mask").exists()


def test_a_converted_model_of_another_session_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_models, "MADE", tmp_path)
    (tmp_path / "fill-mask" / "openvino").mkdir(parents=True)

    def converts(model: Path, output: Path, *_: str) -> None:
        assert not output.exists()
        output.mkdir()

    monkeypatch.setattr(client_models, "convert", converts)
    assert converted("fill-mask", "openvino") == tmp_path / "fill-mask" / "openvino" / "openvino"
    # Within a session it is converted once.
    converted("fill-mask", "openvino")
