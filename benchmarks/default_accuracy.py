"""What one gets who sets nothing, beside other quantizers with their defaults: embeddings of three sets of texts.

    python benchmarks/default_accuracy.py [presets | peers | everything]... [--model FOLDER]

Calibrated on 128 texts of each set and compared with the float model on others: the SQNR of the pooled embeddings in
dB, and how much of the score is lost. STS-B: sentences of train and all of dev, Spearman's correlation of cosines with
the scores. Questions to a bank (banking77) and questions of TREC: a third of the texts to calibrate on, a third to
score on, a third on whose float embeddings a logistic regression learns the classes; its accuracy. Nothing was tuned on
these. Ours quantizes linears, products of attention and the residual adds that ``auto`` lets in; how many products each
peer rounds is in brackets.

Figures of ours are of the frozen proxy; accuracy.py shows how close engines are. Processor seconds, the most of a set.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from common import MINILM, SHARED, heading
from sklearn.linear_model import LogisticRegression

from quantizer import Quantizer
from quantizer.tasks import Batch, build_task, load_model, load_tokenizer
from quantizer.tasks.metrics import spearman
from quantizer.tasks.outputs import MEAN

_CALIBRATION = 128

Embed = Callable[[list[str]], torch.Tensor]
"""From N texts to embeddings [N, D]."""


def _spread(items: list[str], number: int) -> list[str]:
    return [items[place * len(items) // number] for place in range(number)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """A set of texts.

    Attributes:
        calibration: texts to calibrate on.
        scored: others.
        score: a function from the embeddings of ``scored`` [N, D] to the score.
    """

    calibration: list[str]
    scored: list[str]
    score: Callable[[torch.Tensor], float]


def _pairs(split: str) -> list[list[str]]:
    with (SHARED / f"data/stsb/stsb-en-{split}.csv").open(newline="") as file:
        return list(csv.reader(file))


def _similarity() -> _Texts:
    pairs = _pairs("dev")
    targets = torch.tensor([float(row[2]) for row in pairs]).numpy()

    def score(embeddings: torch.Tensor) -> float:
        first, second = embeddings[0::2], embeddings[1::2]
        return float(spearman(torch.cosine_similarity(first, second).numpy(), targets))

    calibration = [text for row in _pairs("train") for text in row[:2]][:_CALIBRATION]
    return _Texts(calibration=calibration, scored=[text for row in pairs for text in row[:2]], score=score)


def _classes(rows: list[tuple[str, str]], embed: Embed) -> _Texts:
    """Return a set of (text, class), a logistic regression learnt on a third of it."""
    learnt = rows[2::3]
    head = LogisticRegression(max_iter=1000)
    head.fit(embed([text for text, _ in learnt]).numpy(), [label for _, label in learnt])
    labels = [label for _, label in rows[1::3]]
    return _Texts(
        calibration=_spread([text for text, _ in rows[0::3]], _CALIBRATION),
        scored=[text for text, _ in rows[1::3]],
        score=lambda embeddings: float(head.score(embeddings.numpy(), labels)),
    )


def _sets(embed: Embed) -> dict[str, _Texts]:
    """Return the sets by name."""
    with (SHARED / "data/banking77/train.csv").open(newline="") as file:
        banking = [(text, label) for text, label in csv.reader(file)][1:]
    lines = (SHARED / "data/trec/TREC.train.all").read_text(encoding="latin1").splitlines()
    trec = [(text.strip(), label) for label, text in (line.split(" ", 1) for line in lines if " " in line)]
    return {"STS-B dev": _similarity(), "banking77": _classes(banking, embed), "TREC": _classes(trec, embed)}


class Bench:
    def __init__(self, source: str) -> None:
        self.model = load_model(source, "sentence-similarity")
        self._tokenizer = load_tokenizer(source)
        self.task = build_task("sentence-similarity", self.model, self._tokenizer)
        self._sets = _sets(lambda texts: self._embedded(self._run, texts))
        self._expected = {name: self._embedded(self._run, texts.scored) for name, texts in self._sets.items()}
        scores = (f"{name}, float {texts.score(self._expected[name]):.4f}" for name, texts in self._sets.items())
        print(f"| quantizer | {' | '.join(scores)} | seconds |\n|---|{'---|' * len(self._sets)}---|", flush=True)

    def _run(self, batch: Batch) -> object:
        return self.model(**batch)

    def _batches(self, texts: list[str], size: int) -> list[Batch]:
        options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
        parts = (texts[start : start + size] for start in range(0, len(texts), size))
        return [dict(self._tokenizer(part, **options)) for part in parts]

    def _embedded(self, run: Callable[[Batch], object], texts: list[str]) -> torch.Tensor:
        # Of like length in a batch, so that little is padding.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found = []
        with torch.no_grad():
            for batch in self._batches([texts[place] for place in order], 32):
                output = run(batch)
                hidden = torch.as_tensor(output["last_hidden_state"])  # type: ignore[index]
                found.append(MEAN.embeddings(hidden, batch["attention_mask"]))
        return torch.cat(found)[torch.tensor(order).argsort()]

    def row(self, name: str, make: Callable[[list[Batch]], tuple[Callable[[Batch], object], str]]) -> None:
        """Print the SQNR on each set of what ``make`` makes of its batches, the loss of score and a note."""
        cells, seconds, note = [], 0.0, ""
        for key, texts in self._sets.items():
            began = time.process_time()
            run, note = make(self._batches(texts.calibration, 16))
            seconds = max(seconds, time.process_time() - began)
            expected, found = self._expected[key], self._embedded(run, texts.scored)
            sqnr = 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))
            cells.append(f"{sqnr:.1f} dB, {texts.score(found) - texts.score(expected):+.4f}")
        print(f"| {name}{note} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


def ours(bench: Bench, name: str, **config: Any) -> None:
    """Print the row of ours with these settings."""

    def make(batches: list[Batch]) -> tuple[Callable[[Batch], object], str]:
        quantizer = Quantizer(**config)
        quantizer.calibrate(bench.model, batches, progress=False)
        frozen = quantizer.quantize(bench.model)
        return (lambda batch: frozen(**batch)), ""

    bench.row(f"ours, {name}", make)


def presets(bench: Bench) -> None:
    """Ours, by target and preset."""
    for backend in ("openvino", "onnxruntime", "tensorrt"):
        for preset in ("plain", "fast", "balanced", "accurate"):
            ours(bench, f"{backend}, {preset}", backend=backend, preset=preset)


def everything(bench: Bench) -> None:
    """Ours with every kind of site in INT8, nothing kept in float."""
    for backend in ("openvino", "tensorrt"):
        ours(bench, f"{backend}, every site, plain", backend=backend, preset="plain", sites=_EVERY)
        for rounding in ("nearest", "reconstruct"):
            name = f"{backend}, every site, weights by {rounding}"
            ours(bench, name, backend=backend, sites=_EVERY, weights={"rounding": rounding})


def peers(bench: Bench) -> None:
    """Others, with linears and matmuls quantized, and what ONNX Runtime does at run time."""
    # Large libraries, which the other table does not need.
    from peers import DYNAMIC, PEERS

    for name, peer in (PEERS["linears and matmuls"] | DYNAMIC).items():

        def make(batches: list[Batch], peer: object = peer) -> tuple[Callable[[Batch], object], str]:
            # What the libraries print goes beside the table, not into it.
            with redirect_stdout(sys.stderr):
                run, rounded = peer(bench.model, bench.task, batches)  # type: ignore[operator]
            return run, f" ({rounded})"

        bench.row(name, make)


_EVERY = {"residual_add": True}

_TABLES = {"presets": presets, "peers": peers, "everything": everything}


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("tables", nargs="*", help=" or ".join(_TABLES))
    parser.add_argument("--model", default=MINILM, help="folder of a model of sentence embeddings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(heading("Defaults: SQNR of the embeddings in dB, and the loss of score"))
    bench = Bench(arguments.model)
    for table in arguments.tables or _TABLES:
        _TABLES[table](bench)
