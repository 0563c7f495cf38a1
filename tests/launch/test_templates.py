"""What is printed for schedulers: SLURM takes and runs it, Kubeflow's own models read it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers.extended import every_second
from helpers.kubeflow_rules import broken
from helpers.processes.slurmd import Cluster, NotHere, cluster
from helpers.runs.jobs import gpumix, write_job

TWO_CLASSES = """
classes:
  a100: {memory: 80 GiB, product: NVIDIA A100-SXM4-80GB, compute_capability: "8.0"}
  t4: {memory: 16 GiB}
devices:
  - {class: a100, count: 8, host: x}
  - {class: a100, count: 8, host: y}
  - {class: t4, count: 4, host: z}
"""
MIXED = """
- {class: A100, memory: 80 GiB, host: a, count: 3}
- {class: T4, memory: 16 GiB, host: a, count: 1, ordinal: 3}
- {class: A100, memory: 80 GiB, host: b, count: 1}
- {class: T4, memory: 16 GiB, host: b, count: 3, ordinal: 1}
"""
# Their names end alike, or differ in what Kubernetes does not tell apart; one begins with a digit.
ALIKE = """
- {class: site-one-nvidia-a100-sxm4-80gb, memory: 80 GiB, host: a, count: 4}
- {class: site-two-nvidia-a100-sxm4-80gb, memory: 80 GiB, host: b, count: 4}
- {class: T4, memory: 16 GiB, host: c}
- {class: t4, memory: 16 GiB, host: d}
- {class: "4090", memory: 24 GiB, host: e}
"""
EMULATED = """
classes:
  fast: {emulate: 50 GFLOP/s, memory: 64 MiB}
  slow: {emulate: 25 GFLOP/s, memory: 32 MiB}
devices:
  - {class: fast, count: 1, host: x}
  - {class: slow, count: 2, host: y}
