"""ClusterSpec: what the user wrote. Strict: an unknown key or a wrong kind is refused.

Only this module uses pydantic. It holds the shape of the file; `rules.py` holds what spans several keys, and
`problems.py` puts pydantic's complaints into words.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cpupp.plan.model import MOST_LAYERS
from cpupp.plan.secret_source import is_outer_source, is_source, is_variable

_SSH = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:@\s/-][^:@\s/]*))(?::(?P<port>\d{1,5}))?")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

MAX_SECONDS = 10_000_000
"""Four months: enough for any start, and a time that every clock and lock of the system can wait for."""

UNSUPPORTED = {
    "ray": "cpupp starts vLLM's own multi-node executor (mp); Ray would need a cluster of its own on every host",
    "external_launcher": "it serves no API: it is for offline scripts; cpupp starts vLLM's mp executor",
    "uni": "it has one worker only; cpupp starts vLLM's mp executor",
    "ccl": "vLLM on CPU has no oneCCL backend; ranks talk by shared memory or by gloo",
    "mpi": "PyTorch's wheels are built without MPI; ranks talk by shared memory or by gloo",
    "nccl": "NCCL is for GPUs; ranks talk by shared memory or by gloo",
}


class SpecValueError(ValueError):
    """A value that the file may not have; `hint` says what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _choice(valid: tuple[str, ...], what: str) -> BeforeValidator:
    return BeforeValidator(lambda value: _chosen(value, valid, what))


def _chosen(value: Any, valid: tuple[str, ...], what: str) -> Any:
    if value in valid:
        return value
    reason = UNSUPPORTED.get(str(value).lower())
    tail = f": {reason}" if reason else ""
    raise SpecValueError(f"{what} {value!r} is not supported{tail}", f"valid: {', '.join(valid)}")


def _port_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= 65535):
        return value
    raise SpecValueError(f"{value!r} is no port", "write auto, or a whole number from 1 to 65535 without quotes")


def _seconds(value: Any) -> Any:
    if type(value) in (int, float) and 0 < value <= MAX_SECONDS:
        return float(value)
    shown = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    raise SpecValueError(
        f"{shown} is no time to wait", f"write a number of seconds above 0 and up to {MAX_SECONDS}, without quotes"
    )


Seconds = Annotated[float, BeforeValidator(_seconds)]


def _ssh_target(value: Any) -> Any:
    if not isinstance(value, str) or parse_ssh(value) is not None:
        return value
    if value.startswith("ssh ") or "://" in value:
        raise SpecValueError(f"{value!r} is a command or a URL", "write only the target: user@host:port")
    raise SpecValueError(
        f"{value!r} is no SSH target", "write [user@]host[:port] (IPv6 in brackets), or an alias of ~/.ssh/config"
    )


