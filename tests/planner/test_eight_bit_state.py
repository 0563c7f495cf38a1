"""AdamW's state in 8 bits, where a job allows it: only where nothing fits without, and the sizes of
it."""

from __future__ import annotations

from functools import cache

import pytest

from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.eight_bit_state import match_profile, plan_with_allowed, quantise_state
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.optimizer_state import ADAMW_8BIT_BYTES, count_adamw_8bit_bytes

ALLOWED = ("8bit-optimizer",)
SPACE = Space(max_pipeline_stages=1, tensor_parallel_size=1, state_on="device", waves=False)


@cache
def of_size(parameters: float):
    shape = make_llama_like(parameters)
    return estimate_profile(
        lambda dtype: shape.model(512, dtype, "x"),
        parse_cluster("2x rtx3060"),
        sequence_length=512,
    )


def planned(parameters: float, allow=ALLOWED):
    return plan_with_allowed(of_size(parameters), 8, space=SPACE, allow=allow)


def test_what_fits_stays_in_fp32():
    assert planned(5e8).optimizer_state == "fp32"


def test_what_fits_in_8_bits_alone_gets_them_if_that_is_allowed():
    """Of 22 GiB, 1.4 B parameters take 21 with 16 bytes each, and 13 with 10."""
    with pytest.raises(NoFeasiblePlanError):
        planned(1.4e9, allow=())
    made = planned(1.4e9)
    assert made.optimizer_state == "8bit" and made.cut_multiple == 256
    profile = of_size(1.4e9)
    assert match_profile(profile, made).optimizer_state == "8bit"
    assert match_profile(match_profile(profile, made), made) == quantise_state(profile)
    slowest = max(worker.optimizer_s for worker in made.prediction.workers)
    assert slowest > 0


def test_what_fits_in_no_form_is_told_of_fp32():
    with pytest.raises(NoFeasiblePlanError) as narrow:
        planned(4e9)
    with pytest.raises(NoFeasiblePlanError) as plain:
        planned(4e9, allow=())
    assert str(narrow.value) == str(plain.value)


def test_state_is_counted_by_the_sizes_of_parameters():
    model = make_llama_like(1e9).model(512, "fp32", "x")
    assert ADAMW_8BIT_BYTES < model.quantised_adamw_bytes < 2.1
    assert count_adamw_8bit_bytes(4095) == 8 * 4095
    assert count_adamw_8bit_bytes(4097) == 2 * 4097 + 8 * 17
    (kind,) = model.kinds
    # A block's two norms, as its width is below 4096.
    assert kind.small == kind.trainable - kind.matrices
