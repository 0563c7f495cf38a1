"""Runs a command with the CUDA device for tests: `python tests/cuda_device -- COMMAND...`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)

from cuda_device.build import BuildError, library  # noqa: E402
from cuda_device.environ import environment  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="2", help="a number, or h100:2,t4:0.5 (with GiB)")
    parser.add_argument("--lag", default="", help="side-late, side-early or random:SEED")
    parser.add_argument("--optional", action="store_true", help="do nothing where it cannot be")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    try:
        found = environment(library(), args.devices, args.lag)
    except BuildError as error:
        told = f"no CUDA device for tests: {error}"
        if not args.optional:
            sys.exit(told)
        print(f"{told}; tests that need it are left out", file=sys.stderr)
        return
    os.environ.update(found)
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    main()
