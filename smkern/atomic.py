"""Files that are replaced whole, and a cache that nobody but its user has written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from pathlib import Path

LOCK_S = 60.0
"""How long a writer waits for another one, which may have been stopped."""
LEFT_S = 3600.0
"""A temporary file of this age was left by a writer that was killed."""


def is_cached(path: Path) -> bool:
    """Whether a path lies in the user's cache folder."""
    from platformdirs import user_cache_path

    return path.is_relative_to(user_cache_path("smkern"))


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; those of the cache are the user's alone (mode 0700)."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700 if is_cached(folder) else 0o777, exist_ok=True)


def read_whole(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        PermissionError: it lies in the cache, and another user may have written it.
        OSError: it cannot be read.
    """
    # A pipe in its place must not keep the reader waiting for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        foreign = found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022
        if foreign and is_cached(path):
            raise PermissionError(
                errno.EPERM,
                f"user {found.st_uid} owns it, its mode is {stat.S_IMODE(found.st_mode):o}, so "
                "another user may have written it; if it is yours, chmod go-w",
                str(path),
            )
        return file.read()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file: a temporary `.NAME.*.part` beside it, fsync, rename.

    With concurrent writers the last one wins; to merge files, hold a lock around read and write.

    Raises:
        OSError: the file cannot be written; the old one is left unchanged.
    """
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _remove_left(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the rename survives a crash
    finally:
        os.close(folder)


def _remove_left(path: Path) -> None:
    """Remove temporary files of killed writers: of this file, in the cache of any beside it."""
    for left in path.parent.glob(".*.part" if is_cached(path) else f".{path.name}.*.part"):
        try:
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()
        except OSError:
            continue  # another process removed it first
