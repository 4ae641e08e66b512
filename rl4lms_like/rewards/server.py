"""HTTP server of a reward, which several processes share by the reward `http` (`rl4lms-like serve-reward`).

    POST /    {"prompts": [n], "responses": [n], "references": [n][], "meta_infos": [n]}
              "images": [n][], if the prompts have some: `data:` URLs of image files
    200       {"rewards": [n]}
    4xx, 5xx  {"error": message}        400: the request is wrong; 500: the reward failed; 503: the server stops

    threads of requests ─ texts ─> queue ─ all that wait ─> one thread ─> reward ─ scores ─> the requests' threads

While the reward computes, further requests wait. Those that wait are then scored together, in one call.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

from rl4lms_like.core.pictures import Picture
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import DataPoolError, RL4LMsLikeError
from rl4lms_like.system.wording import raised

LARGEST_BODY = 2**26
"""Bytes of the body of a request."""
SILENT_S = 60.0
"""Seconds after which a connection without a request, or with half of one, is closed."""

Scores: TypeAlias = Callable[[Texts], Sequence[float]]


class StoppedError(RL4LMsLikeError):
    """Error of a request that the server did not score because it stops."""


class _Request(NamedTuple):
    texts: Texts
    scores: Future[list[float]]


class ScoringQueue:
    """Scores the texts of several threads in one thread, those that wait at the same time together.

    Args:
        score: returns one number for each text.
        max_texts: number of texts from which on no further request is added to a call; a request is never split.
    """

    def __init__(self, score: Scores, max_texts: int) -> None:
        self._score = score
        self._max_texts = max_texts
        self._waiting: queue.Queue[_Request | None] = queue.Queue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    def scores(self, texts: Texts) -> list[float]:
        """Return the scores of some texts; an exception is that of the reward, or a `StoppedError`."""
        request = _Request(texts, Future())
        self._waiting.put(request)
        if self._is_closed:  # perhaps after the thread has looked for the last time
            self._refuse_waiting()
        return request.scores.result()

    def close(self) -> None:
        """Wait for the call in progress; what waits gets a `StoppedError`."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join()
        self._refuse_waiting()

    def _work(self) -> None:
        while not self._is_closed:
            request = self._waiting.get()
            if request is None:
                return
            requests = [request]
            n_texts = len(request.texts.responses)

            # All requests that came during the last call.
            while n_texts < self._max_texts and not self._is_closed:
                try:
                    request = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if request is not None:
                    requests.append(request)
                    n_texts += len(request.texts.responses)
            self._answer(requests)

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Score some requests in one call, and after a failure one by one: only the cause of it shall fail."""
        has_images = any(request.texts.images is not None for request in requests)
        together = Texts([], [], [], [], [] if has_images else None)
        for request in requests:
            together.prompts.extend(request.texts.prompts)
            together.responses.extend(request.texts.responses)
            together.references.extend(request.texts.references)
            together.metas.extend(request.texts.metas)
            if together.images is not None:
                together.images.extend(request.texts.images or [()] * len(request.texts.responses))
        try:
            scores = [float(score) for score in self._score(together)]
        except Exception as error:
            if len(requests) == 1:
                requests[0].scores.set_exception(error)
                return
            for request in requests:
                self._answer([request])
            return

        start = 0
        for request in requests:
            end = start + len(request.texts.responses)
            request.scores.set_result(scores[start:end])
            start = end

    def _refuse_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                request = self._waiting.get_nowait()
                if request is not None:
                    request.scores.set_exception(StoppedError("the server stops"))


class RewardServer(ThreadingHTTPServer):
    """Server of the reward `http`; listens from the start, and answers in `serve_forever`.

    Args:
        score: returns one finite number for each text.
        host: address to listen on.
        port: its port; 0 for any free one.
        max_texts: see `ScoringQueue`.

    Raises:
        RL4LMsLikeError: the address cannot be used.
    """

    daemon_threads = True  # idle connections of clients do not keep the process alive
    request_queue_size = 128

    def __init__(self, score: Scores, *, host: str, port: int, max_texts: int) -> None:
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise RL4LMsLikeError(f"cannot listen on {host}, port {port}: {raised(error)}") from error
        self.scoring = ScoringQueue(score, max_texts)

    @property
    def url(self) -> str:
        """Address for the reward `http` on this machine."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def server_close(self) -> None:
        """Stop to listen, and wait for the call in progress."""
        super().server_close()
        if hasattr(self, "scoring"):  # not if the address cannot be used
            self.scoring.close()


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = SILENT_S

    def handle(self) -> None:
        with suppress(OSError):  # the client has given up
            super().handle()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path.partition("?")[0] != "/":
            return self._refuse(404, f"there is nothing at {self.path!r}; send requests to /")
        if not length.isdecimal():
            return self._refuse(411, "the request has no Content-Length")
        if int(length) > LARGEST_BODY:
            return self._refuse(413, f"the request has more than {LARGEST_BODY} bytes; send fewer texts (batch_size)")

        try:
            texts = texts_of_request(self.rfile.read(int(length)))
        except ValueError as error:
            return self._answer(400, {"error": str(error)})
        try:
            scores = self.server.scoring.scores(texts) if texts.responses else []
        except StoppedError as error:
            return self._refuse(503, str(error))
        except Exception as error:
            return self._answer(500, {"error": raised(error)})
        return self._answer(200, {"rewards": scores})

    def do_GET(self) -> None:
        self._refuse(405, 'send a POST with {"prompts": [...], "responses": [...]}')

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the base class refuses, such as an unknown method, in the form of the other errors."""
        self._refuse(code, message or HTTPStatus(code).phrase)

    def _refuse(self, status: int, message: str) -> None:
        # The body was not read, and would be taken for the next request of the connection.
        self.close_connection = True
        self._answer(status, {"error": message})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


def texts_of_request(body: bytes) -> Texts:
    """Return the texts in the body of a request; a `ValueError` says what is wrong with it."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the body is no JSON object with prompts and responses")

    # Only `prompts` and `responses` are needed by a classifier.
    columns: dict[str, Any] = {name: content.get(name) for name in ("prompts", "responses")}
    n_texts = len(columns["responses"]) if isinstance(columns["responses"], list) else 0
    columns["references"] = content.get("references") or [[] for _ in range(n_texts)]
    columns["meta_infos"] = content.get("meta_infos") or [None] * n_texts

    for name, (is_valid, expected) in _COLUMNS.items():
        values = columns[name]
        if not isinstance(values, list) or not all(is_valid(value) for value in values):
            raise ValueError(f"{name}: expected a list of {expected}")
        if len(values) != n_texts:
            raise ValueError(f"{name}: has {len(values)} entries for {n_texts} responses")
    images = None if content.get("images") is None else _images_of_request(content["images"], n_texts)
    return Texts(columns["prompts"], columns["responses"], columns["references"], columns["meta_infos"], images)


def _images_of_request(images: Any, n_texts: int) -> list[tuple[Picture, ...]]:
    if not isinstance(images, list) or len(images) != n_texts or not all(isinstance(urls, list) for urls in images):
        raise ValueError(f"images: expected a list of {n_texts} lists of `data:` URLs")
    pictures = []
    for urls in images:
        # Not a path: a request must not make the server read its own files.
        if not all(isinstance(url, str) and url.startswith("data:") for url in urls):
            raise ValueError("images: expected lists of `data:` URLs")
        try:
            pictures.append(tuple(Picture.of(url) for url in urls))
        except DataPoolError as error:
            raise ValueError(f"images: {error}") from error
    return pictures


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_COLUMNS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "responses": (lambda value: isinstance(value, str), "texts"),
    "prompts": (lambda value: isinstance(value, str), "texts"),
    "references": (_is_list_of_texts, "lists of texts"),
    "meta_infos": (lambda value: value is None or isinstance(value, dict), "objects or null"),
}
"""Name of a list -> whether a value may be in it, and what is expected, in words."""
