"""The JSON Schema of cluster files, for editors and programs: the shape of ClusterSpec in the words of docs/yaml.md."""

from __future__ import annotations

import json
from typing import Any

from cpupp.plan.cluster import MAX_SECONDS, ClusterSpec
from cpupp.plan.schema_words import EXAMPLES, WORDS

TITLE = "cpupp cluster file"
_SECTIONS = {
    "": "ClusterSpec", "model": "ModelSpec", "parallel": "ParallelSpec", "hosts[]": "HostSpec", "engine": "EngineSpec",
    "network": "NetworkSpec", "serve": "ServeSpec", "deadlines": "DeadlinesSpec", "restart": "RestartSpec",
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The schema as JSON values."""
    made = ClusterSpec.model_json_schema(by_alias=True)
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = TITLE
    for section, name in _SECTIONS.items():
        properties = made["properties"] if section == "" else made["$defs"][name]["properties"]
        for key, value in properties.items():
            _describe(f"{section}.{key}" if section else key, value)
    _correct(made)
    return made


def _describe(key: str, value: dict[str, Any]) -> None:
    value.pop("title", None)
    value["description"] = WORDS.get(key, value.get("description", ""))
    if key in EXAMPLES:
        value["examples"] = EXAMPLES[key]


def _correct(made: dict[str, Any]) -> None:
    """What pydantic cannot know: values that code checks, and `parallel: auto`."""
    parallel = made["$defs"]["ParallelSpec"]["properties"]
    parallel.pop("auto", None)
    made["properties"]["parallel"] = {
        "anyOf": [{"const": "auto"}, {"$ref": "#/$defs/ParallelSpec"}],
        "description": WORDS["parallel"],
    }
    made["$defs"]["HostSpec"]["anyOf"] = [{"required": ["ssh"]}, {"required": ["local"]}]
    made["$defs"]["NetworkSpec"]["properties"]["master_port"]["anyOf"] = [
        {"const": "auto"},
        {"type": "integer", "minimum": 1, "maximum": 65535},
    ]
    micro_batches = made["$defs"]["EngineSpec"]["properties"]["micro_batches"]
    micro_batches["enum"].append(False)  # YAML's bare off
    micro_batches.pop("type")
    seconds = [*made["$defs"]["DeadlinesSpec"]["properties"].values()]
    for value in [*seconds, made["$defs"]["RestartSpec"]["properties"]["backoff"]]:
        value.update({"exclusiveMinimum": 0, "maximum": MAX_SECONDS})


def schema_text() -> str:
    """The schema as a file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
