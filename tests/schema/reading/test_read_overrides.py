"""`--set key=value` replaces one value, and is itself the place of its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.reading.read import read_job
from gpumix.schema.untrusted_text import escape_invisible
from helpers.errors import raises

JOB = """\
model: {config: {model_type: gpt2}}
data: {text: [corpus]}
sequence_length: 32
global_batch_size: 8
max_steps: 10
output_dir: out
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_values_are_yaml_and_the_last_one_holds(path):
    job = read_job(path, ["max_steps=3", "max_steps=4", "optimizer.lr=1e-4", "max_grad_norm=null",
                          "optimizer.betas=[0.8, 0.9]", "precision='bf16'"])  # fmt: skip
    assert job.max_steps == 4
    assert job.optimizer.lr == 1e-4
    assert job.max_grad_norm is None
    assert job.optimizer.betas == (0.8, 0.9)
    assert job.precision == "bf16"


def test_mappings_on_the_way_are_made(path):
    path.write_text(JOB + "lr_scheduler:\n")
    job = read_job(
        path,
        ["lr_scheduler.type=linear", "model.config.n_layer=3", "advanced.profile_budget=1 min"],
    )
    assert job.lr_scheduler.type == "linear"
    assert job.model.config == {"model_type": "gpt2", "n_layer": 3}
    assert job.advanced.profile_budget == 60


def test_one_source_takes_the_place_of_another(path):
    job = read_job(path, ["model={factory: my.models:tiny}", "data.text=null", "data.text=[b]"])
    assert job.model.factory == "my.models:tiny"
    assert job.data.text == (Path.cwd() / "b",)


def test_a_whole_cluster(path):
    job = read_job(
        path, ["cluster=[{class: a, memory: 1 GiB}, {class: b, memory: 2 GiB, host: x}]"]
    )
    assert [d.id for d in job.cluster.devices] == ["a-0", "b-0"]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_steps", "'max_steps' is not of the form key=value\n  fix: write a dotted key,"),
        ("=3", "'=3' is not of the form key=value"),
        ("a..b=3", "'a..b=3' is not of the form key=value"),
        ("\udcff=3", "'\udcff=3' is not of the form key=value"),
        ("optimizer.learning_rate=1",
         "unknown key 'optimizer.learning_rate'\n  fix: did you mean 'lr'?"),
        ("optimzer.lr=1", "unknown key 'optimzer'\n  fix: did you mean 'optimizer'?"),
        ("lr=1", "unknown key 'lr'\n  fix: did you mean 'optimizer.lr'?"),
        ("max_steps=ten", "'max_steps' must be a whole number, it is 'ten'"),
        ("max_steps=", "'max_steps' must be a whole number, it is empty"),
        ("optimizer={lr: 0}", "'optimizer.lr' must be greater than 0, it is 0"),
        ("max_steps.x=1",
         "'max_steps' is 10, it has no keys\n  fix: set all of it: --set 'max_steps=...'"),
        ("data.text.0=1", "'data.text' is a list of 1, it has no keys"),
        ("max_steps=[1", "this is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("max_steps={a: 1, a: 2}", "key 'a' is given twice"),
        ("max_steps=\x07", "this is not YAML: the character '\\x07' may not stand here"),
        ("cluster=nowhere.yaml", "'cluster': there is no cluster file"),
        (f"cluster={'x' * 300}", "'cluster': there is no cluster file"),
        ("cluster=/tmp", "'cluster': /tmp is a folder, not a cluster file"),
        (f"model.config={'x' * 300}", "'model.config': cannot read"),
        ("cluster=[{class: a}]", "'cluster[0].memory' is missing"),
        ("model.config=nowhere.json", "'model.config': cannot read"),
        ("optimizer.momentum=0.9", "'optimizer': 'momentum' has no effect on adamw"),
        ("data.dataset=/tmp", "'data': give exactly one of 'text', 'dataset' and 'factory'"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "'optimizer.betas' must be a list of 2, it is a list"),
    ],
)  # fmt: skip
def test_the_argument_is_the_place(path, argument, expected):
    with pytest.raises(InputError) as caught:
        read_job(path, [argument])
    assert caught.value.where == f"--set {argument}"
    assert str(caught.value).startswith(
        f"--set {escape_invisible(argument)}: {escape_invisible(expected)}"
    )


def test_the_file_keeps_its_lines(path):
    path.write_text(JOB + "seed: x\n")
    with pytest.raises(InputError) as caught:
        read_job(path, ["max_steps=0"])
    assert str(caught.value) == (
        f"{path}:7: 'seed' must be a whole number, it is 'x'\n"
        "  also --set max_steps=0: 'max_steps' must be greater than 0, it is 0\n"
        f"  fix: correct {path}:7"
    )


def test_a_wrong_value_of_the_file_can_be_set_right(path):
    path.write_text(JOB + "seed: x\n")
    assert read_job(path, ["seed=1"]).seed == 1


def test_a_pattern_needs_quotes_and_is_told_so(path):
    with raises(InputError, code="yaml-invalid") as caught:
        read_job(path, ["data.pattern=*.md"])
    assert "in quotes" in caught.value.fix
    assert read_job(path, ['data.pattern="*.md"']).data.pattern == "*.md"


def test_quotes_are_no_advice_for_another_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a licence & more: words\nof a text: with colons: and more\n")
    with raises(InputError, code="yaml-invalid") as caught:
        read_job(text)
    assert ":2:" in caught.value.where and "in quotes" not in caught.value.fix
