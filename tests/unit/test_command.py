"""The exact commands, and names and values that attack every quoting on the way."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpupp.plan.cautions import SLOW_NAMES
from cpupp.plan.command import OWNED_ARGS, OWNED_ENV, make_commands
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.versions import METHOD_ENV
from cpupp.render_plan import plan_data, plan_page, quote
from tests.unit.factory import cluster, engine, host, machines, model_folder

ATTACKS = [
    "a'; echo foo",
    "two words",
    '"quoted"',
    "$HOME `id` $(id)",
    "a | b && c > d",
    "line one\nline two",
    "tab\tand\rreturn",
    "",
    "back\\slash",
    "{site}",
    "*?[x]",
    "ümläut ☃",
    "--flag",
]


@pytest.mark.parametrize(("vllm", "head", "follower"), [("0.19.1", "1|2,3", "1|2,3"), ("0.20.0", "1", "2,3")])
def test_old_versions_look_for_their_cores_at_the_global_rank(vllm: str, head: str, follower: str) -> None:
    facts = machines("a", "b", engine=engine(vllm=vllm))
    both = cluster({"name": "a", "cores": [1]}, {"name": "b", "cores": [2, 3]}, pipeline=2)
    bound = [c.env["VLLM_CPU_OMP_THREADS_BIND"] for c in make_commands(make_plan(both, facts))]
    assert bound == [head, follower]


def test_the_head_and_its_follower() -> None:
    head, follower = make_commands(make_plan(cluster("a", "b", pipeline=2), machines("a", "b")))
    assert head.argv == (
        *("/home/me/venv/bin/python", "-m", "cpupp.rank.vllm_cli", "serve", "/models/tiny"),
        *("--served-model-name", "/models/tiny", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "1"),
        *("--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", "0"),
        *("--master-addr", "10.0.0.1", "--master-port", "21000", "--host", "0.0.0.0", "--port", "8000"),
        *("--scheduler-cls", "cpupp.rank.scheduler.make_scheduler"),
    )
    assert follower.argv[-5:] == ("--master-addr", "10.0.0.1", "--master-port", "21000", "--headless")
    assert follower.env == {
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:/home/me/venv/lib/libiomp5.so",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_CPU_OMP_THREADS_BIND": "0,1,2,3",
        "VLLM_HOST_IP": "10.0.0.2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "VLLM_PP_LAYER_PARTITION": "4,4",
    }


def test_stock_is_started_as_stock() -> None:
    for command in make_commands(
        make_plan(cluster("a", "b", pipeline=2, engine={"communicator": "stock"}), machines("a", "b"))
    ):
        assert command.argv[:4] == ("/home/me/venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve")
        assert METHOD_ENV not in command.env


def test_processes_are_forked_only_with_the_runtime_that_bears_it() -> None:
    both = cluster("a", {"name": "b", "engine": {"env": {METHOD_ENV: "spawn"}}}, pipeline=2)
    head, follower = make_commands(make_plan(both, machines("a", "b")))
    assert (head.env[METHOD_ENV], follower.env[METHOD_ENV]) == ("fork", "spawn")
    for command in make_commands(make_plan(both, machines("a", "b", engine=engine(iomp="")))):
        assert command.env.get(METHOD_ENV) != "fork"


def test_short_lookups_where_no_name_server_answers() -> None:
    facts = {**machines("a", "b"), **machines("b", slow_names=True)}
    plan = make_plan(cluster("a", "b", pipeline=2), facts)
    assert [c.env.get("RES_OPTIONS") for c in make_commands(plan)] == [None, "timeout:1 attempts:1"]
    assert [w for w in plan.warnings if "no name server answers" in w] == [f"host b: {SLOW_NAMES}"]


def test_secret_arguments_are_hidden_where_they_are_shown() -> None:
    spec = cluster("a", engine={"args": {"api_key": ["sesame", "-x"], "hf_token": "-y", "max_model_len": 64}})
    plan = make_plan(spec, {})
    commands = make_commands(plan)
    text = plan_page(plan, commands).text()
    assert "      --api-key <secret> <secret> \\\n      --hf-token=<secret> \\\n      --max-model-len 64\n" in text
    assert "sesame" not in json.dumps(plan_data(plan, commands))
    assert "sesame" in commands[0].argv


def test_one_node_needs_no_rendezvous() -> None:
    (command,) = make_commands(make_plan(cluster({"name": "a", "slots": 2}, tensor=2), machines("a")))
    assert "--nnodes" not in command.argv
    assert "--headless" not in command.argv
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|2,3"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"--max-num-seqs": 4}, ["--max-num-seqs", "4"]),
        ({"seed": None}, []),
        ({"lora_modules": ["a=b", "c=d"]}, ["--lora-modules", "a=b", "c=d"]),
        ({"compilation_config": {"b": 1, "a": [2]}}, ["--compilation-config", '{"a": [2], "b": 1}']),
        ({"x": -1}, ["--x=-1"]),
        ({"x": "--y"}, ["--x=--y"]),
    ],
)
def test_arguments(args: dict[str, object], words: list[str]) -> None:
    (command,) = make_commands(make_plan(cluster("a", engine={"args": args}), machines("a")))
    assert list(command.argv[command.argv.index("--port") + 2 :]) == words


@pytest.mark.parametrize("text", ATTACKS)
def test_values_travel_unchanged(text: str) -> None:
    spec = cluster(
        "a",
        model={"path": "/models/x", "served_name": text if text and not text.startswith("-") else "x"},
        engine={"env": {"ATTACK": text}, "args": {"chat_template": text}},
    )
    (command,) = make_commands(make_plan(spec, {}))
    assert command.env["ATTACK"] == text
    assert text in command.argv or f"--chat-template={text}" in command.argv
    page = plan_page(make_plan(spec, {}), (command,)).text()
    assert f"ATTACK={quote(text)} \\\n" in page  # one line, whatever is in it
    data = json.loads(json.dumps(plan_data(make_plan(spec, {}), (command,))))
    assert data["commands"][0]["env"]["ATTACK"] == text
    assert data["commands"][0]["argv"] == list(command.argv)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_quoting_is_bashs(text: str) -> None:
    quoted = quote(text)
    assert "\n" not in quoted
    if not quoted.startswith("$"):
        assert shlex.split(quoted) == [text]


@pytest.mark.parametrize("text", ATTACKS)
def test_bash_reads_back_what_was_quoted(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, check=True)
    assert done.stdout.decode() == text


def test_a_plan_that_is_pasted_hides_secrets() -> None:
    spec = cluster("a", engine={"env": {"HF_TOKEN": "hf_secret", "MY_API_KEY": "k3y", "TOKENIZERS": "shown"}})
    plan = make_plan(spec, {})
    page = plan_page(plan, make_commands(plan)).text()
    assert "hf_secret" not in page
    assert "k3y" not in page
    assert "HF_TOKEN=<secret>" in page
    assert "TOKENIZERS=shown" in page


def test_each_host_has_its_own_model_path_python_and_environment() -> None:
    facts = {
        "a": host("a", 1, model=model_folder(path="/home/me/m")),
        "b": host(
            "b", 2, model=model_folder(path="/root/m"), engine=engine(python="/opt/python", tcmalloc="", iomp="")
        ),
    }
    own = {"python": "/opt/python", "env": {"X": "b"}}
    spec = cluster("a", {"name": "b", "engine": own}, pipeline=2, model={"path": "~/m"}, engine={"env": {"X": "all"}})
    head, follower = make_commands(make_plan(spec, facts))
    assert "/home/me/m" in head.argv
    assert "/root/m" in follower.argv
    assert follower.argv[0] == "/opt/python"
    assert (head.env["X"], follower.env["X"]) == ("all", "b")
    assert "LD_PRELOAD" not in follower.env  # gpustack #5660: only what is on that host
    assert "--served-model-name ~/m" in " ".join(head.argv)


def test_an_allow_list_of_plugins_does_not_leave_ours_out() -> None:
    for given_list, wanted in (("a,b", "a,b,cpupp"), ("cpupp", "cpupp"), ("", "cpupp")):
        spec = cluster("a", engine={"env": {"VLLM_PLUGINS": given_list}})
        assert make_commands(make_plan(spec, {}))[0].env["VLLM_PLUGINS"] == wanted


def scheduler_of(plan: Plan) -> list[str | None]:
    """The scheduler in each command."""
    found = []
    for command in make_commands(plan):
        argv = list(command.argv)
        found.append(argv[argv.index("--scheduler-cls") + 1] if "--scheduler-cls" in argv else None)
    return found


def test_the_head_gets_the_scheduler() -> None:
    plan = make_plan(cluster("a", "b", pipeline=2), machines("a", "b"))
    assert scheduler_of(plan) == ["cpupp.rank.scheduler.make_scheduler", None]


@pytest.mark.parametrize(
    ("vllm", "pipeline", "engine_keys"),
    [
        ("0.31.0", 2, {}),
        ("0.33.0", 2, {}),
        ("0.32.0", 1, {}),
        ("0.32.0", 2, {"micro_batches": "off"}),
        ("0.32.0", 2, {"micro_batches": False}),  # YAML's bare off
        ("0.32.0", 2, {"communicator": "fallback"}),
        ("0.32.0", 2, {"communicator": "stock"}),
        ("0.32.0", 2, {"args": {"scheduler-cls": "mine.Scheduler"}}),
    ],
)
def test_elsewhere_the_scheduler_is_vllms_or_the_users(
    vllm: str, pipeline: int, engine_keys: dict[str, object]
) -> None:
    facts = machines("a", "b", engine=engine(vllm=vllm))
    plan = make_plan(cluster("a", "b", pipeline=pipeline, tensor=2 // pipeline, engine=engine_keys), facts)
    assert "cpupp.rank.scheduler.make_scheduler" not in scheduler_of(plan)
    assert not plan.micro_batches


@pytest.mark.parametrize(("keys", "packs"), [({}, False), ({"packed_weights": "auto"}, True)])
def test_the_plan_says_where_weights_are_packed(keys: dict[str, object], packs: bool) -> None:
    plan = make_plan(cluster("a", "b", pipeline=2, engine=keys), machines("a", "b"))
    assert ("packed for linear layers" in plan_page(plan, ()).text()) == packs
    assert plan_data(plan, ())["packed_weights"] is packs


def test_the_user_cannot_override_what_cpupp_owns() -> None:
    assert {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "VLLM_PP_LAYER_PARTITION"} <= set(OWNED_ENV)
    assert {"tensor_parallel_size", "nnodes", "headless", "port"} <= set(OWNED_ARGS)
