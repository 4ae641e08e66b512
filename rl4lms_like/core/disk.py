"""What to say of a file that cannot be written: which one, why, and the way out where the disk is full.

And whether it is a file at all: a folder may come from somebody else, and a link in it may lead anywhere. And where
`~` leads, which may be nowhere.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl4lms_like.core.errors import RL4LMsLikeError

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_SAID = re.compile(r"os error (\d+)")
"""How libraries in Rust, safetensors and tokenizers, give an error's number."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts the file's name into an `OSError` that has none, as those of `write` have none.

    Raises:
        OSError: as within, with the name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(file)) from error
        raise


def reason(error: OSError) -> str:
    """Why a file could not be read or written, and what to do about it."""
    if is_full(error):
        return f"{error}. Make room there, then give the same command again"
    if is_denied(error):
        return f"{error}. It is read-only, or another user's: change its permissions, or take a copy or another folder"
    return str(error)


def is_denied(error: BaseException) -> bool:
    """Return whether an error says that this process has no permission, or that a disk is read-only."""
    return isinstance(error, OSError) and error.errno in _DENIED


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, a quota or a limit on files is exhausted."""
    number = getattr(error, "errno", None)
    if number is None and (found := _SAID.search(str(error))):
        number = int(found[1])
    return number in _FULL


def with_home(path: str | Path) -> Path:
    """A path with the home that `~` or `~name` stands for; as it is where there is no such home, as a shell leaves it.

    `Path.expanduser` raises a `RuntimeError` instead, also for `~` of a user whom a container does not know.
    """
    return Path(os.path.expanduser(path))


def share(folder: Path) -> None:
    """Lets those read the weights in a folder who may read the folder: safetensors keeps them for the user alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        with suppress(OSError):  # a disk without such modes
            file.chmod(mode)


def refuse_links(files: Iterable[Path]) -> None:
    """Looks at files that are about to be written to: through a link something else would be, a pipe waits for ever.

    Raises:
        RL4LMsLikeError: one of them is a link, has another name elsewhere (a hard link), or is no file.
    """
    for file in files:
        if file.is_symlink():
            what = "a link to something else"
        elif file.is_file() and file.stat().st_nlink > 1:
            what = "a hard link: the same file has another name elsewhere"
        elif file.exists() and not file.is_file():
            what = "no file"
        else:
            continue
        raise RL4LMsLikeError(f"{file} is {what}, and would be written to; put a copy in its place, or remove it")


def take_away(path: Path) -> None:
    """Removes a file or a folder, if it is there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk; where folders cannot be opened, not for them."""
    is_folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError:
        if not is_folder:  # some network disks flush files only
            raise
    finally:
        os.close(handle)
