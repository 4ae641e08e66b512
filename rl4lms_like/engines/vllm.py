"""Generation by vLLM servers that have the policy's weights.

    prompt ids ─ POST /v1/completions ─> token ids, log-probs         one request for each response, with its own seed
    weights ─ weights_dir ─ POST /collective_rpc reload_weights       whenever they changed since the last time
    or adapters ─ weights_dir ─ POST /v1/load_lora_adapter            the same, under a new name

Several servers divide the requests. No server is trusted to have the right weights: after each synchronisation its
log-probs of a few texts are compared with the policy's, and in each rollout those of the responses.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

import torch
from annotated_types import Interval, Len
from pydantic import BaseModel, FiniteFloat, ValidationError
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch, padded, real_ids, response_mask_until_end
from rl4lms_like.core.losses import effective_sample_size, kl_estimate
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of
from rl4lms_like.engines.arguments import VllmArguments, generate_arguments
from rl4lms_like.engines.base import GenerationEngine
from rl4lms_like.engines.weights import save_adapters, save_weights, weights_folder
from rl4lms_like.system.errors import EngineError, ModelError
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.http_client import HttpClient, RemoteError

logger = logging.getLogger(__name__)

N_PROBES = 4
"""Number of texts on which the log-probs are compared after a synchronisation, or one for each server if more."""
PROMPT_LENGTH = 4
RESPONSE_LENGTH = 8
N_SCORED = 8
"""Number of episodes of a rollout that are compared if they were sampled from another distribution."""
MOVED = 1e-3
"""Change of the policy's log-probs, in nats, from which those of the engine must have changed too."""
SAME = 1e-5
"""Difference between log-probs, in nats, up to which they are those of the same distribution."""
LARGEST_ANSWER = 2**27
"""Bytes of an answer from which it is not read any further."""


_TokenId = Annotated[int, Interval(ge=0, lt=2**31)]


class _LogProb(BaseModel):
    logprob: FiniteFloat


class _LogProbs(BaseModel):
    token_logprobs: list[FiniteFloat]


class _Choice(BaseModel):
    token_ids: Annotated[list[_TokenId], Len(1)]
    finish_reason: Literal["stop", "length"]
    logprobs: _LogProbs | None = None
    prompt_logprobs: list[dict[int, _LogProb] | None] | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Len(1, 1)]


class _ProbeScores(NamedTuple):
    """Log-probs `[n_tokens]` of the probe after a synchronisation."""

    policy: Tensor
    servers: list[Tensor]  # in the order of the addresses


