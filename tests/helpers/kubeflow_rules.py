"""What the schemas of Kubeflow Trainer v2 ask beside types and names, which its Python models know.

Told in JSON Schema from the markers of github.com/kubeflow/trainer, pkg/apis/trainer/v1alpha1
(`trainjob_types.go`, `trainingruntime_types.go`) and its CRDs in manifests/base/crds, and of what
they embed: JobSet's `replicatedJobs` and Kubernetes' Job, Pod and quantities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

NUMBER = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY = {
    "type": ["string", "integer"],
    "pattern": rf"^(\+|-)?{NUMBER}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{NUMBER}))?$",
}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
WORDS = {"type": "array", "maxItems": 128, "items": {"type": "string", "maxLength": 65536}}
ENV_VAR = {"required": ["name"], "properties": {"name": NAME}}
ENV = {"type": "array", "maxItems": 128, "items": ENV_VAR}
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
VALUE = {"maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", **VALUE}}
LABEL = {"type": "string", "maxLength": 63, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}  # RFC 1035


def _of(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required or [], "properties": properties}


TRAIN_JOB = _of(
    ["apiVersion", "kind", "metadata", "spec"],
    metadata=_of(["name"], name=LABEL),
    spec=_of(
        ["runtimeRef"],
        runtimeRef=_of(["name"], name=NAME, apiGroup=NAME, kind=NAME),
        trainer=_of(
            image={"type": "string", "maxLength": 500},
            command=WORDS,
            args=WORDS,
            env=ENV,
            numNodes=COUNT,
            numProcPerNode=COUNT,
        ),
    ),
)
CONTAINER = _of(["name"], name=LABEL, env=ENV, resources=_of(requests=AMOUNTS, limits=AMOUNTS))
POD = _of(
    ["containers"],
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    nodeSelector=LABELS,
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=COUNT,
)
JOB = _of(
    ["template"],
    parallelism=COUNT,
    completions=COUNT,
    backoffLimit=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    template=_of(["spec"], spec=POD),
)
RUNTIME = _of(
    ["apiVersion", "kind", "metadata", "spec"],
    metadata=_of(["name"], name=LABEL, labels=LABELS),
    spec=_of(
        mlPolicy={
            **_of(numNodes=COUNT),
            "not": {
                "anyOf": [
                    {"required": ["torch", "mpi"]},
                    _of(["numNodes", "torch"], torch=_of(["elasticPolicy"])),
                ]
            },
        },
        template=_of(
            spec=_of(
                replicatedJobs={
                    "type": "array",
                    "items": _of(
                        ["name", "template"],
                        name=LABEL,
                        replicas=COUNT,
                        template=_of(spec=JOB),
                    ),
                }
            )
        ),
    )
    | {"minProperties": 1},
)  # fmt: skip


def broken(runtime: Any, job: Any) -> list[str]:
    """The rules that the two manifests break."""
    found = [
        f"{error.json_path}: {error.message}"
        for schema, value in ((RUNTIME, runtime), (TRAIN_JOB, job))
        for error in Draft202012Validator(schema).iter_errors(value)
    ]
    return [*found, *_twins(runtime, "$"), *_twins(job, "$")]


def _twins(value: Any, at: str) -> Iterator[str]:
    """Lists that are maps by name have each name once."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _twins(item, f"{at}.{key}")
    elif isinstance(value, list):
        names = [item["name"] for item in value if isinstance(item, dict) and "name" in item]
        yield from (f"{at}: {name} twice" for name in set(names) if names.count(name) > 1)
        for number, item in enumerate(value):
            yield from _twins(item, f"{at}[{number}]")
