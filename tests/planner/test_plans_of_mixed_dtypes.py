"""Plans for classes that compute in different dtypes."""

from __future__ import annotations

import pytest

from gpumix.cost.predict import predict
from gpumix.cost.traffic import count_traffic
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.plan import plan
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import DTYPE_BYTES
from gpumix.schema.profile.profile import Profile
from gpumix.train.console.tables import explain_plan
from helpers.errors import raises
from helpers.plans.naive import peak_bytes, step_seconds

V100, A100 = "v100-16gb-sxm", "a100-40gb-pcie"
MODEL = make_llama_like(3e8)
ONE_STAGE = Space(max_pipeline_stages=1, leave_out=False)  # slow ones as well


def profile(text: str = f"2x {V100}, 1x {A100}", precision="auto") -> Profile:
    return estimate_profile(
        lambda dtype: MODEL.model(512, dtype, "300M"),
        parse_cluster(text, precision),
        sequence_length=512,
        precision=precision,
    )


def planned(of: Profile, batch: int = 32) -> Plan:
    """The fastest plan of one stage, without reasons."""
    return plan_one_stage(of, PlanRequest(global_batch=batch, space=ONE_STAGE))


def dtypes(made):
    return {w.device_class: w.compute_dtype for w in made.workers}


def test_each_class_computes_in_its_own_and_all_gather_in_one():
    made = plan(profile(), 32, space=ONE_STAGE)
    assert dtypes(made) == {V100: "fp16", A100: "bf16"}
    assert made.communication_dtype == "bf16"
    reasons = {d.device_class: d for d in made.reasons.dtypes}
    assert (reasons[V100].compute_dtype, reasons[A100].compute_dtype) == ("fp16", "bf16")
    assert any(line.startswith(f"{V100} computes in fp16: ") for line in explain_plan(made))


def test_classes_alike_need_no_words():
    made = plan(profile(f"2x {V100}"), 8, space=ONE_STAGE)
    assert (dtypes(made), made.communication_dtype) == ({V100: "fp16"}, "fp16")
    assert made.reasons.dtypes == ()


def test_what_is_slow_is_told():
    made = plan(profile(precision="bf16"), 32, space=ONE_STAGE)
    (told,) = [d for d in made.reasons.dtypes if d.device_class == V100]
    assert "bf16 is computed in software" in told.why


def test_a_class_that_is_left_out_does_not_decide_what_is_gathered():
    alone = PlanRequest(
        global_batch=8,
        devices=tuple(d.id for d in profile().cluster.members(V100)),
    )
    made = plan_one_stage(profile(), alone)
    assert (dtypes(made), made.communication_dtype) == ({V100: "fp16"}, "fp16")


def test_fp16_takes_less_time_and_less_memory_than_fp32_on_a_v100():
    of_slow = profile(precision={V100: "fp32"})
    fast, slow = (planned(of) for of in (profile(), of_slow))
    assert get_prediction(fast).step_s < get_prediction(slow).step_s
    forced = fast.model_copy(
        update={
            "stages": (
                fast.stages[0].model_copy(
                    update={
                        "workers": tuple(
                            w.model_copy(update={"compute_dtype": "fp32"})
                            if w.device_class == V100
                            else w
                            for w in fast.workers
                        )
                    }
                ),
            )
        }
    )
    peaks = {
        name: max(w.peak_bytes for w in predict(of, made).workers if w.device.startswith(V100))
        for name, of, made in (("fp16", profile(), fast),
                               ("fp32", profile(precision={V100: "fp32"}), forced))
    }  # fmt: skip
    assert peaks["fp32"] > peaks["fp16"]
    with raises(InputError, code="plan-profile-precision", what=("fp32", "fp16")):
        predict(profile(), forced)


@pytest.mark.parametrize("precision", ["auto", {V100: "fp32"}, {A100: "fp32"}])
def test_a_walk_through_the_step_finds_the_same(precision):
    of = profile(precision=precision)
    fastest = planned(of)
    for stage in (0, 1, 3):
        made = fastest.model_copy(update={"zero_stage": stage, "prediction": None})
        found = predict(of, made)
        assert found.step_s == pytest.approx(step_seconds(of, made), rel=1e-9), stage
        for rank, worker in enumerate(found.workers):
            assert worker.peak_bytes == pytest.approx(peak_bytes(of, made, rank)[0], abs=8), stage


def test_what_is_gathered_is_counted_in_the_communication_dtype():
    of = profile(precision={V100: "fp32"})
    made = planned(of).model_copy(update={"zero_stage": 1})
    width = DTYPE_BYTES[made.communication_dtype]
    assert (dtypes(made)[V100], width) == ("fp32", 2)
    for counted in count_traffic(of, made):
        assert counted.bytes["gather"] == of.model.parameters * width
