"""`save_pretrained` of a sharded model, saving full weights."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn

from gpumix.engine.outside_steps import get_outside_steps
from gpumix.integrations.common.peft_adapters import use_prompt_weights
from gpumix.integrations.common.plan_and_shard import get_rank
from gpumix.integrations.common.saver import Saver


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
            return save(**given)

    model.save_pretrained = save_pretrained  # type: ignore[assignment]
    outside = get_outside_steps(model)
    assert outside is not None, "it is sharded"
    outside.call_on_unshard(lambda: vars(of_model()).pop("save_pretrained", None))
