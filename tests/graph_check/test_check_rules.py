"""Each rule: a graph that breaks it, and it alone, is caught; the same graph mended has no finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdq_graphs import SCALE, Graph, attention, linear, onnx

from quantizer.check import check_file
from quantizer.check.checked_file import rules
from quantizer.numerics.formats import FP8
from quantizer.plan.targets import profile, profiles

TENSORRT, OPENVINO, ONNXRUNTIME = "tensorrt", "openvino", "onnxruntime"


@dataclass(frozen=True)
class Case:
    """A rule, a graph that breaks it and one that does not, and what the finding says."""

    rule: str
    broken: Callable[[], Graph]
    mended: Callable[[], Graph]
    node: str
    problem: str
    target: str = TENSORRT
    variant: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.rule, self.variant)))


# -- graphs of more than one argument ------------------------------------------------------------------------------


def gemm(bias: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 32]), zero=128, kind="uint8")
    g.output(g.node("Gemm", x, g.weight((32, 32), 1), *([g.floats(32)] if bias else [])))
    return g


def added(width: str) -> Graph:
    """A product and a tensor that a forward made."""
    g = linear()
    made = g.input("made", ["batch", 32], width)
    product = g.outputs.pop().name
    g.output(g.node("Add", product, made))
    return g


def of_bytes(at_once: bool) -> Graph:
    g = Graph()
    x = g.input("x", [32, "batch"], "uint8")
    kinds = ("Cast", "Transpose") if at_once else ("Transpose", "Cast")
    for kind in kinds:
        x = g.node(kind, x, **({"to": onnx.TensorProto.FLOAT16} if kind == "Cast" else {"perm": [1, 0]}))
    g.output(g.node("MatMul", g.rounded(x), g.weight((32, 32), 1)))
    return g


def in_bfloat16(kind: int) -> Graph:
    g = Graph("float32")
    x = g.node("Gelu", g.node("Cast", g.input("x", ["batch", 32]), to=kind))
    x = g.rounded(g.node("Cast", x, to=onnx.TensorProto.FLOAT), zero=128, kind="uint8")
    g.output(g.node("MatMul", x, g.weight((32, 32), 1)))
    return g


def maximum(apart: bool, *between: str) -> Graph:
    g = Graph("float32")
    y = g.node("GlobalMaxPool", g.input("x", ["batch", 32, 4, 4]))
    y = g.node("Max", y, y) if apart else y
    for operator in between:
        y = g.node(operator, y, *([g.floats(32, 1, 1)] if operator == "Mul" else []))
    g.output(g.node("Conv", g.rounded(y, zero=128, kind="uint8"), g.weight((8, 32, 1, 1), 0)))
    return g


def mean_of_tokens(apart: bool) -> Graph:
    g = Graph("float32")
    y = g.node("ReduceMean", g.input("x", ["batch", 12, 32]), g.constant(np.array([1])), keepdims=0)
    y = g.node("Mul", g.node("Max", y, y) if apart else y, g.floats(32))
    g.output(g.node("MatMul", g.rounded(y, zero=128, kind="uint8"), g.weight((32, 8), 1)))
    return g


def flat_products(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 32]), zero=128, kind="uint8")
    y = g.node("Add", g.node("MatMul", x, g.weight((32, 64), 1)), g.floats(64))
    y = g.node("Mul", g.node("Relu", y), g.floats(64))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("MatMul", g.rounded(y, zero=128, kind="uint8"), g.weight((64, 8), 1)))
    return g


def shared_product(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 32, 4, 4]), zero=128, kind="uint8")
    y = g.node("Conv", x, g.weight((32, 32, 1, 1), 0))
    y = g.node("Clip", y, g.number(-1e30), g.number(1e30)) if apart else y
    g.output(g.node("Mul", y, g.node("Sigmoid", y)))
    return g


def four_bits(inputs: int, kind: str = "int4") -> Graph:
    """A product of floats with a weight of ``inputs`` rows."""
    g = Graph("float32", opset=21)
    g.output(g.node("MatMul", g.input("x", ["batch", inputs]), g.weight((inputs, 32), 1, kind)))
    return g


def convolution(apart: bool, sizes: bool) -> Graph:
    """A convolution with a bias that is rounded, and the number of samples beside it."""
    g = Graph("float32")
    x = g.input("x", ["batch", 32, 4, 4])
    rounded, weight, bias = g.rounded(x, zero=128, kind="uint8"), g.weight((32, 32, 1, 1), 0), g.floats(32)
    y = g.node("Conv", rounded, weight, *([] if apart else [bias]))
    y = g.node("Add", y, g.floats(1, 32, 1, 1)) if apart else y
    g.output(g.node("Conv", g.rounded(y, zero=128, kind="uint8"), g.weight((32, 32, 1, 1), 0)))
    if sizes:
        g.output(g.node("Shape", x), onnx.TensorProto.INT64)
    return g


def behind_convolution(add: bool, reader: bool) -> Graph:
    """An add of a convolution's result and its input; ``add``: its result is rounded; ``reader``: its input is not."""
    g = Graph("float32")
    low = {"zero": 128, "kind": "uint8"}
    x = g.rounded(g.input("x", ["batch", 32, 4, 4]), **low)
    y = g.rounded(g.node("Relu", g.node("Conv", x, g.weight((32, 32, 1, 1), 0), g.floats(32))), **low)
    g.output(g.node("Sigmoid", y if reader else x))
    y = g.node("Add", x, y)
    y = g.rounded(y, **low) if add else y
    g.output(g.node("Sigmoid", g.rounded(g.node("MaxPool", y, kernel_shape=[1, 1]), **low) if add else y))
    if add:
        g.output(y)
    return g


