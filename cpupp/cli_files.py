"""Files that the verbs write where the user says: checked before any host is asked, whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from cpupp.errors import CpuppError, ExitCode


def svg_path(text: str) -> Path:
    """Where a picture goes. Raises CpuppError for a name that may be something else, such as the cluster file."""
    path = Path(text)
    if path.suffix.lower() != ".svg":
        hint = f"write {path.with_suffix('.svg')}: a file of that name is replaced"
        raise CpuppError(
            "SVG-NAME", "the picture's name must end in .svg", hint=hint, where=text, exit_code=ExitCode.USAGE
        )
    _check_folder(path)
    return path


def new_path(text: str, *, force: bool) -> Path:
    """Where a new file goes. Raises CpuppError for one that exists, unless it may be replaced."""
    path = Path(text)
    if os.path.lexists(path) and (path.is_dir() or not force):
        hint = "give another name with -o, or --force to replace it"
        raise CpuppError("FILE-EXISTS", "exists", hint=hint, where=text, exit_code=ExitCode.USAGE)
    _check_folder(path)
    return path


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        hint = f"mkdir -p {path.parent}"
        raise CpuppError("FILE-FOLDER", "its folder does not exist", hint=hint, where=str(path))


def write_file(path: Path, text: str) -> None:
    """Write a file by way of another one beside it. Raises CpuppError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        message = f"cannot be written: {error.strerror}"
        raise CpuppError("FILE-WRITE", message, hint="check the path and its permissions", where=str(path)) from None
