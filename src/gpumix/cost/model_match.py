"""Checks of a plan against a model: units, order of units, and the inputs of each stage.

Plans are edited by hand. Errors are found here, before ranks start: at run time, a stage with
missing inputs leaves the other stages waiting.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import ModelProfile

FIX = "mend the plan, or make one for this model: gpumix plan JOB.yaml"


def check_units(plan: Plan, model: ModelProfile) -> None:
    """Refuse a plan with calls other than the model's.

    Raises:
        InputError: units are missing, unknown, doubled or in another order, or a stage lacks
            parameters of the root or outputs of other stages that its units need.
    """
    planned = tuple(name for stage in plan.stages for name in stage.units)
    if planned != model.calls:
        check_unit_names(plan, model.calls)
        wrong = _describe_count_mismatch(planned, model.calls) or _describe_order_mismatch(
            planned, model.calls
        )
        raise InputError(
            f"the plan is not one for this model: {wrong}", code="plan-model-mismatch", fix=FIX
        )
    check_root_ends(plan, model.root.before.names, model.root.after.names)
    if len(plan.stages) > 1 and model.needs:
        for number in range(len(plan.stages)):
            _check_stage_inputs(plan, number, model)


def check_root_ends(plan: Plan, before: Collection[str], after: Collection[str]) -> None:
    """Refuse a plan with wrong parameters in `before` or `after`.

    Args:
        before, after: the allowed names, used at only one end of the model.

    Raises:
        InputError: the plan names another.
    """
    for number, stage in enumerate(plan.stages, 1):
        for key, named, allowed in (
            ("before", stage.before, before),
            ("after", stage.after, after),
        ):
            wrong = [name for name in named if name not in allowed or named.count(name) > 1]
            if named and len(plan.stages) > 1:
                what, fix = "is for plans of one stage", f"set '{key}' to []"
            elif wrong:
                what = (
                    f"names {_format_names(wrong)}, which is not used at that end of the model only"
                )
                fix = f"set '{key}' to []"
                fix += f", or to {json.dumps(list(allowed))}" if allowed else ""
            else:
                continue
            raise InputError(
                f"'{key}' {what}", code="plan-key-conflict", where=f"stage {number}", fix=fix
            )


def check_settings_have_effect(plan: Plan) -> None:
    """Refuse values written by hand without effect or without a prediction.

    Raises:
        InputError: a value is refused.
    """
    of_stages = [(n, stage, w) for n, stage in enumerate(plan.stages, 1) for w in stage.workers]
    for number, stage, worker in of_stages:
        where = f"stage {number}"
        if len(plan.stages) > 1 and worker.kept_graphs:
            raise InputError(
                f"'kept_graphs' is {worker.kept_graphs} for device '{worker.device}', what single "
                "graphs take in several stages is not known",
                code="kept-graphs-in-stages",
                where=where,
                fix="set it to 0, or `mode.recompute` to false, which keeps all of them",
            )
        pairs = len(stage.units) * len(worker.micro_batches)
        if worker.kept_graphs > pairs:
            raise InputError(
                f"'kept_graphs' is {worker.kept_graphs}, device '{worker.device}' has {pairs} "
                "pairs of unit call and micro-batch",
                code="kept-graphs-out-of-range",
                where=where,
                fix="set it to at most so many",
            )
        if len(plan.stages) > 1 and worker.mode.order != "layered":
            raise InputError(
                f"the order of device '{worker.device}' is {worker.mode.order}, in several stages "
                "the schedule orders micro-batches",
                code="plan-order-in-stages",
                where=where,
                fix="set `mode.order` to layered",
            )
    splits = any(plan.puts_off(n - 1, worker) for n, _, worker in of_stages if worker.samples)
    if len(plan.stages) > 1 and plan.schedule == "zero-bubble" and not splits:
        who = "in each stage some devices recompute" if plan.in_waves else "all devices recompute"
        raise InputError(
            f"schedule 'zero-bubble' splits the backward of kept graphs, and {who}",
            code="zero-bubble-kept-graphs",
            why="at ZeRO stages 2 and 3 a stage's devices reduce together" if plan.in_waves else "",
            fix="set `schedule` to 1f1b, or `mode.recompute` of devices to false",
        )


def check_unit_names(plan: Plan, units: Collection[str]) -> None:
    """Refuse a plan with units other than a model's.

    Raises:
        InputError: units are missing or unknown.
    """
    planned = {name: n for n, stage in enumerate(plan.stages, 1) for name in stage.units}
    unknown = [name for name in planned if name not in units]
    missing = [name for name in units if name not in planned]
    if unknown:
        name = unknown[0]
        raise InputError(
            f"the plan is not one for this model, which has no unit '{name}'",
            code="plan-unit-unknown",
            where=f"stage {planned[name]}",
            why=f"its units are {_format_names(units)}",
            fix=FIX,
        )
    if missing:
        raise InputError(
            f"the plan is not one for this model: no stage has its unit {_format_names(missing)}",
            code="plan-unit-missing",
            fix=FIX,
        )


def _format_names(names: Collection[str], most: int = 4) -> str:
    """Format the first names as a list."""
    shown = ", ".join(f"'{name}'" for name in list(dict.fromkeys(names))[:most])
    return f"{shown} and others" if len(set(names)) > most else shown


def _describe_count_mismatch(planned: Sequence[str], calls: Sequence[str]) -> str:
    there, wanted = Counter(planned), Counter(calls)
    for name, times in wanted.items():
        if there[name] != times:
            return (
                f"the model calls unit '{name}' {_format_count(times)} in a pass, the plan has it "
                f"{_format_count(there[name])}"
            )
    return ""


def _format_count(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _describe_order_mismatch(planned: Sequence[str], calls: Sequence[str]) -> str:
    for number, (there, wanted) in enumerate(zip(planned, calls), 1):
        if there != wanted:
            return f"unit call {number} is of '{wanted}' in the model, of '{there}' in the plan"
    return ""


def _check_stage_inputs(plan: Plan, number: int, model: ModelProfile) -> None:
    """Refuse a stage lacking parameters or outputs to compute with."""
    stage, begin = plan.stages[number], plan.first_call(number)
    needs = model.needs_of(begin, begin + len(stage.units))
    where = f"stage {number + 1}"
    if stage.root is not None and (lacking := set(needs.root) - set(stage.root)):
        raise InputError(
            f"the stage computes with {_format_names(sorted(lacking))}, which its 'root' does "
            "not name",
            code="stage-root-incomplete",
            where=where,
            fix=f"set 'root' to {json.dumps(needs.root)}, or to null: all of the root's parameters",
        )
    known = {parameter.name for parameter in model.root.parameters}
    if known and (unknown := set(stage.root or ()) - known):
        raise InputError(
            f"'root' names {_format_names(sorted(unknown))}, which the model has not outside of "
            "its units",
            code="stage-root-unknown",
            where=where,
            fix=f"set 'root' to {json.dumps(needs.root)}",
        )
    taken = {(one.call, one.output): one for one in stage.takes}
    for one in needs.outputs:
        given = taken.get((one.call, one.output))
        if given is not None and given != one:
            raise InputError(
                f"output {one.output} of call {one.call} has 'differentiable' "
                f"{json.dumps(given.differentiable)}, in this model it is "
                f"{json.dumps(one.differentiable)}",
                code="stage-takes-differ",
                where=where,
                fix=f"set 'differentiable' to {json.dumps(one.differentiable)} in its 'takes'",
            )
        if given is None:
            unit = model.calls[one.call]
            raise InputError(
                f"the stage needs output {one.output} of call {one.call} (unit '{unit}'), which "
                "its 'takes' does not name",
                code="stage-takes-incomplete",
                where=where,
                fix=f"add {one.model_dump_json()} to its 'takes', or make a plan: gpumix plan "
                "JOB.yaml",
            )
