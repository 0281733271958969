"""Secrets by name: what a file may say, where values come from, and that no page, error or record holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppErrors
from cpupp.launch.config import load_cluster
from cpupp.launch.secret import Secrets, read_secrets
from cpupp.launch.site import start_request
from cpupp.plan.command import make_commands
from cpupp.plan.plan import make_plan
from cpupp.plan.secret import key_source, literal_secrets, literal_warnings, looks_secret
from cpupp.plan.shown import SHOWN, shown_command, shown_plan
from cpupp.rank import agent_mask
from cpupp.render_plan import plan_data, plan_page
from tests.unit.factory import cluster
from tests.unit.test_cli import run

TOKEN, KEY = "hf_0123456789", "key-abcdefgh"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("HF_TOKEN", True),
        ("hf-token", True),
        ("MY_API_KEY", True),
        ("OPENAI_APIKEY", True),
        ("DB_PASSWORD", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("api_key", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("tokenizer", False),
        ("max_num_batched_tokens", False),
        ("HF_TOKEN_PATH", False),
        ("KEYBOARD", False),
        ("MONKEY", False),
    ],
)
def test_names_that_look_secret(name: str, wanted: bool) -> None:
    assert looks_secret(name) is wanted


def test_both_sides_show_the_same_words() -> None:
    assert agent_mask.SHOWN == SHOWN


def refused(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text("name: c\nmodel: {path: m}\nhosts:\n  - {name: a, ssh: a}\n" + text)
    with pytest.raises(CpuppErrors) as caught:
        load_cluster(path)
    return [f"{error.code} {error.message.partition(':')[0]}" for error in caught.value.errors]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"engine: {{secrets: {{HF_TOKEN: {TOKEN}}}}}", "CONFIG-VALUE engine.secrets.HF_TOKEN"),
        ("engine: {secrets: {HF_TOKEN: 1234567890}}", "CONFIG-VALUE engine.secrets.HF_TOKEN"),
        ("engine: {secrets: {HF_TOKEN: 'file:'}}", "CONFIG-VALUE engine.secrets.HF_TOKEN"),
        ("engine: {secrets: {HF-TOKEN: env}}", "CONFIG-KEY engine.secrets.HF-TOKEN"),
        ("engine: {secrets: {MASTER_ADDR: env}}", "CONFIG-OWNED engine.secrets.MASTER_ADDR"),
        ("engine: {secrets: {A: env}, env: {A: x}}", "CONFIG-DUPLICATE engine.secrets.A"),
        (f"serve: {{api_key_env: {KEY}}}", "CONFIG-VALUE serve.api_key_env"),
        ("serve: {api_key_env: K}\nengine: {args: {api-key: x}}", "CONFIG-DUPLICATE serve.api_key_env"),
        ("serve: {api_key_env: K}\nengine: {secrets: {VLLM_API_KEY: env}}", "CONFIG-DUPLICATE serve.api_key_env"),
        ("serve: {api_key: x}", "CONFIG-KEY serve.api_key"),
        ("engine: {keep_env: [OMP_PLACES]}", "CONFIG-OWNED engine.keep_env[0]"),
        ("engine: {keep_env: ['A B']}", "CONFIG-VALUE engine.keep_env[0]"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, wanted: str) -> None:
    assert refused(tmp_path, text) == [wanted]


def test_a_value_in_the_place_of_a_source_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: c\nmodel: {path: m}\nhosts:\n  - {name: a, ssh: a}\n"
        f"engine: {{secrets: {{A: {TOKEN}, B: 1234567890}}}}\nserve: {{api_key_env: {KEY}}}\n"
    )
    done = run("plan", str(path), "--offline")
    assert done.returncode == 3
    assert not [value for value in (TOKEN, "1234567890", KEY) if value in done.stdout + done.stderr]


def test_each_node_gets_its_own_values_and_the_head_alone_the_key(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("file_token_b\nnot this\n")
    (tmp_path / "token").chmod(0o600)
    hosts: list[Any] = [{"name": "a"}, {"name": "b", "engine": {"secrets": {"HF_TOKEN": f"file:{tmp_path}/token"}}}]
    spec = cluster(
        *hosts, pipeline=2, engine={"secrets": {"HF_TOKEN": "env:OTHER", "X": "env"}}, serve={"api_key_env": "MY_KEY"}
    )
    secrets = read_secrets(spec, {"OTHER": TOKEN, "X": "longer-than-eight", "MY_KEY": KEY, "HF_TOKEN": "not this"})
    commands = make_commands(make_plan(spec, {}))
    head, follower = (start_request(c, 0, secrets, **_HANDOFF)["secrets"] for c in commands)
    assert head == {"HF_TOKEN": TOKEN, "X": "longer-than-eight", "VLLM_API_KEY": KEY}
    assert follower == {"HF_TOKEN": "file_token_b", "X": "longer-than-eight"}
    assert secrets.notes == ()
    assert secrets.api_key("a") == KEY
    assert secrets.mask.text(f"{TOKEN} {KEY} file_token_b") == f"{SHOWN} {SHOWN} {SHOWN}"
    assert TOKEN not in repr(secrets)


_HANDOFF: dict[str, Any] = {
    "run": "r",
    "attempt": 1,
    "node_rank": 0,
    "mode": "links",
    "backend": "auto",
    "no_shm": False,
}


def test_a_host_goes_before_all_hosts() -> None:
    hosts: list[Any] = [{"name": "a", "engine": {"env": {"A": "plain"}, "secrets": {"B": "env"}}}]
    spec = cluster(*hosts, engine={"secrets": {"A": "env"}, "env": {"B": "plain"}})
    (command,) = make_commands(make_plan(spec, {}))
    assert (command.env["A"], command.secrets, "B" in command.env) == ("plain", {"B": "env:B"}, False)


def test_everything_missing_is_told_at_once(tmp_path: Path) -> None:
    spec = cluster("a", engine={"secrets": {"A": "env", "B": f"file:{tmp_path}/none"}}, serve={"api_key_env": "K"})
    with pytest.raises(CpuppErrors) as caught:
        read_secrets(spec, {"K": ""})
    assert [error.message for error in caught.value.errors] == [
        "secret A: the variable A is not set where cpupp is started",
        f"secret B: {tmp_path}/none: No such file or directory",
        "secret VLLM_API_KEY: the variable K is empty",
    ]


def test_a_key_that_no_header_can_carry() -> None:
    with pytest.raises(CpuppErrors, match="cannot be the key of an API") as caught:
        read_secrets(cluster("a", serve={"api_key_env": "K"}), {"K": "two words\n"})
    assert "two words" not in str(caught.value)


def test_a_file_that_others_can_read_and_a_short_value_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("short\n")
    path.chmod(0o644)
    notes = read_secrets(cluster("a", engine={"secrets": {"A": f"file:{path}"}}), {}).notes
    assert [note.partition(" ")[0] for note in notes] == ["others", "the"]
    assert f"chmod 600 {path}" in notes[0]


def test_no_secret_is_in_a_plan() -> None:
    spec = cluster(
        "a",
        engine={"secrets": {"A": "env"}, "env": {"HF_TOKEN": TOKEN, "PIN_KEY": "k3y"}, "args": {"api_key": [KEY]}},
    )
    plan = make_plan(spec, {})
    commands = make_commands(plan)
    page, data = plan_page(plan, commands).text(), json.dumps(plan_data(plan, commands))
    recorded = repr((shown_plan(plan), [shown_command(c) for c in commands]))
    for text in (page, data, recorded):
        assert not [value for value in (TOKEN, "k3y", KEY) if value in text]
    assert f"A={SHOWN}" in page
    assert "the launcher reads these secrets: A from env:A" in page
    assert json.loads(data)["commands"][0]["secrets"] == {"A": "env:A"}
    assert set(start_request(commands[0], 0, Secrets(values={"a": {"A": "a-value"}}), **_HANDOFF)["mask"]) == {
        TOKEN,
        "k3y",
        KEY,
    }


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({}, ""),
        ({"serve": {"api_key_env": "MY_KEY"}}, "env:MY_KEY"),
        ({"serve": {"api_key_env": "file:~/key"}}, "file:~/key"),
        ({"engine": {"secrets": {"VLLM_API_KEY": "env"}}}, "env:VLLM_API_KEY"),
        ({"engine": {"env": {"VLLM_API_KEY": KEY}}}, "literal"),
        ({"engine": {"args": {"api-key": [KEY]}}, "serve": {"api_key_env": None}}, "literal"),
    ],
)
def test_where_the_api_s_key_comes_from(values: dict[str, Any], source: str) -> None:
    assert key_source(cluster({"name": "a"}, **values)) == source


def test_what_the_file_holds_is_warned_of_with_the_way_out() -> None:
    spec = cluster(
        {"name": "a", "engine": {"env": {"VLLM_API_KEY": KEY}}},
        engine={"env": {"HF_TOKEN": TOKEN}, "args": {"hf_token": TOKEN, "tokenizer": "t", "max_num_batched_tokens": 8}},
    )
    assert list(literal_secrets(spec)) == [
        "engine.env.HF_TOKEN",
        "hosts[a].engine.env.VLLM_API_KEY",
        "engine.args.hf_token",
    ]
    first, second, third = literal_warnings(spec)
    assert "`secrets: {HF_TOKEN: env}`" in first
    assert "`serve: {api_key_env: VLLM_API_KEY}`" in second
    assert "arguments of a process" in third
    assert first in make_plan(spec, {}).warnings


def test_plan_says_which_secret_a_launch_would_miss(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: c\nmodel: {path: m, num_layers: 2}\nhosts:\n  - {name: a, local: true}\n"
        "engine: {secrets: {NOT_SET_HERE: env}, python: /none}\nserve: {host: 127.0.0.1}\n"
    )
    launched = run("launch", str(path), NO_COLOR="1")
    assert (launched.returncode, launched.stdout) == (3, "")
    assert launched.stderr.startswith("error: secret NOT_SET_HERE: the variable NOT_SET_HERE is not set")
    planned = run("plan", str(path))
    assert "note: a launch would be refused: secret NOT_SET_HERE" in planned.stderr.replace("\n      ", " ")
    assert run("plan", str(path), "--offline").stderr == ""
