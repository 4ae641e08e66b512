"""Rules among the blocks of a config, and notices about valid settings.

A rule is a function whose parameters are names of blocks; it yields what is wrong with them together, and is skipped if
one of them has an error (`system.schema.broken_rules`). The names:

    tokenizer  datapool  env  train_evaluation  doctor  distributed      blocks of the file
    alg                                                                  its block; of an RL run the `Algorithm`
    policy  policy_id  kl_div                                            of an RL run: arguments and id; the KL

A rule about one block is a method of its class (`issues`). Those among an algorithm, its policy and its KL are in
`algorithms.rules`, because algorithms that are built in Python run them too. Notices are rules with a lower severity:
they yield a `Notice` about a setting that is valid, but may surprise. No rule loads a model or imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl4lms_like.algorithms.arguments import CorrectedArguments, NLPOArguments, TRPOArguments
from rl4lms_like.algorithms.critic_free_arguments import CriticFreeArguments
from rl4lms_like.algorithms.rules import Algorithm
from rl4lms_like.config.run_config import (
    DistributedConfig,
    DoctorConfig,
    MetricConfig,
    PreferenceAlgConfig,
    PromptPoolConfig,
    PtxConfig,
    RewardConfig,
    RunConfig,
    RunEnvConfig,
    SupervisedAlgConfig,
    SupervisedEvaluationConfig,
    TokenizerConfig,
    TrainEvaluationConfig,
    where_from,
)
from rl4lms_like.core.model_weights import names_folder
from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.engines.arguments import longest_response
from rl4lms_like.envs.arguments import EnvConfig
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES, is_causal
from rl4lms_like.policies.arguments import (
    ADAMW_8BIT,
    NEUTRAL,
    OWN_ENGINE,
    TRUNCATING,
    MaskablePolicyArguments,
    PolicyArguments,
    VisionPolicyArguments,
    unsupported_generation,
)
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import EpisodeReward
from rl4lms_like.rewards.steps import StepReward
from rl4lms_like.rollouts.kl import KLConfig
from rl4lms_like.small_models.embedded import NAMES, TINY_MODEL, is_embedded, unknown_embedded_model
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, MissingExtraError, Notice
from rl4lms_like.system.functions import NamedFunction
from rl4lms_like.system.import_paths import trusting
from rl4lms_like.system.ranks import n_processes
from rl4lms_like.system.schema import Rule, join, signature_of
from rl4lms_like.system.wording import shown

KEEP_BEST, HELD_OUT = "train_evaluation.keep_best", "doctor.held_out"
EARLY_STOPPING = "train_evaluation.early_stopping"
SUPERVISED = "alg.training_args.metric_for_best_model"
"""Config path of the metric in supervised runs: `loss` or a key of the metrics, with an optional prefix `eval_`."""

RUN_REWARD = "reward"
"""Id of the metric that is the run's own reward."""
RUN_REWARD_KEYS = METRICS.entry(RUN_REWARD).keys

ENVIRONMENT_REWARD = "environment"
"""Id of the reward of runs whose only rewards are those of the environment."""
NUMBERED_EPISODES = "episodes"
"""Id of the data pool of dialogues without data."""

ENVIRONMENT_KEY = "environment/{name}"
"""Keys of the numbers of dialogues."""
ALWAYS_REPORTED = (*RUN_REWARD_KEYS, ENVIRONMENT_KEY)
"""Keys that evaluations report without a metric in the list, if a setting selects them."""

ROLLOUTS, EVALUATION = "alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs"
"""Config paths of generation arguments in RL runs."""

FEW_EPISODES = 4
"""Minibatches with fewer episodes are reported."""
SHORT = 4.0
"""A length-adaptive lambda is reported if alpha times the longest response is below this number."""
SUITABLE_LEARNING_RATES = ((10e6, 1e-4), (1e9, 2e-5), (float("inf"), 5e-6))
"""Upper limit of the number of parameters, and the learning rate of PPO that suits it: `docs/hyperparameters.md`."""
LORA_FACTOR, ONE_STEP_FACTOR, FAR_TOO_HIGH = 10, 5, 10
"""Factors of the suitable rate for adapters and for algorithms with one step per rollout; and the factor above which a
rate is reported."""

_WHOLE_WEIGHTS = "needs whole weights: set distributed.strategy to ddp"
_OPTIMIZERS_OF_PARTS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "sgd", "adagrad", "rmsprop")
"""Optimizers of the Trainer that can change split weights: those that change each number by itself, or by blocks that
no two processes share."""

Issues = Iterator[ConfigIssue]
Notices = Iterator[Notice]


# --- models and metrics of all runs ---------------------------------------------------------------------------------


def folder_of_tokenizer(tokenizer: TokenizerConfig) -> Issues:
    """Check that a tokenizer which can only be local exists."""
    yield from _missing_folder("tokenizer.model_name", tokenizer.model_name)


def _missing_folder(path: str, name: str | None) -> Issues:
    if name is not None and names_folder(name) and not is_embedded(name) and not with_home(name).is_dir():
        yield ConfigIssue(path, f"there is no folder {name!r}{where_from(name)}")


