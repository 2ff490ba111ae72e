"""Facts derived from layers: shares, counts, and reasons in words. The same for every library.

The time of an engine's layers by place: the modules of the model that they compute.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from quantizer.utils.records import LOW_PRECISIONS, Inspection, Layer, PrecisionShare

RUNS = 5
"""Runs that the time of a layer is the median of."""

WARMUP = 2
"""Runs before those, not counted."""

_FLOATS = ("fp16", "bf16", "fp32", "fp64")
_BLOCK = re.compile(r"^(.*?(?:^|\.)\d+)(?:[./]|$)")
# Roles that leave the precision of a value unchanged.
_TRANSPARENT = ("move", "reformat")
_STEPS = 4
_SHOWN = 4
_READERS = {
    "addition": "the residual add",
    "normalization": "the normalization",
    "attention": "the attention",
    "product": "the next product",
    "softmax": "the softmax",
    "quantizer": "the quantizer, a layer of its own,",
    "cast": "the cast",
}


def run_note(shape: str, threads: int, runs: int = RUNS) -> str:
    """Return in words how an engine was observed, at a shape as ``InputSizes.words`` says it."""
    where = "1 thread" if threads == 1 else f"{threads} threads"
    return f"seen in a run at {shape} with {where}; times are the median of {runs} runs"


def is_product(layer: Layer) -> bool:
    """Return whether a layer multiplies matrices."""
    return layer.role in ("product", "attention")


def named(precision: str) -> str:
    """Return a precision as readers know it: ``INT8``; ``index`` and ``unknown`` stay as they are."""
    return precision if precision in ("index", "unknown") else precision.upper()


def block_of(name: str) -> str:
    """Return a module's path up to its first number, ``encoder.layer.3`` for all of that layer, or up to the ``/``."""
    match = _BLOCK.match(name)
    return match[1] if match else name.partition("/")[0]


