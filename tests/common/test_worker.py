"""One process for several requests: which changes of the environment start another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quantizer.errors import EngineError
from quantizer.utils.worker import Worker

MODULE = """
import os

from quantizer.utils.worker import serve

serve(lambda name: [os.getpid(), os.environ.get(name)], ())
"""


@pytest.mark.parametrize(
    ("name", "restarts"), [("TORCHINDUCTOR_CACHE_DIR", False), ("OMP_NUM_THREADS", True)], ids=["torch's", "the user's"]
)
def test_what_torch_sets_at_its_first_use_starts_no_other_process(
    name: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells_its_number.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(name, "1")
    with Worker("tells_its_number") as worker:
        first, seen = worker.ask("first", name, doing="a test", timeout_s=60)
        assert seen == "1"
        monkeypatch.setenv(name, "2")
        second, _ = worker.ask("second", name, doing="a test", timeout_s=60)
    assert (second != first) is restarts


ANSWERS = """
import os
import time

from quantizer.utils.worker import serve


def carry_out(word):
    if word == "crash":
        os.kill(os.getpid(), 9)
    if word == "hang":
        time.sleep(60)
    if word == "refuse":
        raise ValueError("of the library")
    return [word, os.getpid()]


serve(carry_out, (ValueError,))
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker("answers") as worker:
        yield worker


def _asked(worker: Worker, word: str, timeout_s: float = 60) -> object:
    try:
        return worker.ask(word, word, doing=word, timeout_s=timeout_s)[0]
    except EngineError as error:
        return str(error)


@pytest.mark.parametrize(
    ("word", "message"),
    [("crash", "crash crashed: Killed (signal 9)"), ("refuse", "refuse failed: of the library")],
)
@pytest.mark.parametrize("order", [("first", "{}", "last"), ("last", "first", "{}"), ("{}", "last", "first")])
def test_replies_to_requests_that_began_early(word: str, message: str, order: tuple[str, ...], answers: Worker) -> None:
    """Whatever is asked first, an error belongs to its own request, and the later ones are carried out."""
    for name in ("first", word, "last"):
        answers.begin(name, name)
    expected = {"first": "first", word: message, "last": "last"}
    for name in [one.format(word) for one in order]:
        assert _asked(answers, name) == expected[name]
    # Not the old reply.
    assert _asked(answers, word) == message


def test_one_that_hangs_leaves_the_others_their_replies(answers: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    line, waits = Worker._line, iter([0.5])
    # The first reply is waited for in vain. The process that starts then has the time that it needs.
    monkeypatch.setattr(Worker, "_line", lambda self, process, limit: line(self, process, next(waits, limit)))
    answers.begin("hang", "hang")
    answers.begin("other", "other")
    assert _asked(answers, "other") == "other"
    assert _asked(answers, "hang") == "hang took more than 60 s"


def test_nothing_is_left_to_do_when_times_are_measured(answers: Worker) -> None:
    for name in ("crash", "other"):
        answers.begin(name, name)
    answers.finish(60)
    process = answers._process
    assert process is not None
    process.kill()
    assert _asked(answers, "other") == "other"
    assert _asked(answers, "crash") == "crash crashed: Killed (signal 9)"


@pytest.mark.parametrize("fate", ["done", "crash"])
def test_a_reply_that_is_there_is_seen_without_waiting(fate: str, answers: Worker) -> None:
    assert not answers.has_replied(fate, 0)
    for name in ("first", fate, "last"):
        answers.begin(name, name)
    # Both replies may arrive together.
    assert _asked(answers, "first") == "first"
    while not answers.has_replied(fate, 60):
        pass
    assert answers.has_replied(fate, 0)
    assert _asked(answers, fate) == ("done" if fate == "done" else "crash crashed: Killed (signal 9)")
    assert not answers.has_replied(fate, 0)
    assert _asked(answers, "last") == "last"
