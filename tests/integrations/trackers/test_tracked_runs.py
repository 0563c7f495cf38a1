"""Runs that are tracked, from outside: what is in the trackers at the end, and what becomes of a
run whose tracker fails."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpumix.hardware.host.environment import shared_memory_folder
from gpumix.schema.errors import MachineError
from gpumix.train.run_log import tracker_process
from helpers.errors import raises
from helpers.extended import left_out
from helpers.runs.jobs import metrics, plan_for, toy, train, write_job

STEPS, MORE = 8, 10


@pytest.fixture(scope="module", params=left_out([STEPS, MORE], [MORE]))
def steps(request) -> int:
    """How many the run has in the end: as many as it began with, or more."""
    return request.param


@pytest.fixture(scope="module")
def run(steps, tmp_path_factory):
    """A run of which the first rank was killed after some steps, and that may have been gone on
    with."""
    if shared_memory_folder() is None:
        pytest.skip("nothing is kept of a run in memory here")
    folder = tmp_path_factory.mktemp("tracked")
    job = write_job(
        folder,
        model=toy(fault="kill", rank=0, at=6, once=str(folder / "killed")),
        max_steps=STEPS,
        max_restarts=3,
        logging_steps=1,
        eval_steps=4,
        eval_batches=1,
        save_steps=4,
        memory_save_steps=1,
        report_to={"tensorboard": {}, "prometheus": {"textfile": "shown/run.prom"}},
    )
    plan = plan_for(job)
    train(job, plan=plan)
    if steps > STEPS:
        train(job, f"max_steps={steps}", plan=plan, resume=True)
    return folder


@pytest.fixture(scope="module")
def shown(run) -> EventAccumulator:
    """What TensorBoard shows of it."""
    found = EventAccumulator(
        str(run / "run" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    return found.Reload()


def test_each_step_is_there_once_though_the_run_started_again(run, shown, steps):
    """The library's own files, as its own reader reads them, are what the run says of itself."""
    assert metrics(run / "run", "restart")
    for name, key in (
        ("train/loss", "loss"),
        ("train/grad_norm", "gradient_norm"),
        ("train/learning_rate", "learning_rate"),
    ):
        points = shown.Scalars(name)
        assert [point.step for point in points] == list(range(1, steps + 1))
        expected = [one[key] for one in metrics(run / "run")]
        assert [point.value for point in points] == pytest.approx(expected, rel=1e-5)


def test_points_have_the_times_of_their_steps(run, shown):
    begun = metrics(run / "run")[0]["time"]
    times = [point.wall_time for point in shown.Scalars("train/loss")]
    assert times[0] == pytest.approx(begun)
    assert times == sorted(times)


def test_evaluations_classes_and_devices(run, shown, steps):
    losses = [one["loss"] for one in metrics(run / "run", "evaluation")]
    assert [point.value for point in shown.Scalars("eval/loss")] == pytest.approx(losses, rel=1e-5)
    last = metrics(run / "run", "ranks")[-1]["ranks"]
    for of_rank in last:
        point = shown.Scalars(f"device/{of_rank['device']}/busy")[-1]
        assert point.value == pytest.approx(of_rank["busy_share"], rel=1e-5)
        assert (point.step, of_rank["overruns"]) == (steps, 0)
    assert {f"class/{name}/share/compute" for name in ("big", "small")} <= set(
        shown.Tags()["scalars"]
    )


def test_events_and_settings_are_texts(run, shown, steps):
    def texts(tag):
        return [one.tensor_proto.string_val[0].decode() for one in shown.Tensors(tag)]

    [restart] = metrics(run / "run", "restart")
    [told] = texts("events/restart")
    assert told.endswith(f"{restart['why']}; {restart['decided']}")
    assert [point.step for point in shown.Scalars("event/restart")] == [restart["step"]]
    assert f"max_steps: {STEPS}\n" in texts("run/job")[0]
    assert f"max_steps: {steps}\n" in texts("run/job")[-1]
    assert "global_batch: 8" in texts("run/plan")[0]
    assert "torch: " in texts("run/versions")[0]


def test_the_text_file_has_the_newest_numbers(run, steps):
    text = (run / "shown" / "run.prom").read_text(encoding="utf-8")
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = {k: v for k, v in one.labels.items() if k != "run"}
            found[one.name, *labels.values()] = one.value
            assert one.labels["run"] == "run"
    last = metrics(run / "run")[-1]
    assert found["gpumix_loss",] == pytest.approx(last["loss"])
    assert found["gpumix_tokens_total",] == last["tokens"]
    assert (found["gpumix_step",], found["gpumix_steps",]) == (steps, steps)
    assert found["gpumix_run_state", "finished"] == 1
    ranks = {one["device"]: one for one in metrics(run / "run", "ranks")[-1]["ranks"]}
    for device, one in ranks.items():
        assert found["gpumix_device_busy_ratio", device] == pytest.approx(one["busy_share"])


