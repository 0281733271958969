"""The pure part of `bench serve`: what is asked, what the answers mean, the other side's commands, and how it looks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import typer

from cpupp.cli_serve import concurrency_of
from cpupp.errors import CpuppError
from cpupp.launch.bench_serve import vocabulary_of
from cpupp.launch.bench_servers import by_hand_request
from cpupp.launch.secret import Secrets
from cpupp.plan.bench_serve import (
    BY_HAND,
    CPUPP,
    SMALLEST_VOCABULARY,
    Api,
    Percentiles,
    ServeOrder,
    Start,
    Turn,
    check_lengths,
    load_request,
    ratios,
    read_turn,
    serve_rows,
    sides,
)
from cpupp.plan.by_hand import by_hand_commands
from cpupp.plan.command import CLI, SCHEDULER, STOCK_CLI, make_commands
from cpupp.plan.facts import BandwidthFacts
from cpupp.plan.plan import make_plan
from cpupp.plan.roofline import RankReads, read_reads, roofline
from cpupp.plan.status import RankPlace
from cpupp.plan.steps import RankSteps, StepCounts
from cpupp.rank.agent_client import RefusedError, usage_of
from cpupp.render_serve import ServeReport, serve_data, serve_page
from tests.unit.factory import cluster, engine, machines

ORDER = ServeOrder(
    concurrency=(1, 8),
    prompt_tokens=64,
    output_tokens=16,
    waves=2,
    turns=2,
    client="plain",
    stream=True,
    seed=7,
    timeout_s=60.0,
)
API = Api(head="a", url="http://127.0.0.1:8000", served_name="m", python="python3", model="/m", key="k", vocabulary=999)


def test_requests_that_no_context_holds_are_refused_before_anything_starts() -> None:
    for length in (80, "80", "1k", None):
        check_lengths(cluster("a", engine={"args": {} if length is None else {"max_model_len": length}}), ORDER)
    with pytest.raises(CpuppError, match="64 and 16 tokens are more than engine") as caught:
        check_lengths(cluster("a", engine={"args": {"max_model_len": 79}}), ORDER)
    assert caught.value.code == "BENCH-TOO-LONG"


PLAIN: dict[str, Any] = {
    "seconds": 4.0,
    "rows": [[0.5, 1.5, 3.0, 64, 16], [0.0, 1.0, 2.5, 64, 16], [2.5, 2.6, 4.1, 64, 16]],
    "errors": ["HTTP 500: no"],
}
VLLM: dict[str, Any] = {
    "duration": 4.0,
    "completed": 2,
    "failed": 0,
    "total_input_tokens": 128,
    "total_output_tokens": 32,
    "start_times": [100.0, 100.5],
    "ttfts": [1.0, 1.0],
    "input_lens": [64, 64],
    "errors": ["", ""],
    **{f"p{p}_{name}_ms": p * scale for p in (50, 90, 99) for name, scale in (("ttft", 10.0), ("tpot", 1.0))},
}


def test_turns_of_each_concurrency_alternate_and_so_do_the_sides() -> None:
    assert ORDER.sequence() == [(0, 1), (0, 8), (1, 1), (1, 8)]
    assert sides(3) == [(0, CPUPP), (0, BY_HAND), (1, BY_HAND), (1, CPUPP), (2, CPUPP), (2, BY_HAND)]
    assert [ORDER.requests(num) for num in (1, 2, 8)] == [4, 4, 16]
    assert replace(ORDER, waves=1).requests(2) == 2, "a wave of two long prompts is two prompts"


def test_no_two_turns_ask_the_same_and_the_key_is_in_no_argument() -> None:
    asked = [load_request(API, ORDER, *each) for each in ORDER.sequence()]
    assert len({each["order"]["seed"] for each in asked}) == 4
    assert asked[1]["order"] == {
        "url": API.url,
        "model": "m",
        "concurrency": 8,
        "requests": 16,
        "prompt_tokens": 64,
        "output_tokens": 16,
        "vocabulary": 999,
        "seed": asked[1]["order"]["seed"],
        "stream": True,
        "timeout_s": 60.0,
    }
    theirs = load_request(API, replace(ORDER, client="vllm"), 0, 8)
    words = dict(zip(theirs["order"][::2], theirs["order"][1::2], strict=False))
    assert (words["--num-prompts"], words["--max-concurrency"], words["--model"]) == ("16", "8", "/m")
    assert "--ignore-eos" in theirs["order"]
    assert "k" not in theirs["order"]
    assert theirs["key"] == "k"


def test_the_plain_clients_rows_become_rates_and_percentiles() -> None:
    turn = read_turn("plain", 2, PLAIN)
    assert (turn.requests, turn.failed, turn.prompt_tokens, turn.output_tokens) == (4, 1, 192, 48)
    assert turn.rate == 12.0
    assert turn.ttft == Percentiles(p50=1000.0, p90=1000.0, p99=1000.0)
    assert turn.tpot == Percentiles(p50=100.0, p90=100.0, p99=100.0)
    assert turn.prefill_rate is None, "the one that failed may have been of the first two"
    # The first two were sent at once; both have their first token after 1.5 s.
    whole = read_turn("plain", 2, {**PLAIN, "errors": []})
    assert whole.prefill_rate == pytest.approx(128 / 1.5)
    rows = serve_rows(CPUPP, [whole], replace(ORDER, concurrency=(2,)))
    assert [(each.what, each.ratio) for each in ratios([], rows, rows)] == [("output", 1.0), ("prefill", 1.0)]


def test_without_streaming_there_is_no_first_token() -> None:
    rows = [[start, None, *rest] for start, _, *rest in PLAIN["rows"]]
    turn = read_turn("plain", 2, {**PLAIN, "rows": rows})
    assert (turn.rate, turn.ttft, turn.tpot, turn.prefill_rate) == (12.0, None, None, None)


def test_vllms_own_result_is_read() -> None:
    turn = read_turn("vllm", 2, VLLM)
    assert (turn.requests, turn.failed, turn.rate) == (2, 0, 8.0)
    assert turn.ttft == Percentiles(p50=500.0, p90=900.0, p99=990.0)
    assert turn.prefill_rate == pytest.approx(128 / 1.5)
    old = {name: value for name, value in VLLM.items() if name not in ("start_times", "failed")}
    assert read_turn("vllm", 2, old).prefill_rate is None
    assert read_turn("vllm", 2, {**old, "errors": ["", "", "refused"]}).failed == 1


@pytest.mark.parametrize(
    ("client", "data", "code"),
    [
        ("plain", {"seconds": 1.0, "rows": [], "errors": ["HTTP 400: too long"]}, "BENCH-REQUEST"),
        ("vllm", {**VLLM, "completed": 0, "failed": 2, "errors": ["", "too long"]}, "BENCH-REQUEST"),
        ("plain", {"rows": []}, "BENCH-CLIENT"),
        ("vllm", {}, "BENCH-CLIENT"),
        ("plain", None, "BENCH-CLIENT"),
    ],
)
def test_what_is_no_answer_is_an_error_with_the_apis_words(client: str, data: Any, code: str) -> None:
    with pytest.raises(CpuppError) as caught:
        read_turn(client, 1, data)
    assert caught.value.code == code
    assert code != "BENCH-REQUEST" or "too long" in caught.value.message


@pytest.mark.parametrize(
    "words", ["IncompleteRead: IncompleteRead(0 bytes read)", "ConnectionResetError: [Errno 104] x"]
)
def test_an_api_that_stopped_is_no_matter_of_lengths(words: str) -> None:
    with pytest.raises(CpuppError, match="the API went away: ") as caught:
        read_turn("plain", 1, {"seconds": 1.0, "rows": [], "errors": [words]})
    assert "cpupp status" in (caught.value.hint or "")


def test_token_counts_stand_at_the_end_of_an_answer() -> None:
    counts = {"prompt_tokens": 3, "completion_tokens": 2}
    events = [json.dumps({"usage": None}), json.dumps({"usage": {**counts, "total_tokens": 5}}), "[DONE]"]
    assert usage_of("".join(f"data: {event}\n\n" for event in events), True) == counts
    assert usage_of(json.dumps({"usage": counts}), False) == counts
    with pytest.raises(RefusedError, match="no token counts"):
        usage_of('data: {"error": "the engine died"}\n\n', True)


# The roofline


def two_stages(weights: int = 1000, kv: int = 1) -> list[RankReads]:
    return [RankReads(stage=stage, weights=weights, kv=kv, bytes_per_s=10_000) for stage in (0, 1)]


def test_the_roofline_of_one_sequence_is_all_bytes_over_bandwidth() -> None:
    assert roofline(two_stages(kv=0), 1, 100) == pytest.approx(10_000 / 2000)
    assert roofline(two_stages(), 1, 100) == pytest.approx(10_000 / 2200)
    assert roofline([], 1, 100) is None


def test_layers_with_a_window_read_no_more_than_it() -> None:
    reads = [RankReads(stage=0, weights=0, kv=1, window_kv=1, window=50, bytes_per_s=1_000)]
    assert roofline(reads, 1, 40) == pytest.approx(1_000 / 80)
    assert roofline(reads, 1, 150) == pytest.approx(1_000 / 200)


def test_more_sequences_read_the_weights_once_and_stages_work_side_by_side() -> None:
    # Two batches of one keep both stages busy; one batch of two reads each weight once. Both take 0.2 s for two tokens.
    assert roofline(two_stages(kv=0), 2, 100) == pytest.approx(10.0)
    assert roofline(two_stages(kv=10), 8, 100) == pytest.approx(8 / (2 * (1000 + 4 * 1000) / 10_000))
    slow = [*two_stages(kv=0)[:1], RankReads(stage=1, weights=1000, kv=0, bytes_per_s=1_000)]
    assert roofline(slow, 1, 0) == pytest.approx(1 / 1.1)


def test_the_plan_says_what_each_rank_reads_and_its_record_is_read_back() -> None:
    bandwidth = (BandwidthFacts(numa=0, cpus=(0, 1, 2, 3), bytes_per_s=40_000_000_000, cpu_share=1.0),)
    plan = make_plan(cluster("a", "b", pipeline=2, layers=(4, 4)), machines("a", "b", bandwidth=bandwidth))
    reads = [rank.reads for rank in plan.ranks]
    first, last = reads
    assert first is not None
    assert last is not None
    assert (first.stage, first.weights, first.kv) == (0, 4 * (6 << 20), 4 * 2 * 4 * 64 * 2)
    assert last.weights - first.weights == 32000 * 512 * 2 + 512 * 2, "the head is read by the last stage"
    record = json.loads(json.dumps({"plan": asdict(plan)}))
    assert read_reads(record) == tuple(reads)
    assert vocabulary_of(record) == 32000
    assert read_reads({"plan": asdict(make_plan(cluster("a"), {}))}) == ()
    assert (read_reads(None), vocabulary_of(None)) == ((), SMALLEST_VOCABULARY)


# By hand


def test_by_hand_lacks_what_cpupp_adds_and_keeps_what_vllms_own_pages_tell() -> None:
    spec = cluster(
        "a", "b", pipeline=2, engine={"args": {"dtype": "bfloat16"}, "env": {"MINE": "1", "VLLM_PLUGINS": "x"}}
    )
    plan = make_plan(spec, machines("a", "b"))
    ours, theirs = make_commands(plan)[0], by_hand_commands(spec, plan)[0]
    words = [STOCK_CLI if word == CLI else word for word in ours.argv]
    assert theirs.argv == tuple(word for word in words if word not in ("--scheduler-cls", SCHEDULER))
    assert ours.env["VLLM_PLUGINS"] == "x,cpupp"
    assert ours.env.keys() - theirs.env.keys() == {"VLLM_PP_LAYER_PARTITION", "VLLM_WORKER_MULTIPROC_METHOD"}
    assert theirs.env.items() - ours.env.items() == {("VLLM_PLUGINS", "x")}
    assert theirs.site_env == {"VLLM_RPC_BASE_PATH": "{site}/rpc", "PYTHONPATH": "{site}"}
    given = cluster("a", "b", pipeline=2, layers=(3, 5))
    assert by_hand_commands(given, make_plan(given, machines("a", "b")))[1].env["VLLM_PP_LAYER_PARTITION"] == "3,5"


def test_by_hand_gets_neither_handoff_nor_a_path_of_ours() -> None:
    spec = cluster("a", "b", pipeline=2)
    plan = make_plan(spec, machines("a", "b", engine=engine(distribution="vllm")))
    order = by_hand_request(by_hand_commands(spec, plan)[0], Secrets())
    assert order["site_env"] == {"VLLM_RPC_BASE_PATH": "{site}/rpc"}
    assert not [name for name in {**order["env"], **order["site_env"]} if "CPUPP" in name]


# What is shown


def turns(rate: float) -> list[Turn]:
    made = [replace(read_turn("plain", 1, PLAIN), concurrency=num) for num in (1, 8, 1, 8)]
    steps = RankSteps(decode=StepCounts(steps=2, tokens=16, compute_ns=6_000_000, wire_ns=10**6, wait_ns=2 * 10**6))
    return [replace(turn, output_tokens=int(rate * turn.seconds), steps={0: steps}) for turn in made]


@pytest.fixture
def report() -> ServeReport:
    place = RankPlace(rank=0, host="a", node_rank=0, stage=0, tp_index=0)
    ours = serve_rows(CPUPP, turns(30), ORDER, [place], two_stages())
    theirs = serve_rows(BY_HAND, [replace(turn, steps={}) for turn in turns(20)], ORDER)
    starts = [
        Start(side=CPUPP, round=0, ready_s=30.0),
        Start(side=BY_HAND, round=0, ready_s=None, healthy_s=60.0, error="vLLM node 1 ended: exit code 1\nTraceback"),
    ]
    return ServeReport(
        name="pair",
        order=ORDER,
        rows={CPUPP: ours, BY_HAND: theirs},
        starts=starts,
        ratios=ratios(starts, ours, theirs),
    )


def test_the_envelope_has_every_figure(report: ServeReport) -> None:
    data = serve_data(report)
    row = data["results"][0]
    assert (row["side"], row["concurrency"], row["requests"], row["failed"]) == ("cpupp", 1, 8, 2)
    assert (row["output_tokens_per_second"], row["output_tokens_per_second_turns"]) == (30.0, [30.0, 30.0])
    assert row["roofline_share"] == pytest.approx(30.0 / row["roofline_tokens_per_second"], abs=1e-3)
    (stage,) = row["stages"]
    assert (stage["steps"], stage["batch"], stage["step_ms"], stage["compute_ms"]) == (4, 8.0, 4.5, 3.0)
    assert [(r["what"], r["concurrency"], r["ratio"]) for r in data["ratios"]] == [
        ("ready", None, 0.5),
        ("output", 1, 1.5),
        ("output", 8, 1.5),
    ]
    assert data["starts"][1]["error"].startswith("vLLM node 1 ended")
    assert json.loads(json.dumps(data)) == data


def test_the_page_has_the_plot_the_split_and_the_warnings(report: ServeReport) -> None:
    text = serve_page(report, 120).text()
    assert "figures of the two clients (plain, vllm) must never be compared" in text
    assert "8 requests failed" in text
    assert "█" * 40 + " 30.0" in text
    assert "█" * 27 + " 20.0" in text
    assert "3.00 67%" in text
    assert max(map(len, serve_page(report, 80).text().splitlines())) <= 80
    assert "first answer: never (/health after 60.0 s)" in text
    assert "1.50  output tokens/s at 8: 30.0 to 20.0" in text
    assert "0.50  seconds until ready" in text
    alone = replace(report, order=replace(ORDER, client="vllm"), rows={CPUPP: report.rows[CPUPP]}, starts=(), ratios=())
    text = serve_page(alone, 120).text()
    assert "takes its time from the cores that the server needs" in text
    assert "by hand" not in text


@pytest.mark.parametrize(
    ("text", "numbers"), [("1,8,32", (1, 8, 32)), (" 4 ", (4,)), ("8,8,1", (8, 1))], ids=lambda value: str(value)
)
def test_levels_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert concurrency_of(text) == numbers


@pytest.mark.parametrize("text", ["", "1,,2", "0", "1.5", "-1", "9999", "a"])
def test_what_is_no_level_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        concurrency_of(text)
