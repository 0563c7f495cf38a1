"""Measurements: compute time of each class, memory kept by the engine, links.

Curves, never slopes: measured points by micro-batch size. Time differs by device class. Memory by
cause does not (except for the framework's constant): it is counted on the engine's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, combinations
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpumix.schema.cluster.clocks import GpuClocks
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, KernelSettings, SettingChoice
from gpumix.schema.cluster.link_islands import Links
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.optimizer_state import (
    ADAMW_8BIT_BYTES,
    ADAMW_BYTES,
    LEAST_QUANTISED,
    OptimizerState,
)
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import ComputeDtype, StageInput
from gpumix.schema.units import LARGEST_LENGTH, Count, Flops, show_seconds
from gpumix.schema.value import Document, Value, refuse_duplicates

ROOT = "(root)"

# Noise can make less work take longer than more; `cost.memory_layout.curves` lowers such times.
# A drop by more than this factor is not noise; below a millisecond anything is possible.
FALL, LEAST_FALL_S = 2.0, 1e-3


# Integers stay integers.
StateBytes = Count | Annotated[float, Field(ge=0)]


class UnitKind(Value):
    """Units of identical structure, one of which was profiled.

    The memory curves give bytes by samples of a micro-batch. A working set is memory that exists
    temporarily, in addition to memory that is kept.
    """

    name: str
    trainable: Count = Field(description="elements that get a gradient")
    matrices: Count = Field(
        default=0, description="those of them in parameters of two dimensions, which Muon updates"
    )
    small: Count = Field(
        default=0,
        description="those of them in parameters so small that 8-bit optimizers keep fp32 state",
    )
    frozen_bytes: Count = Field(default=0, description="parameters without gradient, gathered")
    packed_bytes: Count = Field(
        default=0,
        description="of these, those of quantised parameters with their constants, equal in every "
        "dtype",
    )
    unpacked_bytes: Count = Field(
        default=0,
        description="memory traffic of unpacking quantised parameters once, of an estimate",
    )
    kept: Curve = Field(description="what one call leaves behind until its backward: its outputs")
    saved: Curve | None = Field(
        default=None,
        description="what one call leaves behind where its backward is not to recompute it: the "
        "graph, and its outputs; None: not measured, so it is always recomputed",
    )
    saved_forward: Curve | None = Field(
        default=None, description="working set of one forward call that leaves that behind"
    )
    saved_backward: Curve | None = Field(
        default=None,
        description="working set of its backward, what is left behind not in it; gradients as in "
        "`backward`",
    )
    gradient: Curve = Field(description="the gradients of one call's inputs")
    forward: Curve = Field(
        description="working set of one forward call, or of the code that follows it up to the "
        "next one"
    )
    backward: Curve = Field(
        description="working set of recompute and backward, or of the backward of the code before "
        "the call; the gradients of the inputs are in it, those of the outputs are not"
    )
    flops: Flops = Field(default=0.0, description="of one sample's forward; 0: not counted")
    backward_flops: Flops | None = Field(
        default=None,
        description="of one sample's backward, recompute not in it; None: not counted",
    )
    rerun_flops: Flops = Field(
        default=0.0, description="that fused attention computes again in it besides"
    )
    outputs: dict[int, Curve] = Field(
        default={}, description="each tensor that a call returns, by its place"
    )

    split: Curve | None = Field(
        default=None,
        description="what one call leaves behind between the two parts of its backward, the graph "
        "among it; None: not measured",
    )
    split_backward: Curve | None = Field(
        default=None, description="working set of either part, what is left between not in it"
    )

    @model_validator(mode="after")
    def _graph_whole(self) -> Self:
        of_graph = (self.saved, self.saved_forward, self.saved_backward)
        if len({curve is None for curve in of_graph}) > 1:
            raise ValueError(f"of a kept graph of unit kind '{self.name}' only a part is described")
        return self


class CallInputs(Value):
    """Inputs of a unit call or the loss besides the batch, as used by the code between units."""

    root: tuple[str, ...] = Field(default=(), description="parameters of the root")
    outputs: tuple[StageInput, ...] = Field(default=(), description="what earlier calls return")


class EndParameters(Value):
    """Parameters of the root used at one end of the model only."""

    names: tuple[str, ...] = ()
    trainable: Count = 0
    frozen_bytes: Count = 0
    packed_bytes: Count = 0


class RootParameter(Value):
    """A root parameter by name: elements if trained, otherwise bytes."""

    name: str
    trainable: Count = 0
    frozen_bytes: Count = 0
    packed_bytes: Count = 0


class RootUnit(Value):
    """The root unit: embedding, final norm, head, and everything else outside the units."""

    trainable: Count
    frozen_bytes: Count = 0
    packed_bytes: Count = 0
    buffer_bytes: Count = Field(default=0, description="all buffers of the model, replicated")
    before: EndParameters = Field(
        default=EndParameters(), description="of it, what only the code before the units looks up"
    )
    after: EndParameters = Field(
        default=EndParameters(), description="of it, what only head and loss use"
    )
    parameters: tuple[RootParameter, ...] = Field(
        default=(), description="each of them; empty: not known"
    )
    kept: Curve = Field(description="the batch, and values kept by the code before the units")
    head: Curve = Field(
        description="working set of the head and loss, forward and backward; the gradients of the "
        "last call's outputs are not in it"
    )
    backward: Curve | None = Field(
        default=None,
        description="working set of the backward of the code before the first unit, the gradients "
        "of what that is given in it; None: not measured, it takes less than others",
    )
    chunked_cross_entropy: Curve | None = Field(
        default=None,
        description="the same as `head` where some rows of the logits are made at a time; None: "
        "the model cannot run so",
    )
    flops: Flops = Field(default=0.0, description="of one sample's forward; 0: not counted")
    before_flops: Flops = Field(default=0.0, description="of those the ones before the first unit")
    backward_flops: Flops | None = Field(
        default=None, description="of one sample's backward; None: not counted"
    )
    before_backward_flops: Flops = Field(default=0.0, description="of it, before the first unit")


class ModelProfile(Value):
    """The model from the engine's view: unit calls in order, and their memory."""

    fingerprint: str = Field(description="of unit names, parameter names, shapes and dtypes")
    compute_dtype: ComputeDtype = Field(default="fp32", description="that the bytes are of")
    calls: tuple[str, ...] = Field(min_length=1, description="module name of each unit call")
    kind_of_call: tuple[str, ...]
    needs: tuple[CallInputs, ...] = Field(
        default=(), description="of each call, then of the loss; empty: not known"
    )
    no_stages: str = Field(
        default="", description="why its calls cannot be told of by other stages; then no `needs`"
    )
    waiting: tuple[float, ...] = Field(
        default=(),
        description="of each call, bytes by sample: what there is of gradients of units' outputs "
        "when a backward comes to it, or has left it, above the `gradient` of its kind; empty: "
        "nothing",
    )
    kinds: tuple[UnitKind, ...] = Field(min_length=1)
    root: RootUnit

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.calls) != len(self.kind_of_call):
            raise ValueError(f"{len(self.calls)} calls but {len(self.kind_of_call)} kinds of calls")
        if self.needs and len(self.needs) != len(self.calls) + 1:
            raise ValueError(f"{len(self.calls)} calls and a loss, but {len(self.needs)} needs")
        if self.waiting and len(self.waiting) != len(self.calls):
            raise ValueError(f"{len(self.calls)} calls, but {len(self.waiting)} have gradients")
        refuse_duplicates("unit kind", (k.name for k in self.kinds))
        missing = set(self.kind_of_call) - {k.name for k in self.kinds}
        if missing:
            raise ValueError(f"unit kind '{min(missing)}' is used but not described")
        units = sorted(set(zip(self.calls, self.kind_of_call)))
        refuse_duplicates("unit", (name for name, _ in units), "is of two kinds")
        self._check_needs()
        return self

    def _check_needs(self) -> None:
        """Check that all needs are met by root parameters and earlier calls."""
        known = {parameter.name for parameter in self.root.parameters}
        for number, needs in enumerate(self.needs):
            if unknown := set(needs.root) - known:
                raise ValueError(
                    f"call {number} needs '{min(unknown)}', which 'root.parameters' does not name"
                )
            late = [taken.call for taken in needs.outputs if taken.call >= number]
            if late:
                raise ValueError(f"call {number} needs what call {late[0]} returns, a later one")
        taken = {taken.call for needs in self.needs for taken in needs.outputs}
        if self.needs and (unused := set(range(len(self.calls) - 1)) - taken):
            raise ValueError(f"nothing needs what call {min(unused)} returns")

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of the calls, besides the first, where a stage may begin: no unit is called both
        before and after."""
        last = {name: number for number, name in enumerate(self.calls)}
        behind = accumulate((last[name] for name in self.calls), max)
        return tuple(n for n, end in enumerate(behind, 1) if end < n < len(self.calls))

    @property
    def most_stages(self) -> int:
        """Largest number of stages the model can be cut into."""
        return len(self.cuts) + 1

    def check_timed(self, of_class: ClassProfile) -> None:
        """Raise a ValueError if a class has no times of a unit."""
        missing = {ROOT, *self.kind_of_call} - set(of_class.units)
        if missing:
            name = of_class.device_class
            raise ValueError(f"unit '{min(missing)}' was not measured on device class '{name}'")

    def kind(self, name: str) -> UnitKind:
        """Return the kind called `name`; raise a KeyError if there is none."""
        return {k.name: k for k in self.kinds}[name]

    def needs_of(self, begin: int, end: int) -> CallInputs:
        """Return the root parameters and earlier outputs needed by calls [begin, end). The last
        call includes the loss.

        Raises:
            ValueError: the needs are unknown.
        """
        if not self.needs:
            raise ValueError("the profile does not say what calls need of each other")
        wanted = [*self.needs[begin:end], *(self.needs[-1:] if end == len(self.calls) else ())]
        outputs = {taken for needs in wanted for taken in needs.outputs if taken.call < begin}
        return CallInputs(
            root=tuple(dict.fromkeys(name for needs in wanted for name in needs.root)),
            outputs=tuple(sorted(outputs, key=lambda taken: (taken.call, taken.output))),
        )

    @cached_property
    def parameters(self) -> int:
        """Trainable elements of the whole model; a unit called twice counts once."""
        return self.root.trainable + self._sum_over_units("trainable")

    def _sum_over_units(self, field: Literal["trainable", "matrices", "small"]) -> int:
        """Return the sum of a field of unit kinds over all units, each counted once."""
        units = dict(zip(self.calls, self.kind_of_call))
        of_kind = {kind.name: getattr(kind, field) for kind in self.kinds}
        return sum(of_kind[kind] for kind in units.values())

    def mean_per_element(self, *, of_matrices: float, of_others: float) -> float:
        """Return the mean of a per-element value over all trained elements, given its value for the
        units' matrices and for all others."""
        matrices = self._sum_over_units("matrices")
        others = self.parameters - matrices
        return (of_matrices * matrices + of_others * others) / max(1, self.parameters)

    @property
    def quantised_adamw_bytes(self) -> float:
        """Mean bytes of AdamW's state in 8 bits over all trained elements."""
        root = (p.trainable for p in self.root.parameters if p.trainable < LEAST_QUANTISED)
        small = self._sum_over_units("small") + sum(root)
        large = self.parameters - small
        return (ADAMW_BYTES * small + ADAMW_8BIT_BYTES * large) / max(1, self.parameters)


