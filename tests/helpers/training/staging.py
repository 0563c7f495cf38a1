"""Plans of several stages, made by hand, and training by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple, get_args

import torch
from hypothesis import strategies as st
from torch import nn

from gpumix.engine.engine import Engine
from gpumix.engine.model.deferred_init import build
from gpumix.engine.model.model_settings import find_unit_conflicts
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.profiler.compute.dataflow import DataFlow, find_flows
from gpumix.profiler.compute.unit_kinds import separate_kinds
from gpumix.profiler.compute.unit_runner import UnitRunner
from gpumix.schema.plan.plan import Plan, Schedule
from gpumix.schema.plan.stage import Mode, Stage, Worker
from helpers.processes.harness import run_ranks
from helpers.training.known_losses import known_loss
from helpers.training.models import (
    ARCHITECTURES,
    DEEP,
    LENGTH,
    WIDTH,
    Architecture,
    Batch,
    Block,
    InOrder,
    Regression,
    vectors,
)
from helpers.training.reference import (
    SEED,
    Key,
    Share,
    Trained,
    batches,
    joined,
    optimizer_for,
    pieces_of,
    through_host,
)


def tied_blocks() -> nn.Module:
    """Blocks that share weights with each other, and the third with the layer before them."""
    model = Regression(blocks := [Block() for _ in range(4)])
    blocks[3].out.weight = blocks[1].out.weight
    blocks[2].norm = blocks[0].norm
    blocks[2].out.weight = model.enter.weight
    return model


def tied_crosswise() -> nn.Module:
    """The first of its blocks shares weights with the last, the second with the third."""
    model = Regression(blocks := [Block() for _ in range(4)])
    blocks[3].out.weight = blocks[0].out.weight
    blocks[2].norm = blocks[1].norm
    return model


def called_again() -> nn.Module:
    """The first two of its blocks are called twice, in turn, and the last twice in a row."""
    return InOrder(4, [0, 1, 0, 1, 2, 3, 3])


class LooksBack(Regression):
    """After its second block its own code goes by values that the first one has come to."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](self.enter(x))
        x = self.blocks[1](first)
        x = self.blocks[2](x if first.isfinite().all() else -x)
        return self.error(x + first[first.isnan()].sum(), target)


class UShape(Regression):
    """Its last block, and its loss, go by what the first two have come to, too."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](self.enter(x))
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        return self.error(self.blocks[3](third * first.sigmoid()) + second, target)


class StartsWithoutGradients(Regression):
    """Its first two blocks run without gradients."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](self.enter(x)))
        return self.error(self.blocks[3](self.blocks[2](x)), target)


