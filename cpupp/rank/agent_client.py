"""A light client of the API: one thread for each request at a time. Runs in a process of its own on the head.

    python3 -ISuc SOURCE ORDER        # ORDER: JSON, see `Client`; the API's key is in the environment

Standard library only. It prints one line: `@load` and the result as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

KEY_ENV = "CPUPP_BENCH_KEY"
FIRST_TOKEN = 10  # below, vocabularies have their special tokens
WARM_UP_TOKENS = 2


class RefusedError(Exception):
    """The API did not answer as it should; the text holds its own words."""


class Client:
    """Makes `requests` requests, `concurrency` at a time, each of its own random prompt (no prefix is cached).

    order: url (the API's root), model, concurrency, requests, prompt_tokens, output_tokens, vocabulary (prompts take
    their tokens below it), seed, stream, timeout_s (of one request).
    """

    def __init__(self, order: dict[str, Any], key: str) -> None:
        self.order = order
        self.key = key
        self.rows: list[list[float]] = []
        self.errors: list[str] = []
        self._next = 0
        self._lock = threading.Lock()
        self._began = 0.0

    def run(self) -> dict[str, Any]:
        """Return what came of it.

        seconds: of all; rows: of each request that was answered, its start, first token and end in seconds since the
        first one's start (first token: null without streaming), and its tokens in and out; errors: of the others.
        """
        order = self.order
        try:
            self._ask(-1, WARM_UP_TOKENS)
        except (OSError, http.client.HTTPException, RefusedError) as error:
            return {"seconds": 0.0, "rows": [], "errors": [f"{type(error).__name__}: {error}"]}
        start = threading.Barrier(order["concurrency"] + 1)
        threads = [threading.Thread(target=self._work, args=(start,)) for _ in range(order["concurrency"])]
        for thread in threads:
            thread.start()
        self._began = time.monotonic()
        start.wait()
        for thread in threads:
            thread.join()
        return {"seconds": time.monotonic() - self._began, "rows": self.rows, "errors": self.errors}

    def _work(self, start: threading.Barrier) -> None:
        start.wait()
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
            if number >= self.order["requests"]:
                return
            try:
                row = self._ask(number, self.order["output_tokens"])
            except (OSError, http.client.HTTPException, RefusedError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            else:
                self.rows.append(row)

    def _ask(self, number: int, num_tokens: int) -> list[Any]:
        place = urlsplit(self.order["url"])
        body = json.dumps(self._body(number, num_tokens))
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = "Bearer " + self.key
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=self.order["timeout_s"])
        try:
            began = time.monotonic()
            connection.request("POST", "/v1/completions", body, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise RefusedError(f"HTTP {reply.status}: {reply.read(2000).decode('utf-8', 'replace')}")
            first, text = _read(reply)
            ended = time.monotonic()
        finally:
            connection.close()
        usage = usage_of(text, self.order["stream"])
        start, first, end = (round(at - self._began, 6) for at in (began, first, ended))
        # Without streaming all of it comes at once.
        return [start, first if self.order["stream"] else None, end, usage["prompt_tokens"], usage["completion_tokens"]]

    def _body(self, number: int, num_tokens: int) -> dict[str, Any]:
        order = self.order
        dice = random.Random(f"{order['seed']} {number}")
        body = {
            "model": order["model"],
            "prompt": [dice.randrange(FIRST_TOKEN, order["vocabulary"]) for _ in range(order["prompt_tokens"])],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if order["stream"]:
            body.update({"stream": True, "stream_options": {"include_usage": True}})
        return body


def _read(reply: http.client.HTTPResponse) -> tuple[float, str]:
    """Read to the end; return when the first bytes came, and the text. Nothing is looked at meanwhile."""
    data = [reply.read1(1 << 16)]
    first = time.monotonic()
    while data[-1]:
        data.append(reply.read1(1 << 16))
    return first, b"".join(data).decode("utf-8", "replace")


def usage_of(text: str, stream: bool) -> dict[str, int]:
    """Return the token counts at the end of an answer. Raises RefusedError when there are none."""
    lines = [line[len("data:") :] for line in text.splitlines() if line.startswith("data:")] if stream else [text]
    for line in reversed(lines):
        try:
            usage = json.loads(line).get("usage") or {}
            return {name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens")}
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
    raise RefusedError("no token counts in the answer: " + text[-500:])


def main() -> None:
    """Do what the command line orders."""
    key = os.environ.get(KEY_ENV, "")
    print("@load " + json.dumps(Client(json.loads(sys.argv[1]), key).run()))


if __name__ == "__main__":
    main()
