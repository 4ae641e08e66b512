"""Work that is waited for together."""

from __future__ import annotations

import asyncio

import pytest

from rl4lms_like.rewards.event_loop import gathered


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

    with pytest.raises(ValueError, match="of one"):
        asyncio.run(both())
