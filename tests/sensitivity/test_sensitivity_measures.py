"""The measures against brute force and against each other, and what of a first pass is given again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import Mlp, batch, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import net

from quantizer import Quantizer
from quantizer.algorithms.sensitivity.groups import groups_of
from quantizer.algorithms.sensitivity.metric import Divergence, output
from quantizer.errors import SensitivityError
from quantizer.proxy.build import sites_of
from quantizer.proxy.recorded_calls import RecordedCalls


def _quantizer(model: nn.Module, data: list[Any], **options: Any) -> Quantizer:
    return make_calibrated(model, data, **{"backend": "openvino", "sites": {"residual_add": True}, **options})


def _errors(quantizer: Quantizer, model: nn.Module, data: list[Any], **options: Any) -> dict[str, float]:
    amp = quantizer.amp(model, **options)
    with torch.no_grad():
        for one in data:
            amp(**one) if isinstance(one, dict) else amp(one)
    return {row.group: row.error for row in quantizer.sensitivity}


# -- gradient ------------------------------------------------------------------------------------------------------


def test_for_a_linear_model_the_gradient_is_the_output_on_average() -> None:
    """Without a non-linearity the estimate is exact in expectation; 4,096 rows leave about 5% to chance."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)).eval()
    data = [torch.randn(4096, 32)]
    quantizer = _quantizer(model, data)
    truth = _errors(quantizer, model, data, measure="output")
    found = _errors(quantizer, model, data, measure="gradient")
    assert found.keys() == truth.keys()
    for group, error in truth.items():
        assert found[group] == pytest.approx(error, rel=0.15), group


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "vit"])
def test_the_gradient_finds_the_worst_groups_of_the_output(architecture: str) -> None:
    model = tiny(architecture)
    data = [batch(architecture, seed=seed) for seed in range(2)]
    quantizer = _quantizer(model, data)
    truth = _errors(quantizer, model, data, measure="output")
    found = _errors(quantizer, model, data, measure="gradient")
    first = sorted(found, key=lambda group: -found[group])[:8]
    worst = sorted(truth, key=lambda group: -truth[group])[:5]
    assert len(set(first) & set(worst)) >= 4


class Classifier(nn.Module):
    """Calls its output logits, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.down(F.gelu(self.up(x)))}


def test_of_logits_the_output_is_the_divergence_of_kullback_and_leibler() -> None:
    torch.manual_seed(0)
    model, x = Classifier().eval(), torch.randn(512, 32)
    quantizer = _quantizer(model, [x])
    truth = _errors(quantizer, model, [x], measure="output")
    amp = quantizer.amp(model, measure="local")
    with torch.no_grad():
        p = model(x)["logits"].double().log_softmax(-1)
        for group in groups_of(sites_of(amp), quantizer.plan, "group"):
            with group.rounding():
                q = amp.forward(x)["logits"].double().log_softmax(-1)
            assert truth[group.name] == pytest.approx(float(F.kl_div(q, p, log_target=True, reduction="batchmean")))
    found = _errors(quantizer, model, [x], measure="gradient")
    for group, error in truth.items():
        assert found[group] == pytest.approx(error, rel=0.3), group


def test_classes_ruled_out_by_infinity_cost_nothing() -> None:
    logits = torch.randn(8, 5)
    logits[:, 2] = -torch.inf
    divergence = Divergence({"logits": logits}, None)
    assert divergence.of({"logits": logits}) == 0
    assert 0 < divergence.of({"logits": logits + 0.1 * torch.randn(8, 5)}) < 1


def test_rows_of_logits_are_compared_in_parts_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, other = torch.randn(3, 7, 50), torch.randn(3, 7, 50)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    whole = Divergence({"logits": logits}, mask).of({"logits": other})
    monkeypatch.setattr("quantizer.algorithms.sensitivity.metric._AT_ONCE", 4 * 50 + 1)
    log_p, log_q = (each[mask].double().log_softmax(-1) for each in (logits, other))
    expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert Divergence({"logits": logits}, mask).of({"logits": other}) == whole == expected


def test_a_single_logit_is_no_distribution() -> None:
    scores = torch.randn(8, 1)
    assert Divergence({"logits": scores}, None).of({"logits": 1.1 * scores}) == pytest.approx(0.01, rel=1e-4)


def test_a_loss_stands_in_for_the_output() -> None:
    torch.manual_seed(0)
    model, x = Classifier().eval(), torch.randn(256, 32)
    labels = torch.arange(256) % 5
    quantizer = _quantizer(model, [x])
    asked = []

    def loss(result: Any) -> Tensor:
        asked.append(torch.is_grad_enabled())
        return F.cross_entropy(result["logits"], labels)

    found = _errors(quantizer, model, [x], loss=loss)
    assert asked == [True]
    assert all(error > 0 for error in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_enabled_where_the_user_forbade_them() -> None:
    model, x = Mlp().eval(), torch.randn(16, 32)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    quantizer = _quantizer(model, [x])
    expected = _errors(quantizer, model, [x])
    amp = quantizer.amp(model)
    with torch.inference_mode():
        assert torch.equal(amp(x.clone()), model(x))
    assert {row.group: row.error for row in quantizer.sensitivity} == expected
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Rounding(nn.Module):
    """No gradient passes its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((4 * self.first(x)).detach().round())


