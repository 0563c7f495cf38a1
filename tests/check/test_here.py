"""What is gathered on this machine, against what others say of it."""

from __future__ import annotations

import resource
import shutil
import socket

import torch
from torch import nn

from gpumix.check.facts.host import check_folder, find_existing_parent, gather_host_facts
from gpumix.check.facts.job import (
    check_job_on_host,
    count_state_bytes,
    find_missing_packages,
    saved_bytes,
)
from gpumix.schema.job.job import OptimizerSpec
from gpumix.schema.reading.read import read_job
from helpers.runs.jobs import write_job

LINES = "one\ntwo\n" * 40


def test_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = gather_host_facts({"output": tmp_path})
    assert found.software.torch == torch.__version__
    assert found.limits.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < found.available_bytes <= found.memory_bytes
    assert "lo" in found.interfaces
    assert found.settings["NCCL_P2P_DISABLE"] == "1"
    assert found.address in ("", socket.gethostbyname(socket.gethostname()))
    (folder,) = found.folders
    assert folder.refusal == ""
    assert folder.free_bytes <= shutil.disk_usage(tmp_path).total
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_one_above_it(tmp_path):
    assert find_existing_parent(tmp_path / "runs" / "first") == tmp_path
    assert check_folder("output", tmp_path / "runs" / "first").refusal == ""
    (tmp_path / "file").touch()
    assert check_folder("output", tmp_path / "file" / "run").refusal == "Not a directory"


def test_bytes_of_a_checkpoint():
    """Masters in fp32, two moments of what is trained, and buffers as they are."""
    model = nn.Sequential(nn.Linear(10, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    buffers = 2 * 4 * 4 + 8
    assert count_state_bytes(model, OptimizerSpec()) == 40 * 12 + buffers
    assert count_state_bytes(model, OptimizerSpec(name="sgd")) == 40 * 4 + buffers
    model[0].weight.requires_grad_(False)
    assert count_state_bytes(model, OptimizerSpec()) == 40 * 4 + buffers


def test_bytes_of_what_is_saved(tmp_path):
    assert saved_bytes(tmp_path) == 0
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "rank0").write_bytes(b"x" * 100)
    assert saved_bytes(tmp_path) == 100


def test_packages_that_a_job_needs(tmp_path, monkeypatch):
    job = read_job(write_job(tmp_path, efficiency={"attention": {"big": "flash"}}))
    assert find_missing_packages(job) == {"flash_attn": "pip install flash-attn"}
    job = read_job(write_job(tmp_path, torch_compile=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert list(find_missing_packages(job)) == ["a C++ compiler"]


def test_data_that_two_hosts_have_alike(tmp_path):
    """By names and sizes, wherever they lie, and whenever they were written."""
    marks = []
    for name, text in (("a", LINES), ("b", LINES), ("c", LINES + "three\n")):
        path = write_job(tmp_path / name, data={"text": ["it.txt"]})
        (tmp_path / name / "it.txt").write_text(text, encoding="utf-8")
        found = check_job_on_host(read_job(path), path.parent)
        assert found.trouble == {} and found.data_bytes == len(text)
        marks.append(found.data)
    assert marks[0] == marks[1] != marks[2]


def test_data_of_a_factory_are_read(tmp_path, monkeypatch):
    path = write_job(tmp_path, data={"factory": "toys:tokens"})
    assert check_job_on_host(read_job(path), tmp_path).data.partition(" ")[2].startswith("samples")
    path = write_job(tmp_path, data={"factory": "toys:no_such_thing"})
    what, fix = check_job_on_host(read_job(path), tmp_path).trouble["data"]
    assert "has no function 'no_such_thing'" in what and "module:function" in fix
