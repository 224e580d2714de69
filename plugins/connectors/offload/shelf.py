"""Folders of shared memory in which engines of a machine keep blocks, one folder each, that outlive the engine.

    FOLDER/frame-kv-UID/SPACE/ENGINE.MESH/ alive, engine, index, worker-0, form-0, rows-0, worker-1, …

Blocks reveal prompts and decide answers: only this user may enter the folder, and no link in it is followed. A process
holds the lock of `alive` as long as it uses a shelf, so that a shelf that nobody holds is known to be of an engine that
is gone. Knows no block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

#: How long a lock may be held by others, and how long workers may outlive their engine, before one goes on without.
WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.02
#: In which the system counts the memory of a file.
_BLOCK_BYTES = 512
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
ALIVE, ENGINE, WORKER, LOCK = "alive", "engine", "worker-", "lock"


class Shelf:
    """One engine's folder, open in one of its processes: `name` is the engine's. Made by `claim`."""

    def __init__(self, root: int, space: int, folder: int, name: str) -> None:
        self.name = name
        self.space = space
        self._root = root
        self._folder = folder
        self._held: list[int] = []
        self._leads = False
        self._worker = ""
        self._hold(ALIVE)

    @classmethod
    def claim(cls, folder: Path, space: str, engine: str, mesh: str) -> Shelf:
        """The shelf of an engine: one that another process of it has claimed, one that is left over, a new one.

        One that is left over is of an engine with the same `mesh`. Raises `ValueError` where the folder cannot be used.
        """
        name = f"{engine}.{mesh}"
        latest = time.monotonic() + WAIT_SECONDS
        while True:
            late = time.monotonic() > latest
            try:
                with ExitStack() as undo:
                    root = private_folder(folder)
                    undo.callback(os.close, root)
                    opened = make_folder(space, root)
                    undo.callback(os.close, opened)
                    with locked(opened):
                        found, orphaned = _choose(opened, name)
                        if found or not orphaned or late:
                            claimed = cls(root, opened, make_folder(name, opened), name)
                            undo.pop_all()
                            return claimed
            except OSError as error:
                # the last shelf of the model may have been removed in between, and the folder with it
                if late or not isinstance(error, FileNotFoundError):
                    raise ValueError(f"shared memory below {folder} cannot be used: {error.strerror}") from None
            time.sleep(_POLL_SECONDS)

    def lead(self) -> None:
        """Says that this process is the engine, without which workers end."""
        self._hold(ENGINE)
        self._leads = True

    def work(self, place: int) -> None:
        """Says that this process is the worker at `place`, without which the engine ends."""
        self._worker = f"{WORKER}{place}"
        self._hold(self._worker)

    def open(self, file: str, num_bytes: int) -> int | None:
        """An open descriptor of a file of the shelf with so many bytes, all of which have memory; else None.

        Once the file is mapped, a write to a part that finds no memory would end the process.
        """
        descriptor = open_file(self._folder, file, os.O_RDWR)
        if descriptor is None:
            return None
        found = os.fstat(descriptor)
        with suppress(OSError):
            if found.st_size == num_bytes:
                if found.st_blocks * _BLOCK_BYTES < num_bytes:
                    os.posix_fallocate(descriptor, 0, num_bytes)
                return descriptor
        os.close(descriptor)
        return None

    def create(self, file: str, num_bytes: int) -> int:
        """As `open`, of a new file, whose memory is taken; raises `OSError` where there is too little."""
        self.remove(file)
        descriptor = os.open(file, _FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            self.remove(file)
            raise
        return descriptor

    def remove(self, file: str) -> None:
        """Removes a file of the shelf if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=self._folder)

    def free_bytes(self) -> int:
        """How much may still be taken where the shelf is."""
        found = os.fstatvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def make_room(self, num_bytes: int) -> None:
        """Removes shelves of engines that are gone, of whatever model, until so much may be taken."""
        for one in os.listdir(self._root):
            # what lies there beside folders, goes away meanwhile or is locked by another process stays as it is
            with suppress(OSError, ValueError), ExitStack() as undo:
                space = _at(self._root, one)
                undo.callback(os.close, space)
                undo.enter_context(locked(space))
                for name in _oldest_first(space):
                    if self.free_bytes() < num_bytes and _is_dead(space, name):
                        _remove(space, name)

    def close(self, *, keep: bool) -> None:
        """Lets go of the shelf. Without `keep` the engine removes it; on machines without it, the last worker.

        Where one of them died, the other ends in order, too: then what the shelf holds is for the next engine.
        """
        if not self._held:
            return
        with suppress(OSError, ValueError), locked(self.space):
            if self._worker:
                self.remove(self._worker)
            there = os.listdir(self._folder)
            if self._leads:
                last = not any(name.startswith(WORKER) and _is_dead(self.space, self.name, name) for name in there)
            else:
                last = ENGINE not in there and _locks(self._held[0])
            if last and not keep:
                _remove(self.space, self.name)
                self._leave_nothing()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of the shelf as a process does that dies."""
        for descriptor in (*self._held, self._folder, self.space, self._root) if self._held else ():
            with suppress(OSError):
                os.close(descriptor)
        self._held = []

    def _leave_nothing(self) -> None:
        """Removes the folders of the model and of this user where they hold nothing any more."""
        if shelf_names(self.space):
            return
        path = os.readlink(f"/proc/self/fd/{self.space}")
        os.unlink(LOCK, dir_fd=self.space)
        os.rmdir(os.path.basename(path), dir_fd=self._root)
        os.rmdir(os.path.dirname(path))

    def _hold(self, file: str) -> None:
        held = os.open(file, _FILE | os.O_CREAT, 0o600, dir_fd=self._folder)
        fcntl.flock(held, fcntl.LOCK_SH)
        self._held.append(held)


def private_folder(folder: Path) -> int:
    """A descriptor of this user's own folder below `folder`; raises `ValueError` where others could use it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"frame-kv-{os.geteuid()}"
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        opened = os.open(path, _FOLDER)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ValueError(
            f"{path} is no folder: shared memory for blocks needs one of this user with mode 700"
        ) from None
    found = os.fstat(opened)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        os.close(opened)
        raise ValueError(
            f"{path} has owner {found.st_uid} and mode {mode:o}: others could read prompts in it or plant blocks; it "
            "must be a folder of this user with mode 700"
        )
    return opened


