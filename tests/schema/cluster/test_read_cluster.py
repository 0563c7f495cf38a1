"""Both written forms of a cluster, in a file and inline, and what can be wrong in them."""

from __future__ import annotations

import json

import pytest

from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.reading.cluster_file import format_cluster
from gpumix.schema.reading.read import read_cluster, read_job
from helpers.errors import raises

LONG = """\
classes:
  fast: {memory: 96 MiB, emulate: 8 GFLOP/s}
  slow: {memory: 48 MiB, emulate: 2 GFLOP/s}
devices:
  - {class: fast}
  - {class: slow, count: 2, host: b}
  - {class: slow, id: my-slow-one}
"""
SHORT = """\
- {class: fast, emulate: 8 GFLOP/s, memory: 96 MiB}
- {class: slow, count: 2, emulate: 2 GFLOP/s, memory: 48 MiB}
"""
REAL = """\
classes:
  rtx3090: {memory: 24 GiB, product: NVIDIA GeForce RTX 3090}
  gtx1060: {memory: 6 GiB}
devices:
  - {id: GPU-1, class: rtx3090, host: a, ordinal: 0}
  - {id: GPU-2, class: gtx1060, host: a, ordinal: 1}
  - {class: rtx3090, count: 2, host: b}
"""
JOB = """\
model: {config: {model_type: gpt2}}
data: {text: [corpus]}
sequence_length: 32
global_batch_size: 8
max_steps: 10
cluster:
"""


def indented(text):
    return "".join(f"  {line}\n" for line in text.splitlines())


@pytest.fixture
def read(tmp_path):
    """Reads a cluster from a file, and checks that it says the same inline in a job."""

    def _read(text: str) -> Cluster:
        (tmp_path / "cluster.yaml").write_text(text)
        (tmp_path / "job.yaml").write_text(JOB + indented(text))
        cluster = read_cluster(tmp_path / "cluster.yaml")
        assert read_job(tmp_path / "job.yaml").cluster == cluster
        return cluster

    return _read


def test_the_long_form(read):
    cluster = read(LONG)
    assert [d.id for d in cluster.devices] == ["fast-0", "slow-0", "slow-1", "my-slow-one"]
    assert [d.host for d in cluster.devices] == ["localhost", "b", "b", "localhost"]
    slow = cluster.class_named("slow")
    assert (slow.memory_bytes, slow.emulate_flops_per_s, slow.accelerator) == (48 << 20, 2e9, "cpu")
    assert cluster.emulated
    linked = read(LONG.replace("2 GFLOP/s", "2 GFLOP/s, emulate_link: 200 MB/s"))
    assert [c.emulate_link_bytes_per_s for c in linked.classes] == [None, 2e8]
    assert format_cluster(linked)["classes"]["slow"]["emulate_link"] == 2e8


def test_the_short_form(read):
    cluster = read(SHORT)
    assert [d.id for d in cluster.devices] == ["fast-0", "slow-0", "slow-1"]
    assert [c.name for c in cluster.classes] == ["fast", "slow"]


def test_rows_of_the_short_form_may_share_a_class(read):
    cluster = read(SHORT + "- {class: fast, emulate: 8e9, memory: 96 MiB, host: b}\n")
    assert [c.name for c in cluster.classes] == ["fast", "slow"]
    assert [d.id for d in cluster.members("fast")] == ["fast-0", "fast-1"]


def test_real_devices(read):
    cluster = read(REAL)
    assert [c.accelerator for c in cluster.classes] == ["cuda", "cuda"]
    assert cluster.class_named("rtx3090").describe() == "NVIDIA GeForce RTX 3090"
    assert [(d.host, d.ordinal) for d in cluster.devices] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1)]  # fmt: skip
    assert not cluster.emulated


def test_a_cpu_can_be_a_real_device(read):
    cluster = read("- {class: cpu, memory: 1 GiB, accelerator: cpu, count: 2}\n")
    assert cluster.classes[0].accelerator == "cpu"
    assert not cluster.emulated


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("model: {factory: a:b}\ndata: {text: [a]}\nmax_steps: 3\n", "job"),
        ('{"kind": "plan", "schema_version": 1, "stages": []}', "plan"),
    ],
)
def test_another_file_is_said_to_be_one(read, text, kind):
    with raises(InputError, code="document-of-another-kind", what=kind) as caught:
        read(text)
    assert "also" not in str(caught.value) and "classes and devices" in caught.value.fix


