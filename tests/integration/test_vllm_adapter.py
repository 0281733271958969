"""The plugin and the adapter inside real vLLM, without a server: what is injected, what is reported, what is cured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from cpupp.errors import CpuppError
from cpupp.plan.handoff import (
    HANDOFF_ENV,
    ErrorReport,
    GroupReport,
    PluginReport,
    RankHandoff,
    Report,
    decode_report,
)
from cpupp.rank import vllm_plugin
from cpupp.rank.communicator import Communicator
from cpupp.rank.identity import Obstacle
from tests.integration import scheduling
from tests.integration.gang import ROOT, Gang

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def handoff(folder: Path, mode: str, backend: str = "auto") -> RankHandoff:
    return RankHandoff(
        run="t",
        attempt=1,
        node_rank=0,
        mode=mode,
        backend=backend,
        reports=str(folder / "reports"),
        host="a",
        no_shm=False,
    )


def reports(folder: Path) -> list[Report]:
    path = folder / "reports"
    return [decode_report(line) for line in path.read_text().splitlines()] if path.exists() else []


def site(folder: Path) -> Path:
    """A site folder as the agent writes it: the shim that lets vLLM find itself, and our entry point."""
    for name, version, more in (("vllm", "0.32.0+cpu", ""), ("cpupp_site", "0.1", "cpupp.rank.vllm_plugin:register")):
        info = folder / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(METADATA.format(name=name, version=version))
        if more:
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ncpupp = {more}\n")
    return folder / "site"


CASES = """
import json, os, sys
import vllm.plugins  # seconds, once: each case is a fork
for line in sys.stdin:
    case = json.loads(line)
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(code), flush=True)
        continue
    os.environ.update(case["env"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{case['folder']}/{name}", os.O_CREAT | os.O_WRONLY, 0o600), number)
    break
else:
    sys.exit()
before = set(sys.modules)
vllm.plugins.load_general_plugins()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
from vllm.platforms import current_platform
print(json.dumps([current_platform.get_device_communicator_cls(), sorted(set(sys.modules) - before)]), flush=True)
os._exit(0)  # without the second in which Python takes torch apart
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process of `load_plugins`."""
    folder = tmp_path_factory.mktemp("plugins")
    env = {k: v for k, v in os.environ.items() if k != HANDOFF_ENV}
    env |= {"PYTHONPATH": f"{site(folder)}:{ROOT}", "VLLM_CACHE_ROOT": str(folder / "cache")}
    argv = [sys.executable, "-c", CASES]
    with subprocess.Popen(
        argv, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        process.communicate()


def load_plugins(cases: subprocess.Popen[str], folder: Path, text: str | None) -> tuple[int, str, str]:
    """Load vLLM's plugins in a process with that handoff; return its exit code and what it wrote."""
    assert cases.stdin
    assert cases.stdout
    env = {} if text is None else {HANDOFF_ENV: text}
    cases.stdin.write(json.dumps({"env": env, "folder": str(folder)}) + "\n")
    code = int(cases.stdout.readline())
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()


STOCK = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("links", "cpupp.rank.vllm_adapter.LinksCommunicator"),
        ("fallback", "cpupp.rank.vllm_adapter.FallbackCommunicator"),
        ("stock", STOCK),
    ],
)
def test_the_plugin_injects_what_the_mode_says_and_reports_once(
    cases: subprocess.Popen[str], tmp_path: Path, mode: str, expected: str
) -> None:
    code, output, errors = load_plugins(cases, tmp_path, handoff(tmp_path, mode).encode())
    assert code == 0, errors
    injected, loaded = json.loads(output.splitlines()[-1])
    assert injected == expected
    (found,) = reports(tmp_path)
    assert isinstance(found, PluginReport)
    assert (found.mode, found.vllm) == (mode, "0.32.0+cpu")
    # Every process of vLLM pays for what the plugin imports, so it imports nothing that is not there already.
    # The registry of models brings vllm.distributed; every process of vLLM has both.
    late = ("vllm.distributed.device_communicators.cpu", "vllm.v1.worker", "cpupp.rank.comm")
    heavy = [name for name in loaded if name.startswith(late)]
    assert heavy == []


def test_without_a_handoff_nothing_happens(cases: subprocess.Popen[str], tmp_path: Path) -> None:
    _, output, errors = load_plugins(cases, tmp_path, None)
    assert json.loads(output.splitlines()[-1])[0] == STOCK, errors
    assert reports(tmp_path) == []


def test_a_handoff_that_cannot_be_read_stops_vllm(cases: subprocess.Popen[str], tmp_path: Path) -> None:
    code, _, errors = load_plugins(cases, tmp_path, '{"version": 99}')
    assert code != 0
    assert "handoff version 99 is not 1" in errors


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    folder = site(tmp_path_factory.mktemp("vllm"))
    os.environ["PYTHONPATH"] = str(folder)
    try:
        with Gang([2], load="vllm.v1.worker.gpu_model_runner") as ranks:
            yield ranks
    finally:
        del os.environ["PYTHONPATH"]


