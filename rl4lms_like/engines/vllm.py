"""Generation by a vLLM server that has the policy's weights.

    prompt ids ─ POST /v1/completions ─> token ids, log-probs         one request for each response, with its own seed
    weights ─ weights_dir ─ POST /collective_rpc reload_weights       whenever they changed since the last time

The server is not trusted to have the right weights. After each synchronisation its log-probs of a few texts are
compared with the policy's, and in each rollout those of the responses.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Len
from pydantic import BaseModel, FiniteFloat, ValidationError
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch, padded, response_mask_until_end
from rl4lms_like.core.errors import EngineError, ModelError
from rl4lms_like.core.event_loop import EventLoop, gathered
from rl4lms_like.core.http_client import HttpClient, RemoteError
from rl4lms_like.core.losses import effective_sample_size, kl_estimate
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of
from rl4lms_like.engines.arguments import VllmArguments, generate_arguments
from rl4lms_like.engines.base import GenerationEngine
from rl4lms_like.engines.weights import fingerprint, save_weights, weights_folder

logger = logging.getLogger(__name__)

N_PROBES, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 4, 8
"""Texts on which the log-probs are compared after a synchronisation."""
N_SCORED = 8
"""Number of episodes of a rollout that are compared if they were sampled from another distribution."""
MOVED = 1e-3
"""Change of the policy's log-probs, in nats, from which those of the engine must have changed too."""
SAME = 1e-5
"""Difference between log-probs, in nats, up to which they are those of the same distribution."""
LARGEST_ANSWER = 2**30


class _LogProb(BaseModel):
    logprob: FiniteFloat


class _LogProbs(BaseModel):
    token_logprobs: list[FiniteFloat]


class _Choice(BaseModel):
    token_ids: Annotated[list[int], Len(1)]
    finish_reason: Literal["stop", "length"]
    logprobs: _LogProbs | None = None
    prompt_logprobs: list[dict[int, _LogProb] | None] | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Len(1, 1)]


