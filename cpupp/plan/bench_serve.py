"""`cpupp bench serve`, the pure part: what is asked of the API, and what the answers mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.bench_comm import percentile
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.memory import written_context
from cpupp.plan.roofline import RankReads, roofline
from cpupp.plan.status import RankPlace
from cpupp.plan.steps import RankSteps, StepCounts, StepSplit, split

PLAIN, VLLM = "plain", "vllm"
CLIENTS = (PLAIN, VLLM)
CPUPP, BY_HAND = "cpupp", "by_hand"
LEAST_REQUESTS = 4
SHARES = (0.5, 0.9, 0.99)
_GONE = re.compile(r"^(IncompleteRead|Connection\w*|RemoteDisconnected|ServerDisconnected\w*|BrokenPipe\w*)\b")
"""What clients say of an API that stopped in the middle."""
SMALLEST_VOCABULARY = 256
"""Taken where the model's is unknown: every prompt is random all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOrder:
    """What is measured.

    concurrency: requests at a time, one turn of each after the other, `turns` times; waves: requests of a turn, for
    each that is under way at a time; prompt_tokens, output_tokens: of each; stream: of the plain client, without it
    there is no time of a first token; client: `plain` or `vllm`; seed: of the prompts; timeout_s: of one turn.
    """

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    waves: int
    turns: int
    client: str
    stream: bool
    seed: int
    timeout_s: float

    def requests(self, concurrency: int) -> int:
        """Requests of one turn."""
        return max(LEAST_REQUESTS if concurrency == 1 else 1, self.waves * concurrency)

    def sequence(self) -> list[tuple[int, int]]:
        """(turn, concurrency) in the order in which they are measured on one server."""
        return [(turn, num) for turn in range(self.turns) for num in self.concurrency]


def check_lengths(spec: ClusterSpec, order: ServeOrder) -> None:
    """Raises CpuppError BENCH-TOO-LONG when the file's context holds no such request: the API would refuse each."""
    most, tokens = written_context(spec), order.prompt_tokens + order.output_tokens
    if most and tokens > most:
        message = (
            f"{order.prompt_tokens} and {order.output_tokens} tokens are more than engine.args.max_model_len {most}"
        )
        raise CpuppError("BENCH-TOO-LONG", message, hint="give fewer --prompt-tokens or --output-tokens")


