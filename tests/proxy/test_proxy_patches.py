"""Operator patches: applied to the text, shown, undone, and refused by name where the source has changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from quantizer import QATCalibrate, Quantizer
from quantizer.errors import SourceError
from quantizer.rewrite import OperatorPatch, operator_patches, register_operator_patch, unregister_operator_patch


def positions(ids: Tensor) -> Tensor:
    """A helper without a product."""
    return ids.cumsum(1) - 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.layer = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(positions(ids))
        return self.layer(self.shifted(hidden)).relu()

    @staticmethod
    def shifted(hidden: Tensor) -> Tensor:
        return hidden + hidden.roll(1, 1)  # one line


IDS = torch.ones(2, 6, dtype=torch.long)


@pytest.fixture
def register() -> Iterator[object]:
    before = set(operator_patches())

    def patch(
        name: str = "sample",
        function: str = "positions",
        before: str = "ids.cumsum(1)",
        after: str = "ids.cumsum(1) * 1",
    ) -> OperatorPatch:
        return register_operator_patch(
            OperatorPatch(
                name=name,
                function=f"{__name__}:{function}",
                before=before,
                after=after,
                target="onnxruntime",
                reason="for the test",
            )
        )

    yield patch
    for name in operator_patches().keys() - before:
        unregister_operator_patch(name)


def test_a_patch_is_applied_to_new_proxies_and_shown(register) -> None:
    model = Net().eval()
    quantizer = Quantizer(preset="plain", backend="openvino")
    plain = quantizer.proxy(model)
    register(after="(ids.cumsum(1) + 1)")
    register(name="both", function="Net.shifted", before="hidden.roll(1, 1)", after="hidden.roll(2, 1)")
    patched = quantizer.proxy(model)
    assert torch.equal(plain(IDS), model(IDS))
    expected = model.layer(model.table(IDS.cumsum(1)) + model.table(IDS.cumsum(1)).roll(2, 1)).relu()
    assert torch.equal(patched(IDS), expected)
    assert not torch.equal(expected, model(IDS))
    assert "+    return (ids.cumsum(1) + 1) - 1" in quantizer.diff(model)
    quantizer.calibrate(model, [(IDS,)])
    assert [patch.name for patch in quantizer.coverage.patches] == ["both", "sample"]
    assert "operator patches: both (for onnxruntime), sample (for onnxruntime)" in quantizer.coverage.title()


def test_a_patch_that_is_gone_is_not_applied(register) -> None:
    model = Net().eval()
    register(after="(ids.cumsum(1) + 1)")
    quantizer = Quantizer(preset="plain", backend="openvino")
    patched = quantizer.proxy(model)
    before = patched(IDS)
    unregister_operator_patch("sample")
    assert torch.equal(quantizer.proxy(model)(IDS), model(IDS))
    assert torch.equal(patched(IDS), before)
    assert quantizer.inspect(model).patches == ()


def test_what_a_block_builds_is_patched(register) -> None:
    register(after="(ids.cumsum(1) + 1)")
    with QATCalibrate(Net, method="max") as block:
        model = Net()
        block.setup_model_qat(model)
        model(IDS)
    assert [patch.name for patch in block.coverage(model).patches] == ["sample"]
    assert positions(IDS).max() == 5


@pytest.mark.parametrize(
    ("function", "before", "after", "message"),
    [
        ("positions", "ids.cumsum(2)", "ids", "is not found"),
        ("Net.forward", "hidden", "h", "is found 2 times"),
        ("Net.absent", "hidden", "h", "expected 1 function of this name, found 0"),
        ("positions", "ids.cumsum(1)", "ids.cumsum(", "it is not valid Python"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_by_name(register, function, before, after, message) -> None:
    register(function=function, before=before, after=after)
    model = Net().eval()
    quantizer = Quantizer(preset="plain", backend="openvino")
    assert torch.equal(quantizer.proxy(model)(IDS), model(IDS))
    reasons = [row.reason for row in quantizer.inspect(model).rows if "operator patch" in row.reason]
    assert len(reasons) == 1
    assert "operator patch 'sample' is refused" in reasons[0]
    assert message in reasons[0]
    assert quantizer.inspect(model).patches == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": ""}, "package.module:function"),
        ({"after": "ids\\\n.cumsum(1)"}, "before has 1 lines and after 2"),
        ({"after": "ids.cumsum(1)"}, "after must differ"),
        ({"before": " "}, "must not be empty"),
    ],
)
def test_a_wrong_patch_is_refused_at_once(register, change, message) -> None:
    with pytest.raises(SourceError, match=message):
        register(**change)
    assert "sample" not in operator_patches()


def test_a_name_is_taken_once(register) -> None:
    register()
    with pytest.raises(SourceError, match="'sample': the name is already registered"):
        register()
    with pytest.raises(SourceError, match=r"unknown operator patch 'other'; known: .*sample"):
        unregister_operator_patch("other")
