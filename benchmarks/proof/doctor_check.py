"""Stage `doctor_check`: the checks of a healthy card raise no alarm, and the doctor names what is
wrong with a script, and nothing of one that is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proof import patients
from proof.bench import Bench
from proof.jobs import gpumix, well
from proof.lines import Bar
from proof.outcome import Outcome

FAULTS = ("copies", "syncs")
HOPPER_FLOPS = (700e12, 900e12)
MEMORY = {"H100": (2.7e12, 3.4e12), "H200": (3.9e12, 4.8e12)}


def run(bench: Bench) -> Outcome:
    found = dict(bench.measured("check", lambda: (_check(bench), ())))
    found |= bench.measured("sick", lambda: (_sick(bench), ()))
    found |= bench.measured("sound", lambda: (_sound(bench), ()))
    bars = [
        Bar("alarms", most=0, judges="gpu"),
        Bar("faults_named", len(FAULTS), len(FAULTS), "gpu"),
        Bar("false_findings", most=0, judges="gpu"),
        Bar("flops_per_s", *HOPPER_FLOPS, "hopper"),
        Bar("host_bytes_per_s", least=20e9, judges="hopper"),
    ]
    name = bench.card.name if bench.card is not None else ""
    bars += [
        Bar("memory_bytes_per_s", *limits, "hopper")
        for product, limits in MEMORY.items()
        if product in name
    ]
    return Outcome(found, tuple(bars))


def _check(bench: Bench) -> dict[str, Any]:
    """What `gpumix check` measures, and what it finds."""
    done = gpumix(bench, "check", "--json")
    rows = done.json
    alarms = [one for one in rows if one["severity"] in ("error", "warning")]
    measured = {
        key.removeprefix("rank 0 "): value
        for one in rows
        for key, value in one["measured"].items()
        if key.startswith("rank 0 ")
    }
    return {
        "check_exit_code": done.code,
        "checks": len(rows),
        "alarms": len(alarms),
        "alarms_said": [f"{one['check']}: {one['what']}" for one in alarms],
        **measured,
    }


def _sick(bench: Bench) -> dict[str, Any]:
    told = _examined(bench, "sick")
    lines = Path(patients.__file__).read_text(encoding="utf-8").splitlines()
    named = {}
    for fault in FAULTS:
        (line,) = (n for n, text in enumerate(lines, 1) if f"# fault: {fault}" in text)
        named[fault] = any(
            one["name"] == fault and f"patients.py:{line}" in one["fix"] for one in told["findings"]
        )
    return {
        "faults_named": sum(named.values()) if bench.on_cuda else None,  # no CPU waits for copies
        "named": named,
        "found_in_sick": [one["name"] for one in told["findings"]],
        "sick_gain": told["gain"],
        "sick_cleared": told["cleared"],
        "sick_remarks": told["remarks"],
    }


def _sound(bench: Bench) -> dict[str, Any]:
    told = _examined(bench, "sound")
    names = [one["name"] for one in told["findings"]]
    return {
        "false_findings": len(names),
        "found_in_sound": names,
        "sound_cleared": told["cleared"],
        "sound_remarks": told["remarks"],
    }


def _examined(bench: Bench, function: str) -> Any:
    """The doctor's report of a script, which it looks for in its folder."""
    copy = bench.folder / "patients.py"
    copy.write_text(Path(patients.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    few = ("--steps", "3", "--pairs", "3", "--only", "syncs") if bench.rehearses else ()
    words = ("doctor", f"patients:{function}", "--json", *few)
    return well(gpumix(bench, *words, allow=["patients"]), "gpumix doctor").json