def gathered(kept: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 32, 4, 4]), zero=128, kind="uint8")
    y = g.node("Relu", g.node("Conv", x, g.weight((32, 32, 1, 1), 0)))
    y = g.node("Gather", y, g.constant(np.array([1] if kept else 1)), axis=3)
    g.output(g.node("Squeeze", y, g.constant(np.array([3]))) if kept else y)
    return g


def indexed_product(kept: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.node("Relu", g.input("x", ["batch", 5, 32])), zero=0, kind="uint8")
    y = g.node("Gather", g.node("MatMul", x, g.weight((32, 8), 1)), g.constant(np.array([1] if kept else 1)), axis=1)
    g.output(g.node("Squeeze", y, g.constant(np.array([1]))) if kept else y)
    return g


def indexed_bytes(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 5, 32]), zero=128, kind="uint8")
    y = g.node("MatMul", x, g.weight((32, 8), 1))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("Gather", y, g.constant(np.array([0, 2])), axis=1))
    return g


def scaled_attention(apart: bool) -> Graph:
    """A product of two activations, times a factor for each channel."""
    g = Graph("float32")
    x = g.input("x", ["batch", 32, 32])
    y = g.node("MatMul", g.rounded(x), g.rounded(g.node("Sin", x)))
    if apart:
        y = g.node("Clip", y, g.number(-1e30), g.number(1e30))
        y = g.node("Max", y, y)
    g.output(g.node("Mul", y, g.floats(32)))
    return g


def scaled_tokens(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 5, 32]), zero=128, kind="uint8")
    y = g.node("MatMul", x, g.weight((32, 8), 1))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("Mul", y, g.floats(5, 1)))
    return g


def tied_square(apart: bool) -> Graph:
    g = Graph("float32")
    weight = g.floats(32, 32)
    y = g.node("Relu", g.node("MatMul", g.input("x", ["batch", 32]), weight))
    transposed = g.node("Transpose", g.floats(32, 32) if apart else weight, perm=[1, 0])
    g.output(g.node("MatMul", y, transposed))
    return g


def joined_tokens(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.input("x", ["batch", 5, 32])
    y = g.node("Relu", g.node("Concat", x, x, axis=1))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("MatMul", g.rounded(y, zero=128, kind="uint8"), g.weight((32, 8), 1)))
    return g


def flat_chain(apart: bool) -> Graph:
    g = Graph("float32")
    x = g.rounded(g.input("x", ["batch", 32]), zero=128, kind="uint8")
    y = g.node("MatMul", x, g.weight((32, 32), 1))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("MatMul", g.rounded(y, zero=128, kind="uint8"), g.weight((32, 8), 1)))
    return g


def negative_factors(apart: bool) -> Graph:
    g = Graph("float32")
    y = g.node("Mul", g.input("x", ["batch", 32]), g.constant(np.array([-1, 1] * 16, np.float32)))
    y = g.node("Max", y, y) if apart else y
    g.output(g.node("MatMul", g.rounded(y, zero=128, kind="uint8"), g.weight((32, 8), 1)))
    return g


