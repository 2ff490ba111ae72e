"""TensorRT 10.12 and later, and TensorRT for RTX: networks are strongly typed."""

from __future__ import annotations

from dataclasses import replace

from quantizer.plan.targets.base import (
    ALWAYS,
    OPERATOR_FORMAT,
    AttentionLimits,
    GraphRules,
    Recurrences,
    TargetProfile,
    TritonServer,
    profiles,
)

TENSORRT = profiles.add("tensorrt")(
    TargetProfile(
        name="tensorrt",
        float_dtype="float16",
        site_kinds=frozenset({"linear", "conv", "matmul", "residual_add", "embedding"}),
        # FP8 from Ada on. INT4 weights are unpacked into the float type: they save memory, not arithmetic.
        activation_dtypes=frozenset({"int8", "fp8"}),
        weight_dtypes=frozenset({"int8", "fp8", "int4"}),
        # Matrix-vector and narrow products are slower in INT8, because the tensor cores' tiles stay half empty.
        min_gemm_dim=16,
        float_vectors=True,
        one_sided_adds=False,
        # The sizes of its fused kernels. Attention that is half quantized, or not fused, is slower than in FP16.
        attention={
            "int8": AttentionLimits(head_sizes=frozenset({16, 32, 64}), sequence=512),
            "fp8": AttentionLimits(head_multiple=16),
        },
        # It runs an LSTM as a loop in any case.
        recurrences=Recurrences(kinds=frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})),
        fp8_from=89,
        strips_weights=True,
        graph_rules=GraphRules(
            severities={
                **ALWAYS,
                # The network is strongly typed: a violation fails the build, or the operation runs in float.
                "opset-range": "error",
                "zero-point": "error",
                "scale-constant": "error",
                "scale-type": "error",
                "pair-differs": "error",
                "format": "error",
                "quantize-alone": "error",
                "cast-between": "error",
                "scaled-operand": "error",
                "half-site": "error",
                "weight-axis": "error",
                "activation-channels": "error",
                "unconverted-float32": "error",
                "fp8-attention": "error",
                "half-attention": "warning",
                "attention-size": "warning",
                "attention-operator": "warning",
                "int8-with-fp8-attention": "warning",
                "small-product": "warning",
                "matrix-vector": "warning",
                "residual-side": "warning",
            },
            opsets=(9, 24),
            integer_bias=False,
            refused=OPERATOR_FORMAT,
            own_domains=frozenset({"trt"}),
            narrow_inputs=frozenset({"UINT8"}),
        ),
        packages=("tensorrt",),
        ahead_of_time="tensorrt-rtx",
        triton=TritonServer(
            chosen_by='platform: "tensorrt_plan"',
            file="model.plan",
            takes="plan",
            kind="KIND_GPU",
            gpu_tool="trtexec",
        ),
    )
)


RTX_MAGIC = b"vtrt"
"""The first bytes of TensorRT-RTX engine files."""

# Its parser (1.7.1) read an opset beyond TensorRT's documented range, and the engine was built.
_SEVERITIES = {**TENSORRT.graph_rules.severities, "opset-range": "warning"}

TENSORRT_RTX = profiles.add("tensorrt-rtx")(
    replace(
        TENSORRT,
        name="tensorrt-rtx",
        capabilities=frozenset({75, 80, 86, 89, 120, 121}),
        graph_rules=replace(TENSORRT.graph_rules, severities=_SEVERITIES),
        packages=("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"),
        file_magic=RTX_MAGIC,
        ahead_of_time=None,
        # Triton runs only TensorRT engines, which are built from the same ONNX file.
        triton=None if TENSORRT.triton is None else replace(TENSORRT.triton, takes=None, gpu_tool="tensorrt_rtx"),
    )
)
