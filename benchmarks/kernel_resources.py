"""What Triton's compiler makes of the kernels for NVIDIA GPUs, without a GPU, and how fast their limits allow them.

    python benchmarks/kernel_resources.py

Registers, spilled bytes and shared memory are what ``ptxas`` prints for each tile. A kernel that spills is too large.
The least time of a product on an H100 SXM is the larger of its multiply-adds at 1,979 TOPS, the rate of INT8 and FP8 in
its data sheet, and of its bytes at 3.35 TB/s: operands once, and the result once, in 8 or in 16 bits. An attention
multiplies in float16 at 989 TFLOPS, and reads the keys and values that are no padding.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import heading

from quantizer.numerics.triton_kernels import attention, norms, products
from quantizer.numerics.triton_kernels.tiles import ATTENTION_TILES, TILES

TARGETS = (("int8", 80), ("int8", 89), ("fp8", 89), ("int8", 90), ("fp8", 90))
TYPES = {"int8": "*i8", "fp8": "*fp8e4nv", "float": "*fp16"}
PRODUCTS = ((128, 768, 768), (1024, 768, 3072), (4096, 768, 3072), (4096, 3072, 768), (16384, 4096, 1024))
"""Tokens, K and N."""
ATTENTIONS = ((1, 128, 12, 64), (8, 128, 12, 64), (32, 128, 12, 64), (32, 512, 12, 64), (32, 512, 16, 64))
"""Samples, tokens, heads and the width of a head."""
OPERATIONS, FLOAT16_OPERATIONS, BYTES = 1979e12, 989e12, 3.35e12


def _compiled(kernel: Any, types: dict[str, str], options: dict[str, Any], capability: int, **launch: int) -> str:
    """Cells with the registers, spilled bytes and shared memory of a kernel, and the instruction of its products."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in options else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind[0] == "*"}
    sizes = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind == "i32"}
    source = ASTSource(kernel, signature, options, aligned | sizes)
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(made.asm["ptx"])
        architecture = f"--gpu-name={sm_arch_from_capability(capability)}"
        command = [get_ptxas(capability).path, "-v", architecture, str(path), "-o", str(path.with_suffix(".cubin"))]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", printed)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", printed)))
    instruction = next((name for name in ("wgmma", "mma.sync") if name in made.asm["ptx"]), "-")
    return f"{registers} | {spilled} | {made.metadata.shared / 1024:.0f} | {instruction}"


def _products() -> None:
    print(
        "| tile (rows x columns x depth, warps, stages) | operands | capability | registers | spilled bytes "
        "| shared memory, KiB | instruction |\n|---|---|---|---|---|---|---|"
    )
    for tile in TILES:
        for kind, capability in TARGETS:
            types = {"a_ptr": TYPES[kind], "w_ptr": TYPES[kind], "y_ptr": TYPES[kind], "r_ptr": "*fp16", "s": "fp32"}
            types["zero_point"] = "fp32"
            types |= dict.fromkeys(("t_ptr", "b_ptr", "next_ptr"), "*fp32")
            options = {"HAS_BIAS": True, "HAS_RESIDUAL": False, "ACTIVATION": "gelu", "KIND": kind, "PARTS": 1}
            options["BY_COLUMN"] = False
            options |= {"INTEGERS": kind == "int8", "EVEN_K": True, "ROWS": tile.rows, "COLUMNS": tile.columns}
            options |= {"DEPTH": tile.depth, "GROUP": tile.group}
            launch = {"num_warps": tile.warps, "num_stages": tile.stages}
            cells = _compiled(products.product_kernel, types, options, capability, **launch)
            words = f"{tile.rows} x {tile.columns} x {tile.depth}, {tile.warps}, {tile.stages}"
            print(f"| {words} | {kind} | {capability} | {cells} |", flush=True)


def _epilogues() -> None:
    print(
        "\n| epilogue of sums in | quantized values | capability | registers | spilled bytes | shared memory, KiB "
        "| instruction |"
        "\n|---|---|---|---|---|---|---|"
    )
    for name, sums in (
        ("int32 or float32", {"int8": "*i32", "fp8": "*fp32"}),
        ("float16", dict.fromkeys(TYPES, "*fp16")),
    ):
        for kind, capability in TARGETS:
            types = {"x_ptr": sums[kind], "y_ptr": TYPES[kind], "r_ptr": "*fp16", "s": "fp32", "zero_point": "fp32"}
            types |= dict.fromkeys(("t_ptr", "b_ptr", "next_ptr"), "*fp32")
            options = {"HAS_BIAS": True, "HAS_RESIDUAL": False, "ACTIVATION": "gelu", "KIND": kind, "PARTS": 1}
            options |= {"BY_COLUMN": False, "ROWS": products.EPILOGUE_ROWS, "COLUMNS": products.EPILOGUE_COLUMNS}
            cells = _compiled(products.epilogue_kernel, types, options, capability, num_warps=4)
            print(f"| {name} | {kind} | {capability} | {cells} |", flush=True)


