"""The JSON schema of job files, for editors: from the models that read them.

The schema also says what a reader takes besides a model's own types: amounts with units, one value
for a list of them, links by name, a cluster in either of its forms or in a file.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.job.job import Job
from gpumix.schema.reading.cluster_file import ClusterForm, ShortRow

DIALECT = "https://json-schema.org/draft/2020-12/schema"
AMOUNT = {"type": "string", "pattern": r"^\s*[0-9.][0-9.eE+-]*\s*[A-Za-z/]*\s*$"}
SWITCH = {"enum": ["on", "off", "yes", "no"]}  # which YAML 1.2 takes for text


def make_job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file."""
    schema = _of(Job)
    schema["properties"]["cluster"] = _cluster(schema)
    return {"$schema": DIALECT, **schema, "title": "A job of gpumix"}


class _AsRead(GenerateJsonSchema):
    """Generator of schemas of what may be written, which is more than what is kept."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        if inner.get("type") in ("integer", "number"):
            return {"anyOf": [inner, AMOUNT]}
        if inner.get("type") == "array":
            return {"anyOf": [inner, inner["items"]]}
        return {
            "anyOf": [inner, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        }

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return {"anyOf": [super().bool_schema(schema), SWITCH]}


def _of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(by_alias=True, schema_generator=_AsRead)


def _cluster(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a cluster as `cluster_file` reads it; add its parts to the definitions
    of `schema`."""
    known = schema["$defs"]
    for kept in (Cluster, Device, DeviceClass):  # what becomes of what is written
        del known[kept.__name__]
    for model in (ClusterForm, ShortRow):
        form = _of(model)
        known |= form.pop("$defs", {})
        known[model.__name__] = form
    return {
        "description": Job.model_fields["cluster"].description,
        "default": "auto",
        "anyOf": [
            {"type": "string"},
            {"$ref": f"#/$defs/{ClusterForm.__name__}"},
            {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{ShortRow.__name__}"}},
        ],
    }
