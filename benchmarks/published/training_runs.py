"""Published training runs on equal GPUs in bf16, and what is estimated of them from datasheets.

Tokens per second and GPU of runs by others (torchtitan 2024-12, MosaicML's LLM Foundry, and IBM's
and Meta's post on FSDP): most train MPT shapes, taken as GPT-2 configurations. Each is planned in
one stage, as these ran, on single GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import Decoder, make_decoder
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.schema.job.search_space import EVERYTHING

VOCABULARY = 50_432
H100, A100, A100_40 = "h100-80gb-sxm", "a100-80gb-sxm", "a100-40gb-sxm"

MPT = {  # width, layers, heads
    "mpt-125m": (768, 12, 12),
    "mpt-1b": (2048, 24, 16),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 48, 56),
    "mpt-70b": (8192, 80, 64),
}
LLAMA = {  # width, layers, heads, key-value heads, width of the MLP, vocabulary
    "llama3-8b": (4096, 32, 32, 8, 14_336, 128_256),
    "llama2-7b": (4096, 32, 32, 32, 11_008, 32_000),
}


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        tokens_per_s: of each GPU.
        held_out: not looked at where constants were set.
    """

    model: str
    sequence_length: int
    card: str
    hosts: int
    link: str | None
    batch: int
    tokens_per_s: float
    held_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} on {8 * self.hosts}x {self.card}, batch {self.batch}"

    @property
    def architecture(self) -> str:
        return self.card.split("-")[0]

    @cached_property
    def ratio(self) -> float:
        """Estimated over published tokens per second."""
        shape = make_shape(self.model)
        profile = estimate_profile(
            lambda dtype: shape.model(self.sequence_length, dtype, self.model),
            parse_cluster(f"{self.hosts} hosts of 8x {self.card}", "bf16", self.link),
            sequence_length=self.sequence_length,
            precision="bf16",
        )
        request = PlanRequest(global_batch=self.batch, space=EVERYTHING.in_one_stage())
        found = get_prediction(plan_fastest(profile, request))
        return found.tokens_per_s / (8 * self.hosts) / self.tokens_per_s


RUNS = (
    Run("llama3-8b", 8192, H100, 1, None, 16, 6_667),
    Run("mpt-7b", 2048, H100, 1, None, 48, 10_643),
    Run("mpt-1b", 2048, H100, 1, None, 112, 45_455, held_out=True),
    Run("mpt-13b", 2048, H100, 1, None, 16, 4_792, held_out=True),
    Run("mpt-30b", 2048, H100, 1, None, 504, 2_002),
    Run("mpt-70b", 2048, H100, 8, "ib-ndr", 2_048, 1_039, held_out=True),
    Run("mpt-7b", 2048, A100, 1, None, 96, 4_641),
    Run("mpt-1b", 2048, A100, 1, None, 448, 20_513, held_out=True),
    Run("mpt-30b", 2048, A100, 1, None, 504, 916),
    Run("mpt-125m", 1024, A100, 1, None, 1_024, 156_468, held_out=True),
    Run("mpt-13b", 2048, A100_40, 1, None, 512, 1_668, held_out=True),
    Run("mpt-7b", 2048, A100_40, 1, None, 384, 3_679),
    Run("mpt-70b", 2048, A100_40, 8, "ib-hdr", 128, 276, held_out=True),
    Run("llama2-7b", 4096, A100, 16, "ib-hdr", 256, 3_700),
)


def make_shape(model: str) -> Decoder:
    """The sizes of a model."""
    if model in MPT:
        width, layers, heads = MPT[model]
        return make_decoder(
            {
                "model_type": "gpt2",
                "n_embd": width,
                "n_layer": layers,
                "n_head": heads,
                "n_positions": 8192,
                "vocab_size": VOCABULARY,
            }
        )
    width, layers, heads, kv_heads, inner, vocabulary = LLAMA[model]
    return make_decoder(
        {
            "model_type": "llama",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "tie_word_embeddings": False,
        }
    )


if __name__ == "__main__":
    for run in RUNS:
        print(f"{run.name}: {run.ratio:.3f}")
