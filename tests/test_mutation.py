"""The mutation check's own parts: its table, its explanations, and the mutations that it adds to Cosmic Ray's."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "mutation" / "table.toml").read_text(encoding="utf-8"))
EXPLAINED = tomllib.loads((ROOT / "mutation" / "equivalent.toml").read_text(encoding="utf-8"))["equivalent"]


def _module(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"mutation_{name}", ROOT / "mutation" / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", TABLE["packages"])
def test_the_table_names_files_that_there_are(package: str) -> None:
    line = TABLE["packages"][package]
    for pattern in [*line["sources"], *line["tests"]]:
        assert list(ROOT.glob(pattern)), pattern


def test_every_explanation_is_whole() -> None:
    for entry in EXPLAINED:
        assert entry.keys() == {"file", "line", "mutant", "reason"}
        assert (ROOT / entry["file"]).exists(), entry["file"]
        assert entry["line"] != entry["mutant"]
        assert entry["reason"]
    assert len({tuple(entry.values()) for entry in EXPLAINED}) == len(EXPLAINED)


def test_own_mutations_are_those_of_their_examples() -> None:
    pytest.importorskip("cosmic_ray")
    from cosmic_ray.mutating import mutate_code

    for operator in _module("operators").PROVIDER.values():
        for example in operator.examples():
            mutated = mutate_code(example.pre_mutation_code, operator(), example.occurrence)
            assert mutated == example.post_mutation_code
            assert mutate_code(example.pre_mutation_code, operator(), example.occurrence + 2) is None
