"""What is wrong with a job, its plan or its folders is said before anything is trained."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

import pytest
import toys
from safetensors.torch import save_file

from gpumix.schema.errors import GpumixError, InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.train import rank_tasks
from gpumix.train.checkpoint.manifest import Damaged
from gpumix.train.controller import JobController
from gpumix.train.processes.local_launcher import launch
from gpumix.train.rank_setup.context import Task
from gpumix.train.run_manifest import RunRecord
from helpers.extended import every_second, every_third, left_out
from helpers.runs.jobs import CLUSTER, OWN_PROFILES, gpumix, plan_for, toy, train, write_job

GIB = 2**30


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory) -> Path:
    """The folder of a run of one step."""
    job = write_job(tmp_path_factory.mktemp("one-step"))
    train(job, "max_steps=1", plan=plan_for(job))
    return job.parent / "run"


@pytest.fixture
def trained(job, one_step) -> Path:
    """A job of which a run has ended after one step."""
    shutil.copytree(one_step, job.parent / "run")
    return job


def refused(kind: type[GpumixError], *arguments, **options) -> GpumixError:
    with pytest.raises(kind) as caught:
        train(*arguments, **options)
    assert type(caught.value) is kind
    return caught.value


# -- the data --------------------------------------------------------------------------------------


def test_a_folder_without_texts_is_told_of_before_anything_is_measured(tmp_path):
    (tmp_path / "texts").mkdir()
    text = {"factory": None, "text": ["texts"], "pattern": "*.txt"}
    own = {"profile_cache": "own", "profile_budget": 20}
    error = refused(InputError, write_job(tmp_path, data=text, **own))
    assert "no file with text in it matches the pattern '*.txt'" in error.what
    assert str(tmp_path / "texts") in error.what and "put some there" in error.fix
    assert error.where == "data.pattern"
    assert not (tmp_path / "own").exists() and not (tmp_path / "run").exists()


# -- the plan --------------------------------------------------------------------------------------


def test_an_even_split_needs_a_sample_for_every_device(job):
    error = refused(InputError, job, "global_batch_size=2", "strategy=even")
    assert "a global batch of 2 cannot be split evenly over 3 devices" in error.what
    assert "optimal" in error.fix


@pytest.mark.extended
def test_the_optimal_plan_may_leave_devices_without_samples(job):
    summary = train(job, "global_batch_size=2", "max_steps=2")
    plan = Plan.load(job.parent / "run" / "plan.json")
    assert sum(w.samples for w in plan.workers) == 2
    assert 0 in {w.samples for w in plan.workers}
    assert len(summary.losses) == 2


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        ("4 MiB", "no plan fits a global batch of 8"),
        ("200 KiB", "one unit with one sample does not fit"),
    ],
)
def test_a_model_that_fits_nowhere_is_refused_in_bytes(tmp_path, memory, told):
    small = [{"class": "tiny", "accelerator": "cpu", "memory": memory, "count": 2}]
    job = write_job(tmp_path, cluster=small, model=toy(width=256, blocks=4))
    error = refused(NoFeasiblePlanError, job)
    assert error.exit_code == 4
    assert told in error.what
    assert "tiny" in error.where
    assert re.search(r"\d+ bytes", str(error))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("global_batch_size=16", "the plan is for global_batch_size 8, the job has 16"),
        ("sequence_length=4", "the plan is for sequence_length 8, the job has 4"),
        ("precision=bf16", "the plan is for precision fp32, the job has bf16"),
    ],
)
def test_a_plan_for_other_work_is_refused(job, change, told):
    error = refused(InputError, job, change, plan=plan_for(job))
    assert told in error.what
    assert "gpumix plan" in error.fix


def test_a_plan_for_other_devices_is_refused_before_anything_is_written(job):
    plan = plan_for(job)
    write_job(job.parent, cluster=[{**CLUSTER[0], "count": 3}])
    error = refused(InputError, job, plan=plan)
    assert "made for other devices" in error.what
    assert "small-0" in error.why
    assert not (job.parent / "run").exists()


def test_a_plan_for_another_model_is_refused(job):
    plan = plan_for(job)
    write_job(job.parent, model=toy(width=24))
    error = refused(InputError, job, plan=plan)
    assert "the plan was made for another model" in error.what


def test_a_plan_that_is_predicted_not_to_fit_is_refused(job):
    pipeline = JobController.of_file(job, [], debug=True)
    plan = pipeline.plan(pipeline.profile())
    assert plan.prediction is not None
    swollen = tuple(
        w.model_copy(update={"memory_bytes": {**w.memory_bytes, "more": GIB}})
        for w in plan.prediction.workers
    )
    prediction = plan.prediction.model_copy(update={"workers": swollen})
    too_large = plan.model_copy(update={"prediction": prediction})
    unmeasured = "advanced.profile_cache=other"  # what was measured would foretell it anew
    error = refused(NoFeasiblePlanError, job, unmeasured, plan=too_large)
    assert "the plan needs 1.0 GiB" in error.what


@pytest.mark.parametrize(
    ("techniques", "told"),
    [
        ({"tensor_parallel_size": 3}, "no host has 3 devices of one class"),
        ({"tensor_parallel_size": 2}, "nothing says how a Toy is divided"),
    ],
)
def test_tp_groups_that_there_cannot_be_are_told_whatever_was_measured_before(
    tmp_path, techniques, told
):
    JobController.of_file(write_job(tmp_path), [], debug=True).profile()
    error = refused(InputError, write_job(tmp_path, techniques=techniques))
    assert told in error.what
    assert "profile" not in error.fix


def test_more_stages_than_a_factorys_model_has_units_are_told_before_it_is_measured(tmp_path):
    techniques = {"min_pipeline_stages": 4, "leave_out": False}
    job = write_job(tmp_path, model=toy(blocks=3), techniques=techniques, **OWN_PROFILES)
    error = refused(InputError, job)
    assert re.search("no plan of 4 stages: .* and 3 units", error.what)
    assert not [file for file in (tmp_path / "profiles").rglob("*") if file.is_file()]


# -- the run's folder ------------------------------------------------------------------------------


def test_a_finished_run_is_not_overwritten(trained):
    job, plan = trained, plan_for(trained)
    error = refused(InputError, job, plan=plan)
    assert "checkpoints of an earlier run" in error.what
    assert "--resume" in error.fix


@pytest.mark.extended
def test_what_died_while_it_saved_first_may_start_again(job):
    """It has no checkpoint to go on from, so nothing stands in the way."""
    (job.parent / "run" / "checkpoints" / "step-00000002.part").mkdir(parents=True)
    train(job, "max_steps=1", plan=plan_for(job))


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints"])
def test_a_pipe_where_a_run_writes_is_not_waited_for(job, name):
    (job.parent / "run").mkdir()
    os.mkfifo(job.parent / "run" / name)
    for resume in (False, True):
        error = refused(InputError, job, plan=plan_for(job), resume=resume)
        assert error.where.endswith(name) and "it is a pipe" in error.what
        assert error.fix == "write elsewhere, or remove it"


def test_there_must_be_something_to_resume(job):
    error = refused(InputError, job, plan=plan_for(job), resume=True)
    assert "no checkpoint to go on from" in error.what
    assert "without --resume" in error.fix
    assert not (job.parent / "run").exists()


def test_a_refused_resume_leaves_the_run_as_it_was(trained):
    job = trained
    before = (job.parent / "run" / "plan.json").read_text()
    wider = write_job(job.parent, model=toy(width=32))
    refused(InputError, wider, "max_steps=2", plan=plan_for(wider), resume=True)
    assert (job.parent / "run" / "plan.json").read_text() == before


def test_two_runs_do_not_share_a_folder(tmp_path):
    """Told before anything is measured."""
    job = write_job(tmp_path, **OWN_PROFILES)
    run = job.parent / "run"
    run.mkdir()
    with (run / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        error = refused(InputError, job)
    assert "another run writes into the output folder" in error.what
    assert not any((job.parent / "profiles").glob("*"))


def test_a_run_that_goes_on_is_not_resumed(trained):
    """What it saved is that of an earlier run only once it has ended."""
    job, plan = trained, plan_for(trained)
    with (job.parent / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for resume in (False, True):
            error = refused(InputError, job, plan=plan, resume=resume)
            assert "another run writes into the output folder" in error.what
            assert "--resume" not in error.fix
        shutil.rmtree(job.parent / "run" / "checkpoints")
        error = refused(InputError, job, plan=plan, resume=True)
        assert "another run writes into the output folder" in error.what


@pytest.mark.extended
@pytest.mark.parametrize("size", [200, 0])
def test_a_record_that_was_not_written_to_its_end_stops_no_resume(job, size):
    plan = plan_for(job)
    train(job, "max_steps=2", plan=plan)
    record = job.parent / "run" / "run.json"
    record.write_bytes(record.read_bytes()[:size])
    assert len(train(job, "max_steps=4", plan=plan, resume=True).losses) == 2
    assert RunRecord.load(record).job["max_steps"] == 4


def test_the_output_must_be_a_folder(job):
    (job.parent / "run").write_text("mine")
    error = refused(InputError, job, plan=plan_for(job))
    assert "the output is a file" in error.what


def test_a_checkpoint_of_another_model_is_refused(trained):
    job = write_job(trained.parent, model=toy(width=24))
    error = refused(InputError, job, plan=plan_for(job), resume=True)
    assert "model" in error.what


CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257}
GPT = {"config": CONFIG | {"n_positions": 8, "bos_token_id": 256, "eos_token_id": 256}}
TOKENS = {"factory": "toys:tokens", "validation_split": 0.1}


OTHERS = {
    "seed": ({"seed": 1}, "other data", "`seed` was 0, here it is 1"),
    "samples": (
        {"data": TOKENS | {"arguments": {"samples": 48}}},
        "other data",
        "`data.arguments.samples` was null, here it is 48",
    ),
    "held out": (
        {"data": TOKENS | {"validation_split": 0.2, "prefetch": 3}},
        "other data",
        "`data.validation_split` was 0.1, here it is 0.2",
    ),
    "model": (
        {"model": toy(width=24)},
        "another model",
        "`model.arguments.width` was null, here it is 24",
    ),
    "optimizer": (
        {"optimizer": {"lr": 1e-3, "name": "sgd"}},
        "another optimizer",
        '`optimizer.name` was "adamw", here it is "sgd"',
    ),
}


@pytest.mark.parametrize("other", left_out(OTHERS, ("samples", "held out")))
def test_a_resume_that_cannot_be_names_the_keys_before_anything_is_measured(trained, other):
    change, what, why = OTHERS[other]
    folder = trained.parent
    record = (folder / "run" / "run.json").read_text()
    for given in (False, True):
        changed = write_job(folder, **OWN_PROFILES | change)
        plan = plan_for(changed) if given else None
        error = refused(InputError, changed, "max_steps=2", plan=plan, resume=True)
        assert error.what == f"the checkpoint is of {what}" and error.why == why
        assert error.where.endswith("step-00000001") and "begin anew" in error.fix
    assert not any((folder / "profiles").glob("*"))
    assert (folder / "run" / "run.json").read_text() == record


@pytest.mark.parametrize(
    ("change", "what"),
    every_second([("seed=1", "other data"), ("optimizer.name=sgd", "another optimizer")]),
)
def test_a_resume_that_one_key_forbids_is_refused_before_ranks_start(
    trained, monkeypatch, change, what
):
    """Where all was measured before, too."""
    monkeypatch.setattr(JobController, "_train", None)
    error = refused(InputError, trained, "max_steps=2", change, resume=True)
    assert error.what == f"the checkpoint is of {what}"


@pytest.mark.extended
def test_a_resume_with_another_configuration_names_what_differs(tmp_path):
    text = {"factory": "toys:tokens"}
    job = write_job(tmp_path, data=text, model=GPT)
    train(job, "max_steps=1", plan=plan_for(job))
    wider = write_job(tmp_path, data=text, model={"config": GPT["config"] | {"n_embd": 32}})
    error = refused(InputError, wider, plan=plan_for(wider), resume=True)
    assert error.why == "`model.config.n_embd` was 16, here it is 32"


def test_a_resume_with_other_texts_of_the_same_name_is_refused(tmp_path):
    """No key of the job differs."""
    (tmp_path / "text.txt").write_text("of the same name, " * 40)
    job = write_job(tmp_path, data={"text": ["text.txt"]}, model=GPT)
    train(job, "max_steps=1", plan=plan_for(job))
    (tmp_path / "text.txt").write_text("and of other words " * 40)
    error = refused(InputError, job, "max_steps=2", plan=plan_for(job), resume=True)
    assert error.what == "the checkpoint is of other data"
    assert "of other content" in error.why


@pytest.mark.extended
@pytest.mark.slow
def test_a_resume_with_other_batches_or_fewer_steps_says_so(job):
    train(job, "max_steps=3", plan=plan_for(job))
    plan_for(job, (2, 1, 1)).save(job.parent / "halves.json")
    words = [
        "train",
        "job.yaml",
        "--plan",
        "halves.json",
        "--resume",
        "--set",
        "global_batch_size=4",
    ]
    less = gpumix(*words, "--set", "max_steps=1", folder=job.parent)
    assert less.code == 0, less.err
    assert "nothing was left to do: the run has 3 steps, and the job wants 1" in less.err
    more = gpumix(*words, "--set", "max_steps=4", folder=job.parent)
    assert more.code == 0 and "steps now take 4 samples, they took 8" in more.err


@pytest.mark.extended
def test_a_resume_reads_other_files_with_the_same_texts(tmp_path):
    """What they are called, and how they are fetched, makes no other data."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("of the same words, " * 40)
    job = write_job(tmp_path, data={"text": ["a.txt"]}, model=GPT)
    train(job, "max_steps=1", plan=plan_for(job))
    job = write_job(tmp_path, data={"text": ["b.txt"], "num_workers": 2}, model=GPT)
    assert len(train(job, "max_steps=2", plan=plan_for(job), resume=True).losses) == 1


