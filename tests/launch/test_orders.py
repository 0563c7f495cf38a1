"""What a launcher says, and what it means when it says nothing any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpumix.launch import orders
from gpumix.launch.orders import Order, Orders
from helpers.processes.waiting import wait_until


class Launcher:
    """The other end of standard input."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def say(self, text: str) -> None:
        os.write(self.pipe, text.encode())


@pytest.fixture
def launcher(monkeypatch) -> Iterator[Launcher]:
    read, write = os.pipe()
    with os.fdopen(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield Launcher(write)
        with suppress(OSError):
            os.close(write)
        for thread in threading.enumerate():
            if thread.name == "gpumix-orders":
                thread.join()


def heard(given: Orders, order: Order) -> None:
    wait_until(lambda: given.given >= order, 20)
    assert given.given is order


def test_words_are_orders_and_the_highest_counts(launcher):
    given = Orders(led=True)
    given.listen()
    launcher.say("alive\nal")
    launcher.say("ive\nstop\n")
    heard(given, Order.STOP)
    launcher.say("alive\nend\n")
    heard(given, Order.END)


def test_a_launcher_that_is_gone_means_stop(launcher):
    given = Orders(led=True)
    given.listen()
    os.close(launcher.pipe)
    heard(given, Order.STOP)


def test_a_launcher_that_is_silent_means_stop(launcher, monkeypatch):
    """As behind a cable that is pulled: no end of the connection comes."""
    monkeypatch.setattr(orders, "HEARTBEAT_TIMEOUT_S", 1.0)
    given = Orders(led=True)
    given.listen()
    for _ in range(4):
        launcher.say("alive\n")
        time.sleep(0.3)
    assert given.given is Order.CONTINUE
    heard(given, Order.STOP)


def test_who_is_not_led_reads_nothing(launcher):
    given = Orders()
    given.listen()
    launcher.say("end\n")
    time.sleep(0.2)
    assert given.given is Order.CONTINUE
