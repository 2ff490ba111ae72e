"""What one sees of rewritten code: tracebacks, ``inspect.getsource``, the diff; and code that is hard to rebuild."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, imported
from source_tools import without_live
from torch import Tensor, nn

from quantizer import Quantizer

X = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str, str], types.ModuleType]]:
    """``load(name, text)``: a module of this text, forgotten afterwards."""
    before = set(sys.modules)
    yield lambda name, text: imported(tmp_path, name, text)
    for name in set(sys.modules) - before:
        if name.startswith("sample_"):
            del sys.modules[name]


def _check(model: nn.Module, *expected: str) -> Quantizer:
    """A proxy of the model is exact, and its products are the expected sites, all quantized."""
    model.eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
    with torch.no_grad():
        assert_same(q.proxy(model)(X), model(X))
        q.calibrate(model, [X])
        q.quantize(model)(X)
    assert {row.name for row in q.coverage.quantized} == set(expected)
    return q


# -- what one sees -------------------------------------------------------------------------------------------------

_FAILS = '''"""A module."""
import torch
from torch import nn


class Fails(nn.Module):
    """Its second product does not fit."""

    def forward(self, x):
        # A comment, kept.
        y = x @ x.T

        return torch.matmul(
            y,
            x[:, :3],
        ) @ x
'''


def test_a_traceback_shows_the_rewritten_text_at_the_original_line(load: Any) -> None:
    module = load("sample_fails", _FAILS)
    model = module.Fails()
    proxy = Quantizer(preset="plain").proxy(model)
    with pytest.raises(RuntimeError, match="shapes") as expected:
        model(X)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        proxy(X)
    original = next(f for f in traceback.extract_tb(expected.tb) if f.name == "forward")
    frame = next(f for f in traceback.extract_tb(caught.tb) if f.name == "forward" and "sample_fails" in f.filename)
    assert frame.filename == "<quantizer sample_fails>"
    assert frame.lineno == original.lineno
    assert frame.line is not None
    assert "self.site_forward_matmul_" in frame.line
    linecache.checkcache()
    assert linecache.getline("<quantizer sample_fails>", 11) == "        y = self.site_forward_matmul_0(x, x.T)\n"


def test_getsource_shows_the_rewritten_method(load: Any) -> None:
    module = load("sample_source", _FAILS)
    proxy = Quantizer(preset="plain").proxy(module.Fails())
    source = inspect.getsource(type(proxy).forward)
    original = inspect.getsource(module.Fails.forward)
    assert "# A comment, kept." in source
    assert "y = self.site_forward_matmul_0(x, x.T)" in source
    assert "site_" not in original
    assert inspect.getsourcelines(type(proxy).forward)[1] == inspect.getsourcelines(module.Fails.forward)[1] == 9
    assert len(source.splitlines()) == len(original.splitlines())


def test_positions_of_instructions_are_on_the_original_lines(load: Any) -> None:
    module = load("sample_positions", _FAILS)
    proxy = Quantizer(preset="plain").proxy(module.Fails())

    def lines(function: Any) -> set[int]:
        return {line for line, *_ in function.__code__.co_positions() if line is not None}

    assert lines(type(proxy).forward) == lines(module.Fails.forward)


def test_the_diff_is_a_readable_patch(load: Any) -> None:
    module = load("sample_diff", _FAILS)
    diff = Quantizer(preset="plain").diff(nn.Sequential(module.Fails(), nn.Linear(32, 32)))
    assert "-        y = x @ x.T\n+        y = self.site_forward_matmul_0(x, x.T)\n" in diff
    assert "+        return self.site_forward_linear_0(F.linear, input, self.weight, self.bias)" in diff
    assert f"--- {module.__file__}" in diff
    removed = [line for line in diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    added = [line for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(removed) == len(added) == 4


def test_a_diff_of_a_model_without_sites() -> None:
    assert Quantizer(preset="plain").diff(nn.Sequential(nn.ReLU())) == ""


def test_nothing_on_disk_or_in_the_library_changes(load: Any) -> None:
    module = load("sample_untouched", _FAILS)
    path = Path(module.__file__)
    before, names = path.read_bytes(), dict(vars(module))
    code = module.Fails.forward.__code__
    linear = nn.Linear.forward
    Quantizer(preset="plain").proxy(nn.Sequential(module.Fails(), nn.Linear(3, 3)))
    assert path.read_bytes() == before
    assert {name: value for name, value in vars(module).items() if name in names} == names
    assert module.Fails.forward.__code__ is code
    assert nn.Linear.forward is linear
    assert not (path.parent / "__pycache__" / "quantizer").exists()


# -- code that is hard to rebuild ----------------------------------------------------------------------------------


class Base(nn.Module):
    """A product that subclasses reach through ``super()``."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Middle(Base):
    """Adds a product of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y @ x


class Leaf(Middle):
    """Changes nothing, but overrides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Diamond(Leaf, Middle):
    """Two paths to one base."""


