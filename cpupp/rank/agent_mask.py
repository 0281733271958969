"""Hides secret values in text that leaves this process. One implementation for launcher and agent.

Standard library only, any python3 >= 3.8. A value is found as it is, and as JSON, repr and percent-encoding write it.
Values below `SHORTEST` characters are not hidden: they would tear ordinary words apart.
"""

from __future__ import annotations

import json
from typing import Any, Iterable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Iterable

SHOWN = "<secret>"
SHORTEST = 8


class Mask:
    """A set of secret values. Values may be added at any time; what was shown before stays shown."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._raw: Mask | None = None
        self._forms: tuple[str, ...] = ()
        self._firsts: frozenset[str] = frozenset()
        self._longest = 0
        self.add(values)

    def add(self, values: Iterable[str]) -> None:
        """Hide these values too."""
        forms = set(self._forms)
        for value in values:
            forms.update(_forms(value))
        self._take(forms)

    def _take(self, forms: set[str]) -> None:
        self._forms = tuple(sorted(forms))
        self._firsts = frozenset(form[0] for form in forms)
        self._raw = None
        self._longest = max(map(len, forms), default=0)

    @property
    def raw(self) -> Mask:
        """The same for bytes, decoded as latin-1."""
        if self._raw is None:
            raw = Mask()
            raw._take({form.encode("utf-8", "surrogateescape").decode("latin-1") for form in self._forms})
            self._raw = raw
        return self._raw

    def text(self, text: str) -> str:
        """Return a whole text with `<secret>` in the place of every value."""
        shown, place = [], 0
        for start, end in self.spans(text):
            shown += [text[place:start], SHOWN]
            place = end
        return "".join(shown) + text[place:] if place else text

    def data(self, value: Any) -> Any:
        """Return JSON values (dicts, lists, text, numbers) with every text in them masked, names of keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.data(key): self.data(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(item) for item in value]
        return value

    def stream(self) -> MaskStream:
        """Return a mask for a text that comes in pieces."""
        return MaskStream(self)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return [start, end) of all that must be hidden, in order; spans that touch or overlap are one."""
        found = []
        for form in self._forms:
            place = text.find(form)
            while place >= 0:
                found.append((place, place + len(form)))
                place = text.find(form, place + 1)
        return _merged(found)

    def overhang(self, text: str) -> int:
        """Return the length of the longest end of `text` that the next piece could complete to a value."""
        size = len(text)
        for place in range(max(0, size - self._longest + 1), size):
            if text[place] in self._firsts:
                tail = text[place:]
                if any(len(form) > len(tail) and form.startswith(tail) for form in self._forms):
                    return len(tail)
        return 0


MASK = Mask()
"""Of this process: an agent hides the secrets of the vLLM nodes that it started, a keeper those of its own."""


class MaskStream:
    """Masks a text that comes in pieces, wherever they are cut. What may be the start of a value waits for the rest."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = ""
        self._covered = 0  # characters of `_held` that a value covers whose `<secret>` was given out already

    def feed(self, text: str) -> str:
        """Take the next piece; return what can be shown now."""
        data = self._held + text
        return self._show(data, len(data) - self._mask.overhang(data), ())

    def end(self) -> str:
        """Return what still waits; so much of a value's beginning that it would give it away is hidden."""
        data = self._held
        rest = self._mask.overhang(data)
        return self._show(data, len(data), ((len(data) - rest, len(data)),) if rest >= SHORTEST else ())

    def _show(self, data: str, cut: int, more: tuple[tuple[int, int], ...]) -> str:
        begun = self._covered > 0
        spans = _merged([*self._mask.spans(data), *more, *([(0, self._covered)] if begun else [])])
        shown, place, covered = [], 0, 0
        for start, end in spans:
            if start >= cut:
                break
            shown.append(data[place:start])
            if start > 0 or not begun:
                shown.append(SHOWN)
            place, covered = min(end, cut), max(0, end - cut)
        if begun and cut == 0:
            covered = self._covered
        shown.append(data[place:cut])
        self._held, self._covered = data[cut:], covered
        return "".join(shown)


class FileMask:
    """Masks a file that is copied in pieces, byte for byte of the same length, so that offsets stay what they are."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._covered = 0  # bytes at the present offset that belong to a value whose beginning was copied
        self._spans: list[tuple[int, int]] = []

    def show(self, data: bytes, last: bool = False) -> bytes:
        """Return what may be copied of the bytes at the present offset: as many of them, from the first on.

        What may be the start of a value waits for the rest, unless `last` says that there is none.
        """
        mask = self._mask.raw
        text = data.decode("latin-1")
        rest = mask.overhang(text)
        more = [(0, min(self._covered, len(text)))] if self._covered else []
        if last and rest >= SHORTEST:
            more.append((len(text) - rest, len(text)))
        self._spans = _merged([*mask.spans(text), *more])
        shown = bytearray(data)
        for start, end in self._spans:
            begun = start == 0 and self._covered
            shown[start:end] = b"*" * (end - start) if begun else SHOWN.encode().ljust(end - start, b"*")
        return bytes(shown if last else shown[: len(data) - rest])

    def advance(self, length: int) -> None:
        """Leave so many of the bytes that `show` returned behind; they are copied."""
        left = [end - length for start, end in self._spans if start < length < end]
        self._covered = left[0] if left else max(0, self._covered - length)


def _forms(value: str) -> set[str]:
    from urllib.parse import quote  # imports much, and few runs have secrets

    parts = {value, *value.splitlines()}
    written = {
        form
        for part in parts
        if len(part) >= SHORTEST
        for form in (
            part,
            json.dumps(part)[1:-1],
            json.dumps(part, ensure_ascii=False)[1:-1],
            repr(part)[1:-1],
            quote(part, safe="", errors="surrogateescape"),
        )
    }
    return {form for form in written if len(form) >= SHORTEST}


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
