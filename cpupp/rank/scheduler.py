"""vLLM's scheduler with micro-batches: a subclass that limits which requests go with the next batch, and nothing else.

What it leans on in vLLM 0.32 (v1/core/sched/scheduler.py; plan/versions.py says which versions were read):

- `schedule` skips a running request until `current_step` reaches its `next_decode_eligible_step`, and starts from
  `max_num_scheduled_tokens`. With these two attributes a batch is limited; all else (admission, preemption, priorities,
  grammars) stays vLLM's.
- A prompt's next chunk may go while the former is in flight (`_update_after_schedule` counts it as computed), so the
  chunks of one prompt follow each other through the stages.
- `update_from_output` is called once for every `schedule`, in the same order.
- EngineCore.step_with_batch_queue schedules whenever `has_requests` says so, and sends the batch to all workers even
  when it is empty; when it says no, the engine waits for the oldest batch.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger  # type: ignore[import-not-found, unused-ignore]  # on the hosts only
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found, unused-ignore]

from cpupp.rank.micro_batches import MicroBatches

logger = init_logger("vllm.cpupp")


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """The scheduler for this configuration: ours, or the one that vLLM would have chosen where ours has no say.

    Asynchronous scheduling (never on CPU in 0.32: platforms/cpu.py) staggers decodes by itself; a speculative step has
    more than one token a request; pooling has no decodes.
    """
    config = vllm_config.scheduler_config
    ours = (
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and not config.async_scheduling
        and vllm_config.speculative_config is None
        and vllm_config.diffusion_config is None
        and vllm_config.model_config.runner_type == "generate"
    )
    if ours:
        return MicroBatchScheduler(vllm_config=vllm_config, **options)
    config.scheduler_cls = None
    if vllm_config.diffusion_config is not None:
        kind = "DiffusionAsyncScheduler" if config.async_scheduling else "DiffusionScheduler"
        config.scheduler_cls = f"vllm.v1.core.sched.diffusion_scheduler.{kind}"
    return config.get_scheduler_cls()(vllm_config=vllm_config, **options)


class MicroBatchScheduler(Scheduler):  # type: ignore[misc, unused-ignore]  # vLLM is untyped where it is not installed
    """Decoding requests in parts that follow each other through the stages, as rank/micro_batches.py decides."""

    max_num_scheduled_tokens: int

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._parts = MicroBatches(self.parallel_config.pipeline_parallel_size)
        self._held: dict[str, None] = {}
        # An item of a modality, or a block of recurrent state, must fit into one step: its size is vLLM's to choose.
        # Where the user limits the pieces of long prompts, decodes may stand behind a prompt that is not done.
        self._chunks = (
            self.scheduler_config.enable_chunked_prefill
            and not self.scheduler_config.long_prefill_token_threshold
            and not self.scheduler_config.is_multimodal_model
            and not self.has_mamba_layers
        )
        logger.info("cpupp: decoding requests go in up to %d micro-batches, as measured", self._parts.stages)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's next batch out of the requests that may go."""
        decoding, ready, prompt_tokens = self._survey()
        going = self._hold(ready, self._parts.decodes(decoding))
        most = self.max_num_scheduled_tokens
        if prompt_tokens and self._chunks:
            self.max_num_scheduled_tokens = min(most, len(going) + self._parts.chunk(prompt_tokens))
        try:
            output = super().schedule(*args, **options)
        finally:
            self.max_num_scheduled_tokens = most
        decodes = sum(request.request_id in output.num_scheduled_tokens for request in going)
        self._parts.began(time.monotonic(), decodes=decodes, prompt_tokens=output.total_num_scheduled_tokens - decodes)
        return output

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        """Take the result of the oldest batch."""
        decoded = self._parts.ended(time.monotonic(), decoding=self._survey()[0])
        if decoded:
            logger.info("cpupp: %s", decoded)
        return super().update_from_output(*args, **options)

    def has_requests(self) -> bool:
        """Whether a batch should be scheduled now. No while batches are in flight and nothing could go with another."""
        return super().has_requests() and not (self._parts.in_flight and self._nothing_could_go())

    def _nothing_could_go(self) -> bool:
        if self.kv_holding_waiting or self.connector is not None or self.ec_connector is not None:
            return False
        decoding, ready, prompt_tokens = self._survey()
        return not prompt_tokens and not (ready and self._parts.decodes(decoding))

    def _survey(self) -> tuple[int, list[Any], int]:
        """Number of requests beyond their prompt; those of them that are not in flight; prompt tokens that wait and
        may be admitted."""
        decoding, ready, prompt_tokens = 0, [], 0
        for request in self.running:
            new = request.num_tokens - request.num_computed_tokens
            if new > 1 or request.num_computed_tokens < request.num_prompt_tokens:
                prompt_tokens += new
                continue
            decoding += 1
            if new == 1:
                ready.append(request)
        seats = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        if self.waiting and seats > 0:  # the first stands for all: there may be thousands
            first = self.waiting.peek_request()
            prompt_tokens += min(seats, len(self.waiting)) * max(1, first.num_tokens - first.num_computed_tokens)
        return decoding, ready, prompt_tokens

    def _hold(self, ready: list[Any], most: int) -> list[Any]:
        """Let `most` of the requests go, those that were held longest first, and hold the others for this step."""
        by_id = {request.request_id: request for request in ready}
        queue = [by_id.pop(name) for name in self._held if name in by_id] + list(by_id.values())
        self._held = {}
        for request in queue[most:]:
            self._held[request.request_id] = None
            request.next_decode_eligible_step = self.current_step + 2
        return queue[:most]

    def _make_cached_request_data(self, *args: Any, **options: Any) -> Any:
        """Without the tokens so far of each request that was not in the batch before: with micro-batches that is every
        request in every batch, over the network to every host, and workers read them with asynchronous scheduling only
        (v1/worker/gpu_model_runner.py).
        """
        data = super()._make_cached_request_data(*args, **options)
        if self.connector is None:
            data.all_token_ids.clear()
        return data
