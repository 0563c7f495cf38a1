"""Errors of a step with a non-finite loss or gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpumix.schema.errors import TrainingError


def make_corrupt_weights_error(wrong: str, who: str) -> TrainingError:
    """Return the error of weights spoilt by an earlier step."""
    return TrainingError(
        wrong,
        code="weights-not-finite",
        where=who,
        why="an earlier step had made weights that are not finite: its rate was too high",
        fix="nothing was saved; --resume goes on from an earlier checkpoint, if there is one, with "
        "a lower --set optimizer.lr=...",
    )


def make_no_labels_error(step: int, who: str, samples: Sequence[int], saved: Path) -> TrainingError:
    """Return the error of a mean over no labels. `samples` are of `who`; `saved` is the state."""
    return TrainingError(
        f"step {step} has no loss: none of its labels counts",
        code="step-without-labels",
        where=f"{who}, whose first samples are {', '.join(map(str, samples))}",
        why="all labels of its samples are -100",
        fix="give labels to learn from; where only few samples have them, a larger global_batch "
        f"has some in each step. The state before that step is in {saved}",
    )


def make_overflow_error(wrong: str, who: str, saved: Path) -> TrainingError:
    """Return the error of good weights, saved in `saved`."""
    return TrainingError(
        wrong,
        code="step-not-finite",
        where=who,
        why="a rate too high, fp16 out of its range, or bad samples in that rank's share",
        fix=f"the state before that step is in {saved}: go on from there with --resume and a lower "
        "--set optimizer.lr=..., or look at the samples",
    )
