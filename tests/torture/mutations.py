"""Damage to files: of bytes, of text, and of the values that a text holds. The same seed does the same damage."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

Mutation = Callable[[bytes, random.Random], bytes]

_DEEP = (90, 1_000, 100_000)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.5, 1e308, 1e-320),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "x",
        "0",
        "null",
        "a" * 5_000,
        "9" * 5_000,
        "\u0000",
        "\U0001f600",
    ),
    *(
        "\u0000",
        "\U0001f600",
        "half \ud800 pair",
        "../../x",
        [],
        [1],
        [[]],
        [None],
        {},
        {"a": 1},
        {"": {}},
        ["x"] * 2_000,
    ),
)
_WORDS = (b"[", b"]", b"{", b"}", b"- ", b": ", b"&a ", b"*a", b"!!python/object:os.system ", b"!!binary ", b"<<: ")
_BYTES = (b"\x00", b"\xff", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\r", b"\t", b"\x0c", b'"', b"'", b",", b"#", b"%")


def mutated(content: bytes, pick: random.Random, how: tuple[Mutation, ...]) -> bytes:
    """Damage of one of several kinds, never none."""
    for _ in range(50):
        damaged = pick.choice(how)(content, pick)
        if damaged != content:
            return damaged
    return content + b"\x00"


def raw(content: bytes, pick: random.Random) -> bytes:
    """Bits that flip, bytes that are lost, put in, doubled or zeroed."""
    data = bytearray(content)
    size = len(data)
    at = pick.randrange(size + 1)
    some = pick.choice((1, 1, 2, 8, 64, 512, 4096))
    match pick.randrange(9):
        case 0 | 1:
            for _ in range(pick.choice((1, 1, 1, 3, 20))):
                if size:
                    data[pick.randrange(size)] ^= 1 << pick.randrange(8)
        case 2:
            data[at : at + some] = pick.randbytes(len(data[at : at + some]))
        case 3:
            data[at : at + some] = bytes([pick.choice((0, 255))]) * len(data[at : at + some])
        case 4:
            del data[at:]
        case 5:
            del data[at : at + some]
        case 6:
            data[at:at] = pick.randbytes(some)
        case 7:
            data[at:at] = data[at : at + some]
        case _:
            data += pick.randbytes(some)
    return bytes(data)


def text(content: bytes, pick: random.Random) -> bytes:
    """Lines that are lost, doubled, moved or indented, and words and bytes that mean something to a parser."""
    lines = content.split(b"\n")
    at = pick.randrange(len(lines))
    match pick.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, pick.choice(lines))
        case 2:
            other = pick.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = b" " * pick.choice((1, 2, 7)) + lines[at]
        case 4:
            return _inserted(content, pick, pick.choice(_WORDS))
        case 5:
            return _inserted(content, pick, pick.choice(_BYTES) * pick.choice((1, 1, 3)))
        case 6:
            bracket = pick.choice((b"[", b"{", b"- ", b'{"a":'))
            return _inserted(content, pick, bracket * pick.choice(_DEEP))
        case _:
            return _inserted(content, pick, b"9" * pick.choice((20, 400, 5_000)))
    return b"\n".join(lines)


def cells(content: bytes, pick: random.Random) -> bytes:
    """A field of a table of text that holds something else."""
    lines = content.split(b"\n")
    at = pick.randrange(len(lines))
    fields = lines[at].split(b",")
    fields[pick.randrange(len(fields))] = pick.choice(
        (b"", b"-1", b"1.5", b"nan", b"inf", b"9" * 5_000, str(2**63).encode(), "\u0663".encode(), b'"', b'"a\n', b"x")
    )
    lines[at] = b",".join(fields)
    return b"\n".join(lines)


def json_text(content: bytes, pick: random.Random) -> bytes:
    """A JSON text in which one value is another, or a key is."""
    return json.dumps(_changed(json.loads(content), pick)).encode()


def yaml_text(content: bytes, pick: random.Random) -> bytes:
    """The same of YAML."""
    values = _changed(yaml.safe_load(content), pick)
    return yaml.dump(values, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=False).encode()


def safetensors_header(content: bytes, pick: random.Random) -> bytes:
    """A file of tensors whose header is another valid JSON text."""
    size = int.from_bytes(content[:8], "little")
    header = json_text(content[8 : 8 + size], pick)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _inserted(content: bytes, pick: random.Random, piece: bytes) -> bytes:
    at = pick.randrange(len(content) + 1)
    return content[:at] + piece + content[at:]


def _changed(values: Any, pick: random.Random) -> Any:
    """A copy in which one value, anywhere, is another, is lost, or stands under another key."""
    values = copy.deepcopy(values)
    places: list[tuple[Any, Any]] = []
    waiting = [values]
    while waiting:
        here = waiting.pop()
        inside = list(here.items()) if isinstance(here, dict) else list(enumerate(here))
        places += [(here, key) for key, _ in inside]
        waiting += [value for _, value in inside if isinstance(value, dict | list)]
    if not places:
        return pick.choice(_VALUES)
    # Long lists of like entries would get nearly all of the damage otherwise.
    shallow = [place for place in places if place[0] is values]
    here, key = pick.choice(shallow if pick.random() < 0.2 else places)
    match pick.randrange(8):
        case 0:
            del here[key]
        case 1:
            other, its_key = pick.choice(places)
            here[key] = copy.deepcopy(other[its_key]) if its_key in other or isinstance(other, list) else None
        case 2 if isinstance(here, dict):
            here[pick.choice(("", "x", "name", "a" * 300, str(key) + "_"))] = here.pop(key)
        case 3 if isinstance(here, list):
            here.insert(key, copy.deepcopy(here[key]))
        case 4 if isinstance(here[key], int | float) and not isinstance(here[key], bool):
            here[key] = pick.choice((here[key] + 1, -here[key], here[key] * 2**40, here[key] + 0.5, str(here[key])))
        case _:
            here[key] = pick.choice(_VALUES)
    return values
