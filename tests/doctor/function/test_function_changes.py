"""What changes do to a function that trains."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpumix.doctor.function.changing import DelayedReads, apply_changes
from gpumix.doctor.function.patches import Patches, find_user_line
from gpumix.doctor.function.watching.roots import RootModules


@pytest.fixture
def patches():
    with Patches() as made:
        yield made


def loader(**arguments) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(32)), **arguments)


def place_of_loaders() -> str:
    """The line in `loader` above."""
    file = find_user_line().rpartition(":")[0]
    return f"{file}:{inspect.getsourcelines(loader)[1] + 1}"


def test_workers_of_the_loader_of_one_line(patches):
    apply_changes({"num_workers": {place_of_loaders(): 2}}, patches)
    assert (loader().num_workers, loader().persistent_workers) == (2, True)
    assert DataLoader(TensorDataset(torch.arange(4))).num_workers == 0


def test_a_loader_without_workers(patches):
    """What is for workers only is left out."""
    apply_changes({"num_workers": {place_of_loaders(): 0}}, patches)
    made = loader(num_workers=3, prefetch_factor=4, persistent_workers=True, timeout=5)
    assert made.num_workers == 0 and len(list(made)) == 32


class ThreadsOfTorch(TensorDataset):
    def __getitem__(self, index):
        return torch.tensor([torch.get_num_threads()])


def test_workers_set_their_own_threads(patches):
    threads = torch.get_num_threads()
    try:
        apply_changes({"threads": 3}, patches)
        read = DataLoader(ThreadsOfTorch(torch.arange(4)), num_workers=1)
        assert torch.cat(list(read)).unique().tolist() == [1]
        assert torch.get_num_threads() == 3
    finally:
        patches.__exit__(None, None, None)
        torch.set_num_threads(threads)


def test_batches_and_pinned_memory_together(patches):
    changes = {"batch_size": {place_of_loaders(): 8}, "pinned": True}
    apply_changes(changes, patches)
    made = loader(batch_size=4, shuffle=True)
    assert (made.batch_size, made.pin_memory) == (8, True)


def optimizer(kind: type[torch.optim.Optimizer], **arguments) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(2))], lr=0.1, **arguments)


def test_optimizers_of_some_lines_are_fused(patches):
    """But for those that cannot be."""
    file = find_user_line().rpartition(":")[0]
    apply_changes({"fused": (f"{file}:{inspect.getsourcelines(optimizer)[1] + 1}",)}, patches)
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        assert optimizer(kind).defaults["fused"] is True
    assert not optimizer(torch.optim.SGD, foreach=True).defaults["fused"]
    assert not torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).defaults["fused"]


def descend(kind: type[torch.optim.Optimizer], anew: bool) -> list[float]:
    """Losses of a few steps; with `anew`, an optimizer for each."""
    weight, losses, made = nn.Parameter(torch.ones(2)), [], None
    for _ in range(4):
        if anew or made is None:
            made = kind([{"params": [weight], "lr": 0.1}])  # for each
        loss = weight.square().sum()
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])  # one fills its state
def test_an_optimizer_takes_over_from_the_one_before(patches, kind):
    once, anew = descend(kind, anew=False), descend(kind, anew=True)
    assert once != pytest.approx(anew)
    file = find_user_line().rpartition(":")[0]
    first = inspect.getsourcelines(descend)
    line = first[1] + next(n for n, text in enumerate(first[0]) if "# for " + "each" in text)
    apply_changes({"reuse_optimizer": (f"{file}:{line}",)}, patches)
    assert descend(kind, anew=True) == pytest.approx(once)
    assert descend(kind, anew=True) == pytest.approx(once)  # other parameters, of which it knows no


def test_what_was_computed_again_is_kept(patches):
    """Gradients are the same; the block runs once instead of twice."""
    calls = []

    class Block(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x.sin() * x

    def gradient() -> torch.Tensor:
        x = torch.linspace(0, 1, 4, requires_grad=True)
        checkpoint(Block(), x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        return x.grad

    again, computed = gradient(), len(calls)
    calls.clear()
    apply_changes({"recompute": False}, patches)
    assert torch.equal(gradient(), again)
    assert (computed, len(calls)) == (2, 1)


def rooted(changes: dict, patches: Patches, module: nn.Module, *args, **kwargs):
    """The module called, as that which is trained."""
    roots = RootModules(apply_changes(changes, patches))
    roots.find()
    try:
        return module(*args, **kwargs)
    finally:
        roots.found()


def test_autocast_around_what_is_trained(patches):
    inside = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            made = self.inner(x)
            inside.append(made.dtype)
            return {"logits": made}

    result = rooted({"autocast": "bf16"}, patches, Model(), torch.ones(1, 4))
    assert inside == [torch.bfloat16] and result["logits"].dtype == torch.float32


def test_a_model_in_fp64_computes_in_fp32(patches):
    """Its callers and its optimizer have what they had; the parameters are the same objects."""
    inside = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4).double()

        def forward(self, x, *, scale):
            inside.extend([x.dtype, scale.dtype, torch.ones(1).dtype])
            return {"logits": self.inner(x) * scale}

    model, x = Model(), torch.ones(1, 4, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model(x, scale=x)["logits"].detach()
    inside.clear()
    torch.set_default_dtype(torch.float64)
    try:
        result = rooted({"fp32": True}, patches, model, x, scale=x)["logits"]
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert inside == [torch.float32] * 3 and result.dtype == torch.float64
    assert torch.allclose(result, expected, atol=1e-6)
    result.sum().backward()
    before = model.inner.weight.detach().clone()
    sgd.step()
    assert before.dtype == torch.float32 and not torch.equal(before, model.inner.weight)


def test_attention_of_what_is_trained(patches):
    chosen = []

    class Model(nn.Linear):
        def set_attn_implementation(self, name):
            chosen.append(name)

    rooted({"attention": "sdpa"}, patches, Model(2, 2), torch.ones(1, 2))
    assert chosen == ["sdpa"]


def test_what_is_not_trained_is_left_alone(patches):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    rooted({"autocast": "bf16"}, patches, frozen, torch.ones(1, 2))
    judged = nn.Linear(2, 2).eval()
    rooted({"autocast": "bf16"}, patches, judged, torch.ones(1, 2))
    assert "forward" not in vars(frozen) and "forward" not in vars(judged)


def test_settings_that_are_ignored(patches):
    threads = torch.get_num_threads()
    try:
        apply_changes({"threads": 2, "anomaly": False, "deterministic": False}, patches)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        with torch.autograd.detect_anomaly():
            assert not torch.is_anomaly_enabled()
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        patches.__exit__(None, None, None)
        torch.set_num_threads(threads)


def test_prints_are_swallowed(patches, capsys):
    apply_changes({"quiet": True}, patches)
    print("nobody reads this")
    print("nor this", file=sys.stderr)
    sys.stdout.write("nor that")
    told = capsys.readouterr()
    assert told.out == told.err == ""


def test_what_is_printed_is_not_even_written_out(patches, tmp_path):
    """A tensor's text takes longer than to write it; what goes into a file is the user's."""

    class Unread:
        def __str__(self) -> str:
            raise AssertionError("nobody reads it")

    apply_changes({"quiet": True}, patches)
    print(Unread())
    print(Unread(), file=sys.stderr)
    with (tmp_path / "log").open("w") as log:
        print("kept", file=log)
    assert (tmp_path / "log").read_text() == "kept\n"


@dataclass
class Sent:
    """A copy that is there when it is asked for."""

    tensor: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.tensor


def test_values_come_one_call_late(patches):
    late = DelayedReads(lambda tensor: tensor.dim() == 1, lambda tensor: Sent(tensor.clone()))
    patches.replace(torch.Tensor, "tolist", late.reading)
    read = []
    for n in range(4):
        read.append(torch.full((1,), n).tolist())
        assert torch.full((1,), 10 + n).tolist() == [max(10, 9 + n)]  # each line has its own
    assert read == [[0], [0], [1], [2]]
    assert torch.zeros(1, 1).tolist() == [[0.0]]  # does not lie there


def test_what_a_library_reads_by_itself_comes_at_once(patches):
    """Its lines have no names: the loss would be taken for the norm that was read before it."""
    late = DelayedReads(lambda tensor: True, lambda tensor: Sent(tensor.clone()))
    patches.replace(torch.Tensor, "item", late.reading)
    with ThreadPoolExecutor(1) as library:
        for n in range(3):
            assert library.submit(torch.tensor(n).item).result() == n
