"""A server with the protocol of SGLang 0.5.23."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

from tests.engines.model_server import ModelServer, send

PARAMETERS = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos"),
    *("stop", "sampling_seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
}
ALL_TOKENS = 2**30
MOST_TOKENS = 4096
"""Default of `--sampling-mask-max-tokens`."""


class SglangServer(ModelServer):
    """Loopback server.

    Attributes:
        deterministic: it samples with the seeds of requests (`--enable-deterministic-inference`).
    """

    engine = "sglang"
    GENERATE = "/generate"
    UPDATE: ClassVar[list[str]] = ["/update_weights_from_disk"]
    LOAD_ADAPTERS, UNLOAD_ADAPTERS = "/load_lora_adapter", "/unload_lora_adapter"
    RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"

    deterministic = True

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Do what SGLang does."""
        if handler.path == self.GENERATE:
            with self.lock:
                content, status = self.generated(body)
            send(handler, content, status)
        elif handler.path == self.UPDATE[0]:
            assert set(body) == {"model_path", "flush_cache"} and body["flush_cache"]
            with self.lock:
                self.load(Path(body["model_path"]))
            message = "Succeeded to update model weights."
            send(handler, {"success": True, "message": message, "num_paused_requests": 0})
        elif handler.path == self.LOAD_ADAPTERS:
            if self.load_adapters(body["lora_name"], body["lora_path"]):
                send(handler, {"success": True, "error_message": None, "loaded_adapters": {}})
            else:
                send(handler, {"success": False, "error_message": "it is already loaded"}, 400)
        elif handler.path == self.UNLOAD_ADAPTERS:
            with self.lock:
                del self.adapters[body["lora_name"]]
            send(handler, {"success": True, "error_message": None, "loaded_adapters": {}})
        elif handler.path in (self.RELEASE, self.RESUME):
            self.is_asleep = handler.path == self.RELEASE
            send(handler, None)
        else:
            send(handler, {"detail": "Not Found"}, 404)

    def generated(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the answer to a request for a response, and its status."""
        parameters = body["sampling_params"]
        assert set(parameters) <= PARAMETERS
        top_k = parameters.get("top_k", -1)
        top_k = ALL_TOKENS if top_k == -1 else top_k
        if parameters["temperature"] == 0:
            top_k = 1
        adapters = body.get("lora_path")
        with_mask = body.get("return_sampling_mask", False)
        if self.is_asleep:
            return {"error": {"message": "no memory"}}, 400
        if adapters is not None and adapters not in self.adapters:
            return {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapters}"}}, 400
        if with_mask and top_k > MOST_TOKENS:
            return {"error": {"message": f"return_sampling_mask requires finite 1 < top_k <= {MOST_TOKENS}"}}, 400

        # `ignore_eos` ignores the end tokens of the request too.
        ends = [*parameters.get("stop_token_ids", ()), self.own_end]
        if parameters.get("ignore_eos", False):
            ends = []
        prompt = list(body["input_ids"])
        sampled = self.sample(
            prompt,
            adapters=adapters,
            seed=parameters.get("sampling_seed", 42) if self.deterministic else None,
            max_new_tokens=parameters["max_new_tokens"],
            min_new_tokens=parameters.get("min_new_tokens", 0),
            temperature=parameters["temperature"],
            top_k=0 if top_k == ALL_TOKENS else top_k,
            top_p=parameters.get("top_p", 1.0),
            ends=ends,
            stops=parameters.get("stop", ()),
        )
        reason: dict[str, Any] = {"type": "length", "length": parameters["max_new_tokens"]}
        if sampled.is_stopped:
            reason = {"type": "stop", "matched": sampled.ids[-1]}
        meta_info: dict[str, Any] = {"id": "1", "finish_reason": reason, "prompt_tokens": len(prompt)}

        # Neither has top_k; `at_temperature` is that of the model if greedy.
        if body.get("return_logprob"):
            log_probs = sampled.of_model if self.returns_model_log_probs else sampled.at_temperature
            entries = [[value, token, None] for value, token in zip(log_probs, sampled.ids, strict=True)]
            meta_info["output_token_logprobs"] = entries
            start = body.get("logprob_start_len", -1)
            meta_info["input_token_logprobs"] = [] if start == -1 else self.input_log_probs(prompt, start, adapters)
        if with_mask:
            meta_info["output_token_sampling_mask"] = [[token] for token in sampled.ids]
            meta_info["output_token_sampling_logprobs"] = sampled.as_sampled
        return {"text": "", "output_ids": sampled.ids, "meta_info": meta_info}, 200

    def input_log_probs(self, prompt: list[int], start: int, adapters: str | None) -> list[list[Any]]:
        """Return the entries of the tokens from `start` on; the first has no log-prob, also if it is not token 0."""
        values = [None, *self.text_log_probs(prompt, adapters)[start:]]
        last = self.model.config.vocab_size - 1
        return [
            [value, token if token < last else 0, None] for value, token in zip(values, prompt[start:], strict=True)
        ]

    @staticmethod
    def replace_tokens(content: dict[str, Any], ids: list[Any], log_probs: list[Any] | None) -> None:
        """Replace the tokens of an answer and their log-probs."""
        content["output_ids"] = ids
        content["meta_info"]["output_token_logprobs"] = None
        if log_probs is not None:
            entries = [[value, token, None] for value, token in zip(log_probs, ids, strict=False)]
            content["meta_info"]["output_token_logprobs"] = entries

    @staticmethod
    def replace_reason(content: dict[str, Any], reason: str | None) -> None:
        """Replace the reason for the end of an answer's response."""
        content["meta_info"]["finish_reason"] = None if reason is None else {"type": reason}
