"""What a program with a process group of its own relies on: `gpumix.profile`, `open_device`."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import gpumix
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.profiler import api
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.models import WIDTH, Block, Regression

CLASSES = (
    gpumix.DeviceClass(name="big", accelerator="cpu", memory_bytes=96 * 2**20),
    gpumix.DeviceClass(name="small", accelerator="cpu", memory_bytes=48 * 2**20),
)
CLUSTER = gpumix.Cluster(
    classes=CLASSES,
    devices=[gpumix.Device(id=f"{c.name}-0", device_class=c.name) for c in CLASSES],
)


def blocks(number):
    return Regression([Block() for _ in range(number)])


def some_batch(samples):
    return {"x": torch.randn(samples, 4, WIDTH), "target": torch.randn(samples, 4, 4)}


def profiled(number, **changes):
    settings = {"sequence_length": 4, "global_batch_size": 2, "budget_s": 1.0}
    settings |= {"progress": lambda line: None, **changes}
    return gpumix.profile(lambda: blocks(number), some_batch, **settings)


# -- profile ---------------------------------------------------------------------------------------


def profile_two_models():
    found = [profiled(number, cluster=CLUSTER) for number in (2, 3)]
    return [profile.model_copy(update={"seconds_spent": 0.0}) for profile in found]


def test_all_ranks_get_the_same_profile_each_time():
    """The second profile of a program must not hear what was said about the first model."""
    first, second = run_ranks(profile_two_models, 2)
    assert first == second
    assert [len(profile.model.calls) for profile in first] == [2, 3]
    assert {c.device_class for c in first[0].classes} == {"big", "small"}


def profile_what_is_there():
    told = []
    return profiled(2, progress=told.append), told[0]


def test_a_single_process_profiles_the_device_that_is_found():
    ((profile, first_line),) = run_ranks(profile_what_is_there, 1)
    assert first_line.endswith(": this run computes on the CPU")
    assert len(profile.cluster.devices) == 1
    plan = gpumix.plan(profile, 2)
    assert [worker.samples for worker in plan.workers] == [2]


def profile_with_momentum():
    return profiled(
        2,
        cluster=CLUSTER,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


@pytest.mark.extended
def test_the_state_of_the_optimizer_is_measured():
    assert run_ranks(profile_with_momentum, 2)[0].optimizer_bytes_per_element == 4


def profile_what_is_built_already():
    return gpumix.profile(
        lambda: gpumix.build(lambda: blocks(2), seed=0),
        some_batch,
        sequence_length=4,
        global_batch_size=2,
        cluster=CLUSTER,
        progress=lambda line: None,
    )


@pytest.mark.extended
def test_a_builder_may_call_build_itself():
    assert len(run_ranks(profile_what_is_built_already, 2)[0].model.calls) == 2


def test_a_cluster_needs_one_rank_per_device():
    with raises(InputError, code="cluster-rank-count", what=(2, 1)):
        profiled(2, cluster=CLUSTER)


def test_two_ranks_cannot_have_one_device():
    """Two processes of a host without GPUs both find its CPU."""
    with raises(InputError, code="device-used-twice", what=2):
        run_ranks(profiled, 2, 2)


def test_classes_of_one_name_that_differ_are_told_apart():
    def found(host, driver):
        own = gpumix.DeviceClass(
            name="rtx-3090", accelerator="cuda", memory_bytes=2**30, driver=driver
        )
        device = gpumix.Device(id=f"GPU-{host}", device_class="rtx-3090", host=host)
        return gpumix.Cluster(classes=[own], devices=[device])

    cluster, devices = api._merge_clusters([found("a", "1"), found("b", "2"), found("c", "1")])
    assert [d.device_class for d in devices] == ["rtx-3090", "rtx-3090-2", "rtx-3090"]
    assert [(c.name, c.driver) for c in cluster.classes] == [("rtx-3090", "1"), ("rtx-3090-2", "2")]


# -- open_device -----------------------------------------------------------------------------------


def allocate_within(cluster):
    """Whether 64 MiB fit on this rank's device, inside and after."""
    inside = True
    with gpumix.open_device(cluster) as device:
        assert device.memory_limit_bytes == CLASSES[dist.get_rank()].memory_bytes
        try:
            torch.empty(64 * 2**20, dtype=torch.uint8)
        except RuntimeError as error:
            assert is_out_of_memory(error)
            inside = False
    torch.empty(64 * 2**20, dtype=torch.uint8)
    return inside


def test_each_rank_has_the_memory_of_its_own_device():
    assert run_ranks(allocate_within, 2, CLUSTER) == [True, False]


def test_open_device_needs_one_rank_per_device():
    with raises(InputError, code="cluster-rank-count", what=(2, 1)):
        gpumix.open_device(CLUSTER)


# -- devices that the environment names ------------------------------------------------------------

ROWS = """
- {class: big, accelerator: cpu, memory: 96 MiB}
- {class: small, accelerator: cpu, memory: 48 MiB}
"""


def profile_of_whom_the_file_names(file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUMIX_CLUSTER", str(file))
        with gpumix.open_device() as device:
            limit = device.memory_limit_bytes
        return [limit, *sorted(d.id for d in profiled(2).cluster.devices)]


def test_devices_may_be_named_by_a_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(ROWS)
    found = run_ranks(profile_of_whom_the_file_names, 2, file)
    assert found == [[96 * 2**20, "big-0", "small-0"], [48 * 2**20, "big-0", "small-0"]]


def test_a_cluster_that_is_given_counts_more_than_a_file(tmp_path, monkeypatch):
    """Which is told where they differ."""
    file = tmp_path / "cluster.yaml"
    file.write_text(ROWS.replace("48", "24"))
    for named in ("nowhere.yaml", file):
        monkeypatch.setenv("GPUMIX_CLUSTER", str(named))
        with (
            raises(InputError, code="cluster-rank-count", what=(2, 1)),
            pytest.warns(
                UserWarning, match=f"own devices: those of GPUMIX_CLUSTER={named} are not"
            ),
        ):
            gpumix.open_device(CLUSTER)
        with (  # it is said once
            raises(InputError, code="cluster-rank-count", what=(2, 1)),
            warnings.catch_warnings(action="error"),
        ):
            gpumix.open_device(CLUSTER)
    file.write_text(ROWS)
    with (
        raises(InputError, code="cluster-rank-count", what=(2, 1)),
        warnings.catch_warnings(action="error"),
    ):
        gpumix.open_device(CLUSTER)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "GPUMIX_CLUSTER={file}: {file}: there is no such cluster file"),
        ("[{class: big}]", "{file}:1: '[0].memory' is missing"),
        (ROWS, "GPUMIX_CLUSTER={file}: the cluster has 2 devices, the process group 1 ranks"),
    ],
    ids=["no file", "wrong file", "wrong number"],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path, monkeypatch, text, said):
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("GPUMIX_CLUSTER", str(file))
    for refused in (gpumix.open_device, lambda: profiled(2)):
        with pytest.raises(InputError) as caught:
            refused()
        assert str(caught.value).startswith(said.format(file=file))
