"""Sources of a plan's profile: a file, the cache, a measurement, or an estimate."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from gpumix.cli.common import Allowed, Overrides
from gpumix.cli.planning.estimate_source import Estimate, NamedCluster, estimate_job
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors
from gpumix.schema.units import LARGEST_BATCH, LARGEST_LENGTH, LARGEST_RANK

if TYPE_CHECKING:
    from gpumix.hardware.estimates.adapters import FineTuning
    from gpumix.planner.common.strategy import PlanRequest
    from gpumix.schema.cluster.cluster import Cluster
    from gpumix.schema.job.job import Job, OptimizerSpec
    from gpumix.schema.job.search_space import Space
    from gpumix.schema.plan.plan import Plan
    from gpumix.schema.plan.stage import ComputeDtype
    from gpumix.schema.profile.profile import Profile

ClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help='Cards, also ones you do not have: "4x rtx3090, 2x p40"; semicolons separate hosts; '
        '"2 hosts of 8x a100-80gb-sxm". Or a cluster file. Default: this machine, or the job\'s.',
    ),
]
NetworkText = Annotated[
    str | None,
    typer.Option("--network", help="Link between hosts: 25GbE, ib-hdr, '12 GB/s', ..."),
]
BetweenText = Annotated[
    str | None, typer.Option("--between", help="With --cluster: the link between its hosts now.")
]
ModelText = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Without a job: 7B, llama-3-8b, a hub id, a config.json [default: 1B].",
    ),
]

# Defaults without a job, stated with every answer.
MODEL, SEQUENCE_LENGTH, GLOBAL_BATCH = "1B", 2048, 128


@dataclass(frozen=True)
class PlanSource:
    """Input of planning: profile, request, the files or arguments behind both, and a line on
    assumptions; with the estimate behind the profile, if there is no job, and with what a job
    allows and its steps."""

    profile: Profile
    request: PlanRequest
    strategy: str
    place: str
    note: str = ""
    estimate: Estimate | None = None
    allow: tuple[str, ...] = ()
    steps: int | None = None


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of the command line of a verb that plans, or looks at a plan. Typer declares each
    by its annotation."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="The job, a YAML file.", show_default=False),
    ] = None
    profile: Annotated[Path | None, typer.Option("--profile", help="Plan from this profile.")] = (
        None
    )
    cluster: ClusterText = None
    network: NetworkText = None
    model: ModelText = None
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--sequence-length",
            min=2,
            max=LARGEST_LENGTH,
            help="Without a job: tokens in a sample [default: 2048].",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size",
            min=1,
            max=LARGEST_BATCH,
            help="Without a job: samples per step [default: 128].",
        ),
    ] = None
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"] | None,
        typer.Option(
            "--precision",
            help="Without a job: compute dtype [default: auto, the best of each card].",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            help="Without a job: adamw, adamw_8bit, adafactor, muon, sgd [default: adamw].",
        ),
    ] = None
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            metavar="RANK",
            min=1,
            max=LARGEST_RANK,
            help="Without a job: train LoRA adapters of this rank, usually 16.",
        ),
    ] = None
    base: Annotated[
        Literal["16bit", "int8", "nf4", "nf4-double"] | None,
        typer.Option("--base", help="With --lora: format of the frozen weights [default: 16bit]."),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(
            "--ram",
            metavar="SIZE",
            help="Free memory of each host: 64GiB. Default: this host's, or that of its GPUs.",
        ),
    ] = None
    overrides: Overrides = field(default_factory=list)
    allowed: Allowed = field(default_factory=list)


@dataclass(frozen=True)
class PlanOptions(PlanArguments):
    """Arguments of a verb that plans, or looks at a plan, with the settings of the verb itself.

    Attributes:
        dtypes: compute dtype of each class without a job, in place of `precision`.
        as_json: whether results and errors are printed as JSON.
        measures: whether jobs not in the cache are measured.
        link_option: the verb's name for `network`.
    """

    dtypes: dict[str, ComputeDtype] | None = None
    as_json: bool = False
    measures: bool = True
    link_option: str = "--network"

    def source(self, strategy: str | None = "optimal") -> PlanSource:
        """Return the profile to plan from.

        Args:
            strategy: to plan by; None: the job's.

        Raises:
            InputError: the options contradict each other, or say too little; or a job is yet to be
                measured, and the strategy can have no plan.
        """
        self._refuse_contradictions()
        if self.job is None:
            return self._estimated_without_job(strategy or "optimal")
        if self._named_cluster.is_file:
            named = [*self.overrides, f"cluster={self.cluster}"]
            return replace(self, cluster=None, overrides=named).source(strategy)
        from gpumix.train.console.terminal import show_waiting

        with show_waiting("reading the job"):
            from gpumix.schema.reading.named_files import check_named_files
            from gpumix.schema.reading.read import read_job

            job = read_job(self.job, self.overrides)
            check_named_files(job, self.job)
        job = job.model_copy(update={"strategy": strategy or job.strategy})
        profile = self._of_job(job, self.job)
        request = _request(job.global_batch_size, job.space.leaving_out())
        place = ", ".join(str(path) for path in (self.job, self.profile) if path is not None)
        return PlanSource(
            profile, request, job.strategy, place, allow=job.allow, steps=job.max_steps
        )

    def _of_job(self, job: Job, path: Path) -> Profile:
        from gpumix.profiler.cache.measurement_cache import set_readers
        from gpumix.schema.profile.profile import Profile
        from gpumix.train.console.plan_page import advise_measuring
        from gpumix.train.console.terminal import get_stderr_console, show_waiting

        if self.cluster is not None:
            with locate_errors(path):
                return estimate_job(job, path, self._named_cluster).profile()
        if self.profile is not None:
            profile = Profile.load(self.profile)
            _check_profile(profile, job, self.profile, path)
            return set_readers(job, profile)
        with locate_errors(path), show_waiting("looking for measurements"):
            found = load_cached_profile(path, job)
        if found is not None and (advice := advise_measuring(found, self.job_arguments)):
            get_stderr_console().print(advice)
        if found is None and not self.measures:
            raise InputError(
                "this job was not measured",
                code="job-not-measured",
                where=str(path),
                fix=f"gpumix profile {path}",
            )
        if found is not None:
            return found
        overrides = [*self.overrides, f"strategy={job.strategy}"]
        return measure_in_subprocess(path, overrides, self.allowed, as_json=self.as_json)

    @property
    def job_arguments(self) -> str:
        """The job and its replaced keys, quoted as arguments of another command."""
        from gpumix.schema.reading.overrides import name_job

        assert self.job is not None
        return name_job(self.job, self.overrides)

    @property
    def _named_cluster(self) -> NamedCluster:
        return NamedCluster(self.cluster, self.network, self.link_option)

    def _estimated_without_job(self, strategy: str) -> PlanSource:
        from gpumix.hardware.estimates.known_models import find_decoder

        estimate = Estimate(
            self._named_cluster,
            find_decoder(self.model or MODEL),
            self._tuning(),
            self._optimizer(),
            self.sequence_length or SEQUENCE_LENGTH,
            self.global_batch or GLOBAL_BATCH,
            self.dtypes or self.precision or "auto",
            self._ram_bytes(),
        )
        profile = estimate.profile()
        return PlanSource(
            profile,
            _request(estimate.global_batch),
            strategy,
            "--cluster" if self.cluster is not None else "this machine",
            estimate.describe(profile),
            estimate,
        )

    def _tuning(self) -> FineTuning:
        from gpumix.hardware.estimates.adapters import FineTuning

        return FineTuning(self.lora or 0, self.base or "16bit")

    def _optimizer(self) -> OptimizerSpec:
        from gpumix.schema.job.job import OPTIMIZERS, OptimizerSpec
        from gpumix.schema.reading.error_text import find_nearest, suggest

        name = (self.optimizer or "adamw").lower()
        if name not in OPTIMIZERS:
            raise InputError(
                f"there is no optimizer '{self.optimizer}'",
                code="optimizer-unknown",
                where="--optimizer",
                fix=suggest(find_nearest(name, OPTIMIZERS), OPTIMIZERS, "there are"),
            )
        return OptimizerSpec(name=name)  # type: ignore[arg-type]

    def _ram_bytes(self) -> int | None:
        from gpumix.hardware.host.environment import available_host_bytes
        from gpumix.schema.units import parse_bytes

        if self.ram is None:
            return None if self.cluster is not None else available_host_bytes()
        try:
            if self.ram.strip().isdigit():
                raise ValueError(f"'{self.ram}' has no unit")
            return parse_bytes(self.ram)
        except ValueError as error:
            fix = "write it as --ram 64GiB"
            raise InputError(
                str(error), code="memory-size-invalid", where="--ram", fix=fix
            ) from None

    def _refuse_contradictions(self) -> None:
        given = {
            "--model": self.model,
            "--sequence-length": self.sequence_length,
            "--global-batch-size": self.global_batch,
            "--precision": self.precision,
            "--optimizer": self.optimizer,
            "--lora": self.lora,
            "--base": self.base,
            "--ram": self.ram,
        }
        named = [name for name, value in given.items() if value is not None]
        if self.job is not None and named:
            raise InputError(
                f"{named[0]} has no effect on a job",
                code="option-without-effect",
                fix="change the job: --set key=value",
            )
        if self.cluster is not None and self.profile is not None:
            raise InputError(
                "--cluster is an estimate, --profile was measured",
                code="cluster-and-profile",
                fix="give one of them",
            )
        if self.job is None and self.profile is not None:
            raise InputError(
                "a profile alone does not say what to plan",
                code="profile-without-job",
                where=str(self.profile),
                fix="give the job that it was measured for: gpumix plan JOB.yaml --profile FILE",
            )
        if self.job is None and self.overrides:
            raise InputError(
                "--set replaces keys of a job, and there is none",
                code="set-without-job",
                fix="write a job file and give it, or leave --set out",
            )
        if self.base not in (None, "16bit") and self.lora is None:
            raise InputError(
                f"weights stored as {self.base} cannot be trained themselves",
                code="quantised-weights-trained",
                where="--base",
                fix="add --lora 16, or leave --base out",
            )
        if self.network is not None and self.cluster is None:
            raise InputError(
                f"{self.link_option} has no effect without --cluster",
                code="option-without-effect",
                fix="`gpumix whatif JOB.yaml --network ...` tells what other links are worth",
            )


def add_planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of planning, passed together as `asked`.

    A verb with its own `--network` gets `--between` for the cluster's link.
    """
    own = dict(signature(command, eval_str=True).parameters)
    del own["asked"]
    shared = {parameter.name: parameter for parameter in _declare_arguments()}
    link = "network"
    if link in own:
        link = "between"
        shared[link] = shared.pop("network").replace(name=link, annotation=BetweenText)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in shared}
        network = options.pop(link)
        asked = PlanOptions(
            **options, network=network, as_json=given["as_json"], link_option=f"--{link}"
        )
        command(asked=asked, **given)

    last = {"as_json": own.pop("as_json")}
    every = {"job": shared["job"]} | own | shared | last
    run.__signature__ = Signature(list(every.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in every.items()}
    return run


def _declare_arguments() -> Iterator[Parameter]:
    """Yield the fields of `PlanArguments` as parameters of a verb."""
    hints = get_type_hints(PlanArguments, include_extras=True)
    for each in fields(PlanArguments):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        kind = Parameter.POSITIONAL_OR_KEYWORD
        yield Parameter(each.name, kind, default=default, annotation=hints[each.name])


def get_profile_path(plan: Path) -> Path:
    """Return the path of a plan's profile: plan.profile.json next to plan.json."""
    return plan.with_name(f"{plan.stem}.profile.json")


def find_profile_beside(plan: Path) -> Path | None:
    """Return the profile that `gpumix plan --output` and runs write next to a plan."""
    places = (get_profile_path(plan), plan.with_name("profile.json"))
    return next((place for place in places if place.is_file()), None)


def load_profile_beside(path: Path, plan: Plan) -> tuple[Profile, Path] | None:
    """Load the profile next to a plan, with its path; None unless the plan was made from it."""
    from gpumix.schema.profile.profile import Profile

    place = find_profile_beside(path)
    if place is None:
        return None
    profile = Profile.load(place)
    made_from = profile.model.fingerprint, profile.sequence_length
    return (profile, place) if made_from == (plan.model, plan.sequence_length) else None


def _request(batch: int, space: Space | None = None) -> PlanRequest:
    from gpumix.planner.common.strategy import PlanRequest
    from gpumix.schema.job.search_space import EVERYTHING

    return PlanRequest(global_batch=batch, space=space or EVERYTHING)


def _check_profile(profile: Profile, job: Job, path: Path, job_path: Path) -> None:
    """Check that a profile fits the job. A profile without the job's model is compared when the
    model is built."""
    from gpumix.profiler.cache.measurement_cache import model_hash
    from gpumix.schema.plan.dtypes import choose_compute_dtypes

    fix = "measure this job: gpumix profile JOB.yaml --output PROFILE.json"
    with locate_errors(job_path):
        wanted_dtypes = choose_compute_dtypes(job.precision, profile.cluster)
    dtypes = {c.device_class: wanted_dtypes[c.device_class] for c in profile.classes}
    for what, found, wanted in (
        ("sequence_length", profile.sequence_length, job.sequence_length),
        (
            "precision",
            ", ".join(f"{c.compute_dtype} on {c.device_class}" for c in profile.classes),
            ", ".join(f"{dtype} on {name}" for name, dtype in dtypes.items()),
        ),
        (
            "bytes of optimizer state an element",
            profile.optimizer_bytes_per_element,
            job.optimizer.state_bytes_per_element(profile.model),
        ),
    ):
        if found != wanted:
            raise InputError(
                f"the profile is of {what} {found}, the job has {wanted}",
                code="profile-of-another-job",
                where=str(path),
                fix=fix,
            )
    if profile.job_model not in ("", model_hash(job, job_path.absolute().parent)):
        raise InputError(
            "the profile is of another model than the job's",
            code="profile-of-another-model",
            where=str(path),
            fix=fix,
        )
    if job.cluster not in ("auto", profile.cluster):
        raise InputError(
            "the profile is of another cluster than the job's",
            code="profile-of-another-cluster",
            where=str(path),
            fix=fix,
        )


def measure_in_subprocess(
    path: Path, overrides: Sequence[str], allowed: Sequence[str], *, as_json: bool
) -> Profile:
    """Return the job's profile, measured in another process."""
    from gpumix.schema.profile.profile import Profile

    sets = [part for override in overrides for part in ("--set", override)]
    sets += [part for name in allowed for part in ("--allow", name)]
    # -P: modules are found next to the job, as everywhere, not in the current folder.
    command = [sys.executable, "-P", "-m", "gpumix", "profile", str(path), "--json", *sets]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        if as_json:  # print the error
            sys.stdout.write(done.stdout)
        raise typer.Exit(done.returncode)
    return Profile.model_validate_json(done.stdout)


def load_cached_profile(path: Path, job: Job) -> Profile | None:
    from gpumix.hardware.discovery.discover import discover_cluster
    from gpumix.profiler.cache.measurement_cache import MeasurementCache

    cluster: Cluster = discover_cluster() if job.cluster == "auto" else job.cluster
    return MeasurementCache(job, cluster, path.absolute().parent).load()
