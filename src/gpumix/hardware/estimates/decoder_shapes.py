"""Estimates of compute and memory for decoders of `transformers`, from `config.json` alone.

Used for planning before a model can run. Parameters are counted exactly (as `transformers` builds
them), FLOPs as torch counts them; memory is estimated from the tensors made by the blocks' code.
Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpumix.cost.memory_layout.chunk_rows import compute_chunk_bytes
from gpumix.hardware.estimates.adapters import BlockSizes, LinearSizes
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import MOST_LAYERS
from gpumix.schema.plan.optimizer_state import LEAST_QUANTISED
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, StageInput
from gpumix.schema.profile.profile import (
    ROOT,
    CallInputs,
    EndParameters,
    ModelProfile,
    RootParameter,
    RootUnit,
    TensorParallelCollective,
    TensorParallelTraffic,
    UnitKind,
)
from gpumix.schema.reading.yaml_locations import show_value
from gpumix.schema.units import LARGEST, LARGEST_FLOPS, show_bytes

# Families of `model_type`: rotary, gated, without biases; exceptions are handled below.
GATED_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "olmo2", "smollm3", "granite", "phi3",
)  # fmt: skip
PLAIN_FAMILIES = ("gpt2", "opt", "gpt_neox", "bloom")

# Families whose blocks the engine can divide over a tensor-parallel group; all except
# `UNDIVIDED_EMBEDDING_FAMILIES` divide the embedding too.
TENSOR_PARALLEL_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite", "gpt2", "gpt_neox",
)  # fmt: skip
UNDIVIDED_EMBEDDING_FAMILIES = ("gpt_neox",)
DEGREES = (2, 4, 8)  # tensor parallel degrees

HEAD_DIMS = {"gemma": 256, "qwen3": 128}  # families whose default is not hidden / heads

MOST_SAMPLES = 4096  # end of the straight lines: more than any device gets
KIND = "block"
LARGEST_SIZE = 2**31  # beyond any model
MEASURE_FIX = "measure it: `gpumix profile JOB.yaml`, then plan from the profile"


@dataclass(frozen=True)
class DividedDecoder:
    """Compute and collectives of a rank of a tensor-parallel group; `told` is by unit kind."""

    model: ModelProfile
    told: dict[str, TensorParallelTraffic]


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder. `biased` marks linear layers with a bias: attention inputs, attention
    output, feed-forward. For a rank of a tensor-parallel group, of `tp_size` ranks, sizes are its
    part: heads, inner width, vocabulary rows."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    gated: bool
    tied: bool
    biased: tuple[bool, bool, bool]
    norm_bias: bool
    positions: int = 0  # rows of a learned table
    extra_norms: int = 0  # elements of norms besides a block's two
    root_norms: int = 1
    experts: int = 0
    experts_used: int = 0
    supports_tensor_parallel: bool = False  # whether blocks may be divided
    divides_table: bool = True
    head_norms: int = 0  # part of `extra_norms` inside heads
    dropout: bool = False  # after a block's last product
    tp_size: int = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """Possible sizes of a tensor-parallel group for a block."""
        sizes = (self.heads, self.kv_heads, self.feed_forward)
        return tuple(
            n
            for n in DEGREES
            if self.supports_tensor_parallel and not any(size % n for size in sizes)
        )

    def parts(self, tokens: int, dtype: ComputeDtype, name: str) -> dict[int, DividedDecoder]:
        """Return the part of a rank by tensor parallel degree, for samples of `tokens` tokens."""
        return {
            degree: DividedDecoder(part.model(tokens, dtype, name), part.told(tokens, dtype))
            for degree, part in ((n, self.part(n)) for n in self.degrees)
        }

    def part(self, degree: int) -> Decoder:
        """Return the sizes for a rank of a tensor-parallel group."""
        return replace(
            self,
            heads=self.heads // degree,
            kv_heads=self.kv_heads // degree,
            feed_forward=self.feed_forward // degree,
            tp_size=degree,
        )

    @property
    def head_rows(self) -> int:
        """Rows of the vocabulary with logits computed by a rank."""
        alike = self.divides_table or not self.tied
        return self.vocabulary // self.tp_size if alike and self._divides else self.vocabulary

    @property
    def table_rows(self) -> int:
        """Rows of the vocabulary looked up by a rank."""
        alike = self.divides_table and self._divides
        return self.vocabulary // self.tp_size if alike else self.vocabulary

    @property
    def _divides(self) -> bool:
        return self.vocabulary % self.tp_size == 0

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def block_parameters(self) -> int:
        """Elements of a block."""
        inputs = self.attention_width + 2 * self.kv_heads * self.head_dim
        attention = self.hidden * inputs + self.attention_width * self.hidden
        inner = (2 if self.gated else 1) * self.feed_forward  # gate and up, or up alone
        matrices = self.hidden * (inner + self.feed_forward)
        router = self.hidden * self.experts
        return attention + self._block_vectors + router + max(1, self.experts) * matrices

    @property
    def _block_vectors(self) -> int:
        """Elements of a block's norms and biases."""
        inputs = self.attention_width + 2 * self.kv_heads * self.head_dim
        norms = 2 * self.hidden * (2 if self.norm_bias else 1) + self.extra_norms
        first, second, third = self.biased
        inner = (2 if self.gated else 1) * self.feed_forward
        return norms + inputs * first + self.hidden * (second + third) + inner * third

    @property
    def block_matrices(self) -> int:
        """Elements of a block in matrices; experts, stored in a stack of matrices, are not
        counted."""
        inputs = self.attention_width + 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (inputs + self.attention_width)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return attention + (self.hidden * self.experts if self.experts else feed_forward)

    @property
    def block_sizes(self) -> BlockSizes:
        """Sizes of a block; experts, stored in a stack of matrices, are not linear layers."""
        key_width = self.kv_heads * self.head_dim
        linears = [
            LinearSizes(self.hidden, self.attention_width),
            LinearSizes(self.hidden, key_width, 2),
            LinearSizes(self.attention_width, self.hidden),
        ]
        if not self.experts:
            linears.append(LinearSizes(self.hidden, self.feed_forward, 2 if self.gated else 1))
            linears.append(LinearSizes(self.feed_forward, self.hidden))
        return BlockSizes(self.block_parameters, tuple(linears))

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def root_parameters(self) -> int:
        """Elements of embedding, final norm and head."""
        return sum((self._before | self._after).values())

    @property
    def _before(self) -> dict[str, int]:
        """Elements of root parameters used before the blocks, by name."""
        found = {"embedding": self.table_rows * self.hidden}
        if self.positions:
            found["positions"] = self.positions * self.hidden
        if self.root_norms > 1:
            found["embedding norm"] = (self.root_norms - 1) * self._norm
        return found

    @property
    def _after(self) -> dict[str, int]:
        """Elements of root parameters used by head and loss, by name."""
        head = "embedding" if self.tied else "head"
        return {"norm": self._norm, head: self.head_rows * self.hidden}

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.norm_bias else 1)

    def block_flops(self, tokens: int) -> float:
        """Return the FLOPs of a block's forward for a sample: products with weights, and
        attention."""
        inputs = self.attention_width + 2 * self.kv_heads * self.head_dim
        matrices = (3 if self.gated else 2) * self.hidden * self.feed_forward
        used = matrices * max(1, self.experts_used) + self.hidden * self.experts
        weights = self.hidden * (inputs + self.attention_width) + used
        return 2.0 * tokens * weights + 4.0 * tokens**2 * self.attention_width

    def model(self, tokens: int, dtype: ComputeDtype, name: str) -> ModelProfile:
        """Return the profile of the model for samples of `tokens` tokens.

        Raises:
            InputError: a sample is too much work for any GPU.
        """
        head_flops = 2.0 * tokens * self.hidden * self.head_rows
        most = 2 * max(self.block_flops(tokens), head_flops)
        if most > LARGEST_FLOPS:
            raise InputError(
                f"a sample of {tokens} tokens is more work for this model than any card ends",
                code="sample-too-much-work",
                why=f"the backward of a block, or of the head, takes {most:.1e} FLOPs",
                fix="lower sequence_length",
            )
        size = DTYPE_BYTES[dtype]
        stream = tokens * self.hidden * size
        saved = tokens * self._saved_elements() * size
        # In addition to saved tensors, a backward creates gradients of the widest activations, and
        # of a weight before accumulation into the unit's gradient.
        widest = max(self.feed_forward * max(1, self.experts_used), self.hidden)
        passing = tokens * (2 * widest + 2 * self.hidden) * size
        weight = self.hidden * self.feed_forward * size
        block = UnitKind(
            name=KIND,
            trainable=self.block_parameters,
            matrices=self.block_matrices,
            small=self._block_vectors if self.hidden < LEAST_QUANTISED else 0,
            kept=_line(stream),
            saved=_line(saved + stream),
            saved_forward=_line(2 * stream),  # the block's output before and after dropout
            saved_backward=_line(passing, weight),
            gradient=_line(stream),
            forward=_line(saved + stream),  # saved tensors are freed after the unit
            backward=_line(saved + passing, weight),
            flops=self.block_flops(tokens),
            backward_flops=2 * self.block_flops(tokens),
            outputs={0: _line(stream)},
            split=_line(saved + stream + tokens * self._put_off_elements() * size),
            split_backward=_line(passing, weight),
        )
        # Logits in fp32, their log-softmax and its gradient; logits and gradient of a narrow dtype.
        logits = tokens * self.vocabulary * (12 + (2 * size if dtype != "fp32" else 0))
        # The gradient of the head's weight is created after the first two are freed.
        weight_left = max(0, self.head_rows * self.hidden * size - 8 * self.vocabulary * tokens)
        sizes = self._before | self._after
        root = RootUnit(
            trainable=self.root_parameters,
            buffer_bytes=0,
            before=self._end({"embedding", "positions"} - set(self._after)),
            after=self._end(set(self._after) - set(self._before)),
            parameters=tuple(RootParameter(name=n, trainable=k) for n, k in sizes.items()),
            kept=_line(stream + 16 * tokens),
            head=_line(logits + 4 * stream, weight_left),
            chunked_cross_entropy=self._chunked_cross_entropy(tokens, size)
            if self.tp_size == 1
            else None,
            flops=head_flops,
            backward_flops=2 * head_flops,
        )
        return ModelProfile(
            fingerprint=f"estimate:{name}",
            compute_dtype=dtype,
            calls=tuple(f"layers.{i}" for i in range(self.layers)),
            kind_of_call=(KIND,) * self.layers,
            needs=(
                CallInputs(root=tuple(self._before)),
                *(
                    CallInputs(outputs=(StageInput(call=k, output=0),))
                    for k in range(self.layers - 1)
                ),
                CallInputs(
                    root=tuple(self._after), outputs=(StageInput(call=self.layers - 1, output=0),)
                ),
            ),
            kinds=(block,),
            root=root,
        )

    def told(self, tokens: int, dtype: ComputeDtype) -> dict[str, TensorParallelTraffic]:
        """Return the collectives of a rank in its tensor-parallel group by unit kind: all-reduces
        of the outputs of attention and feed-forward, and of the gradients of their inputs (Shoeybi
        et al. 2019, Megatron-LM). Recompute skips a block's last all-reduce unless dropout follows
        (`engine.model.backward_hooks`)."""
        size = DTYPE_BYTES[dtype]
        stream = tokens * self.hidden * size
        logits = tokens * self.head_rows * size

        def sums(times: int) -> TensorParallelCollective:
            return TensorParallelCollective(
                operation="all_reduce", times=times, bytes=_line(times * stream)
            )

        side_by_side = TensorParallelCollective(operation="exchange", times=1, bytes=_line(logits))
        block = TensorParallelTraffic(
            forward=(sums(2),),
            backward=(sums(4 if self.dropout else 3),),
            gradient=(sums(2),),
            summed=self.head_norms,  # each rank has its heads' part of the gradient
        )
        root = TensorParallelTraffic(
            forward=(sums(1),) if self.table_rows < self.vocabulary else (),
            backward=(side_by_side, sums(1)) if self.head_rows < self.vocabulary else (),
        )
        return {KIND: block, ROOT: root}

    def _end(self, names: set[str]) -> EndParameters:
        """Return the named root parameters, used at one end of the model only."""
        sizes = self._before | self._after
        found = {name: size for name, size in sizes.items() if name in names}
        return EndParameters(names=tuple(found), trainable=sum(found.values()))

    def _put_off_elements(self) -> int:
        """Return the elements per token and block kept between the two parts of a split backward:
        the gradients of the outputs of each linear layer and norm."""
        inputs = self.attention_width + 2 * self.kv_heads * self.head_dim
        inner = (2 if self.gated else 1) * self.feed_forward * max(1, self.experts_used)
        return inputs + inner + 4 * self.hidden

    def _chunked_cross_entropy(self, tokens: int, element_bytes: int) -> Curve:
        """Return the bytes of chunked cross-entropy. Chunks double at points unknown here, so each
        point uses the chunk of the next."""
        sizes = tuple(2.0**exponent for exponent in range(MOST_SAMPLES.bit_length()))
        stream = 4 * tokens * self.hidden * element_bytes
        chunks = (
            compute_chunk_bytes(
                2 * int(size) * tokens,
                vocabulary=self.vocabulary,
                width=self.hidden,
                compute_bytes=element_bytes,
                on_gpu=True,
            )
            for size in sizes
        )
        return _points((n, n * stream + chunk) for n, chunk in zip(sizes, chunks))

    def _saved_elements(self) -> int:
        """Return the elements saved by autograd per token and block: the inputs of products, norms
        (in fp32, so twice in a narrow dtype) and activations. Attention scores are not saved;
        dropout masks are not counted."""
        qkv = self.attention_width + 2 * self.kv_heads * self.head_dim
        attention = self.hidden + 2 * qkv + 2 * self.attention_width
        inner = (4 if self.gated else 3) * self.feed_forward * max(1, self.experts_used)
        norms = 2 * 3 * self.hidden
        return attention + inner + norms + 2 * self.hidden


