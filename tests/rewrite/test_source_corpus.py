"""The modelling files of transformers: rewriting keeps the lines, compiles, and strips back to the original tree."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tools import sites_of, stripped
from torch import nn
from torch.nn import functional

from quantizer.rewrite.source_file import SourceFile

# Architectures that differ in how they write their products; a fixed choice, so that a failure can be repeated.
SAMPLE = (
    *("albert", "align", "bart", "beit", "bert", "blip", "bloom", "clip", "clipseg", "convbert", "deberta_v2"),
    *("deit", "detr", "dinov2", "distilbert", "electra", "esm", "falcon", "funnel", "gpt2", "hubert", "layoutlmv3"),
    *("llama", "longformer", "mamba", "mobilevit", "modernbert", "mpnet", "mra", "nystromformer", "perceiver"),
    *("reformer", "roberta", "roformer", "sam", "segformer", "swin", "t5", "vit", "wav2vec2", "whisper", "xlnet"),
)


def _files() -> dict[str, Path]:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    return {path.parent.name: path for path in sorted(Path(found.origin).parent.glob("models/*/modeling_*.py"))}


FILES = _files()
pytestmark = pytest.mark.skipif(not FILES, reason="the corpus is that of transformers: install enginequant[hf]")


def _namespace(tree: ast.Module, name: str) -> dict[str, Any]:
    """What the file's own imports of torch give, without importing the file."""
    return {"__name__": name, "torch": torch, "nn": nn, "F": functional, "functional": functional}


def _check(path: Path) -> int:
    """Rewrite a file; the number of sites that were wrapped."""
    text = path.read_text(encoding="utf-8")
    file = SourceFile(str(path), _namespace(ast.parse(text), path.stem))
    assert file.text == text
    result = file.rewritten_text()
    assert result.count("\n") == text.count("\n")
    changed = [(a, b) for a, b in zip(text.split("\n"), result.split("\n"), strict=True) if a != b]
    assert all(any(part in after for part in (".site_", ",", ")", "_quantizer_")) for _, after in changed)
    compile(result, str(path), "exec", dont_inherit=True)
    tree = ast.dump(ast.parse(text))
    assert stripped(file) == tree
    for function in file.functions.values():
        for call in function.calls:
            file.pass_host(call)
    assert stripped(file) == tree
    assert file.rewritten_text().count("\n") == text.count("\n")
    sites = sites_of(file)
    attributes = [(function.key, site.attribute) for function in file.functions.values() for site in function.sites]
    assert len(set(attributes)) == len(attributes)
    assert all(bool(site.edits) != bool(site.reason) for site in sites)
    return sum(bool(site.edits) for site in sites)


@pytest.mark.parametrize("model", SAMPLE[::2])
def test_a_sample_of_files(model: str) -> None:
    assert model in FILES, "the sample names a model that this transformers has not"
    assert _check(FILES[model]) > 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_files() -> None:
    wrapped = {model: _check(path) for model, path in FILES.items()}
    assert len(wrapped) > 300
    assert sum(wrapped.values()) > 5000


@pytest.mark.nightly
def test_all_of_torchs_modules() -> None:
    paths = [path for path in sorted(Path(nn.__file__).parent.glob("**/*.py")) if path.stat().st_size]
    assert len(paths) > 100
    for path in paths:
        _check(path)
