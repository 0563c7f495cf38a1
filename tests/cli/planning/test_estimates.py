"""`gpumix plan --cluster` and `gpumix whatif`: answers before anything is bought, and what is wrong
with the question."""

from __future__ import annotations

import json

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.runs.verbs import gpumix, heavy_imports, measured, refused, write_job

CARDS = "rtx3090, p40"  # few: plans are found soon
SMALL = ("--model", "20M", "--sequence-length", "512", "--global-batch-size", "16")
LABEL = "estimate from datasheets"


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


@pytest.fixture
def from_profile(job):
    """A job with the profile that was measured for it."""
    measured().save(job.with_name("profile.json"))
    return (job, "--profile", job.with_name("profile.json"))


def planned(*arguments) -> Plan:
    done = gpumix("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return Plan.model_validate_json(done.stdout)


def outlooks(*arguments) -> list[dict]:
    done = gpumix("whatif", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# -- plan --cluster --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "network", "hosts"),
    [
        ("2x rtx3090, p40", None, {"host-0": 3}),
        ("rtx3090; 2x p40", "25GbE", {"host-0": 1, "host-1": 2}),
        ("2 hosts of a100-80gb-sxm, 1x l4", "ib-hdr", {"host-0": 2, "host-1": 2}),
        ("2 hosts of t4", "12 GB/s", {"host-0": 1, "host-1": 1}),
    ],
)  # fmt: skip
def test_a_cluster_in_one_line(job, text, network, hosts):
    link = () if network is None else ("--network", network)
    plan = planned(job, "--cluster", text, *link)
    used = {host: [w for w in plan.workers if w.host == host] for host in hosts}
    assert sum(map(len, used.values())) == len(plan.workers)
    for host, workers in used.items():  # some may be left out
        assert len(workers) <= hosts[host]
    assert set(plan.estimated) == {w.device_class for w in plan.workers}
    assert plan.prediction.step_s > 0


def test_a_better_link_is_no_worse(job):
    steps = [
        planned(job, "--cluster", "t4; t4", "--network", link).prediction.step_s
        for link in ("10GbE", "ib-ndr")
    ]
    assert steps[0] >= steps[1]


def test_the_table_says_that_it_is_an_estimate_and_what_of():
    done = gpumix("plan", "--cluster", CARDS, *SMALL)
    assert LABEL in done.stdout
    assert "sequence length 512, global batch 16" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_what_each_card_computes_in_is_told_where_they_differ(job):
    cluster = ("--cluster", "v100-16gb-pcie, rtx3090")
    shown = " ".join(gpumix("plan", *cluster, *SMALL, "--verbose").stdout.split())
    assert "bf16 (rtx3090) and fp16 (v100-16gb-pcie), AdamW" in shown
    assert "v100-16gb-pcie computes in fp16: it computes fast in fp16 and has no bf16" in shown
    one = ("--cluster", "v100-16gb-pcie")
    half = gpumix("plan", *one, *SMALL, "--precision", "fp16", "--verbose").stdout
    assert "fp16, AdamW" in " ".join(half.split())
    assert "computes in" not in half
    both = ("--set", "techniques.leave_out=false", "--verbose")
    slow = gpumix("plan", job, *cluster, *both, "--set", "precision=bf16").stdout
    assert "v100-16gb-pcie computes in bf16: as asked; bf16 is computed in software" in slow


def test_a_name_that_fits_several_forms_is_told():
    said = " ".join(gpumix("plan", "--cluster", "8x a100, 2x rtx4090", *SMALL).stdout.split())
    assert "a100 is a100-80gb-sxm (not a100-40gb-sxm, a100-80gb-pcie, a100-40gb-pcie)" in said
    assert "rtx4090 is" not in said
    assert "8x A100 SXM4 80GB" in said
    said = " ".join(gpumix("plan", "--cluster", "4x max 1550", *SMALL).stdout.split())
    assert "max 1550 is max1550-tile, half of one: each is two devices" in said
    assert "mi250-gcd is" not in gpumix("plan", "--cluster", "2x mi250-gcd", *SMALL).stdout


@pytest.mark.parametrize(
    ("cards", "dtype"),
    [
        ("2x 7900xtx", "bf16"), ("9070xt, r9700", "bf16"), ("2x 6800 xt", "fp16"),
        ("2x a770", "bf16"), ("4x max 1550", "bf16"), ("8x gaudi2", "bf16"), ("m40", "fp32"),
        ("dgx-spark", "bf16"), ("rtx4090 laptop", "bf16"),
    ],
)  # fmt: skip
def test_cards_of_all_makers_are_planned_for(cards, dtype):
    plan = planned("--cluster", cards, *SMALL)
    assert {w.compute_dtype for w in plan.workers} == {dtype}


def test_estimates_without_published_times_say_that_their_error_is_unknown():
    for cards, known in (("2x rtx4090", True), ("8x gaudi2", True), ("2x 7900xtx", False)):
        page = gpumix("plan", "--cluster", cards, *SMALL).stdout
        assert ("±33%" in page, "± unknown" in page) == (known, not known)
    said = " ".join(gpumix("plan", "--cluster", "7900xtx, r9700", *SMALL).stdout.split())
    assert "the parts of their peaks that r9700 and rx7900xtx reach" in said
    said = " ".join(gpumix("plan", "--cluster", "7900xtx", *SMALL).stdout.split())
    assert "the part of its peak that rx7900xtx reaches" in said
    table = gpumix("compare", "--cluster", "2x 7900xtx", *SMALL).stdout
    assert "± unknown" in table.partition("\n\n")[0]


def test_a_card_that_uses_the_memory_of_its_host_has_no_other():
    said = " ".join(gpumix("plan", "--cluster", "gb10", *SMALL).stdout.split())
    assert "no memory of a host besides that of its GPU" in said
    asked = ("--cluster", "gb10", "--model", "13B", "--global-batch-size", "8")
    assert "Does not fit" in gpumix("plan", *asked).stdout


def test_a_cluster_may_be_longer_than_the_name_of_a_file():
    many = ", ".join(["rtx3090"] * 40)
    assert "rtx3090" in refused("plan", "--cluster", f"{many}, no-such-card", *SMALL)


def test_a_card_that_cannot_compute_in_a_dtype_is_refused():
    error = refused("plan", "--cluster", CARDS, *SMALL, "--precision", "bf16")
    assert "device class 'p40' does not compute in bf16" in error


def test_of_a_job_its_own_model_batch_and_optimizer_count(job):
    several = ("--cluster", "2x rtx3090, p40", "--set", "techniques.zero_stages=1")
    fp32 = (*several, "--set", "precision=fp32")
    plan = planned(job, *fp32)
    assert (plan.sequence_length, plan.global_batch, plan.communication_dtype) == (128, 8, "fp32")
    assert planned(job, *several).communication_dtype == "bf16"
    assert LABEL in gpumix("plan", job, *several).stdout
    momentum = ("--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.9")
    states = [
        sum(w.memory_bytes["state"] for w in found.prediction.workers)
        for found in (plan, planned(job, *fp32, *momentum))
    ]
    assert states[0] > 0
    assert states[1] == pytest.approx(states[0] / 2, rel=0.01)


def test_a_configuration_serves_as_a_model(job, tmp_path):
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4,
              "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    length = ("--sequence-length", "128", "--global-batch-size", "2")
    plan = planned("--cluster", CARDS, "--model", tmp_path / "config.json", *length)
    assert sum(len(stage.units) for stage in plan.stages) == 4


def test_a_plan_of_a_profile_that_was_estimated_says_so(job, tmp_path):
    output = ("--output", tmp_path / "plan.json")
    assert gpumix("plan", job, "--cluster", CARDS, *output).exit_code == 0
    beside = tmp_path / "plan.profile.json"
    assert Profile.load(beside).estimated == ("p40", "rtx3090")
    assert LABEL in gpumix("plan", job, "--profile", beside).stdout
    assert planned(job, "--profile", beside).estimated


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is no GPU to plan for"),
        (("--cluster", "4x rtx3091"), "no card 'rtx3091'"),
        (("--cluster", "4x rtx3091"), "rtx3090"),
        (("--cluster", "8x rtx6000"), "'rtx6000' fits several cards"),
        (("--cluster", "8x rtx6000"), "rtx6000-ada"),
        (("--cluster", "2x k80"), "torch has kernels from compute capability 5.0 on"),
        (("--cluster", ""), "'' is not a number of cards"),
        (("--cluster", "0x t4"), "'0x t4' is not a number of cards"),
        (("--cluster", "t4,,l4"), "'' is not a number of cards"),
        (("--cluster", "0 hosts of t4"), "there are no hosts in '0 hosts of t4'"),
        (("--cluster", "300000x t4"), "up to 200000 devices"),
        (("--cluster", "300000 hosts of t4"), "up to 200000 devices"),
        (("--cluster", "t4; t4"), "nothing says how the 2 hosts are linked"),
        (("--cluster", "t4; t4"), "--network 25GbE"),
        (("--cluster", "t4; t4", "--network", "0GbE"), "--network: a link must move more than 0"),
        (("--cluster", "t4; t4", "--network", "quick"), "--network: 'quick' is not a link"),
        (("--cluster", "4x t4", "--network", "25GbE"), "there is only one"),
        (("--network", "25GbE"), "--network has no effect without --cluster"),
        (("--cluster", "t4", "--profile", "p.json"), "give one of them"),
        (("--cluster", "t4", "--set", "max_steps=3"), "--set replaces keys of a job"),
        (("--cluster", "t4", "--model", "7X"), "there is no model '7X' to plan for"),
        (("--cluster", "t4", "--model", "900T"), "no model of 900000 B parameters"),
        (("--cluster", "t4", "--model", "0B"), "no model of 0 B parameters"),
        (("--cluster", "t4", "--strategy", "best"), "no strategy 'best'"),
        (("--cluster", "t4, mi300x"), "t4 and mi300x cannot train together"),
        (("--cluster", "2x b580, 7900xtx"), "rx7900xtx and b580 cannot train together"),
        (("--cluster", "max1100, gaudi3"), "XCCL of Intel and HCCL of Gaudi form no common group"),
    ],
)
def test_a_wrong_question_is_one_error(arguments, said):
    assert said in refused("plan", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "7B"), "--model has no effect on a job"),
        (("--cluster", "t4", "--global-batch-size", "8"),
         "--global-batch-size has no effect on a job"),
        (("--network", "25GbE"), "--network has no effect without --cluster"),
        (("--cluster", "t4", "--profile", "profile.json"), "give one of them"),
        (("--cluster", __file__), "this is not YAML"),
        (("--cluster", "t4", "--set", 'model={"factory": "a:b"}'), "need a model with a `config`"),
        (("--cluster", "t4", "--set", "model.config.model_type=bert"), "models of type 'bert'"),
        (("--cluster", "t4", "--set", "model.config.hidden_size=many"),
         "'hidden_size' of the model's configuration must be a whole number from 1"),
    ],
)  # fmt: skip
def test_a_wrong_question_about_a_job_is_one_error(job, arguments, said):
    assert said in refused("plan", job, *arguments)


