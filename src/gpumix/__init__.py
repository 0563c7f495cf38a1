"""gpumix trains transformers on any mixture of GPUs, at their combined speed.

    profile = gpumix.profile(build, make_batch, sequence_length=512, global_batch=64)
    plan = gpumix.plan(profile, global_batch=64)
    engine = gpumix.prepare(gpumix.build(build, seed=0), plan)
    optimizer = torch.optim.AdamW(engine.parameters())

Names are imported on first use, so that `import gpumix` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumix.data.course import ByLength
    from gpumix.data.draws import sample_generator
    from gpumix.data.loader import Loader, evaluation_batches
    from gpumix.data.own_samples import OwnSamples
    from gpumix.data.packing import PackedDocuments
    from gpumix.data.reading import Reading
    from gpumix.engine.deferred import build
    from gpumix.engine.engine import Engine
    from gpumix.engine.optimizers.adafactor import Adafactor
    from gpumix.engine.optimizers.groups import parameter_groups
    from gpumix.engine.optimizers.muon import Muon
    from gpumix.engine.outside import unshard, whole
    from gpumix.engine.prepare import prepare
    from gpumix.integrations.accelerate import Accelerator
    from gpumix.planner.explain import plan
    from gpumix.profiler.library import open_device, profile
    from gpumix.spec.cluster import Cluster, Device, DeviceClass
    from gpumix.spec.errors import GpumixError
    from gpumix.spec.plan import Plan
    from gpumix.spec.profile import Profile
    from gpumix.spec.space import Space
    from gpumix.train.checkpoint import Checkpointer

__version__ = "0.1.0"

_HOME = {
    "ByLength": "gpumix.data.course",
    "sample_generator": "gpumix.data.draws",
    "Loader": "gpumix.data.loader",
    "evaluation_batches": "gpumix.data.loader",
    "OwnSamples": "gpumix.data.own_samples",
    "PackedDocuments": "gpumix.data.packing",
    "Reading": "gpumix.data.reading",
    "build": "gpumix.engine.deferred",
    "Engine": "gpumix.engine.engine",
    "Adafactor": "gpumix.engine.optimizers.adafactor",
    "Muon": "gpumix.engine.optimizers.muon",
    "parameter_groups": "gpumix.engine.optimizers.groups",
    "prepare": "gpumix.engine.prepare",
    "unshard": "gpumix.engine.outside",
    "whole": "gpumix.engine.outside",
    "Accelerator": "gpumix.integrations.accelerate",
    "plan": "gpumix.planner.explain",
    "open_device": "gpumix.profiler.library",
    "profile": "gpumix.profiler.library",
    "Cluster": "gpumix.spec.cluster",
    "Device": "gpumix.spec.cluster",
    "DeviceClass": "gpumix.spec.cluster",
    "GpumixError": "gpumix.spec.errors",
    "Plan": "gpumix.spec.plan",
    "Profile": "gpumix.spec.profile",
    "Space": "gpumix.spec.space",
    "Checkpointer": "gpumix.train.checkpoint",
}

__all__ = [
    "Accelerator",
    "Adafactor",
    "ByLength",
    "Checkpointer",
    "Cluster",
    "Device",
    "DeviceClass",
    "Engine",
    "GpumixError",
    "Loader",
    "Muon",
    "OwnSamples",
    "PackedDocuments",
    "Plan",
    "Profile",
    "Reading",
    "Space",
    "build",
    "evaluation_batches",
    "open_device",
    "parameter_groups",
    "plan",
    "prepare",
    "profile",
    "sample_generator",
    "unshard",
    "whole",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpumix' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
