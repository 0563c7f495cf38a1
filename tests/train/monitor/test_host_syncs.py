"""Which lines of a model make the host wait for a GPU."""

from __future__ import annotations

import warnings

import torch

from gpumix.train.monitor import host_syncs


def test_lines_by_torchs_warnings():
    """Those that torch itself, and this package, are at do not count."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for file, line in (("model.py", 7), ("model.py", 7), ("model.py", 9), (torch.__file__, 1)):
            warnings.warn_explicit(
                f"called a synchronizing CUDA operation (Triggered at {line})",
                UserWarning,
                file,
                line,
            )
        warnings.warn_explicit(f"{host_syncs.SYNC_WARNING}", UserWarning, host_syncs.__file__, 3)
        warnings.warn_explicit("something else", UserWarning, "model.py", 1)
    assert host_syncs.count_lines(caught) == [("model.py:7", 2.0), ("model.py:9", 1.0)]


def test_without_a_gpu_there_are_none():
    with host_syncs.record_syncs(torch.device("cpu")) as told:
        pass
    assert told() == []