def keys_of_metrics(train_evaluation: TrainEvaluationConfig | SupervisedEvaluationConfig) -> Issues:
    """Find metrics that report the same key, which would overwrite each other. Identical metrics are computed once."""
    metrics = train_evaluation.metrics
    owners: dict[str, int] = {}
    for index, metric in enumerate(metrics):
        keys = [] if metric in metrics[:index] else metric.keys
        for key in keys:
            if "{" not in key and owners.setdefault(key, index) != index:
                other = f"train_evaluation.metrics.{owners[key]} ({metrics[owners[key]].id})"
                text = f"reports {key!r}, as {other} does; give one of them a name, which is appended to its keys"
                yield ConfigIssue(f"train_evaluation.metrics.{index}", text)
                break


def _unreported(path: str, key: str, metrics: list[MetricConfig], others: Iterable[str] = ()) -> Issues:
    """Yield an error for a key that no metric reports, if all reported keys are known: a user's are not."""
    known = []
    for metric in metrics:
        if not metric.keys:
            return
        known += metric.keys
    known += others

    # transformers' Trainer adds a prefix to all keys, and the loss.
    name = key
    if path == SUPERVISED:
        name = key.removeprefix("eval_")
        known = ["loss", *known]

    if not _is_among(name, known):
        yield unknown_metric(path, key, known)


def _is_among(key: str, known: Iterable[str]) -> bool:
    """Return whether a key is a known one; `{n}` in a key of the table is a part that depends on arguments."""
    patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(known_key)) for known_key in known]
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def unknown_metric(path: str, key: str, known: Iterable[str]) -> ConfigIssue:
    """Return the error for a key at a config path that no metric reports, with the closest known key."""
    keys = list(known)
    near = difflib.get_close_matches(key, keys, n=1)
    listed = ", ".join(keys) or "none, because train_evaluation.metrics is empty"
    hint = f"did you mean {near[0]!r}?" if near else f"known: {listed}"
    return ConfigIssue(path, f"no metric reports {key!r}; {hint}")


