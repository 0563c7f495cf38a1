"""Attacks by words: values in templates and commands, orders to terminals, odd numbers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from helpers.attacks.attacked import PWNED, Attack, Place, gpumix
from helpers.attacks.file_attacks import documents, fill, progress_line, report, step_line, top

# Each would make a file, or be an option of ssh, sbatch or a shell.
HOSTS = (
    f"node1\ntouch {PWNED}\n#",
    f"node1\r\ntouch {PWNED}",
    f"-oProxyCommand=touch${{IFS}}{PWNED}",
    f"-oPermitLocalCommand=yes -oLocalCommand='touch {PWNED}'",
    f"$(touch {PWNED})",
    f"`touch {PWNED}`",
    f"a;touch {PWNED};",
    f"a|touch {PWNED}",
    f"a&&touch {PWNED}",
    f"a\ttouch {PWNED}",
    f"a' 'touch {PWNED}",
    f'a"; touch {PWNED}; "',
    f"a\u2028touch {PWNED}",
    f"user@-oProxyCommand=touch {PWNED}",
    "--help",
    "-F/dev/stdin",
    "a b",
    "",
    "a\x1b]52;c;ZXZpbA==\x07",
    "a\u202eb",
    "x" * 5000,
)
VALUES = HOSTS[:2] + HOSTS[4:6] + ("a\x1b[2Jb", "a\u202eb", '"\n- {x: ', "a\u0000b")
FIELDS = ("id", "class", "island", "rack", "product", "driver")


def cluster_text(**changes: Any) -> str:
    rows = [
        {"class": "fast", "memory": "24 GiB", "host": f"node-{n}", "count": 1} for n in range(2)
    ]
    rows[0] |= changes
    rows = [rows[0], rows[1] | {k: v for k, v in changes.items() if k in ("product", "driver")}]
    return yaml.safe_dump(rows)


def program(place: Place) -> Path:
    path = place.root / "train.py"
    path.write_text("print('trained')\n")
    return path


def run_script(text: str, place: Place) -> None:
    """As a node of SLURM does; what it starts is not there."""
    script = place.root / "job.sbatch"
    script.write_text(text)
    tools = place.root / "tools"
    tools.mkdir()
    for name in ("srun", "scontrol"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "a"}
    subprocess.run(["bash", script], env=env, cwd=place.root, capture_output=True, timeout=30)


def in_template(kind: str, text: str, place: Place) -> str:
    """A launch for a scheduler by a cluster file of a stranger; what comes of it is run."""
    cluster = place.root / "cluster.yaml"
    cluster.write_text(text)
    said = gpumix(place, "launch", "--template", kind, "--cluster", cluster, program(place).name)
    if said.startswith("exit 0") and kind == "slurm":
        run_script(said.partition("\n")[2], place)
        lines = [line for line in said.splitlines() if PWNED in line]
        assert not [line for line in lines if line.startswith(("#SBATCH", "touch"))], lines
    if said.startswith("exit 0") and kind == "k8s":
        for one in yaml.safe_load_all(said.partition("\n")[2]):
            assert one["kind"] in ("TrainJob", "TrainingRuntime"), one
    return said


def in_ssh(text: str, place: Place) -> str:
    """A launch over ssh by a cluster file of a stranger, with an ssh that obeys its options."""
    cluster = place.root / "cluster.yaml"
    cluster.write_text(text)
    return _launched(place, "--cluster", str(cluster))


def in_hosts(host: str, place: Place) -> str:
    return _launched(place, "--hosts", f"{host}:1,other:1")


def in_hosts_file(host: str, place: Place) -> str:
    (place.root / "hosts").write_text(f"{host}\nother\n", encoding="utf-8")
    return _launched(place, "--hosts", "hosts")


def _launched(place: Place, *words: str) -> str:
    ssh = place.root / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do [ "$word" = -- ] && break; case "$word" in *PWNED*) '
        f"touch {place.root}/{PWNED};; esac; done\nexit 255\n"
    )
    ssh.chmod(0o755)
    return gpumix(place, "launch", "--ssh", str(ssh), "--timeout", "1", *words, program(place).name)


# -- orders to a terminal --------------------------------------------------------------------------

ORDERS = ("\x1b]52;c;ZXZpbA==\x07", "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x9b31m", "\u202egnp.exe",
          "\u2066\u200b\u200f")  # fmt: skip


def in_progress(text: str, place: Place) -> str:
    fill(place)
    place.leave("progress.json", progress_line(state="failed", why=text))
    return top(place) + report(place)


def in_event(field: str, text: str, place: Place) -> str:
    fill(place)
    told = {"event": "restart", "step": 2, "resumed_from": 1, "why": "a", "decided": "b"}
    told |= {"seconds": 1.0, "kept_in": "memory", "time": 1.7e9, field: text}
    place.leave("metrics.jsonl", step_line(1) + step_line(2) + json.dumps(told) + "\n")
    return top(place) + report(place)


def in_rank(field: str, text: str, place: Place) -> str:
    fill(place)
    rank = {"device": "quick-0", "device_class": "quick", "busy_share": 0.5, field: text}
    told = [
        {"event": kind, "step": 2, kind: [rank | {"devices": 1}]} for kind in ("ranks", "classes")
    ]
    place.leave("metrics.jsonl", step_line(2) + "".join(json.dumps(one) + "\n" for one in told))
    return top(place) + report(place)


def in_document(name: str, text: str, place: Place) -> str:
    """In every text of a plan or a profile at once that may be any."""
    fill(place)
    value = json.loads(documents()[name])

    def spoilt(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: spoilt(inside) for key, inside in one.items()}
        if isinstance(one, list):
            return [spoilt(inside) for inside in one]
        return one

    value = spoilt(value)
    for key in ("why", "explanation", "model", "policy", "source"):
        if isinstance(value.get(key), str):
            value[key] += text
    value["cluster" if name == "profile.json" else "unknown"] = text
    place.leave(name, json.dumps(value))
    return top(place) + report(place)


def in_cluster(field: str, text: str, place: Place) -> str:
    cluster = place.root / "cluster.yaml"
    cluster.write_text(cluster_text(**{field: text}))
    return gpumix(place, "devices", "--cluster", cluster)


def in_error(text: str, place: Place) -> str:
    """A key that is wrong, which the error names."""
    cluster = place.root / "cluster.yaml"
    cluster.write_text(yaml.safe_dump([{"class": "a", "memory": "1 GiB", text: 1}]))
    (place.root / "job.yaml").write_text(yaml.safe_dump({text: text, "model": text}))
    return gpumix(place, "devices", "--cluster", cluster) + gpumix(place, "plan", "job.yaml")


def in_argument(text: str, place: Place) -> str:
    return gpumix(place, "report", text) + gpumix(place, "devices", "--cluster", text)


# -- numbers that nobody can have meant ------------------------------------------------------------

MEASURED = (
    "busy_share", "peak_bytes", "overruns", "tokens_per_s", "mfu", "hfu", "sent_bytes", "sm_mhz",
    "retries", "reserved_bytes", "samples", "devices", "planned_peak_bytes", "laid_out_bytes",
    "starved_share",
)  # fmt: skip
NUMBERS = (1e308, -1e308, 10**400, -1, 1e-320, 2**63, True, None, "1e9999", [1], {"a": 1})


def odd_step(field: str, number: Any, place: Place) -> str:
    fill(place)
    lines = step_line(1) + step_line(2, **{field: number}) + step_line(3)
    place.leave("metrics.jsonl", lines)
    return report(place) + top(place)


def odd_everywhere(number: Any, place: Place) -> str:
    """In each number of each kind of line."""
    fill(place)
    rank: dict[str, Any] = dict.fromkeys(MEASURED, number)
    rank |= {"device": "quick-0", "device_class": "quick"}
    lines = [{"event": kind, "step": 2, kind: [rank]} for kind in ("ranks", "classes")]
    lines += [{"event": "evaluation", "step": 2, "loss": number}]
    lines += [{"event": "restart", "step": number, "resumed_from": number, "seconds": number}]
    lines += [{"event": "restart", "step": 2, "resumed_from": number, "seconds": number}]
    lines += [{"event": "checkpoint", "step": 2, "seconds": number, "stalled_s": number}]
    lines += [{"event": "spike", "step": 2, "time": number, "loss": number}]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    place.leave("metrics.jsonl", step_line(1) + step_line(2) + text)
    return report(place) + top(place)


def odd_progress(field: str, number: Any, place: Place) -> str:
    fill(place)
    place.leave("progress.json", progress_line(**{field: number}))
    return top(place) + report(place)


def every() -> Iterator[Attack]:
    for number, host in enumerate(HOSTS):
        text, name = cluster_text(host=host), f"{number}, {host[:24]!r}"
        for kind in ("slurm", "k8s"):
            yield Attack("hosts in templates", f"{kind} {name}", partial(in_template, kind, text))
        yield Attack("hosts to ssh", f"cluster {name}", partial(in_ssh, text))
        yield Attack("hosts to ssh", f"--hosts {name}", partial(in_hosts, host))
        yield Attack("hosts to ssh", f"file {name}", partial(in_hosts_file, host))
    for field in FIELDS:
        for number, value in enumerate(VALUES):
            text = cluster_text(**{field: value})
            for kind in ("slurm", "k8s"):
                name = f"{kind} {field} {number}"
                yield Attack("values in templates", name, partial(in_template, kind, text))
    for number, order in enumerate(ORDERS):
        yield Attack("orders to terminals", f"progress {number}", partial(in_progress, order))
        yield Attack("orders to terminals", f"error {number}", partial(in_error, order))
        yield Attack("orders to terminals", f"argument {number}", partial(in_argument, order))
        for field in ("why", "decided", "event", "kept_in"):
            act: Callable[[Place], str] = partial(in_event, field, order)
            yield Attack("orders to terminals", f"event's {field} {number}", act)
        for field in ("device", "device_class", "input_limit", "not_copied", "peak_source"):
            act = partial(in_rank, field, order)
            yield Attack("orders to terminals", f"rank's {field} {number}", act)
        for field in ("host", "id", "product", "class"):
            act = partial(in_cluster, field, order)
            yield Attack("orders to terminals", f"cluster's {field} {number}", act)
        for name in ("plan.json", "profile.json"):
            yield Attack(
                "orders to terminals", f"{name} {number}", partial(in_document, name, order)
            )
    for number in NUMBERS:
        short = str(number)[:10]
        yield Attack("odd numbers", f"everywhere {short}", partial(odd_everywhere, number))
        for field in ("step", "loss", "step_s", "tokens_per_s", "tokens", "samples", "time"):
            yield Attack("odd numbers", f"step's {field} {short}", partial(odd_step, field, number))
        for field in ("step", "steps", "loss", "step_s", "remaining_s", "tokens_per_s", "time"):
            act = partial(odd_progress, field, number)
            yield Attack("odd numbers", f"progress's {field} {short}", act)