@pytest.mark.parametrize("content", ["", "[1]", "{", "null"])
def test_a_configuration_that_is_none_is_one_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    said = refused("plan", "--cluster", "t4", "--model", tmp_path / "config.json")
    assert "config.json: " in said


def test_a_model_that_no_card_holds_is_told_in_bytes():
    asked = ("--cluster", "2x p40", "--model", "70B")
    said = " ".join(gpumix("plan", *asked).stdout.split())
    assert "Does not fit: Llama-shaped 70B" in said and "2x P40 (21.1 GiB usable)" in said
    said = refused("compare", *asked, code=4)
    assert "2 x p40: no plan fits a global batch of 128" in said
    assert "p40 can use 2" in said
    assert "more on each p40 would do" in said


# -- whatif ----------------------------------------------------------------------------------------


def test_each_change_and_all_together(from_profile):
    changes = ("--add", "2x quick", "--add", "t4", "--remove", "tardy", "--inside", "pcie4")
    found = outlooks(*from_profile, *changes)
    assert [o["change"] for o in found] == [
        "now", "add 2x quick", "add t4", "remove tardy",
        "inside pcie4", "all together",
    ]  # fmt: skip
    assert [o["devices"] for o in found] == [
        {"quick": 2, "tardy": 1},
        {"quick": 4, "tardy": 1},
        {"quick": 2, "tardy": 1, "t4": 1},
        {"quick": 2},
        {"quick": 2, "tardy": 1},
        {"quick": 4, "t4": 1},
    ]
    assert [o["estimated"] for o in found] == [[], [], ["t4"], [], [], ["t4"]]
    now = found[0]
    assert now["worth"] is None
    for outlook in found[1:]:
        expected = outlook["tokens_per_s"] / now["tokens_per_s"] - 1
        assert outlook["worth"] == pytest.approx(expected)


