"""Every kind of function: nets written in one way each, and source that cannot be rewritten."""

from __future__ import annotations

import calendar
import copy
import functools
import inspect
import linecache
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import net_helpers
import nets
import pytest
import torch
from daily import some_daily
from helpers import Snapshot, assert_same, imported
from nets import NETS
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.plan.reasons import ReasonCode

X = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
IDS = [name for name, *_ in NETS]

# Names of the products that are quantized, by net.
SITES = {
    "closures": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1",
    "super": (
        "SuperBase.forward.matmul_0 SuperBase.gram.matmul_0 forward.matmul_0 gram.matmul_0 gram.matmul_1 "
        "linear.forward.linear_0"
    ),
    "properties": "linear.forward.linear_0 mix.matmul_0",
    "expressions": "linear.forward.linear_0 mix.matmul_0 mix.matmul_2",
    "products": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4",
    "comprehensions": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2",
    "lambdas": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 scores.matmul_0",
    "partials": (
        "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 product.matmul_0 product.matmul_1 product.matmul_2 "
        "scores.matmul_0"
    ),
    "left-alone": "linear.forward.linear_0 mix.matmul_1",
    "imported": "attend.matmul_0 linear.forward.linear_0 scores.matmul_0",
    "recursion": "linear.forward.linear_0 odd.matmul_0 odd.matmul_1 power.matmul_0 power.matmul_1",
    "signatures": (
        "keywords.matmul_0 keywords.matmul_1 linear.forward.linear_0 nothing.matmul_0 nothing.matmul_1 "
        "positional.matmul_0 positional.matmul_1 starred.matmul_0 starred.matmul_1"
    ),
    "statics": (
        "linear.forward.linear_0 outside.matmul_0 outside.matmul_1 static.matmul_0 static.matmul_1 "
        "through.matmul_0 through.matmul_1"
    ),
    "template-static": "linear.forward.linear_0 mix.matmul_0 step.matmul_0 step.matmul_1",
    "template-method": "linear.forward.linear_0 mix.matmul_0 step.matmul_0",
    "decorated": (
        "decorated.matmul_0 decorated.matmul_1 ignored.matmul_0 last.matmul_0 last.matmul_1 "
        "linear.forward.linear_0 mix.matmul_0 mix.matmul_1"
    ),
    "checkpointed": "attend.matmul_0 block.matmul_0 linear.forward.linear_0 scores.matmul_0",
    "tied": "first.forward.linear_0 forward.matmul_0 second.forward.linear_0",
    "hooked": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4",
    "lora": "base_layer.forward.linear_0 lora_A.default.forward.linear_0 lora_B.default.forward.linear_0",
    "children": "first.forward.linear_0 forward.matmul_0 forward.matmul_1 second.forward.linear_0",
    "registry": (
        "_module_first.matmul_0 _module_first.matmul_1 linear.forward.linear_0 mix.matmul_0 mix.matmul_1 "
        "scores.matmul_0"
    ),
    "passed-on": "linear.forward.linear_0 mix.matmul_0",
    "namesakes": (
        "Namesakes.scores.matmul_0 Namesakes.scores.matmul_1 linear.forward.linear_0 mix.matmul_0 "
        "net_helpers.scores.matmul_0 nets.scores.matmul_0"
    ),
    "generators": (
        "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4 rows.matmul_0"
    ),
}
PASSED_ON = ("power.matmul_0", "power.matmul_1", "attend.matmul_0", "scores.matmul_0")
# Products that are not quantized, with the reason.
SKIPPED = {
    "properties": {"square.matmul_0": "all of its operands are parameters"},
    "template-method": dict.fromkeys(
        ("TemplateStatic.step.matmul_0", "TemplateStatic.step.matmul_1"), "never ran in calibration"
    ),
    "expressions": {"mix.matmul_1": "never ran in calibration"},
    "left-alone": {
        "mix.matmul_0": "a call inside an f-string is not quantized; to quantize it, compute it before the f-string"
    },
    "registry": {name: ReasonCode.PASSED_ON.text(function="power") for name in PASSED_ON[:2]},
    "passed-on": {name: ReasonCode.PASSED_ON.text(function=name.partition(".")[0]) for name in PASSED_ON},
}