@pytest.mark.extended
def test_a_checkpoint_that_was_cut_short_is_refused(trained):
    job, plan = trained, plan_for(trained)
    [file, *_] = sorted((job.parent / "run" / "checkpoints").glob("*/__0_*"))
    file.write_bytes(file.read_bytes()[:-100])
    error = refused(Damaged, job, plan=plan, resume=True)
    assert file.name in str(error)


# -- the job's own code ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "told"),
    every_third(
        [
            ("toyz:model", "there is no module 'toyz'"),
            ("toys:modle", "module 'toys' has no function 'modle'"),
            ("toys:no_module", "the factory returned a str, not a torch.nn.Module"),
        ]
    ),
)
def test_a_factory_must_give_a_model(tmp_path, factory, told):
    job = write_job(tmp_path)
    plan = plan_for(job)
    write_job(tmp_path, model={"factory": factory})
    error = refused(InputError, job, plan=plan)
    assert told in str(error)


def test_a_factory_must_take_its_arguments(tmp_path):
    job = write_job(tmp_path)
    plan = plan_for(job)
    write_job(tmp_path, model=toy(depth=3))
    assert "depth" in str(refused(InputError, job, plan=plan))


def test_what_a_factory_raises_is_told_as_the_jobs_own(tmp_path):
    job = write_job(tmp_path)
    plan = plan_for(job)
    write_job(tmp_path, model={"factory": "toys:broken"})
    error = refused(InputError, job, plan=plan)
    assert "the job's own code failed: ValueError: this factory is broken" in error.what
    assert "toys.py" in error.where
    assert "Traceback" not in str(error)