class UnitTimes(Value):
    """Seconds of a unit call by samples of a micro-batch. `backward` includes recompute, `gradient`
    is the backward with a saved graph (None: not measured). `inputs` and `weights` are the two
    parts of a split backward: gradients of inputs and of parameters."""

    forward: Curve
    backward: Curve
    gradient: Curve | None = None
    inputs: Curve | None = None
    weights: Curve | None = None


class ClassProfile(Value):
    """Speed of a device class, and its memory use before gpumix allocates anything.

    `units` has a time for each unit kind. Under `ROOT`, forward is the code before the first unit,
    backward is head and loss in both passes plus the backward of the code before the first unit,
    and gradient is that last part alone. `chunked_cross_entropy` is backward with it.

    `largest_micro_batch` is the largest one measured: a larger one was not worth the time or did
    not fit. Plans stay within this limit, except with strategy `model`. None means no limit.
    `host_copy` is the time to move bytes to or from pinned host memory, the slower direction; None:
    not measured, no CPU offload. `host_optimizer_s_per_element` is the time to update offloaded
    state on the host; None: no state is offloaded. `estimated` marks datasheet values without a
    measurement.
    """

    device_class: str
    units: dict[str, UnitTimes]
    chunked_cross_entropy: Curve | None = None
    optimizer_s_per_element: float = Field(ge=0)
    framework_bytes: Count = Field(description="context and libraries, before any tensor")
    largest_micro_batch: int | None = Field(default=None, ge=1)
    host_copy: Curve | None = None
    host_optimizer_s_per_element: float | None = Field(default=None, ge=0)
    host_sum_s_per_byte: float | None = Field(
        default=None, ge=0, description="of gradients summed there; None: not measured"
    )
    host_bytes: Count | None = Field(
        default=None, description="of the host, for one device; None is no limit"
    )
    estimated: bool = False
    compiled: bool = Field(default=False, description="whether the times are of compiled units")
    compute_dtype: ComputeDtype = Field(default="fp32", description="that the times are of")
    peak: Peak | None = Field(default=None, description="in that dtype; None: not known")
    clocks: GpuClocks | None = Field(
        default=None, description="of the GPU that was measured, when it was warm; None: not told"
    )
    efficiency: KernelSettings = Field(
        default=PLAIN_EFFICIENCY, description="that the times are of"
    )
    choices: tuple[SettingChoice, ...] = Field(default=(), description="why it computes as it does")
    overruns: Count = Field(default=0, description="of an emulated device, in the times kept")

    def disturbed(self) -> str:
        """Describe a time that drops sharply as the micro-batch grows; "" if there is none."""
        for unit, times in self.units.items():
            for what, curve in times:
                for (n, longer), (m, shorter) in combinations(_get_points(curve), 2):
                    if longer > FALL * shorter and longer - shorter > LEAST_FALL_S:
                        return (
                            f"{what} of unit '{unit}' takes {show_seconds(longer)} for {n:g} "
                            f"samples but {show_seconds(shorter)} for {m:g}"
                        )
        return ""


