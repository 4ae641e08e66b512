"""A first signal waits until nothing is lost; a second does not."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rl4lms_like.system.interruption import Interruption

ALL = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


@pytest.fixture(autouse=True)
def all_are_heard():
    """Also where the tests run in a shell's background, which ignores SIGINT, or under `nohup`."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@ALL
def test_a_first_signal_waits_for_the_next_place_to_stop_and_says_so(number, capfd):
    with Interruption() as interruption:
        with interruption.finishing("this minibatch"):
            send(number)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
    message = "stopping once this minibatch is done; press Ctrl-C again to stop immediately without saving"
    assert capfd.readouterr().err.strip() == message


def test_where_nobody_reads_what_it_says_it_waits_all_the_same(capfd):
    """As after `train ... 2>&1 | tee log.txt`, where Ctrl-C ends both."""
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(2)
    os.dup2(writer, 2)
    try:
        with Interruption() as interruption:
            send()
            assert interruption.requests == 1
    finally:
        os.dup2(before, 2)
        for each in (before, writer):
            os.close(each)


@ALL
def test_where_nothing_is_lost_it_does_not_wait(number, capfd):
    done = []
    with Interruption() as interruption, pytest.raises(KeyboardInterrupt), interruption.at_any_moment():
        send(number)
        done.append("more")
    assert not done and capfd.readouterr().err == ""


def test_asked_before_it_stops_before_what_could_be_stopped_at_any_moment():
    with Interruption() as interruption:
        send()
        with pytest.raises(KeyboardInterrupt), interruption.at_any_moment():
            pytest.fail("it began")


def test_a_second_signal_never_waits():
    with Interruption() as interruption, interruption.finishing("this checkpoint"):
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert interruption.requests == 2


@ALL
def test_a_hangup_that_a_closing_terminal_repeats_leaves_time_to_save(number):
    with Interruption() as interruption, interruption.finishing("this checkpoint"):
        send(number)
        send(signal.SIGHUP)
        assert interruption.requests == 1
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_outside_all_is_as_it_was_before():
    def own(number, frame):
        heard.append(number)

    heard = []
    before = {number: signal.signal(number, own) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        interruption = Interruption()
        with interruption:
            send()
        interruption.check()  # what was asked of one run is not asked of the next
        send()
        send(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["a background job", "nohup"])
def test_what_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            send(number)
            interruption.check()
    finally:
        signal.signal(number, before)


def test_in_other_threads_it_only_never_hears_anything():
    def work():
        with Interruption() as interruption, interruption.at_any_moment(), interruption.finishing("this"):
            done.append(True)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