# -- initial weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "dropped", "told"),
    every_second(
        [
            (32, "", r"another shape: embedding\.weight is \(32, 32\), the model wants \(32, 16\)"),
            (16, "head.bias", r"missing: head\.bias$"),
        ]
    ),
)
def test_weights_of_another_model_are_refused_before_anything_is_measured(
    tmp_path, width, dropped, told
):
    values = toys.model(width=width).state_dict()
    values.pop(dropped, None)
    save_file(values, tmp_path / "weights.safetensors")
    model = {**toy(width=16), "weights": "weights.safetensors"}
    job = write_job(tmp_path, model=model, **OWN_PROFILES)
    error = refused(InputError, job)
    assert error.what == "the weights are those of another model"
    assert re.search(told, error.why, re.MULTILINE)
    assert error.where == str(tmp_path / "weights.safetensors")
    assert not any((tmp_path / "profiles").glob("*"))


def test_a_device_in_which_no_model_can_be_built_is_too_small(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 264,
        "num_hidden_layers": 3, "num_attention_heads": 4,
    }  # fmt: skip
    tiny = [{"class": "tiny", "emulate": "8 GFLOP/s", "memory": "64 KiB"}]
    error = refused(
        NoFeasiblePlanError, write_job(tmp_path, model={"config": config}, cluster=tiny)
    )
    assert error.what == "a device has not even the memory in which a model is built"
    assert "'tiny' is out of memory" in error.why


