"""Read a cluster file: YAML with line numbers, every problem at once, each with file, line, key and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.cluster import ClusterSpec, read_spec
from cpupp.plan.problems import Path as KeyPath
from cpupp.plan.problems import Problem, describe, key_text, shape_problems
from cpupp.plan.rules import rule_problems

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Aliases can make a small file huge; no cluster needs more values than this."""


def load_cluster(path: Path | str) -> ClusterSpec:
    """Read and check a cluster file. Raises CpuppErrors with all problems, or CpuppError when it cannot be read."""
    return load_cluster_file(path)[0]


def load_cluster_file(path: Path | str) -> tuple[ClusterSpec, bytes]:
    """As `load_cluster`, with the file's bytes as they were read, for the run's record."""
    shown = str(path)
    document = _Document(shown)
    raw = _read(Path(path), shown)
    data = document.load(_text(raw, shown))
    if not isinstance(data, dict):
        message = f"a cluster file is a mapping (key: value), this is {describe(data)}"
        raise CpuppError("CONFIG-YAML", message, hint="start with `name:`; see examples/ and docs/yaml.md", where=shown)
    problems = [*document.problems, *shape_problems(data), *rule_problems(data)]
    if problems:
        raise CpuppErrors(document.errors(problems))
    spec, records = read_spec(data)
    assert spec is not None, records
    return spec, raw


def _read(path: Path, shown: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        message, hint = "no such file", _nearby(path)
    except IsADirectoryError:
        message, hint = "is a folder, not a cluster file", _nearby(path / "cluster.yaml")
    except OSError as error:
        message, hint = f"cannot be read: {error.strerror}", "check the path and its permissions"
    raise CpuppError("CONFIG-FILE", message, hint=hint, where=shown)


def _nearby(path: Path) -> str:
    try:
        files = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        files = []
    if not files:
        return "give the path of a cluster file; examples/demo.yaml is the smallest"
    return f"YAML files there: {', '.join(files[:8])}{', ...' if len(files) > 8 else ''}"


def _text(raw: bytes, shown: str) -> str:
    hint = "a cluster file is YAML text in UTF-8; see examples/demo.yaml"
    if len(raw) > MAX_BYTES:
        raise CpuppError("CONFIG-FILE", "is larger than 1 MiB: not a cluster file", hint=hint, where=shown)
    if b"\0" in raw and not raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise CpuppError("CONFIG-FILE", "is a binary file, not a cluster file", hint=hint, where=shown)
    try:
        text = raw.decode("utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"is not UTF-8 text (byte {raw[error.start]:#04x})"
        raise CpuppError("CONFIG-FILE", message, hint=hint, where=f"{shown}:{line}") from None
    if not text.strip():
        raise CpuppError("CONFIG-FILE", "is empty", hint="start from examples/demo.yaml", where=shown)
    return text


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises: `2026-01-02`, `22:22` and `=` stay text."""


_INT = re.compile(r"^(?:[-+]?0b[01_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_REPLACED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "int", "float", "value"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _scalar(loader: _Loader, node: ScalarNode) -> Any:
    """Return the value of plain or quoted text. Raises ConstructorError, with its place, for what is no such value."""
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError):  # PyYAML lets them through: `!!int x`, 5000 digits
        kind = node.tag.rpartition(":")[2]
        what = f"{node.value[:40]!r} is no {kind} that can be read"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None


class _Document:
    """One parsed file: its values, the line of every key path, and the keys that occur twice."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._num_values = 0
        self._open: list[Node] = []

    def load(self, text: str) -> Any:
        """Return the document's values. Raises CpuppError for a syntax error, with line and column."""
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                return None if node is None else self._value(loader, node, ())
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from None
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1
            character = error.character if isinstance(error.character, int) else ord(error.character[:1])
            message = f"holds the character U+{character:04X}, which YAML does not allow"
            hint = "remove it; in quoted text write an escape such as \\u0007"
            raise CpuppError("CONFIG-YAML", message, hint=hint, where=f"{self.shown}:{line}") from None
        except RecursionError:
            raise CpuppError("CONFIG-YAML", "is nested too deeply", hint="see docs/yaml.md", where=self.shown) from None

    def errors(self, problems: list[Problem]) -> list[CpuppError]:
        """Turn problems into errors with file and line, in the order of the file."""
        placed = [(self._line(problem.path), index, problem) for index, problem in enumerate(problems)]
        return [self._error(line, problem) for line, _, problem in sorted(placed, key=lambda p: p[:2])]

    def _error(self, line: int, problem: Problem) -> CpuppError:
        also = f" (first on line {self._line(problem.also)})" if problem.also is not None else ""
        message = f"{key_text(problem.path)}: {problem.message}{also}"
        return CpuppError(problem.code, message, hint=problem.hint, where=f"{self.shown}:{line}")

    def _line(self, path: KeyPath) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _value(self, loader: _Loader, node: Node, path: KeyPath) -> Any:
        self._num_values += 1
        if node in self._open or self._num_values > MAX_VALUES:
            what = "an alias contains itself" if node in self._open else "aliases make the file too large"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, ScalarNode):
            return _scalar(loader, node)
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return [self._value(loader, item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(loader, node, path)
        finally:
            self._open.pop()

    def _mapping(self, loader: _Loader, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        self._note_duplicates(node, path)
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            key = str(key_node.value)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self._value(loader, value_node, (*path, key))
        return result

    def _note_duplicates(self, node: MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first:
                message = f"is written twice (lines {first[key]} and {line}); YAML would keep only the last"
                problem = Problem(path=(*path, key), code="CONFIG-DUPLICATE", message=message, hint="keep one of them")
                self.problems.append(problem)
            first.setdefault(key, line)

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> CpuppError:
        mark = error.problem_mark or error.context_mark
        where = f"{self.shown}:{mark.line + 1}:{mark.column + 1}" if mark else self.shown
        what = error.problem or str(error)
        hint = next((hint for text, hint in _SYNTAX_HINTS if text in f"{what} {error.context}"), "see docs/yaml.md")
        context = f" {error.context}" if error.context else ""
        return CpuppError("CONFIG-YAML", f"not valid YAML: {what}{context}", hint=hint, where=where)


_SYNTAX_HINTS = (
    ("'\\t'", "indent with spaces: YAML does not allow tabs"),
    ("mapping values are not allowed", "a colon too many, or text with `: ` in it that needs quotes"),
    ("could not find expected ':'", "a key needs a colon and a space after it"),
    ("another document", "a cluster file is one document: remove the second `---`"),
    ("quoted scalar", "a quote is not closed"),
    ("flow", "a bracket or brace is not closed, or a comma is missing"),
    ("block mapping", "the line before has another indentation, or a `-` or a colon is missing"),
    ("block collection", "the line before has another indentation"),
    ("undefined alias", "define it with & before its use, or quote the text"),
    ("that can be read", "correct the value, or quote it to have it as text"),
    ("2002:merge", "quote it: a bare << is a merge key"),
    ("could not determine a constructor", "remove the tag (the word that starts with !)"),
)