class VllmEngine(GenerationEngine):
    """Client of a vLLM server; its arguments are those of `VllmArguments`.

    Raises:
        ValueError: an argument is invalid, or a variable of `headers_from_env` is not set.
        EngineError: `weights_dir` has other files.
    """

    arguments_class = VllmArguments

    def __init__(self, **arguments: Any) -> None:
        self.arguments = VllmArguments(**arguments)
        options = self.arguments
        self._server = HttpClient(
            options.url.rstrip("/"),
            timeout_s=options.timeout,
            retries=options.retries,
            backoff_s=options.backoff,
            headers_from_env=options.headers_from_env,
            max_response_bytes=LARGEST_ANSWER,
            max_connections=options.max_connections,
        )
        self._folder = weights_folder(options.weights_dir)
        self._loop = EventLoop("vllm engine")
        self._synchronised: Tensor | None = None
        self._probe: EpisodeBatch | None = None
        self._last_probed: tuple[Tensor, Tensor] | None = None
        self._samples_other = self._is_asleep = False
        self._sync_s = 0.0

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        eos_token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        record_log_prob: bool = False,
        first_token_temperature: float | None = None,
        tokenizer: Any = None,
    ) -> EpisodeBatch:
        """Generate one response per prompt; see `GenerationEngine.generate`.

        Raises:
            EngineError: the server failed.
            ModelError: the engine does not support an argument.
        """
        given = generation_kwargs or {}
        unsupported = self.arguments.unsupported(given)
        unsupported += [] if first_token_temperature is None else ["first_token_temperature"]
        if unsupported:
            raise ModelError(f"the engine vllm does not support {', '.join(unsupported)}")
        strings = stop_strings_of(given)
        if strings and tokenizer is None:
            raise ModelError(f"generation_kwargs have stop_strings {list(strings)}, but the environment has none")
        request = {**_sampling(given, eos_token_ids, max_new_tokens), "logprobs": 0 if record_log_prob else None}
        prompts = _rows(prompt_ids, prompt_mask.bool())
        seeds = [{} if seed is None else {"seed": derived_seed(seed, "response", row)} for row in range(len(prompts))]
        choices = self._choices([{**request, "prompt": ids} | own for ids, own in zip(prompts, seeds, strict=True)])
        for choice in choices:
            n_log_probs = len(choice.logprobs.token_logprobs) if choice.logprobs else 0
            if len(choice.token_ids) > request["max_tokens"]:
                raise self._error(f"generated {len(choice.token_ids)} tokens, of at most {request['max_tokens']}")
            if record_log_prob and n_log_probs != len(choice.token_ids):
                raise self._error(f"answered with {n_log_probs} log-probs of {len(choice.token_ids)} tokens")
        return self._episodes(prompts, choices, eos_token_ids, StopStrings(strings, tokenizer) if strings else None)

    def _episodes(
        self, prompts: list[list[int]], choices: list[_Choice], eos_token_ids: Sequence[int], stops: StopStrings | None
    ) -> EpisodeBatch:
        """Return the responses, each cut after its first end token or stop string."""
        prompt_ids, prompt_mask = padded(prompts, side="left")
        response_ids, generated = padded([choice.token_ids for choice in choices])
        mask, _ = response_mask_until_end(response_ids, eos_token_ids)
        mask &= generated
        last = response_ids.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
        terminated = torch.isin(last, torch.tensor(list(eos_token_ids), dtype=last.dtype))
        for row, choice in enumerate(choices):
            n_tokens = None if stops is None else stops.n_tokens(response_ids[row][mask[row]].tolist())
            if n_tokens is not None:
                mask[row, n_tokens:], terminated[row] = False, True
            if choice.finish_reason == "stop" and not terminated[row]:
                detail = "ended a response at a token that does not end responses of this run: start the server with"
                raise self._error(f"{detail} --generation-config vllm, and with the tokenizer of the run")
        recorded = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs is not None]
        log_prob = None
        if recorded:
            log_prob = torch.zeros(mask.shape)
            log_prob[generated] = torch.tensor([value for row in recorded for value in row])
            log_prob = log_prob[mask]
        episodes = EpisodeBatch(prompt_ids, prompt_mask, response_ids, mask, terminated, behavior_log_prob=log_prob)
        return episodes.trimmed()

    def score(self, episodes: EpisodeBatch) -> Tensor:
        """Return the engine's own log-probs of the responses `[n_tokens]`, at temperature 1.

        Raises:
            EngineError: the server failed.
        """
        prompts = _rows(episodes.prompt_ids, episodes.prompt_mask)
        texts = list(zip(prompts, _rows(episodes.response_ids, episodes.response_mask), strict=True))
        bodies = [
            {"prompt": prompt + response, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
            for prompt, response in texts
        ]
        found: list[float] = []
        for choice, (prompt, response) in zip(self._choices(bodies), texts, strict=True):
            given = (choice.prompt_logprobs or [])[len(prompt) :]
            own = [
                entry[token].logprob for entry, token in zip(given, response, strict=False) if entry and token in entry
            ]
            if len(own) != len(response):
                raise self._error(f"answered with log-probs of {len(own)} of the {len(response)} tokens of a text")
            found += own
        return torch.tensor(found)

    # --- synchronisation --------------------------------------------------------------------------------------------

    def update(self, policy: Any) -> None:
        """Pass on the policy's weights if they changed since the last time.

        Raises:
            EngineError: the server failed, or its log-probs are not those of the policy.
        """
        if self._is_asleep:
            self._post("/wake_up")
            self._is_asleep = False
        weights = fingerprint(policy.model)
        if self._synchronised is not None and torch.equal(weights, self._synchronised):
            return
        start = time.perf_counter()
        self._samples_other = _samples_other(policy.arguments.generation_kwargs)
        if self._probe is None:
            self._probe = self._first_probe(policy)
        if policy.arguments.is_ahead and self._last_probed is not None:
            self._check_unchanged(self._last_probed[1])
        save_weights(policy.whole_model(), self._folder)
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}})
        self._post("/reset_prefix_cache")
        self._check_weights(policy)
        self._synchronised = weights
        self._sync_s += time.perf_counter() - start

    def _first_probe(self, policy: Any) -> EpisodeBatch:
        """Return a few texts of the server, and log a warning if its weights are not those of the policy."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, policy.vocab_size, (N_PROBES, PROMPT_LENGTH), generator=generator)
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": RESPONSE_LENGTH}
        probe = self.generate(prompts, torch.ones_like(prompts), eos_token_ids=(), generation_kwargs=kwargs, seed=0)
        if int(probe.response_ids.max()) >= policy.vocab_size:
            raise self._error(f"serves another model: it has more than the {policy.vocab_size} tokens of the policy")
        gap = _mean_gap(self._own_log_prob(policy, probe), self.score(probe))
        if gap > self.arguments.max_gap:
            message = "the engine %s had other weights than the policy: their log-probs differ by %.3g nats per token"
            logger.warning(message, self.arguments.url, gap)
        if self._samples_other:
            cold = self.generate(
                *(prompts, torch.ones_like(prompts)),
                eos_token_ids=(),
                generation_kwargs={**kwargs, "temperature": 0.5},
                seed=0,
                record_log_prob=True,
            )
            sampled, own = cold.behavior_log_prob, self.score(cold)
            assert sampled is not None
            if float(own.min()) < -SAME and float((sampled - own).abs().max()) <= SAME:
                detail = "returns the log-probs of the model, not of the distribution that it samples from"
                raise self._error(f"{detail} (generation_kwargs): start it with --logprobs-mode processed_logprobs")
        return probe

    def _check_weights(self, policy: Any) -> None:
        """Compare the log-probs of server and policy on the probe after a synchronisation."""
        assert self._probe is not None
        ours, theirs = self._own_log_prob(policy, self._probe), self.score(self._probe)
        gap, limit = _mean_gap(ours, theirs), self.arguments.max_gap
        if not gap <= limit:
            raise self._error(
                f"has other log-probs than the policy after it loaded {self._folder}: they differ by "
                f"{gap:.3g} nats per token (max_gap {limit:g}). Likely causes: it serves another model, it does not "
                f"see this folder, or its precision is low (start it with --dtype float32, or raise max_gap)"
            )
        if self._last_probed is not None and torch.equal(theirs, self._last_probed[1]):
            if float((ours - self._last_probed[0]).abs().max()) > MOVED:
                raise self._error(f"did not load the new weights in {self._folder}: its log-probs did not change")
            return  # compared again when the policy has moved further
        self._last_probed = ours, theirs

    def _check_unchanged(self, before: Tensor) -> None:
        """Check that the server generated with the weights that it was given; `before` are its log-probs of the probe.

        With `ahead: 1`, the log-probs of a rollout cannot be compared with those of the policy's current weights.
        """
        assert self._probe is not None
        gap = _mean_gap(before, self.score(self._probe))
        if not gap <= self.arguments.max_gap:
            text = "has other weights than it was given before it generated the last rollout: its log-probs changed by"
            raise self._error(f"{text} {gap:.3g} nats per token (max_gap {self.arguments.max_gap:g})")

    @torch.no_grad()
    def _own_log_prob(self, policy: Any, episodes: EpisodeBatch) -> Tensor:
        policy.set_training_mode(False)
        log_prob: Tensor = policy.action_scores(episodes.to(policy.device)).log_prob
        return log_prob.float().cpu()

    def gaps(self, episodes: EpisodeBatch, log_prob: Tensor) -> dict[str, float]:
        """Return mean and largest absolute gap, KL estimate `k3` and effective sample size of a rollout.

        If the rollout was sampled from another distribution (a temperature, older weights), the engine scores a few of
        its episodes again.

        Raises:
            EngineError: the mean gap exceeds `max_gap`.
        """
        theirs, ours = episodes.behavior_log_prob, log_prob
        if self._samples_other or theirs is None:
            chosen = torch.arange(min(N_SCORED, episodes.n_episodes), device=log_prob.device)
            tokens = episodes.token_index(chosen)
            theirs, ours = self.score(episodes.select(chosen)), ours[tokens]
        theirs, ours = theirs.cpu(), ours.cpu()
        gap, limit = _mean_gap(ours, theirs), self.arguments.max_gap
        if not gap <= limit:
            raise self._error(
                f"generated a rollout with other log-probs than the policy's: they differ by {gap:.3g} nats per token "
                f"(max_gap {limit:g}), so its weights are not those of the policy, or its precision is low"
            )
        seconds, self._sync_s = self._sync_s, 0.0
        return {
            "mean_gap": gap,
            "max_gap": float((ours - theirs).abs().max()),
            "k3": float(kl_estimate(theirs, ours, "k3").double().mean()),
            "effective_sample_size": effective_sample_size((ours - theirs).exp()),
            "sync_s": seconds,
        }

    def rest(self) -> None:
        """Put the server to sleep if the config asks for it."""
        if self.arguments.sleep and not self._is_asleep:
            self._post("/sleep?level=1")
            self._is_asleep = True

    # --- requests ---------------------------------------------------------------------------------------------------

    def _choices(self, bodies: Sequence[Mapping[str, Any]]) -> list[_Choice]:
        """Return the completion of each request, in order."""
        common = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        calls = [partial(self._answer, "/v1/completions", {**common, **body}) for body in bodies]
        contents = self._run(gathered(calls, self.arguments.max_connections))
        return [self._parsed(content).choices[0] for content in contents]

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._run(self._answer(path, body or {}))

    async def _answer(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._server.answer(json.dumps(body).encode(), path)

    def _run(self, work: Any) -> Any:
        try:
            return self._loop.run(work)
        except RemoteError as error:
            raise EngineError(f"the engine {error}") from error

    def _parsed(self, content: bytes) -> _Completion:
        try:
            return _Completion.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            failed = self._server.error(f"answered 200 with an invalid {place or 'text'} ({first['msg']})", content)
            raise EngineError(f"the engine {failed}") from error

    def _error(self, what: str) -> EngineError:
        return EngineError(f"the engine {self._server.error(what)}")


def _sampling(given: Mapping[str, Any], eos_token_ids: Sequence[int], max_new_tokens: int | None) -> dict[str, Any]:
    """Return the parameters of a request with the meaning of arguments of transformers' `generate`."""
    arguments = generate_arguments(
        given, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, is_encoder_decoder=False
    )
    samples = bool(given.get("do_sample"))
    top_k, top_p = arguments.get("top_k", 50), arguments.get("top_p")
    return {
        "max_tokens": arguments["max_new_tokens"],
        "min_tokens": arguments.get("min_new_tokens") or 0,
        "temperature": (1.0 if arguments.get("temperature") is None else arguments["temperature"]) if samples else 0.0,
        "top_k": (top_k or 0) if samples else 0,
        "top_p": 1.0 if top_p is None or not samples else top_p,
        "min_p": (arguments.get("min_p") or 0.0) if samples else 0.0,
        "stop_token_ids": list(eos_token_ids),
        "ignore_eos": True,
        "stop": list(stop_strings_of(given)),
    }


def _samples_other(given: Mapping[str, Any]) -> bool:
    """Return whether arguments sample from another distribution than the model's own, for instance with a temperature.

    Log-probs of greedy responses are those of the model.
    """
    request = _sampling(given, (0,), None)
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0}
    return bool(given.get("do_sample")) and any(request[key] != value for key, value in own.items())


def _rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the real tokens of each row of padded ids."""
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]


def _mean_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().double().mean())
