"""Jobs that train adapters, on a base as it is or quantised: as stock libraries do, on from
checkpoints of adapters alone, into a merged model; and what is wrong with one is said at once."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import tokens

from gpumix.engine.model.deferred_init import get_operation_log
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.hardware import runtime
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.reading.read import read_job
from gpumix.train.checkpoint.export import export
from gpumix.train.checkpoint.inspect import inspect
from gpumix.train.rank_setup.model import build_model
from helpers.errors import raises
from helpers.runs.adapter_jobs import (
    SAMPLES,
    STEPS,
    adapter_job,
    load_adapted,
    losses,
    stock_losses,
)
from helpers.runs.jobs import (
    LENGTH,
    checkpoints,
    metrics,
    plan_for,
    staged_plan_for,
    toy,
    train,
    write_job,
)
from helpers.training import quantised as q

pytest.importorskip("peft")

TOLERANCE = 1e-4
BASES = (None, *q.CONFIGS)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    pytest.importorskip("bitsandbytes")
    return q.save_base(tmp_path_factory.mktemp("base") / "weights")


@pytest.mark.parametrize("kind", BASES)
def test_a_job_trains_as_stock_libraries_do(base, tmp_path, kind):
    job = adapter_job(tmp_path, base, kind)
    train(job, plan=plan_for(job))
    assert losses(job) == pytest.approx(stock_losses(base, job), rel=TOLERANCE)


@pytest.mark.parametrize("kind", [None, "nf4-double"])
def test_so_it_does_with_dora(base, tmp_path, kind):
    job = adapter_job(tmp_path, base, kind, lora={"dora": True})
    train(job, plan=plan_for(job))
    assert losses(job) == pytest.approx(stock_losses(base, job), rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_goes_on_in_stages_from_adapters_alone(base, tmp_path, kind):
    job = adapter_job(tmp_path, base, kind)
    train(job, "max_steps=2", plan=plan_for(job))
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    adapters = sum(p.numel() for n, p in load_adapted(base, read_job(job).model).named_parameters()
                   if p.requires_grad)  # fmt: skip
    assert inspect(saved)[0].parameters == adapters
    told = json.loads((saved / "checkpoint.json").read_text())["checkpoint"]["base"]
    assert told["name"] == str(base)
    train(job, plan=staged_plan_for(job, [[SAMPLES], [SAMPLES]]), resume=True)
    assert losses(job) == pytest.approx(stock_losses(base, job), rel=TOLERANCE)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", BASES)
def test_the_merged_model_computes_what_the_adapted_one_did(base, tmp_path, kind, dora):
    from transformers import LlamaForCausalLM

    evaluation = {"eval_steps": STEPS, "eval_batches": 1}
    job = adapter_job(tmp_path, base, kind, lora={"dora": dora}, **evaluation)
    source = {"arguments": {"samples": 2 * SAMPLES}, "factory": "toys:tokens"}
    data = source | {"validation_split": 0.5}
    train(job, f"data={json.dumps(data)}", plan=plan_for(job))
    (evaluated,) = metrics(tmp_path / "run", "evaluation")
    folder = export(tmp_path / "run", tmp_path / "merged")
    model, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert (
        load_file(folder / "model.safetensors").keys()
        == load_file(base / "model.safetensors").keys()
    )
    rows = tokens(2 * SAMPLES, LENGTH)
    held_out = [
        model.eval()(**{key: torch.stack([row[key] for row in rows[half]]) for key in rows[0]}).loss
        for half in (slice(SAMPLES), slice(SAMPLES, None))
    ]
    # Which half is held out is for the job to say; weights of int8 are rounded to fp16 first.
    assert min(abs(loss.item() - evaluated["loss"]) for loss in held_out) < 2e-3
    _check_alone(base, tmp_path, kind, rows)
    before, after = (load_file(one / "model.safetensors") for one in (base, folder))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if "_proj" in name}


def _check_alone(base: Path, folder: Path, kind: str | None, rows: list[Any]) -> None:
    """The adapters alone, as PEFT loads them, make the same of the base."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    merged = LlamaForCausalLM.from_pretrained(folder / "merged").eval()
    alone = export(folder / "run", folder / "alone", adapters=True)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in alone.iterdir()}
    plain = LlamaForCausalLM.from_pretrained(base) if kind is None else q.load_base(base, kind)
    model = PeftModel.from_pretrained(plain, alone).eval()
    q.lay_out_nothing(model)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(merged(**batch).loss.item(), abs=2e-3)


