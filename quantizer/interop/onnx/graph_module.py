"""A ``torch.fx`` graph as an ordinary module: a class of its own whose ``forward`` is Python text.

The text is in ``linecache``, so ``inspect.getsource(type(model).forward)`` shows what the model computes, node by node,
and a traceback shows the line.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
import textwrap
import types
from typing import Any

import torch
from torch import fx, nn

_NO_LETTERS = re.compile(r"\W+", re.ASCII)


class OnnxModule(nn.Module):
    """Base class of the modules that are made of ONNX files.

    Attributes:
        source: the name of the file.
        arguments: the name of each argument of ``forward``, by the name of the input in the file.
        nodes: the path of the module that each ONNX node became, by the name of the node; a node that is no module is
            a line of ``forward``.
    """

    source: str
    arguments: dict[str, str]
    nodes: dict[str, str]

    def extra_repr(self) -> str:
        """Return where it is from."""
        return f"from {self.source}"


def identifier(name: str, taken: set[str]) -> str:
    """Return a name of Python for a name of ONNX, and add it to those that are taken."""
    plain = _NO_LETTERS.sub("_", name).strip("_") or "node"
    if plain[0].isdigit() or keyword.iskeyword(plain):
        plain = f"n{plain}"
    found, number = plain, 1
    while found in taken or hasattr(nn.Module, found):
        found, number = f"{plain}_{number}", number + 1
    taken.add(found)
    return found


def module_of(graph: fx.Graph, root: nn.Module, source: str) -> OnnxModule:
    """Return a module that computes a graph."""
    code = graph.python_code("self")
    name = "".join(part.capitalize() for part in identifier(source.rpartition(".")[0] or source, set()).split("_"))
    # Of a file called none.onnx it would be a word of Python.
    name = f"{name}_" if keyword.iskeyword(name) else name
    text = f"class {name}:\n{textwrap.indent(code.src.strip(), '    ')}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    file = f"<onnx {source} {digest}>"
    # A modification time of None tells linecache.checkcache to keep the entry.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {**code.globals, "torch": torch, "__name__": __name__}
    forward = types.FunctionType(_forward_code(compile(text, file, "exec")), namespace, "forward")
    cls = type(name, (OnnxModule,), {"forward": forward, "__module__": __name__})
    made: OnnxModule = cls()
    for child_name, child in root.named_children():
        made.add_module(child_name, child)
    for parameter_name, parameter in root.named_parameters(recurse=False):
        made.register_parameter(parameter_name, parameter)
    for buffer_name, buffer in root.named_buffers(recurse=False):
        made.register_buffer(buffer_name, buffer)
    made.source = source
    return made.eval()


def _forward_code(code: types.CodeType) -> types.CodeType:
    """Return the code of ``forward``, the one function of the one class in a text; none of it is run."""
    (of_class,) = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    (of_function,) = (inner for inner in of_class.co_consts if isinstance(inner, types.CodeType))
    return of_function
