"""What a quantizer refuses: what is done, the class of the error, and the words that tell it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp, batch, tiny
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ConfigError, ProxyError, QuantizerError, SensitivityError
from quantizer.observe.float16_modules import Float32Modules

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
NAN = X.clone().index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(math.nan))


def _plain(**options: Any) -> Quantizer:
    return Quantizer(preset="plain", **options)


def _calibrated(model: nn.Module | None = None, *data: Any, **options: Any) -> Quantizer:
    q = _plain(**options)
    # The quantizer does not keep the model alive.
    q.model = (model or Mlp()).eval()  # type: ignore[attr-defined]
    q.calibrate(q.model, data or [X])
    return q


def _not_run(call: str) -> None:
    q, model = _plain(), Mlp().eval()
    q.calib(model)
    getattr(q, call)(model)


def _failed() -> None:
    q, model = _plain(), Mlp().eval()
    with pytest.raises(CalibrationError, match="shapes"):
        q.calibrate(model, [X[:, 1:]])
    q.quantize(model)


def _measured(*data: Tensor, model: nn.Module | None = None) -> Quantizer:
    """The groups of a model were measured on data."""
    q = _calibrated(model, sites={"residual_add": True})
    q.measuring = q.amp(q.model)  # type: ignore[attr-defined]
    for x in data:
        q.measuring(x)
    return q


def _fall_back(data: tuple[Tensor, ...] = (X,), **asked: Any) -> None:
    q = _measured(*data)
    try:
        q.fallback(q.measuring, **asked)
    finally:
        assert len(q.coverage.quantized) == 3


class Around(Mlp):
    """Calls its forward, not through torch's own call."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Itself(nn.Linear):
    """Cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        return self


def _proxy_with(name: str, value: Any) -> None:
    model = Mlp().eval()
    setattr(model.up, name, value)
    _plain().proxy(model)


def _calibrated_with_a_mask() -> None:
    _calibrated(tiny("bert"), {"attention_mask": batch("bert")["attention_mask"]})


def _calibrated_with_a_log() -> None:
    _calibrated(net("self.b(self.a(x).abs().neg().log())", a=linear(), b=linear()), X[:0], X)


def _export_of_a_simulation() -> None:
    q = _calibrated(backend="tensorrt-rtx")
    q.export(q.simulate(q.model), "never.onnx", X)


def _proxy_of(kind: str, call: str) -> None:
    q = _calibrated()
    getattr(q, call)(q.calib(q.model, resume=True) if kind == "calib" else getattr(q, kind)(q.model))


def _rule(rules: dict[str, list[str]], model: nn.Module | None = None, call: str = "calib") -> None:
    getattr(_plain(exclude=rules), call)(model or Mlp())


UNCALIBRATED = r"nothing was calibrated yet: run data through calib\(model\)"
SERVED = "this Quantizer is bound to another Mlp; make one Quantizer for each"
NO_TYPE = r"exclude\.module_types.*matches nothing: no module of this type"
LAYERS = nn.ModuleDict({"layer": nn.ModuleList([nn.ModuleDict({"attention": linear()})])})

Faults = list[tuple[str, Callable[[], Any], str]]
CALIBRATION: Faults = [
    ("quantize before calib", lambda: _plain().quantize(Mlp()), UNCALIBRATED),
    ("amp before calib", lambda: _plain().amp(Mlp()), UNCALIBRATED),
    ("quantize without data", lambda: _not_run("quantize"), UNCALIBRATED),
    ("amp without data", lambda: _not_run("amp"), UNCALIBRATED),
    ("coverage", lambda: _plain().coverage, UNCALIBRATED),
    ("ranges", lambda: _plain().ranges, UNCALIBRATED),
    ("plan", lambda: _plain().plan, UNCALIBRATED),
    ("histogram", lambda: _plain().histogram("up.forward.linear_0.input"), "nothing was calibrated yet"),
    ("scales", lambda: _plain().scales(), "nothing was calibrated yet"),
    ("load_scales", lambda: _plain().load_scales({}), "nothing was calibrated yet"),
    ("a failed calibration", _failed, UNCALIBRATED),
    ("no batch", lambda: _plain().calibrate(Mlp().eval(), []), "data is empty: at least one batch"),
    ("a missing input", lambda: _calibrated(None, {"y": X}), r"batch 0 .*\['y'\].*run through Mlp\.forward"),
    ("a missing input of BERT", _calibrated_with_a_mask, r"\['attention_mask'\]\) does not run .*BertModel\.forward"),
    ("a wrong shape", lambda: _calibrated(None, X, X[:, 1:]), r"batch 1 .*\(a Tensor\).*Mlp\.forward.*shapes"),
    ("NaN in an input", lambda: _calibrated(None, {"x": X}, {"x": NAN}), "batch 1 .*'x' has NaN"),
    ("NaN in an argument", lambda: _calibrated(None, NAN), "batch 0 .*'argument 0' has NaN"),
    ("NaN of the model's own", _calibrated_with_a_log, r"batch 1 .*b\.forward\.linear_0\.input: NaN among the values"),
    ("train mode", lambda: _plain().calib(Mlp()).train()(X), r"the proxy is in train mode.*call \.eval\(\)"),
    ("resume", lambda: _plain().calib(Mlp(), resume=True), r"resume=True\) needs an earlier calib\(\)"),
    ("a call around forward", lambda: _calibrated(Around()), "Around.__call__ does not call forward through"),
]
PROXY: Faults = [
    ("calib of another model", lambda: _calibrated().calib(Mlp().eval()), SERVED),
    ("amp of another model", lambda: _calibrated().amp(Mlp().eval()), SERVED),
    ("quantize of another model", lambda: _calibrated().quantize(Mlp().eval()), SERVED),
    *(
        (
            f"{call} of {kind}",
            lambda kind=kind, call=call: _proxy_of(kind, call),
            "already a proxy; pass the float model",
        )
        for kind in ("proxy", "calib", "quantize")
        for call in ("proxy", "calib", "amp", "quantize")
    ),
    (
        "a part of a proxy",
        lambda: _plain().proxy(_plain().proxy(Mlp()).up),
        "linear_0 is already part of a proxy",
    ),
    ("around a proxy", lambda: _plain().proxy(nn.Sequential(_plain().proxy(Mlp()))), "0 is already part of a proxy"),
    ("no module", lambda: _plain().proxy({}), r"torch\.nn\.Module, got dict"),
    ("no module to calibrate", lambda: _plain().calib({}), r"torch\.nn\.Module, got dict"),
    ("a site's name", lambda: _proxy_with("site_forward_linear_0", 1), "site_forward_linear_0.*rename the attribute"),
    ("no copy", lambda: _proxy_with("lock", threading.Lock()), "this Mlp cannot be copied.*lock.*__deepcopy__"),
    ("its own copy", lambda: _plain().calib(nn.Sequential(Itself(32, 32))), "0 returns itself as its copy"),
    ("export of a simulation", _export_of_a_simulation, r"export\(\) expects the model that quantize\(\) returned"),
]
SENSITIVITY: Faults = [
    ("before amp", lambda: _plain().sensitivity, r"nothing was measured yet: run the proxy that amp\(\)"),
    ("before data", lambda: _measured().sensitivity, "nothing was measured yet"),
    ("fallback before data", lambda: _fall_back(data=(), num=1), "nothing was measured yet; run"),
    ("amp in train mode", lambda: (q := _calibrated()).amp(q.model).train()(X), r"train mode.*call \.eval\(\)"),
    ("only zeros", lambda: _measured(0 * X, model=linear(bias=False)), "all zeros on this batch"),
    ("no floats", lambda: _measured(X, model=net("self.a(x).argmax(-1)", a=linear())), "no floating-point tensor"),
    (
        "nothing",
        lambda: _fall_back(),
        "takes one of num, ratio, names, max_drop, min_speedup; got num=None",
    ),
    ("num=99", lambda: _fall_back(num=99), "num=99: only 4 groups are quantized"),
]
RULE: Faults = [
    *(
        (name, lambda name=name: _rule({"module_types": [name]}), NO_TYPE)
        # Sites are children of their modules, but no modules of the user's.
        for name in ("Linea", "linear", "tensorflow.Linear", "torch.Mlp", "Linear.torch", "Site", "OperandQuantizer")
    ),
    ("the name of a site", lambda: _rule({"names": ["up.site_forward_linear_0"]}), "matches nothing"),
    ("the name of a quantizer", lambda: _rule({"names": ["**._input_quantizer"]}), "matches nothing"),
    ("almost a name", lambda: _rule({"names": ["layer.0.atention"]}, LAYERS), r"did you mean 'layer\.0\.attention'"),
    ("inspect", lambda: _rule({"names": ["nope"]}, call="inspect"), "'nope' matches nothing"),
    ("an operand of a product", lambda: _rule({"sites": ["up.forward.linear_0.input"]}), "no site of this name"),
    ("a module", lambda: _rule({"sites": ["up"]}), r"it is a module, for exclude\.names, .* 'up\.forward\.linear_0'$"),
]
FAULTS = {
    f"{error.__name__}: {name}": (error, run, words)
    for error, table in (
        (CalibrationError, CALIBRATION),
        (ProxyError, PROXY),
        (SensitivityError, SENSITIVITY),
        (ConfigError, RULE),
    )
    for name, run, words in table
}


@pytest.mark.parametrize(("error", "run", "words"), FAULTS.values(), ids=FAULTS)
def test_what_is_refused(error: type[Exception], run: Callable[[], Any], words: str) -> None:
    with pytest.raises(error, match=words):
        run()


def test_damaged_regions_are_refused() -> None:
    with pytest.raises(QuantizerError, match="the record of modules beyond float16 is damaged"):
        Float32Modules.from_plain({"wide": {"a": "large"}, "computing": [], "masked": []})


def test_a_loaded_quantizer_refuses_a_model_with_other_sites(tmp_path: Any) -> None:
    loaded = Quantizer.load(_calibrated().save(tmp_path / "state"))
    words = r"the calibration belongs to another model: 8 sites differ, the first is 'body\._conv_forward\.conv2d_0'"
    with pytest.raises(ProxyError, match=words):
        loaded.quantize(ConvNet())
