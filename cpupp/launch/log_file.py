"""A log file in parts: a full part is closed under a number, nothing is cut off, and a gap says that it is one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cpupp.launch.private import private

PART_BYTES = 64 << 20


class LogFile:
    """Appends bytes to `path`; a full part becomes `<stem>.001.log` and so on, `path` is the one being written.

    A part ends with a whole line where lines are shorter than a part. Raises OSError when it cannot be opened.
    """

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self.path = path
        self.error = ""  # why bytes were lost last, empty while none are
        self.num_bytes = 0  # appended so far
        self._part_bytes = part_bytes
        self._num_parts = len(list(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9]*{path.suffix}")))
        self._lost = 0
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "ab", buffering=0, opener=private)  # noqa: SIM115  # to the end
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append. What a full disk does not take is counted, and said in the file once it takes more; never raises."""
        if self._file.closed:
            return
        if self._lost and data and not self._tell_gap():
            self._lost += len(data)
            return
        self._lost += len(data) - self._append(data)
        if self._size >= self._part_bytes and (data.endswith(b"\n") or self._size >= 2 * self._part_bytes):
            self._next_part()

    def _tell_gap(self) -> bool:
        """Say how much is missing; a note that the disk takes in part is taken back."""
        note = b"\n[cpupp: %d bytes are missing here: %s]\n" % (self._lost, self.error.encode())
        before = self._size, self.num_bytes
        if self._append(note) < len(note):
            with suppress(OSError):
                self._file.truncate(before[0])
                self._size, self.num_bytes = before
            return False
        self._lost, self.error = 0, ""
        return True

    def _append(self, data: bytes) -> int:
        """Write as much as the disk takes and return how much that was."""
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:]) or 0
        except OSError as error:
            self.error = error.strerror or str(error)
        self._size += done
        self.num_bytes += done
        return done

    def _next_part(self) -> None:
        full = self.path.with_name(f"{self.path.stem}.{self._num_parts + 1:03}{self.path.suffix}")
        with suppress(OSError):  # then the part grows on, which loses nothing
            self.path.rename(full)
            self._num_parts += 1
            before = self._file
            try:
                self._open()
            except OSError:
                full.rename(self.path)
                self._num_parts -= 1
                return
            before.close()

    def close(self) -> None:
        """Close it, a gap at the end told; later writes go nowhere."""
        if self._lost and not self._file.closed:
            self._tell_gap()
        self._file.close()
