"""The stages of the proof, most worth first: what each is, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: also its module's in this package.
        limit_s: after it the stage is ended; a stage with None may take all that is left.
        least_s: with less left it is not begun.
        commands: whether the stage itself leaves the device alone, and starts commands that train.
            Where stages are forked, its commands are forked too.
    """

    name: str
    limit_s: float | None
    least_s: float
    commands: bool = False


STAGES = (
    Stage("env", 15, 5),
    Stage("smoke", 40, 20),
    Stage("speed", 110, 45),
    Stage("predict", 65, 40, commands=True),
    Stage("unequal", 65, 30, commands=True),
    Stage("oom", 40, 20, commands=True),
    Stage("resume", 35, 20, commands=True),
    Stage("cli", 25, 15, commands=True),
    Stage("doctor_check", 20, 15, commands=True),
    # With what the others leave of the budget.
    Stage("adapters", None, 30),
    Stage("leftover", None, 60),
)
