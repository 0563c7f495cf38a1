"""Draw a training step as a picture: when each device computes, sends and waits.

    python examples/draw_step.py runs/first/trace.json --out step.png
    python examples/draw_step.py runs/first/trace.json simulated.json --out both.png

Traces come from `gpumix train --trace-step STEP` (measured) and `gpumix simulate --trace FILE`
(planned); several traces are drawn below each other on one time axis. With pipeline stages, the
numbers in bars are micro-batches, and passes through a device's second stage are paler. Needs
matplotlib: pip install ".[pictures]"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpumix.report.step_picture import draw_panels, read_panel


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the steps of trace files as one picture.")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("step.png"))
    options = parser.parse_args()
    try:
        panels = [read_panel(path) for path in options.traces]
    except ValueError as error:
        parser.error(str(error))
    draw_panels([panel.with_idle_share() for panel in panels], options.out)


if __name__ == "__main__":
    main()
