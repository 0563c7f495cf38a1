"""Weights of bitsandbytes: NF4 and FP4, with constants quantised again or not, and int8.

bitsandbytes keeps a weight's constants in a `QuantState`, on the parameter (`Params4bit`) and on
the module; those of int8 move from the parameter (`Int8Params`) to the module's state in the first
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import (
    TYPICAL_WEIGHT,
    InnerTensor,
    ModuleAttribute,
    Tensors,
    WeightFormat,
    lay_out_inner_tensors,
)
from gpumix.schema.errors import InputError

NESTED_BLOCK = 256  # constants that share a constant of their own; bitsandbytes has no other
# Weights quantised together, of many blocks: on CPUs that takes 20 bytes and more for each weight.
QUANTISED_AT_ONCE = 1 << 16
TYPICAL_RANGE = 3 * TYPICAL_WEIGHT  # largest weight of a block


@dataclass(frozen=True)
class FourBitFormat(WeightFormat):
    """Format of `Params4bit`.

    Attributes:
        quant_type: nf4 or fp4.
        block: weights that share a constant.
        nested: whether constants are quantised too.
    """

    quant_type: str = "nf4"
    block: int = 64
    nested: bool = False

    asked_first = ("quant_state",)

    @classmethod
    def of(cls, parameter: Any) -> FourBitFormat:
        """Return the format of a `Params4bit`, quantised or not.

        Raises:
            InputError: the weight is trained, or its constants are quantised in other blocks.
        """
        state = parameter.quant_state
        if parameter.requires_grad:
            raise InputError(
                "a 4-bit weight of bitsandbytes is to be trained",
                code="quantised-weights-trained",
                why="only what is frozen can be quantised",
                fix="leave its layer out of quantisation: BitsAndBytesConfig(..., "
                "llm_int8_skip_modules=['classifier']) for a new head of that name",
            )
        if state is None:
            shape, dtype, block = parameter.shape, parameter.dtype, parameter.blocksize
            nested, quant_type = bool(parameter.compress_statistics), parameter.quant_type
        else:
            shape, dtype, block = state.shape, state.dtype, state.blocksize
            nested, quant_type = state.nested, state.quant_type
            if nested and state.state2.blocksize != NESTED_BLOCK:
                raise InputError(
                    f"constants of a weight are quantised in blocks of {state.state2.blocksize}",
                    code="quantised-format-unsupported",
                    why=f"bitsandbytes multiplies by weights whose constants have blocks of "
                    f"{NESTED_BLOCK}",
                    fix="quantise the weights again, by this version of bitsandbytes",
                )
        numel, storage = torch.Size(shape).numel(), parameter.quant_storage
        packed = -(-numel // 2) // storage.itemsize
        blocks = -(-numel // block)
        if nested:
            constants = [
                ("absmax", torch.uint8, (blocks,)),
                ("nested_absmax", torch.float32, (-(-blocks // NESTED_BLOCK),)),
                ("nested_offset", torch.float32, ()),
            ]
        else:
            constants = [("absmax", torch.float32, (blocks,))]
        return cls(
            kind=f"{quant_type}-double" if nested else quant_type,
            shape=torch.Size(shape),
            dtype=dtype,
            parts=lay_out_inner_tensors([("weight", storage, (packed, 1)), *constants]),
            quant_type=quant_type,
            block=block,
            nested=nested,
        )

    def tensors(self, parameter: Any, module: nn.Module) -> Tensors | None:
        state = parameter.quant_state
        if state is None:
            return None
        if getattr(state, "packing_format_for_cpu", False):  # by an evaluation on a CPU
            raise InputError(
                "a forward pass in evaluation mode has laid out the 4-bit weights for this CPU",
                code="quantised-weights-relaid",
                why="bitsandbytes rounds constants for that, and trains no further",
                fix="load the model again, and call it after it is prepared",
            )
        if self.nested and not state.absmax.is_meta:
            _check_table(state.state2.code)
        return self._of_state(parameter.data, state)

    def _of_state(self, packed: torch.Tensor, state: Any) -> Tensors:
        found = {"weight": packed, "absmax": state.absmax}
        if self.nested:
            found |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
        return found

    def quantise(self, values: torch.Tensor) -> Tensors:
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        parts = [
            quantize_4bit(
                part,
                blocksize=self.block,
                quant_type=self.quant_type,
                quant_storage=self.parts[0].dtype,
            )
            for part in values.reshape(-1).split(QUANTISED_AT_ONCE)
        ]
        found = {
            "weight": torch.cat([packed for packed, _ in parts]),
            "absmax": torch.cat([state.absmax for _, state in parts]),
        }
        if self.nested:
            offset = found["absmax"].mean()
            absmax, nested = quantize_blockwise(found["absmax"] - offset, blocksize=NESTED_BLOCK)
            found |= {"absmax": absmax, "nested_absmax": nested.absmax, "nested_offset": offset}
        return found

    def restore(self, tensors: Tensors) -> nn.Parameter:
        from bitsandbytes.nn import Params4bit

        return Params4bit(
            tensors["weight"],
            requires_grad=False,
            quant_state=self._state(tensors),
            blocksize=self.block,
            compress_statistics=self.nested,
            quant_type=self.quant_type,
            quant_storage=self.parts[0].dtype,
            bnb_quantized=True,
        )

    def restore_without_values(self, tensors: Tensors) -> nn.Parameter:
        made: Any = self.restore(tensors)
        made.quant_state.__class__ = _state_without_values()
        return made  # type: ignore[no-any-return]

    def _state(self, tensors: Tensors) -> Any:
        from bitsandbytes.functional import QuantState

        device = tensors["absmax"].device
        nested: Any = None
        if self.nested:
            nested = QuantState(
                absmax=tensors["nested_absmax"],
                code=_nested_table(device),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=tensors["absmax"],
            shape=self.shape,
            # A copy: files would not take tensors with shared memory.
            code=_table(self.quant_type, device).clone(),
            blocksize=self.block,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=tensors.get("nested_offset"),
            state2=nested,
        )

    def stand_in(self, tensors: Tensors) -> nn.Parameter:
        made = super().stand_in(tensors)
        made.quant_state = self._state(tensors)  # type: ignore[attr-defined]
        return made

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensors["weight"], self._state(tensors))

    @property
    def suffixes(self) -> Sequence[str]:
        nested = (".nested_absmax", ".nested_quant_map") if self.nested else ()
        state = f".quant_state.bitsandbytes__{self.quant_type}"
        return ("", ".absmax", ".quant_map", *nested, state)

    def read_entries(self, entries: Mapping[str, torch.Tensor]) -> Tensors:
        from bitsandbytes.functional import QuantState

        told = {suffix[1:]: value for suffix, value in entries.items() if suffix}
        state = QuantState.from_dict(told, device=torch.device("cpu"))
        if state.nested:
            _check_table(state.state2.code)
        return self._of_state(entries[""], state)

    def state_entries(self, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        state = self._state(tensors).as_dict(packed=True)
        return {"": tensors["weight"], **{f".{name}": value for name, value in state.items()}}

    def typical(self, part: InnerTensor) -> float | None:
        if part.name == "weight":
            return None
        if not self.nested:
            return TYPICAL_RANGE
        return TYPICAL_RANGE if part.name == "nested_offset" else 0.0

    def attributes(self, parameter: Any, module: nn.Module) -> Sequence[ModuleAttribute]:
        held = vars(module)
        found = [ModuleAttribute(held, "quant_state", parameter.quant_state)]
        # In evaluation on some CPUs a module replaces its weight for good, and rounds constants.
        if "support_avx512bf16_for_cpu" in held:
            found.append(ModuleAttribute(held, "support_avx512bf16_for_cpu", 0, False))
        return found


@cache
def _state_without_values() -> type:
    """Return the class of a `QuantState` with tensors that refuse to be read."""
    from bitsandbytes.functional import QuantState

    class StateWithoutValues(QuantState):
        """A state whose dictionary has the names of the stock one."""

        def as_dict(self, packed: bool = False) -> dict[str, Any]:
            found = {"absmax": self.absmax, "quant_map": self.code}
            if self.nested:
                found["nested_absmax"] = self.state2.absmax
                found["nested_quant_map"] = self.state2.code
            # In its place stock has the values that are no tensors, the nested offset among them.
            return {**found, f"quant_state.bitsandbytes__{self.quant_type}": self.absmax.detach()}

    return StateWithoutValues


@dataclass(frozen=True)
class Int8Format(WeightFormat):
    """Format of `Int8Params`: a constant for each row."""

    asked_first = ("CB", "SCB")

    @classmethod
    def of(cls, parameter: Any) -> Int8Format:
        """Return the format of an `Int8Params`, quantised or not.

        Raises:
            InputError: the weight is trained, and quantised in each forward pass.
        """
        if parameter.has_fp16_weights or parameter.requires_grad:
            raise InputError(
                "a weight of bitsandbytes is trained in 16 bits and quantised in each forward pass",
                code="quantised-weights-trained",
                why="only frozen int8 weights are divided between ranks",
                fix="make the layer with has_fp16_weights=False, and train adapters",
            )
        rows = parameter.shape[0]
        return cls(
            kind="int8",
            shape=parameter.shape,
            dtype=torch.float32,
            parts=lay_out_inner_tensors(
                [("weight", torch.int8, parameter.shape), ("SCB", torch.float32, (rows,))]
            ),
        )

    def tensors(self, parameter: Any, module: Any) -> Tensors | None:
        if parameter.dtype != torch.int8:
            return None
        state = getattr(module, "state", None)
        scales = parameter.SCB if parameter.SCB is not None else getattr(state, "SCB", None)
        if scales is None:
            raise InputError(
                "an int8 weight of bitsandbytes has no constants (SCB)",
                code="int8-constants-missing",
                fix="load the model again; constants are lost when a parameter is copied alone",
            )
        return {"weight": parameter.data, "SCB": scales}

    def quantise(self, values: torch.Tensor) -> Tensors:
        from bitsandbytes.functional import int8_vectorwise_quant

        rows = max(1, QUANTISED_AT_ONCE // max(1, values.shape[-1]))
        parts = [
            int8_vectorwise_quant(part.contiguous().to(torch.float16))
            for part in values.split(rows)
        ]
        return {
            "weight": torch.cat([packed for packed, _, _ in parts]),
            "SCB": torch.cat([scales for _, scales, _ in parts]),
        }

    def restore(self, tensors: Tensors) -> nn.Parameter:
        from bitsandbytes.nn import Int8Params

        _forget_inputs_of_frozen_weights()
        return Int8Params(tensors["weight"], requires_grad=False, SCB=tensors["SCB"])

    def stand_in(self, tensors: Tensors) -> nn.Parameter:
        made = super().stand_in(tensors)
        made.SCB = tensors["SCB"]  # type: ignore[attr-defined]
        return made

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])

    @property
    def suffixes(self) -> Sequence[str]:
        return ("", "/SCB", "/weight_format")

    def read_entries(self, entries: Mapping[str, torch.Tensor]) -> Tensors:
        return {"weight": entries[""], "SCB": entries["/SCB"]}

    def state_entries(self, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        return {
            "": tensors["weight"],
            "/SCB": tensors["SCB"],
            "/weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def typical(self, part: InnerTensor) -> float | None:
        return None if part.name == "weight" else TYPICAL_RANGE

    def attributes(self, parameter: Any, module: Any) -> Sequence[ModuleAttribute]:
        state = getattr(module, "state", None)
        if state is None:  # an embedding
            return ()
        held = vars(state)
        return [
            ModuleAttribute(held, "CB", parameter.data),
            ModuleAttribute(held, "SCB", parameter.SCB),
            ModuleAttribute(held, "has_fp16_weights", False, False),
            ModuleAttribute(
                vars(module), "init_8bit_state", partial(_take_constants, module), False
            ),
        ]


def _take_constants(module: Any) -> None:
    """Move constants from an int8 layer's weight to its state, unless the weight has none: then
    they are there. PEFT's DoRA copies a weight without them."""
    if module.weight.SCB is None:
        module.weight.CB = None
    else:
        type(module).init_8bit_state(module)


