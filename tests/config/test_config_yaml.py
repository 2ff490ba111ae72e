"""YAML with line numbers, and what is no configuration: tags, keys written twice, syntax errors, other encodings."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quantizer.config import load_run
from quantizer.config.yaml_file import parse_yaml, read_yaml
from quantizer.errors import ConfigError


def test_lines_of_keys_and_entries() -> None:
    document = parse_yaml("# header\na:\n  b: [1,\n      2]\n\nc: x\n", "f")
    assert document.value == {"a": {"b": [1, 2]}, "c": "x"}
    paths: list[tuple[str | int, ...]] = [("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("c",)]
    assert [document.line(path) for path in paths] == [2, 3, 3, 4, 6]
    assert document.line(("a", "missing")) is None
    assert document.line(("c", "deeper")) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2026-01-02", "2026-01-02"),
        ("a: '3'", "3"),
        ("a: =", "="),
        ("a: !!str 3", "3"),
        ("a: 1.5", 1.5),
        ("a: ~", None),
        ("a:", None),
        ("a: off", False),
        ("\ufeffa: 1", 1),
        ("a: |\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    document = parse_yaml(text, "f")
    assert document.value == {"a": value}
    assert type(document.value["a"]) is type(value)
    assert document.faults == []


@pytest.mark.parametrize(
    ("value", "what"),
    [
        *((value, "an octal number") for value in ("010", "-010", "0_1", "00")),
        *((value, "a base-60 number") for value in ("1:30", "190:20:30", "1:30.5")),
    ],
)
def test_numbers_that_yaml_reads_in_another_base(value: str, what: str) -> None:
    (fault,) = parse_yaml(f"a: 1\nb: {value}", "f").faults
    assert (fault.line, fault.path, fault.hole) == (2, ("b",), True)
    assert fault.text == f"YAML reads {value!r} as {what}; expected decimal digits without a leading 0: quote text"
    assert parse_yaml(f"b: '{value}'", "f").value == {"b": value}


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("0.5", 0.5), ("08", "08"), ("0x10", 16), ("1_000", 1000)])
def test_numbers_that_mean_what_they_say(text: str, value: object) -> None:
    document = parse_yaml(f"a: {text}", "f")
    assert document.faults == []
    assert document.value == {"a": value}


def test_an_alias_is_the_same_value() -> None:
    document = parse_yaml("a: &x {b: 1}\nc: *x\n", "f")
    assert document.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.line(("c", "b")) == 1


def test_many_aliases_do_not_explode() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)]
    assert parse_yaml("\n".join(lines), "f").faults == []


@pytest.mark.parametrize(
    ("text", "line", "path", "match"),
    [
        ("a: 1\nb: 2\na: 3", 3, ("a",), "appears twice, first in line 1"),
        ("x:\n  a: 1\n  a: 1", 3, ("x", "a"), "appears twice, first in line 2"),
        ("a: !!python/object/apply:os.system [ls]", 1, ("a",), "'!!python/object/apply:os.system' is not allowed"),
        ("a: !local x", 1, ("a",), "'!local' is not allowed"),
        ("a: !!set {x}", 1, ("a",), "'!!set' is not allowed"),
        ("a: !!binary aGk=", 1, ("a",), "'!!binary' is not allowed"),
        ("a: !!int x", 1, ("a",), "'x' is not a valid !!int"),
        ("a: !!bool x", 1, ("a",), "'x' is not a valid !!bool"),
        ("a: 99999999999999999999", 1, ("a",), "too large"),
        ("a: 1\n3: x", 2, (), "the key '3' is not text"),
        ("on: x", 1, (), "the key 'on' is not text"),
        ("? [a]\n: x", 1, (), "the key is not text"),
        ("a: &a {}\nb:\n  <<: *a", 3, ("b",), "merge keys"),
        ("a: &a\n  b: *a", 1, ("a", "b"), "contains itself"),
        ("&a [*a]", 1, (0,), "contains itself"),
    ],
)
def test_faults(text: str, line: int, path: tuple[str | int, ...], match: str) -> None:
    (fault,) = parse_yaml(text, "f").faults
    assert (fault.line, fault.path) == (line, path)
    assert match in fault.text
    assert "expected" in fault.text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: 1\nb: [1\nc: 2\n", r"f:3: the YAML cannot be parsed: .*expected valid YAML"),
        ("a: b: c", r"f:1: the YAML cannot be parsed: mapping values are not allowed"),
        ("a: 1\n\tb: 2", r"f:2: the YAML cannot be parsed"),
        ("a: 1\n---\nb: 2", r"f:2: the YAML cannot be parsed: expected a single document"),
        ("a: *x", r"f:1: the YAML cannot be parsed: found undefined alias 'x'"),
        ("a: 1\nb: \x00", r"f:2: the character '\\x00' is not allowed"),
        ("[" * 1500, r"f:1: the YAML is nested too deeply"),
    ],
)
def test_no_yaml_at_all(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_yaml(text, "f")


def test_missing_file_names_the_others(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no\.yaml: the file does not exist; .*in that folder: there\.yaml"):
        read_yaml(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"the file does not exist; expected a YAML file$"):
        read_yaml(tmp_path / "no" / "no.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder; expected a YAML file"):
        read_yaml(tmp_path)


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "f" / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml("a\0b")


@pytest.mark.parametrize("data", [b"a: 1\nb: \xff\n", "a: 1\nb: ä\n".encode("latin-1")])
def test_other_encodings(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"c\.yaml:2: byte 0x(ff|e4) is not UTF-8"):
        read_yaml(path)


def test_thousands_of_unknown_keys_are_told_in_no_time(tmp_path: Path) -> None:
    """Each was looked for along the whole file, and among all paths of the schema: 20,000 of them took a minute."""
    file = tmp_path / "many.yaml"
    file.write_text("\n".join(f"unknown_{number}: 1" for number in range(20_000)))
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"many\.yaml:20000: unknown_19999: unknown key") as caught:
        load_run(file)
    assert len(caught.value.problems) >= 20_000
    assert time.process_time() - started < 10  # of which PyYAML takes most
