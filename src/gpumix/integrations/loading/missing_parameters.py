"""Initialisation of parameters that files lack, beside others whose values stay in files.

Code of transformers that initialises a module asks its parameters for their device, and some for
their values: on the meta device it would draw no random numbers, and compute values of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gpumix.engine.weights.file_parameter import FileParameter, has_source, read_values


class _HostParameter(torch.Tensor):
    """A parameter in files that looks as if it were on the host. Operations read its values."""

    in_files: FileParameter
    loaded: torch.Tensor | None

    @staticmethod
    def of(parameter: FileParameter) -> _HostParameter:
        """Return the parameter, with the flags that transformers has set."""
        made: _HostParameter = torch.Tensor._make_wrapper_subclass(
            _HostParameter,
            parameter.shape,
            dtype=parameter.dtype,
            device=torch.device("cpu"),
            requires_grad=parameter.requires_grad,
        )
        vars(made).update(vars(parameter), in_files=parameter, loaded=None)
        return made

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter outside of autograd, which counts as changed together with it."""
        return self.detach()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(_HostParameter, _HostParameter._load, (args, kwargs or {}))
        return operation(*args, **kwargs)

    def _load(self) -> torch.Tensor:
        if self.loaded is None:
            values = read_values("", self.in_files, 0, self.numel()).view(self.shape)
            self.loaded = values.clone()  # files must not stay mapped
        return self.loaded

    def give_back(self) -> nn.Parameter:
        """Return the parameter in files, with new flags; one with values, if they were changed."""
        parameter: nn.Parameter = self.in_files
        if self._version:
            parameter = nn.Parameter(self._load())
        parameter.requires_grad_(self.requires_grad)
        own = vars(self)
        vars(parameter).update({key: own[key] for key in own.keys() - _OWN})
        return parameter


_OWN = frozenset(_HostParameter.__annotations__)


@contextmanager
def pretend_on_host(model: nn.Module) -> Iterator[None]:
    """Let parameters in files look inside the context as if they had been loaded."""
    places = [
        (module, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if type(parameter) is FileParameter and has_source(parameter)
    ]
    shown = {parameter: _HostParameter.of(parameter) for *_, parameter in places}
    for module, key, parameter in places:
        module._parameters[key] = shown[parameter]  # type: ignore[assignment]
    try:
        yield
    finally:
        given_back = {parameter: one.give_back() for parameter, one in shown.items()}
        for module, key, parameter in places:
            if module._parameters[key] is shown[parameter]:
                module._parameters[key] = given_back[parameter]
