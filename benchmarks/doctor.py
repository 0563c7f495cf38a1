"""Does `gpumix doctor` find what is planted, does it find what is not there, and does each change
bring what it promises?

23 jobs and functions have one fault each, seven have none: they compute in bf16 where the CPU has
instructions for it. The others leave that to the doctor (`beside`). Each is examined as a user
does, by the command. What a change brings is measured apart from that, by runs of the job as it was
and as `--apply` wrote it, or of the function as it was and with the change made in its code, in
turns.

    python benchmarks/doctor.py [--json] [--only NAME ...] [--pairs 5]

Figures: `named` of `planted` faults were found, by a finding or a remark of their name;
`false_alarms` are all findings in the `healthy`, `false_remarks` all remarks; `gains` are faults
found by a finding whose gain was got by hand, too; in `gains_within_fifth` of them the stated gain
is at most a fifth above that, or below it; in `inside_interval` the gain got lies in the interval
that was stated; `worst_gain_error` is gain stated over gain got, less 1, where that is furthest
from 0, and `median_gain_error` the median of its sizes; `beside` are findings that nobody planted
in those with a fault; `overhead` is what all examinations took, from start to end of the command,
over the steps that they measured.

Bars: at least 18 named, no false alarm, at least 15 gains within a fifth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import yaml

import common
from doctored import patients
from gpumix.doctor.verdict import PAIRS
from gpumix.hardware.host.cpu import has_bf16
from gpumix.train.controller import JobController, UserPlan

FOLDER = Path(patients.__file__).parent
LONGEST_S = 900
TURNS = 5
TURN_S = 1.0  # of a function's own measurement
FIFTH = 0.2
WARM_UP_STEPS = 8  # of a job's run

Change = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From the changes of a report, the arguments that make them in the code of a function."""


@dataclass(frozen=True)
class Case:
    """One patient. `fault` is the finding or remark that is to be made; empty: none. `dtypes`: it
    computes in the fastest of these."""

    name: str
    fault: str
    change: Change | None = None
    job: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()


