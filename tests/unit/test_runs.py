"""Which run is meant, and the state of a run and its ranks from what record and hosts say."""

from __future__ import annotations

from typing import Any

import pytest

from cpupp.errors import CpuppError
from cpupp.plan.failures import Failure
from cpupp.plan.hoststate import read_sites
from cpupp.plan.metrics import Load
from cpupp.plan.runs import HostRef, Run, choose, joined, looks_like_file, read_run, runs_found
from cpupp.plan.runstate import RunState
from cpupp.plan.status import HostAnswer, RankPlace, Recorded, RunStatus, run_status
from tests.unit.hosts_of_runs import RUN, site

PLACES = (
    RankPlace(rank=0, host="a", node_rank=0, stage=0, tp_index=0),
    RankPlace(rank=1, host="b", node_rank=1, stage=1, tp_index=0),
)


def run(number: int, name: str = "pair", state: RunState = RunState.STOPPED, **more: Any) -> Run:
    return Run(run=f"1130-10150{number}-ab1{number}", name=name, started=float(number), state=state, **more)


def code_of(runs: list[Run], wanted: str | None) -> str:
    with pytest.raises(CpuppError) as caught:
        choose(runs, wanted)
    assert caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value.code


def test_without_a_wish_it_is_the_live_run_else_the_newest() -> None:
    old, new = run(1, state=RunState.READY), run(2)
    assert choose([old, new], None) is old
    assert choose([run(1), new], None) is new


@pytest.mark.parametrize("wanted", ["1130-101502-ab12", "pair-1130-101502-ab12", "1130-101502", "1130-101502-ab1"])
def test_ids_and_their_beginnings(wanted: str) -> None:
    assert choose([run(1), run(2), run(3)], wanted).started == 2.0


def test_a_name_is_its_live_run_else_its_newest() -> None:
    runs = [run(1, state=RunState.READY), run(2), run(3, name="other")]
    assert choose(runs, "pair").started == 1.0
    assert choose([*runs[1:], run(1)], "pair").started == 2.0


def test_a_name_goes_before_the_beginning_of_an_id() -> None:
    assert choose([run(1, name="1130"), run(2)], "1130").name == "1130"


def test_what_does_not_name_one_run_is_refused_with_the_choice() -> None:
    runs = [run(1, state=RunState.READY), run(2, state=RunState.DEGRADED)]
    assert code_of(runs, None) == code_of(runs, "pair") == code_of(runs, "1130-10150") == "RUN-AMBIGUOUS"
    assert code_of([], None) == "RUN-NONE"
    assert code_of(runs, "nope") == code_of(runs, "") == "RUN-UNKNOWN"
    with pytest.raises(CpuppError, match="1130-101501-ab11  pair  ready"):
        choose(runs, "nope")


def test_paths_of_cluster_files() -> None:
    assert [looks_like_file(text) for text in ("pair.yaml", "x/pair", "pair", "1130-1", "P.YML")] == [
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "data", [None, [], "x", {}, {"run": "r", "name": "n"}, {"run": "r", "name": "n", "status": "gone fishing"}]
)
def test_what_is_no_record_is_none(data: object) -> None:
    assert read_run(data, "/x") is None


def test_a_record_with_odd_values_is_read_as_far_as_it_goes() -> None:
    found = read_run({"run": "r", "name": "n", "status": "ready", "hosts": [1, {"name": "a"}], "launcher": 7}, "/x")
    assert found is not None
    assert (found.state, found.hosts) == (RunState.READY, (HostRef(name="a", ssh=None, local=False),))
    assert (found.launcher, found.attempt) == (None, 1)


def test_sites_with_odd_values_are_read_as_far_as_they_go() -> None:
    odd = [None, {}, {"run": "r"}, {"run": "r", "state": {"nodes": [3, {}], "failure": "x"}, "record": []}]
    assert [len(found.nodes) for found in read_sites(odd)] == [0, 1]
    assert read_sites({"no": "list"}) == ()


@pytest.mark.parametrize(
    ("seen", "result", "code"),
    [
        (None, {"outcome": "failed", "failure": {"code": "AGENT-LOST"}}, "AGENT-LOST"),
        ({"code": "RANK-DIED"}, {"outcome": "failed", "failure": {"code": "RANK-DIED"}}, "RANK-DIED"),
        ({"code": "RANK-DIED"}, {"outcome": "stopped", "failure": None}, "RANK-DIED"),
        ({"code": "PEER-LOST"}, {"outcome": "stopped", "failure": None}, None),
        ({"code": "PEER-LOST"}, None, "PEER-LOST"),
        (None, {"outcome": "stopped", "failure": None}, None),
    ],
)
def test_how_a_run_ended_on_a_host(seen: Any, result: Any, code: str | None) -> None:
    entry = {**changed(site("a", 0), failure=seen), "result": result}
    (found,) = read_sites([entry])
    assert (found.failure.code if found.failure else None) == code


