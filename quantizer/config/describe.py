"""Descriptions of configuration keys for error messages: accepted values, similar names and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le

from quantizer.config.quantizer_section import Expects, OneOf, Section

KeyPath = tuple[str | int, ...]
"""The path of a value: keys, and indices in lists."""

_OTHER_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "ort": "onnxruntime",
    "trt": "tensorrt",
    # Keys of earlier versions.
    "rows": "samples",
    "smooth": "smoothquant_alpha",
    # Names that the pipelines of transformers have for tasks.
    "asr": "automatic-speech-recognition",
    "causal-lm": "text-generation",
    "feature-extraction": "sentence-similarity",
    "image-segmentation": "semantic-segmentation",
    "masked-lm": "fill-mask",
    "ner": "token-classification",
    "sentiment-analysis": "sequence-classification",
    "text-classification": "sequence-classification",
    "zero-shot-classification": "sequence-classification",
}
"""Synonyms of our names that a search by spelling misses or matches wrongly."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Slot:
    """The values that one path of a configuration accepts.

    Attributes:
        annotation: the type of the values, without ``Annotated`` and without ``None``.
        metadata: the constraints on the values.
        nullable: null is accepted.
    """

    annotation: Any
    metadata: tuple[Any, ...] = ()
    nullable: bool = False

    @classmethod
    def of(cls, annotation: Any, metadata: Sequence[Any] = ()) -> Slot:
        """Return the slot of a type annotation in a schema."""
        constraints = list(metadata)
        nullable = False
        while True:
            if get_origin(annotation) is Annotated:
                annotation, *extra = get_args(annotation)
                constraints += extra
            elif get_origin(annotation) in (Union, UnionType):
                types = [kind for kind in get_args(annotation) if kind is not NoneType]
                nullable = len(types) < len(get_args(annotation))
                annotation = types[0]
            else:
                return cls(annotation, tuple(constraints), nullable)

    @property
    def section(self) -> type[Section] | None:
        """The class of the section; None for plain values."""
        return self.annotation if isinstance(self.annotation, type) and issubclass(self.annotation, Section) else None

    def child(self, key: str | int) -> Slot | None:
        """Return the slot of a key of a section or of an entry of a list; None if it does not exist."""
        if self.section is not None:
            field = self.section.model_fields.get(str(key))
            return None if field is None else Slot.of(field.annotation, field.metadata)
        if get_origin(self.annotation) is tuple and isinstance(key, int):
            return Slot.of(get_args(self.annotation)[0])
        return None

    def names(self) -> list[str]:
        """Return the keys of a section, or the strings that a value may be."""
        if self.section is not None:
            return list(self.section.model_fields)
        return [value for value in self._values() if isinstance(value, str)]

    def _values(self) -> tuple[Any, ...]:
        """Return the values of a ``Literal`` or the names of a registry; empty for other types."""
        if get_origin(self.annotation) is Literal:
            return get_args(self.annotation)
        return next((tuple(extra.registry) for extra in self.metadata if isinstance(extra, OneOf)), ())

    def expected(self) -> str:
        """Return the accepted values in words, to follow "expected ..."."""
        words = next((extra.words for extra in self.metadata if isinstance(extra, Expects)), None) or self._kind()
        bounds = [_bound(extra) for extra in self.metadata if isinstance(extra, Gt | Ge | Le)]
        words += ", " + " and ".join(bounds) if bounds else ""
        return words + ((", or null" if bounds else " or null") if self.nullable else "")

    def _kind(self) -> str:
        if self.section is not None:
            return f"a section with keys {', '.join(self.names())}"
        if values := [words_for(value, kind=False) for value in self._values()]:
            return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
        if get_origin(self.annotation) is tuple:
            return f"a list, each entry {Slot.of(get_args(self.annotation)[0]).expected()}"
        return _KINDS.get(self.annotation, "another value")


def _bound(constraint: Gt | Ge | Le) -> str:
    if isinstance(constraint, Gt):
        return f"above {constraint.gt}"
    return f"at least {constraint.ge}" if isinstance(constraint, Ge) else f"at most {constraint.le}"


def slot_at(schema: type[Section], path: KeyPath) -> Slot | None:
    """Return the slot at ``path`` below ``schema``; None if the schema has no such path."""
    slot: Slot | None = Slot(schema)
    for key in path:
        slot = slot.child(key) if slot is not None else None
    return slot


def paths_ending_in(schema: type[Section], name: str) -> Sequence[KeyPath]:
    """Return every path of ``schema`` whose last key is ``name``."""
    return _paths(schema).get(name, ())


@cache
def _paths(schema: type[Section]) -> dict[str, list[KeyPath]]:
    """Return all paths of ``schema`` by their last key; cached for files with thousands of unknown keys."""
    paths: dict[str, list[KeyPath]] = {}
    queue: list[tuple[KeyPath, type[Section]]] = [((), schema)]
    while queue:
        above, current = queue.pop(0)
        for key in current.model_fields:
            paths.setdefault(key, []).append((*above, key))
            section = Slot(current).child(key)
            if section is not None and section.section is not None:
                queue.append(((*above, key), section.section))
    return paths


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the most similar name in ``known``; None if no name is similar."""
    plain = name.lower()
    return next(iter(get_close_matches(_OTHER_NAMES.get(plain, plain), known, n=1)), None)


def path_text(path: KeyPath) -> str:
    """Return a path as text, such as ``quantizer.exclude.names[0]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def words_for(value: Any, kind: bool = True) -> str:
    """Return ``value`` as in a YAML file, with long texts cut.

    Args:
        value: any value.
        kind: add the kind of the value in words: "the text '3'" instead of '3'.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = repr(value if len(value) <= 60 else value[:57] + "...")
        return f"the text {text}" if kind else text
    if isinstance(value, int | float):
        return f"the {'whole ' if isinstance(value, int) else ''}number {value}" if kind else str(value)
    if isinstance(value, Mapping):
        return "a section"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
