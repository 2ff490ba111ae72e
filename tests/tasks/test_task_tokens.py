"""Tasks with an answer in the tokens: their scores are checked on outputs made by hand, and against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_text import tiny_config
from transformers import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from quantizer.errors import TaskError
from quantizer.tasks import (
    Plain,
    Question,
    Words,
    build_task,
    load_examples,
    load_model,
    load_tokenizer,
    read_checkpoint,
)

TAGS = ["O", "B-animal", "I-animal", "B-thing"]
WORDS = [
    Words(("the", "cat", "dog", "was", "fast"), ("O", "B-animal", "I-animal", "O", "O")),
    Words(("a", "plane"), ("O", "B-thing")),
    Words(("not", "very", "good", "film"), ("O", "O", "O", "B-thing")),
]
QUESTIONS = [
    Question("a cat", "the dog is very fast and good .", (("very fast", 11),)),
    Question("a film", "the film was dull , and the plane was slow .", (("dull", 13), ("was dull", 9))),
]
PLAIN = [Plain("the cat is fast and the dog is not very slow ."), Plain("a good film , not a bad plane .")]


@pytest.fixture(scope="module")
def tagger(tokenizer):
    torch.manual_seed(0)
    model = BertForTokenClassification(tiny_config(id2label=dict(enumerate(TAGS)))).eval()
    return build_task("token-classification", model, tokenizer, max_length=16, batch_size=2)


@pytest.fixture(scope="module")
def answerer(tokenizer):
    torch.manual_seed(0)
    return build_task("question-answering", BertForQuestionAnswering(tiny_config()).eval(), tokenizer, max_length=24)


def _tags(task, examples):
    """Return a model that gives each word the tag of its row, found by the words of the text."""
    pairs = [pair for example in examples for pair in zip(example.words, example.tags, strict=True)]
    of = {task.inputs.tokenizer.convert_tokens_to_ids(word): tag for word, tag in pairs}

    def run(batch):
        logits = torch.zeros(*batch["input_ids"].shape, len(TAGS))
        for at in torch.cartesian_prod(*map(torch.arange, batch["input_ids"].shape)):
            tag = of.get(int(batch["input_ids"][tuple(at)]), "O")
            logits[(*at, TAGS.index(tag))] = 5.0
        return {"logits": logits}

    return run


def test_right_tags_have_f1_of_one(tagger):
    found = tagger.predict(_tags(tagger, WORDS), WORDS)
    assert found.outputs.shape == (3, 7, len(TAGS))
    assert tagger.score(found, WORDS) == 1.0
    assert tagger.difference_interval(found, found, WORDS, 50) == (0.0, 0.0)
    assert tagger.paired(found, found)["label_flips"] == 0.0


def test_f1_counts_whole_entities(tagger):
    # "cat dog" is one animal: without its second word it is another entity, said and wrong.
    said = [Words(WORDS[0].words, ("O", "B-animal", "O", "O", "O")), *WORDS[1:]]
    found = tagger.predict(_tags(tagger, said), WORDS)
    assert tagger.counts(found, WORDS).tolist() == [[0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert tagger.score(found, WORDS) == pytest.approx(2 * 2 / (3 + 3))
    right = tagger.predict(_tags(tagger, WORDS), WORDS)
    changed = tagger.paired(right, found)
    # One token of the 17 that three rows have with their first and last.
    assert changed["label_flips"] == pytest.approx(1 / 17)
    low, high = tagger.difference_interval(right, found, WORDS, 200)
    assert low <= -1 / 3 <= high <= 0


def test_rows_are_counted_once(tagger, monkeypatch):
    found = tagger.predict(_tags(tagger, WORDS), WORDS)
    counted = []
    counts = tagger.counts
    monkeypatch.setattr(tagger, "counts", lambda *given: (counted.append(given), counts(*given))[1])
    assert tagger.score(found, WORDS) == 1.0
    tagger.difference_interval(found, found, list(WORDS), 20)
    assert len(counted) == 1
    with pytest.raises(TaskError, match="3 predictions but 2 samples: pass the samples predicted on"):
        tagger.score(found, WORDS[:2])
    assert tagger.score(found, [WORDS[1], WORDS[0], WORDS[2]]) < 1.0
    assert len(counted) == 2


def test_words_that_are_cut_off_are_missed(tokenizer):
    model = BertForTokenClassification(tiny_config(id2label=dict(enumerate(TAGS)))).eval()
    task = build_task("token-classification", model, tokenizer, max_length=4)
    found = task.predict(_tags(task, WORDS), WORDS)
    # Two words of each row are read: of the first one the beginning of its entity, of the last one none of it.
    assert task.counts(found, WORDS).tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]


def test_a_tag_that_the_model_does_not_have(tagger):
    with pytest.raises(
        TaskError,
        match=r"sample 2 has the tag 'B-place', which the model does not have; expected "
        r"one of",
    ):
        tagger.targets([WORDS[0], Words(("a", "plane"), ("O", "B-place"))])


def test_rows_of_another_kind(tagger, answerer):
    with pytest.raises(TaskError, match=r"needs samples of kind Words, got Plain: use a data set of .* like 'conll'"):
        tagger.samples(PLAIN)
    with pytest.raises(TaskError, match="needs samples of kind Question"):
        answerer.samples(PLAIN)
    with pytest.raises(TaskError, match="is a single text"):
        answerer.inputs.check(["a cat"])


def _spans(task, spans):
    """Return a model whose largest logits are at a span of each question's context, as (first, last) words of it."""
    beginnings = [f"[CLS] {example.question} " for example in QUESTIONS]

    def run(batch):
        start, end = torch.zeros(2, *batch["input_ids"].shape)
        for at, ids in enumerate(batch["input_ids"]):
            text = task.inputs.tokenizer.decode(ids)
            words = next(words for begins, words in zip(beginnings, spans, strict=True) if text.startswith(begins))
            first = int((ids == task.inputs.tokenizer.sep_token_id).nonzero()[0]) + 1
            start[at, first + words[0]] = 9.0
            end[at, first + words[1]] = 9.0
            # Larger, and not of the context.
            start[at, 1], end[at, 2] = 20.0, 20.0
        return {"start_logits": start, "end_logits": end}

    return run