def computed_scale(computed: bool) -> Graph:
    g = Graph()
    x = g.input("x", ["batch", 32])
    scale = g.node("ReduceMax", x, keepdims=0) if computed else g.number(SCALE)
    g.output(g.node("MatMul", g.rounded(x, scale), g.weight((32, 32), 1)))
    return g


def run_time_range(dynamic: bool) -> Graph:
    g = Graph("float32")
    x = g.input("x", ["batch", 32])
    if dynamic:
        codes, scale, zero = "codes", "scale", "zero"
        g.nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", [x], [codes, scale, zero], "dynamic"))
        rounded = g.node("DequantizeLinear", codes, scale, zero)
    else:
        rounded = g.rounded(x, kind="uint8", zero=128)
    g.output(g.node("MatMul", rounded, g.weight((32, 32), 1)))
    return g


def scale_types(q: str, dq: str) -> Graph:
    g = Graph(opset=23)  # from here on the types may differ
    x = g.quantize(g.input("x", ["batch", 32]), g.number(SCALE, q))
    made = g.dequantize(x, g.number(SCALE, dq))
    g.output(g.node("MatMul", made if dq == g.width else g.node("Identity", made), g.weight((32, 32), 1)))
    return g


def pair(scale: float, zero: int = 0, width: str = "float16") -> Graph:
    g = Graph(width)
    x = g.dequantize(g.quantize(g.input("x", ["batch", 32])), scale, zero=zero)
    g.output(g.node("MatMul", x, g.weight((32, 32), 1)))
    return g


def dead(dead: bool) -> Graph:
    g = linear()
    if dead:
        g.rounded("x", kind="int8")
        g.nodes[-2].input[0] = g.floats(3)
    return g


def quantize_read_by(kind: str) -> Graph:
    g = Graph("float16")
    steps = g.quantize(g.input("x", ["batch", 32]))
    g.output(g.node("MatMul", g.dequantize(steps), g.weight((32, 32), 1)))
    if kind == "output":
        g.output(steps, onnx.TensorProto.INT8)
    elif kind:
        g.output(g.node(kind, steps, steps), onnx.TensorProto.BOOL)
    return g


def dequantize_read_by(kind: str) -> Graph:
    g = Graph()
    x = g.input("x", ["batch", 32])
    rounded = g.rounded(x)
    g.output(g.node("MatMul", rounded, g.weight((32, 32), 1)))
    if kind == "output":
        g.output(rounded)
    else:
        g.output(g.node("Sigmoid", rounded if kind == "dequantize" else x))
    return g


def cast_before_product(cast: bool) -> Graph:
    g = Graph()
    x = g.input("x", ["batch", 32], "float32" if cast else "float16")
    if cast:
        scale = g.number(SCALE, "float32")
        rounded = g.node("Cast", g.rounded(x, scale), to=onnx.TensorProto.FLOAT16)
    else:
        rounded = g.rounded(x)
    g.output(g.node("MatMul", rounded, g.weight((32, 32), 1)))
    return g


def behind_keys(kind: str, before: bool = False) -> Graph:
    """Keys that are transposed or scaled before or behind their Q/DQ pair."""
    g = attention(kinds=("int8", None, "int8", "int8"))
    scores = next(node for node in g.nodes if node.op_type == "MatMul")
    rest, g.nodes = g.nodes[g.nodes.index(scores) :], g.nodes[: g.nodes.index(scores)]
    value = "keys" if before else g.rounded("keys")
    value = g.node(kind, value, perm=[0, 1, 3, 2]) if kind == "Transpose" else g.node(kind, value, g.number(2))
    scores.input[1] = g.rounded(value) if before else value
    if kind == "Transpose":
        _set_shape(g, "keys", ["batch", 2, "sequence", 32])
    g.nodes += rest
    return g


def _set_shape(g: Graph, name: str, shape: list[int | str]) -> None:
    index = next(i for i, value in enumerate(g.inputs) if value.name == name)
    del g.inputs[index]
    g.input(name, shape)


def half_site(activation: bool, weight: bool, kind: str = "int8") -> Graph:
    """A second product on x, beside one that is quantized as a whole."""
    g = linear()
    left = g.nodes[1].output[0] if activation else "x"
    g.output(g.node("MatMul", left, g.weight((32, 32), 1, kind) if weight else g.floats(32, 32)))
    return g