class WithoutGradients(Classifier):
    """As exporters of models like to write it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": self.down(F.gelu(self.up(x)))}


def test_a_model_without_gradients_is_measured_by_the_output() -> None:
    model, x = WithoutGradients().eval(), torch.randn(64, 32)
    quantizer = _quantizer(model, [x])
    assert _errors(quantizer, model, [x]) == _errors(quantizer, model, [x], measure="output")


def test_what_no_gradient_reaches_is_measured_by_the_output() -> None:
    model, x = Rounding().eval(), torch.randn(64, 32)
    quantizer = _quantizer(model, [x])
    truth = _errors(quantizer, model, [x], measure="output")
    found = _errors(quantizer, model, [x])
    assert found["first.forward.linear_0"] == truth["first.forward.linear_0"] > 0
    assert found["last.forward.linear_0"] > 0


class Scaled(nn.Module):
    """Doubles what it is given, in place or not, and an activation that is in place as well."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.act = nn.ReLU(inplace=in_place)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.mul_(2.0) if self.act.inplace else x * 2.0) + 0.0
        z = self.act(y)
        return self.last((y if self.act.inplace else z) + z)


@pytest.mark.parametrize("measure", ["gradient", "output", "local"])
def test_what_a_model_changes_in_place_is_given_to_no_other_pass(measure: str) -> None:
    errors = []
    for in_place in (False, True):
        model, x = Scaled(in_place=in_place).eval(), torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        quantizer = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
        quantizer.calibrate(model, [x.clone()])
        given = x.clone()
        errors.append(_errors(quantizer, model, [given], measure=measure))
        assert torch.equal(given, x)  # the user's data stays as it was
    assert errors[0] == pytest.approx(errors[1])


