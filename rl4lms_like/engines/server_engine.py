"""Generation by servers that have the policy's weights: what is the same for all protocols.

    prompt ids ─ completions ─> token ids, log-probs        one request for each response, with its own seed
    weights ─ weights_dir ─ load_weights                    whenever they changed since the last time
    or adapters ─ weights_dir ─ load_adapters               the same, under a new name

Several servers divide the requests. No server is trusted to have the right weights: after each synchronisation its
log-probs of a few texts are compared with the policy's, and in each rollout those of the responses.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar
from uuid import uuid4

import torch
from annotated_types import Interval
from pydantic import BaseModel, ValidationError
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch, padded, real_ids, response_mask_until_end
from rl4lms_like.core.losses import effective_sample_size, kl_estimate
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of
from rl4lms_like.engines.arguments import ServerArguments, generate_arguments
from rl4lms_like.engines.base import GenerationEngine
from rl4lms_like.engines.weights import save_adapters, save_weights, weights_folder
from rl4lms_like.system.errors import EngineError, ModelError
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.http_client import HttpClient, RemoteError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=BaseModel)
TokenId = Annotated[int, Interval(ge=0, lt=2**31)]
"""Token id in an answer; whether it is one of the policy's vocabulary is checked with the episodes."""

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


@dataclass(frozen=True)
class Sampling:
    """Parameters of a request, with the meaning of arguments of transformers' `generate`.

    Attributes:
        max_new_tokens: largest number of tokens of a response.
        min_new_tokens: number of tokens before which no end token is sampled.
        temperature: temperature; 0 is greedy.
        top_k: number of the most probable tokens that are sampled; 0 for all.
        top_p: probability of the most probable tokens that are sampled.
        min_p: probability of a sampled token relative to that of the most probable one, at least.
        end_tokens: tokens that end a response; that of the server's tokenizer need not be one of them.
        stop_strings: texts that end a response.
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    end_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any], eos_token_ids: Sequence[int], max_new_tokens: int | None
    ) -> Sampling:
        """Return the parameters of generation arguments; see `GenerationEngine.generate`."""
        arguments = generate_arguments(
            generation_kwargs, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, is_encoder_decoder=False
        )
        lengths_and_ends: dict[str, Any] = {
            "max_new_tokens": arguments["max_new_tokens"],
            "min_new_tokens": arguments.get("min_new_tokens") or 0,
            "end_tokens": tuple(eos_token_ids),
            "stop_strings": stop_strings_of(generation_kwargs),
        }

        # transformers ignores the other three if it does not sample.
        if not generation_kwargs.get("do_sample"):
            return cls(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, **lengths_and_ends)
        temperature = arguments.get("temperature")
        top_p = arguments.get("top_p")
        return cls(
            temperature=1.0 if temperature is None else temperature,
            top_k=arguments.get("top_k", 50) or 0,
            top_p=1.0 if top_p is None else top_p,
            min_p=arguments.get("min_p") or 0.0,
            **lengths_and_ends,
        )


class Completion(NamedTuple):
    """Response of a server to one prompt."""

    token_ids: list[int]  # at least one
    reached_limit: bool  # otherwise it ended with an end token or a stop string
    log_probs: list[float]  # of the tokens; empty if they were not asked for


class _ProbeScores(NamedTuple):
    """Log-probs `[n_tokens]` of the probe after a synchronisation."""

    policy: Tensor
    servers: list[Tensor]  # in the order of the addresses


class ServerEngine(GenerationEngine):
    """Client of one or several servers of a protocol, which a subclass implements.

    Attributes:
        id: id of the engine.
        servers: client of each server.
        adapters: with `sync: adapters`, the name of the adapters that the servers have; None is the base model.
        arguments_class: class of its arguments.
        length_option: option of a server that limits the length of prompt and response together.
        end_token_advice: how to start a server that ends responses with the end tokens of the run only.
        log_prob_advice: how to start a server that returns log-probs of the distribution that it samples from.

    Raises:
        ValueError: an argument is invalid, or a variable of `headers_from_env` is not set.
        EngineError: `weights_dir` has other files.
    """

    samples_policy = True
    id: ClassVar[str]
    arguments_class: ClassVar[type[ServerArguments]]
    length_option: ClassVar[str]
    end_token_advice: ClassVar[str]
    log_prob_advice: ClassVar[str]

    def __init__(self, **arguments: Any) -> None:
        self.arguments = self.arguments_class(**arguments)
        options = self.arguments
        self.servers: list[HttpClient] = []
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
            self.servers.append(server)
        self._folder = None if options.weights_dir is None else weights_folder(options.weights_dir)
        self._loop = EventLoop(f"{self.id} engine")

        # None before the first synchronisation: the fingerprint of the weights that the server has, the texts that are
        # compared, and their log-probs.
        self._synchronised: Tensor | None = None
        self._probe: EpisodeBatch | None = None
        self._last_probed: _ProbeScores | None = None

        self.adapters: str | None = None
        self._samples_other = False
        self._is_asleep = False
        self._sync_s = 0.0  # seconds of synchronisations since `gaps` was last called

    @property
    def name(self) -> str:
        """Name of the engine in errors: its addresses."""
        return f"the engine {', '.join(self.arguments.urls)}"

    # --- protocol ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def completions(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        servers: Sequence[HttpClient],
        *,
        record_log_prob: bool,
    ) -> list[Completion]:
        """Return a response to each prompt.

        Args:
            prompts: ids of each prompt.
            sampling: parameters of all responses.
            seeds: seed of each response.
            servers: server of each response.
            record_log_prob: with the log-probs of the distribution that is sampled from.
        """

    @abstractmethod
    def log_probs(
        self, texts: Sequence[list[int]], n_last: Sequence[int], servers: Sequence[HttpClient]
    ) -> list[list[float]]:
        """Return the log-probs, at temperature 1, of the last tokens of each text, as far as the server has them.

        Args:
            texts: ids of each text.
            n_last: number of the last tokens of each text.
            servers: server of each text.
        """

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Let all servers load the weights in a folder, and drop cached keys and values of older ones."""

    @abstractmethod
    def load_adapters(self, name: str, folder: Path) -> None:
        """Let all servers load the adapters in a folder under a name."""

    @abstractmethod
    def unload_adapters(self, name: str) -> None:
        """Let all servers remove the adapters of a name."""

    @abstractmethod
    def release_memory(self) -> None:
        """Let all servers release their memory."""

    @abstractmethod
    def resume_memory(self) -> None:
        """Let all servers allocate the memory that they released."""

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
            raise ModelError(f"the engine {self.id} does not support {', '.join(unsupported)}")

        sampling = Sampling.of(generation_kwargs, eos_token_ids, max_new_tokens)
        stops = None
        if sampling.stop_strings:
            if tokenizer is None:
                strings = list(sampling.stop_strings)
                raise ModelError(f"generation_kwargs have stop_strings {strings}, but the environment has none")
            stops = StopStrings(sampling.stop_strings, tokenizer)

        # One request for each response: responses to several prompts in one request would have the same seed.
        prompts = real_ids(prompt_ids, prompt_mask.bool())
        seeds = None
        if seed is not None:
            seeds = [derived_seed(seed, "response", row) for row in range(len(prompts))]
        servers = self._divided(len(prompts))
        completions = self.completions(prompts, sampling, seeds, servers, record_log_prob=record_log_prob)

        for completion, server in zip(completions, servers, strict=True):
            self._check_lengths(completion, server, sampling.max_new_tokens, record_log_prob=record_log_prob)
        return self._episodes(prompts, completions, servers, eos_token_ids, stops)

    def _check_lengths(
        self, completion: Completion, server: HttpClient, max_new_tokens: int, *, record_log_prob: bool
    ) -> None:
        """Check the numbers of tokens and log-probs, as a server that ignores a parameter would change the rollout."""
        n_tokens = len(completion.token_ids)
        if n_tokens > max_new_tokens:
            raise server_error(server, f"generated {n_tokens} tokens, of at most {max_new_tokens}")

        # The context of the server ended before the limit of the run.
        if completion.reached_limit and n_tokens < max_new_tokens:
            raise server_error(
                server,
                f"cut off a response after {n_tokens} tokens, of {max_new_tokens}: start it with a larger "
                f"{self.length_option} (at least the longest prompt plus the longest response plus 1)",
            )
        if record_log_prob and len(completion.log_probs) != n_tokens:
            raise server_error(server, f"answered with {len(completion.log_probs)} log-probs of {n_tokens} tokens")

    def _episodes(
        self,
        prompts: list[list[int]],
        completions: list[Completion],
        servers: Sequence[HttpClient],
        eos_token_ids: Sequence[int],
        stops: StopStrings | None,
    ) -> EpisodeBatch:
        """Return the responses, each cut after its first end token or stop string."""
        prompt_ids, prompt_mask = padded(prompts, side="left")
        response_ids, generated = padded([completion.token_ids for completion in completions])  # [n, response_len]

        # Whether a response ended is read from its last token: the padding may have the id of an end token.
        mask, _ = response_mask_until_end(response_ids, eos_token_ids)
        mask &= generated
        last = response_ids.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
        terminated = torch.isin(last, torch.tensor(list(eos_token_ids), dtype=last.dtype))

        # A stop string ends a response by the environment's rule, which decodes with the run's tokenizer.
        for row, completion in enumerate(completions):
            n_tokens = None
            if stops is not None:
                n_tokens = stops.n_tokens(response_ids[row][mask[row]].tolist(), prompts[row])
            if n_tokens is not None:
                mask[row, n_tokens:] = False
                terminated[row] = True
            if not completion.reached_limit and not terminated[row]:
                detail = "ended a response at a token that does not end responses of this run"
                raise server_error(servers[row], f"{detail}: {self.end_token_advice}")

        # There are log-probs of all generated tokens; those after the cut are dropped.
        recorded = list(chain.from_iterable(completion.log_probs for completion in completions))
        log_prob = None
        if recorded:
            matrix = torch.zeros(mask.shape)
            matrix[generated] = torch.tensor(recorded)
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
        # Prompt and response together are the text.
        prompts = real_ids(episodes.prompt_ids, episodes.prompt_mask)
        responses = real_ids(episodes.response_ids, episodes.response_mask)
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        n_last = [len(response) for response in responses]
        servers = self._divided(len(texts)) if server is None else [server] * len(texts)
        of_responses = self.log_probs(texts, n_last, servers)

        for log_probs, n_tokens, asked in zip(of_responses, n_last, servers, strict=True):
            if len(log_probs) != n_tokens:
                detail = f"answered with log-probs of {len(log_probs)} of the {n_tokens} tokens of a text"
                raise server_error(asked, detail)
        is_action = episodes.action_mask[episodes.response_mask].cpu()
        return torch.tensor(list(chain.from_iterable(of_responses)))[is_action]

    # --- synchronisation --------------------------------------------------------------------------------------------

    def update(self, policy: Any) -> str | None:
        """Pass on the policy's weights if they changed since the last time; return the name of its adapters.

        Raises:
            EngineError: the server failed, or its log-probs are not those of the policy.
        """
        if self._is_asleep:
            self.resume_memory()
            self._is_asleep = False
        weights = policy.fingerprint()
        if self._synchronised is not None and torch.equal(weights, self._synchronised):
            return self.adapters

        start = time.perf_counter()
        self._samples_other = samples_other(policy.arguments.generation_kwargs)
        if self._probe is None:
            self._probe = self.first_probe(policy)

        # Before the server gets new weights, while it should still have those of the last time.
        if policy.arguments.is_ahead and self._last_probed is not None:
            self._check_unchanged(self._last_probed.servers)

        if self.arguments.sync == "adapters":
            self._pass_on_adapters(policy)
        else:
            self.pass_on_weights(policy)

        # Last: if the check fails, the next generation tries again.
        self._check_weights(policy)
        self._synchronised = weights
        self._sync_s += time.perf_counter() - start
        return self.adapters

    def follow(self, state: str | None) -> None:
        """Generate with the adapters of this name."""
        self.adapters = state

    def pass_on_weights(self, policy: Any) -> None:
        """Let all servers load the weights of the policy."""
        assert self._folder is not None
        save_weights(policy, self._folder)
        self.load_weights(self._folder)

    def _pass_on_adapters(self, policy: Any) -> None:
        """Let the servers load the adapters of the policy, and generate with them from now on."""
        # A new name each time, also after an interruption: for a name that was loaded before, a server may use the
        # adapters, and the cached keys and values of prompts, of that time.
        before = self.adapters
        assert self._folder is not None
        name = f"policy-{uuid4().hex}"
        folder = save_adapters(policy, self._folder, name)
        self.load_adapters(name, folder)
        self.adapters = name
        if before is not None:
            self.unload_adapters(before)

    def first_probe(self, policy: Any) -> EpisodeBatch:
        """Return a few texts of the servers, and log a warning for each whose weights are not those of the policy."""
        probe = self.probe_texts(policy)
        largest = probe.response_ids.max(dim=1).values
        for token, server in zip(largest.tolist(), self._divided(probe.n_episodes), strict=True):
            if token >= policy.vocab_size:
                detail = f"serves another model: it has more than the {policy.vocab_size} tokens of the policy"
                raise server_error(server, detail)

        # No error, since these weights are replaced next; but they may be those of another run. With `sync: adapters`
        # the server has only the base so far, from which adapters of a resumed run differ.
        if self.arguments.sync == "weights":
            ours = policy.log_prob(probe)
            for server in self.servers:
                gap = _mean_gap(ours, self.score(probe, server))
                if gap > self.arguments.max_gap:
                    message = "the engine %s had other weights than the policy: log-probs differ by %.3g nats per token"
                    logger.warning(message, server.url, gap)

        if self._samples_other:
            self._require_sampled_log_probs(policy)
        return probe

    def probe_texts(self, policy: Any, *, temperature: float = 1.0, record_log_prob: bool = False) -> EpisodeBatch:
        """Return responses to random prompts, at least one of each server; the same each time."""
        generator = torch.Generator().manual_seed(0)
        n_texts = max(N_PROBES, len(self.servers))
        prompts = torch.randint(0, policy.vocab_size, (n_texts, PROMPT_LENGTH), generator=generator)

        # Without end tokens all have full length.
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": RESPONSE_LENGTH, "temperature": temperature}
        return self.generate(
            prompts,
            torch.ones_like(prompts),
            eos_token_ids=(),
            generation_kwargs=kwargs,
            seed=0,
            record_log_prob=record_log_prob,
        )

    def rows_of_servers(self, n_episodes: int) -> Iterator[tuple[HttpClient, Tensor]]:
        """Yield each server with the rows `[n_rows]` of the episodes that it generated."""
        servers = self._divided(n_episodes)
        for server in self.servers:
            yield server, torch.tensor([row for row, asked in enumerate(servers) if asked is server])

    def _require_sampled_log_probs(self, policy: Any) -> None:
        """Check that the recorded log-probs are those of the distribution that each server samples from."""
        # At temperature 0.5 these log-probs are not those of the model, unless both are 0.
        cold = self.probe_texts(policy, temperature=0.5, record_log_prob=True)
        sampled = cold.behavior_log_prob
        assert sampled is not None
        of_model = self.score(cold)

        for server, rows in self.rows_of_servers(cold.n_episodes):
            tokens = cold.token_index(rows)
            is_same = float((sampled - of_model)[tokens].abs().max()) <= SAME
            if float(of_model[tokens].min()) < -SAME and is_same:
                detail = "returns the log-probs of the model, not of the distribution that it samples from"
                raise server_error(server, f"{detail} (generation_kwargs): {self.log_prob_advice}")

    def _check_weights(self, policy: Any) -> None:
        """Compare the log-probs of each server and the policy on the probe after a synchronisation."""
        assert self._probe is not None
        ours = policy.log_prob(self._probe)
        limit = self.arguments.max_gap
        last = self._last_probed
        weights = "the transferred weights" if self._folder is None else f"the new weights in {self._folder}"
        log_probs = []
        has_changed = True
        for number, server in enumerate(self.servers):
            theirs = self.score(self._probe, server)
            gap = _mean_gap(ours, theirs)
            if not gap <= limit:  # also if it is NaN
                unseen = "" if self._folder is None else "it does not see this folder, "
                raise server_error(
                    server,
                    f"has other log-probs than the policy after it loaded {weights}: they differ by {gap:.3g} nats per "
                    f"token (max_gap {limit:g}). Likely causes: it serves another model, {unseen}or its precision is "
                    f"low (start it with --dtype float32, or raise max_gap)",
                )

            # A small step changes log-probs by less than `max_gap`, so old weights would pass. But then the server's
            # have not changed in a single bit. They are compared again when the policy has moved further.
            if last is not None and torch.equal(theirs, last.servers[number]):
                has_changed = False
                if float((ours - last.policy).abs().max()) > MOVED:
                    detail = f"did not load {weights}: its log-probs did not change"
                    raise server_error(server, detail)
            log_probs.append(theirs)
        if has_changed:
            self._last_probed = _ProbeScores(policy=ours, servers=log_probs)

    def _check_unchanged(self, before: Sequence[Tensor]) -> None:
        """Check that the servers generated with the weights that they were given.

        With `ahead`, the log-probs of a rollout cannot be compared with those of the policy's current weights.

        Args:
            before: log-probs of the probe of each server.
        """
        assert self._probe is not None
        for server, log_prob in zip(self.servers, before, strict=True):
            gap = _mean_gap(log_prob, self.score(self._probe, server))
            if not gap <= self.arguments.max_gap:
                text = "has other weights than it was given before it generated the last rollout: its log-probs changed"
                raise server_error(server, f"{text} by {gap:.3g} nats per token (max_gap {self.arguments.max_gap:g})")

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
            self.release_memory()
            self._is_asleep = True

    # --- requests ---------------------------------------------------------------------------------------------------

    def _divided(self, n_requests: int) -> list[HttpClient]:
        """Return the server of each request; consecutive ones, as most of one prompt, have the same."""
        return [self.servers[number * len(self.servers) // n_requests] for number in range(n_requests)]

    def answers(self, path: str, bodies: Sequence[Mapping[str, Any]], servers: Sequence[HttpClient]) -> list[bytes]:
        """Return the answer of its server to each request, in order."""
        calls = []
        for body, server in zip(bodies, servers, strict=True):
            calls.append(partial(_answer, server, path, body))
        return self._run(gathered(calls, self.arguments.max_connections))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Send the same request to all servers."""
        self.post_each(path, [body or {}] * len(self.servers), self.servers)

    def post_each(self, path: str, bodies: Sequence[Mapping[str, Any]], servers: Sequence[HttpClient]) -> None:
        """Send each server its request, all at the same time."""
        calls = [partial(_answer, server, path, body) for server, body in zip(servers, bodies, strict=True)]
        self._run(gathered(calls, len(calls)))

    def _run(self, work: Any) -> Any:
        try:
            return self._loop.run(work)
        except RemoteError as error:
            raise EngineError(f"the engine {error}") from error


async def _answer(server: HttpClient, path: str, body: Mapping[str, Any]) -> bytes:
    return await server.answer(json.dumps(body).encode(), path)


def parsed(answer_class: type[Answer], server: HttpClient, content: bytes) -> Answer:
    """Return the answer of a server, with the fields of a class.

    Raises:
        EngineError: it does not have them.
    """
    try:
        return answer_class.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "text"
        failed = server.error(f"answered 200 with an invalid {field} ({first['msg']})", content)
        raise EngineError(f"the engine {failed}") from error


def server_error(server: HttpClient, what: str) -> EngineError:
    """Return an error that names the server."""
    return EngineError(f"the engine {server.error(what)}")


def samples_other(generation_kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments sample from another distribution than the model's own, for instance with a temperature.

    Log-probs of greedy responses are those of the model.
    """
    if not generation_kwargs.get("do_sample"):
        return False

    # A minimum length excludes end tokens, but only if there are any: hence token 0 as one.
    sampling = Sampling.of(generation_kwargs, (0,), None)
    shape = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.min_new_tokens)
    return shape != (1.0, 0, 1.0, 0.0, 0)


def _mean_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().double().mean())
