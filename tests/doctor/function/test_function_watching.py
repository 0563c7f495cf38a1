"""What is seen of a function while it trains; the functions are of this file, by the line."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpumix.data.loader import Loader
from gpumix.data.workers.autotune import MEASURED_STEPS, Limit
from gpumix.doctor.function.observations import Observations, WindowLength
from gpumix.doctor.function.patches import Patches
from gpumix.doctor.function.watching.lines import WaitingLines
from gpumix.doctor.function.watching.loaders import get_batch_size
from gpumix.doctor.function.watching.roots import RootModules
from gpumix.doctor.function.watching.steps import StepCounter, WindowDone
from gpumix.doctor.function.watching.watch import FunctionWatch

WARM_UP, STEPS = 2, 4
FETCHING_S = 0.01


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(FETCHING_S / 8)
        return super().__getitem__(index)


def data(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return kind(torch.randn(64, 4, generator=generator))


def line_of(text: str) -> str:
    """The place of the one line of this file that holds `text`."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"test_function_watching.py:{number}"


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def seen_of(
    train: Callable[[], None], foreign=lambda tensor: tensor.is_cuda, gpu=False, samples=False
) -> Observations:
    """As a window's process sees it."""
    found: list[Observations] = []
    with Patches() as patches:
        watch = FunctionWatch(roots := RootModules([]), WaitingLines(foreign), samples=samples)
        watch.install(patches, gpu=gpu)
        steps = StepCounter(
            WindowLength(WARM_UP, STEPS),
            settled=watch.loaders.settled,
            begins=lambda: (roots.found(), watch.begin()),
            ends=lambda: found.append(watch.end(steps)),
            leaves=lambda: None,
        )
        for hook in (watch.stepped, steps.step):
            patches.callback(register_optimizer_step_post_hook(hook).remove)
        patches.callback(roots.end)
        roots.find()
        with pytest.raises(WindowDone):
            train()
    return found[0]


def fit(loader, model: nn.Module, beside: Callable[[torch.Tensor], object] = id) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)  # made here
    while True:
        for (x,) in loader:
            loss = model(x).square().mean()  # called here
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            beside(loss)


def test_steps_losses_and_what_is_trained():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    again = nn.Linear(4, 1)
    again.load_state_dict(model.state_dict())
    seen = seen_of(lambda: fit(DataLoader(data(), batch_size=8), model))
    assert seen.steps == STEPS and seen.seconds > 0 and not seen.cuda
    expected, sgd = [], torch.optim.SGD(again.parameters(), lr=0.01)
    for (x,), _ in zip(DataLoader(data(), batch_size=8), range(WARM_UP + STEPS)):
        loss = again(x).square().mean()
        expected.append(loss.item())
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    assert seen.losses == pytest.approx(expected)
    (one,) = seen.models
    assert one.name == "Linear" and one.fp32 and not one.compiled and not one.eager_attention
    assert one.place.endswith(line_of("# called" + " here"))
    (optimizer,) = seen.optimizers
    assert (optimizer.name, optimizer.fused, optimizer.fusible) == ("SGD", False, True)
    assert optimizer.place.endswith(line_of("# made" + " here")) and optimizer.seconds > 0


def test_what_workers_read_ahead_is_no_measure_of_how_fast_they_read():
    """Eight batches are ready when the first step ends, more than are counted."""
    workers, ahead = 2, 4

    def train() -> None:
        again = True

        def rest(_: torch.Tensor) -> None:
            nonlocal again
            if again:
                time.sleep(3 * ahead * FETCHING_S)
            again = False

        loader = DataLoader(
            data(Slow), batch_size=8, num_workers=workers, prefetch_factor=ahead, sampler=[0] * 800
        )
        fit(loader, nn.Linear(4, 1), rest)

    seen = seen_of(train)
    # Some batch may be ready, and each worker in the middle of one.
    assert seen.seconds > (STEPS - 1 - workers) * FETCHING_S / workers
    assert seen.input_share > 0.1  # what a busy machine computes takes longer, too


