"""The YAML, the Python and the changes of scripts that the pages show are what gpumix takes."""

from __future__ import annotations

import ast
import inspect
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import gpumix
from gpumix.schema.errors import MachineError
from gpumix.schema.reading.read import read_cluster, read_job
from helpers.extended import left_out
from helpers.pages import PAGES, ROOT, blocks, with_change
from helpers.processes.harness import run_ranks
from helpers.scripts.changed_imports import EXAMPLES, OURS, SCRIPTS, stock
from helpers.scripts.programs import GLOBAL_BATCH, Texts, as_launched, model, other_ranks
from helpers.training.models import WIDTH, Block, Regression

ALL = [block for page in PAGES for block in blocks(page)]
JOBS = [block for block in ALL if block.text.startswith("model:")]
CLUSTERS = [block for block in ALL if block.text.startswith(("- {class", "classes:"))]
PARTS = [b for b in ALL if b.language == "yaml" and b not in [*JOBS, *CLUSTERS]]
LOOPS = [block for block in ALL if block.text.startswith("import gpumix")]
WHOLE = [block for block in ALL if block.text.startswith("from gpumix import Loader")]
SIGNATURES = [b for b in ALL if b.page.name == "python.md" and "import " not in b.text]
PIECES = [b for b in ALL if b.language == "python" and b not in [*LOOPS, *WHOLE, *SIGNATURES]]
ONE_LINE = re.compile(r"-(from .*)\n\+(from .*)\n")
DIFFS = [block for block in ALL if block.language == "diff"]
IMPORTS = [block for block in DIFFS if ONE_LINE.fullmatch(block.text)]
CHANGES = [block for block in DIFFS if block not in IMPORTS]
SMALLER = {
    "sequence_length=512": "sequence_length=4, budget_s=1.0",
    "global_batch_size=64": "global_batch_size=4",
    "range(1000)": "range(20)",
    "AdamW(engine.parameters())": "AdamW(engine.parameters(), lr=0.05)",
}
LEAST = {
    "model": {"factory": "mine:model"},
    "data": {"factory": "mine:data"},
    "sequence_length": 8,
    "global_batch_size": 8,
    "max_steps": 10,
}


def read(written: dict[str, Any], folder):
    """A job of what a page shows; the files that it names are there."""
    config = written["model"].get("config")
    if isinstance(config, str):
        (folder / config).parent.mkdir(parents=True)
        (folder / config).write_text('{"model_type": "llama"}', encoding="utf-8")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    return read_job(path)


@pytest.mark.parametrize("block", JOBS, ids=str)
def test_a_job_is_read(block, tmp_path):
    written = yaml.safe_load(block.text)
    assert read(written, tmp_path).max_steps == written["max_steps"]


@pytest.mark.parametrize("block", PARTS, ids=str)
def test_a_part_of_a_job_is_read(block, tmp_path):
    written = yaml.safe_load(block.text)
    found = read(LEAST | written, tmp_path)
    assert written.keys() <= found.model_fields_set