@cache
def _forget_inputs_of_frozen_weights() -> None:
    """Make int8 products with frozen weights forget their inputs. bitsandbytes keeps these in plain
    attributes of the graph, for gradients of weights alone: there activation checkpointing cannot
    drop them."""
    from bitsandbytes.autograd import _functions

    for kind in (_functions.MatMul8bitFp, _functions.MatMul8bitLt):
        kind.forward = staticmethod(_forget_inputs(kind.forward))


def _forget_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forgetful(ctx: Any, a: Any, b: Any, *rest: Any) -> Any:
        result = forward(ctx, a, b, *rest)
        if not ctx.needs_input_grad[1] and not getattr(ctx, "is_empty", False):
            ctx.A = None
            ctx.tensors = (None, None, None)
        return result

    return forgetful


@cache
def _table(quant_type: str, device: torch.device) -> torch.Tensor:
    """Return the values of a 4-bit type, shared by all weights on a device."""
    from bitsandbytes.functional import get_4bit_type

    made: torch.Tensor = get_4bit_type(quant_type, device="cpu")
    return made.to(device)


@cache
def _nested_table(device: torch.device) -> torch.Tensor:
    """Return the values of quantised constants, shared by all weights on a device."""
    from bitsandbytes.functional import create_dynamic_map

    made: torch.Tensor = create_dynamic_map()
    return made.to(device)


def _check_table(table: torch.Tensor) -> None:
    """Refuse a weight whose quantised constants stand for other values than bitsandbytes' own."""
    if not torch.equal(table.cpu(), _nested_table(torch.device("cpu"))):
        raise InputError(
            "constants of a 4-bit weight are quantised by a table of their own",
            code="quantised-format-unsupported",
            why="one table is kept for all weights",
            fix="quantise the weights again, by this version of bitsandbytes",
        )