def make_decoder(config: Mapping[str, Any]) -> Decoder:
    """Return the decoder described by a `config.json`.

    Raises:
        InputError: the model type is not supported, or a size is missing.
    """
    kind = config.get("model_type", "")
    if kind not in GATED_FAMILIES and kind not in PLAIN_FAMILIES:
        raise InputError(
            f"there is no estimate for models of type '{kind}'",
            code="model-type-without-estimate",
            why=f"estimates know {', '.join(sorted((*GATED_FAMILIES, *PLAIN_FAMILIES)))}",
            fix=MEASURE_FIX,
        )
    return _gated(kind, config) if kind in GATED_FAMILIES else _plain(kind, config)


def _gated(kind: str, config: Mapping[str, Any]) -> Decoder:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    _check_heads(heads, kv_heads)
    head_dim = _size(config, "head_dim", HEAD_DIMS.get(kind) or hidden // heads)
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    extra = {"qwen3": 2 * head_dim, "olmo2": (heads + kv_heads) * head_dim}.get(kind, 0)
    tied = bool(config.get("tie_word_embeddings", kind in ("gemma", "smollm3")))
    experts = _size(config, "num_local_experts", 8) if kind == "mixtral" else 0
    return Decoder(
        hidden=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        gated=True,
        tied=tied,
        biased=(kind == "qwen2" or bias, bias and kind != "qwen2", mlp_bias),
        norm_bias=False,
        extra_norms=extra,
        head_norms=extra if kind == "qwen3" else 0,
        supports_tensor_parallel=kind in TENSOR_PARALLEL_FAMILIES,
        experts=experts,
        experts_used=_size(config, "num_experts_per_tok", 2) if experts else 0,
    )


def _plain(kind: str, config: Mapping[str, Any]) -> Decoder:
    names = {
        "gpt2": ("n_embd", "n_layer", "n_head", "n_inner"),
        "bloom": ("hidden_size", "n_layer", "n_head", ""),
        "opt": ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"),
        "gpt_neox": (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        ),
    }[kind]  # fmt: skip
    hidden, layers, heads = (_size(config, name) for name in names[:3])
    feed_forward = _size(config, names[3], 4 * hidden)
    positions = _size(config, "n_positions", 1024) if kind == "gpt2" else 0
    if kind == "opt":
        _check_opt(config, hidden)
        # The table has two more rows than positions.
        positions = _size(config, "max_position_embeddings", 2048) + 2
    return Decoder(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        feed_forward=feed_forward,
        vocabulary=_size(config, "vocab_size"),
        gated=False,
        tied=bool(config.get("tie_word_embeddings", kind != "gpt_neox")),
        biased=(True, True, True),
        norm_bias=True,
        positions=positions,
        root_norms=2 if kind == "bloom" else 1,  # with a norm after the embedding
        supports_tensor_parallel=kind in TENSOR_PARALLEL_FAMILIES,
        divides_table=kind not in UNDIVIDED_EMBEDDING_FAMILIES,
        dropout=_drops(kind, config),
    )


def _drops(kind: str, config: Mapping[str, Any]) -> bool:
    """Return True if the blocks of a divisible family end with dropout."""
    name, default = {"gpt2": ("resid_pdrop", 0.1)}.get(kind, ("hidden_dropout", 0.0))
    return config.get(name, default) not in (None, 0)


def _check_opt(config: Mapping[str, Any], hidden: int) -> None:
    """Refuse OPT variants such as OPT-350m, with narrower embeddings or different norms."""
    for name, usual in (
        ("word_embed_proj_dim", hidden),
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
    ):
        found = config.get(name)
        if found is not None and found != usual:
            raise InputError(
                f"there is no estimate for OPT with '{name}' {found}",
                code="model-config-without-estimate",
                why=f"its parameters are counted for {usual}, as most sizes have it",
                fix=MEASURE_FIX,
            )


def make_llama_like(parameters: float, vocabulary: int = 32_000) -> Decoder:
    """Return a Llama-like decoder with about `parameters` parameters: depth and width grow
    together, heads are 128 wide, the feed-forward is 2.7 times the hidden size.

    Raises:
        InputError: the size is far below or above the range of the family.
    """
    every = (_llama(hidden, vocabulary) for hidden in range(2 * 128, 161 * 128, 128))
    sizes = {decoder.parameters: decoder for decoder in every}
    nearest = min(sizes, key=lambda size: abs(size - parameters))
    if abs(nearest - parameters) > parameters / 3:
        million = 1 <= parameters < 1e9
        size = f"{parameters / 1e6:g} M" if million else f"{parameters / 1e9:g} B"
        smallest, largest = f"{min(sizes) / 1e6:.0f}M", f"{max(sizes) / 1e9:.0f}B"
        raise InputError(
            f"no model of {size} parameters is shaped like a Llama",
            code="no-llama-of-size",
            fix=f"give a size from {smallest} to {largest}, or the config.json of a model",
        )
    return sizes[nearest]


def _llama(hidden: int, vocabulary: int) -> Decoder:
    layers = max(2, min(96, round(hidden / 128)))
    return Decoder(
        hidden=hidden,
        layers=layers,
        heads=hidden // 128,
        kv_heads=hidden // 128,
        head_dim=128,
        feed_forward=round(hidden * 2.6875 / 128) * 128,
        vocabulary=vocabulary,
        gated=True,
        tied=False,
        biased=(False, False, False),
        norm_bias=False,
        supports_tensor_parallel=True,
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size, or the default if missing or null."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise InputError(
            f"the model's configuration does not say its '{name}'",
            code="model-config-incomplete",
            fix=f"give `{name}` in the configuration",
        )
    most = MOST_LAYERS if "layer" in name else LARGEST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise InputError(
            f"'{name}' of the model's configuration must be a whole number from 1 to {most}, it "
            f"is {show_value(value)}",
            code="model-config-out-of-range",
            fix=f"correct `{name}` in the configuration",
        )
    return value


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise InputError(
            f"{heads} attention heads cannot share {kv_heads} heads of keys and values evenly",
            code="heads-not-shared-evenly",
            fix="correct `num_key_value_heads` in the configuration",
        )


def _points(found: Iterable[tuple[float, float]]) -> Curve:
    """Build a curve of bytes by samples, without points beyond the memory of any device."""
    points = list(found)
    kept = [(size, value) for size, value in points if value <= LARGEST]
    if not kept:
        raise _too_large(points[0][1])
    sizes, values = zip(*kept)
    return Curve(sizes=sizes, values=values)


def _line(per_sample: float, start: float = 0.0) -> Curve:
    """Build a line of bytes by samples: `start` plus `per_sample` each."""
    most = (LARGEST - start) / per_sample if per_sample > 0 else MOST_SAMPLES
    if most < 1:
        raise _too_large(start + per_sample)
    sizes = (1.0, min(most, float(MOST_SAMPLES))) if most > 1 else (1.0,)
    return Curve(sizes=sizes, values=tuple(start + per_sample * n for n in sizes))


def _too_large(size: float) -> InputError:
    return InputError(
        f"one sample of this model would take {show_bytes(int(size))}",
        code="sample-too-large",
        fix="shorten the sequence, or choose a smaller model",
    )
