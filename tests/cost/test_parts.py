"""Predicted memory in the parts that can be measured."""

from __future__ import annotations

from gpumix.cost.memory_layout.memory_parts import group_by_part


def test_each_cause_is_in_one_part():
    causes = {
        "state": 100, "replicas": 20, "buffers": 3, "gathered": 40, "gradients": 50,
        "activations": 1000, "boundary gradients": 200, "working set": 7, "framework": 10_000,
    }  # fmt: skip
    assert group_by_part(causes) == {"laid out": 213, "samples": 1207}
    assert group_by_part({}) == {"laid out": 0, "samples": 0}
