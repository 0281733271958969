"""The head's HTTP API, asked by the agent on the head: the launcher may have no route to its port."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.network import is_loopback, url_host
from cpupp.plan.plan import Plan
from cpupp.plan.secret import API_KEY_ENV, api_key_args

_ANY = ("0.0.0.0", "::", "")  # compared with, never bound
HEALTH_TIMEOUT = 5.0
STRANGER = "API-STRANGER"


class _Agent(Protocol):
    def request(self, op: str, *, timeout: float = ..., **params: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and how fast it came: tokens per second over the whole request."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    tokens_per_second: float


class HeadApi:
    """Asks the API of a plan's head through the head's agent. key: the API's, where a secret holds it."""

    def __init__(self, plan: Plan, session: _Agent, key: str = "") -> None:
        self._session = session
        self._model = plan.served_name
        self._url = local_url(plan)
        self._port = plan.serve_port
        self._key = api_key(plan, key)

    def healthy(self) -> bool:
        """Whether /health answers 200. Raises CpuppError API-STRANGER when a process that is not of the run answers."""
        try:
            return bool(self._http("GET", "/health", None, HEALTH_TIMEOUT)[0] == 200)
        except CpuppError as error:
            if error.code == STRANGER:
                raise
            return False

    def complete(self, timeout: float) -> None:
        """Request a few tokens. Raises CpuppError API-STATUS or API-ANSWER when none come back."""
        body = {"model": self._model, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
        answer = self._post("/v1/completions", body, timeout)
        if not answer.get("choices"):
            raise _api_error("API-ANSWER", f"the completion has no choices: {json.dumps(answer)[:300]}")

    def ask(self, question: str, *, max_tokens: int, timeout: float) -> Answer:
        """Ask one question, as a chat where the model has a chat template, as a plain completion otherwise."""
        start = time.monotonic()
        common = {"model": self._model, "max_tokens": max_tokens, "temperature": 0}
        chat = {**common, "messages": [{"role": "user", "content": question}]}
        status, text = self._http("POST", "/v1/chat/completions", chat, timeout)
        if status == 400 and "template" in text:
            answer = self._post("/v1/completions", {**common, "prompt": question}, timeout)
            content = answer["choices"][0]["text"]
        else:
            answer = _parse(status, text)
            content = answer["choices"][0]["message"]["content"]
        seconds = time.monotonic() - start
        usage = answer.get("usage") or {}
        tokens = int(usage.get("completion_tokens") or 0)
        return Answer(
            text=str(content or "").strip(),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
        )

    def _post(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        return _parse(*self._http("POST", path, body, timeout))

    def _http(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, str]:
        reply = self._session.request(
            "http",
            timeout=timeout + 5,
            method=method,
            url=self._url + path,
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            },
            body="" if body is None else json.dumps(body),
            http_timeout=timeout,
            own_port=self._port,
        )
        return int(reply["status"]), str(reply["body"])


def local_url(plan: Plan) -> str:
    """The API's root URL as the head itself reaches it, without `/v1`."""
    host = "127.0.0.1" if plan.serve_host in _ANY or is_loopback(plan.serve_host) else plan.serve_host
    return f"http://{url_host(host)}:{plan.serve_port}"


def public_url(plan: Plan) -> str:
    """The API's base URL as clients write it: with the head's address where the API listens on all of them."""
    head = next(node for node in plan.nodes if node.host == plan.head)
    host = head.endpoint.address if plan.serve_host in _ANY else plan.serve_host
    return f"http://{url_host(host)}:{plan.serve_port}/v1"


def api_key(plan: Plan, secret: str = "") -> str:
    """The key that the API will ask for, empty when it asks for none: vLLM's --api-key goes before VLLM_API_KEY."""
    head = next(host for host in plan.hosts if host.name == plan.head)
    return next(iter(api_key_args(plan.args)), secret or head.env.get(API_KEY_ENV, ""))


def _parse(status: int, text: str) -> dict[str, Any]:
    if status != 200:
        raise _api_error("API-STATUS", f"HTTP {status}: {text[:500]}")
    try:
        answer = json.loads(text)
    except ValueError:
        raise _api_error("API-ANSWER", f"not JSON: {text[:300]!r}") from None
    if not isinstance(answer, dict):
        raise _api_error("API-ANSWER", f"not an object: {text[:300]!r}")
    return answer


def _api_error(code: str, message: str) -> CpuppError:
    return CpuppError(code, message, hint="see the head's log", exit_code=ExitCode.RANK_FAILED)
