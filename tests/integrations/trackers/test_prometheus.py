"""The endpoint for Prometheus, scraped over loopback while a run says that it trains."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumix.schema.errors import MachineError
from gpumix.train.run_log.tracker_process import run_trackers
from helpers.processes.waiting import wait_until
from helpers.runs.reported_runs import LOSSES, address_in, job_for, telling, trains


def scraped(address: str) -> dict[tuple[str, ...], float]:
    """All metrics by name and labels, without that of the run."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (one.name, *(v for k, v in sorted(one.labels.items()) if k != "run")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_scrape_finds_the_newest_numbers(tmp_path, capfd):
    job = job_for(tmp_path, {"prometheus": {"port": 0}})
    told = ""

    def address() -> str:
        nonlocal told
        told += capfd.readouterr().err
        return address_in(told)

    with telling(job) as log:
        trains(log, 1, 3)
        found_at = wait_until(address)
        assert found_at.startswith("http://127.0.0.1:")
        log.restart(3, resumed_from=2, kept_in="memory", why="why", decided="", seconds=1.0)
        trains(log, 4, 4)
        found = wait_until(lambda: (s := scraped(found_at))["gpumix_step",] == 4 and s)
        assert found["gpumix_loss",] == pytest.approx(LOSSES[4])
        assert found["gpumix_tokens_total",] == 256
        assert found["gpumix_events_total", "restart"] == 1
        assert found["gpumix_device_info", "big", "big-0", "localhost"] == 1
        # Nothing of Python or of the process is among them.
        assert {name for name, *_ in found if not name.startswith("gpumix_")} == set()


def test_a_port_that_is_taken_is_an_error_before_the_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = job_for(tmp_path, {"prometheus": {"port": port}})
        with pytest.raises(MachineError) as caught, run_trackers(job, fresh=True):
            raise AssertionError("the run must not begin")
    assert caught.value.where == "report_to.prometheus"
    assert caught.value.what.endswith(f"cannot listen at 127.0.0.1:{port}")
    assert "report_to.prometheus.port" in caught.value.fix


@pytest.mark.extended
@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_of_this_host_is_told(tmp_path, address):
    job = job_for(tmp_path, {"prometheus": {"address": address, "port": 0}})
    with pytest.raises(MachineError) as caught, run_trackers(job, fresh=True):
        raise AssertionError("the run must not begin")
    assert caught.value.where == "report_to.prometheus"
    assert f"cannot listen at {address}" in caught.value.what
    assert "report_to.prometheus.address" in caught.value.fix


@pytest.mark.extended
def test_the_endpoint_ends_with_the_run(tmp_path, capfd):
    with telling(job_for(tmp_path, {"prometheus": {"port": 0}})) as log:
        trains(log, 1, 1)
    host, port = address_in(capfd.readouterr().err).removeprefix("http://").split("/")[0].split(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), timeout=5)
