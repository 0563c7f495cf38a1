"""A small part of the training scripts that are run as they are and with one changed import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpumix.engine.comm.communicator import CommunicationError
from gpumix.schema.errors import InputError
from helpers.processes.harness import run_ranks
from scripts_of.comparing import LIMIT, worst_of
from scripts_of.running import Script, judged, scripts, shares_of

SAME = ("accelerate_tokens[recipe]", "precision[fp16]")
REFUSED = ("own_losses[smoothness]",)
TRUTH = {"logs": [{"loss": 2.0}], "weights": {"w": np.ones(4)}}


def walk(chosen: Sequence[Script], whole: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`whole`: with all that scripts import, as the benchmark does it."""
    import gpumix.integrations.accelerate.accelerator  # noqa: F401
    from scripts_of.running import try_script
    from stock_scripts import figures_of, import_all

    if whole:
        import_all()
    results = [{"name": script.name, **try_script(script)} for script in chosen]
    return figures_of(results), results


def script_of(path: Path, *lines: str) -> Script:
    """One that is written here, with an import to change."""
    path.write_text("\n".join(["from accelerate import Accelerator", *lines]))
    return Script(path, "", "A", LIMIT)


@pytest.mark.slow
def test_what_is_another_and_what_crashes_is_told(tmp_path):
    chosen = [
        script_of(
            tmp_path / "different.py",
            "from scripts_of.parts import PROCESSES, report",
            "report(processes=PROCESSES)",
        ),
        script_of(
            tmp_path / "crashed.py",
            "if 'gpumix' in Accelerator.__module__:",
            "    raise KeyError('no such thing')",
        ),
        script_of(
            tmp_path / "same.py",
            "from scripts_of.parts import report",
            "report(loss=2.0)",
        ),
    ]
    ((figures, results),) = run_ranks(walk, 1, chosen, False, timeout_s=240)
    found = {one["name"]: one["status"] for one in results}
    assert found == {name: name for name in ("different", "crashed", "same")}, results
    assert figures == {"scripts": 3, "same": 1, "refused": 0, "different": 1, "crashed": 1}


@pytest.mark.extended
@pytest.mark.slow
def test_a_part_is_as_before_or_refused():
    pytest.importorskip("trl")
    pytest.importorskip("lightning")
    chosen = [script for script in scripts() if script.name in SAME + REFUSED]
    assert len(chosen) == len(SAME) + len(REFUSED)
    ((figures, results),) = run_ranks(walk, 1, chosen, True, timeout_s=240)
    found = {one["name"]: one["status"] for one in results}
    assert found == dict.fromkeys(SAME, "same") | dict.fromkeys(REFUSED, "refused"), results
    assert figures == {"scripts": 3, "same": 2, "refused": 1, "different": 0, "crashed": 0}


def test_each_script_has_one_import_to_change():
    every = scripts()
    assert len({script.path for script in every}) >= 35
    assert len({script.name for script in every}) == len(every) >= 40
    for script in every:
        assert "gpumix" in script.changed()
        assert "gpumix" not in script.path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", "ABCD")
@pytest.mark.parametrize("batch", [6, 12, 30])
def test_plans_are_uneven_and_whole(kind, batch):
    shares, _ = shares_of(kind, batch)
    assert sum(share.samples for share in shares) == batch
    assert shares[0].samples > shares[0].micro_batch
    assert len({share.samples for share in shares}) > 1
    assert (0 in {share.state for share in shares}) == (kind == "B")


@pytest.mark.parametrize(
    "found",
    [
        {**TRUTH, "logs": [{"loss": 2.001}]},
        {**TRUTH, "logs": [{"loss": float("nan")}]},
        {**TRUTH, "logs": [{}]},
        {**TRUTH, "logs": []},
        {**TRUTH, "weights": {"w": np.array([1, 1, 1, 1.001])}},
        {**TRUTH, "weights": {"w": np.ones(3)}},
        {**TRUTH, "weights": {}},
        {**TRUTH, "logs": [{"loss": "2.0"}]},
        {**TRUTH, "more": 1},
    ],
)
def test_each_difference_is_seen(found):
    assert worst_of(found, TRUTH)[0].error > LIMIT


def test_rounding_is_no_difference():
    found = {"logs": [{"loss": 2.00001}], "weights": {"w": np.full(4, 1.00001)}}
    assert worst_of(found, TRUTH)[0].error < LIMIT
    nothing = {"loss": float("nan"), "rate": float("inf"), "name": None}
    assert worst_of(nothing, nothing)[0].error == 0


def test_any_rank_may_be_wrong_but_the_first_alone_has_weights():
    script = Script(Path("x.py"), "", "A", LIMIT)
    without = {**TRUTH, "weights": {}}
    assert judged(script, TRUTH, [TRUTH, without])["status"] == "same"
    assert judged(script, TRUTH, [without, TRUTH])["status"] == "different"
    other = {**without, "logs": [{"loss": 3.0}]}
    assert judged(script, TRUTH, [TRUTH, other])["status"] == "different"
    assert judged(script, TRUTH, [TRUTH, None])["status"] == "crashed"


def test_a_refusal_comes_before_the_first_step_with_a_way_out():
    script = Script(Path("x.py"), "", "A", LIMIT)
    told = InputError("blocks of this model share a cache", fix="train it with one block")
    gone = 0, CommunicationError("rank 0 is gone"), ""

    def status(error: BaseException, steps: int = 0) -> str:
        return judged(script, TRUTH, [(steps, error, ""), gone])["status"]

    assert status(told) == "refused"
    assert status(told, 2) == "crashed"
    assert status(InputError("no such cache")) == "crashed"
    assert status(KeyError("cache")) == "crashed"