def test_links_are_named_or_measured_curves(read):
    text = LONG + (
        "network:\n  between: 25GbE\n  inside: {times: {sizes: [1000, 1e6], values: [0.1, 2]}}\n"
        "  exceptions: [{where: inside, classes: [slow, slow], link: nvlink3}]\n"
    )
    network = read(text).network
    assert network.of("between", "fast", "slow").name == "25GbE"
    assert network.of("inside", "fast", "slow").times.values == (0.1, 2.0)
    assert network.of("inside", "slow", "slow").name == "nvlink3"


def test_islands_and_racks_are_stated(read):
    text = REAL.replace("count: 2, host: b", "count: 2, host: b, island: x, rack: r")
    found = read(text + "network: {between: 25GbE, island: nvlink3, rack: 100GbE, inside: pcie4}\n")
    assert [(d.host, d.island, d.rack) for d in found.devices] == [
        ("a", "", ""),
        ("a", "", ""),
        ("b", "x", "r"),
        ("b", "x", "r"),
    ]
    where = {"island": "nvlink3", "inside": "pcie4", "rack": "100GbE", "between": "25GbE"}
    assert {w: found.network.of(w, "rtx3090", "gtx1060").name for w in where} == where
    assert read(json.dumps(format_cluster(found))) == found


@pytest.mark.parametrize("cards", ["2x b580", "gaudi2", "7900xtx, r9700"])
def test_cards_of_other_makers_survive_a_file(read, cards):
    found = parse_cluster(cards)
    assert read(json.dumps(format_cluster(found))) == found


