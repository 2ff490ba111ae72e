"""Generator of the page docs/configuration.md: every key of the schema with its type, default and meaning.

python -m quantizer.config.reference > docs/configuration.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from quantizer.config.describe import Slot
from quantizer.config.quantizer_section import Section, preset_keys
from quantizer.config.schema import RunConfig

_HEAD = """\
# Configuration

<!-- Made by `python -m quantizer.config.reference > docs/configuration.md`: change the schema, not this page. -->

One YAML file describes one run: `quantizer run FILE [key=value ...]`. `quantizer validate FILE` reports all problems at
once, each with its line and the most similar valid name. `quantizer validate --verbose FILE` prints the file with all
defaults filled in. An unknown key is an error.

- On the command line, a key is written with dots, and its value is YAML: `quantizer.activations.percentile=99.9`,
  `fallback='{num: 4}'`. `~fallback` removes a key.
- Several values of a key make several runs, which is a [sweep](how-to/sweeps.md). On the command line, separate the
  values with commas: `engine.threads=1,2`. In a file, write `sweep: {engine.threads: [1, 2]}`.
- Relative paths are resolved against the current folder, not against the YAML file.
- `Quantizer(...)` accepts a file or mapping of a whole run, or of the `quantizer` section only. It also accepts the
  keys of that section as keywords: `Quantizer(backend="openvino", exclude={"names": ["classifier"]})`.
- Rules of `include` and `exclude`: `exclude` takes precedence. A class also matches its subclasses and all modules
  inside. Names match whole path segments: `*` is one segment or part of one, `**` any number. A rule that matches
  nothing is an error.

A minimal file; the data sets are described [at the end](#data-sets):

```yaml
model: {source: my-model, task: sequence-classification}
data:
  calibration: {name: text-csv, path: train.csv, samples: 128}
  evaluation: {name: text-csv, path: dev.csv}
```

For your own `torch.nn.Module`, name a function that returns it, and one that returns its batches:
[guide](how-to/plain-torch.md).
"""

_TAIL = """\
## Data sets

| name | samples | keys |
|---|---|---|
| `text-csv` | labelled texts: a CSV file with the header `text,label`, labels from 0 | `path` |
| `sst2-text` | labelled texts: lines of `label text` | `path` |
| `stsb-csv` | pairs of sentences with a score: `sentence,sentence,score` lines without a header | `path` |
| `beir` | queries with a collection: a folder in the layout of BEIR; the default split is `test` | `path`, `split` |
| `trec` | queries with a collection: `documents.tsv`, `queries.tsv` and `qrels.txt` in a folder | `path` |
| `conll` | words with tags: lines of `word ... tag`, and an empty line between texts | `path` |
| `squad-json` | questions about texts, in the format of SQuAD 1.1 or 2.0 | `path` |
| `choices-jsonl` | questions: JSON lines with `question`, `choices`, `label` and optionally `context` | `path` |
| `text-pairs` | source and target texts: a `.csv` file with the header `source,target`, or `.jsonl` | `path` |
| `text-lines` | texts: the lines of a `.txt` file, or the column `text` of a `.csv` or `.jsonl` file | `path` |
| `image-folder` | labelled images: a folder with one folder of images per class; interleaved | `path` |
| `image-csv` | labelled images: a CSV file with the header `path,label`, paths relative to the file | `path` |
| `coco-json` | objects in images: a `.json` file with boxes and classes in COCO format | `path` |
| `image-depths` | images with a depth per pixel: `images/NAME.jpg` and `depths/NAME.png` or `.npy` | `path` |
| `image-masks` | images with a class per pixel: a folder with `images/NAME.jpg` and `masks/NAME.png` | `path` |
| `audio-folder` | labelled recordings: a folder with one folder of `.wav` files per class; interleaved | `path` |
| `audio-csv` | labelled recordings: a CSV file with the header `path,label`, paths relative to the file | `path` |
| `transcripts` | recordings and their texts: a `.csv` file with the header `path,text`, or `.jsonl` | `path` |
| `hf` | any data set of Hugging Face `datasets`; its columns decide the kind of sample | `path`, `subset`, `split` |
| `vader` | labelled texts, downloaded once with pip and verified by hash | `subset`, `split` |

- [Tasks](how-to/tasks.md) lists the data sets of each task and how it is scored.
- Labels of images and recordings are the class names of the model, or their numbers.
- Subsets of `vader` are `tweets`, `movieReviewSnippets`, `amazonReviewSnippets` and `nytEditorialSnippets`. Its splits
  `head`, `calibration` and `evaluation` share no document.

Each run is scored on all samples of `evaluation`, and calibrated on all samples of `calibration`: keep them apart. A
score on samples that a search used is too good. So it is an error if `tuning` shares samples with `evaluation`.
"""


def reference() -> str:
    """Return the page as Markdown."""
    places = _places()
    parts = [_HEAD, *(_table(section, places) for section in places), _TAIL]
    return "\n".join(parts)


def _places() -> dict[type[Section], list[str]]:
    """Return the paths of every section class, in the order of the file."""
    places: dict[type[Section], list[str]] = {}

    def walk(section: type[Section], path: str) -> None:
        places.setdefault(section, []).append(path)
        for key in section.model_fields:
            below = Slot(section).child(key)
            if below is not None and below.section is not None:
                walk(below.section, f"{path}.{key}" if path else key)

    walk(RunConfig, "")
    return places


def _table(section: type[Section], places: Mapping[type[Section], Sequence[str]]) -> str:
    about = (section.__doc__ or "").strip().replace("``", "`")
    lines = [
        f"## {_heading(places[section])}",
        "",
        about,
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, field in section.model_fields.items():
        slot = Slot.of(field.annotation, field.metadata)
        value = slot.expected()
        if slot.section is not None:
            value = f"[section](#{_anchor(_heading(places[slot.section]))}){' or null' if slot.nullable else ''}"
        default = "required" if field.default is PydanticUndefined else _default(field.default)
        if key in preset_keys(places[section][0].rpartition(".")[2]):
            default = "by `preset`"
        lines.append(f"| `{key}` | {value} | {default} | {field.description} |")
    return "\n".join([*lines, ""])


def _heading(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" if path else "The file" for path in paths)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _default(value: Any) -> str:
    if isinstance(value, Section):
        return "its defaults"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