def test_what_is_worth_is_what_planning_says(from_profile):
    found = outlooks(*from_profile, "--remove", "tardy")
    assert found[0]["step_s"] == planned(*from_profile).prediction.step_s


def test_one_change_comes_alone(from_profile):
    assert len(outlooks(*from_profile, "--add", "quick")) == 2


def test_the_table_has_prices_and_labels_what_is_estimated(from_profile):
    prices = ("--price", "quick=1.5,tardy=0.25", "--price", "t4=0.35")
    shown = gpumix("whatif", *from_profile, "--add", "t4", *prices).stdout
    assert "price/1e9 tokens" in shown
    assert f"times of t4 are an {LABEL}" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert " 3.25 " in shown
    assert " 3.60 " in shown
    assert LABEL not in gpumix("whatif", *from_profile, "--add", "quick").stdout
    assert "price" not in gpumix("whatif", *from_profile, "--add", "quick").stdout


def test_prices_in_json(from_profile):
    now, then = outlooks(*from_profile, "--add", "quick", "--price", "quick=1.5, tardy=0.25")
    assert (now["price_per_hour"], then["price_per_hour"]) == (3.25, 4.75)
    seconds = 1e9 / then["tokens_per_s"]
    assert then["price_per_billion_tokens"] == pytest.approx(4.75 / 3600 * seconds)


