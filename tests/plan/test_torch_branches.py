"""Branches in the code of torch that a module does not take are not listed; the user's own code is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.pipeline.make_record import site_records
from quantizer.utils.records import Site


class _Net(nn.Module):
    """Layers of torch with several branches, a layer that never runs, and a product that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mirrored = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.wider = nn.ConvTranspose2d(8, 8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.steps = nn.LSTM(8, 8, batch_first=True)
        self.unused = nn.Conv2d(3, 3, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wider(self.mirrored(self.norm(self.conv(x))))
        y = x.mean(-1).transpose(1, 2)
        y, _ = self.attention(y, y, y)
        y, _ = self.steps(y)
        if len(y) > 100:
            y = torch.matmul(y, y.transpose(1, 2))
        return self.head(y.mean(1))


def _of_conv(rows: Iterable[Site]) -> list[str]:
    return [row.name for row in rows if row.kind == "conv"]


_CONVS = [
    "conv._conv_forward.conv2d_1",
    "mirrored._conv_forward.conv2d_0",
    "unused._conv_forward.conv2d_1",
    "wider.forward.conv_transpose2d_0",
]


def test_inspect_counts_one_site_for_each_convolution() -> None:
    coverage = Quantizer(backend="onnxruntime").inspect(_Net().eval())
    assert coverage.by_kind()["conv"] == (0, 4)
    assert sorted(_of_conv(coverage.shown)) == _CONVS
    assert "residual_add" not in {row.kind for row in coverage.shown if row.name.startswith(("norm.", "wider."))}
    # An LSTM without projection has one product of its state.
    names = {row.name for row in coverage.shown}
    assert "steps.recurrence.l0.forward.recurrent_product_0" in names
    assert "steps.recurrence.l0.forward.recurrent_product_1" not in names
    assert len(_of_conv(coverage.all.shown)) == 7


def test_an_add_of_a_number_is_float_before_any_calibration() -> None:
    coverage = Quantizer(backend="onnxruntime").inspect(net("self.layer(torch.add(x, 1))", layer=linear()))
    reasons = {row.kind: row.reason for row in coverage.all.shown}
    assert reasons == {
        "residual_add": "its operands are not floating-point tensors",
        "linear": "not calibrated yet",
    }


def test_sites_that_never_run_are_skipped_only_in_code_of_the_user() -> None:
    q = Quantizer(backend="onnxruntime")
    q.calibrate(_Net().eval(), [torch.randn(8, 3, 6, 6) for _ in range(4)])
    never = {row.name for row in q.coverage.skipped if not row.ran}
    assert never == {"forward.matmul_0", "unused._conv_forward.conv2d_1"}
    assert never == {row.name for row in site_records(q.coverage) if not row.ran}
    everything = {row.name for row in q.coverage.all.skipped}
    assert {"conv._conv_forward.conv2d_0", "attention.out_proj.forward.linear_0", "norm.forward.add_0"} <= everything
    assert "2 sites that never ran" in repr(q.coverage).replace("\n", " ")


def test_the_evidence_of_an_excluded_site_is_its_rule() -> None:
    q = Quantizer(backend="onnxruntime", exclude={"names": ["head"]}, bias_correction=True)
    q.calibrate(_Net().eval(), [torch.randn(8, 3, 6, 6) for _ in range(4)])
    (head,) = [row for row in q.coverage.not_quantized if row.site == "head.forward.linear_0"]
    assert (head.reason, head.detail) == ("excluded by rule", "exclude.names: head")
    assert all(row.reason != row.detail for row in q.coverage.not_quantized)
