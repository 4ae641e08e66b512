"""A call is left when its time is up, wherever it waits, and nothing of the alarm stays behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time

import pytest

from rl4lms_like.rewards.time_limit import TimeIsUp, check_time_limit, within
from rl4lms_like.system.errors import ConfigError
from tests.config_errors import raises_at

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs SIGALRM")


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    handler = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def sleep():
    time.sleep(60)


def read_a_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def count():
    while True:
        pass


def wait_for_a_thread():
    threading.Event().wait(60)


def keep_errors_to_oneself():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


def keep_everything_to_oneself():
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)


@pytest.mark.parametrize(
    "wait",
    [sleep, read_a_socket, count, wait_for_a_thread, keep_errors_to_oneself, keep_everything_to_oneself],
    ids=lambda wait: wait.__name__,
)
def test_a_call_is_left_wherever_it_waits(wait):
    start = time.monotonic()
    with pytest.raises(TimeIsUp):
        within(0.1, wait)
    assert time.monotonic() - start < 30


def test_what_comes_back_from_an_except_that_takes_everything_does_not_count():
    def give_up():
        try:
            time.sleep(60)
        except BaseException:
            return 0.0

    with pytest.raises(TimeIsUp):
        within(0.1, give_up)


def test_what_is_done_in_time_comes_back_and_so_does_what_it_raises():
    assert within(60, lambda: 3) == 3
    assert within(None, lambda: 4) == 4
    with pytest.raises(KeyError):
        within(60, lambda: {}["a"])


def test_an_alarm_of_others_is_put_off_and_not_lost():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        within(60, lambda: time.sleep(0.4))
        assert not rung
        time.sleep(0.1)
        assert len(rung) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_is_still_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        within(60, lambda: signal.raise_signal(signal.SIGINT))


def test_other_threads_and_systems_are_told_what_they_need(monkeypatch):
    raised = []

    def elsewhere():
        try:
            within(1, sleep)
        except ConfigError as error:
            raised.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "only the main thread receives SIGALRM; set env.reward_workers to 1" in raised[0]
    monkeypatch.delattr(signal, "setitimer")
    with raises_at("env.reward_timeout"):
        check_time_limit(1)
    check_time_limit(None)
    monkeypatch.undo()
