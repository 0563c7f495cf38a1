"""How far datasheets are from measured layers: the roofline against Cephalo's timings.

Forward and backward of one layer, of every GPU, model, precision and sequence length whose FLOPs
can be told, are estimated as for `gpumix plan --cluster` and compared with what was measured, at
every batch size that was; where there is only a fitted line, at 1 to 4 samples.

    python benchmarks/planner_estimate.py [--json]

Figures: `cases` (a GPU in a setting), `cases_left_out` (models whose sizes or tokens are not in the
data), `time_mape` (of forward and backward together: the mean over cases of the mean absolute error
over batch sizes, a fraction), `time_mape_llama` and `time_mape_others`, `worst_class` and
`worst_class_mape`, the same for each GPU and precision as `time_mape_...`, and
`time_mape_rescaled`: each GPU's estimate set right by how far those of all other GPUs are off in
the same setting, as `gpumix whatif` does it.

The constants of the roofline were set near these very timings, one for each architecture and kind
of arithmetic, so `time_mape` says how well so few constants can do, not how well they foretell new
cards. `time_mape_held_out` says that: OPT-350M at 2048 tokens by Sailor's timings, on the cards
(`held_out_cases`) that have no TF32, for those that have it may have used it.

Whole training runs that others published on A100s and H100s (`published/training_runs.py`) are
estimated as well: `published_runs`, `mean_ratio_h100` and `mean_ratio_a100` (estimated over
published tokens per second), `mape` of all, `held_out_mape` of those that constants were not
set by, and `worst_run` with `worst_run_ratio`. `spearman_cards` is the rank correlation between
the cards of a setting by estimated and measured time of a sample, the mean over settings of three
cards or more.

Llama's layers are the ones that the constants fit. GPT has heads of 32 and fewer here and attends
slower than FLOPs say: on fast fp16 its layers take up to four times as long as estimated.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, geometric_mean

import numpy as np

from common import Figures, make_parser, print_figures
from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.hardware.estimates import gpu_catalogue
from gpumix.hardware.estimates.roofline import SAVED_MOVES, make_forward_curve, make_gradient_curve
from gpumix.schema.curve import Curve
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype
from published import NotHereError, Work, cephalo, sailor
from published.training_runs import RUNS

FITTED = 4  # samples up to which a fitted line is compared
NO_TF32 = {"V100-16": "v100-16gb-sxm", "RTX-2080": "rtx2080ti", "Titan-RTX": "titanrtx"}
"""Sailor's cards, by their memory as the catalogue calls them."""


@dataclass(frozen=True)
class Case:
    """One GPU in one setting: estimated / measured seconds of a layer at each batch size."""

    gpu: str
    setting: cephalo.Setting
    ratios: tuple[float, ...]
    measured_s: float = 0.0  # of a sample, as measured

    @classmethod
    def of(cls, gpu: str, setting: cephalo.Setting) -> Case:
        """A GPU whose layer was measured, of a model whose work is known."""
        work, measured = cephalo.block_work(setting), cephalo.layer(setting, gpu)
        assert work is not None
        card = gpu_catalogue.find_card(cephalo.CARDS[gpu])
        samples = range(1, (measured.largest or FITTED) + 1)
        expected = _estimated(card, setting.dtype, work)
        curves = (measured.forward, measured.backward)
        one_s = sum(float(interpolate_seconds(curve, samples[0])) for curve in curves)
        return cls(gpu, setting, _ratios(expected, curves, samples), one_s)

    @classmethod
    def held_out(cls, gpu: str) -> Case:
        """A GPU on which Sailor timed a block."""
        group = sailor.Group(gpu, 1, 1)
        block = sailor.profile([group], sailor.Setup(0), None).of_class(gpu).units["block"]
        assert block.gradient is not None
        card = gpu_catalogue.find_card(NO_TF32[gpu])
        work = Work(sailor.BLOCK_FLOPS, sailor.BLOCK_PARAMETERS, sailor.BLOCK_SAVED)
        expected = _estimated(card, "fp32", work)
        measured = (block.forward, block.gradient)
        setting = cephalo.Setting("opt_350m", "fp32", sailor.TOKENS)
        return cls(gpu, setting, _ratios(expected, measured, map(int, block.forward.sizes)))

    @property
    def gpu_class(self) -> str:
        return f"{self.gpu}_{self.setting.dtype}"

    @property
    def error(self) -> float:
        return self.error_if_rescaled(1.0)

    def error_if_rescaled(self, factor: float) -> float:
        """The mean absolute error of estimates that are so many times as long."""
        return fmean(abs(factor * ratio - 1) for ratio in self.ratios)


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    try:
        found, left_out = cases()
        held_out = [Case.held_out(gpu) for gpu in NO_TF32]
    except NotHereError as error:
        print(error, file=sys.stderr)
        print_figures(_figures_of_runs(), as_json=arguments.json)
        return
    if not arguments.json:
        for case in (*sorted(found, key=lambda c: (c.gpu_class, c.setting.name)), *held_out):
            middle = fmean(case.ratios) - 1
            print(f"{case.gpu:9} {case.setting.name:24} {middle:+6.1%}, error {case.error:6.1%}")
    print_figures(
        figures(found)
        | {
            "cases_left_out": left_out,
            "held_out_cases": len(held_out),
            "time_mape_held_out": _mape(held_out),
            "spearman_cards": _correlate_cards(found),
        }
        | _figures_of_runs(),
        as_json=arguments.json,
    )


