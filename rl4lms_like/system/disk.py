"""Safe file operations, and messages for files that cannot be written: which one, why, and what to do about it.

A folder may come from another user, and a link in it may point anywhere: `refuse_links` checks files before they are
written. `with_home` expands `~` without raising.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl4lms_like.system.errors import RL4LMsLikeError

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ERROR_NUMBER = re.compile(r"os error (\d+)")
"""Format in which libraries written in Rust (safetensors, tokenizers) report the error number."""


@contextmanager
def with_filename(file: Path) -> Iterator[None]:
    """Add the file's name to an `OSError` that has none, such as those of `write`.

    Raises:
        OSError: raised in the block, with the name added.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(file)) from error
        raise


@contextmanager
def saving(what: str) -> Iterator[None]:
    """Convert an `OSError` of the block, which saves something, into an error with the reason and the way out.

    Raises:
        RL4LMsLikeError: it cannot be saved.
    """
    try:
        yield
    except OSError as error:
        raise RL4LMsLikeError(f"cannot save {what}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """Return why a file could not be read or written, and what to do about it."""
    number = error.errno
    if number is None and (match := _ERROR_NUMBER.search(str(error))):
        number = int(match[1])

    # The two causes that a user can remove; Python's message names the file.
    if number in _FULL:
        return f"{error}. Free some space there, then run the same command again"
    if is_denied(error):
        return f"{error}. It is read-only or another user's: change its permissions, or use a copy or another folder"
    if number == errno.EBADF:
        return (
            f"{error}. Something in this process, such as a reward or a metric, has closed a file that it did not open"
        )
    return str(error)


def is_denied(error: BaseException) -> bool:
    """Return whether an error means that this process lacks permission, or that the disk is read-only."""
    return isinstance(error, OSError) and error.errno in _DENIED


def with_home(path: str | Path) -> Path:
    """Return a path with `~` or `~name` expanded; unchanged where there is no such home folder, as in a shell.

    `Path.expanduser` raises a `RuntimeError` instead, also for `~` of a user without an entry in a container.
    """
    return Path(os.path.expanduser(path))


def share_permissions(folder: Path) -> None:
    """Give the weights in a folder the folder's permissions; safetensors makes files readable only by their owner."""
    mode = folder.stat().st_mode & 0o666  # reading and writing; files are not executable
    for file in folder.rglob("*.safetensors"):
        with suppress(OSError):  # a file system without such permissions
            file.chmod(mode)


def refuse_links(files: Iterable[Path]) -> None:
    """Check files before they are written: a link would redirect the write to another file, a pipe would block.

    Raises:
        RL4LMsLikeError: one of them is a symbolic link, a hard link or not a regular file.
    """
    for file in files:
        # Links first: the other calls follow a link, and would describe its target.
        if file.is_symlink():
            kind = "a symbolic link"
        elif file.is_file() and file.stat().st_nlink > 1:
            kind = "a hard link (the file has another name elsewhere)"
        elif file.exists() and not file.is_file():
            kind = "not a regular file"
        else:
            continue
        raise RL4LMsLikeError(f"{file} is {kind} and will not be written to; replace it with a copy, or remove it")


def refuse_links_to_folders(folders: Iterable[Path]) -> None:
    """Check folders before something is written into them: they may be missing, but not links.

    Raises:
        RL4LMsLikeError: one of them is a symbolic link.
    """
    for folder in folders:
        if folder.is_symlink():
            raise RL4LMsLikeError(
                f"{folder} is a symbolic link and will not be written to; remove it, or name its target"
            )


def refuse_links_in(folder: Path) -> None:
    """Check all files of a folder before some of them are written; folders in it are left out.

    Raises:
        RL4LMsLikeError: one of the files or folders is a symbolic link, or a file is a hard link or no regular file.
    """
    if folder.is_dir():
        refuse_links(path for path in sorted(folder.iterdir()) if path.is_symlink() or not path.is_dir())


def remove_path(path: Path) -> None:
    """Remove a file or folder if it exists; of a symbolic link, remove only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; skip what cannot be opened, such as folders on Windows."""
    is_folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return

    # A new or renamed file survives a power failure only once its folder's entries are on disk, too.
    try:
        os.fsync(handle)
    except OSError:
        if not is_folder:  # some network file systems can flush only files
            raise
    finally:
        os.close(handle)
