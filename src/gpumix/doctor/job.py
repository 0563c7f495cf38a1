"""A job as a patient: windows are trial runs of the plan, changes are job settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpumix.doctor.change import Changes, format_overrides
from gpumix.doctor.examine import TimedWindow
from gpumix.doctor.function.loss_comparison import describe_loss_difference
from gpumix.doctor.function.remarks import remark_on_loops, remark_on_steering_reads
from gpumix.doctor.machine import (
    SITES,
    MachineObservations,
    remark_on_machine,
    remark_on_starvation,
    remark_on_unfused_attention,
    watch_machine,
)
from gpumix.doctor.rank_watch import CODE_CHANGES, RankObservations, RankWatch
from gpumix.doctor.report import Remark, Suspect
from gpumix.doctor.suspects import Evidence, find_suspects
from gpumix.hardware.host.cpu import has_bf16
from gpumix.hardware.host.environment import has_cpp_compiler
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import GpumixError
from gpumix.schema.files import make_scratch_folder
from gpumix.schema.job.job import Job
from gpumix.schema.plan.dtypes import choose_compute_dtypes
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController
from gpumix.train.elastic.rebalance_memory import predict_rebalanced_plan
from gpumix.train.run_log.summary import TrialResult

SETTLING = 10  # additional steps for the loader to tune itself
LOSS_CHANGES = {
    "late_values": "late_values",
    "precision": "autocast",
}  # changes, and names in `alike`
# Job keys affecting its profile.
MEASURED: dict[str, Any] = {"precision": True, "torch_compile": True, "advanced": {"efficiency"}}
AMPERE = 8  # major compute capability introducing TF32


@dataclass
class JobPatient:
    """The job at `path` with some changes.

    Attributes:
        given: the user's `--set` arguments, not part of the examination.
        steps: of a window, including steps for the loader to settle.
        folder: for output of windows.
        allowed: code callable by the job; see `JobController.of_file`.
        global_batch: of the unchanged job, None without changes; `tokens`: of its steps.
        inside: observations inside ranks before any change; `kernels_share`: fraction of a step in
            which a GPU computes.
    """

    path: Path
    given: tuple[str, ...]
    steps: int
    folder: Path
    allowed: tuple[str, ...] | None = None
    debug: bool = False
    changes: Changes = field(default_factory=dict)
    global_batch: int | None = None
    tokens: float = 0.0
    profiles: dict[str, Profile] = field(default_factory=dict)
    trials: list[TrialResult] = field(default_factory=list)
    seen: MachineObservations | None = None
    inside: RankObservations | None = None
    kernels_share: float | None = None

    @cached_property
    def pipeline(self) -> JobController:
        settings = {key: value for key, value in self.changes.items() if key not in CODE_CHANGES}
        said = [
            *self.given,
            *format_overrides(settings),
            f"output_dir={self.folder}",
            "advanced.trace_step=null",
        ]
        return JobController.of_file(self.path, said, allowed=self.allowed, debug=self.debug)

    @property
    def job(self) -> Job:
        return self.pipeline.job

    @cached_property
    def plan(self) -> Plan:
        """The plan after a run's possible rebalancing of samples."""
        profile = self._profile()
        plan = self.pipeline.plan(profile)
        return predict_rebalanced_plan(profile, plan) if self.job.advanced.rebalance else plan

    def _profile(self) -> Profile:
        """Return the profile, measured once for all changes without effect on it."""
        job = self.job
        said = job.model_dump(mode="json", include=MEASURED)
        tensor_parallel = (job.techniques.tensor_parallel_size, job.techniques.sequence_parallel)
        key = json.dumps([said, *tensor_parallel, job.data.num_workers])
        if key not in self.profiles:
            self.profiles[key] = self.pipeline.profile()
        return self.profiles[key]

    def window(self) -> TimedWindow:
        plan = self.plan  # planned and profiled before the watch starts
        looks = self.inside is None
        inside = RankWatch(
            {key: value for key, value in self.changes.items() if key in CODE_CHANGES},
            log=self.folder / "printed.log",
            gpu=bool(self._list_real_classes(gpus=True)),
            looks=looks,
            operations=self.job.torch_compile is False,
        )
        with watch_machine() as told:
            trial = self.pipeline.try_out(plan, self.steps, beside=True, watcher=inside)
        self.seen = told()
        self.trials.append(trial)
        if looks:
            self.inside = RankObservations.of(trial.told)
            if self.inside.kernels_s is not None:
                self.kernels_share = self.inside.kernels_s / trial.mean_s
        seconds = trial.mean_s
        took_s = self.steps * trial.mean_s
        for every, took in (
            (self.job.eval_steps, trial.evaluation),
            (self.job.stated_save_steps, trial.save),
        ):
            if every:
                seconds += took.compute_added_s(every * trial.mean_s) / every
                took_s += took.pause_s + took.overlapped_s
        # Scale to the unchanged tokens per step, which a new sample order or batch size alters.
        seconds *= (self.tokens or _tokens(trial)) / _tokens(trial)
        return TimedWindow(seconds, took_s, max(trial.input_shares))

    def _list_real_classes(self, *, gpus: bool) -> tuple[str, ...]:
        """Return the names of GPU classes, or of CPU classes, without emulated classes."""
        classes = self.pipeline.cluster.classes
        return tuple(c.name for c in classes if c.is_gpu == gpus and not c.emulated)

    @property
    def _batch_ratio(self) -> float:
        """Ratio of the unchanged to the changed batch size."""
        return (self.global_batch or self.job.global_batch_size) / self.job.global_batch_size

    def with_changes(self, changes: Changes) -> JobPatient:
        both = {**self.changes, **changes}
        batch = self.global_batch or self.job.global_batch_size
        tokens = self.tokens or _tokens(self.trials[-1]) if self.trials else self.tokens
        return replace(self, changes=both, global_batch=batch, tokens=tokens, trials=[])

    def suspects(self) -> list[Suspect]:
        return find_suspects(self._evidence())

    def unlike(self, before: JobPatient) -> str:
        """Compare losses after changes of code or dtypes. All further settings change rounding at
        most, as verified by the engine's tests."""
        added = {key for key in self.changes.keys() - before.changes.keys() if key in LOSS_CHANGES}
        if not added:
            return ""
        names = {LOSS_CHANGES[key] for key in added}
        return describe_loss_difference(before.trials[-1].losses, self.trials[-1].losses, names)

    def _evidence(self) -> Evidence:
        trial, plan = self.trials[-1], self.plan
        classes, cpus = self.pipeline.cluster.classes, self._list_real_classes(gpus=False)
        return Evidence(
            job=self.job,
            plan=plan,
            input_share=max(trial.input_shares),
            step_s=trial.mean_s,
            save=trial.save,
            evaluation=trial.evaluation,
            padding_share=trial.padding_share,
            inside=RankObservations.of(trial.told),
            steps=self.steps,
            retries=sum(trial.retries),
            kernels_share=self.kernels_share,
            compilers=bool(self._list_real_classes(gpus=True)),
            cpu_compilers=bool(cpus) and has_cpp_compiler(),
            cpu_bf16=cpus if has_bf16() else (),
            other_dtypes=choose_compute_dtypes(self.job.precision, self.pipeline.cluster)
            != choose_compute_dtypes("auto", self.pipeline.cluster),
            tf32=tuple(c.name for c in classes if _has_tf32(c)),
            planned_s=plan.prediction.step_s if plan.prediction else 0.0,
            predict_step_s=lambda changes: _predict_step_s(self.with_changes(changes)),
        )

    @property
    def operations(self) -> int | None:
        counts = None if self.inside is None else self.inside.operations
        return None if counts is None else counts.total

    def remarks(self) -> Iterator[Remark]:
        trial = self.trials[-1]
        share = max(trial.input_shares)
        yield from remark_on_starvation(trial.input_shares, trial.limits)
        if self.inside is not None:
            yield from remark_on_unfused_attention(self.inside.attention)
            yield from remark_on_loops(self.inside.operations, trial.mean_s * (1.0 - share))
        yield from remark_on_steering_reads(RankObservations.of(trial.told).syncs)
        if trial.syncs:  # without reads counted by `watching.lines`, attributed to gpumix
            named = ", ".join(f"{place} ({n:g} a step)" for place, n in trial.syncs[:SITES])
            yield Remark(
                "model_reads",
                f"the model makes the host wait for the GPU at {named}: leave the values on the "
                "GPU, or read them every some steps",
            )
        if self.seen is not None:
            yield from remark_on_machine(self.seen, input_share=share, retries=sum(trial.retries))
        if trial.overruns:
            text = "this machine is too busy to emulate devices: times are not to be trusted"
            yield Remark("emulation", text)


@contextmanager
def open_job_patient(
    path: Path,
    given: tuple[str, ...],
    *,
    steps: int,
    allowed: tuple[str, ...] | None = None,
    debug: bool = False,
) -> Iterator[JobPatient]:
    """Provide the job at `path`, with a scratch folder for its windows."""
    with make_scratch_folder() as scratch:
        yield JobPatient(path, given, steps + SETTLING, scratch, allowed, debug)


def _predict_step_s(patient: JobPatient) -> float | None:
    try:
        expected = patient.plan.prediction
    except GpumixError:
        return None
    return None if expected is None else expected.step_s * patient._batch_ratio


def _tokens(trial: TrialResult) -> float:
    """Return the tokens per step, without padding."""
    return trial.tokens_per_s * trial.step_s


def _has_tf32(one: DeviceClass) -> bool:
    major = one.compute_capability.partition(".")[0]
    return one.accelerator == "cuda" and major.isdigit() and int(major) >= AMPERE