def test_new_cards_are_said_to_stand_on_a_host_where_there_are_several(job):
    asked = ("--cluster", "rtx3090; rtx3090", "--between", "100GbE")
    _, like, other = outlooks(job, *asked, "--add", "rtx3090", "--add", "p40")[:3]
    assert like["change"] == "add rtx3090 on host-0"
    assert other["change"] == "add p40 on new-host"


def test_of_an_estimate(job):
    asked = ("--cluster", "rtx3090; p40", "--between", "10GbE", "--network", "100GbE")
    for question in ((*asked, *SMALL), (job, *asked)):
        now, then = outlooks(*question)
        assert then["tokens_per_s"] >= now["tokens_per_s"]
        assert set(now["estimated"]) == {"rtx3090", "p40"}
    assert LABEL in gpumix("whatif", job, *asked).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is nothing to change"),
        (("--add", "voodoo2"), "no card 'voodoo2'"),
        (("--add", "0x quick"), "'0x quick' is not a number of cards"),
        (("--add", "2x rtx6000"), "'rtx6000' fits several cards"),
        (("--remove", "t4"), "no class 't4' to remove"),
        (("--remove", "twoquick"), "did you mean 'quick'?"),
        (("--remove", "0x quick"), "'0x quick' is not a number of cards"),
        (("--remove", "9x quick"), "of class 'quick' cannot be removed: there are 2"),
        (("--remove", "quick", "--remove", "tardy"), "no device is left"),
        (
            ("--remove", "quick", "--remove", "1x quick"),
            "remove 1x quick is not possible after the other changes: there is no class",
        ),
        (("--network", "0 GB/s"), "--network: a link must move more than 0"),
        (("--network", "fast"), "--network: 'fast' is not a link"),
        (("--network", "25GbE"), "--network: '25GbE' would link hosts, and there is only one"),
        (("--inside", "fast"), "--inside: 'fast' is not a link"),
        (("--between", "25GbE", "--add", "t4"), "--between has no effect without --cluster"),
        (("--add", "quick", "--price", "quick=1.5"), "class 'tardy' has no price"),
        (("--add", "quick", "--price", "t4=1.5"), "there is no class 't4' to pay for"),
        (("--add", "quick", "--price", "tardi=1"), "did you mean 'tardy'?"),
        (("--add", "quick", "--price", "quick"), "--price: '' is no price"),
        (("--add", "quick", "--price", "quick=-1"), "--price: '-1' is no price"),
        (("--add", "quick", "--price", "quick=nan"), "--price: 'nan' is no price"),
    ],
)
def test_a_wrong_change_is_one_error(from_profile, arguments, said):
    assert said in refused("whatif", *from_profile, *arguments)


def test_hosts_want_a_link_between_them():
    said = refused("whatif", "--cluster", "t4; t4", "--add", "l4")
    assert "--between 25GbE" in said
    said = refused("whatif", "--cluster", "t4; t4", "--between", "0GbE", "--add", "l4")
    assert "--between: a link must move more than 0" in said


# -- without torch ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_imports_torch(from_profile):
    found = heavy_imports(
        from_profile[0].parent,
        ("plan", "job.yaml", "--cluster", "rtx3090; p40", "--network", "25GbE"),
        ("plan", "job.yaml", "--cluster", CARDS),
        ("plan", "job.yaml", "--profile", "profile.json"),
        ("whatif", "job.yaml", "--profile", "profile.json", "--add", "t4", "--inside", "pcie4"),
        ("whatif", "--cluster", CARDS, "--remove", "p40", *SMALL),
        ("plan", "--cluster", "4x rtx3091"),
    )
    assert list(found.values()) == [*[[0]] * 5, [2]], found
