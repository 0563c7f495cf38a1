"""What `gpumix plan` prints: the answer first, in 80 columns; and what would help if nothing
fits."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest
import yaml

from gpumix.cli.planning import profile_source
from gpumix.hardware.discovery import discover
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster, split_count
from gpumix.hardware.host.environment import ALLOW
from gpumix.schema.plan.plan import Plan
from gpumix.train.console.text_page import round_duration
from helpers.runs.verbs import gpumix, measured, refused, write_job

SMALL = ("--sequence-length", "256", "--global-batch-size", "16")
ASKED = {
    "one stage": ("--cluster", "rtx3090, p40", "--model", "20M", *SMALL),
    "one card": ("--cluster", "l4", "--model", "20M", *SMALL),
    "stages": ("--cluster", "rtx3090, rtx3060", "--model", "1B"),
    "tp_groups": ("--cluster", "8x v100-16gb-sxm", "--model", "3B", "--global-batch-size", "64"),
    "hosts": ("--cluster", "2 hosts of 2x t4; l4", "--network", "10GbE", "--model", "60M", *SMALL),
    "long names": (
        "--cluster", "2x rtxpro6000-maxq, quadro-rtx8000, a2",
        "--model", "60M", *SMALL,
    ),
    "adapters": ("--cluster", "2x rtx3060", "--model", "llama-3-8b", "--lora", "8", *SMALL),
    "packed": (
        "--cluster", "2x rtx3060", "--model", "llama-3-8b", "--lora", "8", "--base", "nf4", *SMALL,
    ),
}  # fmt: skip


def page(*arguments: str) -> str:
    done = gpumix("plan", *arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module", params=ASKED)
def asked(request) -> tuple[str, Plan]:
    """The page and the plan of a question."""
    arguments = ASKED[request.param]
    plan = gpumix("plan", *arguments, "--json").stdout
    return page(*arguments), Plan.model_validate_json(plan)


def test_the_first_line_is_the_answer(asked):
    text, plan = asked
    first = text.splitlines()[0]
    error = "± unknown" if "rtxpro6000-maxq" in plan.estimated else "±33%"
    told = re.fullmatch(rf"Fits\. ~([\d,.]+) tokens/s, .* per step +estimate .*{error}", first)
    assert told is not None, first
    speed = float(told[1].replace(",", ""))
    assert speed == pytest.approx(plan.prediction.tokens_per_s, rel=0.06)
    assert len(told[1].replace(",", "").replace(".", "").strip("0")) <= 2


def test_no_line_is_wider_than_a_terminal_of_80_columns(asked):
    text, _ = asked
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[│┃━┏└]", text)


def test_the_table_has_a_row_for_each_type_of_each_stage(asked):
    text, plan = asked
    rows = re.findall(r"^(\d+)x (.*)$", text, re.MULTILINE)
    devices = {w.device for w in plan.workers}
    assert sum(int(count) for count, _ in rows) == len(devices)
    memory = {f"{p.memory_limit_bytes / 2**30:.1f}" for p in plan.prediction.workers}
    shown = set(re.findall(r"[\d.]+ of ([\d.]+)", text.partition("\nNext\n")[0]))
    assert shown <= memory and shown
    (total,) = re.findall(r"^total +(\d+)", text, re.MULTILINE)
    assert int(total) == plan.global_batch


def test_shares_of_the_state_come_to_all_of_it(asked):
    text, plan = asked
    rows = re.findall(r"^(\d+)x .*?([\d.]+)%( ea)?", text, re.MULTILINE)
    whole = sum(int(count) * float(share) for count, share, _ in rows)
    if plan.zero_stage or len(plan.stages) > 1:
        assert whole == pytest.approx(100, abs=len(plan.workers))


def test_the_memory_of_hosts_is_told_if_it_is_used(asked):
    text, plan = asked
    told = " ".join(text.split())
    used = sum(p.host_bytes for p in plan.prediction.workers)
    processes = max(Counter(worker.host for worker in plan.workers).values())
    loading = processes * plan.prediction.loading_bytes
    assert loading > 0
    assert ("of free system RAM" in told) == (used > 0 or loading >= 2**30)
    assert ("while weights load" in told) == (loading >= 2**30)


def test_next_commands_can_be_run(asked):
    text, _ = asked
    lines = [line.strip() for line in text.partition("\nNext\n")[2].splitlines()]
    commands = [line.partition("  ")[0].split() for line in lines]
    assert 2 <= len(commands) <= 4
    for words in commands:
        helped = gpumix(words[1], "--help").stdout
        assert all(word in helped for word in words if word.startswith("--"))


def test_verbose_has_every_device_and_the_bound():
    text = page(*ASKED["stages"], "--verbose")
    assert text.startswith(page(*ASKED["stages"]).rstrip())
    assert "collectives: " in text and "no plan of those searched" in text


def test_an_even_split_that_is_too_full_is_compared_in_passes():
    """As trainers do that accumulate gradients."""
    asked = ("--cluster", "rtx3090, rtx3060", "--model", "1B")
    even = ("--strategy", "even", "--json")
    assert gpumix("plan", *asked, *even).exit_code == 4  # at 128 samples
    half = gpumix("plan", *asked, "--global-batch-size", "64", *even).stdout
    step_s = 2 * Plan.model_validate_json(half).prediction.step_s
    plan = Plan.model_validate_json(gpumix("plan", *asked, "--json").stdout)
    told = {other.strategy: other for other in plan.reasons.alternatives}["even"]
    assert told.step_s == pytest.approx(step_s)
    assert "in 2 passes of 64 samples" in told.why
    assert f"{step_s / plan.prediction.step_s:.1f}x as fast as an even split" in page(*asked)


def test_the_gain_is_over_an_even_split_without_the_oldest_card():
    asked = ("--cluster", "rtx4090, 2x rtx3090, p40", "--model", "1B", "--global-batch-size", "32")
    plan = Plan.model_validate_json(gpumix("plan", *asked, "--json").stdout)
    told = {other.strategy: other for other in plan.reasons.alternatives}
    assert told["even without p40"].step_s < told["even"].step_s
    times = told["even without p40"].step_s / plan.prediction.step_s
    first = page(*asked).splitlines()[1]
    assert (
        first
        == f"{times:.1f}x as fast as an even split (as by FSDP or DeepSpeed) that leaves out P40."
    )


def test_one_gpu_is_compared_with_no_split():
    assert "even split" not in page(*ASKED["one card"])


# -- nothing fits ----------------------------------------------------------------------------------

TOO_LARGE = {
    "two cards": ("--cluster", "rtx3090, rtx3060", "--model", "3B"),
    "one card": ("--cluster", "p4", "--model", "1B", "--ram", "8GiB"),
    "adapters": ("--cluster", "rtx3060", "--model", "13B", "--lora", "16"),
}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(TOO_LARGE["two cards"], marks=pytest.mark.extended, id="two cards"),
        pytest.param(TOO_LARGE["one card"], id="one card"),
        pytest.param(TOO_LARGE["adapters"], id="adapters"),
    ],
)
def test_what_does_not_fit_says_what_would_and_it_does(arguments):
    done = gpumix("plan", *arguments)
    assert done.exit_code == 4 and done.stderr == ""
    assert done.stdout.startswith("Does not fit: ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    told = json.loads(gpumix("plan", *arguments, "--json").stdout)
    assert told["error"] == "NoFeasiblePlanError" and told["exit_code"] == 4
    ways = [way for way in told["remedies"] if way["change"].startswith("--")]
    assert any(way["fits"] for way in ways)
    said = " ".join(done.stdout.split())
    (ram,) = [way["change"].split()[1] for way in ways if way["change"].startswith("--ram")] or [""]
    short = f"What is short is free system RAM: offloading the rest takes {ram[:-3]} GiB in a host."
    total = sum(told["usable_bytes"].values())  # one of each type
    assert (short in said) is bool(ram and told["state_bytes"] >= total)
    for way in ways:
        assert way["change"] in done.stdout
        options = shlex.split(way["change"].partition(",")[0])
        kept = dict(zip(arguments[::2], arguments[1::2]))
        kept |= dict(zip(options[::2], options[1::2]))
        again = gpumix("plan", *(word for pair in kept.items() for word in pair), "--json")
        assert again.exit_code == (0 if way["fits"] else 4), (way, again.output)


@pytest.mark.extended
def test_more_cards_are_tried():
    told = json.loads(gpumix("plan", *TOO_LARGE["two cards"], "--json").stdout)
    fits = {way["change"]: way["fits"] for way in told["remedies"]}
    for card in ("rtx3090", "rtx3060"):
        cluster = f"rtx3090, rtx3060, {card}"
        done = gpumix("plan", "--cluster", cluster, "--model", "3B", "--json")
        assert (done.exit_code == 0) == fits[f"one more {card}"]


# -- the memory of hosts ---------------------------------------------------------------------------


@pytest.mark.parametrize("ram", ["60GiB", "96 GiB"])
def test_a_plan_uses_no_more_memory_of_hosts_than_there_is(ram):
    asked = ("--cluster", "2x rtx3090", "--model", "3B", "--global-batch-size", "32", "--ram", ram)
    done = gpumix("plan", *asked, "--json")
    plan = Plan.model_validate_json(done.stdout)
    used = sum(worker.host_bytes for worker in plan.prediction.workers)
    assert used <= int(ram[:2]) * 2**30


def test_more_memory_of_hosts_is_never_slower():
    asked = ("--cluster", "2x rtx3090", "--model", "3B", "--global-batch-size", "32")
    steps = [
        Plan.model_validate_json(gpumix("plan", *asked, "--ram", ram, "--json").stdout)
        for ram in ("50GiB", "70GiB", "512GiB")
    ]
    seconds = [plan.prediction.step_s for plan in steps]
    assert seconds == sorted(seconds, reverse=True)


# -- clusters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["2x rtx4090", "2 rtx4090", "RTX 4090 x2", "rtx4090x2", "2 × RTX 4090", "2*4090", "4090 x 2"],
)
def test_numbers_of_cards_in_any_order(text):
    found = parse_cluster(text)
    assert [c.name for c in found.classes] == ["rtx4090"]
    assert len(found.devices) == 2


@pytest.mark.parametrize(
    "text",
    [
        "rtx3090", "l40s", "a100-80gb-sxm", "4090", "3090 ti",
        "7900xtx", "9070xt", "7900XT", "7900 xtx", "max 1550",
    ],
)  # fmt: skip
def test_a_name_alone_is_one_card(text):
    assert split_count(text) == (None, text)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("2x 7900xtx", (2, "7900xtx")),
        ("2x7900xtx", (2, "7900xtx")),
        ("7900xtx x2", (2, "7900xtx")),
        ("9070xt x 2", (2, "9070xt")),
        ("4xt4", (4, "t4")),
        ("4x t4", (4, "t4")),
        ("4x titan xp", (4, "titan xp")),
    ],
)
def test_the_x_of_a_radeon_is_no_number(text, split):
    assert split_count(text) == split


def real_gpus(folder, *products: str):
    """A cluster file of GPUs as they are found on a host."""
    classes = {
        f"class-{n}": {"accelerator": "cuda", "memory": "24 GiB", "product": product}
        for n, product in enumerate(products)
    }
    devices = [{"class": name, "id": f"GPU-{n}", "ordinal": n} for n, name in enumerate(classes)]
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"classes": classes, "devices": devices}))
    return path


PRODUCTS = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090")


def test_a_cluster_file_is_estimated_for(tmp_path):
    path = real_gpus(tmp_path, *PRODUCTS)
    plan = gpumix("plan", "--cluster", path, "--model", "20M", *SMALL, "--json").stdout
    workers = Plan.model_validate_json(plan).workers
    assert {w.device_class for w in workers} == {"rtx4090", "rtx3090"}
    assert {w.device for w in workers} == {"GPU-0", "GPU-1"}


def test_without_a_cluster_the_plan_is_for_this_machine(tmp_path, monkeypatch):
    from gpumix.schema.reading.read import read_cluster

    here = read_cluster(real_gpus(tmp_path, *PRODUCTS))
    monkeypatch.setattr(discover, "discover_cluster", lambda: here)
    text = page("--model", "20M", *SMALL)
    assert "1x RTX 4090" in text and "1x RTX 3090" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "20M"), "there is no GPU to plan for"),
        (("--cluster", "2x rtx4090", "--base", "nf4"), "add --lora 16"),
        (("--cluster", "2x rtx4090", "--optimizer", "adamx"), "did you mean 'adamw'?"),
        (("--cluster", "2x rtx4090", "--ram", "much"), "--ram: "),
        (("--cluster", "2x rtx4090", "--ram", "64"), "'64' has no unit"),
        (("--cluster", "none.yaml"), "none.yaml"),
        (("--cluster", "2x rtx4090", "--model", "lama-3-8b"), "did you mean 'llama-3-8b'?"),
    ],
)
def test_wrong_questions_get_a_clear_answer(arguments, said):
    assert said in refused("plan", *arguments)


def test_devices_asks_for_the_link_between_named_hosts():
    named = ("devices", "--cluster", "2x rtx4090; p40")
    assert "nothing says how the 2 hosts are linked" in refused(*named)
    found = json.loads(gpumix(*named, "--network", "25GbE", "--json").stdout)
    assert {device["host"] for device in found["devices"]} == {"host-0", "host-1"}
    assert "--network has no effect" in refused("devices", "--network", "25GbE")


def test_emulated_and_unknown_devices_have_no_datasheet(tmp_path):
    path = tmp_path / "emulated.yaml"
    path.write_text("- {class: big, emulate: 40 GFLOP/s, memory: 1 GiB}\n")
    assert "no datasheet" in refused("plan", "--cluster", path)
    path = real_gpus(tmp_path, "NVIDIA Quantum 9000")
    assert "no card 'NVIDIA Quantum 9000'" in refused("plan", "--cluster", path)


# -- without torch ---------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
for name in ("torch", "greenlet", "safetensors", "transformers"):
    sys.modules[name] = None  # importing it is an error, as where it is not installed
from gpumix.cli import main
main()
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_planner_works_without_torch():
    done = without_torch("plan", *ASKED["one card"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Fits. ")


def test_what_needs_torch_says_how_to_install_it(tmp_path):
    job = write_job(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 500)
    done = without_torch("profile", str(job), "--set", "advanced.profile_cache=cache")
    assert done.returncode == 3, done.stderr
    assert "needs torch, which is not installed" in done.stderr
    assert 'pip install ".[transformers]"' in done.stderr


@pytest.mark.parametrize("verb", ["plan", "compare"])
def test_a_host_without_the_memory_to_read_weights_is_refused(verb):
    asked = ("--cluster", "2x rtx4090, 2x rtx3060", "--model", "7B", "--lora", "16")
    done = gpumix(verb, *asked, "--base", "nf4", "--ram", "1GiB")
    assert done.exit_code == 4
    assert "of RAM while weights load" in done.stderr and "fix: use fewer devices" in done.stderr


# -- of a job --------------------------------------------------------------------------------------


@pytest.fixture
def measured_job(tmp_path):
    measured().save(tmp_path / "profile.json")
    return write_job(tmp_path, max_steps=20_000)


def next_commands(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.partition("\nNext\n")[2].splitlines()]
    found = [line.partition("  ")[0] for line in lines if line.startswith("gpumix ")]
    return [shlex.split(command) for command in found]


def test_a_job_has_the_time_of_all_its_steps(measured_job):
    profile = measured_job.with_name("profile.json")
    plan = Plan.model_validate_json(
        gpumix("plan", measured_job, "--profile", profile, "--json").stdout
    )
    second = page(measured_job, "--profile", profile).splitlines()[1]
    hours, minutes = re.fullmatch(r"20,000 steps: about (\d+) h (\d+) min", second).groups()
    assert int(hours) * 60 + int(minutes) == pytest.approx(
        20_000 * plan.prediction.step_s / 60, abs=5.1
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(45.2, "45 s"), (119, "2 min"), (3594, "1 h 0 min"), (6610, "1 h 50 min"), (444e3, "5 d 3 h")],
)
def test_a_long_time_is_rounded(seconds, shown):
    assert round_duration(seconds) == shown


def test_next_commands_of_a_job_keep_what_was_given(measured_job, tmp_path, monkeypatch):
    monkeypatch.setenv(ALLOW, "toys")
    profile = measured_job.with_name("profile.json")
    given = ["--set", "global_batch_size=4", "--allow", "mine"]
    chosen = ["--strategy", "even"]
    job = [str(measured_job), *given]
    asked = (measured_job, *given, "--profile", profile, *chosen)
    write, train, compare, plan = next_commands(page(*asked))
    assert write == [
        "gpumix", "plan", *job, "--profile", str(profile), *chosen, "--output", "plan.json"
    ]  # fmt: skip
    assert train == ["gpumix", "train", *job, "--plan", "plan.json"]
    assert compare == ["gpumix", "compare", *job, "--profile", str(profile)]
    assert plan == ["gpumix", "plan", *job, "--profile", str(profile), *chosen, "--verbose"]
    written = tmp_path / "it.json"
    train, *_ = next_commands(page(*asked, "--set", "strategy=even", "--output", written))
    assert train == ["gpumix", "train", *job, "--plan", str(written)]


def test_a_job_on_cards_that_are_only_named_is_not_trained_next(tmp_path):
    asked = [str(write_job(tmp_path)), "--cluster", "2 hosts of rtx3090", "--network", "10GbE"]
    commands = next_commands(page(*asked))
    assert [words[1] for words in commands] == ["compare", "plan"]
    assert all(words[2:7] == asked for words in commands)


def test_a_job_on_a_cluster_file_is_trained_on_it(measured_job, tmp_path, monkeypatch):
    file = tmp_path / "devices.yaml"
    file.write_text(yaml.safe_dump([{"class": "l4", "emulate": "1 GFLOP/s", "memory": "1 GiB"}]))
    monkeypatch.setattr(profile_source, "load_cached_profile", lambda path, job: measured())
    asked = [str(measured_job), "--cluster", str(file)]
    train, *_ = next_commands(page(*asked, "--strategy", "even"))
    assert train == ["gpumix", "train", *asked, "--strategy", "even"]
