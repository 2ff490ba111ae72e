"""Small nets, each of which exercises one way of writing functions: ``NETS`` lists them.

Each takes and gives a float tensor [20, 32], has a product in every function that matters, and is written without
thought of being rewritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import net_helpers
import torch
from net_helpers import attend as imported
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Net(nn.Module):
    """A linear in front, so that each net trains; subclasses define ``mix``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linear(x))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Closures(Net):
    """An inner function with closure variables, a default and a nested function."""

    def mix(self, x: Tensor) -> Tensor:
        scale = 0.1

        def outer(y: Tensor, factor: float = scale) -> Tensor:
            def inner(z: Tensor) -> Tensor:
                return z @ x.T * factor

            return torch.matmul(inner(y).softmax(-1), x) * scale

        return outer(x)


class SuperBase(nn.Module):
    """A product in ``forward``, and one in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.gram(self.linear(x)) @ x

    def gram(self, x: Tensor) -> Tensor:
        return x @ x.T


class Super(SuperBase):
    """Both with ``super()`` and products of its own, of the same names."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gram(x) @ super().forward(x)

    def gram(self, x: Tensor) -> Tensor:
        return (super().gram(x) @ x @ x.T).softmax(-1)


class Properties(Net):
    """A property that computes."""

    def mix(self, x: Tensor) -> Tensor:
        return x @ self.square

    @property
    def square(self) -> Tensor:
        return self.linear.weight @ self.linear.weight.T


class Expressions(Net):
    """Conditional expressions, over several lines, with comments between."""

    def mix(self, x: Tensor) -> Tensor:
        y = (
            x @ self.linear.weight  # the usual way
            if x.dim() == 2
            else torch.matmul(  # never
                x, x
            )
        )
        return (
            y
            # A comment before the operator.
            @ self.linear.weight
        ) if y.shape[0] > 1 else y  # fmt: skip


class Products(Net):
    """Products of products, with and without parentheses."""

    def mix(self, x: Tensor) -> Tensor:
        return (x @ (x.T @ x) @ self.linear.weight).matmul(x.T @ x) * 1e-3


class Comprehensions(Net):
    """List and generator comprehensions, and a condition in one."""

    def mix(self, x: Tensor) -> Tensor:
        rows = [part @ self.linear.weight for part in x.split(5) if (part @ part.T).sum() > -1e9]
        return torch.cat([*rows]) + sum(part.T @ part for part in x.split(10)).mean()  # type: ignore[union-attr]


class Lambdas(Net):
    """Lambdas, kept in a variable and passed on, that call a helper too."""

    def mix(self, x: Tensor) -> Tensor:
        gram = lambda y, w=self.linear.weight: y @ w  # noqa: E731
        return torch.cat(list(map(lambda part: net_helpers.scores(part, x) @ gram(x), x.split(5))))  # noqa: C417


class Partials(Net):
    """``functools.partial`` of a method, of a function and of ``torch.matmul``."""

    def mix(self, x: Tensor) -> Tensor:
        method = functools.partial(self.product, x)
        helper = functools.partial(net_helpers.scores, x, scale=0.1)
        product = functools.partial(torch.matmul, x)
        return product(method(x.T @ x)) + helper(x) @ x

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(y, x.T) @ x @ self.linear.weight


class LeftAlone(Net):
    """An f-string, whose product stays, and starred arguments."""

    def mix(self, x: Tensor) -> Tensor:
        text = f"{(x @ x.T).shape[0]} rows"
        pair = (x, self.linear.weight)
        return torch.matmul(*pair) * len(text)


class Imported(Net):
    """Helpers of another module, by name and through the module."""

    def mix(self, x: Tensor) -> Tensor:
        return imported(x, x, x) + net_helpers.attend(query=x, key=x, value=x) + around(x)


def around(x: Tensor) -> Tensor:
    """Calls a helper that calls a helper, and has no product itself."""
    return imported(*(x, x), value=x)