def test_a_cluster_survives_json(read):
    cluster = read(REAL)
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize(
    ("text", "line", "key", "expected"),
    [
        (LONG.replace("emulate: 2 GFLOP/s", "emulate: 2"), 3, "classes.slow",
         "'{}': 'emulate' is 2 FLOP/s, 1 MFLOP/s is the least: give its unit, as in '8 GFLOP/s'"),
        (SHORT.replace("emulate: 2 GFLOP/s", "emulate: 900 KFLOP/s"), 2, "[1]",
         "'{}': 'emulate' is 900 KFLOP/s"),
        (LONG.replace("emulate: 2", "emulat: 2"), 3, "classes.slow.emulat",
         "unknown key '{}'\n  fix: did you mean 'emulate'?"),
        (LONG.replace("host: b", "hots: b"), 6, "devices[1].hots",
         "unknown key '{}'\n  fix: did you mean 'host'?"),
        (LONG.replace("devices", "device"), 4, "device",
         "unknown key '{}'\n  fix: did you mean 'devices'?"),
        (LONG.replace("memory: 48 MiB, ", ""), 3, "classes.slow.memory",
         "'{}' is missing\n  fix: add memory: 24 GiB"),
        (LONG.replace("48 MiB", "512"), 3, "classes.slow",
         "'{}': 'memory' is 512 B: give its unit, as in '24 GiB'"),
        (LONG.replace("48 MiB", "48 MB/s"), 3, "classes.slow.memory",
         "'{}': '48 MB/s' is not an amount such as '24 GiB' (units:"),
        (LONG.replace("48 MiB", "1e999 TiB"), 3, "classes.slow.memory",
         "'{}': '1e999 TiB' is not a finite number of bytes"),
        (LONG.replace("48 MiB", "0"), 3, "classes.slow.memory",
         "'{}' must be greater than 0, it is 0"),
        (LONG.replace("emulate: 2 GFLOP/s", "emulate_link: 2 GB/s"), 3, "classes.slow",
         "'{}': 'emulate_link' is the link of an emulated device: give 'emulate' too"),
        (LONG.replace("2 GFLOP/s", "2 GFLOP/s, emulate_link: 2 GFLOP"), 3,
         "classes.slow.emulate_link", "'{}': '2 GFLOP' is not a rate such as '12 GB/s'"),
        (LONG.replace("2 GFLOP/s", "0"), 3, "classes.slow.emulate",
         "'{}' must be greater than 0, it is 0"),
        (LONG.replace("emulate: 2 GFLOP/s", "emulate: 1e9, accelerator: cuda"), 3, "classes.slow",
         "'{}': 'emulate' makes a device of a CPU process, not of a cuda device"),
        (LONG.replace("slow: {", "s l o w: {"), 3, "classes.s l o w",
         "'{}' must be of letters, digits, '.', '_' and '-', a letter or digit first, "
         "it is 's l o w'"),
        (LONG.replace("{class: fast}", "fast"), 5, "devices[0]",
         "'{}' must be a mapping, it is 'fast'"),
        (LONG.replace("{class: fast}", "{class: fats}"), 5, "",
         "class 'fats' is not defined\n  fix: did you mean 'fast'?"),
        (LONG.replace("count: 2", "count: 0"), 6, "devices[1].count",
         "'{}' must be 1 or more, it is 0"),
        (LONG.replace("my-slow-one", "me, count: 2"), 7, "devices[2]",
         "'{}': 2 devices cannot share the id 'me'"),
        (LONG.replace("my-slow-one", "slow-1"), 7, "",
         "device id 'slow-1' is given twice (first at [6])\n  fix: give each an id of its own"),
        (LONG.replace("id: my-slow-one", "ordinal: 1"), 7, "",
         "'ordinal' has no effect: class 'slow' is not of GPUs\n  fix: leave it out"),
        (LONG.replace(", emulate: 2 GFLOP/s", ""), 3, "",
         "class 'slow' is real, 'fast' is emulated; a cluster is all one or all the other "
         "(first at [2])\n  fix: give 'emulate' to every class or to none"),
        (SHORT + "- {class: fast, emulate: 1e9, memory: 96 MiB}\n", 3, "",
         "class 'fast' is defined twice, and differently (first at [1])"),
        (SHORT + "- {clas: fast, emulate: 1, memory: 96 MiB}\n", 3, "[2].clas",
         "unknown key '{}'\n  fix: did you mean 'class'?"),
        (SHORT + "- fast\n", 3, "[2]", "'{}' must be a mapping, it is 'fast'"),
        (REAL.replace("ordinal: 1", "ordinal: 0"), 6, "",
         "two devices are GPU 0 of host 'a' (first at [5])\n"
         "  fix: give each its 'ordinal'"),
        (REAL.replace("GPU-2", "GPU-1"), 6, "", "device id 'GPU-1' is given twice (first at [5])"),
        (LONG + "network: {between: 0 GB/s}\n", 8, "network.between",
         "'{}': a link must move more than 0 bytes a second, not 0"),
        (LONG + "network: {inside: -1 GB/s}\n", 8, "network.inside",
         "'{}': '-1 GB/s' is not a link such as '25GbE', '12 GB/s' or one of ib-fdr,"),
        (LONG + "network: {}\n", 8, "network", "'{}': a network names at least one link"),
        (LONG + "network: {island: nvlink3}\n", 8, "network.island",
         "'island' has no effect: no device is in one"),
        (REAL.replace("ordinal: 1}", "ordinal: 1, rack: r}"), 6, "devices[1].rack",
         "host 'a' is in rack 'r' here, and in '' before"),
        (LONG + "network: {betwen: 25GbE}\n", 8, "network.betwen",
         "unknown key '{}'\n  fix: did you mean 'between'?"),
        (LONG + "network: {inside: {times: {sizes: [1, 2], values: [1, -1]}}}\n", 8,
         "network.inside.times", "'{}': values must not be negative, they are (1.0, -1.0)"),
        (LONG + "network: {inside: {times: {sizes: [], values: []}}}\n", 8,
         "network.inside.times.sizes", "'{}' must be of length 1 or more"),
        (LONG + "network:\n  exceptions:\n"
         "  - {where: inside, classes: [fast, slwo], link: pcie3}\n", 10, "",
         "class 'slwo' is not defined\n  fix: did you mean 'slow'?"),
    ],
)  # fmt: skip
def test_one_wrong_thing_in_a_file_and_inline(tmp_path, text, line, key, expected):
    for name, content, offset, above in (
        ("cluster.yaml", text, 0, ""),
        ("job.yaml", JOB + indented(text), JOB.count("\n"), "cluster"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(InputError) as caught:
            read_job(path) if above else read_cluster(path)
        joined = above + key if key.startswith("[") else f"{above}.{key}".removeprefix(".")
        said = expected.replace("{}", joined)
        for first in range(1, 8):
            said = said.replace(f"at [{first}]", f"at {path}:{first + offset}")
        assert str(caught.value).startswith(f"{path}:{line + offset}: {said}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": the cluster file is empty"),
        ("fast", ":1: a cluster must be a mapping or a list of devices, it is 'fast'"),
        ("[]", ":1: a cluster must be a mapping or a list of devices, it is empty"),
        ("{classes: {}, devices: []}", ":1: 'classes' must be of length 1 or more, it is empty"),
        ("classes: [", ":1:11: this is not YAML"),
    ],
)
def test_what_is_no_cluster(tmp_path, text, expected):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_one_error_for_a_row_that_clashes_often(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "- {class: a, memory: 1 GiB, count: 3}\n- {class: b, memory: 1 GiB, count: 3}\n"
    )
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    assert str(caught.value).count("are GPU") == 1


@pytest.mark.parametrize("amount", [".inf", "-.inf", ".nan", "true", "null", "[1 GiB]", "-1"])
def test_memory_that_is_none(tmp_path, amount):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"- class: a\n  memory: {amount}\n")
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}:2: '[0].memory'")
