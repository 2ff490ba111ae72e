"""Data sets: tables of texts, pairs and images, and plain texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from quantizer.tasks import load_examples, read_image, read_texts
from torture import mutations
from torture.kinds import Kind, kind

_TEXTS = ("the film is good", "a bad, slow plot", "quite \u00e9tonnant", 'she said "no"')


def _make(folder: Path) -> None:
    import csv
    import json

    from PIL import Image

    with (folder / "texts.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *((text, index % 2) for index, text in enumerate(_TEXTS))])
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows((text, text[::-1], index / 2) for index, text in enumerate(_TEXTS))
    lines = [f"{index % 2} {text}" for index, text in enumerate(_TEXTS)]
    (folder / "labelled.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "plain.txt").write_text("\n".join(_TEXTS), encoding="utf-8")
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in _TEXTS), encoding="utf-8")
    for ending in ("png", "jpg"):
        pixels = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"image.{ending}")
    (folder / "images.csv").write_text("path,label\nimage.png,0\nimage.jpg,1\n")
    for name, beir in (("documents", "corpus"), ("queries", "queries")):
        (folder / f"{name}.tsv").write_text("".join(f"{at}\t{text}\n" for at, text in enumerate(_TEXTS)))
        entries = [{"_id": str(at), "text": text} for at, text in enumerate(_TEXTS)]
        (folder / f"{beir}.jsonl").write_text("\n".join(map(json.dumps, entries)))
    (folder / "qrels.txt").write_text("0 0 1 2\n1 0 1 -1\n3 0 2 1\n")
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n0\t1\t2\n1\t1\t0\n")


def _examples(name: str, file: str, folder: Path) -> None:
    for example in load_examples(name, path=folder / file):
        for text in vars(example).values():
            str(text).encode()
        if hasattr(example, "label") and isinstance(example.label, int):
            np.array([example.label], dtype=np.int64)


def _plain(file: str, folder: Path) -> None:
    for text in read_texts(folder / file):
        text.encode()


def _image(folder: Path) -> None:
    for ending in ("png", "jpg"):
        read_image(folder / f"image.{ending}")


_TABLE = (mutations.raw, mutations.text, mutations.cells, mutations.cells)

for _name, _file, _read in (
    ("text-csv", "texts.csv", partial(_examples, "text-csv", "texts.csv")),
    ("stsb-csv", "pairs.csv", partial(_examples, "stsb-csv", "pairs.csv")),
    ("sst2-text", "labelled.txt", partial(_examples, "sst2-text", "labelled.txt")),
    ("image-csv", "images.csv", partial(_examples, "image-csv", "images.csv")),
    ("txt", "plain.txt", partial(_plain, "plain.txt")),
    ("jsonl", "plain.jsonl", partial(_plain, "plain.jsonl")),
):
    kind(Kind(name=_name, make=_make, files=(_file,), how=_TABLE, read=_read))
_COLLECTIONS = {
    "trec": ("documents.tsv", "queries.tsv", "qrels.txt"),
    "beir": ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"),
}
for _name, _files in _COLLECTIONS.items():
    kind(Kind(name=_name, make=_make, files=_files, how=_TABLE, read=partial(_examples, _name, "")))
kind(Kind(name="image", make=_make, files=("image.png", "image.jpg"), how=(mutations.raw,), read=_image))
