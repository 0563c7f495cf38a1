"""Compute settings of device classes: what a measurement uses, and its file's name depends on.

No torch here: `gpumix plan` finds measurements by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumix.hardware.estimates.kernel_choice import (
    PLAIN_SETTINGS,
    ChosenSettings,
    choose_kernel_settings,
)
from gpumix.hardware.host.environment import has_cpp_compiler, installed
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.cluster.kernels import EfficiencySpec
from gpumix.schema.job.compile_choice import choose_compiled_classes
from gpumix.schema.plan.dtypes import Precision, choose_compute_dtypes
from gpumix.schema.plan.stage import ComputeDtype


@dataclass(frozen=True)
class ClassSettings:
    """Compute settings of device classes, by class name.

    Attributes:
        dtypes: the compute dtype of each class.
        compiled: the classes with compiled units.
        chosen: other compute settings of each class; plain for classes not named.
    """

    dtypes: Mapping[str, ComputeDtype]
    compiled: frozenset[str] = frozenset()
    chosen: Mapping[str, ChosenSettings] = field(default_factory=dict)

    @classmethod
    def choose(
        cls,
        cluster: Cluster,
        precision: Precision,
        compile: bool | Mapping[str, bool],
        efficiency: EfficiencySpec,
    ) -> ClassSettings:
        """Choose the settings of a cluster's classes, given the packages and compilers here.

        Raises:
            InputError: a setting names an unknown class, or a class does not support it.
        """
        dtypes = choose_compute_dtypes(precision, cluster)
        compiled = choose_compiled_classes(compile, cluster, cpp_compiler=has_cpp_compiler())
        chosen = choose_kernel_settings(
            efficiency, cluster, dtypes=dtypes, compiled=compiled, installed=installed()
        )
        return cls(dtypes, compiled, chosen)

    def get_chosen(self, device_class: str) -> ChosenSettings:
        """Return the settings of a class besides dtype and compilation."""
        return self.chosen.get(device_class, PLAIN_SETTINGS)
