"""gpumix trains transformers on whatever mixture of GPUs there is, at the speed they add up to."""

__version__ = "0.1.0"
