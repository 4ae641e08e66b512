"""Notices about a config without errors: keys without an effect, and defaults with an unexpected effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rl4lms_like.config.binding import GENERATION, with_defaults
from rl4lms_like.core.stop_strings import KEY
from rl4lms_like.policies.arguments import NEUTRAL, TRUNCATING
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.import_paths import trusting
from rl4lms_like.system.ranks import n_processes
from rl4lms_like.system.schema import at, join

_STRAY_COMMA = re.compile(r"^(true|false),$", re.IGNORECASE)
FEW_EPISODES = 4
"""Minibatches with fewer episodes are reported."""
SHORT = 4.0
"""A length-adaptive lambda is reported if alpha times the longest response is below this number."""
SUITABLE_LEARNING_RATES = ((10e6, 1e-4), (1e9, 2e-5), (float("inf"), 5e-6))
"""Upper limit of the number of parameters, and the learning rate of PPO that suits it: `docs/hyperparameters.md`."""
LORA_FACTOR, ONE_STEP_FACTOR, FAR_TOO_HIGH = 10, 5, 10
"""Factors of the suitable rate for adapters and for algorithms with one step per rollout; and the factor above which a
rate is reported."""
_DEFAULT_LENGTH = 20
"""Default length of transformers, which includes the decoder's start token of seq2seq models."""

_ROLLOUTS, _EVALUATION = "alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs"


class Notice(ConfigIssue):
    """Message about a config path (`alg.policy.args.generation_kwargs`) that is valid."""


def without_stray_commas(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[Notice]]:
    """Return a copy with booleans in place of texts such as `True,` (Python syntax in YAML), and a notice for each."""
    notices: list[Notice] = []

    def cleaned(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item, join(path, index)) for index, item in enumerate(value)]
        if isinstance(value, str) and _STRAY_COMMA.match(value):
            truth = value[:-1].lower()
            notices.append(Notice(path, f"the text {value!r} is read as {truth}; remove the comma"))
            return truth == "true"
        return value

    return {key: cleaned(item, str(key)) for key, item in mapping.items()}, notices


def notices_of(blocks: Mapping[str, Any]) -> list[Notice]:
    """Return the notices about a config without errors."""
    trust = "code that comes with the files named here is run; keep this only if you trust them"
    args = _complete_arguments(blocks)
    return [
        *(Notice(path, trust) for path in trusting(blocks)),
        *_single_process(blocks),
        *_without_meaning(blocks),
        *_sampling(blocks),
        *_stop_strings(blocks),
        *_other_distribution(blocks, args),
        *_small_minibatches(blocks, args),
        *_schedules_without_effect(blocks, args),
        *_short_lambda(blocks, args),
        *_default_learning_rate(blocks, args),
    ]


def _single_process(blocks: Mapping[str, Any]) -> Iterator[Notice]:
    if at(blocks, "distributed.strategy") == "fsdp" and n_processes() == 1:
        yield Notice("distributed.strategy", "fsdp has no effect in a single process; torchrun starts several")