def _get_points(curve: Curve | None) -> Iterable[tuple[float, float]]:
    return () if curve is None else zip(curve.sizes, curve.values)


TensorParallelOperation = Literal["all_reduce", "exchange", "reduce"]


class TensorParallelCollective(Value):
    """Collectives of one type run by a tensor-parallel group for a unit call: their number, and the
    total bytes sent by each rank, by samples of a micro-batch."""

    operation: TensorParallelOperation
    times: Count
    bytes: Curve


class TensorParallelTraffic(Value):
    """Collectives of a tensor-parallel group by pass. `backward` includes recompute, `gradient`
    uses a saved graph. Under `ROOT`, forward is the code before the first unit, backward is head
    and loss in both passes."""

    forward: tuple[TensorParallelCollective, ...] = ()
    backward: tuple[TensorParallelCollective, ...] = ()
    gradient: tuple[TensorParallelCollective, ...] = ()
    summed: Count = Field(
        default=0, description="elements of whose gradients each rank has a part, summed in a step"
    )
    part: Curve | None = Field(
        default=None,
        description="bytes of a rank's part of a unit's hidden states, by samples; None: each rank "
        "has the whole",
    )


class TensorParallelProfile(Value):
    """The model as computed by each rank of a tensor-parallel group: a part of every divided
    module.

    Attributes:
        classes: measured classes, with compute times only.
        told: collectives by class, then by unit kind or `ROOT`.
        enters, leaves: numbers of the calls that divide complete hidden states, and of the calls
            after which hidden states are complete again before the next call.
    """

    degree: int = Field(ge=2, description="ranks of a tensor-parallel group")
    sequence: bool = Field(
        default=False, description="whether each has its part of the positions between them"
    )
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    model: ModelProfile
    other_models: tuple[ModelProfile, ...] = ()
    classes: tuple[ClassProfile, ...] = Field(min_length=1)
    told: dict[str, dict[str, TensorParallelTraffic]]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for of_class in self.classes:
            self.model.check_timed(of_class)
            if (name := of_class.device_class) not in self.told:
                raise ValueError(f"'told' has no entry for device class '{name}'")
        return self