def _no_option(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("-"):
        raise SpecValueError(f"{value!r} would be taken as an option of vLLM", f"write ./{value}")
    return value


def _ip_address(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        bare = value.startswith("[")
        hint = "leave the brackets out" if bare else "gloo binds it on the host: give the IP address, not a name"
        raise SpecValueError(f"{value!r} is no IP address", hint) from None
    return value


def _secret_source(value: Any) -> Any:
    if not isinstance(value, str) or is_source(value):
        return value
    # Not a word of the value: it may be the secret itself.
    raise SpecValueError("says where the value is, and is not the value", f"write {_SOURCES}")


def _key_source(value: Any) -> Any:
    if not isinstance(value, str) or is_variable(value) or is_outer_source(value):
        return value
    raise SpecValueError("names a variable, and is not the key", "write NAME (of the launcher's variable) or file:PATH")


_SOURCES = "env (the launcher's variable of that name), env:OTHER_NAME, or file:PATH (its first line)"


def _auto_or_off(what: str) -> BeforeValidator:
    valid = ("auto", "off")
    return BeforeValidator(lambda value: _chosen("off" if value is False else value, valid, what))  # YAML 1.1's off


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSpec(_Strict):
    """The model: a folder on every host (`~` is expanded there) or a hub id, and the name that the API serves it by."""

    path: Annotated[str, BeforeValidator(_no_option)] = Field(min_length=1)
    served_name: Annotated[str | None, BeforeValidator(_no_option), Field(min_length=1)] = None
    num_layers: int | None = Field(
        default=None, ge=1, le=MOST_LAYERS, description="asserted when planning without facts"
    )


def _auto_parallel(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class ParallelSpec(_Strict):
    """Sizes of the pipeline and tensor dimensions; layers: an explicit partition, one number a stage.

    auto: the sizes are chosen from slots and heads (plan/auto.py); until then every rank is a stage.
    """

    auto: bool = False
    pipeline: int = Field(default=1, ge=1, le=1024)
    tensor: int = Field(default=1, ge=1, le=1024)
    layers: list[Annotated[int, Field(ge=1)]] | None = None


SecretSource = Annotated[str, BeforeValidator(_secret_source)]


class EngineSpec(_Strict):
    """How vLLM runs: its Python, `vllm serve` arguments, environment, and which communicator is injected.

    secrets: variable -> where the launcher finds its value; keep_env: what else of a host's own environment passes;
    micro_batches: whether the requests of a pipeline are cut into parts that follow each other through the stages.
    """

    python: str = Field(default="python3", min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, SecretSource] = Field(default_factory=dict)
    keep_env: list[str] = Field(default_factory=list)
    executor: Annotated[Literal["mp"], _choice(("mp",), "executor")] = "mp"
    communicator: Annotated[
        Literal["links", "fallback", "stock"], _choice(("links", "fallback", "stock"), "communicator")
    ] = "links"
    micro_batches: Annotated[Literal["auto", "off"], _auto_or_off("micro_batches")] = "auto"
    packed_weights: Annotated[Literal["auto", "off"], _auto_or_off("packed_weights")] = "off"
    tiled_weights: Annotated[Literal["auto", "off"], _auto_or_off("tiled_weights")] = "auto"


class HostEngineSpec(_Strict):
    """What one host overrides of `engine`."""

    python: str | None = Field(default=None, min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, SecretSource] = Field(default_factory=dict)


class HostSpec(_Strict):
    """One host: how to reach it (`ssh` or `local: true`), its data-plane address, and its number of ranks."""

    name: str = Field(pattern=NAME_PATTERN)
    ssh: Annotated[str | None, BeforeValidator(_ssh_target)] = None
    local: bool = False
    address: Annotated[str | None, BeforeValidator(_ip_address)] = None
    slots: int = Field(default=1, ge=1, le=1024)
    cores: list[Annotated[int, Field(ge=0)]] | None = None
    engine: HostEngineSpec = Field(default_factory=HostEngineSpec)


class NetworkSpec(_Strict):
    """The data plane: interface, master address and port of rank 0, backend, and the interface's check."""

    interface: str = Field(default="auto", min_length=1)
    master_addr: str = Field(default="auto", min_length=1)
    master_port: Annotated[Literal["auto"] | int, BeforeValidator(_port_or_auto)] = "auto"
    backend: Annotated[Literal["auto", "shm", "gloo"], _choice(("auto", "shm", "gloo"), "backend")] = "auto"


class ServeSpec(_Strict):
    """Where the API listens on the head. api_key_env: where the launcher finds its key: a variable, or `file:PATH`."""

    host: str = Field(default="0.0.0.0", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    api_key_env: Annotated[str | None, BeforeValidator(_key_source)] = None


class DeadlinesSpec(_Strict):
    """Seconds for each phase of a start, counted from the moment at which all vLLM nodes are through the former one."""

    connect: Seconds = 60.0
    spawn: Seconds = 60.0
    import_: Seconds = Field(default=300.0, alias="import")
    join: Seconds = 300.0
    load: Seconds = 3600.0
    warm_up: Seconds = 3600.0
    answer: Seconds = 900.0


class RestartSpec(_Strict):
    """Whether the whole gang comes again after a failure, how often, seconds before the first time (then doubled)."""

    policy: Annotated[Literal["never", "on-failure"], _choice(("never", "on-failure"), "policy")] = "never"
    max: int = Field(default=3, ge=1, le=1000)
    backoff: Seconds = 5.0


class ClusterSpec(_Strict):
    """The whole cluster file."""

    name: str = Field(pattern=NAME_PATTERN)
    model: ModelSpec
    parallel: Annotated[ParallelSpec, BeforeValidator(_auto_parallel)] = Field(default_factory=ParallelSpec)
    hosts: list[HostSpec] = Field(min_length=1)
    engine: EngineSpec = Field(default_factory=EngineSpec)
    network: NetworkSpec = Field(default_factory=NetworkSpec)
    serve: ServeSpec = Field(default_factory=ServeSpec)
    deadlines: DeadlinesSpec = Field(default_factory=DeadlinesSpec)
    restart: RestartSpec = Field(default_factory=RestartSpec)


def parse_ssh(text: str) -> tuple[str | None, str, int | None] | None:
    """Split `[user@]host[:port]` (IPv6 in brackets) into user, host, port; None when it is neither."""
    match = _SSH.fullmatch(text)
    if match is None:
        return None
    port = match["port"]
    if port is not None and not 1 <= int(port) <= 65535:
        return None
    return match["user"], match["v6"] or match["host"], int(port) if port else None


def read_spec(data: Any) -> tuple[ClusterSpec | None, list[dict[str, Any]]]:
    """Validate the mapping of a cluster file; return the spec, or None and pydantic's error records."""
    try:
        return ClusterSpec.model_validate(data), []
    except ValidationError as error:
        return None, [dict(record) for record in error.errors(include_url=False)]


def keys_at(path: tuple[str | int, ...]) -> list[str] | None:
    """The keys that the mapping at `path` may have, in the order of the docs; None where any key may stand."""
    model: Any = ClusterSpec
    for part in path:
        if isinstance(part, int):
            continue
        field = next((field for name, field in model.model_fields.items() if part == (field.alias or name)), None)
        if field is None:
            return None
        model = _model_inside(field.annotation)
        if model is None:
            return None
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