def _complete_arguments(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm's arguments with all defaults."""
    return at(with_defaults(blocks), "alg.args") or {}


def _without_meaning(blocks: Mapping[str, Any]) -> Iterator[Notice]:
    for key in ("reference_model", "reference_device") if at(blocks, "alg.kl_div.coeff") == 0 else ():
        if at(blocks, f"alg.policy.args.{key}") is not None:
            message = "not loaded: without a KL penalty (kl_div.coeff: 0) no KL to a reference model is measured"
            yield Notice(f"alg.policy.args.{key}", message)
    if "apply_model_parallel" in (at(blocks, "alg.policy.args") or {}):
        yield Notice("alg.policy.args.apply_model_parallel", "no longer has an effect and is ignored")
    if is_causal(blocks) and at(blocks, "env.args.context_start_token") is not None:
        message = "ignored: a causal model continues its prompt without a start token"
        yield Notice("env.args.context_start_token", message)


def _sampling(blocks: Mapping[str, Any]) -> Iterator[Notice]:
    for path in GENERATION:
        kwargs = at(blocks, path)
        if not isinstance(kwargs, Mapping):
            continue
        if kwargs.get("do_sample") and "top_k" not in kwargs:
            message = "transformers' default of 50 applies; 0 samples from the whole distribution"
            yield Notice(join(path, "top_k"), message)
        if kwargs.get("max_new_tokens") is None and kwargs.get("max_length") is None:
            message = f"not given; responses have at most {response_limit(blocks, path)} tokens"
            yield Notice(join(path, "max_new_tokens"), message)


def _stop_strings(blocks: Mapping[str, Any]) -> Iterator[Notice]:
    of_rollouts, evaluation = at(blocks, join(_ROLLOUTS, KEY)), at(blocks, _EVALUATION)
    if of_rollouts and isinstance(evaluation, Mapping) and KEY not in evaluation:
        yield Notice(join(_EVALUATION, KEY), f"not given; only rollouts end at {of_rollouts!r}")


def _other_distribution(blocks: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Notice]:
    """Report rollouts that are not sampled from the distribution whose log-probs are trained, or not until they end."""
    if at(blocks, "alg.policy") is None:
        return
    kwargs = at(blocks, _ROLLOUTS) or {}
    shaped = [f"{key} {kwargs[key]}" for key, value in NEUTRAL.items() if kwargs.get(key) not in (None, value)]
    if not kwargs.get("do_sample"):
        shaped = ["do_sample false"]  # transformers then ignores the others
    if shaped:
        message = (
            f"rollouts have {', '.join(shaped)}, but ratios, KL and entropy are those of the model's own distribution; "
            f"to sample from it, set do_sample: true, temperature: 1, top_k: 0, top_p: 1"
        )
        yield Notice(_ROLLOUTS, message)
    cut = [key for key in TRUNCATING if kwargs.get(key) not in (None, NEUTRAL[key])]
    cut += [] if "top_k" in kwargs else ["top_k (50 by default)"]
    if cut and args.get("importance_correction", "none") != "none":
        message = f"cannot correct for tokens that {', '.join(cut)} exclude, which are never sampled: a bias remains"
        yield Notice("alg.args.importance_correction", message)
    if not at(blocks, "env.args.terminate_on_eos"):
        message = "false: responses continue after the end-of-text token, to the full length"
        yield Notice("env.args.terminate_on_eos", message)


def _small_minibatches(blocks: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Notice]:
    """Report minibatches so small that the gradient is noisy."""
    if args.get("n_epochs") is None:  # without n_epochs (trpo) only the critic has minibatches
        return
    in_episodes = args.get("minibatch_episodes")
    if in_episodes is not None and in_episodes < FEW_EPISODES:
        message = f"the gradient of {in_episodes} is noisy; use {FEW_EPISODES} or more"
        yield Notice("alg.args.minibatch_episodes", message)
    batch, length = args.get("batch_size"), _longest_response(blocks)
    if batch is None:
        return
    n_episodes = max(batch // length, 1)
    if n_episodes < FEW_EPISODES:
        plural = "s" if n_episodes > 1 else ""
        message = f"{batch} tokens are {n_episodes} episode{plural} of {length} tokens, so the gradient is noisy"
        yield Notice("alg.args.batch_size", f"{message}; {FEW_EPISODES * length} or more hold {FEW_EPISODES}")


def _schedules_without_effect(blocks: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Notice]:
    """Report a warmup that lasts the whole run, and early stopping that cannot come before its end."""
    n_iters = at(blocks, "train_evaluation.n_iters")
    warmup = args.get("warmup_iterations") or 0
    if warmup and warmup >= n_iters:
        message = f"{warmup} iterations of {n_iters}: the learning rate never reaches that of the schedule"
        yield Notice("alg.args.warmup_iterations", message)
    patience = at(blocks, "train_evaluation.early_stopping.patience")
    if patience is None:
        return
    first_stop = patience * at(blocks, "train_evaluation.eval_every")
    if first_stop >= n_iters:
        message = f"can end the run after {first_stop} iterations at the earliest, and it has {n_iters}"
        yield Notice("train_evaluation.early_stopping.patience", message)


def _short_lambda(blocks: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Notice]:
    """Report a length-adaptive lambda that is small for all responses."""
    alpha, length = args.get("gae_length_alpha"), _longest_response(blocks)
    if alpha is not None and alpha * length < SHORT:
        largest = max(0.0, 1 - 1 / (alpha * length))
        message = f"lambda is at most {largest:.2g}, since responses have at most {length} tokens"
        yield Notice("alg.args.gae_length_alpha", f"{message}; {SHORT / length:.2g} gives up to {1 - 1 / SHORT:g}")


def _longest_response(blocks: Mapping[str, Any]) -> int:
    return min(at(blocks, "env.args.max_episode_length") or 512, response_limit(blocks, _ROLLOUTS))


def _default_learning_rate(blocks: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Notice]:
    rate = args.get("learning_rate")
    if rate is None or at(blocks, "alg.args.learning_rate") is not None or at(blocks, "alg.policy") is None:
        return
    message = f"not given; the default is {rate:g}"
    if "critic_learning_rate" in args and "cg_max_steps" not in args:  # chosen by this library, for the policy
        message += ", which suits models of about 100M parameters; smaller models need a higher one"
    yield Notice("alg.args.learning_rate", message)


def learning_rate_notice(blocks: Mapping[str, Any], n_parameters: int) -> Notice | None:
    """Return a notice if the learning rate is far above the suitable one for a model's size; else None."""
    args = _complete_arguments(blocks)
    rate = args.get("learning_rate")
    if not isinstance(rate, int | float) or "cg_max_steps" in args:  # in trpo it is the critic's
        return None
    suitable = next(suitable for limit, suitable in SUITABLE_LEARNING_RATES if n_parameters < limit)
    if at(blocks, "alg.policy.args.peft"):
        suitable *= LORA_FACTOR
    if args.get("n_epochs") is None:
        suitable *= ONE_STEP_FACTOR
    if rate <= FAR_TOO_HIGH * suitable:
        return None
    message = f"{rate:g} is far above {suitable:g}, which suits a model of {n_parameters:,} parameters"
    return Notice("alg.args.learning_rate", message)


def response_limit(blocks: Mapping[str, Any], path: str) -> int:
    """Return the maximum response length in tokens that the generation arguments at `path` allow."""
    kwargs = at(blocks, path) or {}
    if kwargs.get("max_new_tokens") is not None:
        return int(kwargs["max_new_tokens"])
    length = int(kwargs.get("max_length") or _DEFAULT_LENGTH)
    return length if is_causal(blocks) else length - 1


def is_causal(blocks: Mapping[str, Any]) -> bool:
    """Return whether the run's model is decoder-only according to its ids."""
    if at(blocks, "alg.policy.id") is not None:
        return "causal" in at(blocks, "alg.policy.id")
    return bool(at(blocks, "alg.model_type") == "causal")