RankGroup = Literal["all", "inside", "across", "island", "rack"]


class CollectiveTimes(Value):
    """Seconds of a collective by bytes of the complete (gathered) buffer.

    `group` is `all` ranks; or the ranks `inside` each host, all hosts at once; or `across`: each
    rank with its counterparts on other hosts, all at once, where the buffer is the total of one
    host; or the ranks of each `island` or `rack`. A `send` is a message between two ranks, on one
    or two hosts. A `sum` is an all-reduce of the complete buffer from each rank. For a
    tensor-parallel group inside a host, the `form` of `sum` and of its halves, `tp_gather` and
    `tp_reduce`, is the group size.
    """

    operation: Literal["gather", "reduce", "send", "sum", "tp_gather", "tp_reduce"]
    form: str
    group: RankGroup = "all"
    times: Curve


class HostInput(Value):
    """CPU use of loading the data for a host's ranks."""

    host: str
    cores: float = Field(gt=0, description="that processes there may use")
    cpu_s_per_sample: float = Field(ge=0, description="seconds of one core to read one sample")
    most_samples_per_s: float | None = Field(
        default=None,
        gt=0,
        description="of any number of readers, where a disk or a network sets that; else none",
    )
    wait_s_per_sample: float = Field(
        default=0.0,
        ge=0,
        description="seconds by the clock that one reader takes for a sample, where it mostly "
        "waits; else 0",
    )
    parallel: bool = Field(default=True, description="whether several may read for one rank")
    readers: int | None = Field(
        default=None,
        ge=1,
        description="that read for each rank, where their number is given; else as many as help",
    )


