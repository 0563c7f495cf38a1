"""Estimates without a measurement: for named cards, a cluster file, or the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumix.cli.common import is_cluster_file
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors
from gpumix.schema.units import show_bytes

if TYPE_CHECKING:
    from gpumix.hardware.estimates.adapters import FineTuning
    from gpumix.hardware.estimates.known_models import NamedDecoder
    from gpumix.schema.cluster.cluster import Cluster
    from gpumix.schema.job.job import Job, OptimizerSpec
    from gpumix.schema.plan.dtypes import Precision
    from gpumix.schema.plan.stage import ComputeDtype
    from gpumix.schema.profile.profile import Profile


@dataclass(frozen=True)
class NamedCluster:
    """A cluster to estimate for, with the words for it and the free memory of its hosts.

    Attributes:
        text: cards, or the path of a cluster file; None: the GPUs of this machine.
        network: link between hosts, as given.
        link_option: name of the option that gives it.
        known: the devices themselves, in place of the text.
    """

    text: str | None = None
    network: str | None = None
    link_option: str = "--network"
    known: Cluster | None = None

    @property
    def is_file(self) -> bool:
        return self.text is not None and is_cluster_file(self.text)

    def read(self, precision: Precision) -> Cluster:
        """Return the cluster, all of whose classes are cards of the catalogue.

        Raises:
            InputError: the text is wrong, or names devices that the catalogue does not know.
            MachineError: this machine is meant, and its driver reports an error.
        """
        from gpumix.hardware.discovery.discover import discover_cluster
        from gpumix.hardware.estimates.cluster_shorthand import with_catalogue_cards

        if self.known is not None:
            return with_catalogue_cards(self.known, precision)
        if self.text is not None:
            found = self.describe(precision)
            if not self.is_file:
                return found
            with locate_errors(self.text):
                return with_catalogue_cards(found, precision)
        self.refuse_network()
        found = discover_cluster()
        if not any(c.is_gpu for c in found.classes):
            raise InputError(
                "there is no GPU to plan for",
                code="no-gpu-to-plan-for",
                fix='name GPUs: gpumix plan --cluster "2x rtx4090, 4x rtx3090" --model 7B',
            )
        with locate_errors("this machine"):
            return with_catalogue_cards(found, precision)

    def describe(self, precision: Precision = "auto") -> Cluster:
        """Return the cluster of the cards or of the file.

        Raises:
            InputError: the text or the file is wrong.
        """
        from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
        from gpumix.schema.reading.read import read_cluster

        assert self.text is not None, "this machine's GPUs are discovered"
        if not self.is_file:
            return parse_cluster(self.text, precision, self.network, option=self.link_option)
        self.refuse_network()
        return read_cluster(Path(self.text))

    def explain_names(self) -> list[str]:
        """Say which cards are meant by names that fit several."""
        from gpumix.hardware.estimates.cluster_shorthand import explain_short_names

        return [] if self.text is None or self.is_file else explain_short_names(self.text)

    def refuse_network(self) -> None:
        """Refuse a link between hosts where no cards are named."""
        if self.network is not None:
            raise InputError(
                f"{self.link_option} has no effect on {self.text or 'this machine'}",
                code="option-without-effect",
                fix="leave it out; a cluster file states its own links",
            )


@dataclass(frozen=True)
class Estimate:
    """A question answered from datasheets: a model on a cluster, and how it is trained.

    Attributes:
        precision: compute dtype, or that of each class.
        ram_bytes: free memory of each host; None: assume as much as the GPUs of a host have.
    """

    cluster: NamedCluster
    model: NamedDecoder
    tuning: FineTuning
    optimizer: OptimizerSpec
    sequence_length: int
    global_batch: int
    precision: Precision | Mapping[str, ComputeDtype] = "auto"
    ram_bytes: int | None = None

    def profile(self) -> Profile:
        """Return the estimated profile."""
        from gpumix.hardware.estimates.adapters import freeze_base
        from gpumix.hardware.estimates.estimate import estimate_profile, return_no_parts
        from gpumix.schema.profile.profile import ModelProfile

        shape, length, name = self.model.shape, self.sequence_length, self.model.name
        cluster = self.cluster.read(self.precision)  # type: ignore[arg-type]
        ram_by_host = assume_ram_by_host(cluster)
        if self.ram_bytes is not None:
            ram_by_host = dict.fromkeys(ram_by_host, self.ram_bytes)

        def model_in(dtype: ComputeDtype) -> ModelProfile:
            whole = shape.model(length, dtype, name)
            return freeze_base(whole, shape.block_sizes, self.tuning, tokens=length)

        found = estimate_profile(
            model_in,
            cluster,
            sequence_length=length,
            precision=self.precision,  # type: ignore[arg-type]
            optimizer_bytes=self.optimizer.state_bytes_per_element(model_in("fp32")),
            optimizer_state=self.optimizer.state_form,
            parts_in=(lambda dtype: shape.parts(length, dtype, name))
            if self.tuning.trains_all
            else return_no_parts,
            ram_by_host=ram_by_host,
        )
        exchanges = self.optimizer.name == "muon"
        return found.model_copy(update={"exchanges_matrices": exchanges})

    def with_more(self, cards: str) -> Estimate:
        """Return the estimate for one more card on the first host."""
        first, *rest = (self.cluster.text or "").split(";")
        text = ";".join([f"{first}, {cards}", *rest])
        return replace(self, cluster=replace(self.cluster, text=text))

    def describe(self, profile: Profile) -> str:
        """Describe the assumptions of the estimate in a sentence."""
        from gpumix.hardware.estimates.estimate import list_assumed_classes

        dtypes = describe_compute_dtypes(profile)
        parts = [
            f"{self.model.name} ({self.model.shape.parameters / 1e9:.2f} B parameters)",
            self.tuning.describe(),
            f"sequence length {self.sequence_length}",
            f"global batch {self.global_batch}",
            dtypes,
            {"adamw": "AdamW", "adamw_8bit": "AdamW in 8 bits", "sgd": "SGD"}.get(
                self.optimizer.name, self.optimizer.name.capitalize()
            ),
        ]
        if self.ram_bytes is not None:
            parts.append(f"{show_bytes(self.ram_bytes)} of free RAM in each host")
        else:
            assumed = sorted(set(assume_ram_by_host(profile.cluster).values()))
            amounts = " to ".join(map(show_bytes, dict.fromkeys((assumed[0], assumed[-1]))))
            parts.append(
                f"{amounts} of free RAM in a host, as much as its GPUs have"
                if assumed[-1]
                else "no memory of a host besides that of its GPU"
            )
        if assumed_classes := list_assumed_classes(profile.estimated):
            first, *more = assumed_classes
            parts.append(
                f"the parts of their peaks that {' and '.join(assumed_classes)} reach"
                if more
                else f"the part of its peak that {first} reaches"
            )
        return "; ".join([", ".join(parts), *self.cluster.explain_names()])


def estimate_job(
    job: Job, path: Path, cluster: NamedCluster, ram_bytes: int | None = None
) -> Estimate:
    """Return the estimate for a job.

    Args:
        path: of the job's file, where relative names start.
        ram_bytes: free memory of each host, if known.

    Raises:
        InputError: the job's model is not known by its configuration.
    """
    from gpumix.hardware.estimates.adapters import FULL, FineTuning
    from gpumix.hardware.estimates.decoder_shapes import make_decoder
    from gpumix.hardware.estimates.known_models import NamedDecoder, read_config

    config = job.model.config
    if config is None:
        raise InputError(
            "estimates need a model with a `config`, this one has a factory",
            code="estimate-without-config",
            fix="measure it: `gpumix profile JOB.yaml`, then `gpumix whatif JOB.yaml`",
        )
    if not isinstance(config, dict):
        config = read_config(path.absolute().parent / config)
    lora = job.model.lora
    tuning = FULL if lora is None else FineTuning(lora.rank, job.model.base or "16bit")
    return Estimate(
        cluster,
        NamedDecoder(str(config.get("model_type", "")), make_decoder(config)),
        tuning,
        job.optimizer,
        job.sequence_length,
        job.global_batch_size,
        job.precision,
        ram_bytes,
    )


def assume_ram_by_host(cluster: Cluster) -> dict[str, int]:
    """Return the free memory that each host is taken to have if nothing says so: as much as its
    GPUs have together, except for those that use the memory of the host itself."""
    from gpumix.hardware.estimates.cluster_shorthand import find_class_card

    cards = {c.name: find_class_card(c) for c in cluster.classes}
    memory = {
        c.name: 0 if (card := cards[c.name]) and card.shares_host_memory else c.memory_bytes
        for c in cluster.classes
    }
    found: dict[str, int] = {}
    for device in cluster.devices:
        found[device.host] = found.get(device.host, 0) + memory[device.device_class]
    return found


def describe_compute_dtypes(profile: Profile) -> str:
    """Describe the dtype of all classes, or of each class."""
    dtypes = {c.device_class: c.compute_dtype for c in profile.classes}
    if len(set(dtypes.values())) == 1:
        return next(iter(dtypes.values()))
    return " and ".join(_dtypes_with_classes(dtypes))


def _dtypes_with_classes(dtypes: Mapping[str, ComputeDtype]) -> Iterator[str]:
    for dtype in dict.fromkeys(dtypes.values()):
        names = (name for name in dtypes if dtypes[name] == dtype)
        yield f"{dtype} ({', '.join(names)})"
