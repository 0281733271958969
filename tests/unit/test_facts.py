"""HostFacts: the contract between the agent, which knows nothing of cpupp, and the plan."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpupp.plan.facts import FactsError, HostFacts, ModelFolderFacts, decode, encode
from cpupp.rank import agent_model, agent_net, agent_probe
from cpupp.rank.agent_children import Children
from tests.unit.factory import tensor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    """What the agent's code says of this machine, as it arrives at the launcher."""
    request = {"name": "a", "engine_python": str(tmp_path / "none"), "model_path": str(tmp_path / "none")}
    found = agent_probe.host_facts({**request, "ports": [1], "num_free_ports": 2}, agent_probe.Nonces(), Children())
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def test_the_agent_fills_exactly_the_fields_of_host_facts(facts: dict[str, Any]) -> None:
    host = decode(HostFacts, facts)
    assert json.loads(json.dumps(encode(host))) == facts
    assert host.name == "a"
    assert [cpu.cpu for cpu in host.cpus] == sorted(os.sched_getaffinity(0))
    assert host.memory_total > 0
    assert any(interface.loopback and "127.0.0.1" in interface.addresses for interface in host.interfaces)
    assert len(host.free_ports) == 2
    assert "No such file or directory" in host.engine.error
    assert "No such file or directory" in host.model.error
    assert host.routes == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uid": "0"}, "HostFacts.uid: expected int"),
        ({"uid": True}, "HostFacts.uid: expected int"),
        ({"isa": "avx2"}, "HostFacts.isa: expected a list"),
        ({"extra": 1}, "exactly the fields"),
        ({"cpu_quota": "max"}, "HostFacts.cpu_quota: expected a number"),
        ({"shm": {"device": 1}}, "HostFacts.shm: expected exactly the fields"),
        ({"ulimits": {"nofile": None}}, "HostFacts.ulimits.nofile"),
    ],
)
def test_what_does_not_fit_is_named(facts: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(FactsError) as caught:
        decode(HostFacts, {**facts, **change})
    assert words in str(caught.value)


def test_secrets_do_not_travel() -> None:
    found = agent_probe.environment_facts(
        {
            "HF_TOKEN": "hf_abc",
            "VLLM_API_KEY": "k",
            "VLLM_PORT": "1",
            "https_proxy": "http://me:pass@proxy:1/x",
            "HOME": "/root",
            "OMP_NUM_THREADS": "2",
        }
    )
    assert found == {
        "HF_TOKEN": "(set)",
        "VLLM_API_KEY": "(set)",
        "VLLM_PORT": "1",
        "https_proxy": "http://(hidden)@proxy:1/x",
        "OMP_NUM_THREADS": "2",
    }


def write_safetensors(path: Path, tensors: dict[str, int]) -> None:
    """A safetensors file with tensors of these sizes in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def model(folder: Path) -> ModelFolderFacts:
    return decode(ModelFolderFacts, json.loads(json.dumps(agent_model.model_facts(str(folder)))))


def layer_bytes(found: ModelFolderFacts) -> dict[int, int]:
    """Stored bytes of each layer."""
    return {n: sum(t.size for t in kind.tensors) for kind in found.layer_kinds for n in kind.layers}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    write_safetensors(tmp_path / "a.safetensors", {"model.embed_tokens.weight": 64, "model.layers.0.mlp.up.weight": 8})
    write_safetensors(
        tmp_path / "b.safetensors",
        {"model.layers.1.mlp.up.weight": 16, "model.layers.0.norm": 2, "lm_head.weight": 32},
    )
    return tmp_path


def test_layers_are_summed_over_files(folder: Path) -> None:
    found = model(folder)
    assert found.error == ""
    assert found.config == {"num_hidden_layers": 2}
    assert layer_bytes(found) == {0: 10, 1: 16}
    assert found.other_tensors == (tensor("lm_head.weight", 32), tensor("model.embed_tokens.weight", 64))
    assert found.files_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_tokenizer_is_one_of_many_files(folder: Path) -> None:
    assert not model(folder).tokenizer
    (folder / "tokenizer.model").touch()
    assert model(folder).tokenizer


def test_an_index_decides_which_files_count(folder: Path) -> None:
    index = {"weight_map": {"model.layers.0.mlp.up.weight": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert layer_bytes(model(folder)) == {0: 8}


def test_the_digest_sees_config_and_headers(folder: Path) -> None:
    first = model(folder).digest
    assert len(first) == 64
    assert model(folder).digest == first
    write_safetensors(folder / "a.safetensors", {"model.embed_tokens.weight": 64, "model.layers.0.mlp.up.weight": 10})
    second = model(folder).digest
    (folder / "config.json").write_text('{"num_hidden_layers": 3}', encoding="utf-8")
    assert len({first, second, model(folder).digest}) == 3


@pytest.mark.parametrize(
    "start", [b"", b"\1\0", struct.pack("<Q", 1 << 60), struct.pack("<Q", 1 << 20), b"version https"]
)
def test_a_file_that_is_cut_off_or_a_pointer(folder: Path, start: bytes) -> None:
    (folder / "a.safetensors").write_bytes(start)
    assert "a.safetensors is not a safetensors file or is cut off" in model(folder).error


def test_weights_that_are_cut_off_behind_the_header(folder: Path) -> None:
    path = folder / "b.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])  # a download or a copy that broke off
    assert model(folder).error == f"{folder}: b.safetensors is cut off: its tensors end at byte {len(whole)}"


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    assert model(tmp_path).error == f"{tmp_path}/config.json: No such file or directory"
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert str(tmp_path) in model(tmp_path).error
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert "holds no weights" in model(tmp_path).error


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("config.json", "{}", "config.json is not a JSON object with something in it"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json is damaged"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "names something that is no file"),
        ("model.safetensors.index.json", "[]", "model.safetensors.index.json has no weight_map"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, file: str, text: str, error: str) -> None:
    (folder / file).write_text(text, encoding="utf-8")
    assert error in model(folder).error


def test_a_hub_id_is_found_in_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    entry = tmp_path / "hub" / "models--org--small"
    (entry / "snapshots").mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("abc", encoding="ascii")
    (entry / "snapshots" / "abc").symlink_to(folder)
    found = model(Path("org/small"))
    assert found.path == str(entry / "snapshots" / "abc")
    assert layer_bytes(found) == {0: 10, 1: 16}
    assert "No such file" in model(Path("org/other")).error


def test_free_ports_are_outside_the_ephemeral_range() -> None:
    low, high = agent_net._ephemeral_range()
    found = agent_net.free_ports(20)
    assert len(set(found)) == 20
    assert all(20000 <= port < 32000 and not low <= port <= high for port in found)
    assert agent_net.free_ports(3, (low, high)) == []


def test_a_taken_port_names_its_holder() -> None:
    import socket

    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            port = server.getsockname()[1]
            (found,) = agent_net.check_ports([port])
            assert not found["free"]
            assert found["holder"].startswith(f"pid {os.getpid()} (")
        assert agent_net.check_ports([port]) == [{"port": port, "free": True, "holder": ""}]


def test_cgroup_limits_are_the_least_of_all_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "slice" / "job"
    inner.mkdir(parents=True)
    (tmp_path / "slice" / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    (inner / "cpu.max").write_text("max 100000\n", encoding="ascii")
    (tmp_path / "slice" / "memory.max").write_text("1000000\n", encoding="ascii")
    (inner / "memory.max").write_text("max\n", encoding="ascii")
    monkeypatch.setattr(
        agent_probe, "cgroup_folders", lambda controller: [str(inner), str(inner.parent), str(tmp_path)]
    )
    assert agent_probe.cpu_quota() == 1.5
    assert agent_probe.memory_limit() == 1000000
    (inner / "cpu.max").unlink()
    (inner / "cpu.cfs_quota_us").write_text("50000", encoding="ascii")
    (inner / "cpu.cfs_period_us").write_text("100000", encoding="ascii")
    assert agent_probe.cpu_quota() == 0.5


def test_strangers_are_read_once_and_orphans_are_not_strangers() -> None:
    """In a process of its own, which adopts: the child of a child that has ended is no stranger."""
    code = """
import os, subprocess, sys, time
from cpupp.rank import agent_proc
agent_proc.become_subreaper()
assert agent_proc.no_child()
others = agent_proc.Strangers()
assert 1 in others.table(1.0) and 1 not in others.table(2.0) and 1 in others.table(100.0)
shell = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & exit"])
shell.wait()
assert not agent_proc.no_child()
below = agent_proc.descendants([os.getpid()], others.table(101.0))
assert len(below) == 1, below
assert agent_proc.descendants([os.getpid()], others.table(102.0)) == below
agent_proc.kill_below(os.getpid(), set(), 5.0)
assert agent_proc.no_child()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


ASK = """
import sys
from cpupp.rank import agent_proc
from cpupp.rank.agent_children import Children
from tests.unit.factory import tensor
agent_proc.become_subreaper()
answer = Children().ask(["/bin/sh", "-c", sys.argv[1]], 1.0, {})
print([answer.trouble, answer.status, answer.output[:9].decode()], agent_proc.descendants([__import__("os").getpid()],
      agent_proc.process_table()))
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 600; true", ["gave no answer within 1 s", None, ""]),
        ("sleep 600 & echo here", ["", 0, "here\n"]),
        ("exec >&- 2>&-; sleep 600", ["gave no answer within 1 s", None, ""]),
        ("yes 12345678", ["printed without end", None, "12345678\n"]),
        ("trap '' TERM; echo x; echo y >&2; exit 3", ["", 3, "x\n"]),
    ],
)
def test_a_program_that_is_asked_leaves_nothing_whatever_it_does(script: str, said: list[object]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, script], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == f"{said} set()\n"
