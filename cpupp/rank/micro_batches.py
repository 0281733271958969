"""How the next batch of a pipeline is cut: how many decoding requests it takes, and how many tokens of prompts.

vLLM puts every request that can go into the next batch. So all decoding requests of a pipeline may end up in one batch
that wanders from stage to stage while the other stages idle, and a prompt of 4,000 tokens is one batch too (vllm
#41682, #50853). Cut into one part a stage, the parts follow each other through the stages.

Cutting costs something as well: every batch has a fixed price (weights are read again, engine and hops do their
work), and where a stage takes as long for half of the requests as for all, nothing is won. So both ways are measured,
in tokens a second at the same number of requests, and the better one is taken. Nothing here knows vLLM; times are in
seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

ROUNDS = 16
"""Every decoding request gets so many tokens in one measurement."""

FEW_ROUNDS = 2
"""A way that is far behind the other is given up after so many."""

MEASUREMENTS = 3
FAR = 1.25
MARGIN = 1.03
"""The other way is taken when it is faster by this factor, and FAR needs no second measurement."""

PATIENCE = 32
"""Measurements before both ways are compared again; doubled, up to 32 times as many, while nothing changes."""

SAME_SIZE = 1.25
"""Numbers of requests that differ by less than this factor are measured as one."""

MIN_CHUNK = 64
FIXED_TOKENS = 64.0
"""What a step costs beyond its tokens, in tokens of a prompt, until it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    began: float
    decodes: int
    prompt_tokens: int


@dataclass(slots=True, kw_only=True)
class _Size:
    """What is known at about one number of decoding requests.

    way: in how many parts they go now; best: the better way; comparing: whether that is being found out; sure: it is
    taken from fewer requests; rates: tokens a second by way, the latest; tokens, seconds: of the measurement that runs;
    wait, waited: measurements of the better way before both are compared again; told: the last answer.
    """

    way: int
    best: int
    sure: bool
    comparing: bool
    rates: dict[int, deque[float]]
    tokens: int = 0
    seconds: float = 0.0
    wait: int = PATIENCE // 2
    waited: int = 0
    told: int | None = None

    def measured(self, tokens: int, seconds: float, requests: int) -> bool:
        """Add to the measurement that runs. Return whether it ended with a new answer to which way is better."""
        self.tokens += tokens
        self.seconds += seconds
        rate = self.tokens / max(self.seconds, 1e-9)
        behind = self.way != self.best and rate * FAR < self.rate(self.best)
        if self.tokens < (FEW_ROUNDS if behind else ROUNDS) * requests:
            return False
        self.rates[self.way].append(rate)
        self.tokens, self.seconds = 0, 0.0
        self._choose()
        new = not self.comparing and not self.sure and self.told != self.best
        self.told = self.best if new else self.told
        return new

    def rate(self, way: int) -> float:
        """Tokens a second of a way, 0 when it was not tried."""
        return statistics.median(self.rates[way]) if self.rates[way] else 0.0

    @property
    def far(self) -> bool:
        """Whether one way is far ahead of the other."""
        slow, fast = sorted(self.rate(way) for way in self.rates)
        return self.sure or 0.0 < FAR * slow < fast

    def _choose(self) -> None:
        other = next(way for way in self.rates if way != self.best)
        if not self.comparing:
            self.waited += 1
            if self.waited >= self.wait:
                self.comparing, self.sure, self.way = True, False, other
                self.rates[other].clear()
        elif not self.far and any(len(rates) < MEASUREMENTS for rates in self.rates.values()):
            self.way = min(self.rates, key=lambda way: len(self.rates[way]))
        else:
            self.comparing, self.waited, self.wait = False, 0, min(2 * self.wait, 32 * PATIENCE)
            if self.rate(other) > MARGIN * self.rate(self.best):
                self.best, self.wait = other, PATIENCE
            self.way = self.best


@dataclass(slots=True)
class _Mean:
    """Tokens of a batch and seconds of a stage for it, in the mean of the latest ones."""

    tokens: float = 0.0
    seconds: float = 0.0
    num: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.num += 1
        share = max(0.05, 1 / self.num)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)


