"""Folders and files that the user alone can read (0700, 0600), whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = 0o700
FILE = 0o600


def private_folder(folder: Path) -> None:
    """Make the folder and the parents that are missing, or close it to others when it is there. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(FOLDER, exist_ok=True)
        path.chmod(FOLDER)  # the umask may have taken away our own rights
    if not missing:
        folder.mkdir(FOLDER, exist_ok=True)  # something else in its place is an error
        folder.chmod(FOLDER)


def private(path: str, flags: int) -> int:
    """Opener for `open`: a new file, or one that is there, is the user's alone."""
    descriptor = os.open(path, flags, FILE)
    try:
        os.fchmod(descriptor, FILE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
