"""Facts derived from the layers of an engine: shares of precisions, counts, reasons, and times by module."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from quantizer.utils.records import LOW_PRECISIONS, Inspection, Layer, PrecisionShare

RUNS = 5
"""Number of runs for the time of a layer."""

WARMUP = 2
"""Warmup runs, not counted."""

_FLOATS = ("fp16", "bf16", "fp32", "fp64")
_BLOCK = re.compile(r"^(.*?(?:^|\.)\d+)(?:[./]|$)")
# Roles that leave the precision of a value unchanged.
_TRANSPARENT = ("move", "reformat")
_SEARCH_DEPTH = 4
_SHOWN = 4
_READERS = {
    "addition": "the residual add",
    "normalization": "the normalization",
    "attention": "the attention",
    "product": "the next MatMul/Conv/Gemm",
    "softmax": "the softmax",
    "quantizer": "the separate quantizer layer",
    "cast": "the cast",
}


def run_note(shape: str, threads: int, runs: int = RUNS) -> str:
    """Return a sentence on how an engine was observed; ``shape`` is a text of ``InputSizes.words``."""
    threads_text = "1 thread" if threads == 1 else f"{threads} threads"
    return f"seen in a run at {shape} with {threads_text}; times are the lower quartile of {runs} runs"


def undisturbed_time(times: Sequence[float]) -> float:
    """Return the lower quartile of times: other work on the machine only adds time, and seldom to most runs."""
    return sorted(times)[(len(times) - 1) // 4]


def is_product(layer: Layer) -> bool:
    """Return whether a layer multiplies matrices."""
    return layer.role in ("product", "attention")


def named(precision: str) -> str:
    """Return a precision in upper case; ``index`` and ``unknown`` are unchanged."""
    return precision if precision in ("index", "unknown") else precision.upper()


def block_of(name: str) -> str:
    """Return the path of a module up to its first number, such as ``encoder.layer.3``, or up to ``/``."""
    match = _BLOCK.match(name)
    return match[1] if match else name.partition("/")[0]


def inspection_from_layers(backend: str, layers: Sequence[Layer], *, verified: bool, note: str) -> Inspection:
    """Return the inspection of an engine with these layers, in execution order."""
    roles = Counter(layer.role for layer in layers)
    products = [layer for layer in layers if is_product(layer)]
    writing = [layer for layer in products if layer.precision in LOW_PRECISIONS and layer.writes in _FLOATS]
    after = _Readers(layers)
    return Inspection(
        backend=backend,
        verified=verified,
        note=note,
        shares=_shares(layers if verified else products),
        attention_fused=roles["attention"],
        attention_apart=sum(layer.role == "softmax" and after.meets_product(layer) for layer in layers),
        quantizers=roles["quantizer"],
        casts=roles["cast"],
        reformats=roles["reformat"],
        float_outputs=len(writing),
        uncounted=sum(layer.multiply_adds is None for layer in products),
        reasons=(*_written_reasons(writing, after), *_float_reasons(products, layers)),
        layers=tuple(layers),
    )


def _shares(layers: Sequence[Layer]) -> tuple[PrecisionShare, ...]:
    work = sum(layer.multiply_adds or 0 for layer in layers)
    time = sum(layer.time_us or 0.0 for layer in layers)
    shares = []
    for precision in dict.fromkeys(layer.precision for layer in layers):
        members = [layer for layer in layers if layer.precision == precision]
        shares.append(
            PrecisionShare(
                precision=precision,
                layers=len(members),
                products=sum(map(is_product, members)),
                layer_share=len(members) / len(layers),
                multiply_add_share=sum(layer.multiply_adds or 0 for layer in members) / work if work else None,
                time_share=sum(layer.time_us or 0.0 for layer in members) / time if time else None,
            )
        )
    return tuple(sorted(shares, key=lambda share: (-(share.multiply_add_share or 0), -share.layers)))


class _Readers:
    """Layers by name, and their readers."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers: Mapping[str, Layer] = {layer.name: layer for layer in layers}

    def of(self, layer: Layer) -> list[Layer]:
        """Return the layers that read the output of ``layer``, behind moves, reformats and its bias."""
        return self._search(layer, lambda reader: not self._passes(layer, reader))

    def meets_product(self, layer: Layer) -> bool:
        """Return whether a matrix multiplication reads the layer within a few nodes."""
        return any(is_product(reader) for reader in self._search(layer, is_product))

    def _passes(self, layer: Layer, reader: Layer) -> bool:
        own_bias = reader.role == "addition" and _module(reader.name) == _module(layer.name)
        return reader.role in _TRANSPARENT or own_bias

    def _search(self, layer: Layer, is_match: Callable[[Layer], bool]) -> list[Layer]:
        matches: list[Layer] = []
        edge = [layer]
        for _ in range(_SEARCH_DEPTH):
            readers = [self.layers[name] for source in edge for name in source.readers if name in self.layers]
            matches += [reader for reader in readers if is_match(reader)]
            edge = [reader for reader in readers if not is_match(reader)]
        return list({reader.name: reader for reader in matches}.values())


def _module(name: str) -> str:
    return name.rpartition("/")[0]