@pytest.mark.parametrize(
    ("failure", "doing"),
    [
        (None, "taken down"),
        ({"code": "RANK-DIED", "node": 0}, "taken down"),
        ({"code": "RANK-SIGNAL", "node": 0}, "killed by SIGKILL: probably out of memory (see `dmesg` on that host)"),
    ],
)
def test_what_the_agents_killed_is_no_sign_of_lost_memory(failure: Any, doing: str) -> None:
    entry = changed(site("a", 0, held=False, ended=True), alive=False, exit_code=-9, failure=failure)
    assert status(answers(entry, site("b", 1))).ranks[0].doing == doing


def test_runs_that_only_the_hosts_know() -> None:
    sites = read_sites([site("a", 0), site("b", 1), site("a", 0, cluster="other", run="x")])
    (found,) = runs_found("pair", [], sites)
    assert (found.run, found.started, found.detached, found.state) == (RUN, 1000.0, True, RunState.STARTING)
    assert (found.url, found.served_name) == ("http://10.0.0.1:8000/v1", "m")
    recorded = run(1)
    assert joined([recorded], [found, found]) == [recorded, found, found]
    assert len(joined([found], [found])) == 1


# Status ---------------------------------------------------------------------------------------------------------------

DETACHED = Run(run=RUN, name="pair", folder="/x", started=1000.0, state=RunState.READY, detached=True)


def answers(*sites: dict[str, Any] | None, **errors: str) -> dict[str, HostAnswer]:
    found = {
        name: HostAnswer(host=name, at=1.0, sites=read_sites([] if entry is None else [entry]))
        for name, entry in zip(("a", "b"), sites, strict=False)
    }
    return {**found, **{name: HostAnswer(host=name, at=1.0, error=text) for name, text in errors.items()}}


def status(
    after: dict[str, HostAnswer],
    before: dict[str, HostAnswer] | None = None,
    record: Run = DETACHED,
    recorded: Recorded | None = None,
) -> RunStatus:
    return run_status(record, recorded or Recorded(places=PLACES), before or {}, after, now=5000.0)


