"""The YAML and the Python that the pages show are what gpumix takes."""

from __future__ import annotations

import ast
import inspect
from typing import Any, get_type_hints

import pytest
import yaml
from pages import PAGES, blocks

import gpumix
from gpumix.spec.job import DataSpec
from gpumix.spec.read import read_cluster, read_job

ALL = [block for page in PAGES for block in blocks(page)]
JOBS = [block for block in ALL if block.text.startswith("model:")]
CLUSTERS = [block for block in ALL if block.text.startswith(("- {class", "classes:"))]
PYTHON = [block for block in ALL if "import gpumix" in block.text]
WHOLE = [block for block in ALL if block.text.startswith("from gpumix import")]
DATA = [block for block in ALL if block.text.startswith("data:")]


@pytest.mark.parametrize("block", JOBS, ids=str)
def test_a_job_is_read(block, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(block.text, encoding="utf-8")
    written = yaml.safe_load(block.text)
    assert read_job(path).steps == written["steps"]


@pytest.mark.parametrize("block", CLUSTERS, ids=str)
def test_a_cluster_is_read(block, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(block.text, encoding="utf-8")
    assert read_cluster(path).devices


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_calls_bind_to_the_real_signatures(block):
    checked = Calls()
    checked.visit(ast.parse(block.text))
    assert {"gpumix.prepare", "gpumix.Loader", "Engine.step"} <= checked.bound


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_what_is_whole_runs(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", DATA, ids=str)
def test_data_of_a_job_is_read(block):
    assert DataSpec.model_validate(yaml.safe_load(block.text)["data"])


def test_the_pages_show_what_is_tested_here():
    assert {block.page.name for block in WHOLE} == {"python.md"}
    assert len(DATA) >= 3
    assert {block.page.name for block in JOBS} >= {"README.md", "job.md"}
    assert {block.page.name for block in PYTHON} >= {"README.md", "python.md"}
    assert len(CLUSTERS) >= 2


class Calls(ast.NodeVisitor):
    """Binds each call of `gpumix.NAME`, and each method call on what such a call returned."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self._types: dict[str, type] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        self._name(node.targets[0], node.value)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        self._name(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner, name = node.func.value.id, node.func.attr
            if owner == "gpumix":
                self._bind(f"gpumix.{name}", getattr(gpumix, name), node, [])
            elif owner in self._types:
                kind = self._types[owner]
                self._bind(f"{kind.__name__}.{name}", getattr(kind, name), node, [None])
        self.generic_visit(node)

    def _name(self, target: ast.expr | None, value: ast.expr) -> None:
        """Remember the type of a variable that gets the result of `gpumix.NAME(...)`."""
        made = isinstance(value, ast.Call) and ast.unparse(value.func).partition("gpumix.")[2]
        if not made or not isinstance(target, ast.Name):
            return
        thing = getattr(gpumix, made)
        kind = thing if inspect.isclass(thing) else get_type_hints(thing)["return"]
        if inspect.isclass(kind) and kind.__module__.startswith("gpumix"):
            self._types[target.id] = kind

    def _bind(self, name: str, function: Any, node: ast.Call, given: list[None]) -> None:
        positional = given + [None] * len(node.args)
        inspect.signature(function).bind(*positional, **{k.arg: None for k in node.keywords})
        self.bound.add(name)


def test_a_wrong_keyword_is_noticed():
    with pytest.raises(TypeError, match="batch_size"):
        Calls().visit(ast.parse("gpumix.plan(profile, 64, batch_size=3)"))


def test_a_wrong_method_is_noticed():
    text = "engine = gpumix.prepare(model, plan)\nengine.backward(loss)"
    with pytest.raises(AttributeError, match="backward"):
        Calls().visit(ast.parse(text))
