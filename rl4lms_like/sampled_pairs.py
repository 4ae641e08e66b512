"""Pairs of responses that a policy samples: `rl4lms-like pairs`.

    prompts of a split ─ n responses to each ─ reward of the config ─> best and worst response of each prompt

    pairs.jsonl                   one pair per line, in the order of the prompts; the data pool `preferences` reads it
    pairs.jsonl.progress.json     number of prompts that are done, the counts of the report

Prompts are processed in batches, each with its own seed. Both files are written after each batch. The same command
continues after the last batch, with the same result as without an interruption.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.utils import set_random_seed

from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.rules import step_credits
from rl4lms_like.config.run_config import AnyConfig, RunConfig
from rl4lms_like.config.settings import check_families, check_fit, check_lengths, check_prompts, check_settings
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.data_pools.preferences import TRUNCATED
from rl4lms_like.inference import responder_of
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.speedups import KEY as SPEEDUPS
from rl4lms_like.policies.speedups import Speedups, all_speedups, has_speedups, no_speedups, stored_speedups
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.rewards.time_limit import TimeIsUp, within
from rl4lms_like.run import deterministic_operations, silence_libraries
from rl4lms_like.scoring.frozen import version_of
from rl4lms_like.system.component_state import load_state, not_json, state_of
from rl4lms_like.system.disk import refuse_links, saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, RewardError, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.system.secrets import secret_in
from rl4lms_like.tracking.run_folder import write_whole
from rl4lms_like.training.components import build_components
from rl4lms_like.training.evaluation import Responder
from rl4lms_like.training.inputs import build_datapool, load_model_config, render_prompts, tokenizer_and_pictures
from rl4lms_like.training.resuming.resume import with_speedups, with_template_date
from rl4lms_like.training.threads import set_n_threads

REPORT_EVERY_S = 30.0
"""Seconds between lines that report the progress."""

KWARGS = "alg.policy.args.generation_kwargs"


class Response(NamedTuple):
    """Response to a prompt: its text, its reward, and True if it reached the length limit."""

    text: str
    score: float
    truncated: bool


@dataclass
class Progress:
    """Finished part of a file of pairs, stored as JSON.

    Args:
        digest: of everything that determines the pairs.
        n_prompts: number of prompts that are done.
        n_bytes: size of the file of pairs.
        counts: number of pairs, of prompts without a pair by reason, and of truncated responses.
        sums: sums of the scores of chosen and rejected responses.
        reward: state of the reward.
        template_date: the day that the chat template writes as today; None without a template.
        speedups: the policy's, with those that the config does not name; a file of an earlier version has none.
        marks_truncated: the pairs say of both responses whether they reached the length limit; those in a file of an
            earlier version do not.
    """

    digest: str
    n_prompts: int = 0
    n_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    reward: Any = None
    template_date: str | None = None
    speedups: dict[str, bool] = field(default_factory=no_speedups)
    marks_truncated: bool = False

    def lines(self, out: Path) -> Iterator[str]:
        """Yield the lines of the report."""
        # What is left in the counts, after pairs and truncated responses, are the reasons why there is no pair.
        counts = Counter(self.counts)
        n = counts.pop("pairs", 0)
        n_truncated = {name: counts.pop(f"truncated {name}", 0) for name in ("chosen", "rejected")}

        yield f"{n:,} pairs of {self.n_prompts:,} prompts in {out}"
        for no_pair, number in sorted(counts.items()):
            yield f"{number:,} prompts without a pair: {no_pair}"
        if not n:
            return
        for name in ("chosen", "rejected"):
            limit = f"{n_truncated[name]:,} reached the length limit"
            yield f"{name} responses: mean score {self.sums[name] / n:.4f}, {limit}"


def write_pairs(
    config: AnyConfig,
    out: str | Path,
    *,
    n_samples: int = 4,
    split: str = "train",
    max_prompts: int | None = None,
    min_difference: float = 0.0,
    report: Callable[[str], object] = print,
) -> Progress:
    """Sample responses of a config's policy, and write the best and the worst one of each prompt.

    Args:
        config: of an RL run; tokenizer, data pool, reward, policy and `env` are used.
        out: the JSONL file with prompt, chosen, rejected, chosen_score, rejected_score, chosen_truncated,
            rejected_truncated. The last two say that a response reached the length limit.
        n_samples: responses per prompt.
        split: `train`, `val` or `test`.
        max_prompts: use only the first prompts of the split.
        min_difference: minimum difference of the scores of a pair; equal scores are never a pair.
        report: called with each line of the report.

    Returns:
        The finished progress.

    Raises:
        ConfigError: the config or an option has errors, or the file was written with others.
        RL4LMsLikeError: a component failed, or the file cannot be written. The same call continues.
    """
    _check(config, n_samples, min_difference)
    assert isinstance(config, RunConfig)
    out = Path(out)

    # No metric is computed, so none needs its packages.
    evaluation = replace(config.train_evaluation, metrics=[])
    config = with_created_models(replace(config, train_evaluation=evaluation))

    # A file that is continued on another day has prompts with the date of its start, and one that is continued with
    # another version has responses that are sampled as at its start.
    started = _started(out)
    if config.tokenizer.template_date is None:
        day = None if started is None else started.template_date
        config = with_template_date(config, day or date.today().isoformat())
    speedups = _speedups(config, started)
    sampled_with = with_speedups(config, speedups) if speedups else config
    reward = build_components(config, with_callbacks=False).reward_fn

    with deterministic_operations(config.deterministic):
        responder, samples = _responder_and_samples(sampled_with, split, reward)
        samples = samples[:max_prompts]
        progress = _progress(out, digest_of(config, samples, [n_samples, split, min_difference]))
        progress.template_date = config.tokenizer.template_date
        progress.speedups = speedups
        if progress.reward is not None:
            load_state(reward, progress.reward)

        # A batch has about as many responses as a generation batch of the run, which is known to fit into memory.
        batch_size = max(config.env.n_envs // n_samples, 1)
        done = f"of {len(samples):,} prompts are done"
        if progress.n_prompts:
            report(f"{out}: {progress.n_prompts:,} {done}")

        last_report = time.monotonic()
        try:
            for start in range(progress.n_prompts, len(samples), batch_size):
                batch = samples[start : start + batch_size]

                # The seed depends on the first prompt of the batch only, so that a later start samples the same.
                seed = derived_seed(config.seed, "pairs", start)
                set_random_seed(seed)  # for users' components that draw from the global generators
                groups = _responses(responder, batch, n_samples, seed=seed, config=config, reward=reward)
                _append(out, progress, batch, groups, min_difference=min_difference, reward_state=state_of(reward))

                if time.monotonic() - last_report > REPORT_EVERY_S:
                    report(f"{progress.n_prompts:,} {done}, {progress.counts.get('pairs', 0):,} pairs")
                    last_report = time.monotonic()
        except (KeyboardInterrupt, RL4LMsLikeError):
            report(f"{progress.n_prompts:,} {done}; the same command continues with the next")
            raise

    for line in progress.lines(out):
        report(line)
    return progress


def _check(config: Any, n_samples: int, min_difference: float) -> None:
    """Raise an error that lists everything that makes pairs impossible."""
    issues = []
    if n_samples < 2:
        issues.append(ConfigIssue("--n_samples", f"a pair needs at least 2 responses to a prompt, got {n_samples}"))
    if not 0 <= min_difference < math.inf:
        issues.append(ConfigIssue("--min_difference", f"expected a number of at least 0, got {min_difference}"))

    if not isinstance(config, RunConfig):
        issues.append(ConfigIssue("reward_fn", "missing: pairs need the config of an RL run, with policy and reward"))
    else:
        if not (config.alg.policy.args.get("generation_kwargs") or {}).get("do_sample"):
            issues.append(
                ConfigIssue(f"{KWARGS}.do_sample", "set it to true: otherwise all responses to a prompt are equal")
            )
        if config.env.dialogue is not None:
            text = "pairs are of single responses to a prompt, and its episodes have several turns; remove it"
            issues.append(ConfigIssue("env.dialogue", text))
        for path in step_credits("reward_fn", vars(config.reward_fn)):
            text = "pairs compare the rewards of responses, and the sum of the scores rewards more steps"
            issues.append(ConfigIssue(path, f"{text}: set aggregate to mean, min or last"))
    if issues:
        raise ConfigError(issues)


def _responder_and_samples(config: RunConfig, split: str, reward: Any) -> tuple[Responder, list[Sample]]:
    """Return the model that generates the responses, and the samples of the split; the weights are loaded last."""
    silence_libraries()
    check_settings(config)
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    networks = {"model_name": load_model_config(arguments)}
    if config.alg.policy.reads_pictures:
        check_families(config, networks)
    tokenizer, pictures = tokenizer_and_pictures(config)
    check_fit(config, tokenizer, networks)
    max_prompt_length, max_new_tokens = check_lengths(config, tokenizer, networks)

    pool = render_prompts({split: build_datapool(config.datapool, split)}, config.tokenizer, tokenizer)[split]
    samples = [sample for sample, _ in pool]
    if not samples:
        raise DataPoolError(f"data pool {config.datapool.id!r}: the split {split!r} has no samples")

    # Unlike `check_references` of a run, for this split only: the others are not used.
    without = [sample.id for sample in samples if not sample.references]
    if without and getattr(reward, "needs_references", False):
        message = f"{config.reward_fn.id!r} compares with references, which {len(without):,} samples of {split!r} lack"
        raise ConfigError([ConfigIssue("reward_fn", f"{message} (the first is {without[0]!r})")])
    check_prompts(
        {split: samples},
        tokenizer,
        networks["model_name"],
        pictures=pictures,
        max_prompt_length=max_prompt_length,
    )

    # Responses as in the run's rollouts, with the length of its episodes.
    responder = responder_of(
        config,
        arguments.model_name,
        tokenizer,
        max_prompt_length=max_prompt_length,
        batch_size=config.env.n_envs,
        generation_kwargs={**(arguments.generation_kwargs or {}), "max_new_tokens": max_new_tokens},
        engine=arguments.engine,
    )
    set_n_threads(config, responder.model.model)
    return responder, samples


def digest_of(config: RunConfig, samples: Sequence[Sample], options: Sequence[Any]) -> str:
    """Return a digest of everything that determines the pairs; of a model in a folder, the time of its last change."""
    policy = config.alg.policy
    env = config.env
    # `n_envs` decides which prompts are generated together: their common padding may change the last bits of a score.
    blocks = [config.tokenizer, policy, version_of(policy.args["model_name"]), env.n_envs, env.args, config.reward_fn]
    texts = [[sample.identity, sample.rendered_prompt, sample.references] for sample in samples]
    return sha256(repr([blocks, config.seed, texts, *options]).encode(errors="replace")).hexdigest()


def _started(out: Path) -> Progress | None:
    """Return the progress of a file of pairs; None if there is none."""
    try:
        progress = Progress(**json.loads(_progress_file(out).read_text(encoding="utf-8")))
        if progress.template_date is not None:
            date.fromisoformat(progress.template_date)
        Speedups(**progress.speedups)
        return progress
    except (OSError, ValueError, TypeError):  # `_progress` reports what is wrong with the file
        return None


def _speedups(config: RunConfig, started: Progress | None) -> dict[str, bool]:
    """Return the speedups of the policy: those of the config, and the others as when the file was started.

    A user's policy may have none.
    """
    if not has_speedups(POLICIES.arguments_class(config.alg.policy.id)):
        return {}
    given = config.alg.policy.args.get(SPEEDUPS) or {}
    if started is None:
        return all_speedups(given)
    return {**stored_speedups(started.speedups), **given}


def _progress_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.progress.json")


def _progress(out: Path, digest: str) -> Progress:
    """Return the progress of a file of pairs, and remove what was written to it after that."""
    file = _progress_file(out)
    with saving(f"the pairs to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        refuse_links([out, file])
        if not file.exists() and not out.exists():
            return Progress(digest, marks_truncated=True)

        # Pairs of other responses must not be mixed, and lines of another file must not be cut off.
        try:
            progress = Progress(**read_json(file))
            is_intact = out.stat().st_size >= progress.n_bytes
        except (FileNotFoundError, ValueError, TypeError):
            is_intact = False
        if not is_intact or progress.digest != digest:
            message = f"{out} was written with another config, model, data or options, or by hand; choose another file"
            raise ConfigError([ConfigIssue("--out", f"{message}, or remove it and {file.name}")], "the command line")

        # A batch is written before the progress: a process that ended in between has left lines of a batch that will
        # be sampled again.
        os.truncate(out, progress.n_bytes)
    return progress


def _responses(
    responder: Responder, batch: Sequence[Sample], n_samples: int, *, seed: int, config: RunConfig, reward: Any
) -> list[list[Response]]:
    """Return `n_samples` scored responses to each prompt."""
    assert responder.generation_kwargs is not None
    is_encoder_decoder = responder.model.model.config.is_encoder_decoder
    layout = TextLayout(
        responder.tokenizer,
        max_prompt_length=responder.max_prompt_length,
        max_context_length=responder.generation_kwargs["max_new_tokens"],
        context_start_token=config.env.args.get("context_start_token") if is_encoder_decoder else None,
        prompt_truncation_side=responder.model.prompt_truncation_side,
        is_encoder_decoder=is_encoder_decoder,
    )

    # The responses to a prompt are rows next to each other, and each prompt is encoded once.
    samples: list[Sample] = []
    prompts: list[np.ndarray] = []
    for sample, ids in zip(batch, layout.encode_all(batch), strict=True):
        samples += [sample] * n_samples
        prompts += [ids] * n_samples
    episodes = responder.generated(prompts, layout.pad_token_id, seed).to("cpu")

    # The reward is called as after a rollout: with finished episodes, and within its time limit.
    lengths = episodes.response_lengths.tolist()
    rows = zip(samples, prompts, episodes.response_ids.numpy(), lengths, strict=True)
    observations = [Observation(*row, layout) for row in rows]
    try:
        rewards = within(config.env.reward_timeout, lambda: score_episodes(reward, observations))
    except TimeIsUp as error:
        raise RewardError(f"{type(reward).__name__} failed on a batch of {len(observations)}: {error}") from error

    # Rewards are one per token `[n_tokens]`; a response's score is their sum, rounded to the 7 digits of single
    # precision, so that equal rewards give equal scores.
    responses = []
    rewards_of_rows = np.split(rewards, np.cumsum(lengths)[:-1])
    truncated = (~episodes.terminated).tolist()
    for observation, rewards_of_row, is_truncated in zip(observations, rewards_of_rows, truncated, strict=True):
        score = float(f"{rewards_of_row.sum(dtype=np.float64):.7g}")
        responses.append(Response(observation.context_text, score, is_truncated))
    return [responses[start : start + n_samples] for start in range(0, len(responses), n_samples)]


def _append(
    out: Path,
    progress: Progress,
    batch: Sequence[Sample],
    groups: Sequence[Sequence[Response]],
    *,
    min_difference: float,
    reward_state: Any,
) -> None:
    """Write the pairs of a batch of prompts, and then the progress."""
    counts = Counter(progress.counts)
    sums: defaultdict[str, float] = defaultdict(float, progress.sums)
    lines = []
    for sample, responses in zip(batch, groups, strict=True):
        best = max(responses, key=lambda response: response.score)
        worst = min(responses, key=lambda response: response.score)
        no_pair = _no_pair(best, worst, min_difference)
        if no_pair is not None:
            counts[no_pair] += 1
            continue

        # A chat stays a list of messages, so that the data pool can render it with any template.
        pair: dict[str, Any] = {
            "prompt": sample.messages or sample.prompt_or_input_text,
            "chosen": best.text,
            "rejected": worst.text,
            "chosen_score": best.score,
            "rejected_score": worst.score,
        }
        if progress.marks_truncated:
            pair |= {f"chosen{TRUNCATED}": best.truncated, f"rejected{TRUNCATED}": worst.truncated}
        if sample.tools:
            pair["tools"] = sample.tools
        if sample.images:
            pair["images"] = [picture.cell() for picture in sample.images]
        lines.append(json.dumps(pair) + "\n")
        counts["pairs"] += 1
        for name, response in (("chosen", best), ("rejected", worst)):
            counts[f"truncated {name}"] += response.truncated
            sums[name] += response.score

    # The state is saved as JSON in a file that users may pass on.
    problem = not_json(reward_state)
    if problem is None:
        secret = secret_in(reward_state)
        problem = f"{secret} contains a secret" if secret else None
    if problem is not None:
        raise RL4LMsLikeError(f"the state_dict() of the reward cannot be saved: {problem}")

    # Pairs first, flushed to disk, and then the progress that counts them: it must never be ahead of the file.
    with saving(f"the pairs to {out}"):
        with out.open("ab") as file:
            if file.tell() != progress.n_bytes:
                raise RL4LMsLikeError(f"{out} was changed by another process: start the same command once")
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            progress.n_bytes = file.tell()
        progress.n_prompts += len(batch)
        progress.counts = dict(counts)
        progress.sums = dict(sums)
        progress.reward = reward_state
        write_whole(_progress_file(out), json.dumps(vars(progress)))


def _no_pair(best: Response, worst: Response, min_difference: float) -> str | None:
    """Return why two responses are not a pair; None if they are one."""
    if best.score == worst.score:
        return "all scores are equal"
    if best.score - worst.score < min_difference:
        return f"the difference is below {min_difference:g}"
    if best.text == worst.text:  # different token ids may decode to the same text, or the reward is random
        return "best and worst response are equal"
    return None