def test_what_the_loop_waits_for():
    def train() -> None:
        fit(DataLoader(data(Slow), batch_size=8), nn.Linear(4, 1))  # slow data

    seen = seen_of(train)
    (loader,) = seen.loaders
    assert loader.place.endswith(line_of("# slow" + " data"))
    assert (loader.batch_size, loader.workers, loader.streams) == (8, 0, False)
    assert loader.samples == 8 * STEPS and seen.samples == 8
    assert loader.waited_s > STEPS * FETCHING_S  # sleep never ends early
    assert loader.cpu_s < loader.waited_s / 2  # it only waits
    assert 0.5 < seen.input_share <= 1.0


def slow_stream(rows: int = 8):
    """Batches of a generator that waits for what it reads."""
    while True:
        time.sleep(FETCHING_S)
        yield (torch.zeros(rows, 4),)


def test_a_loader_of_gpumix_is_waited_for_as_others_are():
    """Its warm-up goes on until it has found its setting."""

    class Rows(Slow):
        def __getitem__(self, index):
            return {"x": super().__getitem__(index)[0]}

    def train() -> None:
        with Loader(data(Rows), [8], 0, num_workers=1) as loader:  # own loader
            fit(((batch["x"],) for batch in loader), nn.Linear(4, 1))

    seen = seen_of(train)
    (loader,) = seen.loaders
    assert loader.place.endswith(line_of("# own" + " loader"))
    assert loader.tunes and not loader.streams and loader.workers == 1
    assert loader.samples == 8 * STEPS and loader.limit == Limit.UNKNOWN
    assert seen.input_share > 0.3  # the sleeps, but for what a busy machine computes
    assert len(seen.losses) > MEASURED_STEPS + STEPS
    assert seen.between_s < loader.waited_s


def test_what_passes_before_a_forward_pass_and_no_loader_has():
    """Neither what a loader is waited for nor what prints is told twice."""
    seen = seen_of(lambda: fit(slow_stream(), nn.Linear(4, 1)))
    assert seen.loaders == () and seen.input_share == 0.0
    assert STEPS * FETCHING_S < seen.between_s <= seen.seconds  # sleep never ends early
    seen = seen_of(lambda: fit(DataLoader(data(Slow), batch_size=8), nn.Linear(4, 1)))
    assert seen.loaders[0].waited_s > STEPS * FETCHING_S
    assert seen.between_s < seen.loaders[0].waited_s


class Parsed(TensorDataset):
    def __getitem__(self, index):
        time.sleep(FETCHING_S / 8)  # parsed
        return super().__getitem__(index)


def test_its_lines_are_sampled():
    """But for those of loaders and prints, which are told elsewhere."""
    switch_s = sys.getswitchinterval()

    class Slow:
        def __str__(self) -> str:
            time.sleep(2 * FETCHING_S)  # shown slowly
            return ""

    def beside(_: torch.Tensor) -> None:
        time.sleep(6 * FETCHING_S)  # most of it
        time.sleep(3 * FETCHING_S)  # some of it
        print(Slow())

    def train() -> None:
        fit(DataLoader(data(Parsed), batch_size=8), nn.Linear(4, 1), beside)

    seen = seen_of(train, samples=True)
    most, some, *others = seen.between
    assert most.place.endswith(line_of("# most" + " of it"))
    assert most.what.startswith("time.sleep(6 * FETCHING_S)")
    assert some.place.endswith(line_of("# some" + " of it"))
    assert most.calls > some.calls > sum(one.calls for one in others)
    assert sum(one.seconds for one in seen.between) == pytest.approx(seen.between_s)
    places = [one.place.rpartition(":")[2] for one in seen.between]
    for text in ("# shown" + " slowly", "FETCHING_S / 8" + ")  # parsed"):
        assert line_of(text).rpartition(":")[2] not in places
    assert sys.getswitchinterval() == switch_s
    assert seen_of(train).between == ()


def test_batches_of_several_backward_passes_are_waited_for_before_each():
    def train() -> None:
        model = nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        for n, (x,) in enumerate(slow_stream()):
            model(x).square().mean().backward()
            if n % 3 == 2:
                sgd.step()

    assert seen_of(train).between_s > 3 * STEPS * FETCHING_S