"""
# Each rank tells what it is; their sum shows that they have met.
TELL = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
told = ["rank", os.environ["RANK"], os.environ["LOCAL_RANK"], str(total.item()), str(sys.argv[1:])]
sys.stdout.write(" ".join(told) + "\\n")  # a line in one piece, so that those of ranks do not mix
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TELL, encoding="utf-8")
    (tmp_path / "two.yaml").write_text(TWO_CLASSES, encoding="utf-8")
    (tmp_path / "mixed.yaml").write_text(MIXED, encoding="utf-8")
    (tmp_path / "alike.yaml").write_text(ALIKE, encoding="utf-8")
    (tmp_path / "emulated.yaml").write_text(EMULATED, encoding="utf-8")
    return tmp_path


def template(kind: str, folder: Path, *words: str) -> str:
    done = gpumix("launch", "--template", kind, *words, folder=folder)
    assert done.code == 0, done.err
    return done.out


# -- SLURM -----------------------------------------------------------------------------------------

DIRECTIVE = re.compile(r"#SBATCH (hetjob|--[a-z-]+=[^\s#]+)")


def components(script: str) -> list[dict[str, str]]:
    """The directives of each component; those before the first command are all there are."""
    head = script.split("\n\n", 1)[0].splitlines()
    assert head[0] == "#!/bin/bash"
    lines = [line for line in head if line.startswith("#SBATCH")]
    assert all(DIRECTIVE.fullmatch(line) for line in lines)
    parts = "\n".join(lines).split("#SBATCH hetjob\n")
    return [dict(re.findall(r"--([a-z-]+)=(\S+)", part)) for part in parts]


def test_unlike_nodes_are_components_of_one_job(folder):
    script = template("slurm", folder, "--cluster", "two.yaml", "train.py", "it's $HOME")
    first, second = components(script)
    assert (first["nodes"], first["gres"], first["job-name"]) == ("2", "gpu:a100:8", "train")
    assert (second["nodes"], second["gres"]) == ("1", "gpu:t4:4")
    assert "GPUMIX_CLUSTER" not in script  # which nodes it gets nobody knows yet
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_nodes_that_are_alike_or_named_are_no_heterogeneous_job(folder):
    script = template("slurm", folder, "--hosts", "a:4,b:4", "train.py")
    (only,) = components(script)
    assert only["nodes"] == "2" and only["nodelist"] == "a,b"
    assert "het" not in script
    (some,) = components(template("slurm", folder, "train.py"))
    assert some["gres"] == "gpu:8"


def test_a_job_finds_its_gpus_where_the_scheduler_puts_it(folder):
    write_job(folder, cluster="two.yaml").rename(folder / "a job.yaml")
    script = template("slurm", folder, "a job.yaml")
    assert "--set cluster=auto" in script
    first, second = components(script)
    assert first["job-name"] == "a-job" and second["nodes"] == "1"


def test_mixed_nodes_ask_for_each_kind_of_gpu(folder):
    first, second = components(template("slurm", folder, "--cluster", "mixed.yaml", "train.py"))
    assert first["gres"] == "gpu:A100:3,gpu:T4:1"
    assert second["gres"] == "gpu:A100:1,gpu:T4:3"


NODES = ("a100:8", "a100:8", "t4:4", "A100:3,T4:1", "A100:1,T4:3")


@pytest.mark.parametrize(("words", "grace_s"), [([], 270), (["--grace-period", "900"], 900)])
def test_runs_have_as_long_to_save_as_is_said(folder, words, grace_s):
    """What is left of the time when SLURM sends the signal is more than that."""
    script = template("slurm", folder, *words, "train.py")
    (only,) = components(script)
    assert only["signal"] == f"TERM@{grace_s + 30}" and f" --grace-period {grace_s} " in script
    assert f"comes {grace_s + 30} s before the time is over" in script


def test_a_cluster_is_divided_among_the_hosts_that_are_named(folder):
    (folder / "here.yaml").write_text("- {class: t4, memory: 16 GiB, count: 12}\n")
    words = ["--cluster", "here.yaml", "--hosts", "me@a:4,b:8", "train.py"]
    first, second = components(template("slurm", folder, *words))
    assert (first["nodelist"], first["gres"]) == ("a", "gpu:t4:4")
    assert (second["nodelist"], second["gres"]) == ("b", "gpu:t4:8")


TWO = ("--cluster", "two.yaml")


UNTOLD: list[tuple[list[str], str]] = [
    (["--hosts", "zz:9", *TWO], "the hosts are not those of the cluster"),
    (["--hosts", "x:8,y:8,z:9", *TWO], "has 4 devices in the cluster, and --hosts says 9"),
    (["--hosts", "a,b", "--cluster", "here.yaml"], "how many processes a, b run is not said"),
    (["--hosts", "a:8,b:8", "--python", "a=/opt/my_x"], "--python a=/opt/my_x is for one host"),
]


@pytest.mark.parametrize("kind", every_second(["slurm", "k8s"]))
@pytest.mark.parametrize(("words", "said"), UNTOLD)
def test_what_a_template_cannot_say_is_refused(folder, kind, words, said):
    (folder / "here.yaml").write_text("- {class: t4, memory: 16 GiB, count: 16}\n")
    done = gpumix("launch", "--template", kind, *words, "train.py", folder=folder)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_job_may_say_port_and_grace(folder):
    write_job(folder, cluster="two.yaml")
    script = template("slurm", folder, "--port", "4000", "--grace-period", "60", "job.yaml")
    assert "PORT=4000\n" in script and " --grace-period 60 " in script


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    try:
        with cluster(tmp_path_factory.mktemp("slurm"), NODES) as made:
            yield made
    except NotHere as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--cluster", "two.yaml"], ["--hosts", "n0:4,n1:4"]])
def test_slurm_takes_it(folder, slurm, words):
    script = template("slurm", folder, *words, "train.py")
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    assert "to start at" in slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)
    (folder / "train.sbatch").write_text(script.replace("--nodes=2", "--nodes=7"))
    with pytest.raises(AssertionError, match="allocation failure"):
        slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)


@pytest.mark.slow
def test_slurm_knows_what_mixed_nodes_hold(folder, slurm):
    script = template("slurm", folder, "--cluster", "mixed.yaml", "train.py")
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    assert "to start at" in slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)
    (folder / "train.sbatch").write_text(script.replace("T4:1", "T4:4"), encoding="utf-8")
    with pytest.raises(AssertionError, match="allocation failure"):
        slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)


@pytest.mark.extended
@pytest.mark.slow
def test_slurm_lets_runs_save_for_as_long_as_we_do(folder, slurm):
    """The longest that we take, SLURM does; more than that neither of us."""
    script = template("slurm", folder, "--hosts", "n0:4", "--grace-period", "65505", "train.py")
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    assert "to start at" in slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)
    (folder / "train.sbatch").write_text(script.replace("TERM@65535", "TERM@65536"))
    with pytest.raises(AssertionError, match="signal"):
        slurm.run("sbatch", "--test-only", "train.sbatch", folder=folder)
    words = ["--template", "slurm", "--grace-period", "65506", "train.py"]
    done = gpumix("launch", *words, folder=folder)
    assert (done.code, done.out) == (2, "") and "--grace-period 65505, or less" in done.err


@pytest.mark.extended
@pytest.mark.slow
def test_slurm_runs_it(folder, slurm):
    """Two nodes that are not alike, as components; names of nodes stand for nothing here."""
    env = [name for name in ("PYTHONPATH", "PATH") if name in os.environ]
    words = [word for name in env for word in ("--env", name)]
    words += ["--env", "GLOO_SOCKET_IFNAME=lo", "--address", "127.0.0.1", "--cluster"]
    script = template("slurm", folder, *words, "emulated.yaml", "train.py", "it's $HOME")
    assert f"export GPUMIX_CLUSTER={folder}/emulated.yaml" in script
    (folder / "train.sbatch").write_text(script, encoding="utf-8")
    slurm.run("sbatch", "--wait", "train.sbatch", folder=folder)
    (log,) = folder.glob("train-*.log")
    lines = log.read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == [
        """0: rank 0 0 3 ["it's $HOME"]""",
        """1: rank 1 0 3 ["it's $HOME"]""",
        """1: rank 2 1 3 ["it's $HOME"]""",
    ]


# -- Kubernetes ------------------------------------------------------------------------------------

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035


def both(text: str) -> tuple[dict, dict]:
    runtime, job = yaml.safe_load_all(text)
    return runtime, job


def check_models(runtime: dict, job: dict) -> None:
    """Kubeflow's models read all of it: what they do not know they would leave out. The rules that
    they do not know hold too."""
    assert broken(runtime, job) == []
    pytest.importorskip("kubeflow_trainer_api")
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
        TrainerV1alpha1TrainingRuntime,
    )

    assert TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """The template for a script, as it is printed without more words."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(TELL, encoding="utf-8")
    return template("k8s", folder, "train.py")