@dataclass(slots=True)
class MicroBatches:
    """The policy. The caller says when a batch goes out and when its result is back, in the same order."""

    stages: int
    _flight: deque[_Batch] = field(default_factory=deque)
    _sizes: dict[int, _Size] = field(default_factory=dict)
    _last: tuple[int, int] | None = None
    _ended: float = 0.0
    _unsettled: int = 0
    _decode: _Mean = field(default_factory=_Mean)
    _prompt: _Mean = field(default_factory=_Mean)

    @property
    def in_flight(self) -> int:
        """Batches whose results are not back."""
        return len(self._flight)

    def decodes(self, decoding: int) -> int:
        """How many of the requests that could get their next token may go with the next batch.

        decoding: how many requests there are beyond their prompt, those in flight too.
        """
        if decoding < 2:
            return decoding
        if self._size(decoding).way > 1:
            return math.ceil(decoding / self.stages)
        return 0 if any(batch.decodes for batch in self._flight) else decoding

    def chunk(self, prompt_tokens: int) -> int:
        """How many tokens of prompts may go with the next batch, of so many that wait.

        The time of all is (pieces + stages - 1) * (fixed + tokens a piece), least at this size.
        """
        pieces = math.sqrt(prompt_tokens * (self.stages - 1) / self._fixed_tokens())
        return max(MIN_CHUNK, math.ceil(prompt_tokens / max(1.0, pieces)))

    def began(self, now: float, *, decodes: int, prompt_tokens: int) -> None:
        """A batch goes out."""
        self._flight.append(_Batch(began=now, decodes=decodes, prompt_tokens=prompt_tokens))

    def ended(self, now: float, *, decoding: int) -> str | None:
        """The result of the oldest batch is back. Return what was decided by that, for a log, or None.

        decoding: as for `decodes`, before the result.
        """
        num_flying = len(self._flight)
        batch = self._flight.popleft()
        seconds = now - max(self._ended, batch.began)
        since, self._ended = self._ended, now
        if batch.decodes + batch.prompt_tokens:
            mean = self._prompt if batch.prompt_tokens else self._decode
            mean.add(batch.decodes + batch.prompt_tokens, seconds * num_flying / self.stages)
        if decoding < 2:
            self._last = None
            return None
        size = self._size(decoding)
        if batch.prompt_tokens or self._last != (id(size), size.way) or any(b.prompt_tokens for b in self._flight):
            self._last = id(size), size.way
            self._unsettled = self.stages
        elif self._unsettled:
            self._unsettled -= 1
        elif size.measured(batch.decodes, now - since, decoding):
            return self._told(decoding, size)
        return None

    def _told(self, decoding: int, size: _Size) -> str:
        rates = ", ".join(f"{way}: {size.rate(way):.1f}" for way in size.rates if size.rates[way])
        return f"about {decoding} requests go in {size.best} parts (tokens/s by parts: {rates})"

    def _size(self, decoding: int) -> _Size:
        key = round(math.log(decoding) / math.log(SAME_SIZE))
        if key not in self._sizes:
            self._sizes[key] = self._new_size(key)
        return self._sizes[key]

    def _new_size(self, key: int) -> _Size:
        """What pays with fewer requests pays with more, so a clear answer there is taken over untried."""
        rates: dict[int, deque[float]] = {way: deque(maxlen=MEASUREMENTS) for way in (self.stages, 1)}
        sure = any(k < key and size.best > 1 and size.far for k, size in self._sizes.items())
        near = self._sizes[min(self._sizes, key=lambda k: abs(k - key))] if self._sizes else None
        best = self.stages if sure or near is None else near.best
        return _Size(way=best, best=best, sure=sure, comparing=not sure, rates=rates)

    def _fixed_tokens(self) -> float:
        decode, prompt = self._decode, self._prompt
        if not (decode.num and prompt.num and prompt.tokens > 2 * decode.tokens and prompt.seconds > decode.seconds):
            return FIXED_TOKENS
        per_token = (prompt.seconds - decode.seconds) / (prompt.tokens - decode.tokens)
        return min(2048.0, max(16.0, decode.seconds / per_token - decode.tokens))
