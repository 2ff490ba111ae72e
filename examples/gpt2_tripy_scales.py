"""The scales of a GPT-2 for NVIDIA tripy's quantized Linear, by Model Optimizer and by this package, side by side.

    pip install '.[hf]' nvidia-modelopt
    python examples/gpt2_tripy_scales.py                    # a tiny GPT-2 with random weights
    python examples/gpt2_tripy_scales.py --model my-gpt2 --texts texts.txt --write scales.safetensors

tripy's Linear takes an ``input_scale``, a ``weight_scale`` and the axis of the weight that the latter runs along,
``weight_quant_dim``. GPT-2's linear layers are ``Conv1D``, whose weight is [in, out] and not [out, in]: in tripy's
orientation a scale for each output channel is on axis 0 all the same.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from quantizer import Quantizer
from quantizer.integrations.tripy import tripy_scales, write_tripy_scales
from quantizer.numerics.formats import INT8

Scales = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By module: input_scale [] and weight_scale [out]."""


def tiny_gpt2() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=255, eos_token_id=255
    )
    model = GPT2LMHeadModel(config).eval()
    return model, [{"input_ids": torch.randint(256, (4, 32))} for _ in range(4)]


def model_from(path: str, texts: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = [line for line in Path(texts).read_text(encoding="utf-8").splitlines() if line.strip()]
    batches = (tokenizer(line, truncation=True, max_length=512, return_tensors="pt") for line in lines)
    return model, [{"input_ids": batch["input_ids"]} for batch in batches]


def model_optimizer_scales(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> Scales:
    import modelopt.torch.quantization as mtq

    def run_batches(quantized: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                quantized(**batch)

    # Its own copy: it replaces the modules of the model that it is given.
    quantized = mtq.quantize(copy.deepcopy(model), mtq.INT8_DEFAULT_CFG, run_batches)
    scales = {}
    for name, module in quantized.named_modules():
        sides = (getattr(module, "input_quantizer", None), getattr(module, "weight_quantizer", None))
        if all(side is not None and side.is_enabled for side in sides):
            data, weight = (side.amax.flatten().squeeze() / INT8.qmax for side in sides)
            scales[name] = (data, weight)
    return scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder that save_pretrained() wrote, or a hub name")
    parser.add_argument("--texts", help="a text file; each line is a row of calibration data")
    parser.add_argument("--write", help="write our scales to this .safetensors file")
    asked = parser.parse_args()
    model, batches = model_from(asked.model, asked.texts) if asked.model else tiny_gpt2()

    # Model Optimizer's preset takes the maximum and quantizes linear layers, and it smooths nothing; so it is here too.
    q = Quantizer(
        backend="tensorrt",
        fallback_dtype="float32",
        preset="plain",
        activations={"calibrator": "max"},
        sites={"matmul": False, "residual_add": False},
        exclude={"names": ["lm_head"]},
    )
    q.calibrate(model, batches)
    ours = tripy_scales(q.plan)
    if asked.write:
        write_tripy_scales(q.plan, asked.write)
    theirs = model_optimizer_scales(model, batches)

    print(f"{'module':28} {'input_scale':>23} {'largest weight_scale':>23}  weight_quant_dim  largest difference")
    print(f"{'':28} {'theirs':>11} {'ours':>11} {'theirs':>11} {'ours':>11}")
    worst = 0.0
    for name, linear in ours.linears.items():
        their_input, their_weight = theirs[name]
        difference = max(
            float((mine / other - 1).abs().max())
            for mine, other in ((linear.input_scale, their_input), (linear.weight_scale, their_weight))
        )
        worst = max(worst, difference)
        print(
            f"{name:28} {float(their_input):11.3e} {float(linear.input_scale):11.3e} {float(their_weight.max()):11.3e} "
            f"{float(linear.weight_scale.max()):11.3e}  {linear.weight_quant_dim!s:>16}  {difference:.1e}"
        )
    print(f"\n{len(ours.linears)} linear layers; largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
