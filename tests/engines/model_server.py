"""A server with real log-probs of a tiny model; a subclass answers as the servers of one protocol do.

A reload does not tie weights again, as in vLLM.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TopKLogitsWarper, TopPLogitsWarper

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def send(handler: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class Sampled(NamedTuple):
    """A sampled response with the log-probs of its tokens by the model, at the temperature and as sampled."""

    ids: list[int]
    of_model: list[float]
    at_temperature: list[float]
    as_sampled: list[float]
    is_stopped: bool


class ModelServer:
    """Loopback server.

    Args:
        folder: of its model.

    Attributes:
        engine: id of the engine that is its client.
        GENERATE: path of the requests for responses.
        UPDATE: paths of the requests that load weights, in order.
        LOAD_ADAPTERS: path of the request that loads adapters.
        UNLOAD_ADAPTERS: path of the request that removes them.
        RELEASE: path of the request that releases memory.
        RESUME: path of the request that allocates it again.
        url: its address.
        requests: path and body of each request, in order.
        n_sampled: number of tokens that were sampled.
        answers: path -> the function that answers in place of the server.
        own_end: token that ends all responses, as a checkpoint's generation config may have one.
        returns_model_log_probs: log-probs are those of the model, not of the distribution that is sampled from.
        adapters: name -> model with the adapters that were loaded under this name.
    """

    engine: ClassVar[str]
    GENERATE: ClassVar[str]
    UPDATE: ClassVar[list[str]]
    LOAD_ADAPTERS: ClassVar[str]
    UNLOAD_ADAPTERS: ClassVar[str]
    RELEASE: ClassVar[str]
    RESUME: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        # `from_pretrained` is not for threads: while it loads, it switches the tying of weights off for all models.
        self.base: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model: Any = copy.deepcopy(self.base)
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.n_sampled = 0
        self.answers: dict[str, Answer] = {}
        self.own_end, self.is_asleep, self.returns_model_log_probs = None, False, False
        self.lock = threading.Lock()
        self.adapters = dict[str, Any]()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    owner.requests.append((self.path, body))
                try:
                    owner.answers.get(self.path, owner.answer)(self, body)
                except OSError:
                    self.close_connection = True  # the client has given up

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Stop listening, which frees the port."""
        self.server.shutdown()
        self.server.server_close()

    def paths(self) -> list[str]:
        """The paths of all requests."""
        return [path for path, _ in self.requests]

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Do what a server of the protocol does."""
        raise NotImplementedError

    def generated(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the answer to a request for a response, and its status."""
        raise NotImplementedError

    @staticmethod
    def replace_tokens(content: dict[str, Any], ids: list[Any], log_probs: list[Any] | None) -> None:
        """Replace the tokens of an answer and their log-probs."""
        raise NotImplementedError

    @staticmethod
    def replace_reason(content: dict[str, Any], reason: str | None) -> None:
        """Replace the reason for the end of an answer's response."""
        raise NotImplementedError

    def changed(self, change: Callable[[dict[str, Any]], Any]) -> Answer:
        """Return a function that answers requests for responses with a changed answer."""

        def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
            content, status = self.generated(body)
            change(content)
            send(handler, content, status)

        return answer

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Copy the weights that the files have; the others stay as they are."""
        stored = load_file(folder / "model.safetensors")
        for name, weight in self.model.named_parameters():
            if name in stored:
                weight.copy_(stored[name])

    def load_adapters(self, name: str, folder: str) -> bool:
        """Load adapters under a new name; a known one is refused."""
        from peft import PeftModel

        if name in self.adapters:
            return False
        with self.lock:
            self.adapters[name] = PeftModel.from_pretrained(copy.deepcopy(self.base), folder).eval()
        return True

    @torch.no_grad()
    def sample(
        self,
        prompt: Sequence[int],
        *,
        adapters: str | None,
        seed: int | None,
        max_new_tokens: int,
        min_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        ends: Sequence[int | None],
        stops: Sequence[str],
    ) -> Sampled:
        """Return a response; a temperature of 0 is greedy."""
        model = self.model if adapters is None else self.adapters[adapters]
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        sampled = Sampled([], [], [], [], False)
        for length in range(max_new_tokens):
            logits = model(input_ids=torch.tensor([[*prompt, *sampled.ids]])).logits[:, -1]
            if length < min_new_tokens:
                logits[:, [end for end in ends if end is not None]] = -torch.inf
            scaled = logits / (temperature or 1.0)
            shaped = TopKLogitsWarper(top_k)(None, scaled) if top_k else scaled
            shaped = TopPLogitsWarper(top_p)(None, shaped) if top_p < 1 else shaped
            weights = shaped.softmax(dim=-1)
            drawn = weights.argmax() if temperature == 0 else torch.multinomial(weights[0], 1, generator=generator)
            token = int(drawn)

            sampled.ids.append(token)
            self.n_sampled += 1
            distributions = (logits, scaled, shaped)
            for log_probs, distribution in zip(sampled[1:4], distributions, strict=True):
                log_probs.append(float(distribution.log_softmax(dim=-1)[0, token]))
            text = self.tokenizer.decode(sampled.ids, skip_special_tokens=True)
            if token in ends or any(stop in text for stop in stops):
                return sampled._replace(is_stopped=True)
        return sampled

    @torch.no_grad()
    def text_log_probs(self, ids: Sequence[int], adapters: str | None) -> list[float]:
        """Return the log-probs of all tokens of a text but its first one."""
        model = self.model if adapters is None else self.adapters[adapters]
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        return [float(log_probs[i, token]) for i, token in enumerate(ids[1:])]