def power(x: Tensor, n: int) -> Tensor:
    """Calls itself."""
    return x if n == 0 else power(x @ (x.T @ x) * 1e-2, n - 1)


def even(x: Tensor, n: int) -> Tensor:
    """Calls a function that calls it."""
    return x if n == 0 else odd(x, n - 1)


def odd(x: Tensor, n: int) -> Tensor:
    """Calls a function that calls it."""
    return even(x @ (x.T @ x) * 1e-2, n - 1)


class Recursion(Net):
    """Helpers that call themselves and each other."""

    def mix(self, x: Tensor) -> Tensor:
        return power(x, 2) + even(x, 2)


class Signatures(Net):
    """Helpers with every kind of argument."""

    def mix(self, x: Tensor) -> Tensor:
        return nothing() + positional(x, x) + keywords(x, y=x) + starred(x, x, w=x, z=x)


def nothing() -> Tensor:
    """No argument."""
    return torch.ones(WIDTH, 2) @ torch.ones(2, 1) @ torch.ones(1, WIDTH).mean()[None, None]


def positional(x: Tensor, y: Tensor, /, scale: float = 1.0) -> Tensor:
    """Positional-only arguments and a default."""
    return x @ (y.T @ x) * scale


def keywords(
    x: Tensor,
    *,
    y: Tensor,  # a comment with ) and **
    scale: float = 2.0**-3,
) -> Tensor:
    """A keyword-only argument, over several lines."""
    return x @ (y.T @ x) * scale


def starred(*tensors: Tensor, w: Tensor, **more: Tensor) -> Tensor:
    """Starred arguments."""
    return tensors[0] @ (w.T @ tensors[1]) + more["z"]


class Statics(Net):
    """Static and class methods, through the module, the class and each other."""

    def mix(self, x: Tensor) -> Tensor:
        return self.static(x) + Statics.through(x) + type(self).through(x) + self.__private(x) + Other.outside(x)

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x @ (x.T @ x)

    @classmethod
    def through(cls, x: Tensor) -> Tensor:
        return cls.static(x) @ (x.T @ x)

    @staticmethod
    def __private(x: Tensor) -> Tensor:
        return x @ (x.T @ x)


class Other:
    """No module, with a static method."""

    @staticmethod
    def outside(x: Tensor) -> Tensor:
        return x @ (x.T @ x)


class Template(Net):
    """A base whose method calls what subclasses define."""

    def mix(self, x: Tensor) -> Tensor:
        return self.step(x) @ self.linear.weight

    @staticmethod
    def step(x: Tensor) -> Tensor:
        raise NotImplementedError


class TemplateStatic(Template):
    """Defines it as a static method."""

    @staticmethod
    def step(x: Tensor) -> Tensor:
        return x @ (x.T @ x)


