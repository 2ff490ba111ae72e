"""OpenVINO on a CPU: the same kinds of site as TensorRT, attention included; non-quantized operations are FP32."""

from __future__ import annotations

from dataclasses import replace

from quantizer.plan.targets.base import (
    ALWAYS,
    TRANSPOSED,
    DynamicRanges,
    GraphRules,
    Recurrences,
    TargetProfile,
    TritonServer,
    WrongConvolutions,
    profiles,
)
from quantizer.plan.targets.clients import SENTENCES, ULTRALYTICS, Layout, optimum_classes

DYNAMIC_BLOCK = 128
"""The block size of dynamic ranges in our engines. It is a tenth faster than OpenVINO's default of 32."""

OPENVINO = profiles.add("openvino")(
    TargetProfile(
        name="openvino",
        float_dtype="float32",
        site_kinds=frozenset({"linear", "conv", "matmul", "residual_add", "embedding"}),
        activation_dtypes=frozenset({"int8", "uint8"}),
        inference_precisions=frozenset({"float32", "bfloat16"}),
        weight_dtypes=frozenset({"int8", "int4"}),
        # Measured with OpenVINO 2026.4: it reads both operands of all of these as floats.
        float_convolutions=TRANSPOSED,
        # Measured with OpenVINO 2026.4, one convolution at a time, over 816 kernels: 57 are less than 4 dB from ONNX
        # Runtime's result, all of them of these, where the kernel is oneDNN's brgconv with AMX; with
        # ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI they are right. A file may go to such a CPU from any other.
        wrong_convolutions=WrongConvolutions(multiple=4, channels=64, product=128, where="CPUs with AMX"),
        # Its linear kernel is a tenth faster with U8 inputs; its fused attention accepts only S8.
        unsigned_activations="weighted",
        # Measured with OpenVINO 2026.4: fused with a Q, ReduceMax and ReduceMin keep their result in bytes before the Q
        # divides it, the other eight reductions in floats. It reads a GlobalMaxPool as a ReduceMax.
        unfused_reductions=frozenset({"ReduceMax", "ReduceMin", "GlobalMaxPool"}),
        # Seen of ReduceMean, ReduceSum, ReduceL2, ReduceMax and GlobalAveragePool; the others have the same kernel. It
        # reads an Einsum of one operand as a sum.
        misread_reductions=frozenset(
            [
                *("ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare", "ReduceMax"),
                *("ReduceMin", "ReduceLogSum", "ReduceLogSumExp", "GlobalAveragePool", "GlobalMaxPool", "Einsum"),
            ]
        ),
        unfused_products=True,
        unshared_products=True,
        kept_axes=True,
        even_pairs=True,
        # It keeps a table in integers if a Gather reads it, but not if a DQ does: MiniLM's engine is 68 MiB, not 169.
        row_codes=True,
        # Those kernels subtract any zero point. A residual add shares its operand with a linear layer or a convolution,
        # and one Q/DQ serves both.
        zero_points=frozenset({"linear", "conv", "residual_add"}),
        # If only a weight is stored as integers, its VNNI kernels quantize the other operand by themselves.
        dynamic=DynamicRanges(dtype="int8", block_size=DYNAMIC_BLOCK),
        # A Scan with Q/DQ in it. With AMX, 60 steps and 1 / 8 rows, an LSTM of 128 has 0.7 / 0.9 times the speed of
        # the float kernel, of 192 1.0 / 1.2, of 256 1.4 / 4.1, of 384 4.0 / 6.8. Its own INT8 kernel of an LSTM
        # computes other results where an input range is not symmetric, H is no multiple of 64, or it runs backwards.
        recurrences=Recurrences(kinds=frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"}), weights=2**17),
        graph_rules=GraphRules(
            severities={
                **ALWAYS,
                "half-attention": "warning",
                "attention-operator": "warning",
                "signedness": "warning",
                "fused-reduction": "error",
                "fused-product": "warning",
                "misread-numbers": "error",
                "shared-product": "warning",
                "gathered-axis": "error",
                "odd-pairs": "error",
            },
            own_domains=frozenset({"com.microsoft"}),
            refused=frozenset({"QGemm"}),
            signed_cost="is a tenth slower",
        ),
        library="openvino",
        packages=("openvino",),
        file_magic=rb"(?=.*;ov=).*meta=",
        fixed_sizes=True,
        exact_variant="openvino-avx2",
        triton=TritonServer(
            chosen_by='backend: "openvino"',
            file="model.onnx",
            # Our engine is a compiled model, and this backend reads models that are not.
            takes="onnx",
            kind="KIND_CPU",
            batches=False,
            parameters={
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": "{threads}",
            },
            hints={"bfloat16": {"HINT_BF16": "YES"}},
            remarks=(
                "max_batch_size is 0, and the batch is the first entry of dims: with another number this backend pads",
                "each request to that many samples.",
            ),
            unhinted=(
                "Non-quantized operations were measured in float32, for which this backend has no setting: on a CPU",
                "with BF16 it uses bfloat16. Convert with --inference-precision bfloat16 to measure that.",
            ),
        ),
        layouts={
            "openvino": Layout("{graph}.xml"),
            "sentence-transformers": Layout("openvino/openvino_{graph}.xml", SENTENCES),
            "optimum": Layout("openvino_{graph}.xml", optimum_classes("OV")),
            "ultralytics": Layout("{name}_openvino_model/{name}.xml", ULTRALYTICS),
        },
    )
)

# Without VNNI it multiplies bytes as ONNX Runtime does (see onnxruntime.py). In a MatMul of two activations neither
# operand can be reduced to 7 bits, so attention is not quantized.
OPENVINO_AVX2 = profiles.add("openvino-avx2")(
    replace(
        OPENVINO,
        name="openvino-avx2",
        wrong_convolutions=None,
        weight_qmax=64,
        site_kinds=OPENVINO.site_kinds - {"matmul"},
        dynamic=None,
        # Without VNNI its INT8 takes longer than its float: MiniLM at 8 x 128 had 0.75 times the speed.
        auto_rank=1,
        exact_variant=None,
    )
)
