"""A job file becomes a Job, or one error that names every wrong key, its line and the nearest."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.reading.error_text import _dotted
from gpumix.schema.reading.job_key_aliases import KEY_BY_ALIAS
from gpumix.schema.reading.read import read_job
from helpers.errors import raises

JOB = """\
model:
  config: {model_type: gpt2, n_layer: 2}
data:
  text: [corpus]
sequence_length: 32
global_batch_size: 8
max_steps: 10
"""


@pytest.fixture
def job_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error_of(path, *overrides):
    """The error with the folder of the test cut out of it."""
    with pytest.raises(InputError) as caught:
        read_job(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_the_smallest_job(job_file, tmp_path):
    job = read_job(job_file(JOB))
    assert job.model.config == {"model_type": "gpt2", "n_layer": 2}
    assert job.data.text == (tmp_path / "corpus",)
    assert (job.sequence_length, job.global_batch_size, job.max_steps) == (32, 8, 10)
    assert job.cluster == "auto"
    assert job.tokenizer == "bytes"


def test_one_text_needs_no_list(job_file, tmp_path):
    path = job_file(JOB.replace("[corpus]", "corpus"))
    assert read_job(path).data.text == (tmp_path / "corpus",)
    assert read_job(path, ["data.text=other.txt"]).data.text == (Path.cwd() / "other.txt",)


def test_a_job_survives_json(job_file):
    cluster = "cluster: [{class: fast, emulate: 8 GFLOP/s, memory: 96 MiB}]\n"
    job = read_job(
        job_file(JOB + cluster + "advanced: {profile_budget: 2 min, profile_cache: here}\n")
    )
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert job.advanced.profile_budget == 120


def test_numbers_as_people_write_them(job_file):
    more = "optimizer: {lr: 3e-4, betas: [0, 9.5e-1], eps: 1.e-8, weight_decay: 0}\n"
    more += "advanced: {timeout: 90 s}\n"
    job = read_job(job_file(JOB + more))
    assert job.optimizer.lr == 3e-4
    assert job.optimizer.betas == (0.0, 0.95)
    assert job.optimizer.eps == 1e-8
    assert job.advanced.timeout == 90


@pytest.mark.parametrize(
    "written", ["zero_stages: 3", "zero_stages: [3]", "{zero_stages: [3], cross_entropy: [whole]}"]
)
def test_one_technique_or_a_list_of_them(job_file, written):
    inside = written if written.startswith("{") else f"{{{written}}}"
    assert read_job(job_file(JOB + f"techniques: {inside}\n")).techniques.zero_stages == (3,)
    by_hand = read_job(job_file(JOB), ["techniques.gradient_checkpointing=[true, false]"])
    assert by_hand.techniques.gradient_checkpointing == (True, False)


def test_whole_batches_are_planned_by_their_own_strategy(job_file):
    told = error_of(job_file(JOB), "model.couples=batch")
    assert "'model.couples: batch' is for 'strategy: undivided', it is 'optimal'" in told
    job = read_job(job_file(JOB), ["model.couples=batch", "strategy=undivided"])
    assert (job.model.couples, job.strategy) == ("batch", "undivided")


def test_null_where_none_is_meant(job_file):
    assert read_job(job_file(JOB + "max_grad_norm: null\n")).max_grad_norm is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("optimizer:\n  learning_rate: 3e-4\n",
         "job.yaml:9: unknown key 'optimizer.learning_rate'\n  fix: did you mean 'lr'?"),
        ("\n# a comment\nsede: 3\n",
         "job.yaml:10: unknown key 'sede'\n  fix: did you mean 'seed'?"),
        ("lr: 3e-4\n", "job.yaml:8: unknown key 'lr'\n  fix: did you mean 'optimizer.lr'?"),
        ("xyzzy: 1\n", "job.yaml:8: unknown key 'xyzzy'\n  fix: valid keys: model, data,"),
        ("on: 1\n", "job.yaml:8: unknown key 'on'"),
        ("seed: ten\n", "job.yaml:8: 'seed' must be a whole number, it is 'ten'"),
        ("seed: '10'\n", "job.yaml:8: 'seed' must be a whole number, it is '10'"),
        ("seed: yes\n", "job.yaml:8: 'seed' must be a whole number, it is true"),
        ("seed: 1.5\n", "job.yaml:8: 'seed' must be a whole number, it is 1.5"),
        ("seed: -1\n", "job.yaml:8: 'seed' must be 0 or more, it is -1"),
        ("seed:\n", "job.yaml:8: 'seed' must be a whole number, it is empty"),
        ("optimizer:\n", "job.yaml:8: 'optimizer' must be a mapping, it is empty"),
        ("optimizer: [lr]\n", "job.yaml:8: 'optimizer' must be a mapping, it is a list of 1"),
        ("optimizer: {lr: 0}\n", "job.yaml:8: 'optimizer.lr' must be greater than 0, it is 0"),
        ("optimizer: {lr: .nan}\n",
         "job.yaml:8: 'optimizer.lr' must be a finite number, it is nan"),
        ("optimizer: {lr: fast}\n", "job.yaml:8: 'optimizer.lr' must be a number, it is 'fast'"),
        ("optimizer: {betas: [0.9]}\n", "job.yaml:8: 'optimizer.betas[1]' is missing"),
        ("optimizer:\n  betas:\n  - 0.9\n  - 1.5\n",
         "job.yaml:11: 'optimizer.betas[1]' must be less than 1, it is 1.5"),
        ("optimizer: {betas: [0.9, 0.9, 0.9]}\n",
         "job.yaml:8: 'optimizer.betas' must be a list of 2, it is a list of 3"),
        ("optimizer: {momentum: 0.9}\n",
         "job.yaml:8: 'optimizer': 'momentum' has no effect on adamw"),
        ("optimizer: {name: sgd, eps: 1e-6}\n",
         "job.yaml:8: 'optimizer': 'eps' has no effect on sgd"),
        ("optimizer:\n  eps: 1e-8\n  name: adam\n",
         "job.yaml:10: 'optimizer.name' must be 'adamw', 'adamw_8bit', 'sgd', 'adafactor' or "
         "'muon', it is 'adam'\n"
         "  fix: did you mean 'adamw'?"),
        ("optimizer: {name: adafactor, betas: [0.9, 0.9]}\n",
         "job.yaml:8: 'optimizer': 'betas' has no effect on adafactor"),
        ("optimizer: {name: muon, clip_threshold: 2}\n",
         "job.yaml:8: 'optimizer': 'clip_threshold' has no effect on muon"),
        ("optimizer: {ns_steps: 3}\n",
         "job.yaml:8: 'optimizer': 'ns_steps' has no effect on adamw"),
        ("optimizer:\n  groups:\n  - {match: '*.bias', lr: 0}\n",
         "job.yaml:10: 'optimizer.groups[0].lr' must be greater than 0, it is 0"),
        ("optimizer:\n  groups:\n  - match: '*.bias'\n",
         "job.yaml:10: 'optimizer.groups[0]': give 'lr' or 'weight_decay', or leave this group"),
        ("precision: bfloat16\n",
         "job.yaml:8: 'precision' must be 'auto', 'fp32', 'bf16' or 'fp16' or a mapping, it is "
         "'bfloat16'\n"
         "  fix: did you mean 'bf16'?"),
        ("advanced: {timeout: 3 parsecs}\n",
         "job.yaml:8: 'advanced.timeout': '3 parsecs' is not an amount such as '90 s' "
         "(units: ms, s, min, h)"),
        ("tokenizer: 3\n", "job.yaml:8: 'tokenizer' must be 'bytes' or a path, it is 3"),
        ("output_dir: [a]\n", "job.yaml:8: 'output_dir' must be a path, it is a list of 1"),
        ("output_dir: ~nobody-of-this-name/x\n",
         "job.yaml:8: '~nobody-of-this-name/x' names no user's home"),
        ("lr_scheduler: {min_lr_ratio: 2}\n",
         "job.yaml:8: 'lr_scheduler.min_lr_ratio' must be 1 or less, it is 2"),
        ("cluster: 3\n",
         "job.yaml:8: a cluster must be a mapping or a list of devices, it is 3\n"
         "  fix: write [{class: rtx3090, memory: 24 GiB}]; a job may also say 'auto' "
         "or name a file"),
        ("seed: 1\nseed: 2\n", "job.yaml:9:1: key 'seed' is given twice, at job.yaml:8"),
        ("optimizer: {lr: 1, lr: 2}\n",
         "job.yaml:8:20: key 'optimizer.lr' is given twice, at job.yaml:8"),
    ],
)  # fmt: skip
def test_one_wrong_thing(job_file, more, expected):
    assert error_of(job_file(JOB + more)).startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_steps: 10\n", "", "job.yaml:1: 'max_steps' is missing\n  fix: add max_steps: 1000"),
        ("data:\n  text: [corpus]\n", "",
         "job.yaml:1: 'data' is missing\n  fix: add data: {text: [corpus.txt]}"),
        ("  text: [corpus]\n", "  text: [corpus, corpus]\n",
         "job.yaml:3: 'data': 'text' names 'corpus' twice"),
        ("  text: [corpus]\n", "  text: {corpus: 1}\n",
         "job.yaml:4: 'data.text' must be a path, it is a mapping"),
        ("  text: [corpus]\n", "  text:\n   - a\n   - 3\n",
         "job.yaml:6: 'data.text[1]' must be a path, it is 3"),
        ("  text: [corpus]\n", "  text: []\n",
         "job.yaml:3: 'data': give exactly one of 'text', 'dataset' and 'factory'"),
        ("  text: [corpus]\n", "  factory: nowhere\n",
         "job.yaml:4: 'data.factory' must be of the form module:function, it is 'nowhere'"),
        ("{model_type: gpt2, n_layer: 2}", "3",
         "job.yaml:2: 'model.config' must be a path or a mapping, it is 3"),
        ("{model_type: gpt2, n_layer: 2}", "{model_type: gpt2}\n  factory: a:b",
         "job.yaml:1: 'model': give exactly one of 'config' and 'factory'"),
        ("{model_type: gpt2, n_layer: 2}", "nowhere.json",
         "job.yaml:2: 'model.config': cannot read nowhere.json\n  why: No such file or directory"),
    ],
)  # fmt: skip
def test_one_wrong_thing_among_what_must_be_there(job_file, old, new, expected):
    assert error_of(job_file(JOB.replace(old, new))).startswith(expected)


def test_all_errors_come_at_once_in_the_order_of_the_file(job_file):
    text = JOB.replace("max_steps: 10", "step: 10\noptimizer: {lr: -1}")
    text += "cluster:\n- {class: fast, memory: 1 GiB, emulat: 1}\nseed: x\n"
    assert error_of(job_file(text), "precision=fp8") == (
        "job.yaml:7: unknown key 'step'\n"
        "  also job.yaml:8: 'optimizer.lr' must be greater than 0, it is -1\n"
        "  also job.yaml:10: unknown key 'cluster[0].emulat' (did you mean 'emulate'?)\n"
        "  also job.yaml:11: 'seed' must be a whole number, it is 'x'\n"
        "  also --set precision=fp8: 'precision' must be 'auto', 'fp32', 'bf16' or 'fp16' or a "
        "mapping, it is 'fp8'\n"
        "  fix: did you mean 'max_steps'?"
    )


@pytest.mark.parametrize(
    ("more", "meant"),
    [
        ("learning_rate: 1e-3", "optimizer.lr"),
        ("per_device_train_batch_size: 8", "global_batch_size"),
        ("bf16: true", "precision"),
        ("num_train_epochs: 3", "max_steps"),
        ("deepspeed: ds.json", "techniques.zero_stages"),
        ("warmup_ratio: 0.1", "lr_scheduler.warmup_steps"),
        ("lr_scheduler: {kind: linear}", "type"),
        ("output: run", "output_dir"),
        ("trackers: wandb", "report_to"),
        ("compile: on", "torch_compile"),
        ("evaluation: {every_steps: 3}", "eval_steps"),
        ("checkpoint: {keep: 3}", "save_steps"),
        ("timeout: 90 s", "advanced.timeout"),
        ("restarts: 1", "advanced.max_restarts"),
        ("efficiency: {attention: eager}", "advanced.efficiency"),
        ("techniques: {recompute: true}", "gradient_checkpointing"),
        ("techniques: {tensor: 2}", "tensor_parallel_size"),
    ],
)
def test_names_of_elsewhere_and_of_before_lead_to_the_key(job_file, more, meant):
    told = error_of(job_file(f"{JOB}{more}\n"))
    assert told.startswith("job.yaml:8: unknown key '")
    assert f"\n  fix: did you mean '{meant}'?" in told


def test_a_key_that_was_in_another_section_is_told_with_its_place(job_file):
    assert error_of(job_file(JOB + "optimizer: {clip_norm: 1.0}\n")) == (
        "job.yaml:8: unknown key 'optimizer.clip_norm'\n"
        "  fix: did you mean 'max_grad_norm', next to 'optimizer' and not in it?"
    )


def test_a_key_under_its_old_name_is_not_missing_as_well(job_file):
    text = JOB.replace("global_batch_size", "global_batch").replace("max_steps", "steps")
    told = error_of(job_file(text))
    assert told.startswith("job.yaml:6: unknown key 'global_batch'\n  also job.yaml:7: unknown")
    assert "missing" not in told and "(did you mean 'max_steps'?" in told


def test_names_that_are_known_from_elsewhere_lead_to_keys_that_there_are():
    every = set(_dotted(Job))
    assert set(KEY_BY_ALIAS.values()) <= every
    assert not every & KEY_BY_ALIAS.keys()


def test_an_error_leaves_with_code_2_and_crosses_processes(job_file):
    with pytest.raises(InputError) as caught:
        read_job(job_file(JOB + "seed: x\n"))
    assert caught.value.exit_code == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_paths_start_at_the_folder_of_the_job(tmp_path, monkeypatch):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "jobs"
    elsewhere.mkdir(), folder.mkdir()
    (folder / "gpt2.json").write_text('{"model_type": "gpt2"}')
    (folder / "cluster.yaml").write_text("[{class: fast, emulate: 8 GFLOP/s, memory: 96 MiB}]")
    (folder / "job.yaml").write_text("""
        model: {config: gpt2.json, weights: ../weights}
        data: {text: [a, /b, ~/c]}
        tokenizer: words.json
        sequence_length: 32
        global_batch_size: 8
        max_steps: 10
        advanced: {profile_cache: cache}
        cluster: cluster.yaml
    """)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/someone")
    job = read_job(Path("../jobs/job.yaml"), ["data.text=[x, ~/y]", "output_dir=run"])
    start = elsewhere / ".." / "jobs"
    assert job.model.config == start / "gpt2.json"
    assert job.model.weights == start / "../weights"
    assert job.data.text == (elsewhere / "x", Path("/home/someone/y"))
    assert job.tokenizer == start / "words.json"
    assert job.advanced.profile_cache == start / "cache"
    assert job.output_dir == elsewhere / "run"
    assert [d.id for d in job.cluster.devices] == ["fast-0"]
    job = read_job(Path("../jobs/job.yaml"))
    assert job.data.text == (start / "a", Path("/b"), Path("/home/someone/c"))
    assert job.output_dir == start / "runs/latest"


def test_a_dataset_is_a_path_too(job_file, tmp_path):
    job = read_job(job_file(JOB.replace("text: [corpus]", "dataset: saved")))
    assert job.data.dataset == tmp_path / "saved"


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"),
     ("[" * 100_000, "is not JSON"), ("\udcff", "is not JSON")],
)  # fmt: skip
def test_a_model_config_that_is_none(job_file, tmp_path, content, said):
    (tmp_path / "gpt2.json").write_bytes(content.encode(errors="surrogateescape"))
    error = error_of(job_file(JOB.replace("{model_type: gpt2, n_layer: 2}", "gpt2.json")))
    assert error.startswith(f"job.yaml:2: 'model.config': gpt2.json {said}")


@pytest.mark.parametrize("content", ["[]", "{}", '{"model_type": 3}'])
def test_a_model_config_without_a_model_type(job_file, tmp_path, content):
    (tmp_path / "gpt2.json").write_text(content)
    error = error_of(job_file(JOB.replace("{model_type: gpt2, n_layer: 2}", "gpt2.json")))
    assert error.startswith("job.yaml:2: 'model.config': there is no 'model_type' in gpt2.json\n")
    error = error_of(job_file(JOB.replace("model_type: gpt2, ", "")))
    assert error.startswith("job.yaml:2: 'model.config': there is no 'model_type'\n  fix: give")


def test_a_model_config_that_is_a_folder(job_file, tmp_path):
    error = error_of(job_file(JOB.replace("{model_type: gpt2, n_layer: 2}", ".")))
    assert "why: Is a directory\n  fix: give the config.json of" in error


def test_a_model_config_is_kept_as_a_path(job_file, tmp_path):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2"}))
    job = read_job(job_file(JOB.replace("{model_type: gpt2, n_layer: 2}", "gpt2.json")))
    assert job.model.config == tmp_path / "gpt2.json"


def test_an_inline_cluster_file_word(job_file):
    assert error_of(job_file(JOB + "cluster: auot\n")) == (
        "job.yaml:8: 'cluster': there is no cluster file auot\n"
        "  fix: did you mean 'auto'? give 'auto', the path of a cluster file, or the cluster itself"
    )


def test_an_empty_cluster_is_not_the_folder_of_the_job(job_file):
    error = error_of(job_file(JOB + "cluster: ''\n"))
    assert error.startswith("job.yaml:8: 'cluster' is empty\n  fix: give 'auto', the path of")


def test_an_error_in_a_cluster_file_names_that_file(job_file, tmp_path):
    (tmp_path / "cluster.yaml").write_text("classes: {a: {memory: 1 GiB}}\ndevices: [{class: b}]\n")
    error = error_of(job_file(JOB + "cluster: cluster.yaml\n"))
    assert error.startswith("cluster.yaml:2: class 'b' is not defined")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "job.yaml: the job file is empty\n  fix: write the job into it, or"),
     (b"# nothing\n", "job.yaml: the job file is empty"),
     (b"\xff\xfe", "job.yaml: the job file is not UTF-8 text"),
     (b"\n- a\n", "job.yaml:2: a job must be a mapping of keys to values, it is a list of 1"),
     (b"hello", "job.yaml:1: a job must be a mapping of keys to values, it is 'hello'")],
)  # fmt: skip
def test_what_is_no_job_file(tmp_path, content, said):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert error_of(path).startswith(said)


def test_no_file_and_a_folder(tmp_path):
    assert error_of(tmp_path / "none.yaml") == (
        "none.yaml: there is no such job file\n  fix: check the name and its folder"
    )
    (tmp_path / "job.yaml").touch()
    assert error_of(tmp_path / "jop.yaml").endswith("did you mean 'job.yaml'?")
    (tmp_path / "folder").mkdir()
    refused = "folder: this is a folder, not a job file\n  fix: give "
    assert error_of(tmp_path / "folder") == refused + "a file"
    (tmp_path / "folder" / "job.yaml").touch()
    assert error_of(tmp_path / "folder") == refused + "folder/job.yaml"
    assert "cannot read the job file" in error_of(tmp_path / "a\0b")


def test_a_program_is_no_job_and_says_what_runs_it(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    with raises(InputError, code="program-not-job") as caught:
        read_job(tmp_path / "train.py")
    assert f"gpumix launch {tmp_path / 'train.py'}" in caught.value.fix


def test_a_cluster_file_is_no_job_and_says_how_to_give_it(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("- {class: cpu, accelerator: cpu, memory: 1 GiB}\n")
    with raises(InputError, code="job-not-mapping") as caught:
        read_job(file)
    assert f"--cluster {file}" in caught.value.fix


@pytest.mark.parametrize("kind", ["plan", "profile", "checkpoint"])
def test_another_document_is_no_job(tmp_path, kind):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"kind": kind, "schema_version": 1, "stages": []}))
    with raises(InputError, code="document-of-another-kind", what=kind) as caught:
        read_job(path)
    assert (f"--{kind}" in caught.value.fix) == (kind != "checkpoint")
    assert caught.value.where == str(path)


def test_only_adamw_is_allowed_to_become_narrower(job_file):
    job = read_job(job_file(JOB + "allow: 8bit-optimizer\n"))
    assert job.allow == ("8bit-optimizer",)
    assert job.optimizer_of("8bit").name == "adamw_8bit"
    assert job.optimizer_of("fp32").name == "adamw"
    error = error_of(job_file(JOB + "allow: 8bit-optimizer\noptimizer: {name: sgd}\n"))
    assert "'allow' has no effect: 8bit-optimizer is for 'optimizer.name: adamw'" in error
