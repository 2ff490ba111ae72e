"""The page docs/configuration.md, generated from the schema: every key with its type, default and meaning.

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

One YAML file is one run: `quantizer run FILE [key=value ...]`. `quantizer validate FILE` reports every problem at once,
each with its line and the nearest valid name; `quantizer validate --verbose FILE` prints the file with all defaults
filled in. A key that is not listed here is an error.

- On the command line a key is written with dots, and its value is YAML: `quantizer.activations.percentile=99.9`,
  `fallback='{num: 4}'`. `~fallback` removes a key.
- Values with commas outside brackets and quotes, `engine.threads=1,2`, and a section `sweep` with keys in dots, each
  with a list of its values, `sweep: {engine.threads: [1, 2]}`, make several runs: [sweeps](how-to/sweeps.md).
- A relative path starts at the current folder, not at the YAML file.
- `Quantizer(...)` takes a file or mapping of a whole run or of the `quantizer` section alone, and that section's keys
  as keywords: `Quantizer(backend="openvino", exclude={"names": ["classifier"]})`.
- Rules of `include` and `exclude`: `exclude` beats `include`, a class covers its subclasses and all that is inside it,
  names match whole path segments (`*` is one segment or part of one, `**` any number), and a rule that matches nothing
  is an error.

A file needs no more than this; the data sets are described [at the end](#data-sets):

```yaml
model: {source: my-model, task: sequence-classification}
data:
  calibration: {name: text-csv, path: train.csv, samples: 128}
  evaluation: {name: text-csv, path: dev.csv}
```

A torch model of your own is named by a function, and so are its batches: [the guide](how-to/plain-torch.md).
"""

_TAIL = """\
## Data sets

| name | rows | takes |
|---|---|---|
| `text-csv` | labelled texts: a CSV file with the header `text,label`, labels from 0 | `path` |
| `sst2-text` | labelled texts: lines of `label text` | `path` |
| `stsb-csv` | pairs of sentences with a score: `sentence,sentence,score` lines without a header | `path` |
| `conll` | words with tags: `word ... tag` lines, an empty line between texts | `path` |
| `squad-json` | questions about texts, in the format of SQuAD 1.1 or 2.0 | `path` |
| `choices-jsonl` | choices: lines of JSON with `question`, `choices`, `label`, perhaps `context` | `path` |
| `text-pairs` | texts and what is written for them: a `.csv` with the header `source,target`, or `.jsonl` | `path` |
| `text-lines` | texts: a `.txt` file with one a line, the column `text` of a `.csv` or `.jsonl` file | `path` |
| `image-folder` | labelled images: a folder with one folder of images a class, in an order that mixes them | `path` |
| `image-csv` | labelled images: a CSV file with the header `path,label`, paths from its own folder on | `path` |
| `coco-json` | objects in images: a `.json` of boxes and classes in the format of COCO | `path` |
| `image-depths` | images with a distance for each pixel: `images/NAME.jpg` and `depths/NAME.png` or `.npy` | `path` |
| `image-masks` | images with a class for each pixel: a folder with `images/NAME.jpg` and `masks/NAME.png` | `path` |
| `audio-folder` | labelled recordings: a folder with one folder of `.wav` files a class, mixed | `path` |
| `audio-csv` | labelled recordings: a CSV file with the header `path,label`, paths from its own folder on | `path` |
| `transcripts` | recordings and their words: a `.csv` with the header `path,text`, or `.jsonl` with both | `path` |
| `hf` | what Hugging Face's `datasets` reads, its rows told by their columns | `path`, `subset`, `split` |
| `vader` | labelled texts, fetched once by pip into a cache, hash checked | `subset`, `split` |

`text-csv`, `sst2-text` and `vader` fit the tasks `sequence-classification` and `embedding-classification`; `stsb-csv`
fits `sentence-similarity`, `conll` `token-classification`, `squad-json` `question-answering`, `choices-jsonl`
`multiple-choice`, `image-masks` `semantic-segmentation`, `image-depths` `depth-estimation`, `coco-json`
`object-detection`, and `text-lines` `fill-mask` and both tasks of generation; `image-folder` and `image-csv` fit
`image-classification`, `audio-folder` and `audio-csv` `audio-classification`, with the names that the model has for its
classes, or their numbers, as labels; `transcripts` fits `automatic-speech-recognition` and `speech-to-text`, and
`text-pairs` fits `text-to-text`. Subsets of `vader`: `tweets`, `movieReviewSnippets`, `amazonReviewSnippets`,
`nytEditorialSnippets`; its splits `head`, `calibration` and `evaluation` share no document. [Tasks](how-to/tasks.md)
says what each task reads, and how it is scored.

The report is always scored on all rows of `evaluation`, and calibrated on all rows of `calibration`: keep them apart.
Samples that a search was scored on flatter its choice: `tuning` may hold no row of `evaluation`, which is an error.
"""


def reference() -> str:
    """Return the whole page, as Markdown."""
    places = _places()
    parts = [_HEAD, *(_table(section, places) for section in places), _TAIL]
    return "\n".join(parts)


def _places() -> dict[type[Section], list[str]]:
    """Return every section of a file, in order, with all its paths."""
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
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _default(value: Any) -> str:
    if isinstance(value, Section):
        return "its defaults"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
