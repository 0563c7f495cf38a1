"""Public names of the integrations with their signatures and docstrings, read from the source: the
libraries that they are for need not be there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parts.names import called, docstring

SOURCE = Path(__file__).parents[2] / "src"
MODULES = tuple(
    f"gpumix.integrations.{name}" for name in ("transformers", "trl", "lightning", "ray")
)
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Named:
    """A name that a module has, where it is defined."""

    name: str
    node: Definition
    module: ast.Module

    def signature(self) -> str:
        """As it is called; of a class that defines no constructor that of the one it builds on."""
        if isinstance(self.node, ast.FunctionDef):
            returned = "" if self.node.returns is None else f" -> {ast.unparse(self.node.returns)}"
            return called(self.name, list(_parameters(self.node.args)), returned)
        made_by = self.made_by()
        constructor = _constructor(made_by.node)
        fields = [ast.unparse(one) for one in made_by.node.body if isinstance(one, ast.AnnAssign)]
        parts = fields if constructor is None else [*_parameters(constructor.args)][1:]
        return called(self.name, parts, "")

    def described(self) -> str:
        """Its docstring, and what its constructor takes where that is another's."""
        made_by = self.made_by()
        own = docstring(ast.get_docstring(self.node) or "")
        if made_by.node is self.node:
            return own
        blocks = (ast.get_docstring(made_by.node) or "").split("\n\n")
        return "\n\n".join([own, *(docstring(b) for b in blocks if b.startswith("Args:"))])

    def made_by(self) -> Named:
        """The class of this package whose constructor is called, unlike that of its own library."""
        if not isinstance(self.node, ast.ClassDef):
            return self
        told = _constructor(self.node)
        if told is not None and ast.unparse(told.args) != "self, *args: Any, **kwargs: Any":
            return self
        for base in self.node.bases:
            if isinstance(base, ast.Name) and (found := _found(base.id, self.module)) is not None:
                return found.made_by()
        return self


def names(module: str) -> list[Named]:
    """What `module` promises."""
    tree = _parsed(module)
    listed = next(
        ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    return [found for name in listed if (found := _found(name, tree)) is not None]


def sections() -> str:
    return "\n\n".join(
        f"## {module}.{one.name}\n\n```python\n{one.signature()}\n```\n\n{one.described()}"
        for module in MODULES
        for one in names(module)
    )


def _parsed(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    return ast.parse((file if file.exists() else path / "__init__.py").read_text(encoding="utf-8"))


def _found(name: str, tree: ast.Module) -> Named | None:
    """The definition, here or in the module of this package that it is imported from."""
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return Named(name, node, tree)
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("gpumix."):
            continue
        if name in [alias.name for alias in node.names]:
            return _found(name, _parsed(str(node.module)))
    return None


def _constructor(node: Definition) -> ast.FunctionDef | None:
    return next(
        (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"),
        None,
    )


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Each as it is written; what comes by position is given without a default or with one."""
    defaults = [*[None] * (len(arguments.args) - len(arguments.defaults)), *arguments.defaults]
    yield from map(_parameter, arguments.args, defaults)
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(_parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")
