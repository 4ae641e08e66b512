"""A server with vLLM's protocol and real log-probs of a tiny model. As in vLLM, a reload does not tie weights again."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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


class VllmServer:
    """Loopback server.

    Args:
        folder: of its model.

    Attributes:
        url: its address.
        requests: path and body of each request, in order.
        answers: path -> the function that answers in place of the server.
        processed: log-probs are those of the sampled distribution (`--logprobs-mode processed_logprobs`).
        own_end: token that ends all responses, as a checkpoint's generation config may have one.
        adapters: name -> model with the adapters that were loaded under this name.
    """

    def __init__(self, folder: Path) -> None:
        # `from_pretrained` is not for threads: while it loads, it switches the tying of weights off for all models.
        self.base: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model: Any = copy.deepcopy(self.base)
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Answer] = {}
        self.processed, self.own_end, self.is_asleep = True, None, False
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
        """Do what vLLM does."""
        if handler.path == "/v1/completions":
            with self.lock:
                send(handler, {"error": "asleep"}, 400) if self.is_asleep else send(handler, self.completion(body))
        elif handler.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            with self.lock:
                self.load(Path(body["kwargs"]["weights_path"]))
            send(handler, {"results": [None]})
        elif handler.path == "/v1/load_lora_adapter":
            # As in vLLM, a name that is known is refused.
            if body["lora_name"] in self.adapters:
                send(handler, {"error": "already loaded"}, 400)
                return
            from peft import PeftModel

            with self.lock:
                base = copy.deepcopy(self.base)
                self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
            send(handler, b"Success: LoRA adapter added")
        elif handler.path == "/v1/unload_lora_adapter":
            with self.lock:
                del self.adapters[body["lora_name"]]
            send(handler, b"Success: LoRA adapter removed")
        elif handler.path in ("/sleep?level=1", "/wake_up"):
            self.is_asleep = handler.path != "/wake_up"
            send(handler, {"status": "ok"})
        elif handler.path == "/reset_prefix_cache":
            send(handler, {"success": True})
        else:
            send(handler, {"detail": "Not Found"}, 404)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Copy the weights that the files have; the others stay as they are."""
        found = load_file(folder / "model.safetensors")
        for name, weight in self.model.named_parameters():
            if name in found:
                weight.copy_(found[name])

    @torch.no_grad()
    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for a completion."""
        prompt, generator = list(body["prompt"]), torch.Generator()
        generator.manual_seed(body["seed"]) if body.get("seed") is not None else generator.seed()
        ids: list[int] = []
        log_probs: list[float] = []
        reason = "length"
        model = self.adapters[body["model"]] if "model" in body else self.model
        while len(ids) < body["max_tokens"] and reason == "length":
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[:, -1]
            shaped = self.shaped(logits, body, len(ids))
            weights = shaped.softmax(dim=-1)
            greedy = body["temperature"] == 0
            token = int(weights.argmax() if greedy else torch.multinomial(weights[0], 1, generator=generator))
            ids.append(token)
            log_probs.append(float((shaped if self.processed else logits).log_softmax(dim=-1)[0, token]))
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            ends = [*body.get("stop_token_ids", ()), self.own_end]
            if token in ends or any(stop in text for stop in body.get("stop", ())):
                reason = "stop"
        choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": ids, "prompt_token_ids": prompt}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": log_probs, "tokens": [f"token_id:{token}" for token in ids]}
        if body.get("prompt_logprobs") is not None:
            own = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            later = [{str(token): {"logprob": float(own[i, token])}} for i, token in enumerate(prompt[1:])]
            choice["prompt_logprobs"] = [None, *later]
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    def shaped(self, logits: torch.Tensor, body: dict[str, Any], length: int) -> torch.Tensor:
        """Return the logits `[1, vocab]` after the sampling parameters."""
        shaped = logits / (body["temperature"] or 1.0)
        if length < body.get("min_tokens", 0):
            shaped[:, body["stop_token_ids"]] = -torch.inf
        if body.get("top_k"):
            shaped = TopKLogitsWarper(body["top_k"])(None, shaped)
        if body.get("top_p", 1.0) < 1:
            shaped = TopPLogitsWarper(body["top_p"])(None, shaped)
        return shaped
