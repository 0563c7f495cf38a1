"""gpumix trains transformers on any mixture of GPUs, at their combined speed.

    profile = gpumix.profile(build, make_batch, sequence_length=512, global_batch_size=64)
    plan = gpumix.plan(profile, global_batch_size=64)
    engine = gpumix.prepare(gpumix.build(build, seed=0), plan)
    optimizer = torch.optim.AdamW(engine.parameters())

Names are imported on first use, so that `import gpumix` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumix.data.core.read_policy import Reading
    from gpumix.data.core.sample_rng import sample_generator
    from gpumix.data.loader import Loader, evaluation_batches
    from gpumix.data.order.sampler import ByLength
    from gpumix.data.sources.pretokenized import OwnSamples
    from gpumix.data.text.document_packing import PackedDocuments
    from gpumix.engine.access_between_steps import summon_full_params, unshard
    from gpumix.engine.engine import Engine
    from gpumix.engine.model.deferred_init import build
    from gpumix.engine.optimizers.adafactor import Adafactor
    from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
    from gpumix.engine.optimizers.muon import Muon
    from gpumix.engine.optimizers.parameter_groups import parameter_groups
    from gpumix.engine.prepare import prepare
    from gpumix.integrations.accelerate import Accelerator
    from gpumix.integrations.loading.lazy_weights import from_pretrained, lazy_weights
    from gpumix.launch.notebook import notebook_launcher
    from gpumix.planner.plan import plan
    from gpumix.profiler.api import open_device, profile
    from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
    from gpumix.schema.errors import GpumixError
    from gpumix.schema.job.search_space import Space
    from gpumix.schema.plan.plan import Plan
    from gpumix.schema.profile.profile import Profile
    from gpumix.train.checkpoint.checkpointer import Checkpointer

__version__ = "0.1.0"

_HOME = {
    "ByLength": "gpumix.data.order.sampler",
    "sample_generator": "gpumix.data.core.sample_rng",
    "Loader": "gpumix.data.loader",
    "evaluation_batches": "gpumix.data.loader",
    "OwnSamples": "gpumix.data.sources.pretokenized",
    "PackedDocuments": "gpumix.data.text.document_packing",
    "Reading": "gpumix.data.core.read_policy",
    "build": "gpumix.engine.model.deferred_init",
    "Engine": "gpumix.engine.engine",
    "Adafactor": "gpumix.engine.optimizers.adafactor",
    "AdamW8bit": "gpumix.engine.optimizers.adamw_8bit",
    "Muon": "gpumix.engine.optimizers.muon",
    "parameter_groups": "gpumix.engine.optimizers.parameter_groups",
    "prepare": "gpumix.engine.prepare",
    "unshard": "gpumix.engine.access_between_steps",
    "summon_full_params": "gpumix.engine.access_between_steps",
    "Accelerator": "gpumix.integrations.accelerate",
    "from_pretrained": "gpumix.integrations.loading.lazy_weights",
    "lazy_weights": "gpumix.integrations.loading.lazy_weights",
    "plan": "gpumix.planner.plan",
    "open_device": "gpumix.profiler.api",
    "profile": "gpumix.profiler.api",
    "notebook_launcher": "gpumix.launch.notebook",
    "Cluster": "gpumix.schema.cluster.cluster",
    "Device": "gpumix.schema.cluster.cluster",
    "DeviceClass": "gpumix.schema.cluster.cluster",
    "GpumixError": "gpumix.schema.errors",
    "Plan": "gpumix.schema.plan.plan",
    "Profile": "gpumix.schema.profile.profile",
    "Space": "gpumix.schema.job.search_space",
    "Checkpointer": "gpumix.train.checkpoint.checkpointer",
}

__all__ = [
    "Accelerator",
    "Adafactor",
    "AdamW8bit",
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
    "from_pretrained",
    "lazy_weights",
    "notebook_launcher",
    "open_device",
    "parameter_groups",
    "plan",
    "prepare",
    "profile",
    "sample_generator",
    "summon_full_params",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpumix' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
