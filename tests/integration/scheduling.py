"""vLLM's scheduler and ours without an engine: requests in, batches out, tokens back as a pipeline would give them."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
BLOCK = 16


class Engine:
    """What EngineCore.step_with_batch_queue does, with tokens that depend on the request and its position alone."""

    def __init__(
        self,
        folder: Path,
        *,
        stages: int = 2,
        blocks: int = 4096,
        tokens: int = 512,
        policy: str = "fcfs",
        longest: int = 0,
    ):
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from cpupp.rank.scheduler import make_scheduler

        (folder / "config.json").write_text(json.dumps(LLAMA))
        model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096)
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(pipeline_parallel_size=stages, distributed_executor_backend="mp"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=tokens,
                max_model_len=4096,
                is_encoder_decoder=False,
                policy=policy,
                long_prefill_token_threshold=longest,
                scheduler_cls="cpupp.rank.scheduler.make_scheduler",
            ),
        )
        import torch

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        cache.num_gpu_blocks = blocks
        assert config.scheduler_config.get_scheduler_cls() is make_scheduler
        self.scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.depth = stages
        self.queue: deque[Any] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.batches: list[dict[str, int]] = []

    def add(self, name: str, prompt: int, tokens: int, priority: int = 0) -> None:
        """A request of so many prompt tokens, for so many tokens."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(name, [5] * prompt, params, None, priority=priority)
        self.tokens[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """The client went away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.finished.add(name)

    def step(self) -> bool:
        """One step; False when there is nothing to do."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.batches.append(dict(output.num_scheduled_tokens))
            ends = {
                name: request.num_computed_tokens == request.num_tokens
                for name in output.num_scheduled_tokens
                for request in [self.scheduler.requests[name]]
            }
            self.queue.append((output, ends))
            if len(self.queue) < self.depth:
                return True
        elif not self.queue:
            return False
        self._finish(*self.queue.popleft())
        return True

    def run(self, most: int = 10_000) -> int:
        """Step to the end; return the number of steps."""
        for number in range(most):
            if not self.step():
                return number
        raise AssertionError(f"no end after {most} steps: {self.scheduler.get_request_counts()}, {self.batches[-8:]}")

    def _finish(self, output: Any, ends: dict[str, bool]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = [[self._token(name)] if ends[name] else [] for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for group in self.scheduler.update_from_output(output, result).values():
            for each in group.outputs:
                self.tokens[each.request_id].extend(each.new_token_ids)
                if each.finished:
                    self.finished.add(each.request_id)

    def _token(self, name: str) -> int:
        return 10 + len(self.tokens[name])


def cut_evenly(rank: int, folder: str) -> list[Any]:
    """32 requests that arrive together: the sizes of the batches in the middle, and who was in them."""
    engine = Engine(Path(folder))
    for number in range(32):
        engine.add(f"r{number}", 8, 24)
    engine.run()
    middle = [batch for batch in engine.batches if max(batch.values(), default=0) == 1][8:24]
    counts = [sum(f"r{number}" in batch for batch in middle) for number in range(32)]
    return [[len(batch) for batch in middle], counts, len(engine.finished), {len(t) for t in engine.tokens.values()}]


def unequal(rank: int, folder: str) -> list[Any]:
    """Requests of every length that come, go and are taken back, on three stages: what each got, and empty batches."""
    engine = Engine(Path(folder), stages=3)
    for turn in range(40):
        engine.add(f"r{turn}", 1 + 37 * turn % 900, 1 + 13 * turn % 50)
        for _ in range(turn % 4):
            engine.step()
        if turn % 7 == 6:
            engine.abort(f"r{turn - 1}")
    engine.run()
    short = [t for t in range(40) if len(engine.tokens[f"r{t}"]) != 1 + 13 * t % 50]
    return [len(engine.finished), short, engine.scheduler.get_request_counts()]


def a_long_prompt(rank: int, folder: str) -> list[Any]:
    """A prompt of 4,000 tokens beside four decoding requests: its pieces, and the most steps that a token took."""
    engine = Engine(Path(folder), tokens=4096)
    for number in range(4):
        engine.add(f"d{number}", 8, 60)
    for _ in range(8):
        engine.step()
    engine.add("long", 4000, 2)
    engine.run()
    pieces = [batch["long"] for batch in engine.batches if batch.get("long", 0) > 1]
    first = next(i for i, batch in enumerate(engine.batches) if "long" in batch)
    steps = [i for i, batch in enumerate(engine.batches) if "d3" in batch and i >= first]
    return [sum(pieces), len(pieces), max(b - a for a, b in pairwise(steps)), len(engine.finished)]


def no_room(rank: int, folder: str, policy: str) -> list[Any]:
    """More requests than the KV cache holds: all end with all of their tokens, some after a preemption."""
    engine = Engine(Path(folder), blocks=24, policy=policy)
    for number in range(8):
        engine.add(f"r{number}", 32, 64, priority=number % 3)
    preempted = 0
    while engine.step():
        preempted = max(preempted, sum(r.num_preemptions for r in engine.scheduler.requests.values()))
    return [preempted > 0, len(engine.finished), {len(tokens) for tokens in engine.tokens.values()}]


def alone(rank: int, folder: str) -> list[Any]:
    """One request: batches, of which none is empty but that which tells the workers of its end; token lists sent."""
    engine = Engine(Path(folder))
    engine.add("r", 8, 5)
    sent: list[int] = []
    stock = engine.scheduler.schedule

    def schedule() -> Any:
        output = stock()
        sent.append(len(output.scheduled_cached_reqs.all_token_ids))
        return output

    engine.scheduler.schedule = schedule
    engine.run()
    return [[sum(batch.values()) for batch in engine.batches], sent]


def full_house(rank: int, folder: str) -> list[Any]:
    """More requests than may run at a time: empty batches while any request runs, and how many finished."""
    engine = Engine(Path(folder))
    for number in range(150):
        engine.add(f"r{number}", 8, 24)
    engine.run()
    return [engine.batches[:-2].count({}), len(engine.finished)]


def limited_prompts(rank: int, folder: str) -> list[Any]:
    """Pieces of prompts limited by the user: how many steps a request waits that decodes behind a long prompt."""
    engine = Engine(Path(folder), tokens=4096, longest=512)
    engine.add("long", 4000, 2)
    engine.add("d", 8, 20)
    engine.run()
    steps = [i for i, batch in enumerate(engine.batches) if "d" in batch]
    return [max(b - a for a, b in pairwise(steps)), len(engine.finished)]


def other_kinds(rank: int) -> list[str]:
    """Class of the scheduler for a configuration of each kind, by what it is asked to make."""
    from types import SimpleNamespace as Fake
    from unittest.mock import patch

    from vllm.config import SchedulerConfig

    from cpupp.rank import scheduler

    found = []
    kinds: list[dict[str, Any]] = [{}, {"stages": 1}, {"background": True}, {"drafts": object()}, {"runner": "pooling"}]
    for kind in kinds:
        config = SchedulerConfig.default_factory(scheduler_cls="cpupp.rank.scheduler.make_scheduler")
        config.async_scheduling = kind.get("background", False)
        whole = Fake(
            scheduler_config=config,
            parallel_config=Fake(pipeline_parallel_size=kind.get("stages", 2)),
            speculative_config=kind.get("drafts"),
            diffusion_config=None,
            model_config=Fake(runner_type=kind.get("runner", "generate")),
        )
        made: list[str] = []

        def note(self: Any, made: list[str] = made, **options: Any) -> None:
            made.append(type(self).__name__)

        with (
            patch("vllm.v1.core.sched.scheduler.Scheduler.__init__", note),
            patch("vllm.v1.core.sched.async_scheduler.AsyncScheduler.__init__", note),
            patch.object(scheduler.MicroBatchScheduler, "__init__", note),
        ):
            scheduler.make_scheduler(vllm_config=whole)
        found += made
    return found