def blocks(opset: int) -> Graph:
    """Weights alone, in blocks of 16 along K."""
    g = Graph(opset=opset)
    steps = g.constant(np.full((32, 32), 3, np.int8))
    scales = g.constant(np.full((2, 32), SCALE, np.float16))
    weight = g.node("DequantizeLinear", steps, scales, axis=0, block_size=16)
    g.output(g.node("MatMul", g.input("x", ["batch", 32]), weight))
    return g


def quantized_bias(quantized: bool, kind: str = "int8", width: str = "float16", gemm: bool = False) -> Graph:
    g = Graph(width)
    bias = g.weight((32,), None, kind) if quantized else g.floats(32)
    unsigned = {"kind": "uint8", "zero": 128} if width == "float32" else {}
    x, weight = g.rounded(g.input("x", ["batch", 32]), **unsigned), g.weight((32, 32), 1)
    g.output(g.node("Gemm", x, weight, bias) if gemm else g.node("Add", g.node("MatMul", x, weight), bias))
    return g


def quantized_mask(quantized: bool) -> Graph:
    g = attention()
    add = next(i for i, node in enumerate(g.nodes) if node.op_type == "Add")
    rest, g.nodes = g.nodes[add:], g.nodes[:add]
    if quantized:
        rest[0].input[1] = g.rounded(rest[0].input[1])
    g.nodes += rest
    return g


def residual(product: bool, skipped: bool, width: str = "float16", unsigned: bool = False) -> Graph:
    g = Graph(width)
    low = {"kind": "uint8", "zero": 128} if unsigned else {}
    x = g.input("x", ["batch", 32])
    y = g.node("Add", g.node("MatMul", g.rounded(x, **low), g.weight((32, 32), 1)), g.floats(32))
    other = g.input("skipped", ["batch", 32])
    g.output(g.node("Add", g.rounded(y, **low) if product else y, g.rounded(other, **low) if skipped else other))
    return g


def weight_of(kind: str, axis: int, **attributes: int) -> Graph:
    g = Graph()
    if kind == "Conv":
        x, weight = g.input("x", ["batch", 16, 8, 8]), (32, 16, 3, 3)
    else:
        x, weight = g.input("x", ["batch", 32]), (32, 32)
    g.output(g.node(kind, g.rounded(x), g.weight(weight, axis), **attributes))
    return g


def channels_of_activation(channels: bool) -> Graph:
    g = Graph()
    x = g.input("x", ["batch", 32])
    scale = g.constant(np.full(32, SCALE, np.float16)) if channels else g.number(SCALE)
    zero = g.constant(np.zeros(32 if channels else (), np.int8))
    axis = {"axis": 1} if channels else {}
    steps = g.node("QuantizeLinear", x, scale, zero, **axis)
    g.output(g.node("MatMul", g.node("DequantizeLinear", steps, scale, zero, **axis), g.weight((32, 32), 1)))
    return g


def float_weight(stored: bool) -> Graph:
    g = Graph()
    weight = g.weight((32, 32)) if stored else g.rounded(g.floats(32, 32))
    g.output(g.node("MatMul", g.rounded(g.input("x", ["batch", 32])), weight))
    return g


def turned_weight(turned: bool) -> Graph:
    g = Graph()
    weight = g.node("Transpose", g.weight((32, 32), 0), perm=[1, 0]) if turned else g.weight((32, 32), 1)
    g.output(g.node("MatMul", g.rounded(g.input("x", ["batch", 32])), weight))
    return g


def shared(scales: tuple[float, ...], times: int = 3) -> Graph:
    g = Graph()
    x = g.input("x", ["batch", 32])
    rounded = [g.rounded(x, scale) for scale in scales]
    for index in range(times):
        g.output(g.node("MatMul", rounded[index % len(rounded)], g.weight((32, 32), 1)))
    return g


def foreign(kind: str, domain: str = "") -> Graph:
    g = linear()
    if kind == "DynamicQuantizeLinear":
        x = g.input("y", ["batch"], "float32")
        g.nodes.append(onnx.helper.make_node(kind, [x], ["a", "b", "c"], "dynamic"))
        g.output("a", onnx.TensorProto.UINT8)
    elif kind == "MatMulInteger":
        steps = g.constant(np.ones((4, 4), np.int8))
        g.output(g.node(kind, steps, steps), onnx.TensorProto.INT32)
    elif kind:
        g.output(g.node(kind, "x", domain=domain))
    return g


