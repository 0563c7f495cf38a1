"""The fastest plan: of one stage, or of several if faster or alone feasible; of single devices or
of tensor-parallel groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from gpumix.cost.loading_memory import check_room_for_loading
from gpumix.planner.baselines.best_subset import iterate_class_requests, plan_best_subset
from gpumix.planner.common.strategy import (
    PlanRequest,
    attach_bound,
    compute_time_to_beat,
    get_prediction,
    list_devices_by_rank,
)
from gpumix.planner.data_parallel.class_options import TimeBounds
from gpumix.planner.data_parallel.no_fit_error import Explained, make_no_fit_error
from gpumix.planner.data_parallel.search import plan_one_stage_below
from gpumix.planner.pipeline_parallel.device_order import get_device_place
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged_below
from gpumix.planner.pipeline_parallel.tensor_parallel_search import (
    Search,
    Searched,
    compute_ideal_step_s,
    search_all_degrees,
)
from gpumix.planner.refine import refine_plan
from gpumix.planner.waves import FasterWaves, plan_in_waves
from gpumix.schema.errors import GpumixError, InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile

FEW_DEVICES = 64  # beyond, finishing each plan takes long
# Most that the last touches may gain: a plan slower by this factor may still win.
MAX_REFINE_FACTOR, MAX_REFINE_FACTOR_MANY = 1.1, 1.02
MOST_LEFT_OUT_OF = 8  # devices, up to which one is left out of stages


def plan_fastest(profile: Profile, request: PlanRequest) -> Plan:
    """Return the plan with the shortest step within the request's space.

    Raises:
        InputError: the request names devices unknown to the profile.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
        LoadingMemoryError: a host lacks the memory to read the weights.
    """
    return FastestPlans(profile, request).plan()


class FastestPlans:
    """The fastest plans of a request, on all devices and on each class alone, found on first use.

    Args:
        paces: of these classes and this batch; may be shared between searches.
        explains: what to find out where nothing fits.
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        paces: TimeBounds | None = None,
        *,
        explains: Explained = "fully",
    ) -> None:
        space = request.space
        if space.parameters_on == ("host",) and space.min_pipeline_stages == 1:
            request = request.model_copy(update={"space": space.in_one_stage()})
        self.profile = profile
        self.request = request
        self.paces = paces or TimeBounds(profile, request.global_batch)
        self._explains = explains
        self._lacks_room = False  # known once searched

    def plan(self) -> Plan:
        """Return the fastest plan; see `plan_fastest`."""
        if isinstance(self._found, GpumixError):
            raise self._found
        check_room_for_loading(self.profile, self._found)
        return self._found

    @cached_property
    def of_classes(self) -> dict[str, FastestPlans]:
        """Searches by class, on the devices of the class alone."""
        every = iterate_class_requests(self.profile, self.request)
        told: Explained = "bytes" if self.request.bounds else "nothing"
        return {
            name: FastestPlans(self.profile, alone, self.paces, explains=told)
            for name, alone in every
        }

    @cached_property
    def alone(self) -> Plan | None:
        """The optimal plan of one stage on single devices; None if none fits."""
        return plan_one_stage_below(self.profile, self.request, self.paces, float("inf"))

    @cached_property
    def _found(self) -> Plan | InputError | NoFeasiblePlanError:
        best, space = _BestPlan(), self.request.space
        if space.min_pipeline_stages == 1:
            _ = self.alone  # an invalid request raises here already
            best.try_search(self._search_one_stage)
            if best.plan is not None and len(self.profile.cluster.devices) <= FEW_DEVICES:
                best.try_search(partial(self._search_more_waves, best.plan))
        if space.max_pipeline_stages != 1:
            best.try_search(self._search_staged)
            if space.leave_out:
                self._leave_out_of_stages(best)
        if space.leave_out and len(self.of_classes) > 1:
            for one in self.of_classes.values():
                if compute_ideal_step_s(one.profile, one.request) < best.below_s:
                    best.try_search(one._find_plan)
        if self._may_use_hosts and (best.plan is None or best.plan.parameters_on == "host"):
            best.try_search(self._search_with_parameters_on_hosts)
        if best.plan is None:
            return self._no_room() if self._lacks_room else best.failures[0]
        return attach_bound(best.plan.model_copy(update={"strategy": "optimal"}), best.bound_s)

    def _find_plan(self, _: float) -> Searched:
        plan = self.plan()
        return plan, get_prediction(plan).bound_s

    def _search_staged(self, below_s: float) -> Searched:
        return plan_staged_below(self.profile, self.request, below_s)

    def _leave_out_of_stages(self, best: _BestPlan) -> None:
        """Search stages of few devices without one of them, and go on from each faster plan."""
        request: PlanRequest | None = self.request
        while request is not None:
            devices, request = list_devices_by_rank(self.profile, request), None
            if not 2 < len(devices) <= MOST_LEFT_OUT_OF:
                return
            for device in {get_device_place(device): device for device in devices}.values():
                kept = tuple(other.id for other in devices if other is not device)
                fewer = self.request.model_copy(update={"devices": kept})
                before = best.plan
                best.try_search(partial(plan_staged_below, self.profile, fewer))
                if best.plan is not before:
                    request = fewer

    def _search_one_stage(self, _: float) -> Searched:
        plan, bound_s = self._search_degrees(self._search_degree, float("inf"))
        if plan is None:
            self._lacks_room = True
            return self._search_in_waves()
        return plan, bound_s

    def _search_more_waves(self, than: Plan, _: float) -> Searched:
        def search(profile: Profile, request: PlanRequest, below_s: float) -> Searched:
            request, paces = self._in_degree(profile, request)
            return FasterWaves(profile, request, paces, below_s).search()

        found, bound_s = self._search_degrees(search, get_prediction(than).step_s)
        if found is not None:
            check_room_for_loading(self.profile, found)
        return found, bound_s

    def _search_degrees(self, search: Search, below_s: float) -> Searched:
        """Search plans of one stage, of each tensor-parallel degree, below so many seconds."""
        space = self.request.space.model_copy(update={"max_pipeline_stages": 1})
        request = self.request.model_copy(update={"space": space})
        return search_all_degrees(self.profile, request, search, below_s)

    @property
    def _may_use_hosts(self) -> bool:
        """True if parameters may be on hosts where nothing else fits."""
        space = self.request.space
        return space.parameters_on is None and space.min_pipeline_stages == 1

    def _search_with_parameters_on_hosts(self, below_s: float) -> Searched:
        space = self.request.space.model_copy(update={"parameters_on": ("host",)})
        request = self.request.model_copy(update={"space": space})
        on_hosts = FastestPlans(self.profile, request, self.paces, explains="nothing")
        return on_hosts._find_plan(below_s)

    def _search_in_waves(self) -> Searched:
        def plan_wave(part: PlanRequest) -> Plan:
            return FastestPlans(self.profile, part, explains="nothing").plan()

        request, space = self.request, self.request.space
        if space.parameters_on is None:  # a wave that fits on hosts alone is no reason for waves
            space = space.model_copy(update={"parameters_on": ("device",)})
            request = request.model_copy(update={"space": space})
        found = plan_in_waves(self.profile, request, plan_wave)
        return found, float("inf") if found is None else compute_ideal_step_s(
            self.profile, self.request
        )

    def _no_room(self) -> NoFeasiblePlanError:
        devices, request = list_devices_by_rank(self.profile, self.request), self.request
        return make_no_fit_error(
            self.profile, devices, request.space, request.global_batch, explains=self._explains
        )

    def _in_degree(self, profile: Profile, request: PlanRequest) -> tuple[PlanRequest, TimeBounds]:
        """Return the request for plans of a degree, and its bounds. Of tensor-parallel groups,
        parameters are on devices."""
        if profile is self.profile:
            return request, self.paces
        on_devices = request.space.model_copy(update={"parameters_on": ("device",)})
        return request.model_copy(update={"space": on_devices}), self.paces.of_leaders(profile)

    def _search_degree(self, profile: Profile, request: PlanRequest, below_s: float) -> Searched:
        """Return the finished optimal plan, or a plan on one class alone, faster than `below_s`."""
        few = len(self.profile.cluster.devices) <= FEW_DEVICES
        gained = MAX_REFINE_FACTOR if few else MAX_REFINE_FACTOR_MANY
        limit_s = below_s * gained
        request, paces = self._in_degree(profile, request)
        if profile is self.profile and below_s == float("inf"):
            found = self.alone
        else:
            found = plan_one_stage_below(profile, request, paces, limit_s)
        if found is None and 1 not in self.request.space.tensor_parallel_size:
            devices, space = list_devices_by_rank(profile, request), request.space
            raise make_no_fit_error(profile, devices, space, request.global_batch)
        bound_s: float | None = below_s
        if found is not None:
            found = refine_plan(profile, request, found, paces, below_s)
            bound_s = get_prediction(found).bound_s
            below_s = min(below_s, compute_time_to_beat(found))
        return _of_one_class(profile, request, below_s, paces) or found, bound_s