ONE = [{"class": "cpu", "accelerator": "cpu", "memory": "2 GiB"}]
UNLIKE = [
    {"class": "fast", "emulate": "8 GFLOP/s", "memory": "1 GiB"},
    {"class": "slow", "emulate": "2 GFLOP/s", "memory": "1 GiB"},
]
GPT = {"model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 260}
NO_DROPOUT = {"n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
JOB: dict[str, Any] = {
    "model": {"config": GPT | NO_DROPOUT},
    "data": {"text": [str(FOLDER.parents[1] / "docs")], "pattern": "*.md"},
    "sequence_length": 128,
    "global_batch_size": 8,
    "max_steps": 40,
    "cluster": ONE,
    "logging_steps": 100,
}
SMALL = {"model": {"config": GPT | NO_DROPOUT | {"n_layer": 2}}, "sequence_length": 64}


def _job(**changes: Any) -> dict[str, Any]:
    return JOB | changes


def _with_workers(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the workers, and the threads if they are fewer, that were found."""
    made: dict[str, Any] = {"workers": next(iter(changes["num_workers"].values()))}
    return made | ({"threads": changes["threads"]} if "threads" in changes else {})


def _mended(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"mended": True}


CASES = (
    Case("own_fetching", "workers", _with_workers),
    Case("own_decoding", "workers", _with_workers),
    Case("too_many_workers", "workers", _with_workers),
    Case("restarted_workers", "workers", lambda c: _with_workers(c) | {"persistent": True}),
    Case("anomaly", "anomaly", _mended),
    Case("one_thread", "threads", lambda c: {"threads": c["threads"]}),
    Case("eager_attention", "attention", lambda c: {"attention": c["attention"]}),
    Case("recompute", "recompute", _mended),
    Case("single_updates", "fused_optimizer", lambda c: {"fused": True}),
    Case("optimizer_anew", "remade_optimizer", _mended),
    Case("double_precision", "fp64", _mended),
    Case("prints", "prints", _mended),
    Case("loop_over_positions", "loop", _mended),
    Case("log_lines", "between", _mended),
    Case("checkpoint_every_step", "between", _mended),
    Case("batches_by_hand", "between", _mended),
    Case("written_attention", "unfused_attention", _mended),
    Case(
        "job_workers",
        "workers",
        job=_job(
            **SMALL,
            data={"factory": "patients:remote_tokens", "validation_split": 0.1, "num_workers": 0},
        ),
    ),
    Case(
        "job_recompute",
        "gradient_checkpointing",
        job=_job(techniques={"gradient_checkpointing": True}),
    ),
    Case(
        "job_strategy",
        "strategy",
        # Else the run mends half of it itself.
        job=_job(**SMALL, strategy="even", advanced={"rebalance": False}, cluster=UNLIKE),
    ),
    Case("job_checkpoints", "checkpoints", job=_job(**SMALL, save_steps=1)),
    Case(
        "job_evaluation",
        "evaluation",
        job=_job(**SMALL, data=JOB["data"] | {"validation_split": 0.1}, eval_steps=1),
    ),
    Case(
        "job_attention",
        "attention",
        job=_job(
            model={"config": GPT | NO_DROPOUT | {"n_layer": 2, "n_positions": 256}},
            sequence_length=256,
            advanced={"efficiency": {"attention": "eager"}},
        ),
    ),
    Case("healthy_classifier", ""),
    Case("healthy_gpt", ""),
    Case("healthy_lstm", ""),
    Case("healthy_workers", ""),
    Case("healthy_pair", ""),
    Case("healthy_accumulation", ""),
    Case("job_healthy", "", job=_job(), dtypes=("fp32", "bf16") if has_bf16() else ("fp32",)),
)


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        named: by a finding or a remark.
        stated: the gain of the finding, or of all findings of a job, from `low` to `high`; 0:
            none.
        got: the gain that was measured apart; 0: none.
        seconds: of the examination; `trained_s`: of the steps that it measured.
    """

    named: bool
    findings: list[str]
    remarks: list[dict[str, str]]
    stated: float
    low: float
    high: float
    got: float
    seconds: float
    trained_s: float

    @property
    def compared(self) -> bool:
        """Whether a gain was both stated and got."""
        return self.stated > 0 and self.got > 0

    @property
    def error(self) -> float:
        return self.stated / self.got - 1.0

    @property
    def inside(self) -> bool:
        return self.low <= self.got <= self.high


def run(case: Case, folder: Path, pairs: int) -> Result:
    """Examine it, and measure what was found."""
    target, job = f"patients:{case.name}", folder / "job.yaml"
    options = ["--json", "--pairs", str(pairs)]
    if case.job:
        _write(job, case.job)
        if case.dtypes:
            _write(job, _in_fastest(job, case))
        target, options = str(job), [*options, "--apply"]
    begun_s = time.perf_counter()
    report = _examined(target, options, folder if case.job else FOLDER, folder)
    seconds = time.perf_counter() - begun_s
    findings, remarks = report["findings"], report["remarks"]
    names = [one["name"] for one in findings]
    named = case.fault in {*names, *(one["name"] for one in remarks)}
    got = 0.0
    if case.job:
        made = [one for one in findings if not one["changes_training"]]
        if made:
            got = _ratio(partial(_job_s, job), partial(_job_s, job.with_name("job.tuned.yaml")))
    else:
        made = [one for one in findings if one["name"] == case.fault]
        if named and case.change is not None:
            mended = case.change(report["changes"])
            after = partial(_function_s, case.name, mended)
            got = _ratio(partial(_function_s, case.name, {}), after)
    return Result(
        named=named,
        findings=names,
        remarks=remarks,
        stated=prod(one["gain"] for one in made) if made else 0.0,
        low=prod(one["gain_low"] for one in made),
        high=prod(one["gain_high"] for one in made),
        got=got,
        seconds=seconds,
        trained_s=report["trained_s"],
    )


def _write(path: Path, job: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")


def _in_fastest(path: Path, case: Case) -> dict[str, Any]:
    """The job in the dtype that whole runs are fastest in: which one that is differs by CPU."""
    seconds: dict[str, list[float]] = {dtype: [] for dtype in case.dtypes}
    for _ in range(TURNS):
        for dtype, found in seconds.items():
            _write(path, case.job | {"precision": dtype})
            found.append(_job_s(path))
    return case.job | {"precision": min(seconds, key=lambda dtype: median(seconds[dtype]))}


def _examined(target: str, options: list[str], place: Path, cache: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "gpumix", "doctor", target, "--allow", "patients", *options],
        cwd=place,
        env=common.environment(FOLDER) | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"gpumix doctor {target} failed")
    return json.loads(done.stdout)


def _ratio(before: Callable[[], float], after: Callable[[], float]) -> float:
    """Of seconds, in turns whose order changes; the median."""
    ratios = []
    for turn in range(TURNS):
        order = (before, after) if turn % 2 == 0 else (after, before)
        seconds = {one: one() for one in order}
        ratios.append(seconds[before] / seconds[after])
    return median(ratios)


def _function_s(name: str, arguments: dict[str, Any]) -> float:
    """Of a step, in a process of its own, which prints to nobody."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_timed, args=(name, arguments, theirs))
    process.start()
    seconds: float = mine.recv()
    process.join()
    return seconds


def _timed(name: str, arguments: dict[str, Any], pipe: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a script of its own
    function = getattr(patients, name)
    with TemporaryFile("w+") as log, redirect_stdout(log):
        few_s = function(steps=6, **arguments)
        pipe.send(function(steps=max(6, round(TURN_S / few_s)), **arguments))


def _job_s(path: Path) -> float:
    """Of a step of a whole run, with all that comes between steps."""
    output = path.with_suffix(f".{time.monotonic_ns()}")
    JobController.of_file(path, [f"output_dir={output}"], debug=False).train(
        UserPlan(), resume=False
    )
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    times = [one["time"] for one in records if one["event"] == "step"][WARM_UP_STEPS:]
    return (times[-1] - times[0]) / (len(times) - 1)


def _figures(results: list[tuple[Case, Result]]) -> common.Figures:
    planted = [one for case, one in results if case.fault]
    healthy = [one for case, one in results if not case.fault]
    compared = [one for one in planted if one.compared]
    errors = [one.error for one in compared]
    seconds = sum(one.seconds for _, one in results)
    return {
        "planted": len(planted),
        "named": sum(one.named for one in planted),
        "healthy": len(healthy),
        "false_alarms": sum(len(one.findings) for one in healthy),
        "false_remarks": sum(len(one.remarks) for one in healthy),
        "beside": sum(
            name != case.fault for case, one in results if case.fault for name in one.findings
        ),
        "gains": len(compared),
        "gains_within_fifth": sum(error <= FIFTH for error in errors),
        "inside_interval": sum(one.inside for one in compared),
        "worst_gain_error": round(max(errors, key=abs, default=0.0), 3),
        "median_gain_error": round(median(map(abs, errors)) if errors else 0.0, 3),
        "overhead": round(seconds / sum(one.trained_s for _, one in results), 2),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    arguments = _arguments()
    os.environ["PYTHONPATH"] = common.environment(FOLDER)["PYTHONPATH"]
    sys.path.insert(0, str(FOLDER))
    results: list[tuple[Case, Result]] = []
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        with TemporaryDirectory(prefix="gpumix-doctored-") as name:
            os.environ["XDG_CACHE_HOME"] = name
            one = run(case, Path(name), arguments.pairs)
        results.append((case, one))
        sys.stderr.write("".join(f"{case.name}: {told['text']}\n" for told in one.remarks))
        sys.stderr.write(
            f"{case.name}: wanted {case.fault or 'nothing'}, {'' if one.named else 'not '}named; "
            f"found {', '.join(one.findings) or 'nothing'}; gain stated {one.stated:.2f} "
            f"({one.low:.2f} to {one.high:.2f}), got {one.got:.2f}; {len(one.remarks)} remarks; "
            f"{one.seconds:.0f} s\n"
        )
    common.print_figures(_figures(results), as_json=arguments.json)
    return 0


def _arguments() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", help="these cases")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
