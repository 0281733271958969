"""`cpupp init` and `cpupp schema`: a first cluster file from what the hosts say, and the schema for editors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpupp.cli_frame import guard, signals
from cpupp.errors import CpuppError, ExitCode

if TYPE_CHECKING:
    from cpupp.plan.init_file import Draft

SCHEMA_NAME = "cpupp.schema.json"


def add_to(app: typer.Typer) -> None:
    """Add the verbs to the command."""

    @app.command()
    def init(
        hosts: Annotated[
            list[str], typer.Argument(metavar="HOST...", help="user@host:port, an SSH alias, or `local`.")
        ],
        output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = (
            "cluster.yaml"
        ),
        model: Annotated[
            str | None, typer.Option(metavar="PATH", help="The model's folder on every host, or hub id.")
        ] = None,
        name: Annotated[str | None, typer.Option(metavar="NAME", help="The cluster's name; else the file's.")] = None,
        schema: Annotated[
            str | None,
            typer.Option(metavar="PATH", help=f"Schema named in the file; else {SCHEMA_NAME} is written beside it."),
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
        accept_new: Annotated[
            bool,
            typer.Option("--accept-new", help="Add SSH keys of unknown hosts to known_hosts."),
        ] = False,
    ) -> None:
        """Ask hosts what they are and write a commented cluster file."""
        with guard("init", False), signals() as caught:
            from cpupp.cli_files import new_path, write_file
            from cpupp.plan.init_file import file_text
            from cpupp.plan.schema import schema_text

            path = new_path(output, force=force)
            beside = path.with_name(SCHEMA_NAME)
            if schema is None and not _is_schema(beside):
                new_path(str(beside), force=force)
            made = caught.wait(lambda: _draft(hosts, name or path.stem, model, accept_new))
            write_file(path, file_text(made, schema or f"./{SCHEMA_NAME}"))
            if schema is None:
                write_file(beside, schema_text())
            _tell(made, path, with_model=model is not None)

    @app.command()
    def schema() -> None:
        """Print the JSON Schema of cluster files."""
        with guard("schema", False):
            from cpupp.plan.schema import schema_text
            from cpupp.render import write

            write(sys.stdout, schema_text())


def _is_schema(path: Path) -> bool:
    """Whether this is a schema that cpupp wrote, which may be written anew."""
    from cpupp.plan.schema import TITLE

    try:
        return f'"title": "{TITLE}"' in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _draft(targets: list[str], name: str, model: str | None, accept_new: bool) -> Draft:
    from cpupp.launch.probe import probe_hosts
    from cpupp.launch.session import open_sessions, run_all
    from cpupp.plan.init_file import HERE, NO_MODEL, Found, choose_pythons, draft, entry_names, first_spec

    numbers = [f"h{number}" for number in range(1, len(targets) + 1)]
    asked = _checked(first_spec(name, targets, numbers, model or NO_MODEL, {}), targets)
    sessions = open_sessions(asked, accept_new=(lambda words: typer.echo(words, err=True)) if accept_new else None)
    try:
        answers, errors = run_all(
            {
                host: lambda host=host, target=target: sessions[host].request(  # type: ignore[misc]
                    "find", prefixes=[str(Path(".venv").absolute()), sys.prefix] if target in HERE else []
                )
                for host, target in zip(numbers, targets, strict=True)
            }
        )
        if errors:
            raise errors[0]
        found = [_found(Found, answers[host]) for host in numbers]
        names = entry_names(targets, found)
        by_name = dict(zip(names, found, strict=True))
        data = first_spec(name, targets, names, model or NO_MODEL, choose_pythons(by_name))
        renamed = {new: sessions[old] for new, old in zip(names, numbers, strict=True)}
        facts = probe_hosts(_checked(data, targets), renamed)
    finally:
        run_all({host: session.close for host, session in sessions.items()})
    return draft(data, facts, by_name)


def _found(kind: Any, answer: dict[str, Any]) -> Any:
    engines = tuple((engine["python"], engine["vllm"]) for engine in answer["engines"])
    return kind(hostname=answer["hostname"], home=answer["home"], engines=engines, models=tuple(answer["models"]))


def _checked(data: Any, targets: list[str]) -> Any:
    """The spec of a mapping that came from the command line. Raises CpuppError."""
    from cpupp.plan.cluster import read_spec
    from cpupp.plan.problems import key_text, shape_problems

    spec, _ = read_spec(data)
    if spec is None:
        problem = shape_problems(data)[0]
        index = problem.path[1] if problem.path[:1] == ("hosts",) and len(problem.path) > 1 else None
        where = targets[index] if isinstance(index, int) else key_text(problem.path)
        raise CpuppError(problem.code, problem.message, hint=problem.hint, where=where, exit_code=ExitCode.USAGE)
    return spec


def _tell(made: Draft, path: Path, *, with_model: bool) -> None:
    from cpupp.render import print_notes, write

    write(sys.stdout, f"wrote {path}\n")
    if with_model:
        print_notes(f"a launch would be refused: {error} (hint: {error.hint})" for error in made.refused)
        write(sys.stdout, f"next: cpupp doctor {path}; cpupp plan {path}\n")
    else:
        write(sys.stdout, f"next: set model.path in {path}, then cpupp doctor {path}\n")
