"""Values in files of their own: what was saved is loaded, or an error says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gpumix.schema import files
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.plan.explanation import (
    Bottlenecks,
    ClassWorth,
    MixingComparison,
    Reasons,
    RejectedPlan,
)
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import (
    ROOT,
    ClassProfile,
    Collectives,
    CollectiveTimes,
    ModelProfile,
    Profile,
    RootUnit,
    UnitKind,
    UnitTimes,
)
from helpers.errors import raises

CLUSTER = Cluster(
    classes=(
        DeviceClass(name="fast", accelerator="cpu", memory_bytes=96 << 20, emulate_flops_per_s=8e9),
        DeviceClass(name="slow", accelerator="cpu", memory_bytes=48 << 20, emulate_flops_per_s=2e9),
    ),
    devices=(
        Device(id="b", device_class="fast", host="h"),
        Device(id="a", device_class="fast"),
        Device(id="c", device_class="slow"),
    ),
)
CURVE = Curve(sizes=(1, 2.5), values=(1e-3, 0.1 + 0.2))


def make_plan(**changes) -> Plan:
    workers = (worker("a", 7, 2, 0.3), worker("b", 1, 1, 0.7))
    fields = {
        "strategy": "optimal",
        "model": "abc",
        "sequence_length": 32,
        "global_batch": 8,
        "stages": (Stage(units=("h.0", "h.1"), workers=workers),),
        "prediction": Prediction(
            step_s=0.1,
            tokens_per_s=2560,
            exposed_communication_s=0,
            workers=(
                WorkerPrediction(
                    device="a", forward_s=0.1, backward_s=0.2, optimizer_s=0, busy_s=0.2,
                    memory_bytes={"state": 3, "framework": 4}, memory_limit_bytes=10,
                ),
            ),
        ),
        "reasons": Reasons(
            mixing=MixingComparison(pays=True, best_class="fast", speedup=1.5),
            binds=Bottlenecks(compute=("fast",)),
            worth=(ClassWorth(device_class="fast", whole=None, one_more=0.1),),
            alternatives=(RejectedPlan(strategy="even", step_s=None, why="does not fit"),),
        ),
    }  # fmt: skip
    return Plan(**(fields | changes))


def worker(device, samples, micro_batch, share):
    return Worker(
        device=device, device_class="fast", samples=samples, micro_batch=micro_batch,
        state_share=share,
    )  # fmt: skip


def make_profile() -> Profile:
    times = UnitTimes(forward=CURVE, backward=CURVE)
    kind = UnitKind(
        name="Block", trainable=10, kept=CURVE, gradient=CURVE, forward=CURVE, backward=CURVE
    )
    return Profile(
        sequence_length=32,
        optimizer_bytes_per_element=8,
        torch_version="2.11",
        cluster=CLUSTER,
        model=ModelProfile(
            fingerprint="abc",
            compute_dtype="bf16",
            calls=("h.0", "h.0", "h.1"),
            kind_of_call=("Block", "Block", "Block"),
            kinds=(kind,),
            root=RootUnit(trainable=5, kept=CURVE, head=CURVE),
        ),
        classes=tuple(
            ClassProfile(
                device_class=name, units={"Block": times, ROOT: times},
                optimizer_s_per_element=1e-9, framework_bytes=3, largest_micro_batch=4,
                compute_dtype="bf16",
            )
            for name in ("fast", "slow")
        ),
        collectives=Collectives(gather="native"),
        network=(CollectiveTimes(operation="gather", form="native", times=CURVE),),
    )  # fmt: skip


@pytest.fixture(params=[make_plan, make_profile], ids=["plan", "profile"])
def document(request):
    return request.param()


def test_what_was_saved_is_loaded(document, tmp_path):
    path = tmp_path / "new" / "folders" / "document.json"
    document.save(path)
    assert type(document).load(path) == document
    assert type(document).load(path).digest() == document.digest()
    assert [p.name for p in path.parent.iterdir()] == ["document.json"]


def test_infinity_survives(tmp_path):
    path = tmp_path / "plan.json"
    endless = Prediction(
        step_s=0.0, tokens_per_s=float("inf"), exposed_communication_s=0.0, workers=()
    )
    make_plan(prediction=endless).save(path)
    assert Plan.load(path).prediction.tokens_per_s == float("inf")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    make_plan().save(path)

    def full(*_args, **_more):
        raise OSError("no space left on device")

    for step in ("fdopen", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, step, full)
            with raises(MachineError, code="file-not-writable", where=path) as caught:
                make_plan(model="other").save(path)
        assert caught.value.why == "no space left on device"
        assert Plan.load(path) == make_plan()


def test_values_are_frozen_and_digests_tell_them_apart():
    plan = make_plan()
    with pytest.raises(ValidationError, match="frozen"):
        plan.strategy = "even"
    assert plan.digest() != make_plan(strategy="even").digest()
    assert plan.digest() == make_plan().digest()


def mixing(**changes) -> dict[str, Any]:
    return {"reasons": {"binds": {"compute": ["fast"]}, "mixing": changes}}


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        (
            {"kind": "profile"},
            "",
            {"code": "document-of-another-kind", "what": ("plan", "profile")},
        ),
        ({"schema_version": 2}, "", {"code": "schema-unsupported", "what": (1, 2)}),
        ({"surprise": 1}, ": surprise", {"code": "document-invalid", "what": "surprise"}),
        (
            {"global_batch": 0},
            ": global_batch",
            {"code": "document-invalid", "what": "global_batch"},
        ),
        ({"global_batch": 9}, "", {"code": "document-invalid", "what": (8, 9)}),
        ({"collectives": {"padding": 2.5}}, "", {"code": "document-invalid", "what": 2}),
        ({"collectives": {"gather": "padded"}}, "", {"code": "document-invalid", "what": "1.4"}),
        (
            mixing(pays=False),
            ": reasons.mixing",
            {"code": "document-invalid", "what": "best_class"},
        ),
        (
            mixing(pays=True, speedup=1.5),
            ": reasons.mixing",
            {"code": "document-invalid", "what": ("best_class", "speedup")},
        ),
    ],
)
def test_a_wrong_document(tmp_path, change, place, said):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan().model_dump(mode="json") | change))
    with raises(InputError, **said) as caught:
        Plan.load(path)
    assert caught.value.where == f"{path}{place}"
    assert caught.value.fix.endswith("make one with `gpumix plan JOB.yaml --output plan.json`")


def test_a_document_of_a_newer_version_says_so(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan().model_dump(mode="json") | {"schema_version": 2}))
    with pytest.raises(InputError) as caught:
        Plan.load(path)
    assert caught.value.why == "a newer gpumix wrote it"
    assert caught.value.fix.startswith("install that version; or make one")


def test_a_folder_that_holds_a_plan_is_told_which_file_to_give(tmp_path):
    with raises(InputError, code="document-unreadable") as caught:
        Plan.load(tmp_path)
    assert caught.value.why == "Is a directory"
    assert caught.value.fix.startswith("make one")
    make_plan().save(tmp_path / "plan.json")
    with pytest.raises(InputError) as caught:
        Plan.load(tmp_path)
    assert caught.value.fix == f"give {tmp_path / 'plan.json'}"


@pytest.mark.parametrize("content", ["model: {}", '{"kind": "profile"}', "[1]", None])
def test_what_is_no_plan_is_not_overwritten(tmp_path, content):
    path = tmp_path / "job.yaml"
    path.mkdir() if content is None else path.write_text(content)
    with raises(InputError, code="document-not-overwritten"):
        make_plan().save(path)
    assert content is None or path.read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]


def test_only_an_older_plan_is_overwritten(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"kind": "plan", "schema_version": 99}')
    with raises(InputError, code="schema-unsupported", what=(1, 99)):
        make_plan().save(path)
    assert '"schema_version": 99' in path.read_text()
    path.write_text('{"kind": "plan", "schema_version": 0}')
    make_plan().save(path)
    assert Plan.load(path) == make_plan()


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.999], ids=["empty", "begun", "nearly whole"])
def test_a_plan_that_was_not_written_to_its_end_is_overwritten(tmp_path, cut):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    text = path.read_text()
    path.write_text(text[: int(cut * len(text))])
    make_plan().save(path)
    assert path.read_text() == text


def test_what_a_crash_left_of_a_file_is_overwritten_if_it_was_a_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(bytes(4096))
    make_plan().save(path)
    part = make_profile().model_dump_json(indent=1)[:200]
    newer = '{"kind": "plan", "schema_version": 99, "mod'
    for text, said in (
        (part, {"code": "document-not-overwritten"}),
        ('{"kind', {"code": "document-not-overwritten"}),
        (newer, {"code": "schema-unsupported", "what": 99}),
    ):
        path.write_text(text)
        with raises(InputError, **said):
            make_plan().save(path)
        assert path.read_text() == text


def test_a_profile_is_no_plan(tmp_path):
    make_profile().save(tmp_path / "profile.json")
    with raises(InputError, code="document-of-another-kind", what="profile"):
        Plan.load(tmp_path / "profile.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b'{"kind": "plan"'])
def test_a_broken_file(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        Plan.load(tmp_path / "plan.json")
    assert caught.value.where == str(tmp_path / "plan.json")


def test_no_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with raises(InputError, code="document-unreadable"):
            Plan.load(path)


def test_clusters_survive_json_and_forget_the_order_of_devices():
    assert Cluster.model_validate_json(CLUSTER.model_dump_json()) == CLUSTER
    assert [d.id for d in CLUSTER.members("fast")] == ["a", "b"]
    assert CLUSTER.device("c").device_class == "slow"


@pytest.mark.parametrize(
    ("classes", "devices", "said"),
    [
        (CLUSTER.classes * 2, CLUSTER.devices, "device class 'fast'"),
        (CLUSTER.classes, CLUSTER.devices * 2, "device 'b'"),
        (CLUSTER.classes[:1], CLUSTER.devices, "class 'slow'"),
        ((), CLUSTER.devices, "at least 1"),
        (CLUSTER.classes, (), "at least 1"),
    ],
)
def test_a_cluster_that_contradicts_itself(classes, devices, said):
    with pytest.raises(ValidationError, match=said):
        Cluster(classes=classes, devices=devices)


def test_a_unit_that_is_called_twice_has_its_parameters_once():
    assert make_profile().model.parameters == 5 + 2 * 10


@pytest.mark.parametrize(
    ("sizes", "values", "said"),
    [
        ((1, 2), (1,), "2 sizes but 1 values"),
        ((2, 1), (1, 1), "must be positive and grow"),
        ((0, 1), (1, 1), "must be positive and grow"),
        ((1, float("inf")), (1, 1), "should be a finite number"),
        ((float("nan"),), (1,), "should be a finite number"),
        ((1, 2), (1, float("nan")), "should be a finite number"),
        ((1, 2), (1, -1), "must not be negative"),
        ((1, 2), (1, 1e300), "is beyond"),
    ],
)
def test_a_curve_that_is_none(sizes, values, said):
    with pytest.raises(ValidationError, match=said):
        Curve(sizes=sizes, values=values)
