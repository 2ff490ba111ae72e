"""The reasons why sites are not quantized, and the rules that decide about sites.

The value of each enum member is the template of its sentence. Plans and files contain the sentence; only this module
parses it back into the member and its fields. A sentence that matches no template, such as an error about a source file
that cannot be read, becomes ``OTHER``.
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
    """Enum of sentence templates with named fields; ``text`` fills a template, ``read`` parses a sentence."""

    def text(self, **fields: object) -> str:
        """Return the sentence with its fields filled in."""
        return str(self.value).format(**fields)

    @classmethod
    def read(cls, text: str) -> tuple[Self, dict[str, str]]:
        """Return the enum member of a sentence, and the values of its fields."""
        matches = ((code, _pattern(code.value).fullmatch(text)) for code in cls)
        return next((code, match.groupdict()) for code, match in matches if match is not None)

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, text: str) -> Self:
        """Return the enum member of a sentence."""
        return cls.read(text)[0]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = []
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(re.escape(literal))
        if name is not None:
            parts.append(f"(?P<{name}>.*)" if name in _WITH_SPACES else rf"(?P<{name}>\S+)")
    return re.compile("".join(parts), re.DOTALL)


class ReasonCode(_Template):
    """The reasons why a site or an operand is not quantized."""

    EXCLUDED = "excluded by rule"
    SWITCHED_OFF = "this kind of site is switched off"
    NEVER_RAN = "never ran in calibration"
    OTHER_BRANCH = "a branch in the code of torch that this module does not take"
    NOT_CALIBRATED = "not calibrated yet"

    # A site's operands in calibration.
    TRANSFORMED = "it runs inside torch.vmap or a transform of torch.func"
    NESTED = "an operand is a nested tensor"
    SPARSE = "an operand is a sparse tensor"
    NOT_TENSORS = "its operands are not floating-point tensors"
    EMPTY = "an operand was empty in every call"
    VARIES = "an operand is a parameter in some calls, but not in others"
    FROM_PARAMETERS = "an operand is computed from parameters at each call, {why}"
    PARAMETERS_ALONE = "all of its operands are parameters"
    TABLE = "the embedding table is not a parameter"
    ATTENTION_PARAMETER = "an operand of the attention is a parameter"
    ADD_BROADCASTS = "the add broadcasts an operand"
    ADD_PARAMETER = "an operand of the add is a parameter"
    ADD_UNWEIGHTED = "no operand of the add comes from a layer with weights"
    ADD_ONE_PRODUCT = "both operands of the add come from the same layer"
    ADD_SCORES = "an operand of the add comes from a MatMul of two activations, as attention scores do"
    ADD_MASK = "it adds a mask, whose large negative values leave no precision for the other values"
    ADD_COORDINATES = "it adds at most four values per row, such as the coordinates of a box"
    EXPECTED_VALUE = "it computes an expected value from the output of a softmax, such as a distance of a box"
    FEW_RESULTS = "no other layer reads its at most four channels, such as the distances of a box"
    OPERAND_UNSEEN = "an operand was not observed"
    NONE_SEEN = "no operand was observed"

    NOT_OF_CONVOLUTION = "it is not the output of a quantized convolution"

    EQUALIZED_BEHIND = "the equalized convolution that reads it already quantizes it"

    # One operand.
    NO_VALUE = "calibration observed no value of it"
    ONLY_ZEROS = "all of its values in calibration were 0, so its range is unknown"
    WEIGHTS_ALONE = "only weights are quantized in this format"
    UNREGISTERED = "the weight is a parameter that no module of the model registers"
    OFFLOADED = "the weight is offloaded and loaded at each call, so the model has no weight to store as integers"
    NO_BLOCKS = "a weight with {axes} axes cannot be split into blocks of input channels"
    INDIVISIBLE = "the number of its input channels is not a multiple of the block size"
    SQNR = "SQNR in {dtype} is {sqnr} dB, below the limit of {limit} dB"
    SCALE_TOO_SMALL = (
        "its largest magnitude, {amax}, needs a scale below {least}, the smallest normal number of {dtype}"
    )
    SCALE_TOO_LARGE = "its largest magnitude, {amax}, needs a scale beyond the range of {dtype}"

    # The output of the model.
    COSTLY_ATTENTION = "quantizing the attention lowers the SQNR of the model's output by {cost} dB"

    # The target.
    NO_GAIN = "{target} gains nothing from quantizing this kind of site"
    NO_KERNEL = "{target} has no integer kernel for {operation}"
    NO_DYNAMIC = "{target} has no dynamic quantization kernel for this kind of site"
    DYNAMIC_BLOCKS = "dynamic quantization on {target} needs K to be a multiple of {block}, but K = {size}"
    VECTOR = "M = 1, a matrix-vector multiplication: slower quantized than in float on {target}"
    SMALL_PRODUCT = "{axis} = {size} is below {least}: slower quantized than in float on {target}"
    WRONG_CONVOLUTION = (
        "{target} gives wrong results for an INT8 convolution with kernel width {width} and {channels} input channels "
        "on {where}"
    )
    RECURRENCE = "{target} runs this {kind} in one float kernel, and a quantized loop is not faster"
    SMALL_RECURRENCE = (
        "its recurrent weight has {weights} elements, fewer than {least}: on {target} a quantized loop is slower than "
        "the float kernel"
    )
    SMALL_TABLE = "its embedding table has {numbers} elements, fewer than {least}: integers would save little memory"
    TABLE_CODES = "embedding tables are quantized only to int8 with one scale per row"
    TABLE_LIMITED = "its lookup renormalizes the embedding table in place (max_norm)"
    TABLE_READ = "its embedding table is also read in float ({where}), so quantizing would store it twice"
    RECURRENT_FORMAT = "a recurrent layer needs INT8 or FP8 with static ranges for weights and activations"
    TORN_RECURRENCE = "another MatMul of its recurrent layer is not quantized: {why}"
    ONE_SIDED_ADD = (
        "its skip connection {skipping} is not quantized ({why}): on {target} quantizing only the other operand gains "
        "nothing"
    )
    HEAD_SIZE = "{target} has no fused attention in {dtype} for head size {head}; supported sizes: {sizes}"
    HEAD_MULTIPLE = (
        "{target} has no fused attention in {dtype} for head size {head}, which is not a multiple of {multiple}"
    )
    SEQUENCE = "{target} has no fused attention in {dtype} for {sequence} tokens; the longest sequence is {longest}"
    TORN_ATTENTION = (
        "not all MatMuls of this attention are in FP8: query, key, value and softmax must be quantized together"
    )

    # Fallback.
    RANKED = "kept in float by fallback({asked}): rank {rank}"
    FALLBACK = "kept in float by fallback({asked})"
    SLOWER = "slower in low precision than in float: {low} us, float {float}, {where}"
    IN_FLOAT32 = "{why}, in float32: calibration observed {largest} here, and the maximum of float16 is {end}"

    # The source of the model: code that cannot be rewritten, and what to write instead.
    SCRIPTED = (
        "TorchScript compiled it and its Python source is not available, so it is not quantized; to quantize it, use "
        "the original module"
    )
    PASSED_ON = (
        "{function}() is passed on as a value here instead of being called, so it is not quantized; to quantize it, "
        "call it in the code of a module"
    )
    IN_F_STRING = "a call inside an f-string is not quantized; to quantize it, compute it before the f-string"
    IN_INNER_CLASS = (
        "a class defined inside a function is not quantized; to quantize it, define the class outside the function"
    )
    HIDDEN_MODULE = (
        "an argument {name} of an inner function hides the module, so it is not quantized; to quantize it, rename "
        "that argument"
    )
    OUT_ARGUMENT = (
        "out= writes into a tensor of the caller, so it is not quantized; to quantize it, use the return value"
    )
    METHOD_APART = (
        "the method name and its parenthesis are on different lines, so it is not quantized; to quantize it, join the "
        "lines"
    )
    IN_PLACE = "an in-place operation on {where} is not quantized; to quantize it, compute it in a local variable"
    NO_OPERATOR = "the operator was not found in the source, so it is not quantized"
    INNER_GLOBAL = "an inner function declares a global, so it is not quantized; to quantize it, move that function out"
    BOUND_GLOBAL = (
        "it binds the global {name} without an assignment statement, so it is not quantized; to quantize it, assign "
        "to the global"
    )
    READS_LOCALS = (
        "the function calls locals(), which would show an added argument, so it is not quantized; to quantize it, "
        "make it a method"
    )
    ASSIGNS_MODULE = (
        "the function assigns to its argument {name}, so it is not quantized; to quantize it, assign to another name"
    )
    EINSUM_STARRED = "an einsum with starred arguments is not quantized; to quantize it, write out each operand"
    EINSUM_UNSPELLED = (
        "an einsum whose equation is not a string literal is not quantized; to quantize it, write the equation in the "
        "call"
    )
    EINSUM_OF_ONE = "an einsum with 1 operand is not a matrix multiplication"
    EINSUM_OF_MANY = (
        "an einsum with {count} operands is not quantized; to quantize it, split it into einsums with two operands"
    )
    EINSUM_TWICE = (
        "an einsum that repeats a label in one operand is not quantized; to quantize it, take the diagonal of that "
        "operand first"
    )
    REPLACED_FORWARD = (
        "the forward of this module instance was replaced, so it is not quantized; to quantize it, write it in the "
        "class"
    )
    KEPT_FUNCTION = (
        "the function in the module's attribute {name} is not quantized; to quantize it, make it a method of the class"
    )
    LATE_DECORATOR = (
        "{name} was made a static or class method outside of its definition, so it is not quantized; to quantize it, "
        "decorate it in its class"
    )
    HELD_BY_DECORATOR = (
        "the decorators of {name} cannot be cloned, so it is not quantized; to quantize it, write them with "
        "functools.wraps"
    )

    OTHER = "{text}"


def ran(reason: str) -> bool:
    """Return whether a site with this reason runs, as far as known."""
    return ReasonCode.of(reason) not in (ReasonCode.NEVER_RAN, ReasonCode.OTHER_BRANCH)


class RuleKind(_Template):
    """The rules that decide about a site before calibration statistics do."""

    INCLUDE = "not matched by include"
    EXCLUDE = "exclude.{key}: {value}"
    SWITCH = "sites.{key}: {value}"
    FORMAT = "formats[{key}]"
    TARGET = "target {key}"
    FALLBACK = "fallback"
    OTHER = "{text}"


def counted(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return each reason with its number of occurrences, the most frequent first.

    Reasons that differ only in numbers are counted together, with ``…`` in place of these numbers.
    """
    by_words: dict[tuple[str, ...], list[list[str]]] = {}
    for text in texts:
        parts = _NUMBER.split(text)
        by_words.setdefault(tuple(parts[::2]), []).append(parts)
    counts: Counter[str] = Counter()
    for group in by_words.values():
        columns = zip(*group, strict=True)
        counts["".join(column[0] if len(set(column)) == 1 else "…" for column in columns)] += len(group)
    return counts.most_common()
