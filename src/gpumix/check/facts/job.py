"""Requirements of a job, and their state on a host. Builds the model without tensors and reads a
little of the data; tokenizes and writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from gpumix.check.facts.cluster import JobHostFacts
from gpumix.data.core.tokenizer import open_tokenizer
from gpumix.data.sources.open_data import open_data
from gpumix.data.sources.saved_dataset import fingerprint_saved
from gpumix.data.text.files import find_files
from gpumix.hardware.host.environment import cache_folder, has_cpp_compiler
from gpumix.schema.errors import GpumixError, format_install_command
from gpumix.schema.files import open_for_reading
from gpumix.schema.job.job import Job, OptimizerSpec
from gpumix.train.rank_setup.model import build_model, check_model_fits_data, get_vocabulary_size
from gpumix.train.run_log import run_files

MASTER_BYTES = 4  # parameters are stored and saved in fp32
MOST_FILES = 2000  # files of a text corpus opened at most
# Packages required by keys of a job, and the commands installing them.
_INSTALLS = {
    "transformers": format_install_command("transformers"),
    "tokenizers": format_install_command("transformers"),
    "datasets": format_install_command("datasets"),
    "flash_attn": "pip install flash-attn",
    "liger_kernel": "pip install liger-kernel",
    "triton": "pip install triton",
}


def check_job_on_host(job: Job, folder: Path) -> JobHostFacts:
    """Check a job's packages, data and model on this host."""
    missing = find_missing_packages(job)
    found: dict[str, tuple[str, str]] = {}
    told: list[tuple[str, int]] = []
    if "datasets" not in missing and "tokenizers" not in missing:
        _record_errors("data", found, lambda: told.append(_check_data(job, folder)))
    if "transformers" not in missing:
        _record_errors("model", found, lambda: check_model_fits_data(job, folder))
    data, size = told[0] if told else ("", 0)
    return JobHostFacts(missing=missing, data=data, data_bytes=size, trouble=found)


def find_missing_packages(job: Job) -> dict[str, str]:
    """Return packages required by the job's keys and absent here, with install commands."""
    needed = {
        "transformers": job.model.config is not None,
        "tokenizers": job.tokenizer != "bytes",
        "datasets": job.data.dataset is not None,
        "flash_attn": _requires_option(job.advanced.efficiency.attention, "flash"),
        "liger_kernel": _requires_option(job.advanced.efficiency.kernels, "liger"),
        "triton": _requires_option(job.advanced.efficiency.loss, "triton"),
    }
    lacking = [name for name, wanted in needed.items() if wanted and find_spec(name) is None]
    missing = {name: _INSTALLS[name] for name in lacking}
    asked = job.torch_compile
    compiled = asked is True or (isinstance(asked, dict) and any(asked.values()))
    if compiled and not has_cpp_compiler():
        missing["a C++ compiler"] = "apt-get install g++, or leave out `torch_compile` in the job"
    return missing


def estimate_checkpoint_bytes(job: Job, folder: Path) -> int:
    """Return an upper bound of the bytes of one checkpoint."""
    return count_state_bytes(build_model(job.model, folder=folder, seed=job.seed), job.optimizer)


def count_state_bytes(model: torch.nn.Module, optimizer: OptimizerSpec) -> int:
    """Return the bytes of master parameters, buffers and trained parameters' optimizer state."""
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    buffers = sum(b.nbytes for b in model.buffers())
    state = sum(map(optimizer.most_state_bytes, trained))
    return sum(trained) * MASTER_BYTES + state + frozen * MASTER_BYTES + buffers


def saved_bytes(output: Path) -> int:
    """Return the bytes of the checkpoints in a run's folder."""
    saved = (output / run_files.CHECKPOINTS).rglob("*")
    return sum(path.stat().st_size for path in saved if path.is_file())


def _requires_option(value: object, wanted: str) -> bool:
    return wanted in (value.values() if isinstance(value, dict) else (value,))


def _record_errors(
    check: str, found: dict[str, tuple[str, str]], work: Callable[[], object]
) -> None:
    """Run `work`, recording errors of gpumix and of the job's code as findings."""
    try:
        work()
    except GpumixError as error:
        where = f" ({error.where})" if error.where else ""
        why = f": {error.why}" if error.why else ""
        told = (f"{error.what}{where}{why}", error.fix)
        if told not in found.values():  # both checks need the tokenizer
            found[check] = told
    except Exception as error:
        found[check] = (
            f"the job's own code failed: {type(error).__name__}: {error}",
            "gpumix train JOB.yaml --debug shows where",
        )


def _check_data(job: Job, folder: Path) -> tuple[str, int]:
    """Return a mark of the data and the bytes of text, as far as known without tokenizing."""
    data = job.data
    if isinstance(job.tokenizer, Path):
        open_tokenizer(folder / job.tokenizer)
    if data.dataset is not None:
        return fingerprint_saved(folder / data.dataset), 0
    if data.text:
        return _check_text_files(job, folder)
    train, _ = open_data(
        job, folder, cache_folder() / "tokens", vocabulary=get_vocabulary_size(job.model)
    )
    train.rows(np.zeros(1, dtype=np.int64))
    return f"{len(train)} samples, {train.fingerprint}", 0


def _check_text_files(job: Job, folder: Path) -> tuple[str, int]:
    """Mark text files by name and size; equal files may differ in modification time."""
    places = tuple(folder / path for path in job.data.text)
    files = find_files(job.data.model_copy(update={"text": places}))
    for file in files[:MOST_FILES]:
        with open_for_reading(file.path) as stream:
            stream.read(1)
    sizes = [(file.path.name, file.size) for file in files]
    mark = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    return f"{len(files)} files, {mark}", sum(file.size for file in files)
