"""The reader of vLLM's /metrics, on text as vLLM writes it and on text as it breaks."""

from __future__ import annotations

import pytest

from cpupp.plan.metrics import Load, Speed, read_load, samples, speed

# Cut from vLLM 0.32.0 with one request under way.
TEXT = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 12345.0
process_virtual_memory_bytes 9.1e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 1.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.0421
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1100.0
vllm:prompt_tokens_created{engine="0",model_name="smollm2"} 1.7645e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="local"} 77.0
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 2050.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="smollm2"} 5.0
"""


def test_the_load_of_a_served_model() -> None:
    assert read_load(TEXT, 10.0) == Load(
        at=10.0, running=1, waiting=3, kv_usage=0.0421, prompt_tokens=1100, generated_tokens=2050
    )


def test_the_older_name_of_the_kv_cache() -> None:
    assert read_load('vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n', 0.0).kv_usage == 0.5


def test_several_engines_add_up_and_the_fullest_cache_counts() -> None:
    text = "".join(f'{name}{{engine="{n}"}} {v}\n' for name, v in (("vllm:num_requests_running", 2),) for n in (0, 1))
    text += 'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
    load = read_load(text, 0.0)
    assert (load.running, load.kv_usage) == (4, 0.7)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('a{b="}x{ 9 "} 3 1700000000', [("a", 3.0)]),  # braces and blanks in a label, and a time stamp
        ("a 1e3", [("a", 1000.0)]),
        ("a NaN", []),
        ("a +Inf", []),
        ("a", []),
        ('a{b="c"}', []),
        ("", []),
        ("# a 1", []),
        ("a{ 1", []),  # cut off in the middle
        ("<html> 502 Bad Gateway", [("<html>", 502.0)]),
    ],
)
def test_lines(line: str, found: list[tuple[str, float]]) -> None:
    assert [(name, value) for name, value in samples(line) if value] == found


def test_what_is_not_there_is_none() -> None:
    assert read_load("<html><body>502</body></html>", 1.0) == Load(at=1.0)


def test_tokens_per_second_from_two_samples() -> None:
    before = Load(at=10.0, prompt_tokens=100, generated_tokens=50)
    after = Load(at=12.0, prompt_tokens=100, generated_tokens=57)
    assert speed(before, after) == Speed(prompt=0.0, generated=3.5)


def test_a_new_vllm_between_the_samples_gives_no_speed() -> None:
    before, after = Load(at=1.0, prompt_tokens=9, generated_tokens=900), Load(at=2.0, generated_tokens=3)
    assert speed(before, after) == Speed()
    assert speed(None, after) == speed(after, None) == speed(after, after) == Speed()
