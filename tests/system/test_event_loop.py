"""Work that is waited for together."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from rl4lms_like.system.event_loop import EventLoop, gathered


async def work_that_forgets_to_be_cancelled() -> None:
    """As `asyncio.wait_for` does before Python 3.12, once, where its work was just done."""
    try:
        await asyncio.sleep(300)
    except asyncio.CancelledError:
        await asyncio.sleep(300)


async def failure() -> None:
    await asyncio.sleep(0)
    raise ValueError("of one")


def test_the_first_failure_ends_the_others_even_if_they_do_not_hear_it_at_once():
    async def both():
        return await asyncio.wait_for(gathered([work_that_forgets_to_be_cancelled, failure], 2), 60)

    with pytest.raises(ValueError):
        asyncio.run(both())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_work_that_exits_is_told_to_its_caller_and_the_loop_goes_on(kind):
    async def ends():
        raise kind("of one")

    async def within(*calls):
        return await gathered([partial(asyncio.wait_for, call(), 30) for call in calls], 2)

    async def fine():
        return "fine"

    loop = EventLoop("of the test")
    reported = []

    def ask():
        for calls in ([ends, fine], [fine]):
            try:
                reported.append(loop.run(within(*calls)))
            except BaseException as error:
                reported.append(error)

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    caller.join(30)
    assert [type(each) for each in reported] == [kind, list]