def make_folder(name: str, parent: int) -> int:
    """A descriptor of the folder `name` of `parent`, made when missing."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def open_file(folder: int, file: str, flags: int = os.O_RDONLY) -> int | None:
    """An open descriptor of an ordinary file of this user, None where there is no such."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def locked(space: int) -> Iterator[None]:
    """While no other process changes which shelves there are. Raises `ValueError` where another never ends that."""
    latest = time.monotonic() + WAIT_SECONDS
    while True:
        lock = os.open(LOCK, _FILE | os.O_CREAT, 0o600, dir_fd=space)
        try:
            if _locks(lock) and _is_file(lock, space):
                yield
                return
        finally:
            os.close(lock)
        if time.monotonic() > latest:
            raise ValueError(f"another process has held a lock in shared memory for {WAIT_SECONDS:g} seconds")
        time.sleep(_POLL_SECONDS)


def _is_file(lock: int, space: int) -> bool:
    """Whether the lock is still that of the folder: who removes the last shelf removes it, too."""
    try:
        return os.stat(LOCK, dir_fd=space).st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        return False


def shelf_names(space: int) -> list[str]:
    """The names of all shelves."""
    return [name for name in os.listdir(space) if name != LOCK]


def _choose(space: int, name: str) -> tuple[bool, bool]:
    """Gives a shelf that is left over the name `name`; (whether one has it, whether one soon may be left over)."""
    orphaned = False
    for other in reversed(_oldest_first(space)):
        if other == name:
            return True, False
    for other in reversed(_oldest_first(space)):
        if other.rpartition(".")[2] != name.rpartition(".")[2]:
            continue
        if _is_dead(space, other):
            os.rename(other, name, src_dir_fd=space, dst_dir_fd=space)
            with suppress(FileNotFoundError):
                os.unlink(f"{name}/{ENGINE}", dir_fd=space)
            return True, False
        orphaned = orphaned or _is_dead(space, other, ENGINE)
    return False, orphaned


def _is_dead(space: int, name: str, file: str = ALIVE) -> bool:
    """Whether no process holds that file of the shelf; one that does not exist, whose maker died, is `alive` alone."""
    folder = _at(space, name)
    try:
        descriptor = open_file(folder, file)
    finally:
        os.close(folder)
    if descriptor is None:
        return file == ALIVE
    try:
        return _locks(descriptor)
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _at(space: int, name: str) -> int:
    return os.open(name, _FOLDER, dir_fd=space)


def _oldest_first(space: int) -> list[str]:
    names = shelf_names(space)
    return sorted(names, key=lambda name: os.stat(name, dir_fd=space, follow_symlinks=False).st_mtime_ns)


def _remove(space: int, name: str) -> None:
    folder = _at(space, name)
    try:
        for file in os.listdir(folder):
            os.unlink(file, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=space)
