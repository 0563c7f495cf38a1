"""Pipeline of `gpumix train`: job and cluster, profile, plan, run.

Decisions are made here, in the started process; ranks measure and train.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumix.hardware.discovery.discover import describe_cpu_run
from gpumix.hardware.discovery.foreign_memory import find_occupied_gpus, reserve_foreign_memory
from gpumix.hardware.host.environment import shared_memory_folder
from gpumix.planner.common.stage_preconditions import check_wanted_stages, needs_several_stages
from gpumix.planner.eight_bit_state import match_profile, plan_with_allowed
from gpumix.profiler.cache.measurement_cache import MeasurementCache, set_readers
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import (
    DeviceFailure,
    DeviceMissing,
    GpumixError,
    InputError,
    OutOfMemory,
    PlanOutdated,
    RankInterrupted,
    RankLost,
    TrainingError,
    convert_error,
    get_first_line,
)
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.allowed_code import check_allowed
from gpumix.schema.reading.error_location import join_locations, locate_errors
from gpumix.schema.reading.named_files import check_named_files
from gpumix.schema.reading.overrides import name_job
from gpumix.schema.reading.read import read_located_job
from gpumix.train.checkpoint.checkpoint_folder import find_latest
from gpumix.train.checkpoint.manifest import parse_step
from gpumix.train.checks.output_folder import (
    check_folder,
    check_free,
    check_writable,
    lock_output,
)
from gpumix.train.checks.own_plan import load_own_plan
from gpumix.train.checks.resume_check import check_keys
from gpumix.train.checks.user_plan import (
    check_plan_fits_job,
    check_plan_fits_memory,
    check_plan_fits_model,
    describe_overruled_settings,
    describe_speed_changes,
    limit_profile_memory,
    predict_again,
)
from gpumix.train.console.devices_page import devices_page
from gpumix.train.console.plan_page import advise_measuring, describe_doubt, plan_page
from gpumix.train.console.tables import efficiency_table, profile_table
from gpumix.train.console.terminal import get_stderr_console, show_waiting
from gpumix.train.elastic.plan_change import load_plan_in_force
from gpumix.train.elastic.recovery import Lessons, Recovery, Restart, RestartTerms, complete_restart
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder, find_newest_state
from gpumix.train.processes.runner import Runner
from gpumix.train.processes.torchrun_runner import make_runner
from gpumix.train.rank_task_names import load_rank_task
from gpumix.train.run_log import run_files
from gpumix.train.run_log.progress import mark_failed, mark_restarting, mark_stopped
from gpumix.train.run_log.run_id import read_run_id
from gpumix.train.run_log.tracker_process import check_installed, run_trackers

if TYPE_CHECKING:
    from gpumix.schema.reading.yaml_locations import Tree
    from gpumix.train.monitor.trial_hook import TrialObserver
    from gpumix.train.run_log.summary import Summary, TrialResult

# Imported by every model of transformers.
TRANSFORMERS = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")


@dataclass(frozen=True)
class UserPlan:
    """The plan to train by, if the user gives one, and the profile behind it, if known, each with
    the file that it is from."""

    plan: Plan | None = None
    made_from: Profile | None = None
    file: str = ""
    made_from_file: str = ""


class JobController:
    """Pipeline of a job from file to run.

    Args:
        folder: base of relative names in the job.
    """

    def __init__(self, job: Job, folder: Path, runs: Runner, *, debug: bool = False) -> None:
        self.job = job
        self.folder = folder
        self._runs = runs
        self._debug = debug
        self._job_file = self._named_job = "JOB.yaml"
        self._places: Tree | None = None  # of the job's keys
        self._console = get_stderr_console()
        self.cluster: Cluster = runs.cluster(None if job.cluster == "auto" else job.cluster)
        self._devices = self.cluster  # including devices left out for a while
        if job.cluster == "auto" and not self.cluster.classes[0].is_gpu:
            self.show(describe_cpu_run())

    @classmethod
    def of_file(
        cls,
        path: Path,
        overrides: Sequence[str],
        *,
        debug: bool,
        allowed: Sequence[str] | None = None,
    ) -> JobController:
        """Read the job in a file.

        Args:
            allowed: code that the job may call, by default any; see `check_allowed`.
        """
        job, places = read_located_job(path, overrides)
        check_named_files(job, path)
        if allowed is not None:
            check_allowed(job, path, allowed, overrides)
        imports = TRANSFORMERS if job.model.config is not None else ()
        restarts = job.advanced.max_restarts > 0
        runs = make_runner(
            debug=debug, imports=imports, silence_s=job.advanced.timeout, restarts=restarts
        )
        found = cls(job, path.absolute().parent, runs, debug=debug)
        found._job_file = shlex.quote(str(path))
        found._named_job, found._places = name_job(path, overrides), places
        return found

    @property
    def speaks(self) -> bool:
        """True if this process prints for people."""
        return self._runs.speaks

    def show(self, thing: Any) -> None:
        """Print for people, if this process `speaks`."""
        if self.speaks:
            self._console.print(thing)

    def profile(
        self, *, fresh: bool = False, resume: bool = False, failed: bool = False
    ) -> Profile:
        """Return the profile, cached or measured. Under torchrun all ranks use the first host's
        cache.

        Args:
            fresh: ignore the cache.
            resume: for a resumed run, which is refused first if it cannot resume.
            failed: after a failure, which showed how much memory other processes leave.
        """
        taken = find_occupied_gpus(self.cluster) if self._runs.decides_alone and not failed else ()
        for one in taken:
            self.show(f"{one}: so much less is planned for {one.device.device_class}")
        if self._runs.decides_alone and not fresh:
            cached = self._load_cached()
            if cached is not None:
                return reserve_foreign_memory(cached, taken)
        self._check_job_early()
        self._runs.warm_up()
        devices = self._runs.devices(self.cluster)
        found: Profile = self._runs.run(
            load_rank_task("profile"), self.cluster, self._task(), devices, fresh, resume
        )
        return found

    def plan(self, profile: Profile, strategy: str | None = None) -> Plan:
        return plan_job(self.job, profile, strategy, leaving_out=self._runs.decides_alone)

    def train(self, given: UserPlan, *, resume: bool) -> Summary:
        """Train by the given plan, or by a plan made first."""
        if self.speaks:
            check_installed(self.job.report_to, self._places)
        lessons = self._runs.started_again(self.job.output_dir, self._newest)
        if not self._exclude_devices(lessons):
            summary = self._runs.outcome()
            for home in self._homes():  # copies of an earlier start with this process
                home.remove()
            return summary
        if lessons is None:
            self._check_output(resume)
        elif given.plan is not None and not self._has_all(given.plan):
            self.show("other devices are here than those of the plan: planning again")
            given = UserPlan()
        elif lessons.memory or lessons.slower:
            given = UserPlan()
        if given.plan is None and resume and lessons is None:
            given = self._find_own_plan()
        with show_waiting("checking the job"):
            plan, profile = self._check_plan_or_job(given)
        with ExitStack() as stack:
            fresh = not resume and lessons is None
            if self.speaks:
                stack.enter_context(lock_output(self.job.output_dir, fresh=fresh))
            self._runs.warm_up()
            if self.speaks:
                self._runs.begins(self.job.output_dir, lessons)
                stack.enter_context(run_trackers(self.job, self._places, fresh=fresh))
            try:
                summary = self._train(plan, profile, resume, lessons)
                self._runs.tell_outcome(summary)
                return summary
            except KeyboardInterrupt:
                if self.speaks:
                    mark_stopped(self.job.output_dir)
                raise
            except BaseException as error:
                if self.speaks:  # a killed rank could not report it
                    mark_failed(self.job.output_dir, get_first_line(error))
                raise

    def check_start(self, given: UserPlan, *, resume: bool) -> tuple[Plan | None, Profile | None]:
        """Check everything that this process knows of a start, as `train` does, and start nothing.
        Return the given plan, predicted again, and its profile."""
        check_installed(self.job.report_to, self._places)
        self._check_output(resume)
        return self._check_plan_or_job(given)

    def known_profile(self) -> Profile | None:
        """Return the cached profile, without the memory that other processes occupy; None if
        anything must be measured first."""
        cached = self._load_cached()
        return cached and reserve_foreign_memory(cached, find_occupied_gpus(self.cluster))

    def _load_cached(self) -> Profile | None:
        cached = MeasurementCache(self.job, self.cluster, self.folder).load()
        if cached is not None and (advice := advise_measuring(cached, self._named_job)):
            self.show(advice)
        return cached

    def devices_of(self, plan: Plan | None) -> tuple[Device, ...]:
        """Return the device of each rank of a plan, or of every rank without one."""
        return self._runs.devices(self.cluster if plan is None else self._used(plan))

    def _check_plan_or_job(self, given: UserPlan) -> tuple[Plan | None, Profile | None]:
        """Check the given plan, or without one what the job says of plans. Return the plan,
        predicted again, and its profile."""
        if given.plan is None:
            self._check_job_early()
            return None, None
        with locate_errors(given.file):
            both = join_locations(given.file, given.made_from_file)
            plan, profile = self._checked(given.plan, given.made_from, both)
        for line in describe_overruled_settings(plan, self.job):
            self.show(line)
        return plan, profile

    def _find_own_plan(self) -> UserPlan:
        """Return the run's own plan if it holds and the cache lacks measurements for another."""
        cache = MeasurementCache(self.job, self.cluster, self.folder)
        if not self._runs.decides_alone or cache.load() is not None:
            return UserPlan()
        own = load_own_plan(self.job, self.folder, self.cluster)
        if own is None:
            return UserPlan()
        output = self.job.output_dir
        self.show("nothing is measured: the run's own plan and profile still hold")
        return UserPlan(*own, str(output / run_files.PLAN), str(output / run_files.PROFILE))

    def _exclude_devices(self, lessons: Lessons | None) -> bool:
        """Leave out devices, and return True if this process takes part; other processes' devices
        may be left out too."""
        there = {device.id for device in self._devices.devices}
        without = there & set(lessons.without if lessons is not None else ())
        if without == there:
            without = set()
        if without:
            self.show(f"left out: {', '.join(sorted(without))}; their ranks wait for the end")
            self.cluster = self._devices.only(there - without)
        return self._runs.take_part(self._devices, without)

    def _has_all(self, plan: Plan) -> bool:
        return {w.device for w in plan.workers} == {d.id for d in self.cluster.devices}

    def _train(
        self, plan: Plan | None, profile: Profile | None, resume: bool, lessons: Lessons | None
    ) -> Summary:
        recovery = Recovery(self.job.advanced.max_restarts, lessons)
        restart = lessons.restart if lessons is not None else None
        self.show(devices_page(self.cluster))
        if plan is None:
            try:
                profile = self.profile(resume=resume)
            except (DeviceFailure, DeviceMissing) as found:
                self._learn(self._as_lost(found, restart), recovery, None)
                raise
            self.show(profile_table(profile))
            if not self.cluster.emulated:  # emulated devices have hardly a choice
                self.show(efficiency_table(profile))
            goes_on = resume or lessons is not None
            before = load_plan_in_force(self.job.output_dir) if goes_on and self.job.allow else None
            if before is not None:  # the saved state has its form
                profile = match_profile(profile, before)
            plan = self.plan(recovery.again.known(profile))
            profile = match_profile(profile, plan)
        begins = f"Plan ({plan.strategy})."
        self.show(plan_page(plan, begins=begins, doubt=describe_doubt(profile)))
        if restart is not None and self.speaks:
            before = load_plan_in_force(self.job.output_dir, fresh=not resume)
            restart = complete_restart(restart, before, plan, self._devices, self.cluster)
            self.show(f"started again: {restart.why}; {restart.decided}")
        while True:
            known = recovery.again.known(profile) if profile is not None else None
            try:
                return self._run(plan, known, resume, restart)
            except (DeviceFailure, DeviceMissing, RankInterrupted, PlanOutdated) as found:
                error = self._as_lost(found, restart)
                if not self._runs.restarts_after(error):
                    self._learn(error, recovery, plan)
                    raise
                failed_at = time.time()
                again = recovery.after(error, self._newest(), plan)
                step_s = error.step_s if isinstance(error, PlanOutdated) else None
                restart = Restart(error.what, failed_at, again.told, step_s)
                self.show(f"{error}\n{again.told}")
                if self.speaks:
                    mark_restarting(self.job.output_dir, error.what)
                self._runs.starts_again(self.job.output_dir, recovery.lessons(restart))
                plan, profile = self._plan_again(again, plan, profile)

    def _as_lost(
        self,
        error: DeviceFailure | DeviceMissing | RankInterrupted | PlanOutdated,
        restart: Restart | None,
    ) -> DeviceFailure | RankInterrupted | PlanOutdated:
        """Turn a missing GPU into a lost rank, if the run trained on it before this restart."""
        if not isinstance(error, DeviceMissing):
            return error
        if restart is None or not self._newest():
            raise error
        return convert_error(error, RankLost, device=error.device)

    def _learn(
        self, error: TrainingError | RankInterrupted, recovery: Recovery, plan: Plan | None
    ) -> None:
        """Record the failed device for the process restarting the run."""
        if not isinstance(error, DeviceFailure) or isinstance(error, OutOfMemory):
            return
        if not error.device:
            return
        failed_at = time.time()
        with suppress(GpumixError):  # too many failures in a row
            again = recovery.after(error, self._newest(), plan)
            lessons = recovery.lessons(Restart(error.what, failed_at, again.told))
            self._runs.learns(self.job.output_dir, lessons)

    def _run(
        self, plan: Plan, profile: Profile | None, resume: bool, restart: Restart | None
    ) -> Summary:
        used = self._used(plan)
        devices = self._runs.devices(used)
        try:
            summary: Summary = self._runs.run(
                load_rank_task("train"),
                used,
                self._task(),
                plan,
                profile,
                devices,
                resume,
                restart,
                saves=True,
            )
        except BaseException:
            self._show_flight_recorder()
            raise
        return summary

    def _show_flight_recorder(self) -> None:
        folder = self.job.output_dir / run_files.COLLECTIVES
        if folder.is_dir() and any(folder.iterdir()):
            self.show(f"what ranks did last on NCCL is in {folder}: torchfrtrace -p rank_ {folder}")

    def _newest(self) -> int:
        """Return the last step with a state to resume from; 0 without a state."""
        found = find_newest_state([home.held() for home in self._homes()])
        saved = find_latest(self.job.output_dir / run_files.CHECKPOINTS)
        return max(found.step if found else 0, parse_step(saved) if saved else 0)

    def _homes(self) -> list[MemoryFolder]:
        """Return the folders of copies in memory, for each of the run's hosts on this machine."""
        root = shared_memory_folder()
        hosts = sorted({device.host for device in self._devices.devices})
        output = self.job.output_dir
        run = read_run_id(output)
        return [] if root is None else [MemoryFolder(root, output, host, run) for host in hosts]

    def _plan_again(
        self, again: RestartTerms, plan: Plan, profile: Profile | None
    ) -> tuple[Plan, Profile | None]:
        """Return a plan for the devices taking part, and a profile of all devices. Equal devices
        without new lessons keep the plan."""
        left = {device.id for device in self._devices.devices} - again.without
        before = {device.id for device in self.cluster.devices}
        if left == before and not again.memory and not again.slower:
            return plan, profile
        self.cluster = self._devices.only(left)
        if profile is None or not left <= {device.id for device in profile.cluster.devices}:
            # The plan was given without a profile.
            profile = match_profile(self.profile(failed=True), plan)
        plan = self.plan(again.known(profile))
        if back := left - before:
            self.show(f"tried once more: {', '.join(sorted(back))}")
        self.show(plan_page(plan, begins=f"Plan ({plan.strategy})."))
        return plan, profile

    def _used(self, plan: Plan) -> Cluster:
        """Return the devices of a plan; under torchrun all devices, each with its process."""
        if not self._runs.decides_alone:
            return self.cluster
        return self.cluster.only(worker.device for worker in plan.workers)

    def try_out(
        self, plan: Plan, steps: int, *, beside: bool = False, watcher: TrialObserver | None = None
    ) -> TrialResult:
        """Train a few steps by `plan` to measure its speed; see `Trainer.try_out`."""
        used = self._used(plan)
        devices = self._runs.devices(used)
        trial: TrialResult = self._runs.run(
            load_rank_task("try_out"), used, self._task(), plan, devices, steps, beside, watcher
        )
        return trial

    def show_summary(self, summary: Summary) -> None:
        """Show speed, loss, what to do next and a table of GPU types, from the run's files."""
        if summary.loss is None:
            wanted = self.job.max_steps
            more = f", and the job wants {wanted}" if wanted < summary.steps else ""
            self.show(f"nothing was left to do: the run has {summary.steps} steps{more}")
            return
        if not self.speaks:
            return
        from gpumix.train.run_figures.advice import AdvisedRun, advise
        from gpumix.train.run_figures.figures import RunFigures
        from gpumix.train.run_figures.history import load_history
        from gpumix.train.run_figures.terminal_parts import render_summary

        output = self.job.output_dir
        plan = Plan.load(output / run_files.PLAN)
        figures = RunFigures(load_history(output), plan, self.job.max_steps)
        advice = advise(AdvisedRun(figures, state="finished", job=self._job_file))
        self.show(render_summary(figures, advice, self._console.width))
        if summary.overruns:
            self.show(format_overrun_warning("this run"))
        self.show(f"The whole report: gpumix report {_shortest(output)}")

    def _task(self) -> Any:
        from gpumix.train.rank_setup.context import Task

        return Task(self.job, self.cluster, self.folder, self._debug)

    def _check_output(self, resume: bool) -> None:
        output = self.job.output_dir
        if output.exists() and not output.is_dir():
            raise InputError(
                "the output is a file, it must be a folder",
                code="output-is-file",
                where=str(output),
                fix="write elsewhere: --set output_dir=runs/another",
            )
        check_folder(output, traces=self.job.advanced.trace_step is not None)
        if self.speaks:
            check_free(output)
            check_writable(output)
        saved = find_latest(output / run_files.CHECKPOINTS)
        if resume and saved is None and not self._newest():
            raise InputError(
                "there is no checkpoint to go on from",
                code="no-checkpoint",
                where=str(output),
                fix="start the run without --resume",
            )
        if resume:
            check_keys(self.job)
        if not resume and saved is not None:
            raise InputError(
                "the output folder holds the checkpoints of an earlier run",
                code="output-has-checkpoints",
                where=str(output),
                fix="go on with --resume, or write elsewhere: --set output_dir=runs/another",
            )

    def _checked(
        self, plan: Plan, profile: Profile | None, both: str = ""
    ) -> tuple[Plan, Profile | None]:
        """Check a given plan and predict it again; return the plan and the profile used: given or
        cached. `both` names the files of plan and profile."""
        plan.for_devices([device.id for device in self._runs.devices(self._used(plan))])
        check_plan_fits_job(plan, self.job, self.cluster)
        others = describe_speed_changes(plan, self.cluster)
        if others and profile is not None:
            with locate_errors(both):
                check_plan_fits_model(plan, profile)
            profile = None
        if self._runs.decides_alone:  # hosts may have different files
            profile = self._known() if profile is None else set_readers(self.job, profile)
            if profile is not None:
                profile = match_profile(limit_profile_memory(profile, self.cluster), plan)
                with locate_errors(both):
                    plan = predict_again(plan, profile, self.show)
        check_plan_fits_memory(plan, self.cluster)
        if others:
            self.show(
                f"the plan was made for other devices of these names: {'; '.join(others)}. Another "
                "one may be faster here: gpumix plan JOB.yaml"
            )
            if profile is None:
                plan = plan.model_copy(update={"prediction": None, "reasons": None})
        if plan.uses_tensor_parallel:
            from gpumix.train.checks import attention_heads

            attention_heads.check_plan_heads(plan, self.job)
        return plan, profile

    def _known(self) -> Profile | None:
        """Return the cached profile for a given plan, without measuring."""
        cache = MeasurementCache(self.job, self.cluster, self.folder)
        profile = cache.load()
        if profile is None and (profile := cache.without_inputs()) is not None:
            self.show(
                "what reading this data takes was not measured: nothing that is predicted minds it "
                "(gpumix profile measures it)"
            )
        return profile

    def _check_job_early(self) -> None:
        """Refuse text files, stages and tensor-parallel groups that the job cannot have."""
        space, spec, strategy = self.job.space, self.job.model, self.job.strategy
        if self.job.data.text and self._runs.decides_alone:
            from gpumix.data.text.files import find_files

            find_files(self.job.data)
        check_wanted_stages(strategy, space, self.cluster.devices)
        if 1 not in space.tensor_parallel_size:
            from gpumix.train.checks import attention_heads

            attention_heads.check_job_heads(self.job, self.cluster)
        if needs_several_stages(strategy, space) and spec.config is not None:
            from gpumix.engine.sharding.unit_discovery import split_into_units
            from gpumix.train.checks.stage_count import check_job_stage_count
            from gpumix.train.rank_setup.model import build_model

            model = build_model(spec, folder=self.folder, seed=self.job.seed)
            anatomy = split_into_units(model, spec.units)
            check_job_stage_count(anatomy, self.job, self.cluster)


def plan_job(job: Job, profile: Profile, strategy: str | None = None, *, leaving_out: bool) -> Plan:
    """Plan a job.

    Args:
        leaving_out: whether devices may be left out; processes started by hand are all meant to
            work.
    """
    techniques = job.space
    space = techniques.leaving_out() if leaving_out else techniques.with_all_devices()
    return plan_with_allowed(
        profile,
        job.global_batch_size,
        strategy=strategy or job.strategy,
        space=space,
        allow=job.allow,
    )


def _shortest(path: Path) -> str:
    """Quote a path for a shell, relative to the working directory if shorter."""
    return shlex.quote(min(os.path.relpath(path), str(path), key=len))


def format_overrun_warning(measured: str) -> str:
    """Return the warning about overruns of emulated devices in what was measured."""
    return (
        "this machine was too busy to emulate the devices at full speed: times of "
        f"{measured} may be too long"
    )