class TemplateMethod(TemplateStatic):
    """Defines it as a method."""

    def step(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(x) @ self.linear.weight


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without ``functools.wraps``."""

    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return wrapper


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without ``functools.wraps`` that holds another function too."""
    before = _double

    def wrapper(*args: Any, **keywords: Any) -> Any:
        return before(function(*args, **keywords))

    return wrapper


def _double(x: Tensor) -> Tensor:
    return x * 2


@plain
@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    """A decorated helper."""
    return x @ (x.T @ x)


class Decorated(Net):
    """Decorators of torch and of one's own, with and without ``__wrapped__``."""

    @plain
    @twice
    def mix(self, x: Tensor) -> Tensor:
        return self.last(self.ignored(x @ (x.T @ x) * 1e-2) + decorated(x))

    @torch.compiler.disable
    def ignored(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def last(x: Tensor) -> Tensor:
        return x @ (x.T @ x)


class Checkpointed(Net):
    """Gradient checkpointing of a method, a module and a helper."""

    def mix(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) + checkpoint(self.linear, x, use_reentrant=False)
        return checkpoint(net_helpers.attend, x, y, x, use_reentrant=False)

    def block(self, x: Tensor) -> Tensor:
        return functional.dropout(x @ self.linear.weight, 0.1, self.training)


class Tied(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) @ self.first.weight


def _hooked() -> nn.Module:
    """Hooks of the user, that change what goes in and what comes out."""
    net = Products()
    net.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.linear.register_forward_hook(lambda module, args, output: output + 1)
    net.register_forward_hook(lambda module, args, output: output @ output.T @ output)
    return net


class LoraLinear(nn.Module):
    """A linear with low-rank adapters by name, as PEFT writes them."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        for adapter in self.active_adapters:
            if adapter not in self.lora_A.keys():  # noqa: SIM118
                continue
            lora_a, lora_b = self.lora_A[adapter], self.lora_B[adapter]
            result = result + lora_b(lora_a(self.lora_dropout[adapter](x))) * self.scaling[adapter]
        return result


class Children(nn.Module):
    """Loops over its own children, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (x.T @ x) * 1e-2
        for layer in self.children():
            x = layer(x)
        for _, layer in self.named_children():
            x = layer(x)
        for layer in self._modules.values():
            x = layer(x)  # type: ignore[misc]
        return x * len(list(self.modules())) * len(self._modules)


def _module_first(module: nn.Module, x: Tensor) -> Tensor:
    return x @ (x.T @ x)


FUNCTIONS = {"scores": net_helpers.scores, "module": _module_first}
CHAIN = (power,)


class Registry(Net):
    """Functions that are looked up in a dictionary."""

    def mix(self, x: Tensor) -> Tensor:
        looked_up = FUNCTIONS["module"]
        return FUNCTIONS["scores"](x, x) @ looked_up(self, x) + FUNCTIONS.get("scores", power)(x, x) @ x


class PassedOn(Net):
    """Helpers that are passed on as values: nobody can lend to them."""

    def mix(self, x: Tensor) -> Tensor:
        chosen = imported if x.dim() == 2 else None
        for function in CHAIN:
            x = function(x, 1)
        return chosen(x, x, x) @ self.linear.weight  # type: ignore[misc]


class Namesakes(Net):
    """A method, a helper of its name, and one of another module."""

    def mix(self, x: Tensor) -> Tensor:
        return self.scores(x, x) @ x

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return scores(x @ (y.T @ y), y) + net_helpers.scores(x, y)


def scores(x: Tensor, y: Tensor) -> Tensor:
    """A name that others have too."""
    return x @ y.T


class Generators(Net):
    """A generator, a context manager's body, a loop with ``else``, a walrus, a match."""

    def mix(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
            y = torch.cat(list(self.rows(x)))
        for _ in range(2):
            y = y @ self.linear.weight
        else:
            y = y @ (gram := x.T @ x) + x @ gram
        match y.dim():
            case 2:
                return y @ self.linear.weight
            case _:
                return y

    def rows(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.split(5):
            yield part @ self.linear.weight


def _x() -> tuple[Tensor]:
    return (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)),)


NETS: list[tuple[str, Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    ("closures", Closures, _x()),
    ("super", Super, _x()),
    ("properties", Properties, _x()),
    ("expressions", Expressions, _x()),
    ("products", Products, _x()),
    ("comprehensions", Comprehensions, _x()),
    ("lambdas", Lambdas, _x()),
    ("partials", Partials, _x()),
    ("left-alone", LeftAlone, _x()),
    ("imported", Imported, _x()),
    ("recursion", Recursion, _x()),
    ("signatures", Signatures, _x()),
    ("statics", Statics, _x()),
    ("template-static", TemplateStatic, _x()),
    ("template-method", TemplateMethod, _x()),
    ("decorated", Decorated, _x()),
    ("checkpointed", Checkpointed, _x()),
    ("tied", Tied, _x()),
    ("hooked", _hooked, _x()),
    ("lora", lambda: LoraLinear(nn.Linear(WIDTH, WIDTH)), _x()),
    ("children", Children, _x()),
    ("registry", Registry, _x()),
    ("passed-on", PassedOn, _x()),
    ("namesakes", Namesakes, _x()),
    ("generators", Generators, _x()),
]
