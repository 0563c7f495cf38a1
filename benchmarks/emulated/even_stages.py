"""Plans that split all evenly over several stages: devices, layers, micro-batches and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumix.cost.network.link_times import select_collective_forms
from gpumix.cost.predict import predict
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Plan, Schedule, ZeroStage
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile

ROUNDS = 2  # stages of each device, where they are interleaved


@dataclass(frozen=True)
class EvenStages:
    """How devices in a row are divided into groups of equal size, and what they do.

    Attributes:
        stages: in a row; of interleaved ones each device has `ROUNDS`.
        samples: of a step; each device of a group runs equal parts of them.
        micro_batch: samples of one, which divides a device's part.
    """

    stages: int
    samples: int
    micro_batch: int
    schedule: Schedule
    mode: Mode
    zero_stage: ZeroStage = 0

    def plan(self, profile: Profile, devices: Sequence[Device]) -> Plan:
        """The plan, with its prediction; the devices must divide by the stages.

        Raises:
            InputError: the profile does not know what such a plan takes.
        """
        model, each = profile.model, len(devices) // self.stages
        count = self.stages * (ROUNDS if self.schedule == "interleaved" else 1)
        ends = [len(model.calls) * number // count for number in range(count + 1)]
        stages = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            first, needs = number % self.stages * each, model.needs_of(begin, end)
            stages.append(
                Stage(
                    units=model.calls[begin:end],
                    workers=tuple(
                        self._worker(profile, device, each)
                        for device in devices[first : first + each]
                    ),
                    takes=needs.outputs,
                    root=needs.root,
                )
            )
        plan = Plan(
            strategy="even stages",
            model=model.fingerprint,
            sequence_length=profile.sequence_length,
            global_batch=self.samples,
            communication_dtype=choose_communication_dtype(
                c.compute_dtype for c in profile.classes
            ),
            stages=tuple(stages),
            schedule=self.schedule,
            zero_stage=self.zero_stage,
            collectives=select_collective_forms(profile),
            emulated=profile.cluster.emulated,
        )
        return plan.model_copy(update={"prediction": predict(profile, plan)})

    def _worker(self, profile: Profile, device: Device, each: int) -> Worker:
        return Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=self.samples // each,
            micro_batch=self.micro_batch,
            state_share=1.0 / each,
            mode=self.mode,
            compute_dtype=profile.of_class(device.device_class).compute_dtype,
        )