class ScaledBlock(Block):
    """It takes by what its output is multiplied."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


class FillsInTheLikeness(Regression):
    """Its code makes tensors that have of a block's output but the shape."""

    def __init__(self) -> None:
        super().__init__([ScaledBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.blocks[0](self.enter(x), x.new_ones(()))
        scale = torch.full_like(first, 0.5)
        scale[:, :2] = first.new_tensor([1.5]) + first.new_zeros(1)
        x = self.blocks[1](first, scale)
        for block in self.blocks[2:]:
            x = block(x, scale)
        return self.error(x, target)


class NumberedBlock(Block):
    """One of them returns something beside, as its number says."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return (x.mean(1, keepdim=True), x) if self.layer_idx == 1 else x


class ByNumber(Regression):
    def __init__(self) -> None:
        super().__init__([NumberedBlock(number) for number in range(4)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks[0](self.enter(x))
        mean, x = self.blocks[1](x)
        return self.error(self.blocks[3](self.blocks[2](x)) + mean, target)


class SteppingBlock(Block):
    """It returns one of so many positions."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :: self._step]


class Halves(Regression):
    """Its third block returns half of the positions, its fourth is given no more."""

    def __init__(self) -> None:
        super().__init__([SteppingBlock(2 if number == 2 else 1) for number in range(5)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skipped = self.blocks[1](self.blocks[0](self.enter(x)))
        x = self.blocks[3](self.blocks[2](skipped))
        return self.error(self.blocks[4](x.repeat_interleave(2, 1) + skipped), target)


class LookingBlock(Block):
    """It goes by values, but returns what always looks alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + x[x.isnan()].sum()


class SharingBlock(Block):
    """It takes from a dict what the block before has put there, and puts there what the next one
    takes."""

    def forward(self, x: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        y = super().forward(x + held["last"] if "last" in held else x)
        held["last"] = x.sigmoid()
        return y


class SharesByDict(Regression):
    """Its loss goes by what its last block has put into a dict, too."""

    def __init__(self) -> None:
        super().__init__([SharingBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, held)
        return self.error(x + held["last"], target)


class Rounds(Regression):
    """Its loss goes by what its first two blocks come to in whole numbers: they get no gradient,
    and not even weight decay."""

    def __init__(self, rounds: bool = True) -> None:
        super().__init__([Block() for _ in range(5)])
        self.rounds = rounds

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.enter(x)
        side = self.blocks[1](self.blocks[0](x.detach()))
        x = self.blocks[3](self.blocks[2](x))
        side = (side > 0).float() if self.rounds else side
        return self.error(self.blocks[4](x + side), target)


def looks_inside() -> nn.Module:
    return Regression([LookingBlock() for _ in range(3)])


class TellingBlock(Block):
    """It returns a number that it computes from values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        x = super().forward(x)
        return x, x.abs().max().item()


class GoesByNumbers(Regression):
    def __init__(self) -> None:
        super().__init__([TellingBlock() for _ in range(3)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, most = self.enter(x), 0.0
        for block in self.blocks:
            x, largest = block(x)
            most += largest
        loss, count = self.error(x, target)
        return loss * (1 + most), count


def frozen_bottom() -> nn.Module:
    """Nothing before its third block is trained."""
    model = Regression(blocks := [Block() for _ in range(4)])
    for part in (model.enter, *blocks[:2]):
        part.requires_grad_(False)
    return model


class BranchingBlock(Block):
    """Samples whose first number is above a bound take a branch, which gets no gradient where
    there are none; `idle` never has one."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        above = chosen > self.bound
        return x.index_put((above,), x[above] + self.branch(x[above])) if above.any() else x


class Branching(Regression):
    """Its blocks, and its head if it `branches`, use a part of their parameters for some samples
    only."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__([BranchingBlock(bound) for bound in (0.5, 1.0, 3.0, 0.0)])
        self.branches = branches
        self.second = nn.Linear(4, 4)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, x = x[:, 0, 0], self.enter(x)
        for block in self.blocks:
            x = block(x, chosen)
        error, count = self.error(x, target)
        above = target[:, 0, 0] > 0.8
        if self.branches and above.any():
            error = error + self.second(target[above]).square().sum()
        return error, count


class CountedBlock(nn.Module):
    """Scales by how often it ran, as a warm-up inside a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.inner(self.linear(x)) * self.runs


def counters() -> nn.Module:
    return Regression([CountedBlock() for _ in range(4)])


LLAMAS_ENDS = {
    "before": ("model.embed_tokens.weight",),
    "after": ("lm_head.weight", "model.norm.weight"),
}
EVERY = (
    ARCHITECTURES
    | DEEP
    | {
        name: Architecture(name, factory, vectors)
        for name, factory in {
            "tied_blocks": tied_blocks,
            "tied_crosswise": tied_crosswise,
            "called_again": called_again,
            "looks_back": LooksBack,
            "u_shape": UShape,
            "starts_without_gradients": StartsWithoutGradients,
            "fills_in_the_likeness": FillsInTheLikeness,
            "by_number": ByNumber,
            "halves": Halves,
            "shares_by_dict": SharesByDict,
            "rounds": Rounds,
            "never_rounds": partial(Rounds, rounds=False),
            "looks_inside": looks_inside,
            "goes_by_numbers": GoesByNumbers,
            "frozen_bottom": frozen_bottom,
            "counters": counters,
            "branching_blocks": Branching,
            "branching": partial(Branching, branches=True),
        }.items()
    }
)


class Row(NamedTuple):
    """The workers of a stage: each one's share, the number of its device, and in how many of the
    `tensor` parts of units it is; tensor-parallel groups may divide the sequence too."""

    shares: tuple[Share, ...]
    devices: tuple[int, ...]
    tensor: int = 1
    sequence: bool = False
    parts: tuple[int, ...] = ()

    @property
    def leaders(self) -> Iterator[Share]:
        """Of each tensor-parallel group the first one's."""
        number = 0
        while number < len(self.shares):
            yield self.shares[number]
            number += self.tensor // self.parts_of(number)

    def parts_of(self, number: int) -> int:
        return self.parts[number] if self.parts else 1


def rows(
    *samples: Sequence[int],
    micro_batch: int = 2,
    tensor: Sequence[int | Sequence[int]] = (),
    sequence: bool = False,
    state: Sequence[Sequence[int]] = (),
    **share: Any,
) -> list[Row]:
    """Stages on devices of their own, by the samples of each worker, or of each tensor-parallel
    group (`tensor` has the size of all groups of a stage, or of each), which divide the sequence
    too or not; by default they share their stage's state equally."""
    found, device = [], 0
    states = state or [[1] * len(of_stage) for of_stage in samples]
    members_of = tensor or [1] * len(samples)
    for of_stage, parts, members in zip(samples, states, members_of, strict=True):
        each = [
            Share(n, min(n, micro_batch), part, **share)
            for n, part in zip(of_stage, parts, strict=True)
        ]
        found.append(_row(each, members, device, sequence=sequence))
        device += len(found[-1].devices)
    return found


def _row(
    shares: Sequence[Share], members: int | Sequence[int], device: int, *, sequence: bool
) -> Row:
    """Tensor-parallel groups of so many ranks each, by what they get; from this device on."""
    sizes = [members] * len(shares) if isinstance(members, int) else members
    degree = max(sizes)
    every = [(s, size) for s, size in zip(shares, sizes, strict=True) for _ in range(size)]
    return Row(
        shares=tuple(share for share, _ in every),
        devices=tuple(range(device, device + len(every))),
        tensor=degree,
        sequence=sequence and degree > 1,
        parts=tuple(degree // size for _, size in every),
    )


@cache
def calls_of(name: str) -> tuple[str, ...]:
    """Names of an architecture's unit calls."""
    model = build(EVERY[name].factory, 0)
    if isinstance(model, InOrder):
        return tuple(f"blocks.{number}" for number in model.order)
    return tuple(unit.name for unit in split_into_units(model).units)


@cache
def fingerprint_of(name: str) -> str:
    """Of an architecture's model, as plans have it."""
    return split_into_units(build(EVERY[name].factory, SEED)).fingerprint()


@cache
def flows_of(name: str, *, in_chunks: bool = False) -> DataFlow:
    """What the calls of an architecture's model need of each other."""
    architecture = EVERY[name]
    model = build(architecture.factory, 0)
    find_unit_conflicts(model).switch_off()
    runner = UnitRunner(
        model,
        split_into_units(model),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        objective=known_loss(model),
    )
    batch = architecture.batch(2, torch.Generator().manual_seed(0))
    separate_kinds(runner, batch)
    return find_flows(runner, batch, in_chunks=in_chunks)


def staged_plan(
    name: str, rows: Sequence[Row], cuts: Sequence[int] | None = None, **settings: Any
) -> Plan:
    """A plan of stages.

    Args:
        cuts: numbers of the calls at which stages but the first begin; default: equally many each.
    """
    calls, needs = calls_of(name), flows_of(name).needs
    ends = [len(calls) * n // len(rows) for n in range(len(rows) + 1)]
    if cuts is not None:
        ends = [0, *cuts, len(calls)]
    stages = []
    for row, (begin, end) in zip(rows, pairwise(ends), strict=True):
        wanted = [*needs[begin:end], *(needs[-1:] if end == len(calls) else ())]
        stages.append(
            Stage(
                units=calls[begin:end],
                workers=tuple(_worker(row, n) for n in range(len(row.shares))),
                tensor=row.tensor,
                sequence=row.sequence,
                root=tuple(dict.fromkeys(name for one in wanted for name in one.root)),
                takes=tuple(
                    dict.fromkeys(t for one in wanted for t in one.outputs if t.call < begin)
                ),
            )
        )
    return Plan(
        strategy="test",
        model=fingerprint_of(name),
        sequence_length=LENGTH,
        global_batch=sum(share.samples for share in rows[0].leaders),
        stages=tuple(stages),
        **settings,
    )


def _worker(row: Row, number: int) -> Worker:
    share = row.shares[number]
    return Worker(
        device=f"d{row.devices[number]}",
        device_class="cpu",
        samples=share.samples,
        micro_batch=share.micro_batch,
        state_share=share.state / sum(s.state for s in row.leaders),
        parts=row.parts_of(number),
        mode=share.mode,
        kept_graphs=share.kept,
    )


def on_devices(plan: Plan, *said: Mapping[str, Any]) -> Plan:
    """The same plan whose workers say this of themselves too, by the number of their device."""
    tree = plan.model_dump()
    for worker in (worker for stage in tree["stages"] for worker in stage["workers"]):
        worker |= said[int(worker["device"].removeprefix("d"))]
    return Plan.model_validate(tree)


def train_in_stages(
    name: str, plan: Plan, steps: int, *, backend: str = "gloo", staged_on: str = ""
) -> tuple[list[list[float]], Trained]:
    """Train on ranks: the losses that each saw, and what all came to."""
    arguments = plan.model_dump_json(), name, steps, staged_on
    return _trained(run_ranks(train_rank, len(plan.workers), *arguments, backend=backend))


def _trained(results: Sequence[tuple[list[float], Any]]) -> tuple[list[list[float]], Trained]:
    losses, pieces = zip(*results)
    return list(losses), Trained(losses[0], joined(pieces))


def staged_engine(name: str, plan: Plan, staged_on: str = "") -> Engine:
    """On a rank."""
    comm = through_host(staged_on) if staged_on else None
    model = build(EVERY[name].factory, SEED)
    return prepare(model, plan, comm=comm, loss=known_loss(model))


def own_samples(plan: Plan, rank: int, batch: Batch) -> Batch:
    """A rank's part of a global batch."""
    own = [n for rows in plan.rows_of(rank) for n in rows]
    return {key: value[own] for key, value in batch.items()}


def train_in_turn(
    plans: Mapping[Key, tuple[str, Plan]], steps: int
) -> dict[Key, tuple[list[list[float]], Trained]]:
    """The same of several architectures and plans, by what they are called."""
    work = {key: (plan, (name, steps)) for key, (name, plan) in plans.items()}
    return {key: _trained(results) for key, results in run_in_turn(train_rank, work).items()}


def run_in_turn(
    function: Callable[..., Any], work: Mapping[Key, tuple[Plan, Sequence[Any]]]
) -> dict[Key, list[Any]]:
    """What a function of a plan's text and of more comes to on each rank, by what it is called;
    ranks of as many as a plan has are started once."""
    found = {}
    for world in sorted({len(plan.workers) for plan, _ in work.values()}):
        alike = {key: one for key, one in work.items() if len(one[0].workers) == world}
        calls = [(str(key), plan.model_dump_json(), more) for key, (plan, more) in alike.items()]
        time_s = max(60.0, 10.0 * len(calls))
        results = run_ranks(_each, world, function, calls, timeout_s=time_s)
        found |= {key: [of_rank[n] for of_rank in results] for n, key in enumerate(alike)}
    return found


def _each(
    function: Callable[..., Any], calls: Sequence[tuple[str, str, Sequence[Any]]]
) -> list[Any]:
    found = []
    for key, plan_json, more in calls:
        try:
            found.append(function(plan_json, *more))
        except Exception as error:
            error.add_note(f"in {key}")
            raise
    return found


def train_rank(
    plan_json: str, name: str, steps: int, staged_on: str = ""
) -> tuple[list[float], Any]:
    """One rank's part: its losses, and its pieces of what was trained."""
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan, staged_on)
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for batch in batches(EVERY[name], plan.global_batch, steps):
        optimizer.zero_grad()
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        optimizer.step()
    return losses, pieces_of(engine)


GROUPS: list[tuple[tuple[int, int | tuple[int, ...]], ...]] = [
    *(((n, 1), (m, 1)) for n, m in [(1, 1), (2, 2), (1, 3), (3, 1), (2, 1)]),
    *(((n, 1), (m, 1), (k, 1)) for n, m, k in [(1, 2, 1), (1, 1, 2), (1, 1, 1)]),
    ((1, 2),),
    ((2, 2),),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((1, 2), (1, 2)),
    ((1, 2), (2, 1)),
    ((2, (1, 2)),),
    ((2, (2, 1)),),
    ((3, (1, 2, 1)),),
    ((2, (1, 2)), (1, 1)),
    ((1, 1), (2, (2, 1))),
]
"""Of each stage the workers, and the ranks of all or of each; on up to four ranks."""

MOST_ROUNDS = 3
GOING_ROUND = [
    ((1, 1), (1, 1)),
    ((1, 1), (1, 1), (1, 1)),
    ((2, 1), (2, 1)),
    ((1, 1), (2, 1)),
    ((1, 2), (1, 2)),
    ((1, 2), (1, 1)),
]
"""The same of those that are gone through twice, or `MOST_ROUNDS` times."""


def schedules_for(calls: int) -> list[Schedule]:
    """Those by which a model of so many unit calls can train."""
    fewest = 2 * min(map(len, GOING_ROUND))
    return [one for one in get_args(Schedule) if one != "interleaved" or calls >= fewest]


@st.composite
def layouts(
    draw: st.DrawFn, calls: int, schedule: Schedule
) -> tuple[list[Row], list[int], dict[str, Any]]:
    """Stages of a model of so many unit calls: workers, cuts, and settings of the plan."""
    if schedule == "interleaved":
        groups = draw(st.sampled_from([g for g in GOING_ROUND if 2 * len(g) <= calls]))
        rounds = draw(st.integers(2, min(MOST_ROUNDS, calls // len(groups))))
    else:
        groups, rounds = draw(st.sampled_from(GROUPS)), 1
    inner = rounds * len(groups) - 1
    cuts = draw(st.lists(st.integers(1, calls - 1), min_size=inner, max_size=inner, unique=True))
    size, count = draw(st.integers(1, 2)), draw(st.integers(1, 8))
    settings: dict[str, Any] = {"zero_stage": draw(st.integers(0, 3)), "schedule": schedule}
    found: list[Row] = []
    device = 0
    for workers, tensor in groups:
        ends = sorted(
            draw(st.lists(st.integers(0, count), min_size=workers - 1, max_size=workers - 1))
        )
        dealt = [b - a for a, b in pairwise([0, *ends, count])]
        mode = Mode(recompute=draw(st.booleans()), head=draw(st.sampled_from(["whole", "chunked"])))
        shares = tuple(
            Share(n * size, min(size, n * size), draw(st.integers(0 if k else 1, 3)), mode)
            for k, n in enumerate(dealt)
        )
        found.append(_row(shares, tensor, device, sequence=tensor != 1 and draw(st.booleans())))
        device += len(found[-1].devices)
    if settings["zero_stage"] >= 2 and len(groups) > 1:
        settings["waves"] = draw(st.sampled_from(range(min(map(_micro_batches, found)), 0, -1)))
    return found * rounds, sorted(cuts), settings


def _micro_batches(row: Row) -> int:
    """The most that a worker of a stage has: a wave needs one."""
    return max(ceil(share.samples / share.micro_batch) for share in row.shares if share.samples)
