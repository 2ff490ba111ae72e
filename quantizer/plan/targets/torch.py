"""PyTorch on x86 CPUs with oneDNN's integer kernels, and on NVIDIA GPUs with Triton's kernels in INT8 and FP8."""

from __future__ import annotations

from dataclasses import replace

from quantizer.plan.targets.base import ALWAYS, TRANSPOSED, GraphRules, TargetProfile, profiles

TORCH = profiles.add("torch")(
    TargetProfile(
        name="torch",
        float_dtype="float32",
        # oneDNN multiplies U8 by S8; S8 activations are moved to U8 first.
        unsigned_activations="all",
        zero_points=frozenset({"linear", "conv"}),
        activation_dtypes=frozenset({"int8", "uint8"}),
        # torch has no integer CPU kernel for a MatMul of two activations. The residual add is fused into the layer
        # before it, in float, at no cost.
        site_kinds=frozenset({"linear", "conv", "embedding"}),
        # oneDNN's kernel of torch takes one or two axes.
        float_convolutions=TRANSPOSED | {"conv3d"},
        # Its lookup reads rows of integers: MiniLM's engine is 25 MiB, not 56.
        row_codes=True,
        graph_rules=GraphRules(
            severities={**ALWAYS, "signedness": "warning"},
            signed_cost="is converted to unsigned integers at every run",
        ),
        library="torch",
        packages=("torch",),
        # Slower than OpenVINO with VNNI, and at small shapes slower than ONNX Runtime without VNNI.
        auto_rank=2,
        file_magic=rb"PK\x03\x04.{26}engine\.json",
        exact_variant="torch-avx2",
    )
)

# Without VNNI oneDNN multiplies bytes as ONNX Runtime does (see onnxruntime.py).
TORCH_AVX2 = profiles.add("torch-avx2")(replace(TORCH, name="torch-avx2", weight_qmax=64, exact_variant=None))

TORCH_CUDA = profiles.add("torch-cuda")(
    TargetProfile(
        name="torch-cuda",
        float_dtype="float16",
        # Residual adds are part of the kernel of the layer before them, in float. Embeddings stay in float, because
        # their sum and the norm after it are one kernel. Attention reads 16 bits.
        site_kinds=frozenset({"linear"}),
        activation_dtypes=frozenset({"int8", "uint8", "fp8"}),
        weight_dtypes=frozenset({"int8", "fp8"}),
        inference_precisions=frozenset({"float16", "bfloat16"}),
        # The tensor cores' tiles stay half empty.
        min_gemm_dim=16,
        float_vectors=True,
        # A zero point is part of the bias.
        zero_points=frozenset({"linear"}),
        fp8_from=89,
        library="triton",
        packages=("torch", "triton"),
        # Without measurements, TensorRT is used if it is installed.
        auto_rank=1,
        file_magic=rb"PK\x03\x04.{26}gpu\.json",
    )
)
