"""A server with vLLM's protocol."""

from __future__ import annotations

from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rl4lms_like.engines.vllm import VllmEngine
from tests.engines.model_server import ModelServer, send


class GlooEngine(VllmEngine):
    """Engine that transfers weights by gloo, as the servers of these tests have no GPU."""

    transfer_backend = "gloo"


class VllmServer(ModelServer):
    """Loopback server.

    Attributes:
        received: names of the weights that were transferred, by request.
        load_transferred: False if they are received, but not loaded.
    """

    engine = "vllm"
    GENERATE = "/v1/completions"
    UPDATE: ClassVar[list[str]] = ["/collective_rpc", "/reset_prefix_cache"]
    LOAD_ADAPTERS, UNLOAD_ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    RELEASE, RESUME = "/sleep?level=1", "/wake_up"

    load_transferred = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.group: Any = None
        self.updating = False
        self.received: list[list[str]] = []

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Do what vLLM does."""
        if handler.path == self.GENERATE:
            with self.lock:
                content, status = self.generated(body)
            send(handler, content, status)
        elif handler.path == self.UPDATE[0]:
            assert body["method"] == "reload_weights"
            with self.lock:
                self.load(Path(body["kwargs"]["weights_path"]))
            send(handler, {"results": [None]})
        elif handler.path == self.LOAD_ADAPTERS:
            if self.load_adapters(body["lora_name"], body["lora_path"]):
                send(handler, b"Success: LoRA adapter added")
            else:
                send(handler, {"error": "already loaded"}, 400)
        elif handler.path == self.UNLOAD_ADAPTERS:
            with self.lock:
                del self.adapters[body["lora_name"]]
            send(handler, b"Success: LoRA adapter removed")
        elif handler.path in (self.RELEASE, self.RESUME):
            self.is_asleep = handler.path == self.RELEASE
            send(handler, {"status": "ok"})
        elif handler.path == self.UPDATE[1]:
            send(handler, {"success": True})
        elif handler.path in self.TRANSFER:
            try:
                self.TRANSFER[handler.path](self, body)
                send(handler, {"message": "done"})
            except RuntimeError as error:  # of gloo: another one of the group has failed
                send(handler, {"error": str(error)}, 500)
        else:
            send(handler, {"detail": "Not Found"}, 404)

    def generated(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the answer to a request for a completion, and its status."""
        return ({"error": "asleep"}, 400) if self.is_asleep else (self.completion(body), 200)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for a completion."""
        prompt = list(body["prompt"])
        adapters = body.get("model")
        sampled = self.sample(
            prompt,
            adapters=adapters,
            seed=body.get("seed"),
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body.get("min_tokens", 0),
            temperature=body["temperature"],
            top_k=body.get("top_k", 0),
            top_p=body.get("top_p", 1.0),
            ends=[*body.get("stop_token_ids", ()), self.own_end],
            stops=body.get("stop", ()),
        )
        reason = "stop" if sampled.is_stopped else "length"
        choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": sampled.ids, "prompt_token_ids": prompt}
        if body.get("logprobs") is not None:
            log_probs = sampled.of_model if self.returns_model_log_probs else sampled.as_sampled
            choice["logprobs"] = {"token_logprobs": log_probs, "tokens": [f"token_id:{token}" for token in sampled.ids]}
        if body.get("prompt_logprobs") is not None:
            log_probs = self.text_log_probs(prompt, adapters)
            later = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], log_probs, strict=True)]
            choice["prompt_logprobs"] = [None, *later]
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    @staticmethod
    def replace_tokens(content: dict[str, Any], ids: list[Any], log_probs: list[Any] | None) -> None:
        """Replace the tokens of an answer and their log-probs."""
        logprobs = None if log_probs is None else {"token_logprobs": log_probs}
        content["choices"][0].update(token_ids=ids, logprobs=logprobs)

    @staticmethod
    def replace_reason(content: dict[str, Any], reason: str | None) -> None:
        """Replace the reason for the end of an answer's response."""
        content["choices"][0]["finish_reason"] = reason

    # --- transfer of weights, as in vLLM 0.32, but by gloo ---

    def join(self, body: dict[str, Any]) -> None:
        """Join the trainer's group as its one worker."""
        assert self.group is None, "the earlier one was not left"
        info = body["init_info"]
        assert info.keys() == {"master_address", "master_port", "rank_offset", "world_size", "packed"}
        assert not info["packed"]
        store = dist.TCPStore(info["master_address"], info["master_port"], is_master=False)
        self.group = dist.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], timedelta(seconds=20))

    def leave(self, body: dict[str, Any]) -> None:
        """Leave the group; without one, nothing happens."""
        assert not self.updating
        self.group = None

    def start(self, body: dict[str, Any]) -> None:
        """Begin an update."""
        assert self.group is not None and not self.updating
        self.updating = True

    @torch.no_grad()
    def update(self, body: dict[str, Any]) -> None:
        """Receive tensors, and copy them into the model."""
        assert self.updating
        description = body["update_info"]
        assert description.keys() == {"names", "dtype_names", "shapes"}
        options = dist.BroadcastOptions()
        options.rootRank = 0
        weights = self.model.state_dict()
        for name, dtype, shape in zip(*(description[key] for key in ("names", "dtype_names", "shapes")), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], options).wait()
            if self.load_transferred:
                weights[name].copy_(tensor)
        self.received.append(description["names"])

    def finish(self, body: dict[str, Any]) -> None:
        """End an update."""
        assert self.updating
        self.updating = False

    TRANSFER: ClassVar[dict[str, Any]] = {
        "/shutdown_weight_transfer_engine": leave,
        "/init_weight_transfer_engine": join,
        "/start_weight_update": start,
        "/update_weights": update,
        "/finish_weight_update": finish,
    }