def cases() -> tuple[list[Case], int]:
    """All that can be estimated, and how many cannot."""
    found, left_out = [], 0
    for setting, gpu in cephalo.timed_layers():
        if cephalo.block_work(setting) is None:
            left_out += 1
        else:
            found.append(Case.of(gpu, setting))
    return found, left_out


def figures(found: list[Case]) -> Figures:
    """The result, flat."""
    classes = {name: _mape(some) for name, some in _grouped(found, lambda c: c.gpu_class).items()}
    worst = max(classes, key=lambda name: classes[name])
    llama = [case for case in found if case.setting.model.startswith("llama")]
    others = [case for case in found if case not in llama]
    return {
        "cases": len(found),
        "time_mape": _mape(found),
        "time_mape_llama": _mape(llama),
        "time_mape_others": _mape(others),
        "time_mape_rescaled": _rescaled(found),
        "worst_class": worst,
        "worst_class_mape": round(classes[worst], 4),
        **{f"time_mape_{name}": round(error, 4) for name, error in sorted(classes.items())},
    }


def _figures_of_runs() -> Figures:
    """How far estimates of published training runs are off."""
    errors = {run: abs(run.ratio - 1) for run in RUNS}
    worst = max(RUNS, key=lambda run: errors[run])
    return {
        "published_runs": len(RUNS),
        "mean_ratio_h100": fmean(run.ratio for run in RUNS if run.architecture == "h100"),
        "mean_ratio_a100": fmean(run.ratio for run in RUNS if run.architecture == "a100"),
        "mape": fmean(errors.values()),
        "held_out_mape": fmean(error for run, error in errors.items() if run.held_out),
        "worst_run": worst.name,
        "worst_run_ratio": worst.ratio,
    }


def _correlate_cards(found: Iterable[Case]) -> float:
    """Spearman's correlation of estimated and measured seconds of a sample between cards, the mean
    over settings."""
    every = []
    for alike in _grouped(found, lambda case: case.setting.name).values():
        if len(alike) < 3:
            continue
        measured = [case.measured_s for case in alike]
        estimated = [case.measured_s * case.ratios[0] for case in alike]
        ranks = [np.argsort(np.argsort(seconds)) for seconds in (measured, estimated)]
        every.append(float(np.corrcoef(*ranks)[0, 1]))
    return fmean(every)


def _estimated(card: gpu_catalogue.Card, dtype: ComputeDtype, work: Work) -> tuple[Curve, Curve]:
    """Forward, and the backward of a kept graph, by samples."""
    size = DTYPE_BYTES[dtype]
    moved_bytes = SAVED_MOVES * work.saved_elements * size
    forward = make_forward_curve(card, dtype, work.flops, work.elements * size, moved_bytes)
    return forward, make_gradient_curve(card, dtype, work.flops, work.elements, moved_bytes)


def _ratios(
    estimated: tuple[Curve, Curve], measured: tuple[Curve, Curve], samples: Iterable[int]
) -> tuple[float, ...]:
    at = list(samples)
    ours, theirs = (
        interpolate_seconds(forward, at) + interpolate_seconds(gradient, at)
        for forward, gradient in (estimated, measured)
    )
    return tuple((ours / theirs).tolist())


def _rescaled(found: list[Case]) -> float:
    """The mean error if all estimates of a setting are rescaled by what the others were off."""
    errors = []
    for alike in _grouped(found, lambda c: c.setting.name).values():
        for case in alike:
            off = [geometric_mean(other.ratios) for other in alike if other is not case]
            if off:
                errors.append(case.error_if_rescaled(1 / geometric_mean(off)))
    return fmean(errors)


def _grouped(found: Iterable[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[key(case)].append(case)
    return groups


def _mape(some: Iterable[Case]) -> float:
    return fmean(case.error for case in some)


if __name__ == "__main__":
    main()