def test_an_answer_is_a_span_of_the_context(answerer):
    found = answerer.predict(_spans(answerer, ((3, 4), (3, 3))), QUESTIONS)
    assert answerer.counts(found, QUESTIONS).tolist() == [[100.0, 1.0], [100.0, 1.0]]
    assert answerer.score(found, QUESTIONS) == 1.0


def test_a_part_of_an_answer(answerer):
    # "is very" has one word of two right, and "plane" none.
    found = answerer.predict(_spans(answerer, ((2, 3), (7, 7))), QUESTIONS)
    assert answerer.score(found, QUESTIONS) == pytest.approx(0.25)


def test_outputs_in_order_are_taken_as_start_and_end(answerer):
    model = _spans(answerer, ((3, 4), (3, 3)))
    found = answerer.predict(lambda batch: tuple(model(batch).values()), QUESTIONS)
    assert answerer.score(found, QUESTIONS) == 1.0


def test_no_answer_is_said_by_the_first_token_where_rows_have_none(answerer):
    examples = [QUESTIONS[0], Question(QUESTIONS[1].question, QUESTIONS[1].context, ())]
    spans = _spans(answerer, ((3, 4), (3, 3)))

    def run(batch):
        found = spans(batch)
        for at, ids in enumerate(batch["input_ids"].tolist()):
            found["start_logits"][at, 0] = 30.0 if ids == batch["input_ids"][-1].tolist() else 0.0
        return found

    found = answerer.predict(run, examples)
    assert answerer.score(found, examples) == 1.0


