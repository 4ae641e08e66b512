"""CRD3 (Rameshkumar and Bailey 2020): the next turn of a recorded game of Dungeons and Dragons.

    turn        {"NAMES": ["MATT"], "UTTERANCES": ["Hello everyone.", "Enjoy!"]}
    prompt      LAURA: Hi.          the last `max_context_size` turns, one per line
                SAM: Hello.
                MATT:               next speaker (first name of the turn), a colon and a space
    reference   Hello everyone. Enjoy!

Turns with fewer than two turns before them are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import PublishedPool, Source, downloaded, files_of
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, dict_rows, open_text, text_lines, texts_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count
from rl4lms_like.system.wording import shown

URL = "https://github.com/RevanthRameshkumar/CRD3/archive/refs/heads/master.zip"
N_EARLIER = 2  # minimum number of turns before a sample's turn


def _episodes(listing: Path) -> Iterator[LocatedRow]:
    """Yield the listed episodes, with the hub's lower-case names in each turn."""
    for name in filter(None, map(str.strip, text_lines(listing))):
        file = listing.parent.parent / "cleaned data" / f"{name}.json"
        with open_text(file) as text:
            try:
                episode = json.load(text)
            except json.JSONDecodeError as error:
                raise DataPoolError(f"{file}, line {error.lineno}: not JSON: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise DataPoolError(f"{file}: not readable as JSON: {error}") from error
        if not isinstance(episode, dict):
            raise DataPoolError(f"{file}: expected an object with TURNS, got {shown(episode)}")

        # NAMES and UTTERANCES become names and utterances. Invalid turns are left unchanged; `_turns` reports them.
        turns = cell(episode, "TURNS", str(file))
        if isinstance(turns, list):
            for index, turn in enumerate(turns):
                if isinstance(turn, dict):
                    turns[index] = {key.lower(): value for key, value in turn.items()}
        yield str(file), {"turns": turns}


class CRD3DialogueGeneration(PublishedPool):
    """Last turns of a game as prompts, with the next turn as the reference."""

    id = "crd3"
    layouts = (
        files_of(_episodes, "data/aligned data/{0}_files"),  # a clone
        files_of(_episodes, "CRD3-master/data/aligned data/{0}_files"),  # GitHub's zip file, extracted
        files_of(_episodes, "aligned data/{0}_files"),
    )

    @classmethod
    @flattened
    def prepare(cls, split: str, max_context_size: Count, *, source: Source) -> TextGenPool:
        """Build the pool of a split. By default the project's repository is downloaded once.

        Args:
            max_context_size: maximum number of turns in a prompt.
            data_dir: a local copy: the repository with `data/aligned data/{train,val,test}_files` and
                `data/cleaned data/*.json`, or tables with the column turns (names, utterances), one dialogue per row
                (see `published`).
            hub_id: a hub repository with this column, used instead.
        """
        names_of(split)

        # The repository's zip file, extracted once, is a local copy like any other.
        if source.is_default:
            source = replace(source, data_dir=str(downloaded(URL, cls.needed_by(), unpack=True)))
        samples = _samples(cls.rows(split, source), split, max_context_size)
        return cls.of(samples, split, cls.id, source.max_size)


def _samples(rows: Iterator[LocatedRow], split: str, max_context_size: int) -> Iterator[Sample]:
    """Yield a sample for each turn from the third one on: the turns before it, and the name of its speaker."""
    for episode, (where, row) in enumerate(rows):
        lines: list[str] = []
        for turn, (name, text) in enumerate(_turns(row, where)):
            # The prompt ends with the speaker, so that the response is what this character says.
            if turn >= N_EARLIER:
                prompt = "\n".join([*lines[-max_context_size:], f"{name}: "])
                yield Sample(f"{split}_ep_{episode}_turn_{turn}", prompt, [text])
            lines.append(f"{name}: {text}")


def _turns(row: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yield the speaker and the text of each turn."""
    turns = dict_rows(cell(row, "turns", where), ("names", "utterances"), where)
    if not isinstance(turns, list):
        raise DataPoolError(f"{where}: expected a list of turns, got {shown(turns)}")

    # Several people may speak at once, MATT and LAURA for example: the first one stands for all.
    for number, turn in enumerate(turns):
        turn_location = f"{where}, turn {number}"
        if not isinstance(turn, Mapping):
            raise DataPoolError(f"{turn_location}: expected names and utterances, got {shown(turn)}")
        names = texts_cell(turn, "names", turn_location)
        if not names:
            raise DataPoolError(f"{turn_location}: no speaker in 'names': {shown(turn)}")
        yield names[0], " ".join(texts_cell(turn, "utterances", turn_location))