def test_what_is_computed_beside_forward_passes_is_part_of_the_step():
    """From a backward pass to the update, and in it: clipping, say."""

    def train() -> None:
        model = nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        while True:
            loss = model(torch.zeros(8, 4)).square().mean()
            time.sleep(FETCHING_S)
            loss.backward()
            time.sleep(FETCHING_S)
            sgd.step()

    seen = seen_of(train)
    assert seen.seconds > 2 * STEPS * FETCHING_S and seen.between_s < seen.seconds / 2


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_model_is_copied_as_it_was(copied):
    """What is noted of its calls does not go with it."""
    model = nn.Linear(4, 1)

    def beside(_: torch.Tensor) -> None:
        copied(model.eval())(torch.zeros(1, 4))
        model.train()

    fit_one = functools.partial(fit, DataLoader(data(), batch_size=8), model, beside)
    (one,) = seen_of(fit_one).models
    assert not one.compiled and "_compiled_call_impl" not in vars(model)


@pytest.mark.extended
def test_compiled_modules_keep_their_code():
    """Of both kinds; what is noted is noted outside of it."""
    whole, own = torch.compile(Sine(), backend="eager", fullgraph=True), Sine()
    own.compile(backend="eager", fullgraph=True)
    code = vars(own)["_compiled_call_impl"]
    for model in (whole, own):
        seen = seen_of(functools.partial(fit, slow_stream(), model))
        assert seen.models[0].compiled and seen.between_s > STEPS * FETCHING_S
    assert vars(own)["_compiled_call_impl"] is code
    assert "_compiled_call_impl" not in vars(whole) | vars(whole._orig_mod)


def test_what_the_function_lets_go_of():
    """A loader for each epoch, of one line, and an optimizer for each phase."""

    def train() -> None:
        model = nn.Linear(4, 1)
        for _ in range(9):
            sgd = torch.optim.SGD(model.parameters(), lr=0.01)
            for (x,) in DataLoader(data(), batch_size=32):
                model(x).square().mean().backward()
                sgd.step()
            del sgd

    seen = seen_of(train)
    (loader,) = seen.loaders
    assert seen.steps == STEPS and loader.samples == 32 * STEPS and loader.begun == STEPS / 2


def test_an_optimizer_made_anew_in_each_step():
    """With the time to make it; what its loop makes for other parameters is no such thing."""

    def train() -> None:
        model = nn.Linear(4, 1)
        for _ in range(WARM_UP + STEPS):
            adam = torch.optim.Adam(model.parameters())  # anew
            model(torch.ones(2, 4)).sum().backward()
            adam.step()
            del adam
            copied = copy.deepcopy(model)
            torch.optim.SGD(copied.parameters())

    seen = seen_of(train)
    (optimizer,) = seen.optimizers
    assert optimizer.place.endswith(line_of("# " + "anew"))
    assert (optimizer.name, optimizer.remade, seen.steps) == ("Adam", STEPS, STEPS)
    assert 0 < optimizer.seconds < seen.seconds
    assert (
        seen_of(lambda: fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1))).optimizers[0].remade
        == 0
    )


@pytest.mark.parametrize("anew", [False, True])
def test_optimizers_of_one_line_are_added_up(anew):
    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())

    def train() -> None:
        models = [nn.Linear(4, 1), nn.Linear(4, 1)]
        optimizers = [made(one) for one in models]
        while True:
            for model, sgd in zip(models, optimizers):
                model(torch.ones(2, 4)).sum().backward()
                (made(model) if anew else sgd).step()

    seen = seen_of(train)
    (optimizer,) = seen.optimizers
    # The step that ends it is the first model's.
    assert seen.steps == STEPS and optimizer.remade == (2 * STEPS if anew else 0)


def test_epochs_and_streams():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(4)] * 16)

    def train() -> None:
        fit(([x] for _ in range(9) for x in loader), nn.Linear(4, 1))

    loader = None

    def made() -> None:
        nonlocal loader
        loader = DataLoader(Stream(), batch_size=8)
        train()

    (seen,) = seen_of(made).loaders
    assert seen.streams and seen.begun == STEPS / 2 == 2  # two batches an epoch


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.scale).sin()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)  # again


def test_what_is_computed_again():
    """The name `checkpoint` of this file was bound long before."""
    seen = seen_of(lambda: fit(DataLoader(data(), batch_size=8), Twice()))
    (site,) = seen.recomputed
    assert site.calls == STEPS and site.place.endswith(line_of("# " + "again"))
    (model,) = seen.models
    assert model.name == "Twice"  # not what it calls


