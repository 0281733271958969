"""What may import what. The table below is the design's; the test reads the code and holds it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import cpupp

ROOT = Path(cpupp.__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "cpupp").rglob("*.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the modules that match `files` may import beside the standard library, as module patterns."""

    files: str
    may: tuple[str, ...]
    never: tuple[str, ...] = ()  # of the standard library
    may_at_top: tuple[str, ...] | None = None  # where less is allowed outside functions


# The first row that matches a module is its row.
TABLE = (
    Row(files="cpupp", may=(), never=("*",)),  # the version and nothing else
    Row(files="cpupp.errors", may=()),
    Row(
        files="cpupp.plan.*",
        may=("cpupp.errors", "cpupp.plan.*"),  # and pydantic in cluster, see below
        never=("datetime", "os", "random", "secrets", "socket", "subprocess", "tempfile", "threading", "time", "uuid"),
    ),
    Row(
        files="cpupp.launch.*",
        may=(
            *("cpupp", "cpupp.errors", "cpupp.plan.*", "cpupp.launch.*", "paramiko", "yaml"),
            "cpupp.rank.agent_mask",  # both ends hide secrets in one way
        ),
    ),
    Row(files="cpupp.rank.agent*", may=("cpupp.rank.agent*",)),  # runs on a bare python3
    Row(files="cpupp.rank.vllm_plugin", may=("cpupp.plan.handoff", "cpupp.rank.*", "vllm"), may_at_top=()),
    Row(files="cpupp.rank.vllm_steps", may=("cpupp.rank.step_clock", "vllm"), may_at_top=("cpupp.rank.step_clock",)),
    Row(files="cpupp.rank.vllm_start", may=("torch", "vllm"), may_at_top=()),
    Row(files="cpupp.rank.vllm_adapter", may=("cpupp.errors", "cpupp.plan.handoff", "cpupp.rank.*", "torch", "vllm")),
    Row(files="cpupp.rank.scheduler", may=("cpupp.rank.micro_batches", "vllm")),
    Row(
        files="cpupp.rank.bench_*",  # measures vLLM's own paths beside ours, and goes without where there is no vLLM
        may=("cpupp.errors", "cpupp.plan.bench_order", "cpupp.plan.handoff", "cpupp.rank.*", "torch", "vllm"),
        may_at_top=("cpupp.errors", "cpupp.plan.bench_order", "cpupp.plan.handoff", "cpupp.rank.*", "torch"),
    ),
    Row(files="cpupp.rank.*", may=("cpupp.errors", "cpupp.plan.handoff", "cpupp.rank.*", "torch")),
    Row(files="cpupp.*", may=("cpupp", "cpupp.*", "rich", "typer")),  # cli, render and what belongs to them
)
# Third-party packages that one module of a row may import, and no other.
EXCEPTIONS = {("cpupp.plan.cluster", "pydantic"), ("cpupp.launch.host_certificate", "cryptography")}
# cli reads the launcher's environment. The local transport hands it on whole, to an agent born on this machine.
ENVIRONMENT = {"cpupp.cli", "cpupp.launch.transport"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement of `module`: of `name`, at the top of the module or inside a function."""

    module: str
    name: str
    at_top: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} imports {self.name}"


def module_name(path: Path) -> str:
    return ".".join(part for part in path.parts if part != "__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).with_suffix(".py").read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in the module `path`, with relative names resolved."""
    module = module_name(path)

    def names(node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        package = path.parts[: len(path.parts) - node.level] if node.level else ()
        base = ".".join([*package, *([node.module] if node.module else [])])
        # `from cpupp.rank import ring` names a module, `from os import environ` does not.
        inside = [f"{base}.{alias.name}" for alias in node.names]
        return [name if Path(*name.split(".")) in MODULES else base for name in inside]

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for name in names(child):
                    yield Import(module=module, name=name, at_top=at_top, line=child.lineno)
            yield from visit(child, at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return visit(tree_of(path), True)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    # A package of others stands for everything in it.
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def matches_ours(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def allowed(found: Import, row: Row) -> bool:
    top = found.name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return not matches(found.name, row.never)
    may = row.may_at_top if found.at_top and row.may_at_top is not None else row.may
    if top == "cpupp":
        return matches_ours(found.name, may)
    return matches(found.name, may) or (found.module, top) in EXCEPTIONS


def row_of(module: str) -> Row:
    # A package's own __init__ belongs to the package.
    return next(row for row in TABLE if fnmatchcase(module, row.files) or fnmatchcase(f"{module}.", row.files))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_only_what_its_row_allows(path: Path) -> None:
    row = row_of(module_name(path))
    assert [str(found) for found in imports_of(path) if not allowed(found, row)] == []


def test_no_module_of_plan_imports_itself_by_a_detour() -> None:
    needs = {
        module_name(path): {found.name for found in imports_of(path) if found.name.startswith("cpupp.plan.")}
        for path in MODULES
        if path.parts[1:2] == ("plan",)
    }
    while leaves := [module for module, names in needs.items() if not names & needs.keys()]:
        for module in leaves:
            del needs[module]
    assert needs == {}, "these import each other in a circle"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[1:2] == ("plan",)], ids=module_name)
def test_plan_opens_no_file(path: Path) -> None:
    calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call, ast.Name) and call.id in {"open", "input"}] == []


def test_the_environment_of_the_launcher_is_read_in_one_place() -> None:
    readers = [
        f"{module_name(path)}:{node.lineno}"
        for path in MODULES
        if path.parts[1:2] != ("rank",) and module_name(path) not in ENVIRONMENT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert readers == []


def test_only_cli_knows_of_a_dry_run() -> None:
    texts = {module_name(path): (ROOT / path).with_suffix(".py").read_text(encoding="utf-8") for path in MODULES}
    assert [module for module, text in texts.items() if "dry_run" in text] in ([], ["cpupp.cli"])


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, cpupp.cli; print(*sorted({'torch', 'vllm', 'paramiko'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_unit_test_needs_the_engine() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in {"torch", "transformers", "vllm"}
    ]
    assert found == [], "these belong in tests/integration"