def in_vllm(rank: int, encoded: str, name: str) -> dict[str, Any]:
    """Build the communicator as a worker's GroupCoordinator does, and use it."""
    os.environ[HANDOFF_ENV] = encoded
    from cpupp.rank import vllm_adapter

    kinds = {"links": vllm_adapter.LinksCommunicator, "fallback": vllm_adapter.FallbackCommunicator}
    made = kinds[RankHandoff.decode(encoded).mode](
        cpu_group=dist.group.WORLD,
        device=torch.device("cpu"),
        device_group=dist.group.WORLD,
        unique_name=name,
        use_all2all=False,
    )
    total = made.all_reduce(torch.full((3,), rank + 1.0))
    whole = made.all_gather(torch.full((1, 2), rank))
    at_zero = made.gather(torch.full((1,), rank), 0)
    got: Any = None
    if made.supports_tensor_dict:
        made.send_tensor_dict({"rank": rank, "x": torch.full((2,), rank)}, 1 - rank)
        got = made.recv_tensor_dict(1 - rank)
        got["x"] = got["x"].tolist()
    else:
        with pytest.raises(NotImplementedError):
            made.send_tensor_dict({"x": torch.ones(1)}, 1 - rank)
        with pytest.raises(NotImplementedError):
            made.recv_tensor_dict(1 - rank)
    from vllm.distributed.parallel_state import GroupCoordinator

    group = GroupCoordinator.__new__(GroupCoordinator)
    group.device_communicator = made
    group.use_cpu_custom_send_recv = "whatever this version computes"
    result = {
        "name": made.unique_name,
        "supported": made.supports_tensor_dict,
        "asked": getattr(group, "use_cpu_custom_send_recv", None),
        "total": total.tolist(),
        "whole": whole.tolist(),
        "at_zero": None if at_zero is None else at_zero.tolist(),
        "got": got,
    }
    dist.barrier()
    made.destroy()
    return result


@pytest.mark.parametrize(
    ("mode", "backend", "supported"),
    [("links", "auto", True), ("links", "gloo", True), ("fallback", "auto", True), ("fallback", "gloo", False)],
)
@pytest.mark.parametrize("name", ["pp:0", "tp:0"])
def test_the_adapter_in_a_group(
    gang: Gang, tmp_path: Path, mode: str, backend: str, supported: bool, name: str
) -> None:
    for rank, found in enumerate(gang.run(in_vllm, handoff(tmp_path, mode, backend).encode(), name)):
        assert found == {
            "name": name,
            "supported": supported,
            "asked": supported,
            "total": [3.0] * 3,
            "whole": [[0, 0, 1, 1]],
            "at_zero": None if rank else [0, 1],
            "got": {"rank": 1 - rank, "x": [1 - rank] * 2} if supported else None,
        }
    found_reports = reports(tmp_path)
    assert sorted(r.rank for r in found_reports if isinstance(r, GroupReport)) == [0, 1]
    assert {r.backend for r in found_reports if isinstance(r, GroupReport)} == {"shm" if backend == "auto" else "gloo"}


