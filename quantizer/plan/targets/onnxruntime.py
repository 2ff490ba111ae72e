"""ONNX Runtime on x86 CPUs: unsigned activations, attention in float."""

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
    profiles,
)
from quantizer.plan.targets.clients import PIPELINES, SENTENCES, ULTRALYTICS, Layout, optimum_classes

_ONNX_ALONE = {"semantic-segmentation": "SemanticSegmentation"}
"""Tasks and classes that Optimum has for ONNX Runtime alone.

Its class for multiple choice passes inputs with three axes, where our graphs have two.
"""
_UNMASKED = frozenset({"audio-classification", "automatic-speech-recognition"})
"""Tasks for which Optimum's class passes the values of a recording alone."""

ONNXRUNTIME = profiles.add("onnxruntime")(
    TargetProfile(
        name="onnxruntime",
        float_dtype="float32",
        # Its fused integer kernels need U8 activations; with S8, half of the operations run in float after
        # DequantizeLinear.
        unsigned_activations="all",
        zero_points=frozenset({"linear", "conv"}),
        # It computes the DQ of a whole table at each run: MiniLM takes 14.5 ms at 1 x 128, and 8.0 with the rows alone.
        row_codes=True,
        # DynamicQuantizeMatMul and MatMulIntegerToFloat. Its dynamic convolutions are not faster.
        dynamic=DynamicRanges(),
        # DynamicQuantizeLSTM: at 60 steps and 1 / 8 rows, with 64 hidden units 0.8 / 1.1 times the speed of the float
        # kernel, with 128 1.3 / 1.9, with 256 2.4 / 3.3. A loop of integer MatMuls takes longer than the float kernel.
        recurrences=Recurrences(kinds=frozenset({"lstm"}), at_run_time=True, weights=2**15),
        activation_dtypes=frozenset({"int8", "uint8"}),
        weight_dtypes=frozenset({"int8", "int4"}),
        # Quantized attention matmuls and adds gained no speed, apart from adds between convolutions.
        site_kinds=frozenset({"linear", "conv", "embedding"}),
        # It has QLinearConv only for a convolution between DQ and Q.
        quantizes_outputs=True,
        unfused_rectifiers=True,
        float_convolutions=TRANSPOSED,
        graph_rules=GraphRules(
            severities={**ALWAYS, "gemm-bias": "warning", "signedness": "warning"},
            own_domains=frozenset({"com.microsoft"}),
            # Of its kernels for x86 only Cast and a few others have it.
            absent_floats=frozenset({"BFLOAT16"}),
            signed_cost="leaves half of such operations in float after their DequantizeLinear",
        ),
        library="onnxruntime",
        packages=("onnxruntime",),
        # Its optimizer writes its own operators into a file, which other runtimes lack.
        file_domains=frozenset({"com.microsoft", "com.microsoft.nchwc"}),
        exact_variant="onnxruntime-avx2",
        triton=TritonServer(
            chosen_by='backend: "onnxruntime"',
            file="model.onnx",
            takes="engine",
            kind="KIND_CPU",
            basic_level="-1",
            parameters={
                "intra_op_thread_count": "{threads}",
                "inter_op_thread_count": "1",
                "execution_mode": "0",
            },
        ),
        layouts={
            "onnx": Layout("{graph}.onnx"),
            "sentence-transformers": Layout("onnx/{graph}.onnx", SENTENCES),
            "optimum": Layout("{graph}.onnx", optimum_classes("ORT", **_ONNX_ALONE), unmasked=_UNMASKED),
            "transformers-js": Layout(
                "onnx/{graph}_quantized.onnx", PIPELINES, dimensions={"batch": "batch_size"}, static=True
            ),
            "ultralytics": Layout("{name}.onnx", ULTRALYTICS),
        },
    )
)

# Without VNNI bytes are multiplied by VPMADDUBSW, which adds two products in 16 bits and saturates. With weights of
# at most 64 (7 bits) the sum fits: 2 * 255 * 64 < 2^15.
ONNXRUNTIME_AVX2 = profiles.add("onnxruntime-avx2")(
    replace(ONNXRUNTIME, name="onnxruntime-avx2", weight_qmax=64, exact_variant=None)
)