def _make(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def _quantizer() -> Quantizer:
    return Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})


def _check(model: nn.Module, *expected: str, inputs: tuple[Tensor, ...] = (X,)) -> Quantizer:
    """A proxy is exact, ``expected`` are quantized, and that makes a difference."""
    before = Snapshot.of(model.eval())
    q = _quantizer()
    with torch.no_grad():
        output = model(*inputs)
        assert_same(q.proxy(model)(*inputs), output)
        calib = q.calib(model)
        assert_same(calib(*inputs), output)
        frozen = q.quantize(model)(*inputs)
    assert frozen.isfinite().all()
    assert {row.name for row in q.coverage.quantized} == set(expected)
    assert torch.equal(frozen, output) == (not expected)
    before.assert_unchanged(model)
    return q


@pytest.mark.parametrize(("name", "make", "inputs"), NETS, ids=IDS)
def test_nets(name: str, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    functions = {module: dict(vars(module)) for module in (nets, net_helpers)}
    q = _check(_make(make), *SITES[name].split(), inputs=inputs)
    rows = [row for row in q.coverage if not row.quantized and row.kind != "residual_add"]
    assert {row.name: row.reason for row in rows} == SKIPPED.get(name, {})
    for module, before in functions.items():
        assert {key: value for key, value in vars(module).items() if key in before} == before


@pytest.mark.parametrize(("name", "make", "inputs"), NETS, ids=IDS)
def test_gradients_in_train_mode(name: str, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    model = _make(make).train()
    proxy = Quantizer(preset="plain").proxy(model)
    results = []
    for net in (model, proxy):
        net.zero_grad()
        torch.manual_seed(7)
        net(*inputs).square().sum().backward()
        results.append({key: None if p.grad is None else p.grad.clone() for key, p in net.named_parameters()})
    assert any(gradient is not None for gradient in results[0].values())
    assert_same(results[0], results[1])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "name", some_daily(["imported", "template-method", "partials", "statics", "registry", "super"], 3)
)
def test_copies_and_compiled_proxies_lend_as_well(name: str) -> None:
    (_, make, inputs) = NETS[IDS.index(name)]
    model = _make(make)
    q = _quantizer()
    with torch.no_grad():
        q.calibrate(model, [inputs[0]])
        frozen = q.quantize(model)
        expected = frozen(*inputs)
        assert not torch.equal(expected, model(*inputs))
        assert_same(copy.deepcopy(frozen)(*inputs), expected)
        assert_same(pickle.loads(pickle.dumps(frozen))(*inputs), expected)
        assert_same(torch.compile(frozen, fullgraph=True, backend="eager")(*inputs), expected)
        for strict in (False, True):
            assert_same(torch.export.export(frozen, inputs, strict=strict).module()(*inputs), expected)
        assert_same(torch.jit.trace(frozen, inputs)(*inputs), expected)


def test_pythons_own_functions_are_not_searched() -> None:
    class Dated(nets.Net):
        def mix(self, x: Tensor) -> Tensor:
            return x @ x.T * calendar.leapdays(2000, 2005)  # which adds

    q = _check(Dated(), "linear.forward.linear_0", "mix.matmul_0")
    assert [row.name for row in q.coverage] == ["linear.forward.linear_0", "mix.matmul_0"]


# -- source that is not in a file, or not what runs ----------------------------------------------------------------

_TEXT = """
import torch
from torch import nn
def attend(q, k):
    return torch.matmul(q, k.T)
class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return attend(self.linear(x), x)
"""
_MADE = ("linear.forward.linear_0", "attend.matmul_0")


def _reasons(q: Quantizer) -> dict[str, str]:
    return {row.name: row.reason for row in q.coverage if not row.quantized and row.kind != "residual_add"}


def test_a_class_of_remote_code(tmp_path: Path) -> None:
    """What ``trust_remote_code`` does: a file under a dotted name that no package on disk has."""
    _check(imported(tmp_path, "transformers_modules.user.repo_0123.modeling", _TEXT).Made(), *_MADE)


@pytest.mark.parametrize("name", ["<ipython-input-7-functions>", "<made by exec>"])
def test_a_class_with_its_source_in_linecache(name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache[name] = (len(_TEXT), None, _TEXT.splitlines(keepends=True), name)
    exec(compile(_TEXT, name, "exec"), namespace)
    _check(namespace["Made"](), *_MADE)


def test_a_helper_without_source_is_reported(tmp_path: Path) -> None:
    module = imported(tmp_path, "sample_no_source", _TEXT)
    exec(compile("def attend(q, k): return q @ k.T", "<nowhere>", "exec"), vars(module))
    q = _check(module.Made(), "linear.forward.linear_0")
    assert _reasons(q) == {
        "(the model)": "<nowhere>: the source cannot be read, so its functions are not quantized; "
        "define them in a file or a notebook cell"
    }


def test_builtins_stay_as_they_are() -> None:
    class Builtin(nets.Net):
        mix = torch.tanh  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) @ x.T

    _check(Builtin(), "linear.forward.linear_0", "forward.matmul_0")


def test_a_file_that_changed_since_import(tmp_path: Path) -> None:
    module = imported(tmp_path, "sample_file_changed", _TEXT)
    path = Path(str(module.__file__))
    path.write_text(_TEXT.replace("k.T)", "k.T) * 7"))
    q = _check(module.Made(), "linear.forward.linear_0")
    why = f"{path}: attend differs from the loaded code; was the file changed after import?"
    assert _reasons(q) == {"(the model)": why}


def test_lines_that_moved_since_import(tmp_path: Path) -> None:
    module = imported(tmp_path, "sample_lines_moved", _TEXT)
    path = Path(str(module.__file__))
    path.write_text("import math\n" + _TEXT)
    q = _check(module.Made(), "linear.forward.linear_0")
    assert "Made.forward differs from the loaded code; was the file changed after import?" in _reasons(q)["(the model)"]


def test_code_that_was_replaced(tmp_path: Path) -> None:
    def other(self: Any, x: Tensor) -> Any:
        return self.linear(x) * 3

    module = imported(tmp_path, "sample_code_replaced", _TEXT)
    code = module.Made.forward.__code__
    for replaced in (code.replace(co_consts=(*code.co_consts, 1)), other.__code__):
        module.Made.forward.__code__ = replaced
        q = _check(module.Made(), "linear.forward.linear_0")
        (why,) = _reasons(q).values()
        assert "differs from the loaded code" in why or "defined inside another function" in why


def test_a_helper_that_is_patched_after_the_proxy_was_made(tmp_path: Path) -> None:
    module = imported(tmp_path, "sample_patched_helper", _TEXT)
    model = module.Made().eval()
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))
    module.attend = lambda q, k: (q @ k.T) * 2
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))


