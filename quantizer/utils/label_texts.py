"""The texts of labels, for models that compare images with texts."""

from __future__ import annotations

from collections.abc import Sequence

PLACE = "{}"
TEMPLATE = f"This is a photo of {PLACE}."
"""The text of a label in the pipeline of transformers."""


def label_texts(labels: Sequence[str], template: str) -> dict[str, str]:
    """Return the text of each label, which stands in the place of ``{}``."""
    return {label: template.replace(PLACE, label) for label in labels}


def label_problem(labels: Sequence[str], template: str) -> str | None:
    """Return what is wrong with labels or their template, in words; None: nothing is."""
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if len(labels) == 1 or "" in labels or twice is not None:
        what = "one label alone" if len(labels) == 1 else "an empty label" if "" in labels else f"{twice!r} twice"
        return f"got {what}; expected two labels or more, each of them once"
    if template.count(PLACE) != 1:
        return f"got the template {template!r}; expected a text with one {PLACE} for the label, such as {TEMPLATE!r}"
    return None
