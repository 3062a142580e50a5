"""A model of what a file system may keep of a save when the power goes.

`Recorder` notes every operation of a `Disk`. `states` replays any number of them and gives the trees of
files that a crash could leave: what was not synced may be there, not there, torn or zero, and changes of
a folder that was not synced may be kept or lost one by one, in whatever order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO

from openbook.train.checkpoint import Disk

Operation = tuple[str, *tuple[object, ...]]
Tree = dict[str, "bytes | Tree"]


class Recorder(Disk):
    """A disk that works, and notes what it does with paths below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []

    def _note(self, what: str, path: Path, *more: object) -> None:
        self.operations.append((what, path.relative_to(self.root).parts, *more))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._note("make_folder", path)

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        self._note("create", path)
        return file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        super().write(file, data)
        self._note("write", Path(file.name), bytes(data))

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self._note("sync", Path(file.name))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._note("sync_folder", path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._note("rename", old, new.relative_to(self.root).parts)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._note("unlink", path)

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._note("unlink", path)


# --- what is on the disk, and what only in memory ------------------------------------------------


@dataclass
class File:
    now: bytes = b""
    synced: bytes = b""


@dataclass
class Folder:
    """`synced` entries are on the disk; each of `changes` (entry to add, name to drop) may or may not be."""

    now: dict[str, "File | Folder"] = field(default_factory=dict)
    synced: dict[str, "File | Folder"] = field(default_factory=dict)
    changes: list[tuple[str | None, "tuple[str, File | Folder] | None"]] = field(default_factory=list)

    def change(self, drop: str | None, add: "tuple[str, File | Folder] | None") -> None:
        self.changes.append((drop, add))
        _apply(self.now, drop, add)

    def sync(self) -> None:
        for drop, add in self.changes:
            _apply(self.synced, drop, add)
        self.changes.clear()


def _apply(entries: dict, drop: str | None, add: "tuple[str, File | Folder] | None") -> None:
    if drop is not None:
        entries.pop(drop, None)
    if add is not None:
        entries[add[0]] = add[1]


def replay(operations: list[Operation]) -> Folder:
    root = Folder()

    def at(path: tuple[str, ...]) -> "File | Folder":
        found: File | Folder = root
        for name in path:
            assert isinstance(found, Folder)
            found = found.now[name]
        return found

    for what, path, *more in operations:
        assert isinstance(path, tuple)
        folder = at(path[:-1]) if path else root
        match what, more:
            case "make_folder", []:
                folder.change(None, (path[-1], Folder()))
            case "create", []:
                folder.change(None, (path[-1], File()))
            case "write", [bytes(data)]:
                at(path).now += data
            case "sync", []:
                at(path).synced = at(path).now
            case "sync_folder", []:
                at(path).sync()
            case "rename", [tuple(new)]:
                assert new[:-1] == path[:-1]
                folder.change(path[-1], (new[-1], at(path)))
            case "unlink", []:
                folder.change(path[-1], None)
    return root


# --- what a crash may leave ----------------------------------------------------------------------


def states(operations: list[Operation], chances: int = 8) -> Iterator[Tree]:
    """The trees that a crash after these operations may leave: the extremes, and some by chance."""
    root = replay(operations)
    for data in ("kept", "lost", "torn", "zero"):
        for folders in ("kept", "lost", "renames", "others"):
            yield _survivors(root, data, folders, Random(0))
    for seed in range(chances):
        yield _survivors(root, "any", "any", Random(seed))


def _survivors(folder: Folder, data: str, folders: str, chance: Random) -> Tree:
    entries = dict(folder.synced)
    for drop, add in folder.changes:
        renames = drop is not None and add is not None
        kept = {"kept": True, "lost": False, "renames": renames, "others": not renames}.get(folders)
        if chance.random() < 0.5 if kept is None else kept:
            _apply(entries, drop, add)
    return {
        name: _survivors(entry, data, folders, chance)
        if isinstance(entry, Folder)
        else _content(entry, data, chance)
        for name, entry in entries.items()
    }


def _content(file: File, data: str, chance: Random) -> bytes:
    """What is synced is there; of what came after it, all, nothing, a part or zeros."""
    size = len(file.synced)
    more = file.now[size:]
    match chance.choice(("kept", "lost", "torn", "zero")) if data == "any" else data:
        case "kept":
            return file.now
        case "torn":
            return file.synced + more[: len(more) // 2]
        case "zero":
            return file.synced + bytes(len(more))
    return file.synced


def write_tree(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, entry in tree.items():
        if isinstance(entry, bytes):
            (folder / name).write_bytes(entry)
        else:
            write_tree(entry, folder / name)
