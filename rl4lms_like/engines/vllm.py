"""Generation by vLLM servers that have the policy's weights.

    prompt ids ─ POST /v1/completions ─> token ids, log-probs
    weights ─ weights_dir ─ POST /collective_rpc reload_weights, /reset_prefix_cache
    or adapters ─ weights_dir ─ POST /v1/load_lora_adapter
    or weights ─ `weight_transfer`

`server_engine` has what does not depend on the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Len
from pydantic import BaseModel, FiniteFloat

from rl4lms_like.engines.arguments import VllmArguments
from rl4lms_like.engines.server_engine import Completion, Sampling, ServerEngine, TokenId, parsed
from rl4lms_like.engines.weight_transfer import WeightTransfer
from rl4lms_like.system.errors import EngineError
from rl4lms_like.system.http_client import HttpClient


class _LogProb(BaseModel):
    logprob: FiniteFloat


class _LogProbs(BaseModel):
    token_logprobs: list[FiniteFloat]


class _Choice(BaseModel):
    token_ids: Annotated[list[TokenId], Len(1)]
    finish_reason: Literal["stop", "length"]
    logprobs: _LogProbs | None = None
    prompt_logprobs: list[dict[int, _LogProb] | None] | None = None


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Len(1, 1)]


class VllmEngine(ServerEngine):
    """Client of one or several vLLM servers; its arguments are those of `VllmArguments`."""

    id = "vllm"
    arguments_class = VllmArguments
    length_option = "--max-model-len"
    end_token_advice = "start the server with --generation-config vllm, and with the tokenizer of the run"
    log_prob_advice = "start it with --logprobs-mode processed_logprobs"
    arguments: VllmArguments
    transfer_backend: ClassVar[Literal["nccl", "gloo"]] = "nccl"
    """Backend of `sync: transfer`. vLLM has NCCL alone."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._transfer: WeightTransfer | None = None  # None before the first one

    def completions(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        servers: Sequence[HttpClient],
        *,
        record_log_prob: bool,
    ) -> list[Completion]:
        """Return a response to each prompt; see `ServerEngine.completions`."""
        # The end tokens of the run are the only ones. `logprobs: 0` asks for the log-prob of the sampled token alone.
        common = {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.end_tokens),
            "ignore_eos": True,
            "stop": list(sampling.stop_strings),
            "logprobs": 0 if record_log_prob else None,
        }
        bodies = []
        for row, prompt in enumerate(prompts):
            body = {**common, "prompt": prompt}
            if seeds is not None:
                body["seed"] = seeds[row]
            bodies.append(body)

        completions = []
        for choice in self._choices(bodies, servers):
            log_probs = choice.logprobs.token_logprobs if choice.logprobs else []
            completions.append(Completion(choice.token_ids, choice.finish_reason == "length", log_probs))
        return completions

    def log_probs(
        self, texts: Sequence[list[int]], n_last: Sequence[int], servers: Sequence[HttpClient]
    ) -> list[list[float]]:
        """Return the log-probs of the last tokens of each text; see `ServerEngine.log_probs`."""
        # A text is the prompt of a request, which has to generate at least one token.
        bodies = [{"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0} for ids in texts]
        choices = self._choices(bodies, servers)

        # One entry per token of the text: token id -> log-prob, of this token and perhaps of more probable ones.
        of_texts = []
        for choice, ids, n_tokens in zip(choices, texts, n_last, strict=True):
            start = len(ids) - n_tokens
            entries = (choice.prompt_logprobs or [])[start:]
            of_text = []
            for entry, token in zip(entries, ids[start:], strict=False):
                if entry and token in entry:
                    of_text.append(entry[token].logprob)
            of_texts.append(of_text)
        return of_texts

    def pass_on_weights(self, policy: Any) -> None:
        """Let all servers load the weights of the policy, from files or from its GPU."""
        if self.arguments.sync != "transfer":
            super().pass_on_weights(policy)
            return

        if self._transfer is None:
            if self.transfer_backend == "nccl" and policy.device.type != "cuda":
                raise EngineError(f"engine.args.sync: transfer needs the policy on a GPU, not on {policy.device}")

            # A repeated request would wait for tensors that were sent already.
            without_retries = [replace(server, retries=0) for server in self.servers]
            self._transfer = WeightTransfer(
                partial(self.post_each, servers=without_retries),
                n_servers=len(self.servers),
                n_workers=self.arguments.n_workers,
                backend=self.transfer_backend,
                device=policy.device,
                timeout_s=self.arguments.timeout,
            )
        self._transfer.send(policy.full_weights())
        self.post("/reset_prefix_cache")  # of older weights

    def load_weights(self, folder: Path) -> None:
        """Let all servers load weights, and drop the cache of prefixes, which has keys and values of older ones."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.post("/reset_prefix_cache")

    def load_adapters(self, name: str, folder: Path) -> None:
        """Let all servers load adapters."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapters(self, name: str) -> None:
        """Let all servers remove adapters."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def release_memory(self) -> None:
        """Let all servers move their weights to main memory, and drop the cache of keys and values."""
        self.post("/sleep?level=1")

    def resume_memory(self) -> None:
        """Let all servers move their weights back."""
        self.post("/wake_up")

    def _choices(self, bodies: Sequence[Mapping[str, Any]], servers: Sequence[HttpClient]) -> list[_Choice]:
        """Return the completion of each request by its server, in order."""
        # Ids instead of texts: decoding and encoding again does not always give the same tokens.
        common: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        if self.adapters is not None:
            common["model"] = self.adapters
        contents = self.answers("/v1/completions", [{**common, **body} for body in bodies], servers)
        return [parsed(_Answer, server, content).choices[0] for content, server in zip(contents, servers, strict=True)]
