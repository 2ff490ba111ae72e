"""Distillation: a loss between the outputs of the trained proxy and of the float model before training.

Legend: z the proxy's and y the teacher's logits [.., C], T the temperature; h_l and g_l their hidden states of layer l.

    loss = T^2 KL(softmax(y / T) || softmax(z / T)) + hidden * mean over l of |h_l - g_l|^2 / |g_l|^2

(Hinton et al. 2015, arXiv:1503.02531; the factor T^2 makes the gradient's size independent of T.) For several logits
(``start_logits`` and ``end_logits`` of an answer) it is the mean. Without logits, every tensor of the output is
compared like a hidden state, except intermediate ones (``hidden_states``, ``attentions``, ``past_key_values``). If an
``attention_mask`` [B, S] certainly marks padding, padded positions of tensors [B, S, ..] do not count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError, QuantizerError
from quantizer.observe.statistics import output_without_padding, read_mask
from quantizer.proxy.build import is_proxy, own_copy
from quantizer.utils.structure import leaves

# Intermediate tensors and the loss of the labels, which are not compared.
_ON_THE_WAY = ("hidden_states", "attentions", "past_key_values", "mems", "loss")


class Distillation:
    """The loss against a teacher, which is a copy of the float model.

    Args:
        model: the float model; it is copied, so create the loss before the first training step.
        temperature: T, positive.
        hidden: the weight of the hidden states, 0 or more; above 0 both models must return ``hidden_states``.
        divisor: maps the divisor of a mean [] to the one to use; if processes share a batch, that of the whole batch.

    Raises:
        ProxyError: ``model`` is a proxy, whose outputs are quantized.
        QuantizerError: the temperature or the weight is out of bounds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        hidden: float = 0.0,
        divisor: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        if is_proxy(model):
            raise ProxyError("the teacher is a proxy, whose outputs are quantized; pass the float model")
        if not 0 < temperature < float("inf"):
            raise QuantizerError(f"temperature is {temperature}, expected a number above 0")
        if not 0 <= hidden < float("inf"):
            raise QuantizerError(f"hidden is {hidden}, expected a number of 0 or more")
        self.teacher = own_copy(model).eval().requires_grad_(requires_grad=False)
        self._temperature = temperature
        self._hidden = hidden
        self._divisor = divisor
        self._warned_of_mask = False

    def __call__(self, output: Any, *args: Any, **keywords: Any) -> Tensor:
        """Return the loss [] of a proxy's output.

        Args:
            output: the proxy's output for the batch; if ``hidden`` is above 0, with ``output_hidden_states=True``.
            args: positional inputs of the batch.
            keywords: keyword inputs of the batch; the teacher does not get ``labels``.

        Raises:
            QuantizerError: the outputs have no tensors to compare, or no hidden states although ``hidden`` is above 0.
        """
        inputs = {name: value for name, value in keywords.items() if name != "labels"}
        if self._hidden:
            inputs["output_hidden_states"] = True
        with torch.no_grad():
            target = self.teacher(*args, **inputs)
        mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._warned_of_mask:
            self._warned_of_mask = True
            warnings.warn(doubt, stacklevel=2)
        loss = self._of_outputs(output, target, mask)
        if not self._hidden:
            return loss
        pairs = list(zip(_hidden_states(output, "proxy"), _hidden_states(target, "teacher"), strict=True))
        return loss + self._hidden * sum(self._relative(h, g, mask) for h, g in pairs) / len(pairs)

    def _of_outputs(self, output: Any, target: Any, mask: Tensor | None) -> Tensor:
        heads, target_heads = _heads(output), _heads(target)
        names = [name for name in heads if name in target_heads]
        names = [name for name in names if _is_logits(name)] or names
        if not names:
            raise QuantizerError(
                f"the output ({type(output).__name__}) contains no floating-point tensor to compare with the teacher's "
                f"({type(target).__name__})"
            )
        if not isinstance(output, Mapping) and len(heads) != len(target_heads):
            raise QuantizerError(
                f"the output contains {len(heads)} floating-point tensors, the teacher's {len(target_heads)}; pass the "
                "proxy's output for this batch without labels"
            )
        return torch.stack([self._of_head(name, heads[name], target_heads[name], mask) for name in names]).mean()

    def _of_head(self, name: str, value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        if value.shape != target.shape:
            raise QuantizerError(
                f"output {name} has the shape {tuple(value.shape)}, the teacher's {tuple(target.shape)}; pass the "
                "proxy's output for this batch"
            )
        return self._divergence(value, target, mask) if _is_logits(name) else self._relative(value, target, mask)

    def _divergence(self, z: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        log_q, log_p = (
            (output_without_padding(value, mask).float() / self._temperature).log_softmax(-1) for value in (z, y)
        )
        # A logit of -inf in one output is also -inf in the other, and -inf - -inf is NaN.
        terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0)
        rows = terms.sum(-1)
        count = rows.new_tensor(rows.numel())
        return rows.mean() * (count / self._divisor(count)) * self._temperature**2

    def _relative(self, value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        value, target = output_without_padding(value, mask).float(), output_without_padding(target, mask).float()
        power = self._divisor(target.square().sum()).clamp_min(torch.finfo(torch.float32).tiny)
        return (value - target).square().sum() / power


def _is_logits(name: str) -> bool:
    return name == "logits" or name.endswith("_logits")


def _heads(output: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model's output by name, or by number if they have no names."""
    if not isinstance(output, Mapping) and isinstance(getattr(output, "logits", None), Tensor):
        return {"logits": output.logits}
    if isinstance(output, Mapping):
        named = [
            (f"{name}.{index}" if index else name, leaf)
            for name, x in output.items()
            if not name.endswith(_ON_THE_WAY)
            for index, leaf in enumerate(leaves(x))
        ]
    else:
        named = [(str(index), leaf) for index, leaf in enumerate(leaves(output))]
    return {name: leaf for name, leaf in named if isinstance(leaf, Tensor) and leaf.is_floating_point()}


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _hidden_states(output: Any, whose: str) -> tuple[Tensor, ...]:
    states = _entry(output, "hidden_states")
    if not states:
        raise QuantizerError(
            f"hidden is above 0, but the {whose}'s output has no hidden_states; call the proxy with "
            "output_hidden_states=True, or remove hidden"
        )
    return tuple(states)