def _written_reasons(writing: Sequence[Layer], after: _Readers) -> list[str]:
    """Return the reasons why low-precision operations write floats: their readers, by block."""
    blocks: dict[tuple[str, str, str, str], Counter[str]] = defaultdict(Counter)
    for layer in writing:
        readers = after.of(layer)
        reader = next((r for r in readers if r.role in _READERS), readers[0] if readers else None)
        consumer = "the output" if reader is None else _READERS.get(reader.role, reader.type)
        blocks[consumer, layer.role, layer.precision, layer.writes][block_of(layer.name)] += 1
    lines = []
    for (consumer, role, precision, float_type), counts in blocks.items():
        for number in dict.fromkeys(counts.values()):
            blocks_of_count = [block for block, count in counts.items() if count == number]
            writer = f"{named(precision)} {'attention' if role == 'attention' else 'layer'}"
            writers = f"the {writer} before it writes" if number == 1 else f"the {number} {writer}s before it write"
            lines.append(
                f"{consumer} in {_listed(blocks_of_count)} is {named(float_type)}: {writers} {named(float_type)}"
            )
    return lines


def _float_reasons(products: Sequence[Layer], layers: Sequence[Layer]) -> list[str]:
    """Return the operations that run in float, by whether the graph requests low precision."""
    sources = defaultdict(set)
    for layer in layers:
        for reader in layer.readers:
            sources[reader].add(layer.role)
    lines = []
    for dequantized in (True, False):
        for precision in _FLOATS:
            members = [
                layer
                for layer in products
                if layer.precision == precision and ("quantizer" in sources[layer.name]) == dequantized
            ]
            if members and len(members) + dequantized <= len(products):
                verb = "MatMul/Conv/Gemm layer is" if len(members) == 1 else "MatMul/Conv/Gemm layers are"
                cause = "behind a dequantizer" if dequantized else "with non-quantized operands"
                names = [product.name for product in members]
                locations = (
                    _shown(names) if len(names) <= _SHOWN else _listed(list(dict.fromkeys(map(block_of, names))))
                )
                lines.append(f"{len(members)} {verb} {named(precision)}, {cause}: {locations}")
    return lines


def _listed(blocks: Sequence[str]) -> str:
    """Return the blocks as a text that merges consecutive numbers: ``encoder.layer.0 to 5, pooler``."""
    stems: dict[str, list[int]] = {}
    for block in blocks:
        stem, _, number = block.rpartition(".")
        if stem and number.isdecimal():
            stems.setdefault(stem, []).append(int(number))
        else:
            stems.setdefault(block, [])
    return _shown([name for stem, numbers in stems.items() for name in _merged(stem, sorted(numbers))])


def _merged(stem: str, numbers: Sequence[int]) -> list[str]:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return [f"{stem}.{numbers[0]} to {numbers[-1]}"]
    return [f"{stem}.{number}" for number in numbers] or [stem]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


NOWHERE = ""
"""Key of layers outside of all requested modules."""


def place_times(inspection: Inspection, places: Collection[str], products: Mapping[str, str]) -> dict[str, float]:
    """Return the time of each module path in ``places`` in microseconds; the sum covers all layers.

    A layer belongs to the path that begins its name or the name of one of its nodes. Other layers, such as conversions,
    belong to the path of the layer that they read, or else of their reader.
    """
    layers = inspection.layers
    paths = _places(layers, frozenset(places), products)
    times: dict[str, float] = dict.fromkeys([*places, NOWHERE], 0.0)
    for layer in layers:
        times[paths[layer.name]] += layer.time_us or 0.0
    return times


def _places(layers: Sequence[Layer], places: Collection[str], products: Mapping[str, str]) -> dict[str, str]:
    named = {layer.name: _named([products.get(n, n) for n in (layer.name, *layer.nodes)], places) for layer in layers}
    paths = {name: exact for name, (exact, _) in named.items() if exact is not None}
    sources: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        for reader in layer.readers:
            sources[reader].append(layer.name)
    # In execution order, so that chains of layers pass the path on.
    for layer in layers:
        if layer.name not in paths and (path := _first(sources[layer.name], paths)) is not None:
            paths[layer.name] = path
    for layer in reversed(layers):
        if layer.name not in paths and (path := _first(layer.readers, paths)) is not None:
            paths[layer.name] = path
    return {name: paths.get(name, outer or NOWHERE) for name, (_, outer) in named.items()}


def _first(names: Sequence[str], paths: Mapping[str, str]) -> str | None:
    return next((paths[name] for name in names if name in paths), None)


def _named(names: Sequence[str], places: Collection[str]) -> tuple[str | None, str | None]:
    """Return the path in ``places`` that the names match exactly, and an enclosing path; None for no match."""
    outer = None
    for name in names:
        scope, slash, _ = name.partition("/")
        if not slash:
            continue
        for depth, path in enumerate(_enclosing(scope)):
            if path in places:
                # Sites and their quantizers are below the module that calls them.
                if depth == 0 or ".site_" in scope[len(path) :]:
                    return path, outer
                outer = outer or path
                break
    return None, outer


def _enclosing(path: str) -> Iterator[str]:
    """Return a path and the paths of its parent modules, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
