"""The task ``retrieval``: rankings and their scores, prompts, and collections in the layouts of BEIR and TREC."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from quantizer.errors import TaskError
from quantizer.pipeline.context import score_record
from quantizer.tasks import Documents, Pair, Query, Task, build_task, load_examples, load_model, read_checkpoint
from quantizer.tasks.checkpoints import read_pooling
from quantizer.tasks.datasets.examples import content_of
from quantizer.tasks.retrieval import nearest, ranking_scores

NAME = "retrieval"
DOCUMENTS = {
    "d1": "the plane is fast",
    "d2": "the cat is slow",
    "d3": "a dull film",
    "d4": "a very good film",
    "d5": "",
}
QUERIES = {"q1": "a good film", "q2": "is the plane fast", "q3": "a dog and a cat"}
JUDGEMENTS = [("q1", "d4", 2), ("q1", "d3", 1), ("q2", "d1", 1), ("q2", "d2", 0), ("q1", "d1", -1)]


def _trec(folder: Path) -> Path:
    for name, texts in (("documents", DOCUMENTS), ("queries", QUERIES)):
        (folder / f"{name}.tsv").write_text("".join(f"{key}\t{text}\n" for key, text in texts.items()))
    (folder / "qrels.txt").write_text("".join(f"{query} 0 {name} {gain}\n" for query, name, gain in JUDGEMENTS))
    return folder


def _beir(folder: Path) -> Path:
    titles = {key: text.partition(" ")[::2] for key, text in DOCUMENTS.items()}
    documents = [{"_id": key, "title": title, "text": text} for key, (title, text) in titles.items()]
    queries = [{"_id": key, "text": text, "metadata": {}} for key, text in QUERIES.items()]
    for name, objects in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in objects))
    (folder / "qrels").mkdir()
    lines = [f"{query}\t{name}\t{gain}\n" for query, name, gain in JUDGEMENTS]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines[2])
    return folder


WRITERS = {"beir": _beir, "trec": _trec}


@pytest.fixture
def task(encoder: Any, tokenizer: Any) -> Task:
    return build_task(NAME, encoder, tokenizer, max_length=32, batch_size=4)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_a_ranking_scored_by_hand() -> None:
    gains = {7: 3.0, 2: 1.0, 9: 2.0}
    ranking = np.array([2, 4, 7, *range(10, 20)])
    found = 1 / math.log2(2) + 3 / math.log2(4)
    ideal = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert ranking_scores(ranking, gains) == pytest.approx((found / ideal, 2 / 3))
    assert ranking_scores(np.array([7, 9, 2]), gains) == pytest.approx((1.0, 1.0))
    assert ranking_scores(np.array([1, 3]), gains) == (0.0, 0.0)
    assert ranking_scores(np.array([1, 3]), {}) == (0.0, 0.0)


def test_only_the_first_documents_count() -> None:
    """NDCG takes 10 documents into account, recall 100."""
    ranking = np.arange(150)
    assert ranking_scores(ranking, {10: 1.0}) == (0.0, 1.0)
    assert ranking_scores(ranking, {9: 1.0, 120: 1.0}) == pytest.approx(
        (1 / math.log2(11) / (1 + 1 / math.log2(3)), 0.5)
    )
    many = dict.fromkeys(range(12), 1.0)
    assert ranking_scores(ranking, many) == pytest.approx((1.0, 1.0))


def test_ndcg_is_that_of_scikit_learn() -> None:
    pick = np.random.default_rng(0)
    for documents in (3, 12, 200):
        for _ in range(50):
            similarities, gains = pick.normal(size=documents), pick.integers(0, 4, size=documents)
            gains[0] = 3
            relevant = {place: float(gain) for place, gain in enumerate(gains) if gain}
            ndcg, recall = ranking_scores(np.argsort(-similarities), relevant)
            assert ndcg == pytest.approx(ndcg_score(gains[None], similarities[None], k=10))
            first = np.argsort(-similarities)[:100]
            assert recall == pytest.approx((gains[first] > 0).sum() / (gains > 0).sum())


def test_the_nearest_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    pick = np.random.default_rng(1)
    queries, documents = pick.normal(size=(7, 5)), pick.normal(size=(130, 5))
    expected = np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :100]
    np.testing.assert_array_equal(nearest(queries, documents), expected)
    monkeypatch.setattr("quantizer.tasks.retrieval._SCORES_AT_ONCE", 300)
    np.testing.assert_array_equal(nearest(queries, documents), expected)
    alone = nearest(documents, documents, left_out=np.arange(len(documents)))
    assert all(place not in row for place, row in enumerate(alone))
    assert nearest(np.ones((1, 2)), np.ones((3, 2))).tolist() == [[0, 1, 2]]


def test_a_model_is_scored_as_by_hand(task: Task, encoder: Any, tokenizer: Any, tmp_path: Path) -> None:
    examples = load_examples("trec", path=_trec(tmp_path))
    predictions = task.predict(lambda batch: encoder(**batch), examples)
    embeddings = []
    for text in (QUERIES["q1"], QUERIES["q2"], *DOCUMENTS.values()):
        with torch.no_grad():
            embeddings.append(encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0))
    expected = torch.nn.functional.normalize(torch.stack(embeddings), dim=-1)
    np.testing.assert_allclose(predictions.outputs, expected, atol=1e-5)
    gains = np.array([[0, 0, 1, 2, 0], [1, 0, 0, 0, 0]])
    scores = [
        ndcg_score(gain[None], row[None], k=10) for gain, row in zip(gains, expected[:2] @ expected[2:].T, strict=True)
    ]
    np.testing.assert_allclose(predictions.decisions, [[score, 1.0] for score in scores])
    assert task.score(predictions, examples) == pytest.approx(np.mean(scores))


def test_models_are_compared_on_the_same_queries(task: Task, encoder: Any, tmp_path: Path) -> None:
    examples = load_examples("trec", path=_trec(tmp_path))
    base = task.predict(lambda batch: encoder(**batch), examples)
    same = task.paired(base, base)
    assert same["recall_at_100"] == 1.0
    assert same["mean_cosine"] == pytest.approx(1.0)
    assert same["sqnr_db"] == math.inf
    assert {same[f"recall_at_100_difference{end}"] for end in ("", "_low", "_high")} == {0.0}
    assert task.difference_interval(base, base, examples) == (0.0, 0.0)
    worse = type(base)(base.outputs, base.decisions * [[0.5, 0.5], [1.0, 1.0]])
    lost = task.paired(base, worse)
    assert lost["recall_at_100_difference"] == pytest.approx(-0.25)
    assert (lost["recall_at_100_difference_low"], lost["recall_at_100_difference_high"]) == (-0.5, 0.0)
    drop = base.decisions[0, 0] / 2
    assert task.difference_interval(base, worse, examples) == pytest.approx((-drop, 0.0))
    assert len(task.resampled(worse, examples, 20)) == 20


def test_the_score_of_an_engine_beside_that_of_float(task: Task, encoder: Any, tmp_path: Path) -> None:
    examples = load_examples("trec", path=_trec(tmp_path))
    base = task.predict(lambda batch: encoder(**batch), examples)
    other = task.predict(lambda batch: -encoder(**batch).last_hidden_state + 0.5, examples)
    record = score_record("engine", task, base, other, examples, 50)
    assert (record.metric, record.samples, record.higher_is_better) == ("ndcg_at_10", 2, True)
    assert record.value == pytest.approx(other.decisions[:, 0].mean())
    assert record.difference == pytest.approx((other.decisions - base.decisions)[:, 0].mean())
    assert record.interval is not None
    assert record.interval[0] <= record.difference <= record.interval[1]
    assert record.paired.keys() >= {"recall_at_100", "recall_at_100_difference_low", "recall_at_100_difference_high"}


# -- the task ----------------------------------------------------------------------------------------------------------


def test_a_calibration_reads_queries_and_documents(task: Task, tmp_path: Path) -> None:
    examples = load_examples("beir", path=_beir(tmp_path))
    assert task.samples(examples) == [QUERIES["q1"], DOCUMENTS["d4"], QUERIES["q2"], DOCUMENTS["d1"]]
    assert len(task.batches(examples)) == 1


def test_queries_and_documents_have_their_prompts(encoder: Any, tokenizer: Any, tmp_path: Path) -> None:
    def saved(prompts: object, default: str | None = None, **pooling: object) -> str:
        encoder.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        kind = "sentence_transformers.models."
        modules = [{"type": f"{kind}{name}", "path": path} for name, path in (("Transformer", ""), ("Pooling", "1"))]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1").mkdir(exist_ok=True)
        (tmp_path / "1" / "config.json").write_text(json.dumps({"pooling_mode": "cls", **pooling}))
        settings = {"prompts": prompts, "default_prompt_name": default}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
        return str(tmp_path)

    source = saved({"query": "a cat . ", "passage": "a dog . "})
    model = load_model(source, NAME)
    task = build_task(NAME, model, tokenizer, max_length=32)
    query = Query("good", ((0, 1.0),), Documents(("bad",)))
    prompted = ["a cat . good", "a dog . bad"]
    assert task.samples([query]) == prompted
    outputs = task.outputs(lambda batch: model(**batch), [query])
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in prompted]
    np.testing.assert_allclose(outputs, torch.stack(expected), atol=1e-5)
    pooling = read_pooling(saved({"all": "the ", "document": ""}, "all"))
    assert (pooling.prompt, pooling.query_prompt, pooling.document_prompt) == ("the ", "", "")
    assert read_pooling(saved(["query"])).query_prompt == ""
    with pytest.raises(TaskError, match="its prompt is 'query', but prompts has no text of this name"):
        read_pooling(saved({"query": 3}))
    source = saved({"query": "the "}, include_prompt=False)
    assert read_pooling(source).query_prompt == "the "
    with pytest.raises(TaskError, match=r"leaves out the tokens of a prompt \(include_prompt\)"):
        load_model(source, NAME)


def test_samples_that_do_not_fit(task: Task, encoder: Any) -> None:
    with pytest.raises(TaskError, match=r"needs samples of kind Query, got Pair: .*, like 'beir', 'trec'"):
        task.targets([Pair("a", "b", 1.0)])
    with pytest.raises(TaskError, match="task 'retrieval' was given no samples, expected at least one"):
        task.predict(lambda batch: encoder(**batch), [])
    several = [Query("a", ((0, 1.0),), Documents((text,))) for text in ("good", "bad")]
    with pytest.raises(TaskError, match="the queries have several collections; score each one alone"):
        task.targets(several)
    with pytest.raises(TaskError, match=r"task 'retrieval' scores embeddings with their samples: call predict\(\)"):
        task.predictions(np.ones((2, 3), dtype=np.float32))


def test_a_bare_encoder_is_first_for_similarity(encoder: Any, tmp_path: Path) -> None:
    encoder.save_pretrained(tmp_path)
    assert read_checkpoint(str(tmp_path)).task == "sentence-similarity"
    assert read_checkpoint(str(tmp_path), NAME).positions == 64


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_both_layouts_hold_the_same(tmp_path: Path, name: str) -> None:
    examples = load_examples(name, path=WRITERS[name](tmp_path))
    documents = Documents(tuple(DOCUMENTS.values()))
    assert examples == [
        Query(QUERIES["q1"], ((3, 2.0), (2, 1.0)), documents),
        Query(QUERIES["q2"], ((0, 1.0),), documents),
    ]
    assert load_examples(name, path=tmp_path, offset=1, samples=1) == examples[1:]


def test_a_query_names_its_collection_in_few_words() -> None:
    many = Documents(tuple(f"document {number}" for number in range(1000)))
    query = Query("a", ((0, 1.0),), many)
    assert len(repr(query)) < 200
    changed = Query("a", ((0, 1.0),), Documents((*many.texts[:-1], "another")))
    assert content_of([query]) != content_of([changed])
    assert content_of([query]) == content_of([Query("a", ((0, 1.0),), Documents(many.texts))])


def test_a_split_of_beir(tmp_path: Path) -> None:
    (example,) = load_examples("beir", path=_beir(tmp_path), split="train")
    assert isinstance(example, Query)
    assert example.text == QUERIES["q2"]
    with pytest.raises(TaskError, match=r"has no split 'dev'; expected one of test, train"):
        load_examples("beir", path=tmp_path, split="dev")
    with pytest.raises(TaskError, match="data set 'beir' has no subsets, but subset='a' was given"):
        load_examples("beir", path=tmp_path, subset="a")
    with pytest.raises(TaskError, match="data set 'trec' has no splits, but split='test' was given"):
        load_examples("trec", path=tmp_path, split="test")


def _line(key: str, text: str) -> str:
    return json.dumps({"_id": key, "text": text}) + "\n"


HEADER = "query-id\tcorpus-id\tscore\n"
FAULTS = [
    ("trec", "documents.tsv", None, r"data set 'trec': there is no file .*documents\.tsv"),
    ("trec", "queries.tsv", None, r"there is no file .*queries\.tsv"),
    ("trec", "qrels.txt", None, r"there is no file .*qrels\.txt"),
    ("trec", "documents.tsv", "d1\tone\nd2 two\n", r"documents\.tsv:2: 'd2 two', expected an identifier, a tab and a"),
    ("trec", "documents.tsv", "\tone\n", r"documents\.tsv:1: 'one', expected an identifier, a tab and a text"),
    ("trec", "documents.tsv", "d1\tone\n\nd1\ttwo\n", r"documents\.tsv:3: a second document 'd1'; expected each"),
    ("trec", "queries.tsv", "q1\tone\nq1\ttwo\n", r"queries\.tsv:2: a second query 'q1'; expected each identifier"),
    ("trec", "queries.tsv", "q1\t\n", r"queries\.tsv:1: the query 'q1' has no text; remove it with its judgements"),
    ("trec", "qrels.txt", "q1 0 d1 1\nq1 d2 1\n", r"qrels\.txt:2: 3 fields, expected 4: query, 0, document, judgement"),
    ("trec", "qrels.txt", "q1 0 d1 high\n", r"qrels\.txt:1: the judgement is 'high', expected a number; above 0 is"),
    ("trec", "qrels.txt", "q1 0 d1 nan\n", r"qrels\.txt:1: the judgement is 'nan'"),
    ("trec", "qrels.txt", "q1 0 d1 1\nq9 0 d1 1\n", r"qrels\.txt:2: there is no query 'q9'; expected judgements of"),
    ("trec", "qrels.txt", "q1 0 d9 1\n", r"qrels\.txt:1: there is no document 'd9'; .* the files belong together"),
    ("trec", "qrels.txt", "q1 0 d1 1\nq1 0 d1 2\n", r"qrels\.txt:2: the document 'd1' is judged twice for the query"),
    ("trec", "qrels.txt", "q1 0 d1 0\n", r"qrels\.txt: no query has a relevant document; expected judgements above 0"),
    ("trec", "qrels.txt", "", r"qrels\.txt: no query has a relevant document"),
    ("trec", "documents.tsv", b"d1\tcaf\xe9\n", r"documents\.tsv is not UTF-8 text"),
    ("beir", "corpus.jsonl", None, r"data set 'beir': there is no file .*corpus\.jsonl"),
    ("beir", "queries.jsonl", None, r"there is no file .*queries\.jsonl"),
    ("beir", "qrels/test.tsv", None, r"there is no file .*test\.tsv"),
    ("beir", "corpus.jsonl", "d1\n", r"corpus\.jsonl:1: not JSON"),
    (
        "beir",
        "corpus.jsonl",
        '{"text": "a"}',
        r"corpus\.jsonl:1: .*expected an object like \{\"_id\": \"d1\", \"text\"",
    ),
    ("beir", "corpus.jsonl", '{"_id": 1, "text": "a"}', r"corpus\.jsonl:1: .*expected an object like"),
    ("beir", "corpus.jsonl", _line("d1", "a") * 2, r"corpus\.jsonl:2: a second document 'd1'"),
    ("beir", "queries.jsonl", _line("q1", "a") * 2, r"queries\.jsonl:2: a second query 'q1'"),
    ("beir", "qrels/test.tsv", "q1\td1\t1\n", r"test\.tsv:1: .*expected the header query-id corpus-id score, with"),
    ("beir", "qrels/test.tsv", f"{HEADER}q1 d1 1\n", r"test\.tsv:2: 1 fields, expected 3 with tabs, as above"),
    ("beir", "qrels/test.tsv", f"{HEADER}q1\td9\t1\n", r"test\.tsv:2: there is no document 'd9'"),
    ("beir", "qrels/test.tsv", HEADER, r"test\.tsv: no query has a relevant document"),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), FAULTS)
def test_a_fault_is_told_with_its_place(
    tmp_path: Path, name: str, file: str, content: str | bytes | None, message: str
) -> None:
    path = WRITERS[name](tmp_path) / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskError, match=message):
        load_examples(name, path=tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_wrong(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=f"data set '{name}' needs a folder, but no path was given"):
        load_examples(name)
    with pytest.raises(TaskError, match="there is no folder"):
        load_examples(name, path=tmp_path / "missing")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(TaskError, match=r"a\.txt is a file, expected a folder"):
        load_examples(name, path=tmp_path / "a.txt")