def _norms() -> None:
    print(
        "\n| norm of rows of | quantized values | capability | registers | spilled bytes | shared memory, KiB "
        "| instruction |"
        "\n|---|---|---|---|---|---|---|"
    )
    for width, warps in ((768, 4), (4096, 8)):
        for kind, capability in TARGETS:
            types = dict.fromkeys(("x_ptr", "r_ptr", "h_ptr", "y_ptr"), "*fp16") | {"q_ptr": TYPES[kind]}
            types |= dict.fromkeys(("g_ptr", "b_ptr"), "*fp32") | {
                "next_scale_ptr": "*fp32",
                "zero_point": "fp32",
                "eps": "fp32",
            }
            options = {"HAS_RESIDUAL": True, "RMS": False, "HAS_BIAS": True, "WRITES_TOTAL": False}
            options |= {"WRITES_VALUE": True, "KIND": kind, "BY_COLUMN": False, "BLOCK": 1 << (width - 1).bit_length()}
            cells = _compiled(norms.norm_kernel, types, options, capability, num_warps=warps)
            print(f"| {width} | {kind} | {capability} | {cells} |", flush=True)


def _attentions() -> None:
    print(
        "\n| tile (queries x keys, warps, stages), width of a head | result | capability | registers | spilled bytes "
        "| shared memory, KiB | instruction |\n|---|---|---|---|---|---|---|"
    )
    pointers = ("q_ptr", "k_ptr", "v_ptr", "m_ptr")
    for width in (64, 80, 128):
        for tile in ATTENTION_TILES:
            for kind, capability in (*TARGETS, ("float", 90)):
                types = dict.fromkeys(pointers, "*fp16") | {"y_ptr": TYPES[kind], "next_ptr": "*fp32"}
                types |= dict.fromkeys(("scale", "lowest", "zero_point"), "fp32")
                options = {"D": width, "KIND": kind, "BY_COLUMN": False, "BLOCK_Q": tile.queries}
                options |= {"BLOCK_K": tile.keys, "BLOCK_D": 1 << (width - 1).bit_length()}
                launch = {"num_warps": tile.warps, "num_stages": tile.stages}
                cells = _compiled(attention.attention_kernel, types, options, capability, **launch)
                words = f"{tile.queries} x {tile.keys}, {tile.warps}, {tile.stages}; {width}"
                result = "float16" if kind == "float" else kind
                print(f"| {words} | {result} | {capability} | {cells} |", flush=True)


def _attention_limits() -> None:
    print(
        "\n| samples, tokens, heads, width | real tokens | multiply-adds, 10^9 | MB read and written, 8-bit result "
        "| least time, us | limit |\n|---|---|---|---|---|---|"
    )
    for samples, tokens, heads, width in ATTENTIONS:
        for share in (1.0, 0.5):
            adds = 2 * samples * heads * tokens * tokens * share * width
            moved = samples * heads * tokens * width * (2 + 4 * share + 1)
            time, limit = max((2 * adds / FLOAT16_OPERATIONS, "products"), (moved / BYTES, "memory"))
            words = f"{samples}, {tokens}, {heads}, {width} | {share:.0%}"
            print(f"| {words} | {adds / 1e9:.1f} | {moved / 1e6:.1f} | {1e6 * time:.1f} | {limit} |")


def _limits() -> None:
    print(
        "\n| tokens, K, N | multiply-adds, 10^9 | MB read and written, 8-bit result | least time, us | limit "
        "| least time with a 16-bit result, us |\n|---|---|---|---|---|---|"
    )
    for m, k, n in PRODUCTS:
        times = {}
        for size in (1, 2):
            moved = m * k + n * k + m * n * size
            times[size] = max((2 * m * n * k / OPERATIONS, "products"), (moved / BYTES, "memory"))
        megabytes = (m * k + n * k + m * n) / 1e6
        print(
            f"| {m}, {k}, {n} | {m * n * k / 1e9:.1f} | {megabytes:.1f} | {1e6 * times[1][0]:.1f} | {times[1][1]} "
            f"| {1e6 * times[2][0]:.1f} |"
        )


if __name__ == "__main__":
    print(heading("Kernels for NVIDIA GPUs, compiled without one"))
    _products()
    _epilogues()
    _norms()
    _attentions()
    _limits()
    _attention_limits()