def changed(entry: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The site with other values in its state, its node, or its process."""
    node = entry["state"]["nodes"][0]
    for key, value in changes.items():
        for place in (entry["state"], node, node["processes"][0]):
            if key in place:
                place[key] = value
                break
    return entry


def test_a_run_that_works() -> None:
    before = answers(site("a", 0), site("b", 1))
    after = answers(
        changed(site("a", 0), time=2002.0, processes=[{"pid": 1000, "rss": 5, "cpu_s": 13.0, "state": "S"}]),
        site("b", 1),
    )
    found = status(after, before)
    assert (found.state, found.age, found.first_failure, found.unreachable) == (RunState.READY, 4000.0, None, ())
    first, second = found.ranks
    assert (first.alive, first.doing, first.pid, first.rss, first.cpu, first.log_age) == (
        True,
        "ready",
        1000,
        5,
        1.5,
        10.0,
    )
    assert second.cpu is None  # its host wrote nothing new between the two rounds


@pytest.mark.parametrize(
    ("changes", "doing"),
    [
        ({"alive": False, "exit_code": -9}, "killed by SIGKILL: probably out of memory (see `dmesg` on that host)"),
        ({"processes": [{"pid": 1, "state": "R"}]}, "died"),
        ({"processes": [{"pid": 1001, "state": "Z"}]}, "died"),
    ],
)
def test_a_rank_that_is_gone_makes_the_run_degraded(changes: dict[str, Any], doing: str) -> None:
    found = status(answers(site("a", 0), changed(site("b", 1), **changes)))
    assert found.state is RunState.DEGRADED
    assert [(rank.alive, rank.doing) for rank in found.ranks][1] == (False, doing)


def test_a_suspended_rank_is_alive_and_named() -> None:
    found = status(answers(site("a", 0), changed(site("b", 1), processes=[{"pid": 1001, "state": "T"}])))
    assert found.ranks[1].doing == "suspended (SIGSTOP)"
    assert found.state is RunState.READY


def test_a_host_that_has_nothing_of_the_run_any_more() -> None:
    found = status(answers(site("a", 0), None))
    assert (found.state, found.ranks[1].alive, found.ranks[1].doing) == (RunState.DEGRADED, False, "gone")


def test_a_host_that_cannot_be_asked_is_no_verdict() -> None:
    found = status(answers(site("a", 0), b="no route to host"))
    assert (found.state, found.ranks[1].alive, found.ranks[1].doing) == (RunState.READY, None, "host not reached")
    assert [answer.host for answer in found.unreachable] == ["b"]


def failure(code: str, time: float) -> dict[str, Any]:
    return {"code": code, "message": f"{code} it was", "node": 0, "time": time, "last_lines": ["last"]}


def test_the_first_failure_is_own_evidence_before_the_loss_of_a_peer() -> None:
    after = answers(
        changed(site("a", 0, held=False, ended=True), failure=failure("PEER-LOST", 10.0)),
        changed(site("b", 1, held=False, ended=True), failure=failure("RANK-SIGNAL", 11.0)),
    )
    found = status(after)
    assert found.state is RunState.FAILED
    assert found.first_failure is not None
    assert (found.first_failure.host, found.first_failure.code, found.num_failures) == ("b", "RANK-SIGNAL", 2)
    assert found.first_failure.last_lines == ("last",)


def test_the_loss_of_a_peer_is_told_at_the_host_that_was_lost() -> None:
    ended: dict[str, Any] = {"held": False, "ended": True}
    lost = changed(site("b", 1, **ended), failure=failure("PEER-LOST", 10.0))  # of node 0
    for after in (answers(site("a", 0, **ended), lost), answers(None, lost)):
        first = status(after).first_failure
        assert first is not None
        assert (first.host, first.node_rank) == ("a", 0)


def test_ended_in_order_and_left_without_a_word() -> None:
    ended: dict[str, Any] = {"held": False, "ended": True}
    assert status(answers(site("a", 0, **ended), site("b", 1, **ended))).state is RunState.STOPPED
    assert status(answers(None, None)).state is RunState.CRASHED
    assert status(answers(site("a", 0, held=False), None)).state is RunState.CRASHED  # the machine was reset
    assert status(answers(None, b="down")).state is RunState.READY  # b may have it all
    assert status({}).state is RunState.READY


def test_the_launcher_has_the_word_while_it_lives() -> None:
    mine = Run(run=RUN, name="pair", folder="/x", state=RunState.STARTING, launcher_alive=True)
    recorded = Recorded(places=PLACES, phases={0: "loading weights"})
    found = status(answers(site("a", 0), None), record=mine, recorded=recorded)
    assert found.state is RunState.STARTING
    assert [rank.doing for rank in found.ranks] == ["loading weights", "not started"]
    ready = Run(run=RUN, name="pair", folder="/x", state=RunState.READY, launcher_alive=True)
    dead = answers(site("a", 0), changed(site("b", 1), alive=False, exit_code=1))
    assert status(dead, record=ready).state is RunState.DEGRADED


def test_a_crashed_launcher_is_never_running() -> None:
    record = Run(run=RUN, name="pair", folder="/x", state=RunState.CRASHED, launcher_alive=False)
    assert status(answers(site("a", 0), site("b", 1)), record=record).state is RunState.CRASHED
    assert status(answers(None, None), record=record).state is RunState.CRASHED


def test_without_a_record_the_api_tells_ready_from_starting() -> None:
    (found,) = runs_found("pair", [], read_sites([site("a", 0), site("b", 1)]))
    both = answers(site("a", 0), site("b", 1))
    assert status(both, record=found).state is RunState.STARTING
    serving = {**both, "a": HostAnswer(host="a", at=3.0, sites=both["a"].sites, load=Load(at=3.0, generated_tokens=30))}
    earlier = {"a": HostAnswer(host="a", at=1.0, load=Load(at=1.0, generated_tokens=10))}
    shown = status(serving, earlier, record=found, recorded=Recorded())
    assert (shown.state, shown.speed.generated) == (RunState.READY, 10.0)
    assert [(rank.place.rank, rank.place.stage) for rank in shown.ranks] == [(0, None), (1, None)]


def test_the_recorded_failure_is_shown_while_the_run_goes_down() -> None:
    first = Failure(host="b", node_rank=1, ranks=(1,), code="RANK-EXIT", message="exited")
    record = Run(run=RUN, name="pair", folder="/x", state=RunState.DEGRADED, launcher_alive=True)
    assert (
        status(answers(site("a", 0), None), record=record, recorded=Recorded(first_failure=first)).first_failure
        is first
    )


def test_hosts_on_one_machine_are_told_apart() -> None:
    both = read_sites([site("a", 0), site("b", 1)])
    same = {name: HostAnswer(host=name, at=1.0, sites=both) for name in ("a", "b")}
    assert [(rank.place.host, rank.pid) for rank in status(same).ranks] == [("a", 1000), ("b", 1001)]
