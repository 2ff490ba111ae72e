"""Interrupts that the exporter swallows end the work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import Terminated, end_as_on_ctrl_c
from quantizer.utils.child_process import interrupts_end_the_block


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _swallow(number: int) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)


def _fail(number: int) -> None:
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt as stop:
        raise RuntimeError("the trace failed") from stop


@pytest.mark.parametrize("lose", [_swallow, _fail])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_lost_interrupt_ends_the_block(
    lose: Callable[[int], None], number: signal.Signals, kind: type[BaseException]
) -> None:
    with end_as_on_ctrl_c():
        outer = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt) as told, interrupts_end_the_block():
            lose(number)
        assert told.type is kind
        assert signal.getsignal(number) is outer


def test_what_the_block_raises_without_an_interrupt_is_raised() -> None:
    with pytest.raises(ValueError, match="wrong"), interrupts_end_the_block():
        raise ValueError("wrong")


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_end_the_block():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_is_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with interrupts_end_the_block():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


class _Interrupted(nn.Module):
    """Loses an interrupt while it is traced, as fake tensors of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            _swallow(signal.SIGINT)
        return self.linear(x)


def test_an_interrupt_that_the_export_loses_ends_it_and_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantizer.Quantizer().export(_Interrupted().eval(), tmp_path / "float.onnx", torch.zeros(2, 4))
    assert not list(tmp_path.iterdir())