def embedded_models(mapping: Mapping[str, Any]) -> Issues:
    """Find names with the prefix of embedded models that no embedded model has, and a `tiny_model` without use.

    Any text of the file may be such a name, so this rule reads the file as it is.
    """
    named = {path: value for path, value in _leaves(mapping) if is_embedded(value)}
    is_described = mapping.get("tiny_model") is not None
    for path, value in named.items():
        if value not in NAMES and not (is_described and value == TINY_MODEL):
            yield ConfigIssue(path, unknown_embedded_model(value))
    if is_described and TINY_MODEL not in named.values():
        yield ConfigIssue("tiny_model", f"has no effect: no model of this config is {TINY_MODEL!r}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of nested mappings and lists."""
    if not isinstance(value, Mapping | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(item, join(path, key))


# --- RL runs --------------------------------------------------------------------------------------------------------


def policy_of_a_file(policy: PolicyArguments) -> Issues:
    """Check what is refused in a file, but not in Python: missing folders, and keys that the file has elsewhere."""
    for key in ("model_name", "reference_model", "critic_model", "teacher_model"):
        yield from _missing_folder(f"alg.policy.args.{key}", getattr(policy, key))
    yield from _post_processor_of_responses(ROLLOUTS, policy.generation_kwargs)

    others = {"weight_decay": "alg.policy.args.weight_decay", "lr": "alg.args.learning_rate"}
    for key, instead in others.items():
        if key in policy.optimizer_kwargs:
            yield ConfigIssue(f"alg.policy.args.optimizer_kwargs.{key}", f"is set by {instead}")


def optimizer_of_the_policy(policy: PolicyArguments, alg: Algorithm) -> Issues:
    """Check that the algorithm uses the policy's optimizer."""
    if policy.optimizer["id"] == ADAMW_8BIT and alg.values.get("use_rms_prop"):
        text = f"{alg.id} has its own optimizer, RMSprop; set alg.args.use_rms_prop to false"
        yield ConfigIssue("alg.policy.args.optimizer", text)


def sampler_with_rewards(datapool: PromptPoolConfig, env: EnvConfig) -> Issues:
    """Check that a sampler of prompts gets the rewards of all episodes."""
    if datapool.sampler is None:
        return
    if env.vec_env != "text":
        text = f"{env.vec_env!r} has one sampler per environment, which gets no rewards; set it to text"
        yield ConfigIssue("env.vec_env", text)
    if env.arguments.priority_scale:
        yield ConfigIssue("env.args.priority_scale", "has no effect with datapool.sampler; remove one of them")


def whole_groups(alg: Algorithm, env: EnvConfig) -> Issues:
    """Check that all responses to a prompt are generated together."""
    size = alg.values.get("group_size") or 1
    if not isinstance(size, int) or size <= 1:  # an algorithm of another library may call something else so
        return
    if env.n_envs % size:
        text = f"must be a multiple of alg.args.group_size, {size}: {env.n_envs} responses are generated together"
        yield ConfigIssue("env.n_envs", text)
    if env.vec_env != "text":
        yield ConfigIssue("env.vec_env", "must be text if alg.args.group_size is above 1")


def steps_with_texts(ptx: PtxConfig | None, alg: Algorithm) -> Issues:
    """Check that the algorithm takes steps along gradients, to which that of the loss on texts can be added."""
    if ptx is not None and isinstance(alg.arguments, TRPOArguments):
        text = f"cannot be used with {alg.id}, which takes no steps of an optimizer; use another algorithm, such as ppo"
        yield ConfigIssue("alg.ptx", text)


def rewards_of_steps(reward_fn: RewardConfig, alg: Algorithm, env: EnvConfig) -> Issues:
    """Check that rewards of single steps can be credited, and that responses are not compared by their sums."""
    compares = alg.arguments.is_pairwise
    if isinstance(alg.arguments, CriticFreeArguments):
        compares = compares or (alg.arguments.task_reward and alg.arguments.baseline != "none")

    for path in step_credits("reward_fn", vars(reward_fn)):
        if compares:
            text = f"{alg.id} compares the rewards of responses, and the sum of the scores rewards more steps"
            yield ConfigIssue(path, f"{text}: set aggregate to mean, min or last")
        elif env.vec_env != "text":
            text = f"the scores of steps are not known token by token, as {env.vec_env!r} needs them"
            yield ConfigIssue(path, f"{text}: set aggregate to mean, min or last, or env.vec_env to text")


def step_credits(path: str, block: Any) -> Iterator[str]:
    """Yield the path of the argument `aggregate` of each reward of steps that has none, in a reward's block."""
    if isinstance(block, list | tuple):
        for index, item in enumerate(block):
            yield from step_credits(join(path, index), item)
    if not isinstance(block, Mapping):
        return
    for key, value in block.items():
        yield from step_credits(join(path, key), value)

    id, args = block.get("id"), block.get("args")
    if not isinstance(id, str) or not isinstance(args, Mapping):
        return
    reward = args["object"].value if isinstance(args.get("object"), NamedFunction) else None
    if isinstance(reward, EpisodeReward):
        if not reward.terminal:
            yield path
    elif _is_step_reward(id) and args.get("aggregate") is None:
        yield join(path, "args.aggregate")


def _is_step_reward(id: str) -> bool:
    try:
        kind = REWARDS.resolve(id)
    except (ConfigError, MissingExtraError):  # errors of their own
        return False
    return isinstance(kind, type) and issubclass(kind, StepReward)


def reward_of_environment(reward_fn: RewardConfig, datapool: PromptPoolConfig, env: RunEnvConfig) -> Issues:
    """Check that there is an environment where only its rewards, or its texts, are used."""
    if env.dialogue is not None:
        return
    if reward_fn.id == ENVIRONMENT_REWARD:
        yield ConfigIssue("reward_fn.id", f"{reward_fn.id!r} has no reward of its own; set env.dialogue")
    if datapool.id == NUMBERED_EPISODES:
        yield ConfigIssue("datapool.id", f"{datapool.id!r} has no prompts of its own; set env.dialogue")


def turns_of_dialogues(env: RunEnvConfig, policy: PolicyArguments, policy_id: str) -> Issues:
    """Check that the policy can continue a context after an answer, and that turns have one length."""
    if env.dialogue is None:
        return
    if not is_causal(policy_id):
        yield ConfigIssue("env.dialogue", f"needs a decoder-only model: {policy_id} writes one response to a prompt")
    if policy.is_ahead:
        text = "cannot be used with env.dialogue, whose turns follow the answers of the environment; remove it"
        yield ConfigIssue("alg.policy.args.engine.ahead", text)
    for issue in generation_of_turns(policy.generation_kwargs, env.dialogue.max_turn_length):
        yield issue.below(ROLLOUTS)


def evaluated_dialogues(env: RunEnvConfig, train_evaluation: TrainEvaluationConfig) -> Issues:
    """Check that the turns of evaluations are as long as those of rollouts."""
    if env.dialogue is None:
        return
    for issue in generation_of_turns(train_evaluation.generation_kwargs or {}, env.dialogue.max_turn_length):
        yield issue.below(EVALUATION)


def generation_of_turns(kwargs: Mapping[str, Any], max_turn_length: int) -> Issues:
    """Yield an error for each generation argument that turns of a dialogue cannot have."""
    if (kwargs.get("num_beams") or 1) > 1:
        text = "beams keep several texts, and an environment has answered one; use sampling or greedy decoding"
        yield ConfigIssue("num_beams", text)

    # `max_new_tokens` has the length of a turn by default, see `load.add_dialogue_defaults`.
    length = f"the length of a turn is env.dialogue.max_turn_length, {max_turn_length}"
    if kwargs.get("max_new_tokens") not in (None, max_turn_length):
        yield ConfigIssue("max_new_tokens", f"{length}; remove it, or set both to one value")
    if kwargs.get("max_length") is not None:
        yield ConfigIssue("max_length", f"{length}, and max_episode_length that of all turns; remove it")


def rollouts_in_episodes(alg: Algorithm, env: EnvConfig) -> Issues:
    """Check that generation batches of `n_envs` episodes fill a rollout exactly."""
    n_episodes = alg.arguments.n_episodes
    if n_episodes is not None and n_episodes % env.n_envs:
        text = f"must be a multiple of env.n_envs, {env.n_envs} episodes that are generated together; got {n_episodes}"
        yield ConfigIssue("alg.args.n_episodes", text)


def masks_for_nlpo(alg: Algorithm, policy: PolicyArguments, policy_id: str) -> Issues:
    """Check that `nlpo` is used with a maskable policy, and vice versa."""
    learns_masks = isinstance(alg.arguments, NLPOArguments)
    has_masks = isinstance(policy, MaskablePolicyArguments)
    if learns_masks and not has_masks:
        maskable = f"maskable_{policy_id}" if f"maskable_{policy_id}" in POLICIES else "a maskable policy"
        text = f"{alg.id} needs a policy with a mask model: {maskable}, not {policy_id}"
        yield ConfigIssue("alg.policy.id", text)
    if has_masks and not learns_masks:
        without_masks = policy_id.removeprefix("maskable_")
        hint = f"; use {without_masks} with {alg.id}" if without_masks != policy_id else ""
        text = f"{policy_id} needs alg.id: nlpo, which refreshes its mask model{hint}"
        yield ConfigIssue("alg.policy.id", text)


def family_of_policy(policy: PolicyArguments, policy_id: str) -> Issues:
    """Check what depends on the family of the policy's model: its engine, and a length with a start token."""
    for issue in policy.family_issues(is_causal=is_causal(policy_id)):
        yield issue.below("alg.policy.args")
    if not is_causal(policy_id):
        yield from _short_length(ROLLOUTS, policy.generation_kwargs)


def vision_policies(
    policy: PolicyArguments, env: RunEnvConfig, tokenizer: TokenizerConfig, distributed: DistributedConfig
) -> Issues:
    """Check that nothing is selected that a policy with pictures does not support."""
    if not isinstance(policy, VisionPolicyArguments):
        return
    if env.dialogue is not None:
        yield ConfigIssue("env.dialogue", "has prompts without images; remove it, or use a causal policy")
    if env.vec_env == "subproc":
        yield ConfigIssue("env.vec_env", "images are not passed to the processes of subproc; use text")
    if distributed.strategy == "fsdp":
        yield ConfigIssue("distributed.strategy", "weights of vision-language models are not split; use ddp")
    yield from _no_added_tokens(tokenizer)


def _no_added_tokens(tokenizer: TokenizerConfig) -> Issues:
    """Yield an error for tokens that would be added to a vision-language model."""
    if tokenizer.named_tokens:
        key = "add_tokens" if tokenizer.add_tokens else "chat_template"
        yield ConfigIssue(f"tokenizer.{key}", "no tokens are added to vision-language models; remove it")


def _short_length(path: str, kwargs: Mapping[str, Any]) -> Issues:
    if kwargs.get("max_length") == 1 and kwargs.get("max_new_tokens") is None:
        yield ConfigIssue(f"{path}.max_length", "counts a seq2seq model's start token: expected at least 2")


def _post_processor_of_responses(path: str, kwargs: Mapping[str, Any]) -> Issues:
    if kwargs.get("post_processing_fn") is not None:
        text = "is only for supervised runs; the responses of an RL run are scored unchanged"
        yield ConfigIssue(f"{path}.post_processing_fn", text)


def evaluations(train_evaluation: TrainEvaluationConfig) -> Issues:
    """Check that evaluations report the metrics that the run reads, and that they score the texts as generated."""
    metrics = train_evaluation.metrics
    for path, selected in ((KEEP_BEST, train_evaluation.keep_best), (EARLY_STOPPING, train_evaluation.early_stopping)):
        if selected is not None:
            yield from _unreported(f"{path}.metric", selected.metric, metrics, ALWAYS_REPORTED)
    yield from _post_processor_of_responses(EVALUATION, train_evaluation.generation_kwargs or {})


def numbers_of_environments(train_evaluation: TrainEvaluationConfig, doctor: DoctorConfig, env: RunEnvConfig) -> Issues:
    """Check that there is an environment where a setting selects a number that only evaluations of dialogues report."""
    if env.dialogue is not None:
        return
    blocks: dict[str, Any] = {KEEP_BEST: train_evaluation.keep_best, EARLY_STOPPING: train_evaluation.early_stopping}
    for index, held_out in enumerate(doctor.held_out):
        blocks[f"{HELD_OUT}.{index}"] = held_out

    for path, block in blocks.items():
        if block is not None and _is_among(block.metric, [ENVIRONMENT_KEY]):
            yield ConfigIssue(f"{path}.metric", f"no metric reports {block.metric!r} without env.dialogue")


def generation_of_evaluations(
    policy: PolicyArguments, policy_id: str, train_evaluation: TrainEvaluationConfig
) -> Issues:
    """Check that the policy's family and engine support the arguments of evaluations."""
    kwargs = train_evaluation.generation_kwargs or {}
    if not is_causal(policy_id):
        yield from _short_length(EVALUATION, kwargs)
    id = policy.engine["id"]
    if id != OWN_ENGINE:
        yield from unsupported_generation(id, kwargs, EVALUATION)
        if policy.is_ahead and train_evaluation.replay is not None:
            text = "has no effect in a replay, which generates no rollouts; remove it"
            yield ConfigIssue("alg.policy.args.engine.ahead", text)


def algorithm_with_engine(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that an external engine has the temperatures of the algorithm, which corrects rollouts of older weights."""
    id = policy.engine["id"]
    if id == OWN_ENGINE:
        return
    if alg.arguments.first_token_temperature is not None:
        text = f"is not supported by the engine {id}; remove it, or use engine: {{id: {OWN_ENGINE}}}"
        yield ConfigIssue("alg.args.first_token_temperature", text)

    # A loss of pairs has no ratios that could be weighted.
    corrects = isinstance(alg.arguments, CorrectedArguments) and not alg.arguments.is_pairwise
    if policy.is_ahead and not corrects:
        text = f"{alg.id} cannot correct for rollouts of older weights; remove it"
        yield ConfigIssue("alg.policy.args.engine.ahead", text)


def whole_episodes_ahead(policy: PolicyArguments, env: EnvConfig) -> Issues:
    """Check that rollouts which are generated ahead are whole episodes."""
    if policy.is_ahead and policy.engine["id"] != OWN_ENGINE and env.vec_env != "text":
        yield ConfigIssue("alg.policy.args.engine.ahead", "needs vec_env: text")


def algorithm_with_split_weights(distributed: DistributedConfig, alg: Algorithm) -> Issues:
    """Check that the algorithm can train weights that are split over the processes."""
    if distributed.strategy == "fsdp" and isinstance(alg.arguments, TRPOArguments | NLPOArguments):
        yield ConfigIssue("alg.id", f"{shown(alg.id)} {_WHOLE_WEIGHTS}")


def policy_with_split_weights(distributed: DistributedConfig, policy: PolicyArguments) -> Issues:
    """Check that the policy's weights can be split, and are all on the device of their process."""
    if distributed.strategy == "fsdp":
        if policy.compile:
            yield ConfigIssue("alg.policy.args.compile", f"true {_WHOLE_WEIGHTS}")
        if policy.generates_in_other_dtype:
            yield ConfigIssue("alg.policy.args.generation_dtype", f"{policy.generation_dtype} {_WHOLE_WEIGHTS}")
        if policy.reference_dtype == "bfloat16":
            yield ConfigIssue("alg.policy.args.reference_dtype", f"bfloat16 {_WHOLE_WEIGHTS}")
        if policy.activation_offload:
            yield ConfigIssue("alg.policy.args.activation_offload", f"true {_WHOLE_WEIGHTS}")
    if distributed.strategy == "fsdp" or n_processes() > 1:
        for key in ("critic_device", "reference_device"):
            if getattr(policy, key) is not None:
                text = "each of several processes has one device; remove it"
                yield ConfigIssue(f"alg.policy.args.{key}", text)


def average_with_split_weights(distributed: DistributedConfig, train_evaluation: TrainEvaluationConfig) -> Issues:
    """Check that weights are averaged in processes that have all of them."""
    if distributed.strategy == "fsdp" and train_evaluation.average is not None:
        yield ConfigIssue("train_evaluation.average", _WHOLE_WEIGHTS)


def held_out_metrics(doctor: DoctorConfig, train_evaluation: TrainEvaluationConfig) -> Issues:
    """Check that the metrics which must not fall are reported."""
    for index, held_out in enumerate(doctor.held_out):
        path = f"{HELD_OUT}.{index}.metric"
        yield from _unreported(path, held_out.metric, train_evaluation.metrics, ALWAYS_REPORTED)


def reads_run_reward(config: RunConfig) -> bool:
    """Return whether a run reads its own reward as a metric, without listing it among its metrics."""
    metrics = config.train_evaluation.metrics
    known: list[str] = []
    for metric in metrics:
        if not metric.keys:  # a user's metric may report any key
            return False
        known += metric.keys

    selected = [held_out.metric for held_out in config.doctor.held_out]
    for choice in (config.train_evaluation.keep_best, config.train_evaluation.early_stopping):
        if choice is not None:
            selected.append(choice.metric)
    return any(_is_among(key, RUN_REWARD_KEYS) and not _is_among(key, known) for key in selected)


# --- supervised and preference runs ---------------------------------------------------------------------------------


def model_of_texts(alg: SupervisedAlgConfig | PreferenceAlgConfig) -> Issues:
    """Check the folders of models that can only be local, and the length of texts of an encoder-decoder model."""
    yield from _missing_folder("alg.model_name", alg.model_name)
    if isinstance(alg, PreferenceAlgConfig):
        yield from _missing_folder("alg.args.reference_model", alg.args.get("reference_model"))
    if not alg.is_causal:
        yield from _short_length("alg.generation_kwargs", alg.generation_kwargs)


def images_in_prompts(tokenizer: TokenizerConfig, alg: SupervisedAlgConfig | PreferenceAlgConfig) -> Issues:
    """Check that nothing is selected that a model of prompts with images does not support."""
    if not alg.reads_pictures:
        return
    yield from _no_added_tokens(tokenizer)
    if isinstance(alg, SupervisedAlgConfig) and alg.loss_on_prompt:
        yield ConfigIssue("alg.loss_on_prompt", "prompts with images are read, not learned; remove it")


def prompts_and_responses(tokenizer: TokenizerConfig, alg: SupervisedAlgConfig | PreferenceAlgConfig) -> Issues:
    """Find settings of two texts where a chat template separates them, or a reward model reads them as one."""
    if tokenizer.chat_template and alg.separator is not None:
        yield ConfigIssue("alg.separator", "has no effect with tokenizer.chat_template, which separates messages")
    if isinstance(alg, PreferenceAlgConfig) and not alg.writes_text and tokenizer.max_length is not None:
        text = f"{alg.id} reads prompt and response as one text; it cuts no prompts"
        yield ConfigIssue("tokenizer.max_length", text)


def trainer_with_split_weights(
    distributed: DistributedConfig,
    alg: SupervisedAlgConfig | PreferenceAlgConfig,
    train_evaluation: SupervisedEvaluationConfig,
) -> Issues:
    """Check that transformers' Trainer can train weights that are split over the processes."""
    if distributed.strategy != "fsdp":
        return
    if alg.reads_pictures:
        yield ConfigIssue("distributed.strategy", "weights of vision-language models are not split; use ddp")
    if train_evaluation.average is not None:
        yield ConfigIssue("train_evaluation.average", _WHOLE_WEIGHTS)

    if alg.training_args.get("torch_compile"):
        yield ConfigIssue("alg.training_args.torch_compile", f"true {_WHOLE_WEIGHTS}")
    if alg.activation_offload:
        yield ConfigIssue("alg.activation_offload", f"true {_WHOLE_WEIGHTS}")
    if alg.training_args.get("fp16"):
        text = "its scale of gradients is not shared by processes with split weights; use bf16, or strategy: ddp"
        yield ConfigIssue("alg.training_args.fp16", text)
    optimizer = alg.training_args.get("optim")
    if optimizer not in (None, *_OPTIMIZERS_OF_PARTS):
        text = f"{shown(optimizer)} {_WHOLE_WEIGHTS}, or use one of {', '.join(_OPTIMIZERS_OF_PARTS)}"
        yield ConfigIssue("alg.training_args.optim", text)


def metrics_of_texts(
    alg: SupervisedAlgConfig | PreferenceAlgConfig, train_evaluation: SupervisedEvaluationConfig
) -> Issues:
    """Check that the metric of the best checkpoint is reported, and that the run has what metrics read."""
    keys_of_objective = alg.arguments.keys if isinstance(alg, PreferenceAlgConfig) else ()
    key = alg.training_args.get("metric_for_best_model")
    if isinstance(key, str):
        yield from _unreported(SUPERVISED, key, train_evaluation.metrics, keys_of_objective)
    if isinstance(alg, PreferenceAlgConfig) and not alg.writes_text and train_evaluation.metrics:
        text = f"{alg.id} writes no text; it is evaluated on the preferences of val and test"
        yield ConfigIssue("train_evaluation.metrics", text)
    for index, metric in enumerate(train_evaluation.metrics):
        if metric.id == RUN_REWARD:
            text = "is the reward of an RL run, and this run has none; metrics such as reward_model need no reward"
            yield ConfigIssue(f"train_evaluation.metrics.{index}", text)


EVERY_RUN: tuple[Rule, ...] = (folder_of_tokenizer, keys_of_metrics)
ON_POLICY: tuple[Rule, ...] = (
    policy_of_a_file,
    optimizer_of_the_policy,
    sampler_with_rewards,
    whole_groups,
    rewards_of_steps,
    reward_of_environment,
    turns_of_dialogues,
    evaluated_dialogues,
    numbers_of_environments,
    rollouts_in_episodes,
    steps_with_texts,
    masks_for_nlpo,
    family_of_policy,
    vision_policies,
    evaluations,
    generation_of_evaluations,
    algorithm_with_engine,
    whole_episodes_ahead,
    algorithm_with_split_weights,
    policy_with_split_weights,
    average_with_split_weights,
    held_out_metrics,
)
OFFLINE: tuple[Rule, ...] = (
    model_of_texts,
    images_in_prompts,
    prompts_and_responses,
    trainer_with_split_weights,
    metrics_of_texts,
)


# --- notices --------------------------------------------------------------------------------------------------------


def trusted_code(mapping: Mapping[str, Any]) -> Notices:
    """Report code of others that is run. Any block can allow it, so this rule reads the file as it is."""
    message = "code that comes with the files named here is run; keep this only if you trust them"
    for path in trusting(mapping):
        yield Notice(path, message)


def split_weights_of_one_process(distributed: DistributedConfig) -> Notices:
    """Report split weights of a single process."""
    if distributed.strategy == "fsdp" and n_processes() == 1:
        yield Notice("distributed.strategy", "fsdp has no effect in a single process; torchrun starts several")


def reference_without_kl(policy: PolicyArguments, kl_div: KLConfig) -> Notices:
    """Report a reference that is not loaded."""
    if kl_div.coeff != 0:
        return
    for key in ("reference_model", "reference_device"):
        if getattr(policy, key) is not None:
            message = "not loaded: without a KL penalty (kl_div.coeff: 0) no KL to a reference model is measured"
            yield Notice(f"alg.policy.args.{key}", message)


def separate_adapters(policy: PolicyArguments, distributed: DistributedConfig) -> Notices:
    """Report adapters that are not merged for forward passes because of another setting."""
    obstacle = policy.merging_obstacle
    if distributed.strategy == "fsdp" and not obstacle:
        obstacle = "distributed.strategy: fsdp and several processes"
    if policy.peft is not None and policy.used_speedups.merged_adapters and obstacle:
        message = f"no effect: with {obstacle}, adapters stay separate"
        yield Notice("alg.policy.args.speedups.merged_adapters", message)


def kl_settings_without_effect(kl_div: KLConfig) -> Notices:
    """Report a coefficient above its limit, and settings of a controller that the run does not have."""
    if kl_div.max_coeff is not None and kl_div.coeff > kl_div.max_coeff:
        message = f"{kl_div.coeff:g} is above max_coeff: the run begins with {kl_div.max_coeff:g}"
        yield Notice("alg.kl_div.coeff", message)
    if kl_div.controller == "fixed" and kl_div.target_kl is not None:
        message = f"no effect: with controller fixed, the coefficient stays {kl_div.coeff:g}"
        yield Notice("alg.kl_div.target_kl", message)

    # The config of a run folder has all defaults written out: only other values were chosen.
    defaults = signature_of(KLConfig).defaults
    for key, controller in (("gain", "adaptive"), ("horizon", "horizon")):
        if getattr(kl_div, key) != defaults[key] and kl_div.controller != controller:
            message = f"no effect: it is for controller {controller}, and the run's is {kl_div.controller}"
            yield Notice(f"alg.kl_div.{key}", message)


def keys_without_effect(policy: PolicyArguments, policy_id: str, env: EnvConfig) -> Notices:
    """Report keys of RL4LMs' files that are ignored."""
    if "apply_model_parallel" in policy.given:
        yield Notice("alg.policy.args.apply_model_parallel", "no longer has an effect and is ignored")
    if is_causal(policy_id) and env.arguments.context_start_token is not None:
        message = "ignored: a causal model continues its prompt without a start token"
        yield Notice("env.args.context_start_token", message)


def sampling_of_rollouts(policy: PolicyArguments, policy_id: str, train_evaluation: TrainEvaluationConfig) -> Notices:
    """Report defaults of transformers that apply, and stop strings of rollouts only."""
    rollouts = policy.generation_kwargs
    evaluation = train_evaluation.generation_kwargs
    if "generation_kwargs" in policy.given:
        yield from _defaults_of_generation(ROLLOUTS, rollouts, causal=is_causal(policy_id))
    if evaluation is None:
        return
    yield from _defaults_of_generation(EVALUATION, evaluation, causal=is_causal(policy_id))
    if rollouts.get(STOP_STRINGS) and STOP_STRINGS not in evaluation:
        message = f"not given; only rollouts end at {rollouts[STOP_STRINGS]!r}"
        yield Notice(join(EVALUATION, STOP_STRINGS), message)


def sampling_of_texts(alg: SupervisedAlgConfig | PreferenceAlgConfig) -> Notices:
    """Report defaults of transformers that apply to generated texts."""
    if "generation_kwargs" in alg.given:
        yield from _defaults_of_generation("alg.generation_kwargs", alg.generation_kwargs, causal=alg.is_causal)


def _defaults_of_generation(path: str, kwargs: Mapping[str, Any], *, causal: bool) -> Notices:
    if kwargs.get("do_sample") and "top_k" not in kwargs:
        yield Notice(join(path, "top_k"), "transformers' default of 50 applies; 0 samples from the whole distribution")
    if kwargs.get("max_new_tokens") is None and kwargs.get("max_length") is None:
        n_tokens = longest_response(kwargs, is_causal=causal)
        yield Notice(join(path, "max_new_tokens"), f"not given; responses have at most {n_tokens} tokens")

    # transformers makes a static cache as long as the longest text since the process started.
    if kwargs.get("cache_implementation") == "static" and kwargs.get("max_cache_len") is None:
        message = "not given: longer texts compile decoding again, and a resumed run may differ in its last bits; set "
        yield Notice(join(path, "max_cache_len"), message + "it to the tokens of the longest prompt and response")


def other_distribution(policy: PolicyArguments) -> Notices:
    """Report rollouts that are not sampled from the distribution whose log-probs are trained."""
    kwargs = policy.generation_kwargs
    shaping = []
    for key, neutral in NEUTRAL.items():
        if kwargs.get(key) not in (None, neutral):
            shaping.append(f"{key} {kwargs[key]}")
    if not kwargs.get("do_sample"):
        shaping = ["do_sample false"]  # transformers then ignores the others
    if shaping:
        message = f"rollouts have {', '.join(shaping)}, but ratios, KL and entropy are those of the model's own "
        message += "distribution; to sample from it, set do_sample: true, temperature: 1, top_k: 0, top_p: 1"
        yield Notice(ROLLOUTS, message)


def precision_of_rollouts(alg: Algorithm, policy: PolicyArguments) -> Notices:
    """Report a speedup that has no effect because responses are generated in another precision and corrected."""
    is_corrected = policy.generates_in_other_dtype and alg.arguments.importance_correction != "none"
    if is_corrected and policy.speedups.get("sampler_log_probs"):
        message = f"no effect with generation_dtype: {policy.generation_dtype} and an importance_correction, whose "
        message += f"weights need the log-probs of a pass in {policy.dtype}, too"
        yield Notice("alg.policy.args.speedups.sampler_log_probs", message)


def uncorrected_truncation(alg: Algorithm, policy: PolicyArguments) -> Notices:
    """Report a correction that cannot see the tokens which sampling leaves out: they have no importance weights."""
    kwargs = policy.generation_kwargs
    truncating = [key for key in TRUNCATING if kwargs.get(key) not in (None, NEUTRAL[key])]
    if "top_k" not in kwargs:
        truncating.append("top_k (50 by default)")
    if truncating and alg.arguments.importance_correction != "none":
        message = (
            f"cannot correct for tokens that {', '.join(truncating)} exclude, which are never sampled: a bias remains"
        )
        yield Notice("alg.args.importance_correction", message)


def responses_without_end(env: EnvConfig) -> Notices:
    """Report responses that do not end at the end-of-text token."""
    if not env.arguments.terminate_on_eos:
        message = "false: responses continue after the end-of-text token, to the full length"
        yield Notice("env.args.terminate_on_eos", message)


def long_responses(alg: Algorithm, policy: PolicyArguments, policy_id: str, env: RunEnvConfig) -> Notices:
    """Report minibatches and a lambda that are too small for the length of responses."""
    limit = longest_response(policy.generation_kwargs, is_causal=is_causal(policy_id))
    length = min(env.arguments.max_episode_length, limit)
    if env.dialogue is not None:  # the limit is that of a turn
        length = env.arguments.max_episode_length

    # The gradient of few episodes is noisy. Without n_epochs (trpo) only the critic has minibatches.
    has_minibatches = alg.values.get("n_epochs") is not None
    in_episodes = alg.arguments.minibatch_episodes
    batch_size = alg.values.get("batch_size") if in_episodes is None else None
    if not isinstance(batch_size, int):  # an algorithm of another library may have other values
        batch_size = None
    if has_minibatches and in_episodes is not None and in_episodes < FEW_EPISODES:
        message = f"the gradient of {in_episodes} is noisy; use {FEW_EPISODES} or more"
        yield Notice("alg.args.minibatch_episodes", message)
    if has_minibatches and batch_size is not None and batch_size < FEW_EPISODES * length:
        n_episodes = max(batch_size // length, 1)
        plural = "s" if n_episodes > 1 else ""
        message = f"{batch_size} tokens are {n_episodes} episode{plural} of {length} tokens, so the gradient is noisy"
        yield Notice("alg.args.batch_size", f"{message}; {FEW_EPISODES * length} or more hold {FEW_EPISODES}")

    # The length-adaptive lambda of an episode of l actions is max(0, 1 - 1 / (alpha l)).
    alpha = alg.arguments.gae_length_alpha
    if alpha is not None and alpha * length < SHORT:
        largest = max(0.0, 1 - 1 / (alpha * length))
        message = f"lambda is at most {largest:.2g}, since responses have at most {length} tokens"
        yield Notice("alg.args.gae_length_alpha", f"{message}; {SHORT / length:.2g} gives up to {1 - 1 / SHORT:g}")


def schedules_without_effect(alg: Algorithm, train_evaluation: TrainEvaluationConfig) -> Notices:
    """Report a warm-up that lasts the whole run, and early stopping that cannot come before its end."""
    n_iters = train_evaluation.n_iters
    if n_iters == 0:  # the run only evaluates
        return
    warmup = alg.arguments.warmup_iterations
    if warmup and warmup >= n_iters:
        message = f"{warmup} iterations of {n_iters}: the learning rate never reaches that of the schedule"
        yield Notice("alg.args.warmup_iterations", message)

    stopping = train_evaluation.early_stopping
    if stopping is not None:
        first_stop = stopping.patience * train_evaluation.eval_every
        if first_stop >= n_iters:
            message = f"can end the run after {first_stop} iterations at the earliest, and it has {n_iters}"
            yield Notice("train_evaluation.early_stopping.patience", message)


def default_learning_rate(alg: Algorithm) -> Notices:
    """Report a learning rate that is not given."""
    rate = alg.values.get("learning_rate")
    if not isinstance(rate, int | float) or "learning_rate" in alg.arguments.given:
        return
    message = f"not given; the default is {rate:g}"
    # Chosen by this library, for the policy. In TRPO it is the critic's.
    if "critic_learning_rate" in alg.values and not isinstance(alg.arguments, TRPOArguments):
        message += ", which suits models of about 100M parameters; smaller models need a higher one"
    yield Notice("alg.args.learning_rate", message)


NOTICES: tuple[Rule, ...] = (
    split_weights_of_one_process,
    reference_without_kl,
    separate_adapters,
    kl_settings_without_effect,
    keys_without_effect,
    sampling_of_rollouts,
    other_distribution,
    precision_of_rollouts,
    uncorrected_truncation,
    responses_without_end,
    long_responses,
    schedules_without_effect,
    default_learning_rate,
)
OFFLINE_NOTICES: tuple[Rule, ...] = (split_weights_of_one_process, sampling_of_texts)


def learning_rate_notice(config: RunConfig, n_parameters: int) -> Notice | None:
    """Return a notice if the learning rate is far above the suitable one for a model's size; else None.

    The size is known only when the model is there, so this is none of the rules above.
    """
    alg = config.alg.algorithm
    rate = alg.values.get("learning_rate")
    if not isinstance(rate, int | float) or isinstance(alg.arguments, TRPOArguments):  # in TRPO it is the critic's
        return None

    suitable = next(suitable for limit, suitable in SUITABLE_LEARNING_RATES if n_parameters < limit)
    if config.alg.policy.args.get("peft"):
        suitable *= LORA_FACTOR
    if alg.values.get("n_epochs") is None:
        suitable *= ONE_STEP_FACTOR
    if rate <= FAR_TOO_HIGH * suitable:
        return None
    message = f"{rate:g} is far above {suitable:g}, which suits a model of {n_parameters:,} parameters"
    return Notice("alg.args.learning_rate", message)