# -- ranks that disagree ---------------------------------------------------------------------------


def _train_own(seat, tasks, plans, devices):
    """A rank of a run whose hosts were given different things."""
    return rank_tasks.train(seat, tasks[seat.rank], plans[seat.rank], None, devices, False)


def disagreement(job, *, overrides=("", "", ""), plans=None) -> GpumixError:
    pipelines = [JobController.of_file(job, [o] if o else [], debug=False) for o in overrides]
    tasks = [Task(p.job, p.cluster, p.folder) for p in pipelines]
    devices = pipelines[0].cluster.in_rank_order()
    with pytest.raises(InputError) as caught:
        launch(_train_own, devices, tasks, plans or [plan_for(job)] * 3, devices)
    return caught.value


def test_ranks_with_different_jobs_are_told_apart(job):
    error = disagreement(job, overrides=("", "max_steps=7", ""))
    assert "ranks disagree about the job: 'max_steps' is 6 on rank 0" in error.what
    assert "7 on rank 1 (device 'small-0'" in error.what


@pytest.mark.extended
def test_hosts_may_keep_their_files_in_different_places(job, tmp_path):
    pipeline = JobController.of_file(job, [], debug=False)
    tasks = [
        Task(pipeline.job.model_copy(update={"advanced": advanced}), pipeline.cluster, tmp_path)
        for advanced in (
            pipeline.job.advanced.model_copy(update={"profile_cache": tmp_path / str(rank)})
            for rank in range(3)
        )
    ]
    devices = pipeline.cluster.in_rank_order()
    summaries = launch(_train_own, devices, tasks, [plan_for(job)] * 3, devices)
    assert [s.steps for s in summaries] == [6, 6, 6]


def test_ranks_with_different_plans_are_told_apart(job):
    plans = [plan_for(job), plan_for(job), plan_for(job, samples=(2, 4, 2))]
    error = disagreement(job, plans=plans)
    assert "ranks disagree about the plan" in error.what


def test_ranks_that_see_different_data_are_told_apart(tmp_path):
    data = {"factory": "toys:tokens", "arguments": {"per_rank": 10}, "validation_split": 0}
    job = write_job(tmp_path, data=data)
    error = disagreement(job)
    assert "ranks see different data: rank 0 (device 'big-0'" in error.what
    assert "64 samples" in error.what
    assert "74 samples" in error.what