@pytest.mark.parametrize("model", [Base, Middle, Leaf, Diamond])
def test_super(model: type[nn.Module]) -> None:
    # Both functions are called forward: the base's product and the subclass's have one name.
    names = {"forward.matmul_0"}
    q = Quantizer(preset="plain", backend="openvino")
    instance = model().eval()
    assert_same(q.proxy(instance)(X), instance(X))
    q.calibrate(instance, [X])
    assert names <= {row.name for row in q.coverage}


@pytest.mark.parametrize("make", [Middle, Leaf, Diamond])
def test_products_of_base_and_subclass_are_two_sites(make: type[nn.Module]) -> None:
    """``Middle.forward`` calls ``Base.forward``; each has a product, and each gets a range of its own."""
    model = make()
    q = _check(model, "forward.matmul_0", "Base.forward.matmul_0")
    assert len(q.coverage) == 2
    assert not torch.equal(q.quantize(model)(X), model(X))
    assert q.diff(model).count("self.site_Base_forward_matmul_0(x, x.T)") == 1


def test_a_base_that_stands_for_itself_keeps_its_names() -> None:
    _check(nn.Sequential(Base(), Middle()), "0.forward.matmul_0", "1.forward.matmul_0", "1.Base.forward.matmul_0")


def test_a_base_that_is_overridden_and_not_called_has_no_sites() -> None:
    class Other(Base):
        def forward(self, x: Tensor) -> Tensor:
            return x.T @ x

    assert len(_check(Other(), "forward.matmul_0").coverage) == 1


class Left(Base):
    """A product in a function of its own, and one of its base."""

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x))

    def more(self, x: Tensor) -> Tensor:
        return x @ x.T


class Right(Base):
    """A product in forward, as its base has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ x


class Both(Left, Right):
    """``super()`` in Left is Right here: with two variants of Base it would be Base."""


def test_one_variant_of_a_base_that_is_reached_in_two_ways() -> None:
    _check(Both(), "forward.matmul_0", "more.matmul_0", "Base.forward.matmul_0")


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return wrapper


def _scaled(scale: float) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, x: Tensor) -> Any:
            return function(self, x) * scale

        return wrapper

    return decorate


class Decorated(nn.Module):
    """Two decorators around a product."""

    @_scaled(3.0)
    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class NoGrad(nn.Module):
    """A decorator of torch."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Property(nn.Module):
    """A product in a property, and one in a generator."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return sum(self.parts(x)) + self.gram

    @property
    def gram(self) -> Tensor:
        return self.x @ self.x.T

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield torch.matmul(x, x.T)


class Nested(nn.Module):
    """Products in inner functions, lambdas and comprehensions, with closure variables and defaults."""

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Tensor:
        def inner(y: Tensor, factor: float = scale) -> Tensor:
            return torch.matmul(y, x.T) * factor

        gram = lambda y: y @ x.T  # noqa: E731
        rows = [part @ x.T for part in x.split(10)]
        return inner(x) + gram(x) + torch.cat(rows) + shift


def test_decorators() -> None:
    q = _check(Decorated(), "forward.matmul_0")
    forward = type(q.proxy(Decorated())).forward
    assert forward.__name__ == "forward"
    assert "site_forward_matmul_0" in inspect.getsource(forward)
    assert inspect.signature(forward) == inspect.signature(Decorated.forward)
    _check(NoGrad(), "forward.matmul_0")


def test_a_decorator_without_wraps() -> None:
    def hiding(function: Any) -> Any:
        return lambda *args: function(*args)

    class Hidden(nn.Module):
        @hiding
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    _check(Hidden(), "forward.matmul_0")


def test_a_decorator_that_holds_the_function_in_no_cell_is_reported() -> None:
    def listing(function: Any) -> Any:
        functions = [function]
        return lambda *args: functions[0](*args)

    def marked(function: Any) -> Any:
        wrapper = listing(function)
        wrapper.__wrapped__ = function
        return wrapper

    class Listed(nn.Module):
        @listing
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    class Marked(nn.Module):
        @marked
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    for model, why in ((Listed(), "is a lambda or defined inside another function"), (Marked(), "cannot be cloned")):
        q = _check(model)
        assert [row.kind for row in q.coverage] == ["source"]
        assert why in q.coverage[0].reason


def test_a_forward_that_is_no_function_is_reported() -> None:
    class Partial(nn.Module):
        def product(self, scale: float, x: Tensor) -> Tensor:
            return x @ x.T * scale

        forward = functools.partialmethod(product, 2.0)

    q = _check(Partial())
    reasons = [row.reason for row in q.coverage if row.kind == "source"]
    assert reasons == ["its forward is a partialmethod, not a function, so it is not rewritten"]


def test_properties_and_generators() -> None:
    _check(Property(), "gram.matmul_0", "parts.matmul_0")


def test_closures_lambdas_and_comprehensions() -> None:
    _check(Nested(), "forward.matmul_0", "forward.matmul_1", "forward.matmul_2")
    proxy = Quantizer(preset="plain").proxy(Nested())
    assert_same(proxy(X, 3.0, shift=5.0), Nested()(X, 3.0, shift=5.0))


def test_a_class_made_by_a_function() -> None:
    def make(scale: float) -> nn.Module:
        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x @ x.T * scale

        return Local()

    _check(make(2.0), "forward.matmul_0")
    # Two classes of one text, with closures of their own.
    assert_same(Quantizer(preset="plain").proxy(make(3.0))(X), make(3.0)(X))


class LocalHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        class Gram:
            def of(self, x: Tensor) -> Tensor:
                return torch.matmul(x, x.T)

        return torch.matmul(Gram().of(x), x)


def test_a_class_in_a_method_that_is_no_module() -> None:
    """Its ``self`` has no sites: the call in it stays as it is, and the one around it is quantized."""
    _check(LocalHelper(), "forward.matmul_1")


_HELPERS = """
import torch
from torch import nn
import torch.nn.functional as F