@pytest.mark.parametrize("block", CLUSTERS, ids=str)
def test_a_cluster_is_read(block, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(block.text, encoding="utf-8")
    assert read_cluster(path).devices


@pytest.mark.parametrize("block", LOOPS, ids=str)
def test_calls_bind_to_the_real_signatures(block):
    assert {"gpumix.prepare", "gpumix.Loader", "Engine.step"} <= bound_in(block.text)


@pytest.mark.slow
@pytest.mark.parametrize("block", left_out(LOOPS, LOOPS[1:]), ids=str)
def test_a_loop_trains(block, tmp_path):
    """With a small model, in smaller numbers, on two devices."""
    cluster, text = tmp_path / "pair.yaml", block.text
    cluster.write_text("- {class: cpu, accelerator: cpu, memory: 64 MiB, count: 2}\n")
    for large, small in SMALLER.items():
        assert large in text
        text = text.replace(large, small)
    one, other = run_ranks(losses_of, 2, text, cluster)
    assert one == other and len(one) == 20
    assert one[-1] < one[0] / 2


def losses_of(loop: str, cluster: Path) -> list[float]:
    """Of the steps of a loop, which has what it does not say itself."""
    os.environ["GPUMIX_CLUSTER"] = str(cluster)
    losses: list[float] = []
    step = gpumix.Engine.step

    def told(*arguments: Any) -> torch.Tensor:
        loss = step(*arguments)
        losses.append(loss.item())
        return loss

    gpumix.Engine.step = told  # type: ignore[method-assign]
    samples = [{key: value[0] for key, value in batch_of(1).items()} for _ in range(8)]
    names = {"torch": torch, "build": one_of_blocks, "make_batch": batch_of, "dataset": samples}
    exec(compile(loop, "loop", "exec"), names)
    return losses


def one_of_blocks() -> torch.nn.Module:
    return Regression([Block() for _ in range(2)])


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 4, WIDTH), "target": torch.ones(samples, 4, 4)}


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_what_is_whole_runs(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", PIECES, ids=str)
def test_what_a_piece_imports_takes_its_calls(block):
    assert bound_in(block.text)


@pytest.mark.parametrize("block", CHANGES, ids=str)
def test_what_a_change_makes_takes_its_calls(block):
    assert bound_in(with_change(block.text))


def bound_in(text: str) -> set[str]:
    checked = Calls()
    checked.visit(ast.parse(text))
    return checked.bound


@pytest.mark.slow
def test_the_loop_of_a_page_trains_as_with_the_stock_class(tmp_path):
    (loop,) = [block.text for block in PIECES if block.page.name == "accelerate.md"]
    (stock,) = run_ranks(last_of_loop, 1, loop.replace("gpumix", "accelerate"), tmp_path, 1)
    assert "from gpumix import" in loop and "steps=2)" in loop
    for rank in run_ranks(last_of_loop, 2, loop, tmp_path, 2):
        assert rank == pytest.approx(stock, rel=1e-4)


def last_of_loop(loop: str, folder: Path, world: int) -> float:
    """The last loss of a loop, which has what it does not say itself."""
    as_launched(folder)
    if world > 1:
        loop = loop.replace("steps=2)", "steps=2, plan=plan)")
    network = model()
    names: dict[str, Any] = {
        "model": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "loader": DataLoader(Texts(), batch_size=GLOBAL_BATCH // world),
        "plan": other_ranks(),
    }
    exec(compile(loop, "loop", "exec"), names)
    return names["loss"].item()


@pytest.mark.parametrize("block", IMPORTS, ids=str)
def test_a_change_is_the_one_that_tests_make(block):
    """`tests/examples/test_changed_imports.py` trains before and after it."""
    before, after = ONE_LINE.fullmatch(block.text).groups()
    script, *_ = [
        path
        for path in (EXAMPLES / f"{name}.py" for name in SCRIPTS)
        if OURS.search(path.read_text(encoding="utf-8"))[0] == after
    ]
    assert before in stock(script).splitlines()


def test_the_pages_show_what_is_tested_here():
    assert {block.page.name for block in WHOLE} == {"python.md"}
    assert {block.page.name for block in JOBS} >= {"job.md", "tutorial.md"}
    assert {block.page.name for block in LOOPS} >= {"python.md"}
    assert len(PARTS) >= 6 and len(CLUSTERS) >= 4 and len(PIECES) >= 2 and len(IMPORTS) >= 6


def test_every_block_is_of_a_kind_that_is_tested():
    """Texts are what commands print: `docs/generate.py` writes them, and is tested."""
    assert {block.language for block in ALL} <= {"", "yaml", "python", "diff", "text"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```text\n") == len(re.findall("<!-- output of: .*-->\n\n```text", text))


def test_no_output_is_wider_than_a_terminal_of_80_columns():
    outputs = [block for block in ALL if block.language == "text"]
    assert len(outputs) >= 8
    for block in outputs:
        assert max(map(len, block.text.splitlines())) <= 80, block


def test_every_example_whose_import_changes_is_shown():
    readme = [block for block in IMPORTS if block.page == ROOT / "README.md"]
    texts = [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS]
    assert len(readme) == len({OURS.search(text)[0] for text in texts})


def imported(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except MachineError as error:
        if "is not installed" not in error.what:
            raise
        pytest.skip(error.what)


class Calls(ast.NodeVisitor):
    """Binds each call of `gpumix.NAME` and of what is imported, and each method call on what such a
    call returned."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self._imported: dict[str, Any] = {}
        self._types: dict[str, type] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported[alias.name] = imported(str(node.module), alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._name(node.targets[0], node.value)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        self._name(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (called := self._called(node)) is not None:
            self._bind(ast.unparse(node.func), called, node, [])
        elif isinstance(node.func, ast.Attribute):
            kind, name = self._types.get(ast.unparse(node.func.value)), node.func.attr
            if kind is not None:
                self._bind(f"{kind.__name__}.{name}", getattr(kind, name), node, [None])
        self.generic_visit(node)

    def _called(self, node: ast.expr) -> Any:
        """What `gpumix.NAME(...)`, or the call of something imported, calls."""
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func)
        of_gpumix = name.partition("gpumix.")[2]
        return getattr(gpumix, of_gpumix) if of_gpumix else self._imported.get(name)

    def _name(self, target: ast.expr | None, value: ast.expr) -> None:
        """Remember the type of a variable that gets the result of a call."""
        thing = self._called(value)
        if thing is None or not isinstance(target, ast.Name):
            return
        kind = thing if inspect.isclass(thing) else get_type_hints(thing)["return"]
        if inspect.isclass(kind) and kind.__module__.startswith("gpumix"):
            self._types[target.id] = kind

    def _bind(self, name: str, function: Any, node: ast.Call, given: list[None]) -> None:
        positional = given + [None] * len(node.args)
        parameters_of(function).bind(*positional, **{k.arg: None for k in node.keywords})
        self.bound.add(name)


def parameters_of(function: Any) -> inspect.Signature:
    """Of a class that passes on what it does not know: with what those behind it take."""
    if not inspect.isclass(function):
        return inspect.signature(function)
    own: list[inspect.Parameter] = []
    for kind in (kind for kind in function.__mro__ if "__init__" in vars(kind)):
        _, *taken = inspect.signature(kind.__init__).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in taken):
            return inspect.Signature([*taken, *own])
        own += [one for one in taken if one.kind is one.KEYWORD_ONLY]
    raise AssertionError(f"all classes of {function} take anything")


def test_a_wrong_keyword_is_noticed():
    with pytest.raises(TypeError, match="batch_size"):
        bound_in("gpumix.plan(profile, 64, batch_size=3)")


@pytest.mark.parametrize(
    "call", ["gpumix import Accelerator", "gpumix.integrations.transformers import Trainer"]
)
def test_a_wrong_keyword_that_is_passed_on_is_noticed(call):
    name = call.split()[-1]
    assert bound_in(f"from {call}\n{name}(plan=plan)") == {name}
    with pytest.raises(TypeError, match="gradient_accumulation'"):
        bound_in(f"from {call}\n{name}(gradient_accumulation=2)")


def test_a_wrong_method_is_noticed():
    with pytest.raises(AttributeError, match="backward"):
        bound_in("engine = gpumix.prepare(model, plan)\nengine.backward(loss)")