class Profile(Document):
    """All data about a model on a cluster required by the planner."""

    kind: Literal["profile"] = "profile"

    sequence_length: int = Field(gt=0, le=LARGEST_LENGTH)
    optimizer_bytes_per_element: StateBytes = Field(description="mean over the model, 8 for AdamW")
    optimizer_state: OptimizerState = "fp32"
    exchanges_matrices: bool = Field(default=False, description="whether updates do, as Muon's")
    torch_version: str
    cluster: Cluster
    model: ModelProfile
    other_models: tuple[ModelProfile, ...] = Field(
        default=(), description="the same model in the other dtypes that classes compute in"
    )
    classes: tuple[ClassProfile, ...] = Field(min_length=1)
    tp_profiles: tuple[TensorParallelProfile, ...] = Field(
        default=(), description="the same where several ranks compute each unit together"
    )
    collectives: Collectives = Field(description="the fastest forms on these links")
    network: tuple[CollectiveTimes, ...] = ()
    links: Links = Links()
    inputs: tuple[HostInput, ...] = Field(
        default=(), description="what reading samples takes on each host; empty: not known"
    )
    step_overhead_s: float = Field(
        default=0.0, ge=0, description="of one step, neither compute nor communication"
    )
    updates_early: bool = Field(
        default=False,
        description="whether the host updates what it keeps while gradients of other blocks are "
        "computed: an optimizer of single elements, without clipping",
    )
    contention: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="how much of the shorter one a collective and computing at the same time take "
        "longer than the longer one: 0 is a perfect overlap, 1 is none",
    )
    seconds_spent: float = Field(default=0.0, ge=0)
    job_model: str = Field(
        default="", description="hash of what the job says of its model; empty without a job"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        refuse_duplicates(
            "device class", (c.device_class for c in self.classes), "is described twice"
        )
        forms = (f"{t.operation} of {t.group} ranks, {t.form}" for t in self.network)
        refuse_duplicates("collective", forms, "is described twice")
        measured = {c.device_class: c for c in self.classes}
        for name in sorted({d.device_class for d in self.cluster.devices}):
            if name not in measured:
                raise ValueError(f"device class '{name}' was not measured")
            self.model.check_timed(measured[name])
        refuse_duplicates("host's data", (one.host for one in self.inputs), "is described twice")
        models = (self.model, *self.other_models)
        refuse_duplicates("dtype", (m.compute_dtype for m in models), "is described twice")
        if len({(m.fingerprint, m.calls, m.kind_of_call) for m in models}) > 1:
            raise ValueError("the models of different dtypes are not the same model")
        for c in self.classes:
            if c.chunked_cross_entropy and not self.model.root.chunked_cross_entropy:
                raise ValueError(
                    f"class '{c.device_class}' uses chunked cross-entropy, of unknown memory"
                )
        groups = (f"{one.degree}, {one.sequence}" for one in self.tp_profiles)
        refuse_duplicates("tensor-parallel group", groups, "is described twice")
        if any(one.model.fingerprint != self.model.fingerprint for one in self.tp_profiles):
            raise ValueError("the model of the tensor-parallel groups is another one")
        unknown = {c.compute_dtype for c in self.classes} - {m.compute_dtype for m in models}
        if unknown:
            raise ValueError(f"a class computes in {min(unknown)}, whose memory was not measured")
        return self

    @classmethod
    def load(cls, path: Path, *, fix: str = "") -> Self:
        """Read the profile from `path`, see `Document.load`; raise an InputError also for a time
        that drops sharply as the micro-batch grows."""
        profile = super().load(path, fix=fix)
        for of_class in profile.classes:
            if told := of_class.disturbed():
                raise InputError(
                    f"the device was disturbed while it was measured: {told}",
                    code="measurement-disturbed",
                    where=f"{path}: device class '{of_class.device_class}'",
                    fix="measure again: `gpumix profile JOB.yaml --fresh`",
                )
        return profile

    @property
    def estimated(self) -> tuple[str, ...]:
        """Classes with times estimated from datasheets."""
        return tuple(c.device_class for c in self.classes if c.estimated)

    def model_of(self, name: str) -> ModelProfile:
        """Return the model in a class's compute dtype; raise a KeyError if there is none."""
        return self.model_in(self.of_class(name).compute_dtype)

    def model_in(self, dtype: ComputeDtype) -> ModelProfile:
        """Return the model in a dtype; raise a KeyError if there is none."""
        return {m.compute_dtype: m for m in (self.model, *self.other_models)}[dtype]

    def of_class(self, name: str) -> ClassProfile:
        """Return the profile of a device class; raise a KeyError if there is none."""
        return self._class_by_name[name]

    @cached_property
    def _class_by_name(self) -> dict[str, ClassProfile]:
        return {of_class.device_class: of_class for of_class in self.classes}
