"""Comparison of two runs: figures, plans and jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpumix.report.facts import ClassFacts, DeviceGroup, RunFacts
from gpumix.report.run import Run
from gpumix.train.run_figures import words

LONGEST_TEXT = 32  # of a cell in a terminal; longer facts are on the page
LITTLE = 0.01  # a smaller difference in speed is none
IGNORED_KEYS = ("output", "strategy")  # of a job: always different; told of the plans


@dataclass(frozen=True)
class ComparedRow:
    """A fact of both runs, as texts, with the difference if it is worth a word."""

    what: str
    first: str
    second: str
    difference: str = ""

    @classmethod
    def of(cls, what: str, texts: Iterable[str], difference: str = "") -> ComparedRow:
        first, second = texts
        return cls(what, first, second, difference)


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side."""

    first: RunFacts
    second: RunFacts

    @cached_property
    def names(self) -> tuple[str, str]:
        """Names of both runs; of equal names, with their folders."""
        one, other = self.first.run, self.second.run
        if one.name != other.name:
            return one.name, other.name
        return str(one.folder), str(other.folder)

    @property
    def verdict(self) -> str:
        """Which run is faster, and which reaches the lower loss, in a sentence."""
        return "; ".join(filter(None, (self._describe_speed(), self._describe_loss())))

    def _describe_speed(self) -> str:
        speeds = [one.answer.best for one in (self.first, self.second)]
        rates = [one.tokens_per_s for one in speeds]
        if not rates[0] or not rates[1]:
            return "the speed of one run is unknown"
        factor = rates[1] / rates[0]
        sources = " (predicted)" if "predicted" in {one.source for one in speeds} else ""
        if abs(factor - 1) < LITTLE:
            return f"both runs are equally fast{sources}"
        fast, slow = self.names[::-1] if factor > 1 else self.names
        return f"{fast} is {max(factor, 1 / factor):.2f}× as fast as {slow}{sources}"

    def _describe_loss(self) -> str:
        """Compare losses at the last step that both have."""
        losses = [{s.step: s.loss for s in one.run.history.steps} for one in self._both]
        common = losses[0].keys() & losses[1].keys()
        if not common:
            return ""
        step = max(common)
        texts = [f"{one[step]:.4f}" for one in losses]
        if texts[0] == texts[1]:
            return f"the same loss at step {step:,} ({texts[0]})"
        return (
            f"loss at step {step:,}: {texts[0]} in {self.names[0]}, {texts[1]} in {self.names[1]}"
        )

    @property
    def _both(self) -> tuple[RunFacts, RunFacts]:
        return self.first, self.second

    @cached_property
    def figures(self) -> tuple[ComparedRow, ...]:
        return tuple(self._list_figures())

    def _list_figures(self) -> Iterator[ComparedRow]:
        one, other = self._both
        figures = one.figures, other.figures
        rates = [found.tokens_per_s for found in figures]
        yield ComparedRow.of("tokens/s", map(words.format_number, rates), _describe_change(*rates))
        times = [found.step_s for found in figures]
        yield ComparedRow.of(
            "step time", map(words.format_seconds, times), _describe_change(*times)
        )
        gaps = (words.describe_gap(f.slower_than_planned) or words.UNKNOWN for f in figures)
        yield ComparedRow.of("against the plan", gaps)
        ideal = (one.answer.fraction_of_ideal, other.answer.fraction_of_ideal)
        yield ComparedRow.of("of all GPUs alone", map(words.format_fraction, ideal))
        losses = (f.run.progress.loss for f in self._both)
        yield ComparedRow.of("training loss, last", map(_format_loss, losses))
        validation = (_get_validation_loss(f.run) for f in self._both)
        yield ComparedRow.of("validation loss, last", map(_format_loss, validation))
        steps = (
            words.format_progress(f.run.progress.step, f.run.progress.steps) for f in self._both
        )
        yield ComparedRow.of("progress", steps)
        for name in _join(_names(one), _names(other)):
            pair = [_find(facts, name) for facts in self._both]
            yield from _list_class_figures(name, pair)

    @cached_property
    def plans(self) -> tuple[ComparedRow, ...]:
        """Differences of the plans."""
        plans = self.first.figures.plan_now, self.second.figures.plan_now
        rows = [
            ComparedRow.of(what, map(str, values))
            for what, values in (
                ("strategy", [plan.strategy for plan in plans]),
                ("ZeRO stage", [plan.zero_stage for plan in plans]),
                ("pipeline stages", [len(plan.stages) for plan in plans]),
                ("samples per step", [plan.global_batch for plan in plans]),
                ("tokens per sample", [plan.sequence_length for plan in plans]),
                ("GPUs", [len(plan.workers) for plan in plans]),
            )
        ]
        groups = [_name_groups(facts) for facts in self._both]
        for name in _join(*groups):
            pair = [named.get(name) for named in groups]
            rows += _list_group_facts(name, pair)
        return tuple(row for row in rows if row.first != row.second)

    @cached_property
    def jobs(self) -> tuple[ComparedRow, ...]:
        """Differences of the jobs' keys; empty if a run has no job."""
        records = [one.run.record for one in self._both]
        if any(record is None or record.script is not None for record in records):
            return ()
        first, second = (dict(_flatten(record.job)) for record in records if record is not None)
        return tuple(
            ComparedRow(key, first.get(key, words.UNKNOWN), second.get(key, words.UNKNOWN))
            for key in _join(first, second)
            if first.get(key) != second.get(key) and key.partition(".")[0] not in IGNORED_KEYS
        )

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines for a terminal: what differs, as far as it is short."""
        yield self.verdict
        rows = [row for row in (*self.figures, *self.plans, *self.jobs) if row.first != row.second]
        short = [row for row in rows if max(map(len, _texts(row))) <= LONGEST_TEXT]
        head = ComparedRow("", *self.names)
        widths = [max(map(len, column)) for column in zip(*map(_texts, [head, *short]))]
        for row in [head, *short]:
            cells = [text.ljust(width) for text, width in zip(_texts(row), widths)]
            yield "  ".join([*cells, row.difference]).rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        return {
            "runs": [one.as_dict() for one in self._both],
            "verdict": self.verdict,
            "plan_differences": [_as_dict(row) for row in self.plans],
            "job_differences": [_as_dict(row) for row in self.jobs],
        }


def compare_runs(first: Run, second: Run) -> RunComparison:
    return RunComparison(RunFacts(first), RunFacts(second))


def _texts(row: ComparedRow) -> Sequence[str]:
    return row.what, row.first, row.second


def _as_dict(row: ComparedRow) -> dict[str, str]:
    return {"what": row.what, "first": row.first, "second": row.second}


def _list_class_figures(name: str, pair: Sequence[ClassFacts | None]) -> Iterator[ComparedRow]:
    busy = [None if one is None else one.busy_share for one in pair]
    yield ComparedRow.of(f"{name}: busy", map(words.format_fraction, busy))
    peaks = [None if one is None else one.peak_bytes for one in pair]
    shown = map(words.format_bytes, peaks)
    yield ComparedRow.of(f"{name}: memory", shown, _describe_change(*peaks))


def _describe_change(first: float | None, second: float | None) -> str:
    """Describe the second value as a change of the first."""
    gap = words.compute_gap(first, second)
    return "" if gap is None else "equal" if abs(gap) < LITTLE else f"{gap:+.0%}"


def _name_groups(facts: RunFacts) -> dict[str, DeviceGroup]:
    """Return the groups of GPUs by type, and by stage if there are several."""
    several = len(facts.run.plan.stages) > 1
    return {
        f"stage {one.stage + 1}, {one.device_class}" if several else one.device_class: one
        for one in facts.groups
    }


def _list_group_facts(name: str, pair: Sequence[DeviceGroup | None]) -> Iterator[ComparedRow]:
    """Yield what the plans have each GPU of a type do."""

    def row(what: str, shown: Callable[[DeviceGroup], str]) -> ComparedRow:
        texts = (words.UNKNOWN if one is None else shown(one) for one in pair)
        return ComparedRow.of(f"{name}: {what}", texts)

    yield row("GPUs", lambda one: f"{one.devices}")
    yield row("samples each", lambda one: one.samples_each.format_with(words.format_number))
    yield row("micro-batch", lambda one: f"{one.micro_batch}")
    yield row("training state stored", _describe_stored)
    yield row("mode", lambda one: one.mode)
    yield row("tensor-parallel group", lambda one: f"{one.tensor_parallel}")
    yield row("compute dtype", lambda one: one.compute_dtype)


def _describe_stored(one: DeviceGroup) -> str:
    return "all" if one.stored is None else one.stored_each.format_with(words.format_fraction)


def _join(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """Return the names in either, each once."""
    return list(dict.fromkeys([*first, *second]))


def _names(facts: RunFacts) -> Sequence[str]:
    return [one.device_class for one in facts.classes]


def _find(facts: RunFacts, name: str) -> ClassFacts | None:
    return next((one for one in facts.classes if one.device_class == name), None)


def _get_validation_loss(run: Run) -> float | None:
    evaluations = run.history.evaluations
    return evaluations[-1].loss if evaluations else None


def _format_loss(loss: float | None) -> str:
    return words.UNKNOWN if loss is None else f"{loss:.4f}"


def _flatten(job: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a job, with dots, and their values as texts."""
    for key, value in job.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)