def sides(rounds: int) -> list[tuple[int, str]]:
    """(round, side) of `--against by-hand`: each round has both, and each goes first in every other round."""
    order = (CPUPP, BY_HAND)
    return [(number, side) for number in range(rounds) for side in (order if number % 2 == 0 else order[::-1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The API as the head itself reaches it. python, model, env: of vLLM's client, which reads the tokenizer."""

    head: str
    url: str
    served_name: str
    python: str
    model: str
    key: str = field(default="", repr=False)
    env: Mapping[str, str] = field(default_factory=dict)
    vocabulary: int = SMALLEST_VOCABULARY


def load_request(api: Api, order: ServeOrder, turn: int, concurrency: int) -> dict[str, Any]:
    """The parameters of the agent's `load_run` for one turn."""
    seed = order.seed * 1_000_003 + turn * 1_009 + concurrency
    common = {"client": order.client, "timeout_s": order.timeout_s, "key": api.key}
    if order.client == PLAIN:
        plain = {
            "url": api.url,
            "model": api.served_name,
            "concurrency": concurrency,
            "requests": order.requests(concurrency),
            "prompt_tokens": order.prompt_tokens,
            "output_tokens": order.output_tokens,
            "vocabulary": api.vocabulary,
            "seed": seed,
            "stream": order.stream,
            "timeout_s": order.timeout_s,
        }
        return {**common, "order": plain}
    words = ["--backend", "openai", "--base-url", api.url, "--endpoint", "/v1/completions"]
    words += ["--model", api.model, "--served-model-name", api.served_name, "--dataset-name", "random"]
    words += ["--random-input-len", str(order.prompt_tokens), "--random-output-len", str(order.output_tokens)]
    words += ["--num-prompts", str(order.requests(concurrency)), "--max-concurrency", str(concurrency)]
    words += ["--seed", str(seed % 2**31), "--temperature", "0", "--ignore-eos", "--disable-tqdm"]
    words += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,90,99"]
    return {**common, "python": api.python, "env": dict(api.env), "order": words}


# What came back


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of one concurrency. prompt_tokens, output_tokens: of all requests; seconds: of all of it.

    ttft, tpot: until a request's first token, and for each one after it; None without streaming. prefill_s: from the
    start until the requests that were sent at once had all their first token; prefill_tokens: of their prompts.
    steps: what each rank counted meanwhile.
    """

    concurrency: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    prefill_tokens: int = 0
    prefill_s: float | None = None
    steps: Mapping[int, RankSteps] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second until all of the first requests have their first token."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None


def read_turn(client: str, concurrency: int, data: Any) -> Turn:
    """Read what a client said. Raises CpuppError BENCH-REQUEST when no request was answered, in the API's words."""
    try:
        turn = _read_plain(concurrency, data) if client == PLAIN else _read_vllm(concurrency, data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"the {client} client's result cannot be read: {type(error).__name__}: {error}"
        raise CpuppError("BENCH-CLIENT", message, exit_code=ExitCode.RANK_FAILED) from None
    if turn.requests == turn.failed:
        words = next((str(error) for error in data.get("errors") or () if error), "no request was answered")
        raise _unanswered(words.strip()[-1000:])
    return turn


def _unanswered(words: str) -> CpuppError:
    if _GONE.search(words):
        message, hint = f"the API went away: {words}", "`cpupp status` says what became of the run"
    else:
        message = words
        hint = "the API's log may say more; prompt and output together must fit engine.args.max_model_len"
    return CpuppError("BENCH-REQUEST", message, hint=hint, exit_code=ExitCode.RANK_FAILED)


def _read_plain(concurrency: int, data: Mapping[str, Any]) -> Turn:
    rows = sorted(data["rows"])
    firsts = [row for row in rows if row[1] is not None]
    ttft = [1e3 * (first - start) for start, first, *_ in firsts]
    tpot = [1e3 * (end - first) / (out - 1) for _, first, end, _, out in firsts if out > 1]
    wave = firsts[:concurrency] if not data["errors"] else []  # else one of a later wave might be among them
    return Turn(
        concurrency=concurrency,
        requests=len(rows) + len(data["errors"]),
        failed=len(data["errors"]),
        seconds=float(data["seconds"]),
        prompt_tokens=sum(row[3] for row in rows),
        output_tokens=sum(row[4] for row in rows),
        ttft=_percentiles(ttft),
        tpot=_percentiles(tpot),
        prefill_tokens=sum(row[3] for row in wave),
        prefill_s=max(row[1] for row in wave) - min(row[0] for row in wave) if wave else None,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = (percentile(values, share) for share in SHARES)
    return Percentiles(p50=p50, p90=p90, p99=p99)


def _read_vllm(concurrency: int, data: Mapping[str, Any]) -> Turn:
    """Read what `vllm bench serve --save-result --save-detailed` has written."""
    completed = int(data["completed"])
    failed = int(data.get("failed", sum(bool(error) for error in data.get("errors") or ())))
    rows = list(zip(*(data.get(name) or () for name in ("start_times", "ttfts", "input_lens")), strict=False))
    wave = sorted(rows)[:concurrency] if not failed else []
    first = min((row[0] for row in wave), default=0.0)
    return Turn(
        concurrency=concurrency,
        requests=completed + failed,
        failed=failed,
        seconds=float(data["duration"]),
        prompt_tokens=int(data["total_input_tokens"]),
        output_tokens=int(data["total_output_tokens"]),
        ttft=_vllm_percentiles(data, "ttft"),
        tpot=_vllm_percentiles(data, "tpot"),
        prefill_tokens=sum(row[2] for row in wave),
        prefill_s=max(start + ttft for start, ttft, _ in wave) - first if wave else None,
    )


def _vllm_percentiles(data: Mapping[str, Any], name: str) -> Percentiles | None:
    values = [float(data.get(f"p{share}_{name}_ms") or 0.0) for share in (50, 90, 99)]
    return Percentiles(p50=values[0], p90=values[1], p99=values[2]) if any(values) else None


# What it means


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """The average decode step of one rank while the requests of one concurrency ran."""

    place: RankPlace
    step: StepSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRow:
    """Everything about one concurrency on one side. rates: of each turn; the other figures are medians of the turns'.

    roofline: tokens per second that the hosts' memory would allow; None where it is unknown.
    """

    side: str
    concurrency: int
    requests: int
    failed: int
    rates: tuple[float, ...]
    ttft: Percentiles | None
    tpot: Percentiles | None
    prefill_rates: tuple[float, ...]
    stages: tuple[StageSplit, ...]
    roofline: float | None

    @property
    def rate(self) -> float:
        """Output tokens per second, the median of all turns."""
        return median(self.rates)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second of prefill, the median of all turns."""
        return median(self.prefill_rates) if self.prefill_rates else None


def serve_rows(
    side: str,
    turns: Iterable[Turn],
    order: ServeOrder,
    places: Sequence[RankPlace] = (),
    reads: Sequence[RankReads] = (),
) -> tuple[ServeRow, ...]:
    """One row for each concurrency, in the order's order. places, reads: empty where they are unknown."""
    by_num: dict[int, list[Turn]] = {num: [] for num in order.concurrency}
    for turn in turns:
        by_num[turn.concurrency].append(turn)
    context = order.prompt_tokens + order.output_tokens / 2
    return tuple(
        ServeRow(
            side=side,
            concurrency=num,
            requests=sum(turn.requests for turn in mine),
            failed=sum(turn.failed for turn in mine),
            rates=tuple(turn.rate for turn in mine),
            ttft=_medians([turn.ttft for turn in mine]),
            tpot=_medians([turn.tpot for turn in mine]),
            prefill_rates=tuple(turn.prefill_rate for turn in mine if turn.prefill_rate is not None),
            stages=_stages(mine, places),
            roofline=roofline(reads, num, context),
        )
        for num, mine in by_num.items()
        if mine
    )


def _medians(values: Sequence[Percentiles | None]) -> Percentiles | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Percentiles(**{name: median(getattr(value, name) for value in known) for name in Percentiles.__slots__})


def _stages(turns: Sequence[Turn], places: Sequence[RankPlace]) -> tuple[StageSplit, ...]:
    found = []
    for place in places:
        counts = StepCounts()
        for turn in turns:
            if place.rank in turn.steps:
                counts = counts.plus(turn.steps[place.rank].decode)
        if (step := split(counts)) is not None:
            found.append(StageSplit(place=place, step=step))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of one side: seconds to the first answer and to /health (None: not seen); error: why it ended early."""

    side: str
    round: int
    ready_s: float | None
    healthy_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of medians. what: `ready`, `output` or `prefill`; ratio: cpupp's over by hand's; concurrency: 0 for `ready`."""

    what: str
    concurrency: int
    cpupp: float
    by_hand: float

    @property
    def ratio(self) -> float:
        """Below 1 is better for `ready`, above 1 for all else."""
        return self.cpupp / self.by_hand if self.by_hand else 0.0


def ratios(starts: Sequence[Start], ours: Sequence[ServeRow], theirs: Sequence[ServeRow]) -> tuple[Ratio, ...]:
    """What is known on both sides. A server by hand that never answers is taken by its /health."""
    ready: dict[str, list[float]] = {CPUPP: [], BY_HAND: []}
    for start in starts:
        seconds = start.healthy_s if start.ready_s is None else start.ready_s
        if seconds is not None:
            ready[start.side].append(seconds)
    found = []
    if all(ready.values()):
        found.append(Ratio(what="ready", concurrency=0, cpupp=median(ready[CPUPP]), by_hand=median(ready[BY_HAND])))
    other = {row.concurrency: row for row in theirs}
    for row in ours:
        if row.concurrency in other:
            mine, hand = row, other[row.concurrency]
            found.append(Ratio(what="output", concurrency=row.concurrency, cpupp=mine.rate, by_hand=hand.rate))
            if mine.prefill_rate is not None and hand.prefill_rate is not None:
                found.append(
                    Ratio(
                        what="prefill",
                        concurrency=row.concurrency,
                        cpupp=mine.prefill_rate,
                        by_hand=hand.prefill_rate,
                    )
                )
    return tuple(found)
