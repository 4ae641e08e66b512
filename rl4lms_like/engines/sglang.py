"""Generation by SGLang servers that have the policy's weights.

    prompt ids ─ POST /generate ─> token ids, log-probs
    weights ─ weights_dir ─ POST /update_weights_from_disk
    or adapters ─ weights_dir ─ POST /load_lora_adapter

`server_engine` has what does not depend on the protocol. The names of fields are those of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Len
from pydantic import BaseModel, FiniteFloat

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.engines.arguments import SglangArguments
from rl4lms_like.engines.server_engine import Completion, Sampling, ServerEngine, TokenId, parsed, server_error
from rl4lms_like.system.http_client import HttpClient

logger = logging.getLogger(__name__)

NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters without effect, which replace those that a server was started with."""


class _FinishReason(BaseModel):
    type: Literal["stop", "length"]


class _MetaInfo(BaseModel):
    finish_reason: _FinishReason
    # Log-prob, token and its text, which is null unless it is asked for.
    output_token_logprobs: list[tuple[FiniteFloat, TokenId, Any]] | None = None
    input_token_logprobs: list[tuple[FiniteFloat | None, int, Any]] | None = None
    output_token_sampling_logprobs: list[FiniteFloat] | None = None


class _Answer(BaseModel):
    output_ids: Annotated[list[TokenId], Len(1)]
    meta_info: _MetaInfo


class SglangEngine(ServerEngine):
    """Client of one or several SGLang servers; its arguments are those of `SglangArguments`."""

    id = "sglang"
    arguments_class = SglangArguments
    length_option = "--context-length"
    end_token_advice = (
        "SGLang also ends them with the end tokens of its tokenizer and of the model's config.json and "
        "generation_config.json; start it with the tokenizer of the run, and without other end tokens in these files"
    )
    log_prob_advice = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

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
        # The usual log-probs of output tokens are those at the temperature, before `top_k`. Those after it are returned
        # together with the tokens that `top_k` leaves, whose number has a limit; hence only where the two differ.
        is_truncated = sampling.temperature > 0 and sampling.top_k > 0
        common = {
            "return_logprob": record_log_prob and not is_truncated,
            "return_sampling_mask": record_log_prob and is_truncated,
        }

        # `ignore_eos` ignores all end tokens, also those of the run, so it is set only if the run has none. A `top_k`
        # of -1 is no truncation.
        parameters = {
            **NEUTRAL,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.end_tokens),
            "ignore_eos": not sampling.end_tokens,
            "stop": list(sampling.stop_strings),
        }

        # Without a seed, a server that computes deterministically would give all of them the same one.
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts),)).tolist()
        bodies = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            bodies.append({**common, "input_ids": prompt, "sampling_params": {**parameters, "sampling_seed": seed}})

        completions = []
        for answer, server in zip(self._generated(bodies, servers), servers, strict=True):
            if is_truncated:
                log_probs = answer.meta_info.output_token_sampling_logprobs or []
            else:
                log_probs = _token_log_probs(answer, server)
            reached_limit = answer.meta_info.finish_reason.type == "length"
            completions.append(Completion(answer.output_ids, reached_limit, log_probs))
        return completions

    def log_probs(
        self, texts: Sequence[list[int]], n_last: Sequence[int], servers: Sequence[HttpClient]
    ) -> list[list[float]]:
        """Return the log-probs of the last tokens of each text; see `ServerEngine.log_probs`."""
        # A text is the prompt of a request. The first entry from `logprob_start_len` on has no log-prob.
        bodies = []
        for ids, n_tokens in zip(texts, n_last, strict=True):
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
            bodies.append({**body, "return_logprob": True, "logprob_start_len": len(ids) - n_tokens - 1})

        # The ids of the entries are not compared: SGLang answers with 0 in place of the last one of the vocabulary.
        of_texts = []
        for answer, n_tokens in zip(self._generated(bodies, servers), n_last, strict=True):
            entries = (answer.meta_info.input_token_logprobs or [])[-n_tokens:]
            of_texts.append([log_prob for log_prob, _, _ in entries if log_prob is not None])
        return of_texts

    def load_weights(self, folder: Path) -> None:
        """Let all servers load weights, and drop the cache of prefixes, which has keys and values of older ones."""
        self.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})

    def load_adapters(self, name: str, folder: Path) -> None:
        """Let all servers load adapters."""
        self.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapters(self, name: str) -> None:
        """Let all servers remove adapters."""
        self.post("/unload_lora_adapter", {"lora_name": name})

    def release_memory(self) -> None:
        """Let all servers release the memory of weights, keys and values."""
        self.post("/release_memory_occupation")

    def resume_memory(self) -> None:
        """Let all servers allocate the memory again, with the weights that they had if they kept a copy."""
        self.post("/resume_memory_occupation")

    def first_probe(self, policy: Any) -> EpisodeBatch:
        """Return a few texts of the servers, and log a warning for each server that ignores seeds."""
        probe = super().first_probe(policy)
        again = self.probe_texts(policy)
        for server, rows in self.rows_of_servers(probe.n_episodes):
            if not torch.equal(probe.response_ids[rows], again.response_ids[rows]):
                message = "the engine %s ignores seeds, so that a run is not repeatable, nor a resumed run equal to it"
                logger.warning(f"{message}: start it with --enable-deterministic-inference", server.url)
        return probe

    def _generated(self, bodies: Sequence[Mapping[str, Any]], servers: Sequence[HttpClient]) -> list[_Answer]:
        """Return the answer to each request by its server, in order."""
        adapters = {} if self.adapters is None else {"lora_path": self.adapters}
        contents = self.answers("/generate", [{**body, **adapters} for body in bodies], servers)
        return [parsed(_Answer, server, content) for content, server in zip(contents, servers, strict=True)]


def _token_log_probs(answer: _Answer, server: HttpClient) -> list[float]:
    """Return the log-probs of the tokens of an answer, before `top_k`; none if it has none."""
    entries = answer.meta_info.output_token_logprobs or []
    if entries and [token for _, token, _ in entries] != answer.output_ids:
        raise server_error(server, "answered with log-probs of other tokens than it generated")
    return [log_prob for log_prob, _, _ in entries]
