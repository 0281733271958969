"""The head's HTTP API, and the chain behind it: API server, engine core, rank 0, all other ranks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .gang import Line
from .script import Script

PROMPT_TOKENS = 5


class Engine:
    """The API server's end of the chain, and the numbers that /metrics shows."""

    def __init__(self, script: Script, name: str, core: socket.socket) -> None:
        self.script = script
        self.name = name
        self._core = Line(core)
        self._one = threading.Lock()  # of the chain
        self._count = threading.Lock()
        self.asked = self.running = self.finished = self.prompt_tokens = self.generation_tokens = 0

    def wait_ready(self) -> None:
        """Wait until all ranks of this node are warm; never returns when the core is gone before."""
        self._core.receive()

    def complete(self, num_tokens: int) -> str:
        """Make an answer of that many tokens. Raises RuntimeError when the engine is dead."""
        with self._count:
            self.asked += 1
        try:
            with self._one:
                with self._count:
                    self.running += 1
                self._core.send({"step": num_tokens})
                if "failed" in self._core.receive():
                    raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        except OSError:
            raise RuntimeError("EngineDeadError: the engine core is gone") from None
        with self._count:
            self.asked -= 1
            self.running -= 1
            self.finished += 1
            self.prompt_tokens += PROMPT_TOKENS
            self.generation_tokens += num_tokens
        return " word" * num_tokens

    def metrics(self) -> str:
        """What vLLM 0.32 shows under /metrics, as far as anybody here reads it."""
        waiting = self.asked - self.running
        values = [
            ("gauge", "vllm:num_requests_running", self.running),
            ("gauge", "vllm:num_requests_waiting", waiting),
            ("gauge", "vllm:kv_cache_usage_perc", min(1.0, self.asked / 64)),
            ("counter", "vllm:num_preemptions_total", 0),
            ("counter", "vllm:prompt_tokens_total", self.prompt_tokens),
            ("counter", "vllm:generation_tokens_total", self.generation_tokens),
            ("counter", 'vllm:request_success_total{finished_reason="length"}', self.finished),
        ]
        lines = []
        for kind, name, value in values:
            plain, _, more = name.partition("{")
            labels = ",".join(filter(None, ['engine="0"', more.rstrip("}"), f'model_name="{self.name}"']))
            lines += [f"# HELP {plain} Scripted.", f"# TYPE {plain} {kind}", f"{plain}{{{labels}}} {float(value)}"]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM's API server does."""

    engine: Engine
    key = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """/health, /metrics and /v1/models."""
        if self.path == "/health":
            self._answer(200, "", "text/plain")
        elif self.path == "/metrics":
            self._answer(200, self.engine.metrics(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models" and self._permitted():
            self._answer(200, json.dumps({"object": "list", "data": [{"id": self.engine.name, "object": "model"}]}))
        elif self.path != "/v1/models":
            self._answer(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        """/v1/completions and /v1/chat/completions."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._answer(404, json.dumps({"detail": "Not Found"}))
            return
        if not self._permitted():
            return
        num_tokens = int(body.get("max_tokens") or 16)
        try:
            text = self.engine.complete(num_tokens)
        except RuntimeError as error:
            self._answer(500, json.dumps({"error": {"message": str(error), "type": "InternalServerError"}}))
            return
        chat = self.path.startswith("/v1/chat")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        if body.get("return_token_ids"):
            choice["token_ids"] = [1] * num_tokens
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_tokens}
        answer = {"id": "cmpl-1", "model": self.engine.name, "choices": [choice], "usage": usage}
        if body.get("stream"):
            self._stream(answer)
        else:
            self._answer(200, json.dumps(answer))

    def _stream(self, answer: dict[str, Any]) -> None:
        """Answer in two events, the counts in the second one, as with `include_usage`."""
        first = {**answer, "usage": None}
        events = [json.dumps(first), json.dumps({**answer, "choices": []}), "[DONE]"]
        self._answer(200, "".join(f"data: {event}\n\n" for event in events), "text/event-stream; charset=utf-8")

    def _permitted(self) -> bool:
        if not self.key or self.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self._answer(401, json.dumps({"error": "Unauthorized"}))
        return False

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log the request as uvicorn does."""
        self.engine.script.say(f"{self.client_address[0]} - {format % args}")


class Server(ThreadingHTTPServer):
    """Takes many requests at once, as a real one does."""

    request_queue_size = 256
    daemon_threads = True


def start(script: Script, arguments: dict[str, Any], core: socket.socket) -> None:
    """Serve in threads of this process, once the engine is ready."""
    threading.Thread(target=_start, args=(script, arguments, core), daemon=True).start()


def _start(script: Script, arguments: dict[str, Any], core: socket.socket) -> None:
    engine = Engine(script, str(arguments.get("served_model_name", arguments["model"])), core)
    try:
        engine.wait_ready()
    except OSError:
        return  # the main thread sees the end of the core
    script.say("GPU KV cache size: 1,024 tokens")
    script.reach("api")
    host, port = str(arguments.get("host", "0.0.0.0")), int(arguments.get("port", 8000))
    key = arguments.get("api_key") or os.environ.get("VLLM_API_KEY", "")
    handler = type("OurHandler", (Handler,), {"engine": engine, "key": key})
    try:
        server = Server((host, port), handler)
    except OSError as error:
        script.trace("API server failed.", f"OSError: {error}")
        os._exit(1)
    script.say(f"Starting vLLM server on http://{host}:{port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script.say("Application startup complete.")
    script.reach("serve")


def pass_on(script: Script, asked: socket.socket, steps: socket.socket) -> None:
    """The engine core's part, in a thread: each request of the API server becomes a step of rank 0."""
    threading.Thread(target=_pass_on, args=(script, Line(asked), Line(steps)), daemon=True).start()


def _pass_on(script: Script, asked: Line, steps: Line) -> None:
    try:
        asked.send(steps.receive())
        while True:
            request = asked.receive()
            time.sleep(float(script.token_s) * int(request["step"]))
            steps.send({"step": 1})
            asked.send(steps.receive())
    except OSError:
        return  # whoever is gone: the watching thread, or nobody, ends this process