class _BestPlan:
    """The fastest plan so far, a lower bound of all plans weighed, and the errors of searches."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.bound_s = float("inf")
        self.failures: list[InputError | NoFeasiblePlanError] = []

    @property
    def below_s(self) -> float:
        """Seconds that a worthwhile plan must beat."""
        return float("inf") if self.plan is None else compute_time_to_beat(self.plan)

    def try_search(self, search: Callable[[float], Searched]) -> None:
        """Run a search for faster plans, and keep the result if better."""
        try:
            found, bound_s = search(self.below_s)
        except (InputError, NoFeasiblePlanError) as error:
            self.failures.append(error)
            return
        self.bound_s = min(self.bound_s, bound_s or 0.0)
        if found is not None and get_prediction(found).step_s < self.below_s:
            self.plan = found


def _of_one_class(
    profile: Profile, request: PlanRequest, below_s: float, paces: TimeBounds
) -> Plan | None:
    """Return a plan on one class alone, if links were measured: links are then known only for all
    devices together, so the optimal plan leaves no device out, and fewer devices take no longer."""
    if not (profile.network and request.space.leave_out):
        return None
    try:
        plan = plan_best_subset(profile, request)
    except NoFeasiblePlanError:
        return None
    if get_prediction(plan).step_s >= below_s:
        return None
    devices = tuple(worker.device for worker in plan.workers)
    alone = request.model_copy(update={"devices": devices})
    return refine_plan(profile, alone, plan, paces)