def jobs_of(runtime: dict) -> list[dict]:
    return runtime["spec"]["template"]["spec"]["replicatedJobs"]


def test_each_kind_of_nodes_is_a_replicated_job(folder):
    name = "NCCL_DEBUG"
    words = ["--cluster", "two.yaml", "--env", f"{name}=INFO", "train.py", "it's $HOME"]
    text = template("k8s", folder, *words)
    runtime, job = both(text)
    assert broken(runtime, job) == []
    fast, slow = jobs_of(runtime)
    pods = [one["template"]["spec"]["template"]["spec"] for one in (fast, slow)]
    assert [one["template"]["spec"]["completions"] for one in (fast, slow)] == [2, 1]
    assert [pod["nodeSelector"] for pod in pods] == [
        {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, {"gpumix.dev/device-class": "t4"}
    ]  # fmt: skip
    limits = [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    assert limits == ["8", "4"]
    assert all({"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
               for pod in pods)  # fmt: skip
    assert job["spec"]["trainer"]["env"] == [{"name": name, "value": "INFO"}]
    assert "kubectl label node NODE gpumix.dev/device-class=VALUE" in text


@pytest.mark.parametrize(
    ("cluster", "selectors"),
    [
        ("mixed.yaml", ["a100-x3-t4-x1", "a100-x1-t4-x3"]),
        ("alike.yaml", [*re.findall(r"site[\w-]+", ALIKE), "T4", "t4", "4090"]),
    ],
)
def test_no_two_kinds_of_nodes_have_one_name(folder, cluster, selectors):
    runtime, job = both(template("k8s", folder, "--cluster", cluster, "train.py"))
    assert broken(runtime, job) == []
    pods = [one["template"]["spec"]["template"]["spec"] for one in jobs_of(runtime)]
    assert [pod["nodeSelector"]["gpumix.dev/device-class"] for pod in pods] == selectors


@pytest.mark.extended
@pytest.mark.parametrize("cluster", ["two.yaml", "mixed.yaml", "alike.yaml"])
def test_models_read_all_that_is_printed(folder, cluster):
    words = ["--cluster", cluster, "--env", "NCCL_DEBUG=INFO", "train.py", "it's $HOME"]
    check_models(*both(template("k8s", folder, *words)))


@pytest.mark.extended
def test_what_the_models_do_not_know_is_noticed(plain):
    runtime, job = both(plain)
    check_models(runtime, job)
    jobs_of(runtime)[0]["template"]["spec"]["paralelism"] = 3
    with pytest.raises(AssertionError):
        check_models(runtime, job)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["metadata", "name"], "Job", "does not match"),
        (["metadata", "name"], "a" * 64, "too long"),
        (["spec", "trainer", "image"], "a" * 501, "too long"),
        (["spec", "trainer", "env"], [{"name": f"V{n}"} for n in range(129)], "too long"),
        (["spec", "trainer", "env"], [{"name": "A"}, {"name": "A"}], "A twice"),
        (["spec", "runtimeRef"], {"kind": "TrainingRuntime"}, "'name' is a required"),
    ],
)
def test_a_job_that_breaks_a_rule_is_noticed(path, value, said, plain):
    runtime, job = both(plain)
    *where, last = path
    inside = job
    for key in where:
        inside = inside[key]
    inside[last] = value
    (found,) = broken(runtime, job)
    assert said in found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "mlPolicy", "numNodes"], -1),
        (["spec", "mlPolicy"], {"torch": {}, "mpi": {}}),
        (["spec", "mlPolicy"], {"numNodes": 2, "torch": {"elasticPolicy": {}}}),
        (["spec"], {}),
    ],
)
def test_a_runtime_that_breaks_a_rule_is_noticed(path, value, plain):
    runtime, job = both(plain)
    *where, last = path
    inside = runtime
    for key in where:
        inside = inside[key]
    inside[last] = value
    assert len(broken(runtime, job)) == 1