class VllmEngine(GenerationEngine):
    """Client of one or several vLLM servers; its arguments are those of `VllmArguments`.

    Raises:
        ValueError: an argument is invalid, or a variable of `headers_from_env` is not set.
        EngineError: `weights_dir` has other files.
    """

    arguments_class = VllmArguments
    samples_policy = True

    def __init__(self, **arguments: Any) -> None:
        self.arguments = VllmArguments(**arguments)
        options = self.arguments
        self._servers: list[HttpClient] = []
        for url in options.urls:
            server = HttpClient(
                url,
                timeout_s=options.timeout,
                retries=options.retries,
                backoff_s=options.backoff,
                headers_from_env=options.headers_from_env,
                max_response_bytes=LARGEST_ANSWER,
                max_connections=options.max_connections,
            )
            self._servers.append(server)
        self._folder = weights_folder(options.weights_dir)
        self._loop = EventLoop("vllm engine")

        # None before the first synchronisation: the fingerprint of the weights that the server has, the texts that are
        # compared, and their log-probs.
        self._synchronised: Tensor | None = None
        self._probe: EpisodeBatch | None = None
        self._last_probed: _ProbeScores | None = None

        self._adapters: str | None = None  # name of the adapters that the servers have, with `sync: adapters`
        self._samples_other = False
        self._is_asleep = False
        self._sync_s = 0.0  # seconds of synchronisations since `gaps` was last called

    @property
    def name(self) -> str:
        """Name of the engine in errors: its addresses."""
        return f"the engine {', '.join(self.arguments.urls)}"

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
        generation_kwargs = generation_kwargs or {}
        unsupported = self.arguments.unsupported(generation_kwargs)
        if first_token_temperature is not None:
            unsupported.append("first_token_temperature")
        if unsupported:
            raise ModelError(f"the engine vllm does not support {', '.join(unsupported)}")

        stops = None
        strings = stop_strings_of(generation_kwargs)
        if strings:
            if tokenizer is None:
                raise ModelError(f"generation_kwargs have stop_strings {list(strings)}, but the environment has none")
            stops = StopStrings(strings, tokenizer)

        # One request for each response: responses to several prompts in one request would share a seed. `logprobs: 0`
        # asks for the log-prob of the sampled token alone.
        request = _sampling(generation_kwargs, eos_token_ids, max_new_tokens)
        request["logprobs"] = 0 if record_log_prob else None
        prompts = real_ids(prompt_ids, prompt_mask.bool())
        bodies = []
        for row, prompt in enumerate(prompts):
            body = {**request, "prompt": prompt}
            if seed is not None:
                body["seed"] = derived_seed(seed, "response", row)
            bodies.append(body)
        servers = self._divided(len(bodies))
        choices = self._choices(bodies, servers)

        # A server that ignores a parameter would otherwise change the rollout without an error.
        for choice, server in zip(choices, servers, strict=True):
            n_tokens = len(choice.token_ids)
            n_log_probs = len(choice.logprobs.token_logprobs) if choice.logprobs else 0
            if n_tokens > request["max_tokens"]:
                raise _error(server, f"generated {n_tokens} tokens, of at most {request['max_tokens']}")
            if choice.finish_reason == "length" and n_tokens < request["max_tokens"]:
                raise _error(
                    server,
                    f"cut off a response after {n_tokens} tokens, of {request['max_tokens']}: start it with a larger "
                    f"--max-model-len (at least the longest prompt plus the longest response plus 1)",
                )
            if record_log_prob and n_log_probs != n_tokens:
                raise _error(server, f"answered with {n_log_probs} log-probs of {n_tokens} tokens")
        return self._episodes(prompts, choices, servers, eos_token_ids, stops)

    def _episodes(
        self,
        prompts: list[list[int]],
        choices: list[_Choice],
        servers: Sequence[HttpClient],
        eos_token_ids: Sequence[int],
        stops: StopStrings | None,
    ) -> EpisodeBatch:
        """Return the responses, each cut after its first end token or stop string."""
        prompt_ids, prompt_mask = padded(prompts, side="left")
        response_ids, generated = padded([choice.token_ids for choice in choices])  # [n, response_len]

        # Whether a response ended is read from its last token: the padding may have the id of an end token.
        mask, _ = response_mask_until_end(response_ids, eos_token_ids)
        mask &= generated
        last = response_ids.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
        terminated = torch.isin(last, torch.tensor(list(eos_token_ids), dtype=last.dtype))

        # A stop string ends a response by the environment's rule, which decodes with the run's tokenizer.
        for row, choice in enumerate(choices):
            n_tokens = None
            if stops is not None:
                n_tokens = stops.n_tokens(response_ids[row][mask[row]].tolist(), prompts[row])
            if n_tokens is not None:
                mask[row, n_tokens:] = False
                terminated[row] = True
            if choice.finish_reason == "stop" and not terminated[row]:
                detail = "ended a response at a token that does not end responses of this run: start the server with"
                raise _error(servers[row], f"{detail} --generation-config vllm, and with the tokenizer of the run")

        # There are log-probs of all generated tokens; those after the cut are dropped.
        recorded = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs is not None]
        log_prob = None
        if recorded:
            matrix = torch.zeros(mask.shape)
            matrix[generated] = torch.tensor(list(chain.from_iterable(recorded)))
            log_prob = matrix[mask]  # [n_tokens]
        episodes = EpisodeBatch(prompt_ids, prompt_mask, response_ids, mask, terminated, behavior_log_prob=log_prob)
        return episodes.trimmed()

    def score(self, episodes: EpisodeBatch, server: HttpClient | None = None) -> Tensor:
        """Return the engine's own log-probs of the actions `[n_tokens]`, at temperature 1.

        Args:
            episodes: the episodes.
            server: scores all of them; by default, all servers divide them.

        Raises:
            EngineError: the server failed.
        """
        # Prompt and response together are the prompt of a request, which has to generate at least one token.
        prompts = real_ids(episodes.prompt_ids, episodes.prompt_mask)
        responses = real_ids(episodes.response_ids, episodes.response_mask)
        bodies = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = prompt + response
            bodies.append({"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0})
        servers = self._divided(len(bodies)) if server is None else [server] * len(bodies)
        choices = self._choices(bodies, servers)

        # One entry per token of the text: token id -> log-prob, of this token and perhaps of more probable ones.
        log_probs: list[float] = []  # of all response tokens
        for choice, prompt, response, asked in zip(choices, prompts, responses, servers, strict=True):
            entries = (choice.prompt_logprobs or [])[len(prompt) :]
            of_response = []
            for entry, token in zip(entries, response, strict=False):
                if entry and token in entry:
                    of_response.append(entry[token].logprob)
            if len(of_response) != len(response):
                raise _error(
                    asked, f"answered with log-probs of {len(of_response)} of the {len(response)} tokens of a text"
                )
            log_probs += of_response
        is_action = episodes.action_mask[episodes.response_mask].cpu()
        return torch.tensor(log_probs)[is_action]

    # --- synchronisation --------------------------------------------------------------------------------------------

    def update(self, policy: Any) -> str | None:
        """Pass on the policy's weights if they changed since the last time; return the name of its adapters.

        Raises:
            EngineError: the server failed, or its log-probs are not those of the policy.
        """
        if self._is_asleep:
            self._post("/wake_up")
            self._is_asleep = False
        weights = policy.fingerprint()
        if self._synchronised is not None and torch.equal(weights, self._synchronised):
            return self._adapters

        start = time.perf_counter()
        self._samples_other = _samples_other(policy.arguments.generation_kwargs)
        if self._probe is None:
            self._probe = self._first_probe(policy)

        # Before the server gets new weights, while it should still have those of the last time.
        if policy.arguments.is_ahead and self._last_probed is not None:
            self._check_unchanged(self._last_probed.servers)

        if self.arguments.sync == "adapters":
            self._pass_on_adapters(policy)
        else:
            # The cache of prefixes has keys and values of the old weights.
            save_weights(policy, self._folder)
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}})
            self._post("/reset_prefix_cache")

        # Last: if the check fails, the next generation tries again.
        self._check_weights(policy)
        self._synchronised = weights
        self._sync_s += time.perf_counter() - start
        return self._adapters

    def follow(self, state: str | None) -> None:
        """Generate with the adapters of this name."""
        self._adapters = state

    def _pass_on_adapters(self, policy: Any) -> None:
        """Let the servers load the adapters of the policy, and generate with them from now on."""
        # A new name each time, also after an interruption: for a name that was loaded before, a server may use the
        # adapters, and the cached keys and values of prompts, of that time.
        before = self._adapters
        name = f"policy-{uuid4().hex}"
        folder = save_adapters(policy, self._folder, name)
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._adapters = name
        if before is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": before})

    def _first_probe(self, policy: Any) -> EpisodeBatch:
        """Return a few texts of the servers, and log a warning for each whose weights are not those of the policy."""
        # Random prompts, at least one for each server, and responses at temperature 1; without end tokens all have full
        # length.
        generator = torch.Generator().manual_seed(0)
        n_texts = max(N_PROBES, len(self._servers))
        prompts = torch.randint(0, policy.vocab_size, (n_texts, PROMPT_LENGTH), generator=generator)
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": RESPONSE_LENGTH}
        probe = self.generate(prompts, torch.ones_like(prompts), eos_token_ids=(), generation_kwargs=kwargs, seed=0)

        largest = probe.response_ids.max(dim=1).values
        for token, server in zip(largest.tolist(), self._divided(n_texts), strict=True):
            if token >= policy.vocab_size:
                detail = f"serves another model: it has more than the {policy.vocab_size} tokens of the policy"
                raise _error(server, detail)

        # No error, since these weights are replaced next; but they may be those of another run. With `sync: adapters`
        # the server has only the base so far, from which adapters of a resumed run differ.
        if self.arguments.sync == "weights":
            ours = policy.log_prob(probe)
            for server in self._servers:
                gap = _mean_gap(ours, self.score(probe, server))
                if gap > self.arguments.max_gap:
                    message = "the engine %s had other weights than the policy: log-probs differ by %.3g nats per token"
                    logger.warning(message, server.url, gap)

        if self._samples_other:
            self._require_sampled_log_probs(prompts, kwargs)
        return probe

    def _require_sampled_log_probs(self, prompts: Tensor, generation_kwargs: Mapping[str, Any]) -> None:
        """Check that the recorded log-probs are those of the distribution that each server samples from.

        Args:
            prompts: `[n, prompt_len]`, at least one for each server.
            generation_kwargs: arguments that sample from the model's own distribution.
        """
        # At temperature 0.5 these log-probs are not those of the model, unless both are 0.
        cold = self.generate(
            prompts,
            torch.ones_like(prompts),
            eos_token_ids=(),
            generation_kwargs={**generation_kwargs, "temperature": 0.5},
            seed=0,
            record_log_prob=True,
        )
        sampled = cold.behavior_log_prob
        assert sampled is not None
        of_model = self.score(cold)

        servers = self._divided(cold.n_episodes)
        for server in self._servers:
            rows = torch.tensor([row for row, asked in enumerate(servers) if asked is server])
            tokens = cold.token_index(rows)
            is_same = float((sampled - of_model)[tokens].abs().max()) <= SAME
            if float(of_model[tokens].min()) < -SAME and is_same:
                detail = "returns the log-probs of the model, not of the distribution that it samples from"
                advice = "(generation_kwargs): start it with --logprobs-mode processed_logprobs"
                raise _error(server, f"{detail} {advice}")

    def _check_weights(self, policy: Any) -> None:
        """Compare the log-probs of each server and the policy on the probe after a synchronisation."""
        assert self._probe is not None
        ours = policy.log_prob(self._probe)
        limit = self.arguments.max_gap
        last = self._last_probed
        log_probs = []
        has_changed = True
        for number, server in enumerate(self._servers):
            theirs = self.score(self._probe, server)
            gap = _mean_gap(ours, theirs)
            if not gap <= limit:  # also if it is NaN
                raise _error(
                    server,
                    f"has other log-probs than the policy after it loaded {self._folder}: they differ by "
                    f"{gap:.3g} nats per token (max_gap {limit:g}). Likely causes: it serves another model, it does "
                    f"not see this folder, or its precision is low (start it with --dtype float32, or raise max_gap)",
                )

            # A small step changes log-probs by less than `max_gap`, so old weights would pass. But then the server's
            # have not changed in a single bit. They are compared again when the policy has moved further.
            if last is not None and torch.equal(theirs, last.servers[number]):
                has_changed = False
                if float((ours - last.policy).abs().max()) > MOVED:
                    detail = f"did not load the new weights in {self._folder}: its log-probs did not change"
                    raise _error(server, detail)
            log_probs.append(theirs)
        if has_changed:
            self._last_probed = _ProbeScores(policy=ours, servers=log_probs)

    def _check_unchanged(self, before: Sequence[Tensor]) -> None:
        """Check that the servers generated with the weights that they were given.

        With `ahead: 1`, the log-probs of a rollout cannot be compared with those of the policy's current weights.

        Args:
            before: log-probs of the probe of each server.
        """
        assert self._probe is not None
        for server, log_prob in zip(self._servers, before, strict=True):
            gap = _mean_gap(log_prob, self.score(self._probe, server))
            if not gap <= self.arguments.max_gap:
                text = "has other weights than it was given before it generated the last rollout: its log-probs changed"
                raise _error(server, f"{text} by {gap:.3g} nats per token (max_gap {self.arguments.max_gap:g})")

    def gaps(self, episodes: EpisodeBatch, log_prob: Tensor) -> dict[str, float]:
        """Return mean and largest absolute gap, KL estimate `k3` and effective sample size of a rollout.

        If the rollout was sampled from another distribution (a temperature, older weights), the engine scores a few of
        its episodes again.

        Raises:
            EngineError: the mean gap exceeds `max_gap`.
        """
        # Both at temperature 1: log-probs of another distribution than the model's own say nothing about the weights.
        ours = log_prob
        theirs = episodes.behavior_log_prob
        if self._samples_other or theirs is None:
            chosen = torch.arange(min(N_SCORED, episodes.n_episodes), device=log_prob.device)
            ours = log_prob[episodes.token_index(chosen)]
            theirs = self.score(episodes.select(chosen))
        ours = ours.cpu()
        theirs = theirs.cpu()

        gap = _mean_gap(ours, theirs)
        limit = self.arguments.max_gap
        if not gap <= limit:
            raise EngineError(
                f"{self.name} generated a rollout with other log-probs than the policy's: they differ by {gap:.3g} "
                f"nats per token (max_gap {limit:g}), so its weights are not those of the policy, or its precision is "
                f"low"
            )

        seconds = self._sync_s
        self._sync_s = 0.0
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

    def _divided(self, n_requests: int) -> list[HttpClient]:
        """Return the server of each request; consecutive ones, as those of one prompt, have the same."""
        return [self._servers[number * len(self._servers) // n_requests] for number in range(n_requests)]

    def _choices(self, bodies: Sequence[Mapping[str, Any]], servers: Sequence[HttpClient]) -> list[_Choice]:
        """Return the completion of each request by its server, in order."""
        # Ids instead of texts: decoding and encoding again does not always give the same tokens.
        common: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        if self._adapters is not None:
            common["model"] = self._adapters
        calls = []
        for body, server in zip(bodies, servers, strict=True):
            calls.append(partial(_answer, server, "/v1/completions", {**common, **body}))
        contents = self._run(gathered(calls, self.arguments.max_connections))
        return [_parsed(server, content).choices[0] for content, server in zip(contents, servers, strict=True)]

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a request to all servers at the same time."""
        calls = [partial(_answer, server, path, body or {}) for server in self._servers]
        self._run(gathered(calls, len(calls)))

    def _run(self, work: Any) -> Any:
        try:
            return self._loop.run(work)
        except RemoteError as error:
            raise EngineError(f"the engine {error}") from error


async def _answer(server: HttpClient, path: str, body: Mapping[str, Any]) -> bytes:
    return await server.answer(json.dumps(body).encode(), path)


def _parsed(server: HttpClient, content: bytes) -> _Completion:
    try:
        return _Completion.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "text"
        failed = server.error(f"answered 200 with an invalid {field} ({first['msg']})", content)
        raise EngineError(f"the engine {failed}") from error


def _error(server: HttpClient, what: str) -> EngineError:
    """Return an error that names the server."""
    return EngineError(f"the engine {server.error(what)}")


def _sampling(
    generation_kwargs: Mapping[str, Any], eos_token_ids: Sequence[int], max_new_tokens: int | None
) -> dict[str, Any]:
    """Return the parameters of a request with the meaning of arguments of transformers' `generate`."""
    arguments = generate_arguments(
        generation_kwargs, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, is_encoder_decoder=False
    )

    # Greedy, which is temperature 0 for vLLM. transformers ignores the other three then.
    shape: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if generation_kwargs.get("do_sample"):
        temperature = arguments.get("temperature")
        top_p = arguments.get("top_p")
        shape = {
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": arguments.get("top_k", 50) or 0,
            "top_p": 1.0 if top_p is None else top_p,
            "min_p": arguments.get("min_p") or 0.0,
        }

    # The end tokens of the run are the only ones; that of the server's tokenizer need not be one of them.
    return {
        "max_tokens": arguments["max_new_tokens"],
        "min_tokens": arguments.get("min_new_tokens") or 0,
        **shape,
        "stop_token_ids": list(eos_token_ids),
        "ignore_eos": True,
        "stop": list(stop_strings_of(generation_kwargs)),
    }


def _samples_other(generation_kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments sample from another distribution than the model's own, for instance with a temperature.

    Log-probs of greedy responses are those of the model.
    """
    if not generation_kwargs.get("do_sample"):
        return False

    # A minimum length excludes end tokens, but only if there are any: hence token 0 as one.
    request = _sampling(generation_kwargs, (0,), None)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0}
    return any(request[key] != value for key, value in neutral.items())


def _mean_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().double().mean())
