"""Checkpoints of a trainer: the model in transformers' format, with the sharded state.

A checkpoint folder has transformers' layout, for `from_pretrained` and other tools; its folder
`gpumix` has the state for a resume by any plan on any devices.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gpumix.engine.access_between_steps import get_access_between_steps
from gpumix.engine.comm.process_groups import group_timeout
from gpumix.engine.engine import Engine
from gpumix.engine.weights.safetensors_files import open_safetensors
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.common.collective_guard import CollectiveGuard
from gpumix.integrations.common.peft_adapters import load_adapters, use_prompt_weights
from gpumix.integrations.common.plan_and_shard import get_rank
from gpumix.schema.errors import InputError
from gpumix.train.checkpoint.checkpointer import Checkpointer
from gpumix.train.run_log.run_files import SCRIPT_FOLDER

FIX_CALL_ON_ALL_RANKS = (
    "call it on all ranks: trainer.save_model(), model.save_pretrained(folder, "
    "is_main_process=accelerator.is_main_process), accelerator.save_model(model, folder) or "
    "accelerator.get_state_dict(model) on all ranks"
)
GROUPS = "groups"  # settings of the optimizer's groups, in the checkpoint's cursor
_LOG = logging.getLogger(__name__)


class Saver:
    """Saver and loader of an engine's state in folders of transformers' checkpoints.

    Args:
        dtypes: of the parameters as given.
        ranks_here: number of ranks on this host.
        name: of the state's folder in a checkpoint; empty for the checkpoint's folder itself.
    """

    def __init__(
        self,
        engine: Engine,
        dtypes: Mapping[str, torch.dtype],
        ranks_here: int,
        name: str = SCRIPT_FOLDER,
    ) -> None:
        self._name = name
        self._engine = engine
        self._dtypes = dtypes
        self._ranks_here = ranks_here
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._collective_guard = CollectiveGuard()
        self._group = None if alone else dist.new_group(backend="gloo", timeout=group_timeout())

    def gather_model_state(self, *, quantised: bool = True) -> dict[str, Tensor]:
        """Return the full state dict in its given dtypes, on the first rank. Collective.

        Args:
            quantised: with quantised weights, which PEFT does not save.
        """
        with count_as_host_memory():
            state = self._engine.state_dict(rank0_only=True, quantised=quantised)
            return {n: t.to(self._dtypes.get(n, t.dtype)) for n, t in state.items()}

    def request_model_state(self, *, quantised: bool = True) -> dict[str, Tensor]:
        """Return `gather_model_state` for a program that may call on the first rank alone.

        Raises:
            InputError: only some ranks call, and the first rank has no full state.
        """
        if not self._engine.has_whole_state:
            self._collective_guard.wait_for_all("the whole model", FIX_CALL_ON_ALL_RANKS)
        return self.gather_model_state(quantised=quantised)

    def save(self, folder: Path, step: int, optimizer: Optimizer) -> None:
        """Write the state into a checkpoint. Collective."""
        cursor = {GROUPS: [_select_json_settings(group) for group in optimizer.param_groups]}
        self._in(folder).save(step, self._engine, optimizer, cursor=cursor)

    def load(self, folder: Path, optimizer: Optimizer | None) -> int:
        """Resume from a checkpoint, or load weights alone; return the step, 0 if unknown.
        Collective.

        Raises:
            InputError: the checkpoint does not exist, is of another model, or has neither full
                weights nor the model's adapters.
        """
        if not folder.is_dir():
            raise InputError(
                "there is no such checkpoint",
                code="no-checkpoint",
                where=str(folder),
                fix="give the folder of one, as out/checkpoint-500",
            )
        if (folder / self._name).is_dir():
            state = self._in(folder).load(self._engine, optimizer)
            saved = state.cursor.get(GROUPS, [])
            groups = [] if optimizer is None else optimizer.param_groups
            if len(saved) == len(groups):
                for group, settings in zip(groups, saved):
                    group.update({k: tuple(v) if isinstance(v, list) else v for k, v in settings})
            return state.step
        if optimizer is not None:
            _LOG.warning(
                "%s has no state of gpumix: its weights are taken, the optimizer begins anew",
                folder,
            )
            return 0
        files = sorted(folder.glob("model*.safetensors"))
        if (adapters := load_adapters(folder, self._engine.model)) is not None:
            with count_as_host_memory():
                self._engine.load_state_dict(adapters, strict=False)
            return 0
        if not files:
            raise InputError(
                "the checkpoint holds no weights of a whole model",
                code="checkpoint-without-whole-weights",
                where=str(folder),
                fix="save with save_only_model=False, so that there is a state to load",
            )
        values: dict[str, Tensor] = {}
        for file in files:
            with open_safetensors(file) as opened:
                values |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        self.load_weights(values)
        return 0

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Load full weights of the model."""
        with count_as_host_memory():
            self._engine.load_state_dict(values)

    def _in(self, folder: Path) -> Checkpointer:
        return Checkpointer(
            folder / self._name, keep=1, group=self._group, ranks_here=self._ranks_here
        )


def find_newest_state(project: str | None, named: bool) -> Path:
    """Return the newest state saved by an Accelerator under automatic names.

    Args:
        project: its folder.
        named: it names states automatically.

    Raises:
        InputError: there is no state.
    """
    folder = Path(project or ".") / "checkpoints"
    found = folder.glob("checkpoint_*") if named else ()
    numbers = {int(one.name.rpartition("_")[2]): one for one in found}
    if not numbers:
        raise InputError(
            "load_state is told no folder",
            code="load-without-folder",
            why=f"there is none in {folder}" if named else "states are not named automatically",
            fix="accelerator.load_state(FOLDER), that of accelerator.save_state(FOLDER)",
        )
    return numbers[max(numbers)]


def _select_json_settings(group: Mapping[str, Any]) -> list[list[Any]]:
    """Return a parameter group's settings, such as learning rates, which may have changed since it
    was made."""

    def plain(value: Any) -> bool:
        if isinstance(value, tuple | list):
            return all(plain(one) for one in value)
        if isinstance(value, float):
            return math.isfinite(value)  # JSON has finite numbers only
        return value is None or isinstance(value, int | str)

    found = [[k, v] for k, v in group.items() if k != "params" and plain(v)]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # numpy's numbers, tuples


def get_parameter_dtypes(model: nn.Module) -> dict[str, Any]:
    """Return the dtypes of the parameters, by all names of each."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def patch_save_pretrained(model: nn.Module, saver: Saver) -> None:
    """Make `model.save_pretrained`, if it takes a state dict, save full weights. The first rank
    writes."""
    save = getattr(type(model), "save_pretrained", None)
    if save is None:
        return
    known = inspect.signature(save)
    taken = known.parameters.values()
    if not any(p.name == "state_dict" or p.kind is p.VAR_KEYWORD for p in taken):
        return
    # Weak: the model's attributes must keep neither the model nor the saver alive.
    of_model, of_saver = weakref.ref(model), weakref.ref(saver)

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        given = known.bind(of_model(), *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        asked = of_saver()
        if given.get("state_dict") is None and asked is not None:
            quantised = not hasattr(given["self"], "peft_config")
            given["state_dict"] = asked.request_model_state(quantised=quantised)
            if get_rank() > 0:
                return None
        with use_prompt_weights(given["self"], given.get("state_dict") or {}):
            return save(given.pop("self"), **given)

    model.save_pretrained = save_pretrained  # type: ignore[assignment]
    outside = get_access_between_steps(model)
    assert outside is not None, "it is sharded"
    outside.call_on_unshard(lambda: vars(of_model()).pop("save_pretrained", None))