def half_mask(value: float) -> Graph:
    return attention(mask=value)


def cast_mask(value: float) -> Graph:
    g = attention(mask=None)
    mask = g.input("mask", ["batch", 1, 1, "sequence"], "float32")
    softmax = next(i for i, node in enumerate(g.nodes) if node.op_type == "Softmax")
    rest, g.nodes = g.nodes[softmax:], g.nodes[:softmax]
    low = g.node("Cast", g.node("Mul", mask, g.number(value, "float32")), to=onnx.TensorProto.FLOAT16)
    rest[0].input[0] = g.node("Add", rest[0].input[0], low)
    g.nodes += rest
    return g


def attention_operator(used: bool) -> Graph:
    g = linear(opset=23)
    if used:
        heads = [g.input(name, ["batch", 2, "sequence", 32]) for name in ("q", "k", "v")]
        g.output(g.node("Attention", *heads))
    return g


def fp8_attention_with_linear(kind: str) -> Graph:
    g = attention(kinds=("fp8",) * 4, probabilities=1 / FP8.qmax)
    x = g.rounded(g.input("x", ["batch", 32]), kind=kind)
    g.output(g.node("MatMul", x, g.weight((32, 32), 1, kind)))
    return g


def invalid(broken: bool) -> Graph:
    g = linear()
    if broken:
        g.output(g.node("Relu", "nothing"))
    return g


Args = tuple[Any, ...] | dict[str, Any]


def _made(build: Callable[..., Graph], given: Args) -> Callable[[], Graph]:
    return partial(build, **given) if isinstance(given, dict) else partial(build, *given)


def of(
    rule: str, build: Callable[..., Graph], bad: Args, good: Args, node: str, problem: str, target: str = TENSORRT
) -> Case:
    """A graph that arguments break and others mend, named by what breaks it."""
    variant = "-".join((build.__name__, *map(str, bad.items() if isinstance(bad, dict) else bad)))
    return Case(rule, _made(build, bad), _made(build, good), node, problem, target, variant)


def flag(rule: str, build: Callable[..., Graph], node: str, problem: str, target: str = TENSORRT) -> Case:
    """A graph that a flag breaks."""
    return of(rule, build, (True,), (False,), node, problem, target)


def apart(rule: str, build: Callable[..., Graph], node: str, problem: str) -> Case:
    """A graph that OpenVINO misreads, where no flag keeps its nodes apart."""
    return of(rule, build, (False,), (True,), node, problem, OPENVINO)


FLOATS = {"kinds": (None,) * 4}
EIGHT = {"kinds": ("fp8",) * 4, "probabilities": 1 / FP8.qmax}
U8 = {"kind": "uint8", "zero": 128, "width": "float32"}
BIAS = {"quantized": True, "gemm": True}
UNSIGNED = {"width": "float32", "kinds": ("uint8",) * 4}
WIDE = {"width": "float32"}
MOVED = "with small fixed sizes, openvino computes its input wrongly"
AXIS = "openvino gives its result one axis too many"
NUMBERS = "openvino applies its constant along another axis of the matrix multiplication"
GEMM = {"kind": "Gemm", "transB": 1}
SIGMOID = ("QLinearSigmoid", "com.microsoft")
BF16, FP16 = (onnx.TensorProto.BFLOAT16,), (onnx.TensorProto.FLOAT16,)
RESIDUAL = {"product": True, "skipped": True, "width": "float32", "unsigned": True}
NEITHER = {"product": False, "skipped": False}
AVX2 = "onnxruntime-avx2"
Q0, DQ0, DQ1, DQ2 = "QuantizeLinear_0", *(f"DequantizeLinear_{number}" for number in range(3))

