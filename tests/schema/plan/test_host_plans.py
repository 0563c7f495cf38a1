"""Plans with parameters on hosts: what they need, and what a job may say of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker


def plan_of(*hosts: str, worker: dict[str, Any] | None = None, **settings: Any) -> Plan:
    """A worker on each of `hosts`; those of a host, or all, divide the state equally."""
    by_host = settings.get("sharding") == "host"
    workers = tuple(
        Worker(
            device=f"d{number}",
            device_class="c",
            host=host,
            samples=1,
            micro_batch=1,
            state_share=1 / (hosts.count(host) if by_host else len(hosts)),
            **{"state_on": "host", **(worker or {})},
        )
        for number, host in enumerate(hosts)
    )
    return Plan(
        **{
            "strategy": "by hand",
            "model": "m",
            "sequence_length": 8,
            "global_batch": len(hosts),
            "stages": (Stage(units=("a",), workers=workers),),
            "parameters_on": "host",
            **settings,
        }
    )


def test_they_are_read_back():
    plan = plan_of("a", "a", "b", sharding="host")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan_of("a").parameters_on == "host"


@pytest.mark.parametrize(
    ("hosts", "changes", "said"),
    [
        ("aa", {"zero_stage": 2}, "keeps no parameters on devices: write `zero_stage: 3`"),
        ("aa", {"worker": {"state_on": "device"}}, "write `state_on: host` for device 'd0'"),
        ("ab", {}, "each of 2 hosts keeps a copy of all parameters: write `sharding: host`"),
    ],
)
def test_plans_that_cannot_be(hosts, changes, said):
    with pytest.raises(ValidationError) as caught:
        plan_of(*hosts, **changes)
    assert said in str(caught.value)


def test_they_are_for_one_stage_without_tp_groups():
    workers = plan_of("a", "a").workers
    whole = [w.model_copy(update={"state_share": 1.0}) for w in workers]
    tp_group = Stage(units=("a",), workers=tuple(whole), tensor=2)
    with pytest.raises(
        ValidationError, match="for plans of one stage, without tensor-parallel groups"
    ):
        plan_of("a", "a", stages=(tp_group,), global_batch=1)


def test_a_space_may_be_without_them():
    plan = plan_of("a")
    assert Space().missing(plan) == ""
    assert Space(parameters_on=("host",)).missing(plan) == ""
    assert Space(parameters_on=("device",)).missing(plan) == "parameters on the host"
    on_device = plan.model_copy(update={"parameters_on": "device"})
    assert Space(parameters_on=("host",)).missing(on_device) == "parameters on the device"
