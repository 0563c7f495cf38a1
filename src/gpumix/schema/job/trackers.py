"""Experiment trackers of a run, and their settings.

All are local by default: nothing leaves this machine unless the job says so. The libraries are
extras; `integrations/trackers` contains the adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from gpumix.schema.job.search_space import wrap_single_value
from gpumix.schema.value import Value

LOOPBACK = "127.0.0.1"
PORT = 9464  # OpenTelemetry's default for Prometheus
HIGHEST_PORT = 65_535

Text = Annotated[str, Field(min_length=1)]
RunName = Annotated[Text | None, Field(description="name of the run; default: that of its folder")]


class TensorBoardSpec(Value):
    """TensorBoard event files, shown by `tensorboard --logdir FOLDER`."""

    folder: Path | None = Field(
        default=None,
        description="folder of many runs, each in a folder of its name; default: "
        "`tensorboard` in the run's own folder",
    )
    name: RunName = None

    @model_validator(mode="after")
    def _names_a_folder(self) -> Self:
        if self.name is not None and self.folder is None:
            raise ValueError("'name' has no effect without 'folder'")
        return self


class WandbSpec(Value):
    """Weights & Biases, offline until `wandb sync`, or online with `mode: online`."""

    project: Text = Field(default="gpumix", description="project of the run")
    name: RunName = None
    entity: Text | None = Field(
        default=None, description="owner of the project; default: as logged in"
    )
    group: Text | None = Field(default=None, description="group of the run")
    tags: Annotated[tuple[Text, ...], BeforeValidator(wrap_single_value)] = Field(
        default=(), description="tags of the run"
    )
    folder: Path | None = Field(
        default=None, description="folder of wandb's files; default: the run's folder"
    )
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="`online` sends everything to the server that wandb is logged in to",
    )


class MlflowSpec(Value):
    """MLflow, in a database of the run, or at a tracking URI."""

    experiment: Text = Field(default="gpumix", description="experiment of the run")
    name: RunName = None
    tags: dict[str, str] = Field(default_factory=dict, description="tags of the run")
    uri: Text | None = Field(
        default=None,
        description="tracking URI: `http://...` sends everything to a server; default: "
        "`mlflow.db` in the run's folder",
    )


class TrackioSpec(Value):
    """Trackio, shown by `trackio show`."""

    project: Text = Field(default="gpumix", description="project of the run")
    name: Text | None = Field(
        default=None, description="name of the run, some digits follow; default: that of its folder"
    )
    group: Text | None = Field(default=None, description="group of the run")
    folder: Path | None = Field(
        default=None, description="folder of Trackio's databases; default: that of `trackio show`"
    )
    space: Text | None = Field(
        default=None, description="Hugging Face Space to send everything to, as `user/name`"
    )
    server: Text | None = Field(
        default=None, description="address of a Trackio server to send everything to"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.space is not None and self.server is not None:
            raise ValueError("give at most one of 'space' and 'server'")
        return self


class PrometheusSpec(Value):
    """An endpoint scraped by Prometheus, or a file for the textfile collector of the node
    exporter."""

    address: Text = Field(
        default=LOOPBACK,
        description="address of the endpoint; with `0.0.0.0` every host that reaches this one "
        "can read it",
    )
    port: int = Field(
        default=PORT, ge=0, le=HIGHEST_PORT, description="0: any free port, which the run prints"
    )
    textfile: Path | None = Field(
        default=None, description="file written instead of an endpoint; it ends in `.prom`"
    )
    name: Text | None = Field(
        default=None,
        description="label `run` of all metrics; default: name of the run's folder",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.textfile is None:
            return self
        if self.textfile.suffix != ".prom":
            raise ValueError(
                f"'textfile' is '{self.textfile}': the collector reads files that end in .prom"
            )
        if (self.address, self.port) != (LOOPBACK, PORT):
            raise ValueError("'address' and 'port' have no effect with 'textfile'")
        return self


Tracker = TensorBoardSpec | WandbSpec | MlflowSpec | TrackioSpec | PrometheusSpec


class Trackers(Value):
    """All trackers of a run: a name, a list of names, or settings by name:
    `report_to: tensorboard`, `report_to: [tensorboard, wandb]`,
    `report_to: {wandb: {project: mine}, prometheus: {port: 9000}}`."""

    tensorboard: TensorBoardSpec | None = Field(
        default=None, description="[keys below](#report_totensorboard)"
    )
    wandb: WandbSpec | None = Field(default=None, description="[keys below](#report_towandb)")
    mlflow: MlflowSpec | None = Field(default=None, description="[keys below](#report_tomlflow)")
    trackio: TrackioSpec | None = Field(default=None, description="[keys below](#report_totrackio)")
    prometheus: PrometheusSpec | None = Field(
        default=None, description="[keys below](#report_toprometheus)"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Convert names to default settings, also for a name without settings."""
        if isinstance(given, cls):
            return given
        if isinstance(given, dict):
            return {name: {} if value is None else value for name, value in given.items()}
        if given is None:
            return {}
        return {
            name: {} for name in _check_tracker_names([given] if isinstance(given, str) else given)
        }

    @model_serializer(mode="wrap")
    def _only_named(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unused trackers; an empty value would mean defaults."""
        return {name: value for name, value in serialize(self).items() if value is not None}

    def named(self) -> dict[str, Tracker]:
        """Return the settings of the trackers in use, by name."""
        every = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: settings for name, settings in every.items() if settings is not None}


NO_TRACKERS = Trackers()


def _check_tracker_names(names: Any) -> list[str]:
    """Check a list of tracker names."""
    every = ", ".join(Trackers.model_fields)
    if not isinstance(names, list | tuple):
        raise ValueError(f"give a name, a list of names, or settings by name; there are {every}")
    for number, name in enumerate(names):
        if not isinstance(name, str) or name not in Trackers.model_fields:
            raise ValueError(f"there is no tracker {name!r}; there are {every}")
        if name in names[:number]:
            raise ValueError(f"'{name}' is named twice")
    return list(names)
