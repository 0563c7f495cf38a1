"""Plans in which devices compute units together: made of teams as of single devices.

A team is devices of one class on one host. To the planner it is one device of another, faster kind
(`cost.teams`): so every way to plan for devices plans for teams too, one degree at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumix.cost.predict import predict
from gpumix.cost.teams import in_team
from gpumix.planner.base import WORTHWHILE, PlanRequest, Strategy, fit, predicted, ranked_devices
from gpumix.planner.manner import ALONE, Team, measured_teams, teams_of_space
from gpumix.planner.way import members
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan, Prediction, Stage
from gpumix.spec.profile import Profile

Teams = dict[str, tuple[Device, ...]]
"""The devices of each team by the id of its first one."""


def over_degrees(strategy: Strategy) -> Strategy:
    """The same strategy, for teams of all degrees that the request's space has too."""
    return lambda profile, request: of_any_degree(
        profile, request, strategy, lambda: strategy(profile, request)
    )


def of_any_degree(
    profile: Profile, request: PlanRequest, strategy: Strategy, alone: Callable[[], Plan]
) -> Plan:
    """The fastest plan of a strategy, of those that the request's degrees make.

    Args:
        alone: makes that of degree 1.

    Raises:
        InputError, NoFeasiblePlanError: there is none; what the lowest degree says of it.
    """
    best: Plan | None = None
    failures: list[InputError | NoFeasiblePlanError] = []
    wanted, measured = teams_of_space(request.space), measured_teams(profile)
    if wanted[0] == ALONE:  # stages of their own teams are among what it makes (`planner.staged`)
        space = request.space.model_copy(update={"most_stages": 1, "least_stages": 1})
        request = request.model_copy(update={"space": space})
    for team in wanted:
        others = wanted[0] == ALONE or not measured.isdisjoint(wanted)
        if team != ALONE and team not in measured and others:
            continue  # the model, or the cluster, has no such teams
        try:
            found = alone() if team == ALONE else _in_teams(profile, request, strategy, team)
        except (InputError, NoFeasiblePlanError) as error:
            failures.append(error)
            continue
        limit_s = float("inf") if best is None else predicted(best).step_s * (1 - WORTHWHILE)
        if predicted(found).step_s < limit_s:
            best = found
    if best is None:
        raise failures[0]
    return best


def _in_teams(profile: Profile, request: PlanRequest, strategy: Strategy, size: Team) -> Plan:
    """The strategy's plan for such teams."""
    degree, sequence = size
    of_team = in_team(profile, degree, sequence=sequence)
    devices = ranked_devices(profile, request)
    teams = {team[0].id: team for team in members(devices, degree)}
    measured = {c.device_class for c in of_team.classes}
    leaders = [leader for leader, team in teams.items() if team[0].device_class in measured]
    if not leaders or (len(leaders) * degree < len(devices) and request.space.leave_out is False):
        raise NoFeasiblePlanError(
            f"the devices cannot all be divided into teams of {degree}",
            why="a team is devices of one class on one host",
            fix="allow `techniques: {tensor: [1]}`, or `leave_out: true`",
        )
    request = request.model_copy(
        update={
            "devices": tuple(leaders),
            "space": request.space.model_copy(update={"tensor": (1,)}),
        }
    )
    of_team = of_team.model_copy(update={"cluster": of_team.cluster.only(leaders)})

    def expanded(found: Plan) -> tuple[Plan, Prediction]:
        plan = _expanded(found, teams, size, devices)
        return plan, predict(profile, plan)

    found = strategy(of_team, request)
    plan, expected = expanded(found)
    if not fit(expected.workers):
        found = strategy(_with_room(of_team, expected), request)
        plan, expected = expanded(found)
    if not fit(expected.workers):
        raise NoFeasiblePlanError(
            f"teams of {degree} have no room for what their ranks tell each other in",
            fix="take a smaller batch, or another tensor parallel degree",
        )
    bound_s = predicted(found).bound_s
    bound_s = None if bound_s is None else min(bound_s, expected.step_s)
    return plan.model_copy(update={"prediction": expected.model_copy(update={"bound_s": bound_s})})


def _with_room(of_team: Profile, expected: Prediction) -> Profile:
    """The same with less memory: twice what a plan was short of, for what ranks of a team tell each
    other in."""
    part = max(w.peak_bytes / w.memory_limit_bytes for w in expected.workers) ** 2
    cluster = of_team.cluster
    classes = tuple(
        c.model_copy(update={"memory_bytes": int(c.memory_bytes / part)}) for c in cluster.classes
    )
    smaller = cluster.model_copy(update={"classes": classes})
    return of_team.model_copy(update={"cluster": smaller})


def _expanded(plan: Plan, teams: Teams, size: Team, devices: tuple[Device, ...]) -> Plan:
    """A plan for the first devices of teams, for all of them."""

    def with_members(stage: Stage) -> Stage:
        workers = tuple(
            worker.model_copy(update={"device": device.id})
            for worker in stage.workers
            for device in teams[worker.device]
        )
        degree, sequence = size
        update = {"workers": workers, "tensor": degree, "sequence": sequence}
        return stage.model_copy(update=update)

    stages = tuple(map(with_members, plan.stages))
    used = {worker.device for stage in stages for worker in stage.workers}
    ranks = tuple(device.id for device in devices if device.id in used)
    return plan.model_copy(update={"stages": stages, "ranks": ranks, "prediction": None})
