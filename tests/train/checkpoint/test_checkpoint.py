"""A run taken up again: under another plan, on another number of ranks, to the bit."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gpumix.schema import files
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    ALONE,
    UNEVEN,
    adamw,
    assert_same,
    blank,
    checkpointer,
    model_values,
    odd,
    optimizer_values,
    train,
    trained,
    whole,
)
from helpers.training.reference import Share, engine_for, own_rows, random_shares

OTHERS = {
    1: ALONE,
    2: [Share(1, 1, 0), Share(5, 2, 1)],
    3: [Share(2, 2, 5), Share(4, 3, 1), Share(0, 0, 2)],
    4: [Share(0, 0, 1), Share(3, 3, 1), Share(3, 1, 1), Share(0, 0, 1)],
}


def _save(folder, shares, more_steps=0):
    engine, optimizer = trained(shares)
    path = checkpointer(folder).save(
        2, engine, optimizer, cursor={"position": 12}, extra={"note": {1: [0.1, None]}}
    )
    saved = model_values(engine), optimizer_values(engine, optimizer)
    losses = train(engine, optimizer, shares, range(2, 2 + more_steps))
    return path, *saved, losses, model_values(engine)


def _load(folder, shares, more_steps=0):
    engine, optimizer = blank(shares)
    state = checkpointer(folder).load(engine, optimizer)
    loaded = model_values(engine), optimizer_values(engine, optimizer)
    steps = engine.steps
    losses = train(engine, optimizer, shares, range(2, 2 + more_steps))
    return state, *loaded, losses, model_values(engine), steps


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(2))
def test_any_plan_loads_any_other(tmp_path, seed):
    rng = random.Random(seed)
    saved = run_ranks(_save, 4, tmp_path, random_shares(4, rng))
    model, optimizer = saved[0][1], whole([rank[2] for rank in saved])
    for world in (1, 2, 3, 4):
        loaded = run_ranks(_load, world, tmp_path, random_shares(world, rng))
        for rank in loaded:
            assert_same(rank[1], model)
        assert_same(whole([rank[2] for rank in loaded]), optimizer)


LAYOUTS = {
    "stage 0": (UNEVEN, {"zero_stage": 0}),
    "stage 1": (UNEVEN, {"zero_stage": 1}),
    "stage 2 on the host": (UNEVEN, {"zero_stage": 2, "on_host": (0, 2)}),
    "stage 3 inside hosts": (
        [Share(2, 1, n, host="ab"[n > 2]) for n in (1, 2, 3, 1)],
        {"zero_stage": 3, "sharding": "host"},
    ),
    "parameters on the host": (UNEVEN, {"parameters_on": "host"}),
}


def _save_as_each(folder, names):
    found = {}
    for name in names:
        shares, settings = LAYOUTS[name]
        engine, optimizer = trained(shares, **settings)
        checkpointer(folder / name).save(2, engine, optimizer, cursor={"position": 12}, extra={})
        found[name] = model_values(engine), _first_copy(engine, optimizer)
    return found


def _first_copy(engine, optimizer):
    """What makes the whole together with the other ranks: nothing for a second copy of it."""
    values = optimizer_values(engine, optimizer)
    return values if engine._parts.layout.first else None


def _load_as_each(folder, names):
    found = {}
    for saved, other in product(names, names):
        shares, settings = LAYOUTS[other]
        engine, optimizer = blank(shares, **settings)
        checkpointer(folder / saved).load(engine, optimizer)
        batch = {"ids": torch.zeros(6, 8, dtype=torch.long)}
        loss = engine.evaluate(own_rows(batch, shares, engine.comm.rank)).item()
        found[saved, other] = model_values(engine), _first_copy(engine, optimizer), loss
    return found


@pytest.fixture(scope="module")
def by_layout(request, tmp_path_factory):
    """By rank: what is saved as each layout, and what each of them loads of that."""
    folder, names = tmp_path_factory.mktemp("layouts"), list(chosen(request, LAYOUTS, by="name"))
    saved = run_ranks(_save_as_each, 4, folder, names)
    return saved, run_ranks(_load_as_each, 4, folder, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", left_out(LAYOUTS, ("stage 1", "stage 2 on the host")))
def test_any_stage_loads_any_other(by_layout, name):
    saved = [rank[name] for rank in by_layout[0]]
    others = by_layout[0][0].keys()
    optimizer = whole([values for _, values in saved if values])
    losses = set()
    for other in others:
        loaded = [rank[name, other] for rank in by_layout[1]]
        for model, _, loss in loaded:
            assert_same(model, saved[0][0])
            losses.add(round(loss, 5))
        assert_same(whole([values for _, values, _ in loaded if values]), optimizer)
    assert len(losses) == 1


def test_training_goes_on_as_if_never_interrupted(tmp_path):
    uninterrupted = run_ranks(_save, 4, tmp_path, UNEVEN, 3)[0]
    for world in (2, 4):
        resumed = run_ranks(_load, world, tmp_path, OTHERS[world], 3)[0]
        np.testing.assert_allclose(resumed[3], uninterrupted[3], rtol=1e-6)
        for name, values in uninterrupted[4].items():
            distance = np.linalg.norm(resumed[4][name] - values)
            assert distance <= 1e-6 * np.linalg.norm(values), name


def test_what_is_kept_beside_tensors(tmp_path):
    path = _save(tmp_path, ALONE)[0]
    state, *_, steps = _load(tmp_path, ALONE)
    assert path == state.path == tmp_path / "step-00000002"
    assert (state.step, state.cursor, steps) == (2, {"position": 12}, 2)
    assert state.extra == {"note": {"1": [0.1, None]}}


def test_a_run_folder_or_a_checkpoint_may_be_named(tmp_path):
    path = _save(tmp_path / "checkpoints", ALONE)[0]
    for source in (tmp_path, tmp_path / "checkpoints", path):
        engine, optimizer = blank(ALONE)
        state = checkpointer(tmp_path / "elsewhere").load(engine, optimizer, source=source)
        assert state.path == path


def test_the_model_alone_for_evaluation(tmp_path):
    _, model, *_ = _save(tmp_path, ALONE)
    engine, _ = blank(ALONE)
    checkpointer(tmp_path).load(engine, None)
    assert_same(model_values(engine), model)


def test_before_the_first_step(tmp_path):
    engine, optimizer = trained(ALONE, steps=0)
    checkpointer(tmp_path).save(0, engine, optimizer, cursor={})
    other, fresh = blank(ALONE)
    checkpointer(tmp_path).load(other, fresh)
    assert not fresh.state
    assert_same(model_values(other), model_values(engine))


def numbers(parameters):
    """An optimizer whose states are numbers of Python's."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def count(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) / 3
                state["odd"] = state["count"] % 2 == 1
                state["unused"] = None

    optimizer.register_step_post_hook(count)
    return optimizer