# -- lending, in special cases -------------------------------------------------------------------------------------


def _fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(x: Tensor) -> Any:
        return function(x)

    return wrapper


def _filtered(function: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(function).parameters

    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{name: value for name, value in keywords.items() if name in known and name[0] != "_"})

    return wrapper


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if keywords:
            raise TypeError(f"unexpected {keywords}")
        return function(*args, **keywords)

    return wrapper


def _dropped(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args)

    return wrapper


def _sometimes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Tensor, **keywords: Any) -> Any:
        return function(x) if x.dim() == 2 else function(x, **keywords)

    return wrapper


def _shown(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(x: Tensor, **keywords: Any) -> Any:
        assert set(locals()) == {"x", "keywords", "function"}
        assert not locals()["keywords"]
        return function(x, **keywords)

    return wrapper


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(x: Tensor, **keywords: Any) -> Any:
        def run(**keywords: Any) -> Any:
            return function(x, **keywords)

        return run()

    return wrapper


def gram(x: Tensor) -> Tensor:
    """A helper without a module argument; the tests decorate it."""
    return x @ x.T


def _calls_gram() -> nn.Module:
    class Calls(nets.Net):
        def mix(self, x: Tensor) -> Tensor:
            return gram(x)

    return Calls()


_OTHER_DECORATORS = (_fixed, _filtered, _strict, _dropped, _sometimes, _shown, _again)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        assert list(inspect.signature(function).parameters) == ["x"]
        return function(*args) * calls

    return wrapper


@pytest.mark.parametrize("decorator", _OTHER_DECORATORS, ids=lambda decorator: decorator.__name__)
def test_a_decorator_that_may_hand_no_module_on(decorator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees no module: that would be dropped, or be an argument too many."""
    monkeypatch.setitem(globals(), "gram", decorator(gram))
    _check(_calls_gram(), "linear.forward.linear_0", "gram.matmul_0")


def test_a_decorator_with_a_state_has_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "gram", _counted(gram))
    model = _calls_gram().eval()
    with torch.no_grad():
        one = model(X)
        proxy = _quantizer().proxy(model)
        assert_same([proxy(X), model(X), proxy(X)], [one * 2, one * 3, one * 4])


def test_modules_that_share_a_decorated_helper_have_sites_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "gram", _strict(gram))
    first = _calls_gram()
    model = nn.Sequential(first, nn.AdaptiveAvgPool1d(32), type(first)()).eval()
    q = _check(model, *(f"{n}.{name}" for n in "02" for name in ("linear.forward.linear_0", "gram.matmul_0")))
    first_site, second_site = (q.plan[f"{n}.gram.matmul_0"].operands[0] for n in "02")
    assert not torch.equal(first_site.scale, second_site.scale)
    frozen = q.quantize(model)
    with torch.no_grad():
        expected = frozen(X)
        copied = copy.deepcopy(frozen)
        # What a copy computes with must be its own.
        frozen[0].site_gram_matmul_0.active = False
        assert torch.equal(copied(X), expected)
        frozen[0].site_gram_matmul_0.active = True
        # A shallow copy has the attributes of the other, as a replica of DataParallel has.
        shallow = copy.copy(frozen[0])
        shallow._modules = {**frozen[0]._modules, "site_gram_matmul_0": nn.Identity()}
        with pytest.raises(TypeError, match="forward"):
            shallow(X)
        assert torch.equal(frozen(X), expected)


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Tensor, /, *args: Any, **keywords: Any) -> Any:
        def run() -> Any:
            return function(x, *args, **keywords)

        return run() if x.dim() == 2 else function(x, **keywords)

    return wrapper


def test_a_decorator_that_hands_all_keywords_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "gram", torch.no_grad()(_typed(gram)))
    _check(_calls_gram(), "linear.forward.linear_0", "gram.matmul_0")


def test_a_function_kept_as_an_attribute_is_reported() -> None:
    class Keeps(nets.Net):
        def __init__(self) -> None:
            super().__init__()
            self.mix = functools.partial(net_helpers.scores, scale=2.0)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return self.mix(y, y)  # type: ignore[call-arg]

    q = _check(Keeps(), "linear.forward.linear_0")
    assert _reasons(q) == {"(the model)": ReasonCode.KEPT_FUNCTION.text(name="mix")}


def test_a_method_made_static_outside_of_its_definition_is_reported() -> None:
    class Static(nets.Net):
        def product(x: Tensor, y: Tensor) -> Tensor:  # type: ignore[misc]
            return x @ y

        product = staticmethod(product)  # type: ignore[assignment,arg-type]

        def mix(self, x: Tensor) -> Tensor:
            return self.product(x, x.T)  # type: ignore[call-arg,arg-type,return-value]

    q = _check(Static(), "linear.forward.linear_0")
    assert _reasons(q) == {"(the model)": ReasonCode.LATE_DECORATOR.text(name="product")}


def test_an_attribute_that_hides_a_static_method() -> None:
    """What is called is what the module has, not what its class says."""
    model = nets.TemplateStatic()
    model.step = torch.tanh  # type: ignore[method-assign]
    q = _check(model, "linear.forward.linear_0", "mix.matmul_0")
    assert set(_reasons(q).values()) == {"never ran in calibration"}
