"""PyTorch on x86 CPUs with oneDNN's integer kernels: unsigned activations, attention and adds in float."""

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
