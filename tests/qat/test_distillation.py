"""The distillation loss: its value, what it leaves out, and what comes of training with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.algorithms.qat import Distillation
from quantizer.errors import ProxyError, QuantizerError


class Classifier(nn.Module):
    """Tokens [B, S, 16] to logits, of each row or of each token, with the hidden states on request."""

    def __init__(self, *, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self._tokens = nn.Linear(16, 32), nn.Linear(32, 4), tokens

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, output_hidden_states: bool = False) -> Any:
        hidden = self.first(x).relu()
        logits = self.last(hidden if self._tokens else hidden.mean(1))
        return {"logits": logits, **({"hidden_states": (x, hidden)} if output_hidden_states else {})}


def data(seed: int = 1) -> Tensor:
    return torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(seed))


def test_the_model_agrees_with_itself() -> None:
    model = Classifier().eval()
    loss = Distillation(model, temperature=2.0, hidden=1.0)
    assert loss(model(data(), output_hidden_states=True), data()).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_its_value_is_that_of_torch(temperature: float) -> None:
    model, other = Classifier().eval(), Classifier().eval()
    with torch.no_grad():
        other.last.weight.add_(torch.randn(4, 32))
    found = Distillation(model, temperature=temperature)(other(data()), data())
    log_p, log_q = ((one(data())["logits"] / temperature).log_softmax(-1) for one in (model, other))
    expected = nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * temperature**2
    torch.testing.assert_close(found, expected)


def test_hidden_states_are_compared_relative_to_their_own_size() -> None:
    model, other = Classifier().eval(), Classifier().eval()
    with torch.no_grad():
        other.first.weight.mul_(1.1)
    output, wanted = other(data(), output_hidden_states=True), model(data(), output_hidden_states=True)
    plain = Distillation(model)(output, data())
    one, two = output["hidden_states"][1], wanted["hidden_states"][1]
    extra = (one - two).square().sum() / two.square().sum() / 2
    torch.testing.assert_close(Distillation(model, hidden=0.5)(output, data()), plain + 0.5 * extra)


def test_padding_and_labels_are_left_out() -> None:
    model = Classifier(tokens=True).eval()
    mask = torch.ones(8, 5, dtype=torch.long)
    mask[:, 3:] = 0
    output = {"logits": model(data())["logits"].detach().clone()}
    output["logits"][:, 3:] += torch.randn(8, 2, 4)
    loss = Distillation(model)
    assert loss(output, data(), attention_mask=mask, labels=torch.zeros(8)).item() == pytest.approx(0, abs=1e-6)
    assert loss(output, data()).item() > 0.01


def test_a_class_that_is_ruled_out_counts_for_nothing() -> None:
    class Ruled(Classifier):
        def forward(self, x: Tensor, **_: Any) -> Any:  # type: ignore[override]
            logits = super().forward(x)["logits"]
            return {"logits": logits.masked_fill(torch.tensor([False, True, False, False]), -torch.inf)}

    model = Ruled().eval()
    output = model(data())
    loss = Distillation(model)(output, data())
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_several_logits_count_alike() -> None:
    model = Classifier().eval()
    y = model(data())["logits"].detach()
    z = y + torch.randn(8, 4, generator=torch.Generator().manual_seed(2))

    class Span(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"loss": None, "start_logits": y, "end_logits": 2 * y, "hidden": x}

    loss = Distillation(Span())
    one = Distillation(model)({"logits": z}, data())
    assert loss({"start_logits": z, "end_logits": 2 * y, "hidden": data(2)}, data()).item() == pytest.approx(
        one.item() / 2
    )
    assert loss({"start_logits": y, "end_logits": 2 * z}, data()).item() > 0.01


def test_classes_are_no_tokens() -> None:
    model = Classifier().eval()
    mask = torch.tensor([[1, 1, 0, 0]]).expand(8, 4)  # as many tokens as there are classes
    tokens = data()[:, :4]
    output = {"logits": model(tokens)["logits"].detach() + torch.tensor([0.0, 0, 0, 3])}
    loss = Distillation(model)
    assert loss(output, tokens, attention_mask=mask).item() == loss(output, tokens).item() > 0.01


def test_a_mask_of_doubtful_meaning_leaves_nothing_out_and_is_told_once() -> None:
    model = Classifier(tokens=True).eval()
    mask = torch.ones(8, 5, dtype=torch.bool)
    mask[:, 3:] = False
    with torch.no_grad():
        output = {"logits": model(data())["logits"] + mask[..., None] * torch.randn(8, 5, 4)}
    loss = Distillation(model)
    with pytest.warns(UserWarning, match=r"attention_mask \(bool \[8, 5\]\) may not be 1 for tokens"):
        found = loss(output, data(), attention_mask=mask)
    assert loss(output, data(), attention_mask=mask).item() == found.item() == loss(output, data()).item()


def test_an_output_without_logits() -> None:
    model = nn.Linear(16, 8).eval()
    torch.testing.assert_close(Distillation(model)(model(data()) * 1.5, data()), torch.tensor(0.25))


def test_the_teacher_stays_what_it_was() -> None:
    model = Classifier().train()
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [data()], progress=False)
    loss = Distillation(model)
    proxy = quantizer.qat(model)
    with torch.no_grad():
        model.last.weight.add_(torch.randn(4, 32))
    before = loss(proxy(data()), data()).item()
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.5)
    wanted = loss.teacher(data())["logits"]
    for step in range(200):
        loss(proxy(data(step)), data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(loss.teacher(data())["logits"], wanted)
    assert not loss.teacher.training
    assert loss(proxy(data()), data()).item() < before / 4


def test_what_it_refuses() -> None:
    model = Classifier().eval()
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [data()], progress=False)
    with pytest.raises(ProxyError, match="the teacher is a proxy"):
        Distillation(quantizer.qat(model))
    with pytest.raises(QuantizerError, match="temperature is 0, expected a number above 0"):
        Distillation(model, temperature=0)
    with pytest.raises(QuantizerError, match="hidden is -1, expected a number of 0 or more"):
        Distillation(model, hidden=-1)
    with pytest.raises(QuantizerError, match="the proxy's output has no hidden_states"):
        Distillation(model, hidden=1)(model(data()), data())
    with pytest.raises(QuantizerError, match="contains no floating-point tensor"):
        Distillation(model)({"labels": torch.zeros(3, dtype=torch.long)}, data())


class TwoHeads(nn.Module):
    """Gives two tensors, in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.form = nn.Linear(16, 4), nn.Linear(16, 3), form

    def forward(self, x: Tensor) -> Any:
        a, b = self.first(x), self.second(x)
        forms = {
            "tuple": (a, b),
            "nested": [a, {"inner": (b,)}],
            "named": {"boxes": a, "scores": b, "hidden_states": (x,), "past_key_values": ((x,),)},
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["tuple", "nested", "named"])
def test_every_output_counts(form: str) -> None:
    model, other = TwoHeads(form).eval(), TwoHeads(form).eval()
    loss = Distillation(model)
    assert loss(other(data()), data()).item() == 0
    with torch.no_grad():
        other.second.weight.mul_(0)
        other.second.bias.mul_(0)
    # Nothing of the second head is left: its error is as large as itself, and it counts half.
    assert loss(other(data()), data()).item() == pytest.approx(0.5)
    found = loss(other(data()), data())
    found.backward()
    assert other.second.weight.grad is not None
    assert other.second.weight.grad.abs().max() > 0


def test_an_output_of_another_form_than_the_teachers_is_refused() -> None:
    model = TwoHeads("tuple").eval()
    with pytest.raises(QuantizerError, match=r"contains 3 floating-point tensors, the teacher's 2"):
        Distillation(model)((torch.zeros(()), *model(data())), data())
    with pytest.raises(QuantizerError, match=r"output 0 has the shape \(4, 5, 4\), the teacher's \(8, 5, 4\)"):
        Distillation(model)(model(data()[:4]), data())


def test_the_teacher_is_no_student_where_a_forward_is_wrapped() -> None:
    model = nn.Linear(16, 8).eval()
    original = model.forward
    model.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    loss = Distillation(model)
    with torch.no_grad():
        wanted = model(data())
        model.weight.mul_(3)
        torch.testing.assert_close(loss.teacher(data()), wanted)
    assert loss(model(data()), data()).item() > 0.1