def test_optimizer_states_keep_their_types(tmp_path):
    engine, optimizer = trained(ALONE, make=numbers)
    checkpointer(tmp_path).save(2, engine, optimizer, cursor={})
    other, fresh = blank(ALONE, make=numbers)
    checkpointer(tmp_path).load(other, fresh)
    state = other.optimizer_state(fresh)["blocks.0.gain"]
    assert state == {"count": 2, "decay": 1 / 9, "odd": False}
    assert [type(v) for v in state.values()] == [int, float, bool]


def unlike_groups(parameters):
    """One keeps more, one keeps nothing."""
    first, second, third, *others = parameters
    momentum = [{"params": [first], "momentum": 0.0}, {"params": [second, third], "momentum": 0.9}]
    optimizer = torch.optim.SGD([*momentum, {"params": others, "momentum": 0.5}], lr=0.01)

    def count(optimizer, args, kwargs):
        for p in (second, third):
            optimizer.state[p].setdefault("count", torch.tensor(0.0)).add_(1)

    optimizer.register_step_post_hook(count)
    return optimizer


def test_groups_may_keep_unlike_states(tmp_path):
    engine, optimizer = trained(ALONE, make=unlike_groups)
    kept = [len(states) for states in engine.optimizer_state(optimizer).values()]
    used = [name for name in engine.trained_names() if "unused" not in name]
    assert kept == [2, 2] + [1] * (len(used) - 3)
    checkpointer(tmp_path).save(2, engine, optimizer, cursor={})
    other, fresh = blank(ALONE, make=unlike_groups)
    checkpointer(tmp_path).load(other, fresh)
    assert_same(
        whole([optimizer_values(other, fresh)]), whole([optimizer_values(engine, optimizer)])
    )


def _save_without_empty_pieces(folder, shares):
    """As an optimizer does that keeps no state for empty tensors."""
    engine, optimizer = trained(shares)
    for p in engine.parameters():
        if not p.numel():
            optimizer.state.pop(p, None)
    checkpointer(folder).save(2, engine, optimizer, cursor={})