class Overwritten(Rounding):
    """What a softmax keeps for its gradient is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).softmax(-1)
        y += x
        return self.last(y)


def test_what_is_overwritten_is_measured_by_the_output() -> None:
    model, x = Overwritten().eval(), torch.randn(64, 32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    quantizer = _quantizer(model, [x])
    assert _errors(quantizer, model, [x]) == _errors(quantizer, model, [x], measure="output")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        other = y
        y += self.b(F.relu(y))
        return F.relu_(other)


@pytest.mark.parametrize("measure", ["gradient", "output", "local"])
def test_sums_in_place(measure: str) -> None:
    torch.manual_seed(1)
    model, x = InPlace().eval(), torch.randn(64, 32)
    quantizer = _quantizer(model, [x])
    errors = _errors(quantizer, model, [x], measure=measure)
    assert len(errors) == 4
    assert all(error > 0 for error in errors.values())
    truth = _errors(quantizer, model, [x], measure="output")
    if measure == "gradient":
        assert sorted(errors, key=errors.__getitem__)[-1] == sorted(truth, key=truth.__getitem__)[-1]


# -- local and metric ----------------------------------------------------------------------------------------------


def test_local_is_the_relative_error_at_the_site() -> None:
    model, x = Mlp().eval(), torch.randn(16, 32)
    quantizer = _quantizer(model, [x])
    found = _errors(quantizer, model, [x], measure="local")
    amp = quantizer.amp(model, measure="local")
    (group,) = [g for g in groups_of(sites_of(amp), quantizer.plan, "group") if g.name == "up.forward.linear_0"]
    with torch.no_grad():
        y = model.up(x).double()
        with group.rounding():
            z = amp.up(x).double()
    assert found[group.name] == pytest.approx(float((z - y).square().sum() / y.square().sum()))


@pytest.mark.parametrize("higher", [True, False])
def test_metric_is_the_drop_of_the_users_figure(higher: bool) -> None:
    model, x = Mlp().eval(), torch.randn(16, 32)
    quantizer = _quantizer(model, [x])
    with torch.no_grad():
        expected = model(x)

    def metric(candidate: nn.Module) -> Tensor:
        error = (candidate(x) - expected).square().mean()
        return -error if higher else error

    quantizer.amp(model, measure="metric", metric=metric, higher_is_better=higher)
    found = {row.group: row.error for row in quantizer.sensitivity}
    truth = _errors(quantizer, model, [x], measure="output")
    power = float(expected.double().square().mean())
    for group, error in truth.items():
        assert found[group] == pytest.approx(error * power, rel=1e-4)


# -- granularity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "some"),
    [
        ("group", "encoder.layer.0.output.forward.add_0.lhs"),
        ("layer", "encoder.layer.1.attention"),
        ("block", "encoder.layer.1"),
    ],
)
def test_granularity(granularity: str, some: str) -> None:
    model, data = tiny("bert"), batch("bert")
    quantizer = _quantizer(model, [data])
    errors = _errors(quantizer, model, [data], granularity=granularity)
    assert some in errors
    rows = list(quantizer.sensitivity)
    parts = [part for row in rows for part in row.parts]
    groups = {o.group for site in quantizer.plan.values() for o in site.operands if o.quantized}
    assert sorted(parts) == sorted(groups), "every group of the plan is in one group that is measured"


def test_a_block_is_kept_in_float_as_a_whole() -> None:
    model, data = tiny("bert"), batch("bert")
    quantizer = _quantizer(model, [data])
    amp = quantizer.amp(model, granularity="block")
    with torch.no_grad():
        amp(**data)
    worst = quantizer.sensitivity.rows[0]
    chosen = quantizer.fallback(amp, num=1)
    assert set(chosen.groups) == set(worst.parts)
    assert set(chosen.ranks) == {1}
    inside = [s for s in quantizer.plan.values() if s.name.startswith(f"{worst.group}.")]
    assert inside
    assert not any(site.quantized for site in inside)


# -- reuse ---------------------------------------------------------------------------------------------------------


CALLS: list[int] = []


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return F.linear(x, self.weight, self.bias)


def _brute_force(amp: nn.Module, plan: Any, x: Any) -> dict[str, float]:
    """Every pass computed whole."""
    with torch.no_grad():
        divergence = Divergence(amp.forward(x), None)
        errors = {}
        for group in groups_of(sites_of(amp), plan, "group"):
            with group.rounding():
                errors[group.name] = divergence.of(amp.forward(x))
    return errors


def test_what_comes_before_a_group_is_not_computed_again() -> None:
    model = nn.Sequential(*(Counting(16, 16) for _ in range(6))).eval()
    x = torch.randn(8, 16)
    quantizer = _quantizer(model, [x])
    amp = quantizer.amp(model, measure="local")
    groups = groups_of(sites_of(amp), quantizer.plan, "group")
    with torch.no_grad():
        result = amp.forward(x)
        CALLS.clear()
        found = output(amp, groups, (x,), {}, result)
    # The first pass, and of the others only what stands from the group on.
    assert len(CALLS) == 6 + (6 + 5 + 4 + 3 + 2 + 1)
    assert found == _brute_force(amp, quantizer.plan, x)
    assert "forward" not in amp[0].__dict__
    assert all(site.judge is None for site in sites_of(amp))


def test_a_module_s_own_forward_comes_back() -> None:
    """Libraries that hook a model put a function or a method into the instance."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    with RecordedCalls(model):
        assert all("forward" in module.__dict__ for module in model)
    assert not any("forward" in module.__dict__ for module in model)
    function, method = partial(nn.Linear.forward, model[0]), MethodType(nn.Linear.forward, model[1])
    model[0].forward, model[1].forward = function, method
    with RecordedCalls(model):
        assert model[0].forward is not function
    assert model[0].__dict__["forward"] is function
    assert model[1].__dict__["forward"] is method
    assert "forward" not in model[2].__dict__


def keeps_net() -> nn.Module:
    """Sets an attribute that somebody else reads."""
    return net("self.seen = self.linear(x); return x", linear=nn.Linear(16, 16), seen=torch.zeros(1))


def reads_what_was_kept() -> nn.Module:
    return net("self.last(self.keeps(x)) + self.keeps.seen", keeps=keeps_net(), last=nn.Linear(16, 16))


class ChangedLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = y * 2
        y.mul_(3)
        return self.last(y) + z


def shared() -> nn.Module:
    return net(
        "self.inner(self.last(self.inner(self.inner(x))))",
        inner=nn.Sequential(nn.Linear(16, 16), nn.GELU()),
        last=nn.Linear(16, 16),
    )