SCALE = 2.0


def attention(module: nn.Module, query, key):
    return scores(module, query, key).softmax(-1) @ query


def scores(module, query, key, scale=None):
    return torch.matmul(query, key.T) * (scale or SCALE)


def again(module, x, depth):
    return x @ x.T if depth == 0 else again(module, x, depth - 1)


def bare(x):
    return x @ x.T


class Uses(nn.Module):
    def __init__(self, helper=attention):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return attention(self, self.linear(x), x)


class Recurses(nn.Module):
    def forward(self, x):
        return again(self, x, 2)


class Bare(nn.Module):
    def forward(self, x):
        return bare(x)


class Starred(nn.Module):
    def forward(self, x):
        pair = (x, x.T)
        return torch.matmul(*pair) + torch.matmul(**{"input": x, "other": x.T}) + torch.matmul(x, *[x.T])


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return F.linear(weight=self.weight, input=x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(x)
        alias = y
        y += x
        return alias, y


class Swapped(nn.Module):
    def forward(self, x):
        return x.matmul(other=x.T)
"""


def test_helpers_get_their_host_from_the_caller(load: Any) -> None:
    module = load("sample_helpers", _HELPERS)
    _check(module.Uses(), "linear.forward.linear_0", "attention.matmul_0", "scores.matmul_0")
    _check(module.Recurses(), "again.matmul_0")


def test_a_helper_without_a_module_argument_is_lent_one(load: Any) -> None:
    module = load("sample_bare", _HELPERS)
    q = _check(module.Bare(), "bare.matmul_0")
    diff = q.diff(module.Bare())
    assert "+def bare(x, *, _quantizer_host):\n" in diff
    assert "+    return _quantizer_host.site_bare_matmul_0(x, x.T)\n" in diff
    assert "+        return _quantizer_lend(bare, self)(x)\n" in without_live(diff)


def test_starred_and_keyword_arguments(load: Any) -> None:
    module = load("sample_starred", _HELPERS)
    model = module.Starred().eval()
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X])
    q.quantize(model)(X)
    assert sum(row.kind == "matmul" for row in q.coverage) == 3
    _check(module.Keywords(), "forward.linear_0")
    _check(module.Swapped(), "forward.matmul_0")


def test_in_place_addition_keeps_aliases(load: Any) -> None:
    model = load("sample_inplace", _HELPERS).InPlace().eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": True})
    with torch.no_grad():
        q.calibrate(model, [X])
        for proxy in (q.proxy(model), q.calib(model, resume=True)):
            alias, y = proxy(X)
            assert alias is y
            assert_same(y, model(X)[1])
        frozen = q.quantize(model)(X)
        assert torch.equal(frozen[0], frozen[1])


def test_a_global_that_changes_later_is_seen(load: Any) -> None:
    module = load("sample_globals", _HELPERS)
    model = module.Uses().eval()
    proxy = Quantizer(preset="plain").proxy(model)
    assert_same(proxy(X), model(X))
    module.SCALE = 5.0
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))


def test_synthetic_modules_stand_under_their_own_names(load: Any) -> None:
    module = load("sample_synthetic", _HELPERS)
    proxy = Quantizer(preset="plain").proxy(module.Uses())
    namespace = type(proxy).forward.__globals__
    assert namespace is not vars(module)
    assert sys.modules[namespace["__name__"]].__dict__ is namespace
    assert "attention" in namespace
    assert namespace["attention"] is not module.attention
    assert module.Uses.forward.__globals__ is vars(module)


# -- source that cannot be read ------------------------------------------------------------------------------------

_EXECUTED = """
import torch
from torch import nn
class Executed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return self.linear(x) @ x.T
"""


def test_a_class_without_source_is_reported_and_the_rest_works() -> None:
    namespace: dict[str, Any] = {"__name__": "sample_executed"}
    exec(compile(_EXECUTED, "<nowhere>", "exec"), namespace)
    q = _check(namespace["Executed"](), "linear.forward.linear_0")
    rows = {row.name: row.reason for row in q.coverage if not row.quantized}
    assert rows == {
        "(the model)": "<nowhere>: the source cannot be read, so its functions are not quantized; "
        "define them in a file or a notebook cell"
    }


def test_a_notebook_cell_has_its_source_in_linecache() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    name = "<ipython-input-1-sample>"
    linecache.cache[name] = (len(_EXECUTED), None, _EXECUTED.splitlines(keepends=True), name)
    exec(compile(_EXECUTED, name, "exec"), namespace)
    _check(namespace["Executed"](), "linear.forward.linear_0", "forward.matmul_0")


def test_a_notebook_cell_that_imports_is_compiled_statement_by_statement() -> None:
    text = "import torch.nn.functional as F\n" + _EXECUTED.replace("@ x.T", "@ F.relu(x).T")
    assert "F.relu" in text
    namespace: dict[str, Any] = {"__name__": "__main__"}
    name = "<ipython-input-2-sample>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    for statement in ast.parse(text).body:
        exec(compile(ast.Module([statement], []), name, "exec"), namespace)
    _check(namespace["Executed"](), "linear.forward.linear_0", "forward.matmul_0")


def test_a_file_changed_after_import_is_refused(load: Any) -> None:
    module = load("sample_changed", _EXECUTED)
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("@ x.T", "@ x.T * 7"))
    model = module.Executed().eval()
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))
    (row,) = [row for row in Quantizer(preset="plain").inspect(model) if row.kind == "source"]
    assert "Executed.forward differs from the loaded code; was the file changed after import?" in row.reason


def test_a_reloaded_module_is_read_again(load: Any) -> None:
    module = load("sample_reloaded", _EXECUTED)
    assert_same(Quantizer(preset="plain").proxy(module.Executed().eval()).linear(X).shape, X.shape)
    path = Path(module.__file__)
    path.write_text(_EXECUTED.replace("@ x.T", "@ x.T * 9"))
    os.utime(path, (1, 1))
    spec = importlib.util.spec_from_file_location("sample_reloaded", path)
    assert spec is not None
    exec(compile(path.read_text(), str(path), "exec"), vars(module))  # what importlib.reload does
    model = module.Executed().eval()
    assert_same(Quantizer(preset="plain").proxy(model)(X), model(X))
    _check(model, "linear.forward.linear_0", "forward.matmul_0")


def test_a_file_that_is_no_python(load: Any) -> None:
    module = load("sample_broken", _EXECUTED)
    Path(module.__file__).write_text("def (:")
    q = _check(module.Executed(), "linear.forward.linear_0")
    assert any("cannot be parsed" in row.reason for row in q.coverage)


def test_warnings_of_the_compiler_are_not_repeated(load: Any) -> None:
    text = _EXECUTED.replace("return self", "'\\d'; 1 is 1\n        return self")
    assert "'\\d'; 1 is 1" in text
    with pytest.warns((DeprecationWarning, SyntaxWarning)):
        module = load("sample_warns", text)
    _check(module.Executed(), "linear.forward.linear_0", "forward.matmul_0")