def test_a_plan_counts_what_a_quantised_base_takes(base, tmp_path):
    """A job's profile and plan have its bytes, constants too, and a run takes what is planned."""
    job = adapter_job(tmp_path, base, "nf4")
    summary = train(job)
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    kinds = {kind["name"]: kind for kind in profile["model"]["kinds"]}
    counted = sum(kinds[kind]["packed_bytes"] for kind in profile["model"]["kind_of_call"])
    model = q.load_adapted(base, "nf4")
    assert counted == q.packed_bytes(model)
    assert counted > 1.12 * q.weights_of(model) / 2
    assert summary.steps == STEPS


def test_a_factorys_model_gets_adapters_too(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = toy(width=64) | {"lora": {"rank": 4, "targets": ["into"]}, "base": "nf4"}
    job = write_job(tmp_path, model=model, max_steps=STEPS)
    train(job)
    assert len(losses(job)) > 0
    names = {n for n in _index(tmp_path / "run") if n.startswith("model.")}
    assert names and all(".into.lora_" in name for name in names)
    with raises(InputError, code="code-not-allowed", what="toys:model"):
        export(tmp_path / "run", tmp_path / "merged")
    folder = export(tmp_path / "run", tmp_path / "merged", allowed=["toys"])
    assert "blocks.0.into.weight" in load_file(folder / "model.safetensors")


def _index(run: Path) -> dict[str, Any]:
    newest = run / "checkpoints" / checkpoints(run)[-1]
    found: dict[str, Any] = json.loads((newest / "index.json").read_text())["tensors"]
    return found


def test_a_run_whose_rank_is_killed_goes_on_from_adapters_in_memory(tmp_path):
    """The base is read again."""
    pytest.importorskip("bitsandbytes")
    more = {"lora": {"rank": 4}, "base": "nf4"}
    alone = write_job(tmp_path / "alone", model=toy(width=64) | more, max_steps=8)
    train(alone, plan=plan_for(alone))
    harm = {"fault": "kill", "rank": 1, "at": 4, "once": str(tmp_path / "killed")}
    job = write_job(
        tmp_path,
        model=toy(width=64, **harm) | more,
        max_steps=8,
        max_restarts=2,
        memory_save_steps=1,
    )
    train(job, plan=plan_for(job))
    (restart,) = metrics(tmp_path / "run", "restart")
    assert "was killed by signal 9" in restart["why"] and restart["resumed_from"] in (2, 3)
    assert losses(job) == pytest.approx(losses(alone), rel=1e-6)


def test_the_transposed_layers_of_gpt2_are_quantised_and_merged(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    job = adapter_job(tmp_path, tmp_path / "base", "nf4")
    train(job, "optimizer.lr=1e-6")
    folder = export(tmp_path / "run", tmp_path / "merged")
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "base", folder))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.shape == after[name].shape
        off = (value - after[name]).norm() / value.norm().clamp(min=1e-9)
        assert off < 0.15, name


# -- what is wrong ---------------------------------------------------------------------------------


