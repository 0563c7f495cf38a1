"""Random plans for a profile, feasible or not: the cost model counts any plan."""

from __future__ import annotations

from hypothesis import strategies as st

from gpumix.cost.network import Cuts, Layout, Links, links_for
from gpumix.cost.wire import Free, Measured
from gpumix.planner.base import Part, PlanRequest, assemble, ranked_devices
from gpumix.planner.setting import setting_of
from gpumix.spec.plan import Collectives, Plan
from gpumix.spec.profile import Profile


def links_of(profile: Profile, collectives: Collectives, shares: tuple[float, ...]) -> Links:
    """The collectives of ZeRO-3 over all ranks."""
    wire = Measured(profile.network) if profile.network else Free()
    return links_for(profile, wire, Layout(3, "all", collectives, Cuts.at(shares)))


@st.composite
def plans_of(draw: st.DrawFn, profile: Profile) -> Plan:
    """Any samples, micro-batches and shares; some devices get nothing of either."""
    devices = ranked_devices(profile, PlanRequest(global_batch=1))
    count = len(devices)
    samples = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any))
    weights = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    parts = {
        device.id: Part(
            samples=n,
            micro_batch=draw(st.integers(1, n)) if n else 0,
            share=weight / sum(weights),
        )
        for device, n, weight in zip(devices, samples, weights)
    }
    return assemble(
        setting_of(profile, devices),
        strategy="random",
        global_batch=sum(samples),
        parts=parts,
    )
