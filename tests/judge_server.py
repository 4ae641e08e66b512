"""Chat endpoint on this machine, in the format of OpenAI's, whose answers a test writes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answer(Exception):  # noqa: N818  (raised by an answer function instead of returning a text)
    """Answer that is not a chat message.

    Args:
        status: of the response.
        content: body of the response.
        headers: of the response.
    """

    def __init__(self, status: int = 200, content: Any = "busy", **headers: str) -> None:
        self.status, self.content, self.headers = status, content, headers


def varied(body: dict[str, Any]) -> str:
    """Return an answer with a score, another score, JSON and a winner, all of which depend on the whole request."""
    digest = hashlib.sha256(json.dumps(body).encode()).digest()
    score, other, in_json = (1 + byte % 10 for byte in digest[:3])
    return f'Score: {score}, other: {other}, {{"score": {in_json}}}. Winner: {"AB"[digest[3] % 2]}'


class JudgeServer:
    """Server on loopback.

    Args:
        answer: returns the text of the answer to a request, or raises `Answer`.

    Attributes:
        bodies: the requests, in the order of their arrival.
        headers: their headers.
        most_at_once: maximum number of concurrent requests.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], str | None] = varied) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    judge.bodies.append(body)
                    judge.headers.append(dict(self.headers))
                    judge.at_once += 1
                    judge.most_at_once = max(judge.most_at_once, judge.at_once)
                status, headers = (200, {}) if self.path == "/v1/chat/completions" else (404, {})
                try:
                    message = {"role": "assistant", "content": judge.answer(body)}
                    content: Any = {"choices": [{"index": 0, "message": message}]}
                except Answer as other:
                    status, content, headers = other.status, other.content, other.headers
                with judge.lock:
                    judge.at_once -= 1
                sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(sent))}.items():
                        self.send_header(name.replace("_", "-"), value)
                    self.end_headers()
                    self.wfile.write(sent)
                except OSError:  # the client has given up
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def messages(self) -> list[str]:
        """Texts of the requests."""
        return [body["messages"][0]["content"] for body in self.bodies]


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], str | None] = varied) -> Iterator[JudgeServer]:
    """Yield a server that is stopped afterwards."""
    judge = JudgeServer(answer)
    try:
        yield judge
    finally:
        judge.server.shutdown()
        judge.server.server_close()
