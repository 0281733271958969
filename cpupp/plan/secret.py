"""Secrets by name: where the launcher finds each value. No value is ever part of a spec, a plan or a command.

A source is `env:NAME` (a variable of the launcher's environment) or `file:PATH` (the first line of a file beside the
launcher). What stands in the cluster file itself is a literal; where its name looks secret it is hidden all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.secret_source import normal_source

API_KEY_ENV = "VLLM_API_KEY"
API_KEY_ARG = "api_key"
LITERAL = "literal"
_WORD = re.compile(r"(TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|^KEYS?)$")
_ABOUT = {"FILE", "PATH", "DIR", "NAME", "ID", "TYPE", "LEN", "LENGTH", "SIZE"}


def looks_secret(name: str) -> bool:
    """Whether a variable or argument of this name holds a secret, as names go: HF_TOKEN does, TOKENIZER does not."""
    words = re.split(r"[_.-]+", name.upper().strip("-"))
    return words[-1] not in _ABOUT and any(_WORD.search(word) for word in words)


def secret_sources(spec: ClusterSpec, host: HostSpec) -> dict[str, str]:
    """The secrets of one host's vLLM nodes: variable -> source. The API's key goes to the head alone."""
    general = {name: source for name, source in spec.engine.secrets.items() if name not in host.engine.env}
    given = {**general, **host.engine.secrets}
    found = {name: normal_source(name, source) for name, source in given.items()}
    if spec.serve.api_key_env is not None and host is spec.hosts[0]:
        found[API_KEY_ENV] = api_key_source(spec.serve.api_key_env)
    return found


def api_key_source(text: str) -> str:
    """The source that `serve.api_key_env` names: a variable, or `file:PATH`."""
    return text if text.startswith(("env:", "file:")) else f"env:{text}"


def key_source(spec: ClusterSpec) -> str:
    """Where the API's key comes from: a source, `literal` when the cluster file has the key, empty when it has none."""
    head = spec.hosts[0]
    if any(api_key_args(spec.engine.args)):  # goes before any variable in vLLM
        return LITERAL
    if source := secret_sources(spec, head).get(API_KEY_ENV):
        return source
    return LITERAL if {**spec.engine.env, **head.engine.env}.get(API_KEY_ENV) else ""


def has_api_key(spec: ClusterSpec) -> bool:
    """Whether the API asks for a key, wherever it comes from."""
    return key_source(spec) != ""


def api_key_args(args: Mapping[str, object]) -> list[str]:
    """The keys written under `engine.args.api_key`."""
    given = next((value for name, value in args.items() if name.replace("-", "_") == API_KEY_ARG), None)
    return [str(key) for key in (given if isinstance(given, list) else [given]) if key]


def literal_secrets(spec: ClusterSpec) -> dict[str, tuple[str, ...]]:
    """Secrets that are written in the cluster file: key path -> values."""
    found: dict[str, tuple[str, ...]] = {}
    places = [("engine.env", spec.engine.env)]
    places += [(f"hosts[{host.name}].engine.env", host.engine.env) for host in spec.hosts]
    for place, env in places:
        found |= {f"{place}.{name}": (value,) for name, value in env.items() if value and looks_secret(name)}
    for name, value in spec.engine.args.items():
        values = tuple(str(item) for item in (value if isinstance(value, list) else [value]) if item)
        if values and not isinstance(value, bool | int | float | dict) and looks_secret(name):
            found[f"engine.args.{name}"] = values
    return found


def literal_warnings(spec: ClusterSpec) -> list[str]:
    """How to move each secret out of the file."""
    found = []
    for place in literal_secrets(spec):
        section, _, name = place.rpartition(".")
        is_key = name == API_KEY_ENV or (section == "engine.args" and name.replace("-", "_") == API_KEY_ARG)
        if is_key:
            cure = f"write `serve: {{api_key_env: {API_KEY_ENV}}}` and export {API_KEY_ENV} where cpupp is started"
        elif section == "engine.args":
            cure = "every user of the host can read the arguments of a process: use a variable of vLLM, if it has one"
        else:
            cure = f"write `secrets: {{{name}: env}}` beside `env` and export {name} where cpupp is started"
        found.append(f"{place} holds a secret in the cluster file: {cure}")
    return found