def test_a_quantity_that_is_none_is_noticed(plain):
    runtime, job = both(plain)
    pod = jobs_of(runtime)[0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["resources"]["limits"]["memory"] = "32 GB"
    assert "32 GB" in broken(runtime, job)[0]


def test_what_webhooks_ask_for(folder):
    """The rules of Kubeflow's and JobSet's webhooks, beside the schema."""
    write_job(folder / "A long Folder", cluster="two.yaml").rename(folder / "It's a job.yaml")
    long = "It's a job.yaml"
    (folder / "an_extremely_long_name_of_a_script.py").touch()
    for program in (long, "an_extremely_long_name_of_a_script.py"):
        runtime, job = both(template("k8s", folder, "--cluster", "two.yaml", program))
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert runtime["spec"]["mlPolicy"]["numNodes"] == 2
        trainers = []
        for one in jobs_of(runtime):
            name = f"{job['metadata']['name']}-{one['name']}-0-999-abcde"  # of a pod
            assert re.fullmatch(LABEL, name) and len(name) <= 63
            assert one["replicas"] == 1
            (container,) = one["template"]["spec"]["template"]["spec"]["containers"]
            assert container["name"] == "node"
            trainers.append("trainer" in str(one["template"].get("metadata")))
        assert trainers == [True, False]


@pytest.mark.parametrize(
    ("words", "file"),
    every_second(
        [
            (["--cluster", "../emulated.yaml", "train.py"], "emulated.yaml"),
            (["--folder", "/shared/below", "../train.py"], "train.py"),
        ]
    ),
)
def test_what_does_not_lie_on_the_volume_of_pods_is_refused(folder, words, file):
    """SLURM's nodes share the file system."""
    below = folder / "below"
    below.mkdir()
    (below / "train.py").touch()
    done = gpumix("launch", "--template", "k8s", *words, folder=below)
    above = "/shared" if "--folder" in words else str(folder)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"gpumix: {above}/{file}: pods do not find this file")
    assert f"put it below {above}/below, or" in done.err
    template("slurm", below, *words)


@pytest.mark.extended
def test_a_cluster_of_gpus_is_not_read_by_pods(folder):
    (folder / "below").mkdir()
    (folder / "below" / "train.py").touch()
    template("k8s", folder / "below", "--cluster", "../two.yaml", "train.py")


def test_the_fix_for_files_that_pods_do_not_find_works(folder):
    (folder / "below").mkdir()
    (folder / "below" / "train.py").touch()
    text = template("k8s", folder, "--cluster", "emulated.yaml", "below/train.py")
    assert f"value: {folder}/emulated.yaml" in text


def test_pods_run_the_interpreter_of_their_image(folder):
    """This machine's own is nothing that an image has."""
    text = template("k8s", folder, "--hosts", "a:8,b:8", "train.py")
    assert "exec python -m" in text and sys.executable not in text
    named = template("k8s", folder, "--hosts", "a:8", "--python", "/opt/py/bin/python", "train.py")
    assert "exec /opt/py/bin/python -m" in named


def test_the_command_of_a_pod_knows_its_ranks(folder):
    """As the shell of the container reads it, with an interpreter that tells its words."""
    (folder / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
    (folder / "python").chmod(0o755)
    words = ["--hosts", "a:8,b:8,c:4", "--python", str(folder / "python"), "train.py", "it's $HOME"]
    assert "$$(HOME)" in template(
        "k8s", folder, "train.py", "$(HOME)"
    )  # not for Kubernetes to read
    text = template("k8s", folder, *words)
    assert "not by their names" in text
    runtime, job = both(text)
    found = []
    for one in jobs_of(runtime):
        for index in range(one["template"]["spec"]["completions"]):
            command = one["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
            env = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            told = done.stdout.splitlines()
            assert told[-2:] == ["train.py", "it's $HOME"]
            assert told[told.index("--address") + 1] == (
                f"{job['metadata']['name']}-nodes-of-8-0-0.{job['metadata']['name']}"
            )
            found.append(
                (told[told.index("--first-rank") + 1], told[told.index("--processes") + 1])
            )
    assert found == [("0", "8"), ("8", "8"), ("16", "4")]
