"""Nothing that comes of quantizing changes unless a change is meant: see ``golden_record.py``."""

from __future__ import annotations

from typing import Any

import pytest
from golden_nets import NETS
from golden_record import BACKENDS, golden_of, machine, recorded

pytest.importorskip("transformers", reason="some of the nets are transformers models: install enginequant[hf]")
pytest.importorskip("onnx", reason="the nets are exported: install enginequant[onnx]")


# Up to half a minute of exports each: one of the two targets, the other one is in make nightly.
DAILY = {name: ("tensorrt-rtx" if name in ("decoder", "vision") else "openvino",) for name in sorted(NETS)}
Golden = tuple[str, dict[str, dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((name, backends), id=name) for name, backends in DAILY.items()),
        *(
            pytest.param((name, tuple(sorted({*BACKENDS} - {*some}))), id=f"{name}-others", marks=pytest.mark.nightly)
            for name, some in DAILY.items()
        ),
    ],
)
def golden(request: pytest.FixtureRequest) -> Golden:
    name, backends = request.param
    return name, golden_of(name, backends)


def test_what_is_said(golden: Golden) -> None:
    name, entries = golden
    for backend, entry in entries.items():
        assert entry["text"] == recorded(name)["text"][backend], backend


def test_every_bit(golden: Golden) -> None:
    name, entries = golden
    known = recorded(name)["bits"].get(machine())
    if known is None:
        pytest.skip(f"no bits were recorded on a machine like this one ({machine()})")
    # A backend is first recorded on one kind of machine.
    for backend in entries.keys() & known.keys():
        entry = entries[backend]
        assert {name: entry["bits"][name] for name in known[backend]} == known[backend], backend