def test_autocast_is_no_fp32():
    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1))

    assert not seen_of(train).models[0].fp32


def test_a_model_in_fp64():
    def train() -> None:
        torch.set_default_dtype(torch.float64)  # double
        fit(([torch.ones(2, 4)] for _ in range(99)), nn.Linear(4, 1))

    try:
        seen = seen_of(train)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen.models[0].fp64 and not seen.models[0].fp32
    assert seen.set["default_dtype"].endswith(line_of("# " + "double"))


def test_values_that_the_host_waits_for():
    """As if all tensors lay on a GPU."""

    def beside(loss: torch.Tensor) -> None:
        loss.item(), loss.item()  # values
        bool(loss > 0)

    def train() -> None:
        fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1), beside)

    seen = seen_of(train, foreign=lambda tensor: True, gpu=True)
    mine = [site for site in seen.syncs if "test_function_watching" in site.place]
    calls = {site.what: site.calls for site in mine}
    # The step that ends it ends before what comes beside it.
    assert calls == {"item": 2 * STEPS, "__bool__": STEPS}
    (item,) = (site for site in mine if site.what == "item")
    assert item.place.endswith(line_of("# " + "values"))
    assert seen_of(train).syncs == ()  # of a CPU


@pytest.mark.parametrize(
    ("what", "find"),
    [
        ("nonzero", lambda loss: loss.nonzero()),
        ("nonzero", lambda loss: torch.nonzero(loss)),
        ("nonzero", lambda loss: torch.nonzero(input=loss)),
        ("argwhere", lambda loss: torch.argwhere(loss)),
        ("masked_select", lambda loss: loss.masked_select(loss > 0)),
    ],
)
def test_results_whose_size_goes_by_values_are_waited_for(what, find):
    def train() -> None:
        fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1), find)

    seen = seen_of(train, foreign=lambda tensor: True, gpu=True)
    (site,) = [one for one in seen.syncs if "test_function_watching" in one.place]
    assert (site.what, site.calls) == (what, STEPS)


def test_copies_that_block():
    other = set()

    def copied(loss: torch.Tensor) -> None:
        there = loss.detach().to(torch.float64)  # copied
        other.add(there)

    def train() -> None:
        fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1), copied)

    seen = seen_of(train, foreign=lambda tensor: tensor.dtype == torch.float64, gpu=True)
    (site,) = seen.copies
    assert site.calls == STEPS and site.place.endswith(line_of("# " + "copied"))


def test_what_is_printed_and_set():
    log = io.StringIO()  # what goes there is the user's, and costs what it must

    def beside(loss: torch.Tensor) -> None:
        print("a line")  # printed
        print("kept", file=log)
        sys.stderr.write("another")

    def train() -> None:
        torch.autograd.set_detect_anomaly(True)  # costly
        fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1), beside)

    try:
        seen = seen_of(train)
    finally:
        torch.autograd.set_detect_anomaly(False)
    printed, written = sorted(seen.writes, key=lambda site: site.what)
    assert (printed.what, printed.calls) == ("print", STEPS)
    assert printed.place.endswith(line_of("# " + "printed"))
    assert (written.what, written.calls) == ("write", STEPS)
    assert seen.anomaly and seen.set["anomaly"].endswith(line_of("# " + "costly"))
    assert not seen.deterministic and "deterministic" not in seen.set


def test_all_is_as_before_in_the_end():
    before = [
        torch.Tensor.backward,
        DataLoader.__init__,
        checkpoint,
        sys.stdout,
        nn.Module.__call__,
        Loader.__next__,
    ]
    seen_of(lambda: fit(DataLoader(data(), batch_size=8), nn.Linear(4, 1)))
    after = [torch.Tensor.backward, DataLoader.__init__, checkpoint, sys.stdout, nn.Module.__call__]
    assert before == [*after, Loader.__next__]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"names": ["a"], "x": torch.zeros(5, 1)}, 5),
        ((("text",), {"y": torch.zeros(2)}), 2),
        ("text", 0),
    ],
)
def test_samples_of_a_batch(batch, rows):
    assert get_batch_size(batch) == rows
