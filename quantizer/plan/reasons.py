"""The reasons for sites in float, and the kinds of rule that decide about sites, as codes.

The value of a code is the template of its sentence. Plans and files contain the sentence, and only this module turns it
back into its code. A sentence that matches no template, such as one about a source file that cannot be read, has the
code ``OTHER``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from functools import cache, lru_cache
from string import Formatter
from typing import Self

_WITH_SPACES = frozenset({"asked", "sizes", "text", "value", "where", "why"})
"""The fields of templates that may have several words; all other fields are single words."""

# Because of the group, split() returns the numbers too: text at even places, numbers at odd places.
_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)")


class _Template(Enum):
    """Templates of sentences with named fields; ``text`` makes a sentence, and ``read`` parses it."""

    def text(self, **fields: object) -> str:
        """Return the sentence with its fields filled in."""
        return str(self.value).format(**fields)

    @classmethod
    def read(cls, text: str) -> tuple[Self, dict[str, str]]:
        """Return the code of a sentence, and its fields."""
        found = ((code, _pattern(code.value).fullmatch(text)) for code in cls)
        return next((code, match.groupdict()) for code, match in found if match is not None)

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, text: str) -> Self:
        """Return the code of a sentence."""
        return cls.read(text)[0]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = []
    for words, name, _, _ in Formatter().parse(template):
        parts.append(re.escape(words))
        if name is not None:
            parts.append(f"(?P<{name}>.*)" if name in _WITH_SPACES else rf"(?P<{name}>\S+)")
    return re.compile("".join(parts), re.DOTALL)


class ReasonCode(_Template):
    """The reasons why a site or an operand is not quantized."""

    EXCLUDED = "excluded by rule"
    SWITCHED_OFF = "this kind of site is switched off"
    NEVER_RAN = "never ran in calibration"
    NOT_CALIBRATED = "not calibrated yet"

    # A site's operands in calibration.
    TRANSFORMED = "it runs inside torch.vmap or a transform of torch.func"
    NESTED = "an operand is a nested tensor"
    SPARSE = "an operand is a sparse tensor"
    NOT_TENSORS = "its operands are not floating-point tensors"
    EMPTY = "an operand was empty in every call"
    VARIES = "an operand is a parameter in one call and something else in another"
    FROM_PARAMETERS = "an operand is computed from parameters at each call, {why}"
    PARAMETERS_ALONE = "its operands are parameters alone"
    TABLE = "the table of the embedding is no parameter"
    ATTENTION_PARAMETER = "an operand of the attention is a parameter"
    ADD_BROADCASTS = "the add broadcasts an operand"
    ADD_PARAMETER = "an operand of the add is a parameter"
    ADD_UNWEIGHTED = "no operand of the add comes from a weighted product"
    ADD_ONE_PRODUCT = "both operands of the add come from one product"
    ADD_SCORES = "an operand of the add comes from a product of two activations, as scores do"
    ADD_MASK = "it adds a mask: beside its lowest number no step is left for the other values"
    OPERAND_UNSEEN = "an operand was not observed"
    NONE_SEEN = "no operand observed"

    NOT_OF_CONVOLUTION = "it is not the result of a convolution that is quantized"

    EQUALIZED_BEHIND = "the equalized convolution that reads it rounds it: one quantizer serves both"

    # One operand.
    NO_VALUE = "no value of it was seen"
    ONLY_ZEROS = "all its values in calibration were 0, so that no range of it is known"
    WEIGHTS_ALONE = "weights alone are quantized here"
    UNREGISTERED = "the weight is a parameter that no module of the model has registered"
    OFFLOADED = "the weight is offloaded: it is loaded for each call, and the model holds none to store as integers"
    NO_BLOCKS = "a weight of {axes} axes has no blocks of input channels"
    INDIVISIBLE = "its block size does not divide its input channels"
    SQNR = "{dtype} does not hold it: SQNR {sqnr} dB, below {limit} dB"
    SCALE_TOO_SMALL = "its largest value, {amax}, needs a scale below {least}, the least normal number of {dtype}"
    SCALE_TOO_LARGE = "its largest value, {amax}, needs a scale beyond {dtype}"

    # The output of the model.
    COSTLY_ATTENTION = "rounding the products of attention costs the model's output {cost} dB"

    # The target.
    NO_GAIN = "{target} gains nothing from this kind of site"
    NO_KERNEL = "{target} has no integer kernel for {operation}"
    NO_DYNAMIC = "{target} has no kernel that takes the ranges of this kind of site at run time"
    DYNAMIC_BLOCKS = "{target} takes ranges of blocks of {block} at run time, and K = {size} is no multiple of that"
    VECTOR = "M = 1, a matrix-vector product: slower quantized than float on {target}"
    SMALL_PRODUCT = "{axis} = {size} is below {least}: slower quantized than float on {target}"
    WRONG_CONVOLUTION = (
        "a kernel {width} wide over {channels} input channels: {target} computes it wrongly in integers on {where}"
    )
    RECURRENCE = "{target} runs all steps of this {kind} in one float kernel, and gains nothing from a loop"
    SMALL_RECURRENCE = (
        "its recurrent product has {weights} weights, fewer than {least}: slower in a quantized loop on {target} than "
        "in one float kernel"
    )
    SMALL_TABLE = "a table of {numbers} numbers, fewer than {least}: codes would save little"
    TABLE_CODES = "rows of a table are looked up in codes of int8 with a scale for each row, and in no others"
    TABLE_LIMITED = "its lookup limits norms (max_norm), so it writes to its table"
    TABLE_READ = "its table stays in floats for others, {where}: codes would come beside it"
    RECURRENT_FORMAT = "a recurrent layer takes INT8 or FP8 of fixed ranges for weights and activations"
    TORN_RECURRENCE = "another product of its recurrent layer is not quantized: {why}"
    ONE_SIDED_ADD = "{skipping} skips the block and is float ({why}): on {target} the product is rounded for nothing"
    HEAD_SIZE = "head size {head} is none of {sizes}: {target} fuses no attention in {dtype} with it"
    HEAD_MULTIPLE = "head size {head} is no multiple of {multiple}: {target} fuses no attention in {dtype} with it"
    SEQUENCE = "a sequence of {sequence} is longer than {longest}: {target} fuses no attention in {dtype} with it"
    TORN_ATTENTION = (
        "not all products of this attention are in FP8: query, key, value and softmax go together or not at all"
    )

    # Fallback.
    RANKED = "kept in float by fallback({asked}): rank {rank}"
    FALLBACK = "kept in float by fallback({asked})"
    SLOWER = "slower in low precision than in float: {low} us, float {float}, {where}"
    IN_FLOAT32 = "{why}, in float32: calibration saw {largest} here, and float16 ends at {end}"

    # The text of the model: what cannot be rewritten, and what to write instead.
    SCRIPTED = (
        "TorchScript compiled it, and no Python code of it is left, so it is not quantized; to quantize it, put the "
        "module there that was compiled"
    )
    PASSED_ON = (
        "{function}() is passed on as a value here instead of being called, so what it computes is not quantized; to "
        "quantize it, call it in the code of a module"
    )
    IN_F_STRING = "inside an f-string it is not quantized; to quantize it, compute it before"
    IN_INNER_CLASS = "in a class inside a function it is not quantized; to quantize it, define the class outside"
    HIDDEN_MODULE = (
        "an inner function has an argument {name} too, which hides the module, so it is not quantized; to quantize it, "
        "rename that argument"
    )
    OUT_ARGUMENT = (
        "out= writes into a tensor of the caller, so it is not quantized; to quantize it, use what it returns"
    )
    METHOD_APART = (
        "its name and its parenthesis are on different lines, so it is not quantized; to quantize it, join the lines"
    )
    IN_PLACE = "in place on {where} it is not quantized; to quantize it, compute it in a local variable"
    NO_OPERATOR = "the operator's place was not found in the text, so it is not quantized"
    INNER_GLOBAL = "a function in it declares a global, so it is not quantized; to quantize it, move that function out"
    BOUND_GLOBAL = (
        "it binds the global {name} by something else than an assignment, so it is not quantized; to quantize it, "
        "assign "
        "to the global"
    )
    READS_LOCALS = (
        "the function reads locals(), where one more argument would show, so it is not quantized; to quantize it, make "
        "it a method"
    )
    ASSIGNS_MODULE = (
        "the function assigns to its argument {name}, so it is not quantized; to quantize it, give what it assigns "
        "another name"
    )
    EINSUM_STARRED = "an einsum with starred arguments is not quantized; to quantize it, write them out"
    EINSUM_UNSPELLED = (
        "an einsum whose equation does not stand in the text is not quantized; to quantize it, write it as a string in "
        "the call"
    )
    EINSUM_OF_ONE = "an einsum of 1 operand: a product has two"
    EINSUM_OF_MANY = "an einsum of {count} operands is not quantized; to quantize it, write it as einsums of two"
    EINSUM_TWICE = (
        "an einsum with a label twice in one operand is not quantized; to quantize it, take the diagonal of that "
        "operand "
        "first"
    )
    REPLACED_FORWARD = (
        "its forward was replaced on this module, so what runs there is not quantized; to quantize it, write it in the "
        "class"
    )
    KEPT_FUNCTION = (
        "what the function kept as {name} computes is not quantized, as it is an attribute of the module; to quantize "
        "it, make it a method of the class"
    )
    LATE_DECORATOR = (
        "{name} was made static or a class method outside of its definition, so what it computes is not quantized; to "
        "quantize it, decorate it in its class"
    )
    HELD_BY_DECORATOR = (
        "the decorators of {name} hold it in a way that cannot be cloned, so what it computes is not quantized; to "
        "quantize it, write them with functools.wraps"
    )

    OTHER = "{text}"


class RuleKind(_Template):
    """The rules that decide about a site, apart from the observations of calibration."""

    INCLUDE = "not among the included"
    EXCLUDE = "exclude.{key}: {value}"
    SWITCH = "sites.{key}: {value}"
    FORMAT = "formats[{key}]"
    TARGET = "target {key}"
    FALLBACK = "fallback"
    OTHER = "{text}"


def counted(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return the number of occurrences of each reason, the most frequent first.

    Reasons that differ only in numbers are counted together, with ``…`` for the numbers that differ.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for text in texts:
        parts = _NUMBER.split(text)
        alike.setdefault(tuple(parts[::2]), []).append(parts)
    counts: Counter[str] = Counter()
    for group in alike.values():
        columns = zip(*group, strict=True)
        counts["".join(same[0] if len(set(same)) == 1 else "…" for same in columns)] += len(group)
    return counts.most_common()
