"""`python -m gpumix`, which is also what torchrun starts: `torchrun ... -m gpumix train JOB`."""

from gpumix.cli import main

if __name__ == "__main__":
    main()
