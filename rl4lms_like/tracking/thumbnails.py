"""Small copies of the pictures that predictions, kept rollouts and token credit are about.

    <run folder>/images/3f09a1b2c4d5e6f7.jpg     at most 96 x 96 pixels; the name is the picture's number
    "images": ["images/3f09a1b2c4d5e6f7.jpg"]    in a line of a file; without pictures there is no such key

The report embeds some of them. A file is written once, whatever refers to it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.disk import refuse_links_to_folders
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.regular_files import read_small
from rl4lms_like.tracking.run_folder import IMAGES, write_whole

KEY = "images"
"""Key of the pictures in a prediction or an episode."""

N_EMBEDDED = 3
"""Number of samples of a split, or of episodes of an iteration, whose pictures are in the report."""

_NAME = re.compile(rf"{IMAGES}/[0-9a-f]{{16}}\.jpg")
_LARGEST = 2**16
"""Bytes of a thumbnail that the report embeds: one of noise has about 8,000."""


def images_by_id(samples: Iterable[Sample]) -> dict[str, tuple[Picture, ...]]:
    """Return the pictures of the samples that have some, by the samples' ids."""
    return {sample.id: sample.images for sample in samples if sample.images}


def keep_thumbnails(folder: Path, pictures: Iterable[Picture]) -> list[str]:
    """Write thumbnails of pictures that have none yet; return their paths, relative to the run folder.

    Raises:
        OSError: a file cannot be written.
        RL4LMsLikeError: a picture cannot be read, or `images` is a link.
    """
    refuse_links_to_folders([folder / IMAGES])
    names = []
    for picture in pictures:
        name = f"{IMAGES}/{picture.number:016x}.jpg"
        names.append(name)
        if not (folder / name).exists():
            (folder / IMAGES).mkdir(exist_ok=True)
            write_whole(folder / name, picture.thumbnail())
    return names


def with_thumbnails(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return predictions with the paths of thumbnails in place of their pictures. Errors as `keep_thumbnails`."""
    named = []
    for row in rows:
        named.append({**row, KEY: keep_thumbnails(folder, row[KEY])} if KEY in row else row)
    return named


def embedded(folder: Path, row: Mapping[str, Any]) -> list[str]:
    """Return the thumbnails of a prediction or an episode as `data:` URLs, without those that are missing.

    A run folder may be another user's: only small JPEG files in its `images/` are read.
    """
    urls = []
    names = row.get(KEY)
    for name in names if isinstance(names, list) else []:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or (folder / IMAGES).is_symlink():
            continue
        try:
            content = read_small(folder / name, _LARGEST)
        except (OSError, RL4LMsLikeError):
            continue
        if content.startswith(b"\xff\xd8"):
            urls.append(f"data:image/jpeg;base64,{base64.b64encode(content).decode()}")
    return urls
