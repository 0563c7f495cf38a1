"""Manifests for Kubeflow: a TrainJob, and its TrainingRuntime with a replicated job per kind of
nodes. Pure.

The runtime's first job is the trainer's. All run the launcher of gpumix in place of torchrun, which
Kubeflow can only configure for equal nodes.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from gpumix.launch.commands import HOST_MODULE, Surroundings, meeting_words, ranks_words
from gpumix.launch.program import Program
from gpumix.launch.schedulers.nodes import Component, NodeGroup, first_rank, parts_of, world_of
from gpumix.schema.errors import InputError

API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # TrainJobs set image and environment of containers with this name
PORT = 29500
WIDTH = 10_000  # commands are not wrapped
OWN_LABEL = "gpumix.dev/device-class"
CPUS_PER_DEVICE, MEMORY_PER_DEVICE_GI = 4, 32
IMAGE = "registry.example.com/gpumix:latest"
PYTHON = "python"  # the image's own
HEAD = """\
# Made by `gpumix launch --template k8s`; kubectl apply -f {name}.yaml
# Look at the image, the interpreter in it, node selectors, resources and volumes. Program, data and
# output lie on a volume that all pods share.
"""
NAMED_HOSTS = """\
# Hosts are nodes by what they hold, not by their names: pods go where selectors and resources let
# them.
"""
LABEL_NODES = """\
# kubectl label node NODE {label}=VALUE, that of nodeSelector, tells which nodes are meant.
"""


def manifests(
    components: Sequence[Component],
    program: Program,
    around: Surroundings,
    files: Sequence[str],
    *,
    port: int | None = None,
) -> str:
    """Return both manifests as YAML, for `components` in rank order, with the rendezvous at the
    first pod.

    Raises:
        InputError: one of the `files` read by pods is outside the shared folder.
    """
    _refuse_outside(around.folder, files)
    name = _name(program)
    documents = [
        _runtime(name, components, program, around, port or PORT),
        _train_job(name, around.settings),
    ]
    head = HEAD.format(name=name)
    if any(component.hosts for component in components):
        head += NAMED_HOSTS
    if any(OWN_LABEL in _selector(component) for component in components):
        head += LABEL_NODES.format(label=OWN_LABEL)
    return head + "---\n".join(
        yaml.safe_dump(one, sort_keys=False, width=WIDTH) for one in documents
    )


def _refuse_outside(folder: PurePath, files: Sequence[str]) -> None:
    """Raise InputError for files outside `folder`: pods see only files below, at their paths
    here."""
    shared = PurePath(os.path.normpath(folder))
    for file in files:
        path = PurePath(os.path.normpath(shared / file))
        if not path.is_relative_to(shared):
            raise InputError(
                "pods do not find this file",
                where=str(path),
                why=f"the volume that they share is mounted at {shared}, and the file is not below "
                "it",
                fix=f"put it below {shared}, or go to a folder that holds all files of the command "
                "and name them as seen from there",
            )


def _name(program: Program) -> str:
    allowed = re.sub(r"[^a-z0-9]+", "-", program.title.lower())
    return f"gpumix-{allowed.strip('-')[:16].strip('-') or 'job'}"


def _train_job(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    env = [{"name": key, "value": value} for key, value in sorted(settings.items())]
    trainer = {"image": IMAGE, **({"env": env} if env else {})}
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {
                "apiGroup": API.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": name,
            },
            "trainer": trainer,
        },
    }


def _runtime(
    name: str,
    components: Sequence[Component],
    program: Program,
    around: Surroundings,
    port: int,
) -> dict[str, Any]:
    parts = parts_of(components)
    # The first pod's name, as given by JobSet.
    meeting = meeting_words(f"{name}-{components[0].name}-0-0.{name}", str(port))
    world = world_of(components)
    jobs = [_job(part, _command(part, world, meeting, program, around), around) for part in parts]
    jobs[0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": components[0].nodes},
            "template": {"spec": {"replicatedJobs": jobs}},
        },
    }


def _command(
    part: NodeGroup, world: int, meeting: Sequence[str], program: Program, around: Surroundings
) -> list[str]:
    number = first_rank(part, "JOB_COMPLETION_INDEX")
    words = ranks_words(number, part.component.devices, world)
    run = [shlex.quote(around.python), "-m", HOST_MODULE, "--first-rank", f'"{number}"']
    # Kubernetes would replace `$(NAME)` by the value of a variable.
    run += [*words[2:], *meeting, "--grace", f"{around.grace_s:g}", "--"]
    run.append(shlex.join(program.words).replace("$(", "$$("))
    return ["sh", "-c", "exec " + " ".join(run)]


def _job(part: NodeGroup, command: list[str], around: Surroundings) -> dict[str, Any]:
    component = part.component
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(around.grace_s) + 30,
        **({"nodeSelector": selector} if (selector := _selector(component)) else {}),
        "containers": [
            {
                "name": CONTAINER,
                "image": IMAGE,
                "workingDir": str(around.folder),
                "command": command,
                "resources": _resources(component),
                "volumeMounts": [
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    {"name": "work", "mountPath": str(around.folder)},
                ],
            }
        ],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "work", "persistentVolumeClaim": {"claimName": "work"}},
        ],
    }
    job = {
        "parallelism": component.nodes,
        "completions": component.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": component.name, "replicas": 1, "template": {"spec": job}}


def _selector(component: Component) -> dict[str, str]:
    """Return the node selector: the label given by NVIDIA's GPU feature discovery, or a label the
    user must set: the class's name for nodes of one class, the component's for mixed nodes."""
    if not component.gpus or not component.held:
        return {}
    if component.product:
        return {"nvidia.com/gpu.product": component.product.replace(" ", "-")}
    (name, _), *others = component.held
    return {OWN_LABEL: component.name if others else name}


def _resources(component: Component) -> dict[str, dict[str, str]]:
    asked = {
        "cpu": str(component.devices * CPUS_PER_DEVICE),
        "memory": f"{component.devices * MEMORY_PER_DEVICE_GI}Gi",
    }
    if component.gpus:
        asked["nvidia.com/gpu"] = str(component.devices)
    return {"requests": asked, "limits": dict(asked)}
