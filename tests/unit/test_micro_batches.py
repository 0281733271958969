"""How batches are cut, against a simulated pipeline whose stages take `fixed + per_token * tokens` seconds."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import pytest

from cpupp.rank.micro_batches import MicroBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """An engine as vLLM's: at most one batch a stage in flight, results in order, `engine` seconds of the head's core a
    batch.
    """

    stages: int
    fixed: float
    per_token: float
    engine: float

    def decode(self, requests: int, rounds: int, policy: MicroBatches | int, at: float = 0.0) -> float:
        """Tokens a second of so many requests from the time `at` on. policy: or the number of parts to cut into."""
        free = [at] * self.stages
        flight: deque[tuple[float, int]] = deque()
        now, ready, done = at, requests, 0
        while done < requests * rounds:
            if isinstance(policy, MicroBatches):
                most = policy.decodes(requests)
            else:
                most = math.ceil(requests / policy) if policy > 1 or not flight else 0
            going = min(ready, most)
            if going and len(flight) < self.stages:
                free[0] = max(free[0], now) + self.engine
                now += self.engine
                if isinstance(policy, MicroBatches):
                    policy.began(now, decodes=going, prompt_tokens=0)
                flight.append((self.through(free, now, going), going))
                ready -= going
                continue
            end, tokens = flight.popleft()
            now = max(now, end)
            if isinstance(policy, MicroBatches):
                policy.ended(now, decoding=requests)
            ready += tokens
            done += tokens
        while flight and isinstance(policy, MicroBatches):
            policy.ended(flight.popleft()[0], decoding=0)
        return done / (now - at)

    def prefill(self, prompt: int, policy: MicroBatches | None, at: float = 0.0) -> float:
        """Seconds until a prompt is through, in one piece without a policy."""
        free = [at] * self.stages
        flight: deque[float] = deque()
        now, left = at, prompt
        while left or flight:
            if left and len(flight) < self.stages:
                piece = min(left, policy.chunk(left)) if policy else left
                if policy:
                    policy.began(now, decodes=0, prompt_tokens=piece)
                flight.append(self.through(free, now, piece))
                left -= piece
                continue
            now = max(now, flight.popleft())
            if policy:
                policy.ended(now, decoding=0)
        return now - at

    def through(self, free: list[float], start: float, tokens: int) -> float:
        """When a batch leaves the last stage; `free`: when each stage can take the next one."""
        for stage in range(self.stages):
            start = free[stage] = max(start, free[stage]) + self.fixed + self.per_token * tokens
        return start


COMPUTE_BOUND = Pipeline(stages=2, fixed=0.02, per_token=0.002, engine=0.003)
DEEP = Pipeline(stages=16, fixed=0.05, per_token=0.02, engine=0.002)
ENGINE_BOUND = Pipeline(stages=4, fixed=0.002, per_token=0.0001, engine=0.003)


@pytest.mark.parametrize(("pipeline", "requests"), [(COMPUTE_BOUND, 32), (DEEP, 64), (COMPUTE_BOUND, 3)])
def test_requests_are_cut_where_that_is_faster(pipeline: Pipeline, requests: int) -> None:
    one, many = pipeline.decode(requests, 100, 1), pipeline.decode(requests, 100, pipeline.stages)
    assert many > one
    assert pipeline.decode(requests, 1500, MicroBatches(pipeline.stages)) > 0.9 * many


def test_requests_stay_together_where_the_engine_is_the_limit() -> None:
    one, many = ENGINE_BOUND.decode(8, 100, 1), ENGINE_BOUND.decode(8, 100, 4)
    assert one > 1.2 * many
    assert ENGINE_BOUND.decode(8, 3000, MicroBatches(4)) > 0.98 * one


def test_trying_a_way_that_is_far_behind_costs_little() -> None:
    many = DEEP.decode(64, 100, 16)
    assert many > 9 * DEEP.decode(64, 100, 1)
    assert DEEP.decode(64, 300, MicroBatches(16)) > 0.85 * many


def test_what_pays_with_few_requests_is_not_tried_anew_with_more() -> None:
    policy = MicroBatches(16)
    DEEP.decode(32, 100, policy)
    parts = set()
    for turn in range(1, 30):
        DEEP.decode(128, 1, policy, at=1e4 * turn)
        parts.add(policy.decodes(128))
    assert parts == {8}


def test_a_better_way_is_found_when_the_machine_changes() -> None:
    policy = MicroBatches(4)
    ENGINE_BOUND.decode(8, 600, policy)
    assert policy.decodes(8) == 8
    changed = Pipeline(stages=4, fixed=0.002, per_token=0.01, engine=0.001)
    changed.decode(8, 2000, policy, at=1e4)
    assert changed.decode(8, 200, policy, at=1e5) > 0.9 * changed.decode(8, 100, 4)


def test_requests_that_stay_together_wait_for_those_in_flight() -> None:
    policy = MicroBatches(4)
    ENGINE_BOUND.decode(8, 600, policy)
    policy.began(0.0, decodes=3, prompt_tokens=0)
    assert policy.decodes(8) == 0


def test_one_request_is_never_held() -> None:
    policy = MicroBatches(2)
    assert policy.decodes(1) == 1
    policy.began(0.0, decodes=1, prompt_tokens=0)
    assert policy.decodes(1) == 1
    assert policy.in_flight == 1


def test_parts_cover_all_requests() -> None:
    for stages in (2, 3, 16):
        assert all(MicroBatches(stages).decodes(num) * stages >= num for num in range(2, 100))


@pytest.mark.parametrize("stages", [2, 4, 16])
def test_a_long_prompt_goes_through_the_stages_in_pieces(stages: int) -> None:
    pipeline = Pipeline(stages=stages, fixed=0.02, per_token=0.0027, engine=0.0)
    whole = pipeline.prefill(4000, None)
    assert pipeline.prefill(4000, MicroBatches(stages)) < (0.6 if stages == 2 else 0.4) * whole


def test_pieces_are_large_where_a_step_costs_much_beyond_its_tokens() -> None:
    policy = MicroBatches(2)
    untried = policy.chunk(4000)
    expert = Pipeline(stages=2, fixed=0.3, per_token=0.0005, engine=0.0)
    expert.decode(4, 50, policy)
    expert.prefill(4000, policy, at=1e4)
    assert policy.chunk(4000) > 2 * untried
    assert expert.prefill(4000, policy, at=2e4) < 1.02 * expert.prefill(4000, None)


def test_a_measurement_is_not_mixed_with_prompts() -> None:
    policy = MicroBatches(2)
    for step in range(1000):
        policy.began(float(step), decodes=4, prompt_tokens=100 if step % 3 == 0 else 0)
        assert policy.ended(step + 0.5, decoding=8) is None