def inspection_from_layers(backend: str, layers: Sequence[Layer], *, verified: bool, note: str) -> Inspection:
    """Return the facts of an engine whose layers are ``layers``, in the order in which they run."""
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
    """Layers by name, and the readers of each."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers: Mapping[str, Layer] = {layer.name: layer for layer in layers}

    def of(self, layer: Layer) -> list[Layer]:
        """Return the layers that compute with what ``layer`` writes, behind moves, reformats and its own bias."""
        return self._search(layer, lambda reader: not self._passes(layer, reader))

    def meets_product(self, layer: Layer) -> bool:
        """Return whether a product reads it within a few nodes."""
        return any(is_product(reader) for reader in self._search(layer, is_product))

    def _passes(self, layer: Layer, reader: Layer) -> bool:
        own_bias = reader.role == "addition" and _module(reader.name) == _module(layer.name)
        return reader.role in _TRANSPARENT or own_bias

    def _search(self, layer: Layer, wanted: Callable[[Layer], bool]) -> list[Layer]:
        found: list[Layer] = []
        edge = [layer]
        for _ in range(_STEPS):
            readers = [self.layers[name] for at in edge for name in at.readers if name in self.layers]
            found += [reader for reader in readers if wanted(reader)]
            edge = [reader for reader in readers if not wanted(reader)]
        return list({reader.name: reader for reader in found}.values())


def _module(name: str) -> str:
    return name.rpartition("/")[0]


def _written_reasons(writing: Sequence[Layer], after: _Readers) -> list[str]:
    """Return the reasons why low-precision products write floats: the operators that read them, by block."""
    blocks: dict[tuple[str, str, str, str], Counter[str]] = defaultdict(Counter)
    for layer in writing:
        readers = after.of(layer)
        reader = next((r for r in readers if r.role in _READERS), readers[0] if readers else None)
        words = "the output" if reader is None else _READERS.get(reader.role, reader.type)
        blocks[words, layer.role, layer.precision, layer.writes][block_of(layer.name)] += 1
    lines = []
    for (words, role, low, wide), counts in blocks.items():
        for number in dict.fromkeys(counts.values()):
            where = [block for block, count in counts.items() if count == number]
            what = f"{named(low)} {'attention' if role == 'attention' else 'product'}"
            writers = f"the {what} before it writes" if number == 1 else f"the {number} {what}s before it write"
            lines.append(f"{words} in {_listed(where)} is {named(wide)}: {writers} {named(wide)}")
    return lines


def _float_reasons(products: Sequence[Layer], layers: Sequence[Layer]) -> list[str]:
    """Return the products that run in floats, and whether the graph asked for more."""
    sources = defaultdict(set)
    for layer in layers:
        for reader in layer.readers:
            sources[reader].add(layer.role)
    lines = []
    for dequantized in (True, False):
        for precision in _FLOATS:
            rest = [
                layer
                for layer in products
                if layer.precision == precision and ("quantizer" in sources[layer.name]) == dequantized
            ]
            if rest and len(rest) + dequantized <= len(products):
                verb = "product is" if len(rest) == 1 else "products are"
                why = "behind a dequantizer" if dequantized else "on operands that are not quantized"
                names = [product.name for product in rest]
                where = _shown(names) if len(names) <= _SHOWN else _listed(list(dict.fromkeys(map(block_of, names))))
                lines.append(f"{len(rest)} {verb} {named(precision)}, {why}: {where}")
    return lines


def _listed(blocks: Sequence[str]) -> str:
    """Return the blocks as a text, merging those that differ in the last number: ``encoder.layer.0 to 5, pooler``."""
    stems: dict[str, list[int]] = {}
    for block in blocks:
        stem, _, number = block.rpartition(".")
        if stem and number.isdecimal():
            stems.setdefault(stem, []).append(int(number))
        else:
            stems.setdefault(block, [])
    return _shown([f"{stem}.{_numbers(sorted(numbers))}" if numbers else stem for stem, numbers in stems.items()])


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


NOWHERE = ""
"""The place of layers that belong to no module that was asked for, nor lie behind one that does."""


def place_times(inspection: Inspection, places: Collection[str], products: Mapping[str, str]) -> dict[str, float]:
    """Return the time of each place in microseconds; the sum is that of all layers.

    A layer belongs to the place that its name, or that of a node it was made of, begins with. One that says nothing of
    the model, as a conversion that the library adds, belongs to the place of the layer that it reads, else to that of
    the layer that reads it: who causes a conversion pays for it.
    """
    layers = inspection.layers
    found = _places(layers, frozenset(places), products)
    times: dict[str, float] = dict.fromkeys([*places, NOWHERE], 0.0)
    for layer in layers:
        times[found[layer.name]] += layer.time_us or 0.0
    return times


def _places(layers: Sequence[Layer], places: Collection[str], products: Mapping[str, str]) -> dict[str, str]:
    """Return the place of each layer."""
    named = {layer.name: _named([products.get(n, n) for n in (layer.name, *layer.nodes)], places) for layer in layers}
    found = {name: exact for name, (exact, _) in named.items() if exact is not None}
    sources: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        for reader in layer.readers:
            sources[reader].append(layer.name)
    # In the order of execution, so that a chain of such layers passes the place on.
    for layer in layers:
        if layer.name not in found and (place := _first(sources[layer.name], found)) is not None:
            found[layer.name] = place
    for layer in reversed(layers):
        if layer.name not in found and (place := _first(layer.readers, found)) is not None:
            found[layer.name] = place
    return {name: found.get(name, outer or NOWHERE) for name, (_, outer) in named.items()}


def _first(names: Sequence[str], found: Mapping[str, str]) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _named(names: Sequence[str], places: Collection[str]) -> tuple[str | None, str | None]:
    """Return the place that a layer's names give exactly, and the one that lies around them; None if none does."""
    outer = None
    for name in names:
        scope, slash, _ = name.partition("/")
        if not slash:
            continue
        for depth, path in enumerate(_enclosing(scope)):
            if path in places:
                # The scope of a site and of its quantizers is below that of the module whose code calls it.
                if depth == 0 or ".site_" in scope[len(path) :]:
                    return path, outer
                outer = outer or path
                break
    return None, outer


def _enclosing(path: str) -> Iterator[str]:
    """Return a path and the paths of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