def test_tokens_found_again(tokenizer):
    task = build_task("fill-mask", BertForMaskedLM(tiny_config()).eval(), tokenizer, max_length=16)
    hidden = task.targets(PLAIN)
    assert (hidden >= 0).sum(axis=-1).tolist() == [2, 1]
    batch = task.batches(PLAIN)[0]
    places = batch["input_ids"] == tokenizer.mask_token_id
    assert (places.numpy() == (hidden >= 0)).all()
    whole = tokenizer([example.text for example in PLAIN], padding=True, return_tensors="pt")["input_ids"]
    assert (whole[places].numpy() == hidden[hidden >= 0]).all()

    def model(spoiled):
        def run(batch):
            # Rows come in another order: each is known by what is not hidden.
            ids = batch["input_ids"]
            own = torch.stack([next(row for row in whole if _same(row, seen, tokenizer)) for seen in ids])
            own = torch.where(torch.isin(own, torch.tensor(spoiled)), tokenizer.unk_token_id, own)
            return {"logits": torch.nn.functional.one_hot(own, len(tokenizer)).float()}

        return run

    right = task.predict(model([]), PLAIN)
    assert task.score(right, PLAIN) == 1.0
    other = task.predict(model([int(hidden[1].max())]), PLAIN)
    assert task.score(other, PLAIN) == pytest.approx(2 / 3)
    assert task.paired(right, other)["label_flips"] > 0


def _same(row, seen, tokenizer):
    return bool(((row == seen) | (seen == tokenizer.mask_token_id)).all())


def test_perplexity_is_that_of_transformers(tokenizer):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config).eval()
    task = build_task("text-generation", model, tokenizer, max_length=32, batch_size=1)
    found = task.predict(lambda batch: model(**batch, use_cache=False), PLAIN)
    total, tokens = 0.0, 0
    for example in PLAIN:
        encoded = tokenizer(example.text, return_tensors="pt")
        ids = encoded["input_ids"]
        with torch.no_grad():
            total += float(model(**encoded, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert task.score(found, PLAIN) == pytest.approx(math.exp(total / tokens), rel=1e-5)
    together = build_task("text-generation", model, tokenizer, max_length=32, batch_size=2)
    padded = together.predict(lambda batch: model(**batch, use_cache=False), PLAIN)
    assert together.score(padded, PLAIN) == pytest.approx(task.score(found, PLAIN), rel=1e-4)
    assert task.paired(found, padded)["label_flips"] == 0.0
    assert not task.higher_is_better


def test_a_model_that_goes_on(tmp_path, tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert read_checkpoint(str(tmp_path)).task == "text-generation"
    assert load_model(str(tmp_path), "text-generation").config.use_cache is False
    # As many such tokenizers come: without padding.
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    told.update(pad_token=None, eos_token="[SEP]")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    loaded = load_tokenizer(str(tmp_path), causal=True)
    assert (loaded.pad_token, loaded.padding_side) == ("[SEP]", "right")


def test_a_head_that_is_not_in_the_checkpoint(tmp_path, tokenizer):
    BertForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"has no weights for qa_outputs.*task 'question-answering' needs"):
        load_model(str(tmp_path), "question-answering")


def test_files_of_words(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- -X- O\n\nthe DT O\ncat NN B-animal\n\n\na\tDT\tO\nnew film\tNN\tB-thing\n")
    assert load_examples("conll", path=path) == [
        Words(("the", "cat"), ("O", "B-animal")),
        Words(("a", "new film"), ("O", "B-thing")),
    ]


def test_files_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    asked = {"question": "a cat?", "answers": [{"text": "dog", "answer_start": 4}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "the dog", "qas": [asked]}]}]}))
    assert load_examples("squad-json", path=path) == [Question("a cat?", "the dog", (("dog", 4),))]


def test_files_of_texts_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat\n\nthe dog\n")
    assert load_examples("text-lines", path=tmp_path / "a.txt") == [Plain("a cat"), Plain("the dog")]