def other_group(rank: int, encoded: str) -> bool:
    os.environ[HANDOFF_ENV] = encoded
    from cpupp.rank.vllm_adapter import LinksCommunicator

    made = LinksCommunicator(cpu_group=dist.group.WORLD, device_group=dist.group.WORLD, unique_name="dcp:0")
    return made.links is None and made.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_group_that_is_neither_tp_nor_pp_is_left_as_it_is(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(other_group, handoff(tmp_path, "links").encode()) == [True, True]
    assert reports(tmp_path) == []


def impossible(rank: int, encoded: str) -> str:
    os.environ[HANDOFF_ENV] = encoded
    from cpupp.rank import vllm_adapter

    defaults: Any = Communicator.__init__.__kwdefaults__
    defaults["shm_dir"] = Path("/nonexistent" if rank else "/dev/shm")
    try:
        vllm_adapter.LinksCommunicator(
            cpu_group=dist.group.WORLD, device_group=dist.group.WORLD, unique_name="pp:0", use_all2all=False
        )
    except CpuppError as error:
        return f"{error.code} {Obstacle.NO_FOLDER.text in error.message}"
    finally:
        defaults["shm_dir"] = Path("/dev/shm")
    return "it started"


def test_a_demand_that_cannot_be_met_is_reported_by_every_rank(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(impossible, handoff(tmp_path, "links", "shm").encode()) == ["SHM-DEMANDED True"] * 2
    found = reports(tmp_path)
    assert [type(r) for r in found] == [ErrorReport] * 2
    assert {r.where for r in found if isinstance(r, ErrorReport)} == {"group pp:0 of ranks [0, 1]"}


def cured(rank: int) -> list[Any]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from cpupp.rank.vllm_adapter import cure_eager_pipeline

    cure_eager_pipeline()
    cure_eager_pipeline()

    class Model:
        def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> Any:
            from vllm.sequence import IntermediateTensors

            return IntermediateTensors({"hidden_states": torch.zeros(batch_size, 2, dtype=dtype, device=device)})

    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.intermediate_tensors = None
    runner.model, runner.max_num_tokens, runner.device = Model(), 8, torch.device("cpu")
    runner.model_config = type("Config", (), {"dtype": torch.float32})()
    received = type("Received", (), {"items": lambda self: [("hidden_states", torch.ones(3, 2))]})()
    found = runner.sync_and_gather_intermediate_tensors(3, received, True)
    return [found["hidden_states"].tolist(), runner.intermediate_tensors["hidden_states"].shape[0]]


def test_the_eager_fault_is_cured(gang: Gang) -> None:
    """vLLM 0.27.1 to 0.32.0, eager: `assert self.intermediate_tensors is not None` at the first request."""
    assert gang.run(cured, ranks=1) == [[[[1.0, 1.0]] * 3, 8]]


def store_and_load(rank: int, folder: str) -> list[Any]:
    """Compile, store and load as vLLM does. Has what was loaded the method that vLLM calls: stock, and cured?"""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from vllm.compilation import caching

    from cpupp.rank.vllm_adapter import cure_compiled_loading

    path = Path(folder) / "model"

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def load() -> Any:
        with path.open("rb") as file:
            return torch.compiler.load_compiled_function(file, f_globals=model.__globals__)

    # Headers compiled beforehand cost more than they save for one small kernel.
    inductor.cpp_cache_precompile_headers = False
    with functorch.patch(bundled_autograd_cache=True), patch("torch._dynamo.config.enable_aot_compile", True):
        made = torch.compile(model, fullgraph=True).aot_compile(((torch.ones(3),), {}))
        made.save_compiled_function(str(path))
        found = [hasattr(load()._artifacts.compiled_fn, "finalize_loading")]
        with patch.object(caching, "aot_compile_hash_factors", lambda config: ["model"]):
            cure_compiled_loading(handoff(Path(folder), "links"))
            cure_compiled_loading(handoff(Path(folder), "links"))
            found.append(hasattr(load()._artifacts.compiled_fn, "finalize_loading"))  # our part is not in the key yet
            caching.aot_compile_hash_factors(None)
            loaded = load()
            loaded._artifacts.compiled_fn.finalize_loading(None)
            found.append(loaded(torch.ones(3)).tolist())
            keys = []
            for threads in (torch.get_num_threads() + 1, torch.get_num_threads()):
                torch.set_num_threads(threads)
                keys.append(caching.aot_compile_hash_factors(None))
    return [*found, keys[0][0], len(keys[0]), keys[0] != keys[1]]


def test_a_stored_compile_result_can_be_loaded(gang: Gang, tmp_path: Path) -> None:
    """vLLM 0.32.0 compiles on every start: `'function' object has no attribute 'finalize_loading'`."""
    with Gang([1]) as fresh:  # in the others the cure has been applied
        assert fresh.run(store_and_load, str(tmp_path)) == [[False, False, [3.0] * 3, "model", 2, True]]


def local_readers(rank: int, folder: str) -> tuple[int, int]:
    """How many readers on its own node the response queue of this rank has: stock, and cured."""
    os.environ["VLLM_RPC_BASE_PATH"] = folder  # vLLM leaves its sockets there
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from cpupp.rank.vllm_adapter import cure_local_size

    config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2))
    queues = [MessageQueue.create_from_process_group_single_reader(dist.group.WORLD, 1 << 16, 2)[0]]
    with patch("vllm.config.get_current_vllm_config_or_none", return_value=config):
        cure_local_size()
        cure_local_size()
    queues.append(MessageQueue.create_from_process_group_single_reader(dist.group.WORLD, 1 << 16, 2)[0])
    stock, cured = (len(queue.export_handle().local_reader_ranks) for queue in queues)
    return stock, cured


