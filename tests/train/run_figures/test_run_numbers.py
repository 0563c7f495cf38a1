"""The numbers that a run shows: per class, over recent steps; and how they look."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from gpumix.schema import files
from gpumix.schema.errors import Interrupted, MachineError
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.run_figures.display import Display
from gpumix.train.run_figures.writer import RunLog, append_event
from gpumix.train.run_log import progress as progress_file
from gpumix.train.run_log.metrics import (
    ClassRecord,
    ComputedPart,
    RankRecord,
    RunEvent,
    StepRecord,
    by_class,
    fullest_by_class,
    speed_of,
)
from gpumix.train.run_log.progress import mark_failed, mark_restarting
from gpumix.train.run_log.time_breakdown import TimeShares
from helpers.runs.jobs import metrics, progress

MIB = 2**20


def worker(device: str, device_class: str, samples: int) -> Worker:
    return Worker(
        device=device, device_class=device_class, samples=samples, micro_batch=samples,
        state_share=0.25,
    )  # fmt: skip


WORKERS = (
    worker("a", "fast", 5),
    worker("b", "slow", 2),
    worker("c", "slow", 1),
    worker("d", "idle", 0),
)


def plan(*peaks: int) -> Plan:
    """Four workers of three classes; `peaks` are their predicted peaks."""
    predicted = tuple(
        WorkerPrediction(
            device=w.device, forward_s=1, backward_s=1, optimizer_s=0, busy_s=2,
            memory_bytes={"all": peak}, memory_limit_bytes=10 * MIB,
        )
        for w, peak in zip(WORKERS, peaks)
    )  # fmt: skip
    prediction = Prediction(step_s=2, tokens_per_s=1, exposed_communication_s=0, workers=predicted)
    return Plan(
        strategy="test",
        model="m",
        sequence_length=4,
        global_batch=8,
        stages=(Stage(units=("u",), workers=WORKERS),),
        prediction=prediction if peaks else None,
        emulated=True,
    )


def told(busy: float, peak: int | None, overruns: int = 0) -> RankRecord:
    return RankRecord("", "", busy, peak, overruns)


RECORDS = [told(1.0, 5 * MIB), told(0.4, 2 * MIB, 1), told(0.6, 3 * MIB, 2), told(0.1, None)]


def test_ranks_are_put_together_by_class():
    found = by_class(plan(6 * MIB, 3 * MIB, 4 * MIB, MIB), RECORDS)
    assert found == [
        ClassRecord("fast", 1, 5, 1.0, 5 * MIB, 6 * MIB, 0, {"all": 6 * MIB}),
        ClassRecord("slow", 2, 3, 0.5, 3 * MIB, 4 * MIB, 3, {"all": 4 * MIB}),
        ClassRecord("idle", 1, 0, 0.1, None, MIB, 0, {"all": MIB}),
    ]


def test_measured_memory_is_that_of_the_fullest_device():
    """A device that tells no peak has no say."""
    laid_out = [4 * MIB, MIB, 2 * MIB, MIB]
    records = [replace(one, laid_out_bytes=n) for one, n in zip(RECORDS, laid_out)]
    found = {one.device_class: one.measured_memory for one in by_class(plan(), records)}
    assert found == {
        "fast": {"laid out": 4 * MIB, "samples": MIB},
        "slow": {"laid out": 2 * MIB, "samples": MIB},
        "idle": {},
    }


def test_of_allocators_the_fullest_is_told_and_retries_are_counted():
    records = [
        replace(one, reserved_bytes=held, retries=retries)
        for one, held, retries in zip(RECORDS, (6 * MIB, 4 * MIB, 5 * MIB, None), (0, 1, 2, 0))
    ]
    found = {c.device_class: (c.reserved_bytes, c.retries) for c in by_class(plan(), records)}
    assert found == {"fast": (6 * MIB, 0), "slow": (5 * MIB, 3), "idle": (None, 0)}


def test_what_is_predicted_of_a_device_stays_its_own_in_any_order_of_ranks():
    foretold = plan(6 * MIB, 3 * MIB, 4 * MIB, MIB).prediction
    assert foretold is not None
    counted = tuple(
        expected.model_copy(update={"model_flops": 1e9 * n, "hardware_flops": 1e9 * n})
        for n, expected in enumerate(foretold.workers, 1)
    )
    peaks = {name: Peak(flops_per_s=1e10, source="stated") for name in ("fast", "slow")}
    known = foretold.model_copy(update={"workers": counted, "peaks": peaks})
    turned = plan().model_copy(update={"prediction": known}).for_devices(["d", "c", "b", "a"])
    planned = {one.device_class: one.planned_memory for one in by_class(turned, RECORDS)}
    assert planned == {"idle": {"all": MIB}, "slow": {"all": 4 * MIB}, "fast": {"all": 6 * MIB}}
    assert [speed_of(turned, rank, 1.0, 1.0).mfu for rank in range(4)] == [
        None, pytest.approx(0.3), pytest.approx(0.2), pytest.approx(0.1),
    ]  # fmt: skip


def test_memory_is_planned_for_the_fullest_split_of_the_run_as_its_peak_is_the_highest():
    """The second split leaves less to the fast class and more to the slow one."""
    first, second = plan(6 * MIB, 3 * MIB, 4 * MIB, MIB), plan(4 * MIB, 5 * MIB, 3 * MIB, MIB)
    fullest = fullest_by_class(second, fullest_by_class(first))
    found = {one.device_class: one for one in by_class(second, RECORDS, fullest)}
    assert {name: one.planned_peak_bytes for name, one in found.items()} == {
        "fast": 6 * MIB, "slow": 5 * MIB, "idle": MIB,
    }  # fmt: skip
    assert found["fast"].planned_memory == {"all": 6 * MIB}


def test_a_plan_by_hand_foretells_nothing():
    assert [c.planned_peak_bytes for c in by_class(plan(), RECORDS)] == [None, None, None]


def test_what_a_rank_tells_arrives_as_it_was():
    assert RankRecord.from_json(RECORDS[1].to_json()) == RECORDS[1]


def test_shares_of_a_class_are_means_and_arrive_as_they_were():
    shares = [TimeShares(0.5, 0.1, 0.2, 0.1, 0.1), TimeShares(0.7, 0.1, 0.0, 0.1, 0.1)]
    records = [
        RECORDS[0],
        *(replace(r, shares=s, mfu=0.3) for r, s in zip(RECORDS[1:3], shares)),
        RECORDS[3],
    ]
    assert RankRecord.from_json(records[1].to_json()) == records[1]
    fast, slow, _ = by_class(plan(), records)
    assert slow.shares is not None
    assert list(asdict(slow.shares).values()) == pytest.approx([0.6, 0.1, 0.1, 0.1, 0.1])
    assert (slow.mfu, fast.shares, fast.mfu) == (pytest.approx(0.3), None, None)


def test_utilisation_is_of_the_own_peak_and_unknown_without_one():
    foretold = plan(MIB, MIB, MIB, MIB).prediction
    assert foretold is not None
    workers = tuple(
        expected.model_copy(update={"model_flops": 6e9, "hardware_flops": 8e9})
        for expected in foretold.workers
    )
    peaks = {"fast": Peak(flops_per_s=1e10, source="stated")}
    known = foretold.model_copy(update={"workers": workers, "peaks": peaks})
    found = plan().model_copy(update={"prediction": known})
    assert speed_of(found, 0, 2.0, 20) == (20 / 2, 0.3, 0.4)
    assert speed_of(found, 1, 2.0, 7.5) == (7.5 / 2, None, None)
    assert speed_of(plan(), 0, 2.0, 20) == (20 / 2, None, None)


@pytest.mark.parametrize(
    ("widths", "factor"),
    [
        ([4, 4], 1.0),
        ([None, None], 1.0),  # no tokens
        ([4, 4, 4, 4], 2.0),  # two batches, where a step is made of several
        ([4], 0.5),  # the last batch of an epoch
        ([4, 2], None),
        ([2, 2], None),
        ([3, 4], None),
    ],
)
def test_utilisation_is_of_what_was_computed_and_unknown_where_that_cannot_be_told(widths, factor):
    foretold = plan(MIB, MIB, MIB, MIB).prediction
    assert foretold is not None
    flops = {"model_flops": 6e9, "hardware_flops": 8e9}
    workers = tuple(expected.model_copy(update=flops) for expected in foretold.workers)
    peaks = {"slow": Peak(flops_per_s=1e10, source="stated")}
    known = foretold.model_copy(update={"workers": workers, "peaks": peaks})
    found = plan().model_copy(update={"prediction": known})
    part = ComputedPart.of([(1, width) for width in widths], found.workers[1].samples, 4)
    told = speed_of(found, 1, 2.0, 20, part)
    assert told.tokens_per_s == 20 / 2
    if factor is None:
        assert told[1:] == (None, None)
    else:
        assert told[1:] == (pytest.approx(0.3 * factor), pytest.approx(0.4 * factor))


def test_samples_a_little_shorter_than_planned_are_told_of():
    part = ComputedPart.of([(50, 128), (50, 125)], 100, 128)
    assert part.known == pytest.approx(1.0, abs=0.02)
    assert part.by_squares < part.known < part.by_tokens
    assert ComputedPart.of([], 0, 128).known == 1.0  # who has no samples computes none, as planned


def test_what_short_samples_take_is_between_both_parts():
    """By torch's own count of a whole model."""
    length = 96
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=length, vocab_size=40
    )
    model = transformers.GPT2LMHeadModel(config)

    def counted(rows: int, width: int) -> int:
        tokens = torch.zeros(rows, width, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        return counter.get_total_flops()

    whole = counted(4, length)
    for cut in ([(3, 20), (1, 90)], [(2, 48), (2, 48)], [(4, 8)]):
        part = ComputedPart.of(cut, 4, length)
        assert part.by_squares < sum(counted(*one) for one in cut) / whole < part.by_tokens


# -- files -----------------------------------------------------------------------------------------


def step(number: int, step_s: float = 0.5) -> StepRecord:
    return StepRecord(
        step=number, loss=2.0 / number, learning_rate=1e-3, gradient_norm=0.7, step_s=step_s,
        tokens_per_s=24 / step_s, tokens=24 * number,
    )  # fmt: skip


def test_speed_is_that_of_a_median_step(tmp_path):
    with RunLog(tmp_path, plan(), 10) as log:
        assert log.figures.tokens_per_s is None
        for number, seconds in enumerate((9.0, 0.5, 0.5), 1):
            log.step(step(number, seconds))
        found = progress(tmp_path)
        # As the steps tell, which leave out padding.
        assert log.figures.tokens_per_s == found["tokens_per_s"] == 24 / 0.5
    assert found["state"] == "training"
    assert (found["step"], found["remaining_s"]) == (3, 7 * 0.5)


@pytest.mark.parametrize("steps", [10, None])
def test_nothing_remains_of_a_run_that_is_finished(tmp_path, steps):
    """Also if it was not told how many steps there are, or ends before them."""
    with RunLog(tmp_path, plan(), steps) as log:
        log.step(step(1))
    found = progress(tmp_path)
    assert (found["state"], found["remaining_s"]) == ("finished", 0)


@pytest.mark.parametrize(
    ("error", "state"), [(Interrupted("stop"), "interrupted"), (ValueError("oh"), "failed")]
)
def test_progress_says_how_a_run_ended(tmp_path, error, state):
    with pytest.raises(type(error)), RunLog(tmp_path, plan(), 10) as log:
        log.step(step(1))
        raise error
    assert progress(tmp_path)["state"] == state
    assert progress(tmp_path)["why"] == str(error)
    assert progress(tmp_path)["step"] == 1


def test_a_folder_that_was_renamed_is_looked_for_not_given_room(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(MachineError) as caught, RunLog(folder, plan(), 10) as log:
        folder.rename(tmp_path / "other")
        log.step(step(1))
    assert caught.value.why == "No such file or directory"
    assert caught.value.fix.startswith("see that the folder is there, by this name; then run")


def test_progress_says_that_a_run_starts_again_and_that_it_could_not(tmp_path):
    with RunLog(tmp_path, plan(), 10) as log:
        log.step(step(1))
        log.progress("training")
        mark_restarting(tmp_path, "rank 1 died")
        assert (progress(tmp_path)["state"], progress(tmp_path)["why"]) == (
            "restarting", "rank 1 died",
        )  # fmt: skip
        mark_failed(tmp_path, "no plan fits")
        assert (progress(tmp_path)["state"], progress(tmp_path)["why"]) == (
            "failed", "no plan fits",
        )  # fmt: skip
    assert progress(tmp_path)["state"] == "finished"
    mark_restarting(tmp_path, "nothing")
    assert progress(tmp_path)["state"] == "finished"


def test_what_is_found_out_afterwards_is_one_more_record(tmp_path):
    with RunLog(tmp_path, plan(), 1) as log:
        log.step(step(1))
    append_event(tmp_path, 1, RunEvent("compared", {"strategy": "even", "step_s": 2.0}, ""))
    assert [r["step"] for r in metrics(tmp_path)] == [1]
    (told,) = metrics(tmp_path, "compared")
    assert (told["step"], told["strategy"], told["step_s"]) == (1, "even", 2.0)


def test_the_files_are_whole_after_every_record(tmp_path):
    with RunLog(tmp_path, plan(), 10) as log:
        log.step(step(1))
        log.classes(1, by_class(plan(), RECORDS))
        log.evaluation(1, 1.5)
        assert [r["step"] for r in metrics(tmp_path)] == [1]
        assert metrics(tmp_path, "evaluation")[0]["loss"] == 1.5
        assert len(metrics(tmp_path, "classes")[0]["classes"]) == 3


# -- the screen ------------------------------------------------------------------------------------


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=None
    )


def shown(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_without_a_terminal_there_is_a_line_every_few_steps(tmp_path):
    screen = console(terminal=False, width=120)
    with RunLog(tmp_path, plan(), 5) as log, Display(log, 2, "run", screen) as display:
        for number in range(1, 6):
            log.step(step(number))
            log.classes(number, by_class(plan(), RECORDS))
            display.step(step(number))
    lines = shown(screen).splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5", "5/5"]
    assert lines[-1] == (
        "step 5/5  loss 0.4000  lr 1.00e-03  48 tokens/s  busy: fast 100.0%, slow 50.0%, idle 10.0%"
    )


def test_on_a_terminal_there_is_a_table(tmp_path):
    screen = console(terminal=True, width=140)
    planned = plan(6 * MIB, 3 * MIB, 4 * MIB, MIB)
    with RunLog(tmp_path, planned, 5) as log, Display(log, 1, "mine · gpt2", screen) as display:
        log.step(step(1))
        display.step(step(1))
        display.evaluation(1, 1.25)
        log.step(step(2))
        log.classes(2, by_class(planned, RECORDS))
        display.step(step(2))
    text = shown(screen)
    assert "validation loss 1.2500 at step 1" in text
    last = text[text.rindex("mine · gpt2") :]
    for said in (
        "48 tokens/s", "500 ms a step", "75% faster than planned", "2/5", "2 s left",
        "2 × slow", "50.0%", "4.0 MiB", "times are of the emulation",
    ):  # fmt: skip
        assert said in last, said


def test_that_it_failed_is_told_where_no_further_file_has_room(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    told = {"state": "training", "why": "", "step": 3, "time": 1.0}
    (tmp_path / "progress.json").write_text(json.dumps(told | {"more": "x" * 200}))
    monkeypatch.setattr(progress_file, "write_text_atomically", full)
    mark_failed(tmp_path, "the disk is full")
    now = json.loads((tmp_path / "progress.json").read_text())
    assert (now["state"], now["why"], now["step"]) == ("failed", "the disk is full", 3)


def test_a_file_for_which_there_is_no_room_leaves_no_part(tmp_path, monkeypatch):
    (tmp_path / "told").write_text("before")
    monkeypatch.setattr(files.os, "replace", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        progress_file.write_text_atomically(tmp_path / "told", "after")
    assert [file.name for file in tmp_path.iterdir()] == ["told"]
    assert (tmp_path / "told").read_text() == "before"