@pytest.mark.extended
def test_a_rank_learns_the_step_of_what_it_never_had(tmp_path):
    run_ranks(_save_without_empty_pieces, 4, tmp_path, UNEVEN)
    for world, shares in OTHERS.items():
        for rank in run_ranks(_load, world, tmp_path, shares):
            steps = {n: float(v) for n, v in rank[2].items() if n.endswith(".step")}
            assert len(steps) == 13 and set(steps.values()) == {2.0}


def test_bf16_keeps_masters_and_fp16_its_loss_scale(tmp_path):
    engine = engine_for(odd, ALONE, compute_dtype="fp16")
    optimizer = adamw(engine.parameters())
    engine.scaler.load_state_dict({"scale": 512.0, "good_steps": 7})
    checkpointer(tmp_path).save(1, engine, optimizer, cursor={})
    other, fresh = blank(ALONE, compute_dtype="fp16")
    checkpointer(tmp_path).load(other, fresh)
    assert other.scaler.state_dict() == {"scale": 512.0, "good_steps": 7}
    full, _ = blank(ALONE)  # frozen parameters come from fp16
    checkpointer(tmp_path).load(full, None)
    assert full.scaler.scale == 1.0
    assert full.state_dict()["blocks.0.frozen"].dtype == torch.float32
    for name, value in engine.state_dict().items():
        assert torch.equal(full.state_dict()[name], value.to(full.state_dict()[name].dtype))


# -- the folder ------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept(tmp_path):
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path, keep=2)
    assert saver.latest() is None
    for step in (5, 10, 15):
        saver.save(step, engine, optimizer, cursor={})
    assert names(tmp_path) == ["step-00000010", "step-00000015"]
    assert saver.latest() == tmp_path / "step-00000015"


def test_newest_is_what_was_saved_last_not_the_highest_step(tmp_path):
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path, keep=2)
    for step in (10, 20):
        saver.save(step, engine, optimizer, cursor={})
    saver.load(engine, optimizer, source=tmp_path / "step-00000010")
    saver.save(15, engine, optimizer, cursor={})
    assert names(tmp_path) == ["step-00000015", "step-00000020"]
    assert saver.latest() == tmp_path / "step-00000015"


def test_a_step_may_be_saved_again(tmp_path):
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path, keep=2)
    for note in ("first", "second"):
        saver.save(10, engine, optimizer, cursor={}, extra={"note": note})
    assert names(tmp_path) == ["step-00000010"]
    assert saver.load(engine, optimizer).extra == {"note": "second"}


def test_what_a_crash_left_is_removed_by_the_next_save(tmp_path):
    engine, optimizer = trained(ALONE)
    (tmp_path / "step-00000007.part").mkdir()
    (tmp_path / "step-00000007.part" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-00000003.former.part").mkdir()
    (tmp_path / "step-00000002.gone.part").mkdir()
    (tmp_path / "notes.part").mkdir()  # not ours
    checkpointer(tmp_path).save(8, engine, optimizer, cursor={})
    assert names(tmp_path) == ["notes.part", "step-00000008"]


@pytest.mark.parametrize("finished", [False, True], ids=["then nothing", "then saved again"])
def test_a_crash_between_an_old_and_a_new_one_of_a_step_loses_neither(
    tmp_path, monkeypatch, finished
):
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path, keep=2)
    saver.save(10, engine, optimizer, cursor={}, extra={"note": "first"})
    move = files.move

    def crash(path, name):
        if path.name == "step-00000010.part":
            raise KeyboardInterrupt
        return move(path, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "move", crash)
        saver.save(10, engine, optimizer, cursor={}, extra={"note": "second"})
    assert names(tmp_path) == ["step-00000010.former.part", "step-00000010.part"]
    if finished:
        saver.save(11, engine, optimizer, cursor={}, extra={"note": "third"})
        assert names(tmp_path) == ["step-00000010", "step-00000011"]
    source = None if not finished else tmp_path / "step-00000010"
    assert saver.load(engine, optimizer, source=source).extra == {"note": "first"}


def test_other_readers_of_the_format_can_read_it(tmp_path):
    path, model, optimizer, *_ = _save(tmp_path, ALONE)
    dcp_to_torch_save(path, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    del model["head.weight"]  # the embedding's other name
    assert_same({name: tensor.numpy() for name, tensor in found["model"].items()}, model)
    moment = found["optimizer"]["blocks.0.linear.weight"]["exp_avg"]
    expected = optimizer["blocks.0.linear.weight.exp_avg"][1]
    assert np.array_equal(moment.reshape(-1).numpy(), expected)