CASES = [
    flag("onnx-checker", invalid, "", "Nodes in a graph must be topologically"),
    of("opset-range", linear, {"opset": 25}, {"opset": 24}, "", "not read opset 25, only opsets 9 to 24"),
    of("opset-format", linear, {"opset": 18}, {}, Q0, r"FLOAT16 \(2 in the file\) needs opset 19"),
    of("opset-format", linear, {"kind": "fp8", "opset": 18}, {"kind": "fp8"}, Q0, r"FP8 \(2 .* 19, .*has opset 18"),
    of("opset-format", blocks, (20,), (21,), DQ0, r"a scale per block \(1 in the file\) needs opset 21"),
    of("zero-point", linear, {"zero": 3}, {}, Q0, "its zero point is 3, and tensorrt accepts only 0"),
    flag("scale-constant", computed_scale, "QuantizeLinear_1", "is computed when the model runs"),
    flag("dynamic-range", run_time_range, "dynamic", "openvino computes the range, and", OPENVINO),
    *(
        of("scale-value", linear, {"scale": bad}, {}, Q0, f"above 0, such as {bad}")
        for bad in (0.0, -1.0, float("nan"), float("inf"))
    ),
    of(
        "scale-type",
        scale_types,
        ("float32", "float16"),
        ("float16",) * 2,
        Q0,
        "its scale is FLOAT and its input is FLO",
    ),
    of("pair-differs", pair, (0.25,), (SCALE,), DQ1, "its scale differs from the scale of Q"),
    of("format", linear, {"kind": "uint8"}, {}, Q0, "UINT8 activations: tensorrt computes with FP8 or INT8"),
    flag("dead-quantizer", dead, "DequantizeLinear_6", "its output is not read"),
    of("quantize-alone", quantize_read_by, ("Equal",), ("",), Q0, "its quantized values are read by Equal Equal_4"),
    of("quantize-alone", quantize_read_by, ("output",), ("",), Q0, "its quantized values are a model output"),
    of("float-reader", dequantize_read_by, ("dequantize",), ("input",), DQ1, "Sigmoid_4 computes in floating point"),
    of("float-reader", dequantize_read_by, ("output",), ("input",), DQ1, "its output is a model output"),
    of("float-reader", behind_convolution, (True, False), (True, True), DQ1, "Sigmoid_7 computes in", ONNXRUNTIME),
    flag("cast-between", cast_before_product, "Cast_2", "it is between DequantizeLinear_1 and MatMul_4"),
    of("scaled-operand", behind_keys, {"kind": "Mul"}, {"kind": "Mul", "before": True}, "Mul_4", "a multiplication be"),
    of(
        "moved-operand",
        behind_keys,
        {"kind": "Transpose"},
        {"kind": "Transpose", "before": True},
        "Transpose_4",
        "between",
    ),
    of("half-site", half_site, (True, False), (True, True), "MatMul_5", r"input 0 .* is quantized and the weight is n"),
    of(
        "half-site", half_site, (False, True), (False, False), "MatMul_6", r"weight is quantized and input 0 \(x\) is n"
    ),
    of("half-attention", attention, {"kinds": ("int8", "int8", None, None)}, {}, "MatMul_4", "and MatMul_8, the other"),
    of("half-attention", attention, {"kinds": (None, None, "int8", "int8")}, FLOATS, "MatMul_8", "and MatMul_0"),
    of("attention-size", attention, {"head": 48}, {"head": 64}, "Softmax_7", "supported sizes: 16, 32, 64"),
    of("attention-size", attention, {"sequence": 513}, {"sequence": 512}, "Softmax_7", "longest sequence is 512"),
    of("attention-size", attention, EIGHT | {"head": 40}, EIGHT | {"head": 48}, "Softmax_7", "not a multiple of 16"),
    flag("attention-operator", attention_operator, "Attention_5", "no output for its probabilities"),
    of("fp8-attention", attention, EIGHT | {"probabilities": 0.01}, EIGHT, "QuantizeLinear_8", "scale 0.01, not 1/448"),
    of("fp8-attention", attention, {"kinds": ("fp8", "fp8", None, None)}, FLOATS, "Softmax_7", "probabilities, values"),
    of("int8-with-fp8-attention", fp8_attention_with_linear, ("int8",), ("fp8",), "MatMul_16", "1 INT8 operations"),
    flag("quantized-bias", quantized_bias, DQ0, "the bias of Add_5"),
    of("quantized-bias", quantized_bias, BIAS, BIAS | {"quantized": False}, DQ0, "the bias of Gemm_4 is rounded"),
    of("quantized-bias", quantized_bias, BIAS | WIDE, BIAS | WIDE | {"kind": "int32"}, DQ0, "Gemm_4 is", ONNXRUNTIME),
    flag("quantized-mask", quantized_mask, "DequantizeLinear_7", "an operand of Add_6, which adds the attention mask"),
    of(
        "residual-side", residual, (True, False), (False, True), "Add_7", "adds a rounded .* to skipped, which is not q"
    ),
    of("residual-side", residual, (True, False), (True, True), "Add_7", "adds a rounded operation result"),
    of(
        "weight-axis",
        linear,
        {"axis": 0},
        {},
        DQ2,
        r"along axis 0 of .* \[32, 32\]; .* of MatMul MatMul_3 are on axis 1",
    ),
    of("weight-axis", weight_of, GEMM | {"axis": 1}, GEMM | {"axis": 0}, DQ2, "are on axis 0"),
    of(
        "weight-axis",
        weight_of,
        ("Conv", 1),
        ("Conv", 0),
        DQ2,
        r"axis 1 of .* \[32, 16, 3, 3\]; .* Conv_3 are on axis 0",
    ),
    flag("activation-channels", channels_of_activation, Q0, r"an activation with scales \[32\]"),
    of("small-product", linear, {"k": 8}, {}, "MatMul_3", "K = 8 is below 16"),
    of("small-product", linear, {"n": 2}, {}, "MatMul_3", "N = 2 is below 16"),
    of("matrix-vector", linear, {"shape": (1, 32)}, {}, "MatMul_3", "M = 1, a matrix-vector multiplication"),
    of("float-weight", float_weight, (False,), (True,), Q0, "a weight is stored in float"),
    flag("turned-weight", turned_weight, "Transpose_1", "it is between the DequantizeLinear of a weight and MatMul_4"),
    of(
        "shared-input", shared, ((0.5, 0.25, 0.125),), ((0.5,),), Q0, "x is quantized 3 times, .* QuantizeLinear_2, Qua"
    ),
    of(
        "foreign-operator",
        foreign,
        ("DynamicQuantizeLinear",),
        ("",),
        "dynamic",
        r"tensorrt does not read .* \(1 in the file\)",
    ),
    of("foreign-operator", foreign, ("MatMulInteger",), ("",), "MatMulInteger_5", "does not read MatMulInteger"),
    of("foreign-operator", foreign, SIGMOID, ("",), "QLinearSigmoid_5", "com.microsoft.QLinearSigmoid"),
    of("mixed-types", added, ("float32",), ("float16",), "Add_5", "different element types, FLOAT16 and FLOAT, where"),
    of("element-type", of_bytes, (False,), (True,), "Transpose_0", "it reads UINT8, which tensorrt accepts only as"),
    of("element-type", in_bfloat16, BF16, FP16, "Gelu_1", "onnxruntime has no Gelu of BFLOAT16", ONNXRUNTIME),
    of(
        "unconverted-float32",
        linear,
        WIDE,
        {},
        "",
        "all 1 MatMul, Gemm and Conv nodes have float32 tensors: tensorrt uses the types of the graph",
    ),
    flag("gemm-bias", gemm, "Gemm_3", "computes it in floating point", ONNXRUNTIME),
    *(
        of("fused-reduction", maximum, (False, *between), (True, *between), "GlobalMaxPool_0", "stores its r", OPENVINO)
        for between in ((), ("Mul", "Relu"))
    ),
    apart("fused-reduction", mean_of_tokens, "ReduceMean_0", "multiplies its result by the factors of other channels"),
    apart("fused-product", flat_products, "QuantizeLinear_7", MOVED),
    apart("fused-product", flat_chain, "QuantizeLinear_4", MOVED),
    apart(
        "fused-product", negative_factors, "QuantizeLinear_1", "the per-channel factors before it are not all positive"
    ),
    apart("gathered-axis", gathered, "Gather_5", AXIS),
    apart("gathered-axis", indexed_product, "Gather_5", AXIS),
    apart("gathered-axis", indexed_bytes, "Gather_4", "moves the zero point of the operation before it behind it, and"),
    apart("gathered-axis", joined_tokens, "QuantizeLinear_2", "joins its zero point along the axis of its Concat, and"),
    apart("misread-numbers", scaled_attention, "Mul_6", NUMBERS),
    apart("misread-numbers", scaled_tokens, "Mul_4", NUMBERS),
    apart("misread-numbers", tied_square, "Transpose_2", "another operation reads its square weight directly"),
    *(
        of("shared-product", convolution, (False, True), good, "Conv_3", "openvino can lose its bias because", OPENVINO)
        for good in ((True, True), (False, False))
    ),
    apart("shared-product", shared_product, "Conv_3", "several nodes read it, and it has no bias: openvino can apply"),
    of("odd-pairs", four_bits, (33,), (34,), DQ0, "a 4-bit weight with an odd number of inputs: openvi", OPENVINO),
    of("odd-pairs", four_bits, (33,), (33, "int8"), DQ0, "a 4-bit weight with an odd number of inputs", OPENVINO),
    of("mask-range", half_mask, (-65504,), (-30000,), "Mul_5", "the mask constant -65504"),
    of("mask-range", half_mask, (-np.inf,), (-30000,), "Mul_5", "the mask constant -inf"),
    of("mask-range", cast_mask, (-3.4e38,), (-30000,), "Mul_5", "the mask constant -3.4e.38"),
    of("site-kind", attention, UNSIGNED, WIDE | FLOATS, "MatMul_4", "a MatMul of two activations gains", ONNXRUNTIME),
    of("site-kind", residual, RESIDUAL, RESIDUAL | NEITHER, "Add_9", "an Add gains nothing", ONNXRUNTIME),
    of("site-kind", behind_convolution, (False, True), (True, True), "Add_8", "an Add gains nothing", ONNXRUNTIME),
    of("saturating-weight", linear, U8 | {"step": 65}, U8 | {"step": 64}, DQ2, "up to 65: onnxruntime-avx2 adds", AVX2),
    of("signedness", linear, WIDE, U8, Q0, "a signed activation leaves half of such operations in float", ONNXRUNTIME),
    of("signedness", linear, WIDE, U8, Q0, "a signed activation is a tenth slower on openvino", OPENVINO),
    of("signedness", attention, UNSIGNED, WIDE, Q0, "an unsigned operand of a MatMul of two activations: o", OPENVINO),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_graph_that_breaks_a_rule_is_caught_by_it_alone(case: Case, tmp_path: Path) -> None:
    found = check_file(case.broken().save(tmp_path / "m.onnx"), case.target)
    assert {finding.rule for finding in found} == {case.rule}, "\n".join(map(str, found))
    first = found[0]
    assert first.severity == profile(case.target).graph_rules.severities[case.rule]
    assert first.node == case.node
    assert re.search(case.problem, first.problem), first.problem
    assert first.advice


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mended_graph_has_no_finding(case: Case, tmp_path: Path) -> None:
    found = check_file(case.mended().save(tmp_path / "m.onnx"), case.target)
    assert not found, "\n".join(map(str, found))


def test_ranges_at_run_time_where_there_are_kernels(tmp_path: Path) -> None:
    assert not check_file(run_time_range(True).save(tmp_path / "m.onnx"), ONNXRUNTIME)
    found = check_file(tmp_path / "m.onnx", TENSORRT)
    assert "foreign-operator" in {finding.rule for finding in found}
    assert "scale-constant" not in {finding.rule for finding in found}


def test_what_bounds_values_is_no_mask(tmp_path: Path) -> None:
    g = linear()
    g.nodes[-1].output[0] = "product"
    g.nodes.append(onnx.helper.make_node("Clip", ["product", g.number(-64504), g.number(64504)], [g.outputs[0].name]))
    assert not check_file(g.save(tmp_path / "m.onnx"), "tensorrt")


def test_every_rule_has_a_case() -> None:
    elsewhere = {"external-data"}  # its files are those of test_check_files.py
    assert {case.rule for case in CASES} | elsewhere == set(rules.names())


@pytest.mark.parametrize("target", profiles.names())
def test_what_a_target_is_held_to_are_rules(target: str) -> None:
    assert set(profile(target).graph_rules.severities) <= set(rules.names())
    assert profile(target).name == target


def test_every_rule_belongs_to_a_target() -> None:
    assert set(rules.names()) == {
        name for target in profiles.names() for name in profile(target).graph_rules.severities
    }


@pytest.mark.parametrize("name", rules.names())
def test_a_rule_says_what_it_is(name: str) -> None:
    first = (rules[name].__doc__ or "").splitlines()[0]
    assert first.endswith(".")
