"""Tasks on tiny models: batches, predictions from every kind of run, scores, and what is said about bad outputs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from quantizer.errors import ConfigError, TaskError
from quantizer.tasks import Pair, Text, build_task, first_output

PAIRS = [
    Pair("the cat is fast", "a cat was very fast , and good", 4.0),
    Pair("the film is bad", "a plane", 0.5),
    Pair("a dog", "the dog", 5.0),
]
TEXTS = [
    Text("the film is good", 1),
    Text("a very dull , slow and bad film .", 0),
    Text("fine", 1),
    Text("not good", 0),
    Text("the cat was very good and the dog was fine , not bad", 1),
]
NAMES = ("input_ids", "token_type_ids", "attention_mask")


@pytest.fixture
def similarity(encoder, tokenizer):
    return build_task("sentence-similarity", encoder, tokenizer, max_length=32, batch_size=2)


@pytest.fixture
def classification(classifier, tokenizer):
    return build_task("sequence-classification", classifier, tokenizer, max_length=32, batch_size=2)


def test_batches_keep_the_order_and_pad_to_the_longest(similarity, tokenizer):
    batches = similarity.batches(PAIRS)
    assert [tuple(batch) for batch in batches] == [NAMES] * 3
    assert similarity.input_names == NAMES
    texts = [text for pair in PAIRS for text in (pair.first, pair.second)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    seen = [length for batch in batches for length in batch["attention_mask"].sum(dim=1).tolist()]
    assert seen == lengths
    assert [batch["input_ids"].shape[1] for batch in batches] == [max(lengths[at : at + 2]) for at in (0, 2, 4)]
    assert all(tensor.dtype == torch.int64 for batch in batches for tensor in batch.values())
    assert len(similarity.batches(PAIRS, limit=2)) == 2


def test_lengths_have_both_limits(encoder, tokenizer):
    task = build_task("sentence-similarity", encoder, tokenizer, max_length=6, min_length=5, batch_size=1)
    widths = [batch["input_ids"].shape[1] for batch in task.batches(PAIRS)]
    assert min(widths) == 5
    assert max(widths) == 6


def test_inputs_that_the_model_does_not_take_are_left_out(tokenizer):
    class TwoInputs(torch.nn.Module):
        def forward(self, input_ids, attention_mask, **rest):
            return input_ids

    task = build_task("sequence-classification", TwoInputs(), tokenizer)
    assert task.input_names == ("input_ids", "attention_mask")
    assert tuple(task.batches(TEXTS)[0]) == ("input_ids", "attention_mask")


def test_predictions_are_in_the_order_of_the_rows(similarity, encoder):
    predictions = similarity.predict(lambda batch: encoder(**batch), PAIRS)
    assert predictions.outputs.shape == (6, 16)
    assert predictions.outputs.dtype == np.float32
    for at, pair in enumerate(PAIRS):
        vectors = []
        for text in (pair.first, pair.second):
            batch = similarity.inputs.batch([text])
            with torch.no_grad():
                mean = encoder(**batch).last_hidden_state[0].mean(dim=0)
            vectors.append(mean / mean.norm())
        np.testing.assert_allclose(predictions.outputs[2 * at], vectors[0], atol=1e-5)
        assert predictions.decisions[at] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(lambda output: output, id="model-output"),
        pytest.param(lambda output: {"other": None, "logits": output.logits.numpy()}, id="arrays"),
        pytest.param(lambda output: {"output_0": output.logits.numpy()}, id="another-name"),
        pytest.param(lambda output: (output.logits,), id="tuple"),
        pytest.param(lambda output: output.logits.double(), id="tensor"),
    ],
)
def test_every_kind_of_run_gives_the_same(classification, classifier, shape):
    expected = classification.predict(lambda batch: classifier(**batch), TEXTS)
    got = classification.predict(lambda batch: shape(classifier(**batch)), TEXTS)
    np.testing.assert_array_equal(got.outputs, expected.outputs)
    np.testing.assert_array_equal(got.decisions, expected.outputs.argmax(axis=1))


def test_predict_records_no_gradient_and_keeps_the_mode(classification, classifier):
    modes = []

    def run(batch):
        modes.append((torch.is_grad_enabled(), classifier.training))
        return classifier(**batch)

    classifier.train()
    try:
        classification.predict(run, TEXTS)
        assert classifier.training
    finally:
        classifier.eval()
    assert modes == [(False, True)] * 3


def test_predict_tells_its_progress(classification, classifier):
    seen = []
    classification.predict(
        lambda batch: classifier(**batch), TEXTS, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_scores_and_figures_of_pairs(similarity, encoder):
    reference = similarity.predict(lambda batch: encoder(**batch), PAIRS)
    assert similarity.score(reference, PAIRS) in (-1, -0.5, 0.5, 1)
    assert similarity.paired(reference, reference) == {"mean_cosine": pytest.approx(1), "sqnr_db": float("inf")}
    assert similarity.difference_interval(reference, reference, PAIRS, n=50) == (0, 0)
    assert similarity.metric_name == "spearman"


def test_scores_and_figures_of_labels(classification):
    examples = TEXTS[:4]
    reference = classification.predictions(np.array([[0, 2, 0], [2, 0, 0], [0, 2, 0], [0, 2, 0]], dtype=np.float32))
    other = classification.predictions(np.array([[0, 2, 0], [2, 0, 0], [2, 0, 0], [0, 2, 0]], dtype=np.float32))
    assert classification.score(reference, examples) == 0.75
    assert classification.score(other, examples) == 0.5
    figures = classification.paired(reference, other)
    assert figures["label_flips"] == 0.25
    assert figures["kl_divergence"] > 0
    low, high = classification.difference_interval(reference, other, examples, n=200)
    assert low <= -0.25 <= high


def test_a_head_is_fitted_on_float_embeddings(encoder, tokenizer):
    task = build_task("embedding-classification", encoder, tokenizer, max_length=32, batch_size=4)
    assert task.needs_head

    def run(batch):
        return encoder(**batch)

    with pytest.raises(TaskError, match=r"has no head yet: call fit_head\(\)"):
        task.predict(run, TEXTS)
    task.fit_head(run, TEXTS)
    first = task.predict(run, TEXTS)
    assert first.outputs.shape == (5, 16)
    assert set(first.decisions) <= {0, 1}
    task.fit_head(run, TEXTS)
    again = task.predict(run, TEXTS)
    np.testing.assert_array_equal(first.outputs, again.outputs)
    np.testing.assert_array_equal(first.decisions, again.decisions)
    assert set(task.paired(first, again)) == {"label_flips", "mean_cosine", "sqnr_db"}
    assert 0 <= task.score(first, TEXTS) <= 1


def test_a_head_needs_two_classes(encoder, tokenizer):
    task = build_task("embedding-classification", encoder, tokenizer, max_length=32)
    with pytest.raises(TaskError, match="the 2 samples of the head are all of one class, expected at least two"):
        task.fit_head(lambda batch: encoder(**batch), [TEXTS[0], TEXTS[2]])


def test_a_task_without_head_says_so(similarity, encoder):
    assert not similarity.needs_head
    with pytest.raises(TaskError, match="task 'sentence-similarity' has no head to fit"):
        similarity.fit_head(lambda batch: encoder(**batch), PAIRS)


def test_rows_of_another_kind_are_refused(similarity, classification):
    with pytest.raises(TaskError, match="needs samples of kind Pair, got Text: use a data set of such samples, like"):
        similarity.batches(TEXTS)
    with pytest.raises(TaskError, match="needs samples of kind Text, got Pair"):
        classification.batches(PAIRS)
    with pytest.raises(TaskError, match="was given no samples, expected at least one"):
        similarity.batches([])


def test_labels_without_a_class_are_refused(classification, classifier):
    examples = [Text("good", 0), Text("bad", 3)]
    predictions = classification.predict(lambda batch: classifier(**batch), examples)
    with pytest.raises(TaskError, match=r"the samples have label 3, but the model has 3 classes \(0 to 2\)"):
        classification.score(predictions, examples)


@pytest.mark.parametrize("label", [0.9, np.float32(1), -1, "1", None])
@pytest.mark.parametrize("name", ["sequence-classification", "embedding-classification"])
def test_labels_must_be_class_numbers(name, classifier, tokenizer, label):
    task = build_task(name, classifier, tokenizer, max_length=64)
    expected = rf"sample 2 has the label {re.escape(repr(label))}, expected a class number \(an integer from 0\)"
    with pytest.raises(TaskError, match=expected):
        task.targets([Text("good", np.int64(0)), Text("bad", label)])


def test_predictions_on_other_rows_are_refused(classification, classifier):
    predictions = classification.predict(lambda batch: classifier(**batch), TEXTS)
    with pytest.raises(TaskError, match="5 predictions but 2 samples: pass the samples predicted on"):
        classification.score(predictions, TEXTS[:2])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(lambda n: np.full((n, 3), np.nan), "holds NaN or infinite values for batch 1 of 3", id="nan"),
        pytest.param(lambda n: np.zeros((n + 1, 3)), "returned 3 outputs for a batch of 2 texts", id="rows"),
        pytest.param(lambda n: np.zeros((n, 4, 3)), r"shape \(2, 4, 3\), expected logits \[batch", id="rank"),
        pytest.param(lambda n: {}, "returned dict without a tensor or array for 'logits'", id="empty"),
        pytest.param(lambda n: None, "returned NoneType without a tensor", id="none"),
    ],
)
def test_broken_outputs_are_refused(classification, output, message):
    with pytest.raises(TaskError, match=message):
        classification.predict(lambda batch: output(len(batch["input_ids"])), TEXTS)


def test_an_output_that_is_no_hidden_state_is_refused(similarity):
    with pytest.raises(TaskError, match=r"shape \(2, 3\), expected \[batch, sequence, width\]"):
        similarity.predict(lambda batch: np.zeros((len(batch["input_ids"]), 3)), PAIRS)


def test_first_output_reads_half_types():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 without ml_dtypes")
    array = np.array([[1.5, 2.0]]).astype(ml_dtypes.bfloat16)
    assert first_output({"logits": array}, "logits").dtype == torch.float32
    assert first_output([torch.ones(2, dtype=torch.bfloat16)], "logits").dtype == torch.float32


def test_example_is_small_and_has_padding(similarity):
    batch = similarity.example()
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(2, 16)}
    assert batch["attention_mask"].sum(dim=1).tolist() == [16, 8]
    assert tuple(similarity.example(PAIRS)) == NAMES
    assert similarity.example(PAIRS)["input_ids"].shape == (2, 16)
    assert similarity.example([PAIRS[0]])["input_ids"].shape == (2, 16)


def test_random_batch_is_repeatable_and_ordinary(similarity, tokenizer):
    batch = similarity.random_batch(3, 20, seed=1)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(3, 20)}
    assert torch.equal(batch["input_ids"], similarity.random_batch(3, 20, seed=1)["input_ids"])
    assert not torch.equal(batch["input_ids"], similarity.random_batch(3, 20, seed=2)["input_ids"])
    assert not set(batch["input_ids"].flatten().tolist()) & set(tokenizer.all_special_ids)
    assert int(batch["input_ids"].max()) < len(tokenizer)
    assert bool(batch["attention_mask"].all())


def test_lengths_beyond_the_model_are_refused(encoder, tokenizer, similarity):
    with pytest.raises(TaskError, match="max_length=65, but the model has 64 positions"):
        build_task("sentence-similarity", encoder, tokenizer, max_length=65)
    with pytest.raises(TaskError, match="sequence=128, but the model has 64 positions"):
        similarity.random_batch(1, 128)
    with pytest.raises(TaskError, match="min_length=9 and max_length=8: expected 1 <= min_length <= max_length"):
        build_task("sentence-similarity", encoder, tokenizer, max_length=8, min_length=9)
    with pytest.raises(TaskError, match="batch_size=0, expected at least 1"):
        build_task("sentence-similarity", encoder, tokenizer, max_length=8, batch_size=0)


def test_an_unknown_task_lists_the_known_ones(encoder, tokenizer):
    with pytest.raises(ConfigError, match="unknown task 'glue'; known: audio-classification, automatic-speech"):
        build_task("glue", encoder, tokenizer)