def refused(kind: type[Exception], *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        train(*arguments, **options)
    return str(caught.value)


def test_a_base_whose_values_differ_is_refused_at_resume_and_export(base, tmp_path):
    own = shutil.copytree(base, tmp_path / "weights")
    job = adapter_job(tmp_path, own, "nf4")
    train(job, "max_steps=2", plan=plan_for(job))
    weights = load_file(own / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1.0
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    told = refused(InputError, job, plan=plan_for(job), resume=True)
    assert "the adapters belong to another base" in told
    assert "step-00000002" in told and str(own) in told
    with raises(InputError, code="adapters-of-another-base"):
        export(tmp_path / "run", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_format_or_rank_is_refused_at_resume(base, tmp_path):
    job = adapter_job(tmp_path, base, "nf4")
    train(job, "max_steps=2", plan=plan_for(job))
    for change, told in (
        ("model.base=int8", '`model.base` was "nf4", here it is "int8"'),
        ("model.lora.rank=8", "`model.lora.rank` was 4, here it is 8"),
    ):
        with raises(InputError, code="checkpoint-of-another-model") as caught:
            train(job, change, resume=True)
        assert told in str(caught.value)


def test_a_checkpoint_that_is_quantised_so_is_taken_and_another_refused(base, tmp_path):
    quantised = tmp_path / "quantised"
    q.load_base(base, "nf4").save_pretrained(quantised)
    job = adapter_job(tmp_path / "same", quantised, "nf4")
    train(job, plan=plan_for(job))
    alone = adapter_job(tmp_path / "alone", base, "nf4")
    train(alone, plan=plan_for(alone))
    assert losses(job) == pytest.approx(losses(alone), rel=1e-6)
    for kind, has in (("int8", "is quantised as int8"), (None, "is not quantised")):
        other = adapter_job(tmp_path / f"other-{kind}", quantised, kind)
        told = refused(InputError, other)
        assert "the weights are quantised as nf4" in told and has in told
        assert "set `model.base` to nf4" in told
    foreign = tmp_path / "foreign"
    shutil.copytree(base, foreign)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.qweight"] = weights.pop(
        "model.layers.0.self_attn.q_proj.weight"
    ).to(torch.int32)
    save_file(weights, foreign / "model.safetensors", metadata={"format": "pt"})
    told = refused(InputError, adapter_job(tmp_path / "gptq", foreign, "nf4"))
    assert "the weights are quantised as GPTQ or AWQ" in told


def test_a_package_that_is_missing_is_named(base, tmp_path, monkeypatch):
    job = adapter_job(tmp_path, base, "nf4")
    model = read_job(job).model
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(MachineError, code="package-missing", what="bitsandbytes"):
        build_model(model, folder=tmp_path, seed=0)
    monkeypatch.undo()
    library = importlib.import_module("bitsandbytes.cextension")
    broken = library.ErrorHandlerMockBNBNativeLibrary(
        "libcudart.so.12: cannot open shared object file"
    )
    monkeypatch.setattr(library, "lib", broken)
    monkeypatch.setattr(runtime, "is_available", lambda: True)
    with raises(MachineError, code="bitsandbytes-without-gpu-library") as caught:
        build_model(model, folder=tmp_path, seed=0)
    assert "libcudart.so.12" in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises(MachineError, code="package-missing", what="peft"):
        build_model(model, folder=tmp_path, seed=0)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"base": "nf4"}, "'base' is for 'lora'"),
        ({"lora": {}}, "rank"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"rank": 4, "targets": ["nobody"]}}, "PEFT cannot add these adapters"),
    ],
)
def test_what_is_wrong_with_adapters_is_said_before_anything_is_measured(
    base, tmp_path, model, told
):
    given = {"config": str(base / "config.json"), **model}
    job = write_job(tmp_path, model=given)
    assert told in refused(InputError, job)


def test_adapters_begin_alike_whatever_reads_them(base, tmp_path):
    """Small ones are made by the same rule as large ones."""
    spec = read_job(adapter_job(tmp_path, base, "nf4")).model
    found = []
    for _ in range(2):
        model = build_model(spec, folder=tmp_path, seed=3)
        assert get_operation_log(model) is not None
        source = make_source(model, spec.weights)
        named = [(n, p) for n, p in model.named_parameters() if "lora_A" in n]
        found.append([source(n, p, 0, p.numel()).numpy() for n, p in named])
    assert all(np.array_equal(one, other) for one, other in zip(*found))
    assert len({one.tobytes() for one in found[0]}) == len(found[0])
