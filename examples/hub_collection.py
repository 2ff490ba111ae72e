"""Convert a collection of models, with a folder and a model card for each client, ready for the Hugging Face Hub.

    pip install '.[hf,onnx,openvino,onnxruntime]'
    python examples/hub_collection.py --texts texts.txt --images photos --owner me     # the ten models below
    python examples/hub_collection.py my-models.txt --texts texts.txt --owner me       # your own list
    python examples/hub_collection.py --texts texts.txt --images photos --owner me --push

A line of a list is a local folder or a name on the Hub, and a task if the checkpoint does not tell it. Without
``--push`` nothing is uploaded: look at the cards first. ``collection.json`` lists the folders with their repositories.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCard

import quantizer
from quantizer.cli.main import main as quantizer_command
from quantizer.config.layouts import LAYOUTS, layout_of
from quantizer.pipeline.deliver import model_name
from quantizer.plan.targets.clients import OF_ANY_BACKEND
from quantizer.tasks import read_checkpoint, tasks

TEN = """\
sentence-transformers/all-MiniLM-L6-v2 sentence-similarity
sentence-transformers/all-mpnet-base-v2 sentence-similarity
BAAI/bge-small-en-v1.5 sentence-similarity
intfloat/e5-small-v2 sentence-similarity
cross-encoder/ms-marco-MiniLM-L6-v2 sequence-classification
distilbert/distilbert-base-uncased-finetuned-sst-2-english
dslim/bert-base-NER
distilbert/distilbert-base-uncased
google/vit-base-patch16-224
facebook/dinov2-small-imagenet1k-1-layer
"""
BACKENDS = ("openvino", "onnxruntime")


@dataclass(frozen=True)
class Entry:
    """A folder of the collection, and the repository that it is for."""

    model: str
    task: str
    backend: str
    layout: str
    folder: str
    repository: str


def layouts_of(task: str, backend: str) -> list[str]:
    """Return the layouts that a backend writes for a task."""
    layouts = {name: layout_of(name, backend) for name in LAYOUTS}
    return [name for name, one in layouts.items() if one is not None and (not one.classes or task in one.classes)]


def runs_of(task: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the backend and the layouts of each conversion.

    Layouts of any backend have one of their own, because they leave SmoothQuant out of the engine.
    """
    for backend in BACKENDS:
        yield backend, backend, [name for name in layouts_of(task, backend) if name not in OF_ANY_BACKEND]
    if weights := [name for name in layouts_of(task, BACKENDS[0]) if name in OF_ANY_BACKEND]:
        yield "weights", BACKENDS[0], weights


def convert(line: str, options: argparse.Namespace, words: list[str]) -> Iterator[Entry]:
    """Convert a model for each backend, check the cards, and yield the folders."""
    source, *named = line.split()
    task = named[0] if named else read_checkpoint(source).task
    if task is None:
        raise SystemExit(f"{source}: its task is not in its config; write it behind the name, such as {TEN.split()[1]}")
    data = options.images if tasks[task].reads == "image" else options.texts
    if data is None:
        raise SystemExit(f"{source}: task {task} needs --{'images' if tasks[task].reads == 'image' else 'texts'}")
    name = model_name(source.rstrip("/").rpartition("/")[2])
    for run, backend, layouts in runs_of(task):
        output = options.output / f"{name}-{run}"
        given = ["-m", source, "--task", task, "--quantization", "--calibration", str(data), "--backend", backend]
        if quantizer_command(["convert", *given, "--deliver", *layouts, "-o", str(output), *words]) != 0:
            raise SystemExit(f"{source}: the conversion for {backend} failed; see above")
        for layout in layouts:
            folder = output / backend / layout
            if (folder / "README.md").exists():
                ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
                repository = f"{options.owner}/{name}-int8-{layout}"
                if layout_of(layout, BACKENDS[0]) and layout_of(layout, BACKENDS[1]) and layout not in OF_ANY_BACKEND:
                    repository += f"-{backend}"
                yield Entry(source, task, backend, layout, str(folder.relative_to(options.output)), repository)


def main(arguments: list[str] | None = None) -> None:
    """Convert the collection; unknown options go to ``quantizer convert``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", nargs="?", type=Path, help="file with a model per line (default: ten of the Hub)")
    parser.add_argument("--texts", type=Path, help="file of calibration texts, for models of texts")
    parser.add_argument("--images", type=Path, help="folder of calibration images, for models of images")
    parser.add_argument("--owner", required=True, help="account or organization on the Hub")
    parser.add_argument("--output", type=Path, default=Path("collection"), help="output folder")
    parser.add_argument("--push", action="store_true", help="upload all folders at the end")
    options, words = parser.parse_known_args(arguments)
    text = TEN if options.list is None else options.list.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    entries = [entry for line in lines for entry in convert(line, options, words)]
    document = [asdict(entry) for entry in entries]
    (options.output / "collection.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for entry in entries:
        print(f"{entry.folder}: {entry.repository}")
        if options.push:
            print(quantizer.push_to_hub(options.output / entry.folder, entry.repository))


if __name__ == "__main__":
    main()
