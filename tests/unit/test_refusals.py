"""Plans that are impossible: one clear error each, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.plan import make_plan
from tests.unit.factory import LLAMA_TINY, cluster, engine, machines, model_folder

PAIR = cluster("a", "b", pipeline=2)


def refusal(spec: ClusterSpec, facts: dict[str, HostFacts]) -> CpuppError:
    """The error of an impossible plan."""
    with pytest.raises(CpuppError) as caught:
        make_plan(spec, facts)
    return caught.value


def test_a_model_that_one_host_lacks() -> None:  # spark-vllm-docker #146
    facts = machines("a", "b")
    missing = model_folder(error="/models/tiny/config.json: No such file or directory")
    facts["b"] = replace(facts["b"], model=missing)
    error = refusal(PAIR, facts)
    assert str(error) == "host b: model /models/tiny: /models/tiny/config.json: No such file or directory"
    assert error.hint == "the folder must be on every host, at the same path"


def test_a_model_that_may_be_a_hub_id() -> None:
    spec = cluster("a", model={"path": "Qwen/Qwen3-8B"})
    facts = machines("a", model=model_folder(error="/home/me/Qwen/Qwen3-8B/config.json: No such file or directory"))
    assert "run `hf download Qwen/Qwen3-8B` on a first" in refusal(spec, facts).hint


def test_a_wrong_python() -> None:
    facts = machines("a", "b")
    wrong = engine(python="/nowhere/python", error="/nowhere/python: No such file or directory", vllm="")
    facts["b"] = replace(facts["b"], engine=wrong)
    error = refusal(PAIR, facts)
    assert str(error) == "host b: engine.python /nowhere/python: /nowhere/python: No such file or directory"


def test_all_hosts_are_named_at_once() -> None:
    error = refusal(PAIR, machines("a", "b", engine=engine(vllm="0.17.0")))
    assert isinstance(error, CpuppErrors)
    assert [str(e) for e in error.errors] == [
        "host a: vLLM 0.17.0 is older than 0.18.0, the oldest that cpupp supports",
        "host b: vLLM 0.17.0 is older than 0.18.0, the oldest that cpupp supports",
    ]


def test_versions_that_differ() -> None:  # vllm #7846
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], engine=engine(vllm="0.31.0"))
    assert str(refusal(PAIR, facts)) == "vLLM differs between hosts: a: 0.32.0, b: 0.31.0"


def test_another_build_of_the_same_version_is_no_difference() -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], engine=engine(vllm="0.32.0+cpu", torch="2.13.0+cpu", distribution="vllm"))
    assert make_plan(PAIR, facts).hosts[1].shim is False


def test_another_snapshot_of_the_model() -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], model=model_folder(digest="e" * 64))
    assert str(refusal(PAIR, facts)) == "the model differs between hosts: a: dddddddddddd, b: eeeeeeeeeeee"


def test_heads_that_tensor_does_not_divide() -> None:
    error = refusal(cluster({"name": "a", "slots": 3}, tensor=3), machines("a"))
    assert str(error) == "heads(8) % tensor(3) = 2 != 0"
    assert error.hint == "tensor can be 1, 2, 4, 8 for this model"


def test_kv_heads_that_tensor_does_not_fit() -> None:
    config = {**LLAMA_TINY, "num_attention_heads": 12, "num_key_value_heads": 8, "head_dim": 64}
    error = refusal(cluster({"name": "a", "slots": 6}, tensor=6), machines("a", model=model_folder(config)))
    assert str(error) == "KV heads(8) and tensor(6): neither divides the other"
    assert error.hint == "tensor can be 1, 2, 4 for this model"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "it has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, which is no whole number from 1 to 10000"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers is 1000000000, which is no"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf, which is no"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, which is no"),
        ({"max_position_embeddings": "abc"}, "max_position_embeddings is abc, which is no"),
        ({"hidden_size": [5]}, "hidden_size is [5], which is no"),
        ({"text_config": 7}, "AttributeError"),
    ],
)
def test_a_config_that_is_no_decoders(change: dict[str, Any], words: str) -> None:
    facts = machines("a", model=replace(model_folder(), config={**LLAMA_TINY, **change}))
    error = refusal(cluster("a"), facts)
    assert str(error).startswith("/models/tiny/config.json is no decoder's: ")
    assert words in str(error)
    assert error.code == "MODEL-CONFIG"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("config.json is damaged: x", "the folder is there, but what it holds is damaged or unfinished"),
        ("/models/tiny/config.json: Permission denied", "make it readable for the user that cpupp logs in as"),
    ],
)
def test_a_model_that_is_there_and_cannot_be_used(error: str, hint: str) -> None:
    refused = refusal(cluster("a"), machines("a", model=model_folder(error=error)))
    assert refused.hint.startswith(hint)


@pytest.mark.parametrize("args", [{"max_model_len": "abc"}, {"max-model-len": -5}, {"max_model_len": True}])
def test_a_context_that_is_no_number(args: dict[str, Any]) -> None:
    error = refusal(cluster("a", engine={"args": args}), machines("a"))
    assert "is no number of tokens" in str(error)


def test_a_dtype_that_vllm_does_not_know() -> None:
    assert str(refusal(cluster("a", engine={"args": {"dtype": "float17"}}), {})).startswith(
        "engine.args.dtype 'float17'"
    )


def test_a_context_beyond_the_models_is_warned_of() -> None:
    def warned(length: object) -> bool:
        plan = make_plan(cluster("a", engine={"args": {"max_model_len": length}}), machines("a"))
        return any("is more than the model's" in text for text in plan.warnings)

    most = LLAMA_TINY["max_position_embeddings"]
    assert [warned(length) for length in (most, most + 1, "auto")] == [False, True, False]


def test_a_model_without_a_tokenizer_is_refused_unless_one_is_named() -> None:
    facts = machines("a", "b", model=model_folder(tokenizer=False))
    error = refusal(cluster("a", "b", pipeline=2), facts)
    assert str(error).startswith("host a: model /models/tiny has no tokenizer")
    named = cluster("a", "b", pipeline=2, engine={"python": "python3", "args": {"tokenizer": "/models/other"}})
    assert make_plan(named, facts).args["tokenizer"] == "/models/other"