class Appends(nn.Module):
    """Hands a list on, as models do with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.part = AppendsPart(self.first)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        self.part(x, cache)
        return self.last(cache.held[0])


class Cache:
    def __init__(self) -> None:
        self.held: list[Tensor] = []


class AppendsPart(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.held.append(self.linear(x))
        return x


@pytest.mark.parametrize("make", [reads_what_was_kept, ChangedLater, shared, Appends, InPlace])
def test_calls_with_other_effects_are_made_again(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    model = make().eval()
    x = torch.randn(8, 32 if make is InPlace else 16)
    quantizer = _quantizer(model, [x])
    amp = quantizer.amp(model, measure="local")
    groups = groups_of(sites_of(amp), quantizer.plan, "group")
    with torch.no_grad():
        found = output(amp, groups, (x,), {}, amp.forward(x))
    assert found == _brute_force(amp, quantizer.plan, x)
    assert all(error > 0 for error in found.values())


def _llama() -> nn.Module:
    """Its layers hand a cache on."""
    import transformers as tf

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=99, attn_implementation="eager")
    return tf.LlamaModel(config).eval()


@pytest.mark.parametrize("architecture", ["bert", "mpnet", "vit", "llama"])
def test_reuse_gives_what_whole_passes_give(architecture: str) -> None:
    model = _llama() if architecture == "llama" else tiny(architecture)
    data = {"input_ids": torch.arange(16).reshape(2, 8)} if architecture == "llama" else batch(architecture)
    quantizer = _quantizer(model, [data])
    amp = quantizer.amp(model, measure="local")
    groups = groups_of(sites_of(amp), quantizer.plan, "group")
    with torch.no_grad():
        result = amp.forward(**data)
        found = output(amp, groups, (), data, result)
        divergence = Divergence(result, None)
        for group in groups:
            with group.rounding():
                assert found[group.name] == divergence.of(amp.forward(**data)), group.name


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "hessian"}, "measure='hessian': expected one of gradient, local, output, metric"),
        ({"granularity": "model"}, "granularity='model': expected one of group, layer, block"),
        ({"measure": "metric"}, "use measure='metric' and metric= together"),
        ({"metric": lambda model: 1.0}, "use measure='metric' and metric= together"),
        ({"measure": "local", "loss": lambda output: output}, "does not take loss=; only measure='gradient' does"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    quantizer = _quantizer(model, [x])
    with pytest.raises(SensitivityError, match=message):
        quantizer.amp(model, **options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda output: output,
            r"loss\(output\) returned a tensor of shape \(8, 32\); expected one floating-point number",
        ),
        (lambda output: 1.0, r"loss\(output\) returned float; expected one floating-point number as a tensor"),
        (lambda output: output.detach().sum(), r"loss\(output\) does not depend on the model's output"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    amp = _quantizer(model, [x]).amp(model, loss=loss)
    with torch.no_grad(), pytest.raises(SensitivityError, match=message):
        amp(x)


def test_an_output_that_is_not_finite() -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    amp = _quantizer(model, [x]).amp(model)
    with torch.no_grad(), pytest.raises(SensitivityError, match="is not finite, because the output has NaN or inf"):
        amp(x * torch.inf)


class Masked(nn.Module):
    """torch's own attention with a mask of -inf, and with weights, as it is by default: ``baddbmm`` adds the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attend, self.kind = nn.MultiheadAttention(32, 4, batch_first=True), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        masks: dict[str, Any] = {
            "bool": {"attn_mask": hidden},
            "float": {"attn_mask": torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)},
            "lowest": {"attn_mask": torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)},
            "padding": {"key_padding_mask": (torch.arange(x.shape[1]) > 5).expand(len(x), -1)},
        }
        attended: Tensor = self.attend(x, x, x, **masks[self.kind])[0]
        return attended


@pytest.mark.parametrize("measure", ["gradient", "local", "output"])
@pytest.mark.parametrize("kind", ["bool", "float", "lowest", "padding"])
def test_scores_that_a_mask_hides_do_not_change(kind: str, measure: str) -> None:
    torch.manual_seed(0)
    model, x = Masked(kind).eval(), torch.randn(8, 8, 32)
    q = make_calibrated(model, [x], backend="openvino")
    q.amp(model, measure=measure)(x)
    assert all(0 <= row.error < 1 for row in q.sensitivity)
    assert any(row.error > 0 for row in q.sensitivity)


@dataclass
class Returned:
    logits: Tensor
    states: list[Tensor]


class ReturnsDataclass(nn.Module):
    """A model, and blocks in it, that return a dataclass of which torch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Returned:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).logits)
        return Returned(self.head(states[-1]), states[1:])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Returned:
        made = torch.relu(self.linear(x))
        return Returned(made + x, [made])


@pytest.mark.parametrize("measure", ["gradient", "local", "output"])
def test_a_dataclass_is_measured_as_a_mapping_is(measure: str) -> None:
    class ReturnsMapping(ReturnsDataclass):
        def forward(self, x: Tensor) -> Any:
            return vars(super().forward(x))

    errors = []
    for kind in (ReturnsDataclass, ReturnsMapping):
        torch.manual_seed(0)
        model, data = kind().eval(), [torch.randn(8, 16) for _ in range(2)]
        q = Quantizer(preset="fast", backend="openvino")
        q.calibrate(model, data, progress=False)
        errors.append(_errors(q, model, data, measure=measure))
        assert q.diagnose(model, data)
    assert errors[0] == errors[1]
