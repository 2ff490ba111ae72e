"""Collections of documents with queries and judgements, in the layouts of BEIR and TREC.

``beir``: a folder with ``corpus.jsonl`` (``_id``, ``text`` and perhaps ``title``), ``queries.jsonl`` (``_id``,
``text``), and the judgements of each split in ``qrels/SPLIT.tsv``, with a header. The default split is ``test``. The
text of a document is its title and its text.

    {"_id": "d1", "title": "Wings", "text": "Lift of a wing in a slipstream."}
    {"_id": "q1", "text": "what gives a wing its lift"}
    query-id    corpus-id    score
    q1          d1           2

``trec``: a folder with ``documents.tsv`` and ``queries.tsv``, whose lines are an identifier, a tab and a text, and
``qrels.txt`` with the judgements as trec_eval reads them.

    d1    Wings Lift of a wing in a slipstream.
    q1    what gives a wing its lift
    q1 0 d1 2

A judgement above 0 is the gain of a relevant document. Queries without a relevant document are left out, because no
ranking of theirs is better than another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import (
    Documents,
    Example,
    Query,
    datasets,
    read_lines,
    read_objects,
    refuse_options,
    require_file,
    require_folder,
)

_Entry = tuple[str, str, str]
"""The position (``FILE:LINE``), the identifier and the text of a document or query."""
_Judgement = tuple[str, str, str, str]
"""The position, the identifiers of a query and of a document, and the judgement."""

_HEADER = ["query-id", "corpus-id", "score"]


@datasets.add("beir")
def read_beir(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the judged queries of a split, with their collection."""
    refuse_options("beir", split=None, subset=subset)
    folder = require_folder("beir", path)
    qrels = folder / "qrels" / f"{split or 'test'}.tsv"
    if split is not None and not qrels.is_file():
        splits = ", ".join(sorted(file.stem for file in (folder / "qrels").glob("*.tsv")))
        raise TaskError(f"data set 'beir': {folder} has no split {split!r}; expected one of {splits or '(none)'}")
    return _judged(
        _from_jsonl(require_file("beir", folder / "corpus.jsonl")),
        _from_jsonl(require_file("beir", folder / "queries.jsonl")),
        _from_tsv(require_file("beir", qrels)),
        qrels,
    )


@datasets.add("trec")
def read_trec(path: Path | None, split: str | None, subset: str | None) -> list[Example]:
    """Return the judged queries of a folder, with their collection."""
    refuse_options("trec", split=split, subset=subset)
    folder = require_folder("trec", path)
    qrels = require_file("trec", folder / "qrels.txt")
    return _judged(
        _from_lines(require_file("trec", folder / "documents.tsv")),
        _from_lines(require_file("trec", folder / "queries.tsv")),
        _from_qrels(qrels),
        qrels,
    )


def _judged(
    documents: Iterable[_Entry], queries: Iterable[_Entry], judgements: Iterable[_Judgement], qrels: Path
) -> list[Example]:
    """Return the queries with a relevant document, in the order of their file."""
    document_texts, query_texts = _by_name(documents, "document"), _by_name(queries, "query")
    places = {identifier: place for place, identifier in enumerate(document_texts)}
    gains: dict[str, dict[int, float]] = {identifier: {} for identifier in query_texts}
    for where, query, document, judgement in judgements:
        for kind, identifier, known in (("query", query, gains), ("document", document, places)):
            if identifier not in known:
                raise TaskError(
                    f"{where}: there is no {kind} {identifier!r}; expected judgements of known queries and documents: "
                    "check that the files belong together"
                )
        if places[document] in gains[query]:
            raise TaskError(f"{where}: the document {document!r} is judged twice for the query {query!r}; remove one")
        gains[query][places[document]] = _gain(judgement, where)
    collection = Documents(tuple(document_texts.values()))
    examples: list[Example] = []
    for identifier, text in query_texts.items():
        relevant = tuple((place, gain) for place, gain in gains[identifier].items() if gain > 0)
        if relevant:
            examples.append(Query(text, relevant, collection))
    if not examples:
        raise TaskError(f"{qrels}: no query has a relevant document; expected judgements above 0")
    return examples


def _by_name(entries: Iterable[_Entry], kind: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, identifier, text in entries:
        if identifier in texts:
            raise TaskError(f"{where}: a second {kind} {identifier!r}; expected each identifier once")
        # Collections do have empty documents.
        if not text and kind == "query":
            raise TaskError(f"{where}: the query {identifier!r} has no text; remove it with its judgements")
        texts[identifier] = text
    return texts


def _gain(judgement: str, where: str) -> float:
    try:
        value = float(judgement)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TaskError(f"{where}: the judgement is {judgement[:60]!r}, expected a number; above 0 is relevant")
    return value


def _from_jsonl(file: Path) -> Iterator[_Entry]:
    for where, values in read_objects("beir", file):
        identifier, title, text = (values.get(key, "") for key in ("_id", "title", "text"))
        if not identifier or not all(isinstance(value, str) for value in (identifier, title, text)):
            raise TaskError(f'{where}: {str(values)[:60]!r}, expected an object like {{"_id": "d1", "text": "a text"}}')
        yield where, identifier, f"{title} {text}".strip()


def _from_tsv(file: Path) -> Iterator[_Judgement]:
    for number, line in enumerate(read_lines("beir", file), start=1):
        fields = [field.strip() for field in line.split("\t")]
        if number == 1 and fields != _HEADER:
            raise TaskError(f"{file}:1: {line.strip()[:60]!r}, expected the header {' '.join(_HEADER)}, with tabs")
        if number > 1 and line.strip():
            if len(fields) != len(_HEADER):
                raise TaskError(f"{file}:{number}: {len(fields)} fields, expected {len(_HEADER)} with tabs, as above")
            query, document, judgement = fields
            yield f"{file}:{number}", query, document, judgement


def _from_lines(file: Path) -> Iterator[_Entry]:
    for number, line in enumerate(read_lines("trec", file), start=1):
        identifier, tab, text = line.strip("\r\n").partition("\t")
        if not line.strip():
            continue
        if not tab or not identifier.strip():
            raise TaskError(f"{file}:{number}: {line.strip()[:60]!r}, expected an identifier, a tab and a text")
        yield f"{file}:{number}", identifier.strip(), text.strip()


def _from_qrels(file: Path) -> Iterator[_Judgement]:
    for number, line in enumerate(read_lines("trec", file), start=1):
        fields = line.split()
        if fields and len(fields) != 4:
            raise TaskError(f"{file}:{number}: {len(fields)} fields, expected 4: query, 0, document, judgement")
        if fields:
            yield f"{file}:{number}", fields[0], fields[2], fields[3]
