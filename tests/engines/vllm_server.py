"""A server with vLLM's protocol."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.engines.model_server import ModelServer, send

__all__ = ["VllmServer", "send"]


class VllmServer(ModelServer):
    """Loopback server.

    Attributes:
        processed: log-probs are those of the sampled distribution (`--logprobs-mode processed_logprobs`).
    """

    processed = True

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
            if self.load_adapters(body["lora_name"], body["lora_path"]):
                send(handler, b"Success: LoRA adapter added")
            else:
                send(handler, {"error": "already loaded"}, 400)
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
            log_probs = sampled.as_sampled if self.processed else sampled.of_model
            choice["logprobs"] = {"token_logprobs": log_probs, "tokens": [f"token_id:{token}" for token in sampled.ids]}
        if body.get("prompt_logprobs") is not None:
            log_probs = self.text_log_probs(prompt, adapters)
            later = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], log_probs, strict=True)]
            choice["prompt_logprobs"] = [None, *later]
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
