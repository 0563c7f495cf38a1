"""Entry point of `python -m gpumix`, also for torchrun: `torchrun ... -m gpumix train JOB`."""

from gpumix.cli import main

if __name__ == "__main__":
    main()
