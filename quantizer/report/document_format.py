"""The documentation of ``report.json``, generated from the records.

``python -m quantizer.report.document_format > docs/report-format.md`` writes the page; a test compares both.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
from typing import Any

from quantizer.report import record
from quantizer.report.record import VERSION, RunRecord

_INTRODUCTION = f"""# The format of `report.json`

<!-- Made by `python -m quantizer.report.document_format > docs/report-format.md`: change the records, not
this page. -->

One run, one object of type [RunRecord](#runrecord). This page describes version {VERSION}. A reader
rejects other versions, unknown fields, missing fields without a default, and values of the wrong type, and names the
field. Version 10 and older reports cannot be converted: read them with the quantizer that wrote them, or run the
configuration again.

- Ratios are float divided by quantized: above 1 is faster, smaller or less memory.
- Numbers that JSON cannot represent are the strings `"inf"`, `"-inf"` and `"nan"`.
- `null` means "does not apply" or "was not measured", never zero.
- In `latency`, `size` and `memory`, the entry named `float` (else the first) is the reference, and the entry named
  `engine` (else the last) is the headline.

In pandas, which is not a dependency, `pandas.json_normalize(json.load(open("report.json")))` returns a report as one
row; with `record_path="scores"` it returns the scores as a table. `resamples.json` in the same folder has the scores on
bootstrap resamples of the evaluation samples, with which [runs are compared](how-to/compare.md).

`quantizer.report.read_record(path)` reads a report, and returns the same objects as frozen dataclasses.
"""


def field_documentation(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass by field name; "" without a text."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    documentation = {}
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value))
            documentation[statement.target.id] = text
    return documentation


def format_page() -> str:
    """Return the page as Markdown: one table per record, :class:`RunRecord` first."""
    classes = [getattr(record, name) for name in record.__all__ if isinstance(getattr(record, name), type)]
    ordered = [RunRecord, *(cls for cls in classes if cls is not RunRecord)]
    return _INTRODUCTION + "".join(_section(cls) for cls in ordered)


def _section(cls: Any) -> str:
    documentation = field_documentation(cls)
    lines = [
        f"\n## {cls.__name__}\n",
        f"\n{_markdown(inspect.getdoc(cls) or '')}\n",
        "\n| field | type | meaning |\n|---|---|---|\n",
    ]
    for item in dataclasses.fields(cls):
        # Rows of Markdown tables are single lines.
        text = " ".join(_markdown(documentation[item.name]).replace("|", "\\|").split())
        if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING:
            text += f" Default: `{_default(item)}`."
        lines.append(f"| `{item.name}` | {_json_type(str(item.type))} | {text} |\n")
    return "".join(lines)


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _default(item: dataclasses.Field[Any]) -> str:
    """Return the default as JSON."""
    factory = item.default_factory
    return json.dumps(item.default if factory is dataclasses.MISSING else factory())


def _json_type(annotation: str) -> str:
    """Return a Python annotation as a JSON type: ``float | None`` is ``number or null``."""
    optional = annotation.removesuffix(" | None")
    if optional != annotation:
        return f"{_json_type(optional)} or null"
    if annotation == "tuple[float, float]":
        return "[number, number]"
    if annotation.startswith("tuple["):
        return f"list of {_json_type(annotation[6:-6])}"
    if annotation.startswith("Mapping[str, "):
        inner = annotation[13:-1]
        return "object" if inner == "Any" else f"object of {_json_type(inner)}"
    if " | " in annotation:
        return " or ".join(_json_type(part) for part in annotation.split(" | "))
    words = {"str": "string", "int": "whole number", "float": "number", "bool": "boolean"}
    return words.get(annotation, f"[{annotation}](#{annotation.lower()})")


if __name__ == "__main__":
    sys.stdout.write(format_page())