def test_the_run_folder_knows_how_far_each_tracker_is(run, steps):
    marks = json.loads((run / "run" / ".trackers" / "tensorboard.json").read_text())
    assert marks["steps"]["step"] == steps


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_told_once_and_left_out(tmp_path, capfd):
    """The file cannot be replaced: a folder has its name."""
    (tmp_path / "taken.prom").mkdir()
    job = write_job(tmp_path, report_to={"prometheus": {"textfile": "taken.prom"}})
    summary = train(job, plan=plan_for(job))
    told = capfd.readouterr().err
    assert summary.steps == 6
    assert told.count("tracker prometheus: left out after step") == 1
    assert "the run goes on" in told


@pytest.fixture
def other_process(tmp_path, monkeypatch):
    """Lets the process of trackers run this code."""

    def of(code: str) -> None:
        (tmp_path / "other_tracker.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(tracker_process, "MODULE", "other_tracker")

    return of


READY = "print('{\"ready\": true}', flush=True)\n"


HANGING = """
import time
from gpumix.integrations.trackers import __main__, tensorboard

tensorboard.TensorBoard.begin = lambda self, run: time.sleep(600)
__main__.main()
"""


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_other_trackers(
    tmp_path, monkeypatch, capfd, other_process
):
    other_process(HANGING)
    monkeypatch.setattr(tracker_process, "END_S", 2.0)
    trackers = {"tensorboard": {}, "prometheus": {"textfile": "run.prom"}}
    job = write_job(tmp_path, report_to=trackers)
    assert train(job, plan=plan_for(job)).steps == 6
    told = capfd.readouterr().err
    assert "tracker tensorboard: did not take the rest within 2 s" in told
    assert "tracker prometheus: did not" not in told
    shown = (tmp_path / "run.prom").read_text(encoding="utf-8")
    assert 'state="finished"} 1.0' in shown


@pytest.mark.extended
def test_a_process_that_hangs_is_not_waited_for(tmp_path, monkeypatch, capfd, other_process):
    other_process(f"import time\n{READY}time.sleep(600)")
    monkeypatch.setattr(tracker_process, "END_S", 0.2)
    monkeypatch.setattr(tracker_process, "EXIT_S", 0.1)
    job = write_job(tmp_path, report_to="tensorboard")
    assert train(job, plan=plan_for(job)).steps == 6
    assert "tracker tensorboard: did not take the rest within 0 s" in capfd.readouterr().err


@pytest.mark.extended
def test_a_process_that_dies_is_told_of(tmp_path, capfd, other_process):
    other_process(f"import os\n{READY}os.kill(os.getpid(), 11)")
    job = write_job(tmp_path, report_to="tensorboard")
    assert train(job, plan=plan_for(job)).steps == 6
    assert "tracker tensorboard: died, with exit code -11" in capfd.readouterr().err


def line_of(job, key):
    """Where a key of the top stands in a job's file."""
    lines = job.read_text().splitlines()
    return f"{job}:{next(n for n, line in enumerate(lines, 1) if line.startswith(f'{key}:'))}"


def test_a_tracker_that_cannot_start_is_an_error_before_anything_is_measured(
    tmp_path, other_process
):
    other_process("raise SystemExit(3)")
    job = write_job(tmp_path, report_to="tensorboard")
    with raises(MachineError, code="tracker-not-started") as caught:
        train(job)
    assert caught.value.where == f"{line_of(job, 'report_to')}: report_to"
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.extended
def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(tmp_path):
    (tmp_path / "taken").touch()
    job = write_job(tmp_path, report_to={"tensorboard": {"folder": "taken"}})
    with raises(MachineError, code="tracker-not-started", what="tensorboard") as caught:
        train(job)
    taken = tmp_path / "taken" / "run"
    assert str(taken) in caught.value.why
    assert caught.value.fix == (
        f"see that {taken} can be written, name another at `report_to.tensorboard`, or leave "
        "`tensorboard` out: the run's metrics.jsonl has all that it would be told"
    )


def test_a_port_that_is_taken_is_told_with_the_line_of_its_tracker(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = write_job(tmp_path, report_to={"prometheus": {"port": port}})
        with pytest.raises(MachineError) as caught:
            train(job)
    text = job.read_text().splitlines()
    line = next(n for n, one in enumerate(text, 1) if "prometheus:" in one)
    assert caught.value.where == f"{job}:{line}: report_to.prometheus"


def test_a_package_that_is_missing_is_told_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_process, "find_spec", lambda name: None)
    job = write_job(tmp_path, report_to=["wandb", "prometheus"])
    with pytest.raises(MachineError) as caught:
        train(job)
    assert "wandb, prometheus" in caught.value.what
    assert caught.value.where == f"{line_of(job, 'report_to')}: report_to"
    assert caught.value.fix == 'pip install ".[wandb,prometheus]"  # in gpumix\'s folder'
    assert not (tmp_path / "run").exists()
