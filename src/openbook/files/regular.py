"""Opening a file that someone else named: only a regular file, and one that is really there."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from openbook.files.errors import FileError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LFS_POINTER = b"version https://git-lfs"


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """The open file and its size in bytes.

    A pipe or a device is refused before it is opened, since opening one can wait for ever. So is the
    text that Git LFS leaves in place of a file it has not fetched. A path that does not exist, or may
    not be read, raises `OSError` as `open` does.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise FileError(path, "", "the path", _KINDS.get(kind, "a special file"), "a regular file")
    file = path.open("rb")
    if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
        file.close()
        raise FileError(
            path, "byte 0", "the content", "a Git LFS pointer", "the file itself: run `git lfs pull`"
        )
    file.seek(0)
    return file, os.fstat(file.fileno()).st_size
