"""Checks of a job's model, tokenizer and data by opening them.

Ranks do the same before they measure or train; `check_contents` does it in one process that starts
none.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from gpumix.data.core.tokenizer import open_tokenizer
from gpumix.data.sources.open_data import open_data, require_held_out
from gpumix.data.sources.saved_dataset import count_saved_rows
from gpumix.data.text.files import probe_text
from gpumix.engine.optimizers.parameter_groups import match_names
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.engine.tensor_parallel.plans import resolve_tensor_plan
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.files import make_scratch_folder
from gpumix.schema.job.job import Job
from gpumix.schema.units import format_count, show_bytes
from gpumix.train.checks.attention_heads import check_config_heads
from gpumix.train.checks.job_warnings import warn_of_data
from gpumix.train.checks.loading_memory import check_loading_memory
from gpumix.train.checks.stage_count import check_job_stage_count
from gpumix.train.rank_setup.model import build_model, check_model_fits_data, get_vocabulary_size


def build_checked_model(job: Job, cluster: Cluster, folder: Path) -> nn.Module:
    """Build the job's model, without its large tensors. Foreign weights, parameter groups or tensor
    plans without a match, more stages than units, and too little memory to read weights are
    reported now, not after the measurement.
    """
    spec = job.model
    model = build_model(spec, folder=folder, seed=job.seed)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    match_names([group.match for group in job.optimizer.groups], trained)
    if spec.weights is not None:
        make_source(model, spec.weights)
    must_divide = 1 not in job.space.tensor_parallel_size
    if spec.tensor_plan is not None or must_divide:
        resolve_tensor_plan(model, spec.tensor_plan)
    if must_divide:
        check_config_heads(getattr(model, "config", None), cluster, job.space)
    anatomy = split_into_units(model, spec.units)
    check_job_stage_count(anatomy, job, cluster)
    check_loading_memory(anatomy, cluster)
    return model


def check_contents(job: Job, cluster: Cluster, folder: Path) -> tuple[str, list[str]]:
    """Check the model, tokenizer and data of a job, and leave nothing behind. Return a
    description of the data, and warnings.

    Factories of the job are called, as each rank calls them. Text and saved datasets are looked at,
    but not tokenized.

    Raises:
        GpumixError: one of them is missing or wrong.
    """
    check_model_fits_data(job, folder)
    build_checked_model(job, cluster, folder)
    data = job.data
    if data.text:
        named = job.tokenizer
        tokenizer = open_tokenizer(folder / named if isinstance(named, Path) else named)
        texts = tuple(folder / path for path in data.text)
        files = probe_text(data.model_copy(update={"text": texts}), tokenizer)
        size = show_bytes(sum(file.size for file in files))
        return f"{format_count(len(files), 'file')} of text, {size}", []
    if data.dataset is not None:
        rows = count_saved_rows(folder / data.dataset, data.column)
        return f"{format_count(rows, 'row')} of {data.dataset}", []
    with make_scratch_folder() as cache:
        vocabulary = get_vocabulary_size(job.model)
        train, held_out = open_data(job, folder, cache, vocabulary=vocabulary)
        require_held_out(job, held_out)
        warnings = warn_of_data(train, held_out, job.global_batch_size)
        if train.in_order:
            return f"a stream of {data.factory}", warnings
        return f"{format_count(len(train), 'sample')} of {data.factory}", warnings
