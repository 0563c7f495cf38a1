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

from gpumix.launch.commands import LaunchEnvironment, make_rendezvous_arguments
from gpumix.launch.program import Program
from gpumix.launch.schedulers.nodes import (
    EqualNodes,
    NumberedNodes,
    count_ranks,
    make_node_command,
    number_components,
)
from gpumix.schema.errors import InputError

API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # TrainJobs set image and environment of containers with this name
PORT = 29500
LINE_WIDTH = 10_000  # commands are not wrapped
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


def make_manifests(
    components: Sequence[EqualNodes],
    program: Program,
    around: LaunchEnvironment,
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
        _make_runtime(name, components, program, around, port or PORT),
        _make_train_job(name, around.settings),
    ]
    head = HEAD.format(name=name)
    if any(component.hosts for component in components):
        head += NAMED_HOSTS
    if any(OWN_LABEL in _make_node_selector(component) for component in components):
        head += LABEL_NODES.format(label=OWN_LABEL)
    return head + "---\n".join(
        yaml.safe_dump(one, sort_keys=False, width=LINE_WIDTH) for one in documents
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
                code="file-not-in-pods",
                where=str(path),
                why=f"the volume that they share is mounted at {shared}, and the file is not below "
                "it",
                fix=f"put it below {shared}, or go to a folder that holds all files of the command "
                "and name them as seen from there",
            )


def _name(program: Program) -> str:
    allowed = re.sub(r"[^a-z0-9]+", "-", program.title.lower())
    return f"gpumix-{allowed.strip('-')[:16].strip('-') or 'job'}"


def _make_train_job(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
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


def _make_runtime(
    name: str,
    components: Sequence[EqualNodes],
    program: Program,
    around: LaunchEnvironment,
    port: int,
) -> dict[str, Any]:
    parts = number_components(components)
    # The first pod's name, as given by JobSet.
    meeting = make_rendezvous_arguments(f"{name}-{components[0].name}-0-0.{name}", str(port))
    world = count_ranks(components)
    jobs = [
        _make_replicated_job(part, _make_command(part, world, meeting, program, around), around)
        for part in parts
    ]
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


def _make_command(
    part: NumberedNodes,
    world: int,
    meeting: Sequence[str],
    program: Program,
    around: LaunchEnvironment,
) -> list[str]:
    # Kubernetes would replace `$(NAME)` by the value of a variable.
    words = shlex.join(program.words).replace("$(", "$$(")
    command = make_node_command(part, "JOB_COMPLETION_INDEX", world, meeting, around, words)
    return ["sh", "-c", command]


def _make_replicated_job(
    part: NumberedNodes, command: list[str], around: LaunchEnvironment
) -> dict[str, Any]:
    component = part.component
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(around.grace_s) + 30,
        **({"nodeSelector": selector} if (selector := _make_node_selector(component)) else {}),
        "containers": [
            {
                "name": CONTAINER,
                "image": IMAGE,
                "workingDir": str(around.folder),
                "command": command,
                "resources": _make_resources(component),
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


def _make_node_selector(component: EqualNodes) -> dict[str, str]:
    """Return the node selector: the label given by NVIDIA's GPU feature discovery, or a label the
    user must set: the class's name for nodes of one class, the component's for mixed nodes."""
    if not component.gpus or not component.held:
        return {}
    if component.product:
        return {"nvidia.com/gpu.product": component.product.replace(" ", "-")}
    (name, _), *others = component.held
    return {OWN_LABEL: component.name if others else name}


def _make_resources(component: EqualNodes) -> dict[str, dict[str, str]]:
    asked = {
        "cpu": str(component.devices * CPUS_PER_DEVICE),
        "memory": f"{component.devices * MEMORY_PER_DEVICE_GI}Gi",
    }
    if component.gpus:
        asked["nvidia.com/gpu"] = str(component.devices)
    return {"requests": asked, "limits": dict(asked)}
