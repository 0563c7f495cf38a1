"""FLOPs are counted as they run: equal to the analytic count, and to torch's where it is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gpumix.hardware.emulation.pacer import Pacer

BATCH, LENGTH, WIDTH, HEADS, INNER = 2, 16, 32, 4, 64
TOKENS = BATCH * LENGTH
PROJECTIONS = 2 * TOKENS * WIDTH * (3 * WIDTH + WIDTH + 2 * INNER)
SCORES = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH  # q @ k and scores @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x):
        q, k, v = (
            part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.mlp(x)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x():
    return torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


def counted(run):
    with Pacer(1e18) as pacer:
        run()
        return pacer.timeline.flops


def test_a_block_forward_and_backward_is_the_analytic_count(block, x):
    assert counted(lambda: block(x)) == PROJECTIONS + SCORES
    # The flash kernel's backward computes the scores once more: five products for two.
    backward = 2 * PROJECTIONS + SCORES // 2 * 5
    assert counted(lambda: block(x).sum().backward()) == PROJECTIONS + SCORES + backward


def test_a_block_equals_torchs_count_where_torch_counts_attention(block, x):
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as torchs:
            block(x).sum().backward()
        ours = counted(lambda: block(x).sum().backward())
    assert ours == torchs.get_total_flops() == 3 * (PROJECTIONS + SCORES)


@pytest.mark.parametrize("without_graph", [torch.no_grad, torch.inference_mode])
def test_modes_without_a_graph_count_the_same(block, x, without_graph):
    with without_graph():
        assert counted(lambda: block(x)) == PROJECTIONS + SCORES


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_counts_a_second_forward(block, x, reentrant):
    plain = counted(lambda: block(x).sum().backward())
    with set_checkpoint_early_stop(False):
        again = counted(lambda: checkpoint(block, x, use_reentrant=reentrant).sum().backward())
    assert again == plain + PROJECTIONS + SCORES


def test_results_are_the_same_to_the_bit(block, x):
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    with Pacer(1e18):
        found = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_operations_in_place_and_into_a_result_count():
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.zeros(3, 7)
    assert counted(lambda: c.addmm_(a, b)) == 2 * 3 * 5 * 7
    assert counted(lambda: torch.mm(a, b, out=c)) == 2 * 3 * 5 * 7


def test_grouped_attention_heads_count_as_many_as_the_queries():
    q, kv = torch.randn(2, 8, 16, 4), torch.randn(2, 2, 16, 4)
    attention = nn.functional.scaled_dot_product_attention
    assert counted(lambda: attention(q, kv, kv, enable_gqa=True)) == 4 * 2 * 8 * 16 * 16 * 4


def test_a_mixtures_experts_count_each_row_once():
    rows, experts = torch.ones(10, 8).bfloat16(), torch.ones(3, 8, 16).bfloat16()
    ends = torch.tensor([3, 5, 10], dtype=torch.int32)
    assert counted(lambda: torch._grouped_mm(rows, experts, offs=ends)) == 2 * 10 * 8 * 16


def test_operations_without_a_formula_are_free():
    assert counted(lambda: torch.randn(100).sin().sum()) == 0


def test_torchs_own_table_stays_as_it_was():
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry
    assert torch.ops.aten.addmm_ not in flop_registry