def test_a_node_with_two_ranks_can_start(gang: Gang) -> None:
    """vLLM 0.32.0, several nodes, two ranks on the head: `assert local_message_queue is not None`."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/var/tmp") as folder:  # short: it becomes part of a socket's path
        assert gang.run(local_readers, folder) == [(1, 1), (0, 1)]


def compiled(rank: int, encoded: str) -> list[Any]:
    os.environ[HANDOFF_ENV] = encoded
    from cpupp.rank.vllm_adapter import LinksCommunicator

    made = LinksCommunicator(cpu_group=dist.group.WORLD, device_group=dist.group.WORLD, unique_name="tp:0")

    def model(x: torch.Tensor) -> torch.Tensor:
        return made.all_gather(made.all_reduce(x * 2) + 1, -1)

    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = run(torch.full((2, 2), rank + 1.0)).tolist()
    made.destroy()
    return result  # type: ignore[no-any-return]  # tolist is untyped


def test_a_compiled_model_calls_our_collectives(gang: Gang, tmp_path: Path) -> None:
    for backend in ("auto", "gloo"):
        answers = gang.run(compiled, handoff(tmp_path, "links", backend).encode())
        assert answers == [[[7.0] * 4] * 2] * 2


def test_decoding_requests_go_in_one_part_a_stage(gang: Gang, tmp_path: Path) -> None:
    ((sizes, counts, finished, lengths),) = gang.run(scheduling.cut_evenly, str(tmp_path), ranks=1)
    assert set(sizes) == {16}
    assert set(counts) == {8}
    assert (finished, lengths) == (32, {24})


def test_requests_that_come_and_go_all_get_their_tokens(gang: Gang, tmp_path: Path) -> None:
    ((finished, short, left),) = gang.run(scheduling.unequal, str(tmp_path), ranks=1)
    assert finished == 40
    assert set(short) <= {5, 12, 19, 26, 33}  # those that were taken back
    assert left == (0, 0)


def test_a_long_prompt_goes_in_pieces_and_stops_nobody(gang: Gang, tmp_path: Path) -> None:
    ((tokens, pieces, most, finished),) = gang.run(scheduling.a_long_prompt, str(tmp_path), ranks=1)
    assert tokens == 4000
    assert 4 < pieces < 40
    assert most <= 3
    assert finished == 5


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_come_to_their_end(gang: Gang, tmp_path: Path, policy: str) -> None:
    assert gang.run(scheduling.no_room, str(tmp_path), policy, ranks=1) == [[True, 8, {64}]]


def test_no_empty_batch_and_no_old_tokens_are_sent(gang: Gang, tmp_path: Path) -> None:
    ((batches, sent),) = gang.run(scheduling.alone, str(tmp_path), ranks=1)
    assert batches == [8, 1, 1, 1, 1, 0]
    assert sent == [0] * 6


def test_empty_batches_do_not_follow_while_nobody_can_be_admitted(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(scheduling.full_house, str(tmp_path), ranks=1) == [[0, 150]]


def test_prompts_in_pieces_of_the_users_own_size_leave_decodes_their_place(gang: Gang, tmp_path: Path) -> None:
    ((most, finished),) = gang.run(scheduling.limited_prompts, str(tmp_path), ranks=1)
    assert (most <= 3, finished) == (True, 2)


def test_other_kinds_of_engine_keep_their_scheduler(gang: Gang) -> None:
    assert gang.run(scheduling.other_kinds, ranks=1) == [
        ["MicroBatchScheduler", "Scheduler", "AsyncScheduler", "Scheduler", "Scheduler"]
    ]


def no_spin(rank: int) -> list[float]:
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from cpupp.rank.vllm_plugin import _read_without_spinning

    stock = SpinCondition.__init__
    with zmq.Context() as context, tempfile.TemporaryDirectory() as folder:
        found = []
        for quiet in (False, True):
            if quiet:
                _read_without_spinning()
            reader = SpinCondition(True, context, f"ipc://{folder}/socket")
            found.append(reader.busy_loop_s)
            for socket in (reader.local_notify_socket, reader.read_cancel_socket, reader.write_cancel_socket):
                socket.close(0)
    SpinCondition.__init__ = stock
    return found


def test_a_reader_without_a_core_of_its_own_sleeps_at_once(gang: Gang) -> None:
    assert gang.run(no_spin, ranks=1) == [[1, 0]]


def lone(rank: int, folder: str) -> list[bool]:
    """Whether linear layers will be packed: at registration, and once an attention layer has asked for its backend."""
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    def packs() -> bool:
        return hasattr(utils.dispatch_cpu_unquantized_gemm, "cpupp")

    told = replace(handoff(Path(folder), "links"), packed_weights=True)
    with (
        patch.dict(os.environ, {HANDOFF_ENV: told.encode()}),
        patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args: "backend")),
        patch.object(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None),
    ):
        vllm_plugin._cure_models(CpuPlatform)
        found = [packs()]
        assert CpuPlatform.get_attn_backend_cls(None) == "backend"
        return [*found, packs()]


def test_a_lone_rank_has_no_communicator_and_still_the_models_cures(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(lone, str(tmp_path), ranks=1) == [[False, True]]
