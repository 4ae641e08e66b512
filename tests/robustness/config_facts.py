"""What a config asks for, read independently of the library, beside what its run did.

    text, --set ─ yaml.safe_load ─ asked ─┬─ config.json of the run folder      every key of either
                                          ├─ files of the run folder            iterations, epochs, texts, checkpoints
                                          ├─ its recorded tokens, recomputed    returns, rewards, clipping
                                          └─ the run's objects                  optimizer, environment, policy

Defaults stand here a second time, as docs/configuration.md says them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

MISSING = object()
_TRUE, _FALSE = (
    ("true", "yes", "on", "1", "1.0", "t", "y", "true,"),
    ("false", "no", "off", "0", "0.0", "f", "n", "false,"),
)
_ON_POLICY = {"gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {**_ON_POLICY, "learning_rate": 1e-5, "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "clip_range": 0.2},
    "a2c": {**_ON_POLICY, "learning_rate": 5e-5, "n_steps": 5, "gae_lambda": 1.0},
    "trpo": {
        **_ON_POLICY,
        **{"learning_rate": 1e-4, "n_steps": 2048, "batch_size": 128, "vf_coef": 1.0, "max_grad_norm": None},
        **{"target_kl": 0.01, "n_critic_updates": 10, "cg_max_steps": 15},
    },
}
DEFAULTS["nlpo"] = DEFAULTS["ppo"]
KEYS = {
    "length": ["length/words"],
    "increasing_numbers": ["synthetic/increasing_numbers_in_text"],
    "distinct_n": [f"diversity_metrics/{name}" for name in ("distinct-1", "distinct-2")],
    "sentiment": ["semantic/sentiment", "semantic/sentiment_positive"],
    "reward": ["reward/mean", "reward/std"],
}
"""What the metrics of the cases report."""


def asked_for(data: bytes, overrides: Sequence[str]) -> dict[str, Any]:
    """The mapping that a file and its overrides give."""
    mapping: Any = yaml.safe_load(data.decode("utf-8"))
    for override in overrides:
        path, _, text = override.partition("=")
        container, (*blocks, key) = mapping, path.strip().split(".")
        for block in blocks:
            if isinstance(container, dict) and container.get(block) is None:
                container[block] = {}
            container = container[int(block) if isinstance(container, list) else block]
        container[int(key) if isinstance(container, list) else key] = yaml.safe_load(text)
    assert isinstance(mapping, dict)
    return mapping


def at(blocks: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path, the default where it is absent or null."""
    for key in path.split("."):
        blocks = blocks.get(key) if isinstance(blocks, Mapping) else None
    return default if blocks is None else blocks


def text(value: Any) -> str:
    """A text; empty for what is none, which written out may have no end."""
    return value if isinstance(value, str) else ""


def number(value: Any) -> float:
    """A number, or the text of one."""
    return float(str(value).replace("_", "")) if isinstance(value, str) else float(value)


SPEEDUPS = dict.fromkeys(
    (
        *("keep_freed_memory", "fused_activations", "onednn", "grouped_attention"),
        *("merged_adapters", "sampler_log_probs", "fast_decoding", "packed_weights"),
    ),
    True,
)
"""The block `alg.policy.args.speedups` of a new run."""


def same(asked: Any, got: Any) -> bool:
    """Whether two values of a config mean the same: numbers may be written as text, nothing under a key as null."""
    if isinstance(got, bool):
        return asked is got or str(asked).strip().lower() in (_TRUE if got else _FALSE)
    if got is None:
        return asked is None or asked is MISSING or (isinstance(asked, float) and not math.isfinite(asked))
    if isinstance(got, int | float):
        try:
            return not isinstance(asked, bool) and number(asked) == float(got)
        except (TypeError, ValueError):
            return False
    if isinstance(got, list):
        return isinstance(asked, list | tuple) and len(asked) == len(got) and all(map(same, asked, got))
    return bool(asked == got)


def differences(asked: Any, got: Any, usual: Any, path: str = "") -> Iterator[str]:
    """Where a run's config is not what was asked for; what was not said has its usual value."""
    if isinstance(got, Mapping) and isinstance(asked, str):
        asked = {"id": asked}  # a reward inside another may be its id alone
    if isinstance(got, Mapping) and (asked is None or isinstance(asked, Mapping)):
        asked = asked or {}
        for key in [*asked, *(key for key in got if key not in asked)]:
            here = f"{path}.{key}" if path else str(key)
            if key not in got:
                yield f"{here} was asked for and is not in config.json"
            elif key in asked and asked[key] is not None:
                yield from differences(asked[key], got[key], at(usual, str(key)), here)
            elif key == "name" and got[key] == str(asked.get("id")).rpartition(":")[2]:
                continue  # a part of a combined reward is called by its id
            elif key == "template_date" and asked.get("chat_template"):
                continue  # the day on which the run started
            elif (expected := _usual(asked, usual, key)) != got[key] and not _empty(got[key], expected):
                yield f"{here} was not asked for: {str(got[key])[:60]}"
    elif isinstance(got, list) and isinstance(asked, list) and len(got) == len(asked):
        for index, (one, other) in enumerate(zip(asked, got, strict=True)):
            yield from differences(one, other, {"args": {}, "name": None}, f"{path}.{index}")
    elif not same(asked, got):
        yield f"{path} is {str(got)[:60]}, asked for was {str(asked)[:60]}"


def _usual(asked: Mapping[str, Any], usual: Any, key: Any) -> Any:
    if key == "controller":
        return "fixed" if asked.get("target_kl") is None else "adaptive"
    if key in ("placement", "estimator"):
        return {"placement": "reward", "estimator": "k1"}[key]  # of algorithms with a critic
    if key == "speedups":
        return SPEEDUPS  # a new run stores all of them
    if key in SPEEDUPS:
        return True
    return usual.get(key, MISSING) if isinstance(usual, Mapping) else MISSING


def _empty(got: Any, expected: Any) -> bool:
    return got in (None, {}, []) and expected in (None, {}, [], MISSING)


def work(asked: Mapping[str, Any]) -> float:
    """About how many tokens a run is asked to write and learn; what is no number counts as none."""

    def n(path: str, default: float) -> float:
        try:
            return max(number(at(asked, path, default)), 0.0)
        except (TypeError, ValueError):
            return 0.0

    if is_supervised(asked):
        steps, batch = n("alg.training_args.max_steps", 0), n("alg.training_args.per_device_train_batch_size", 8)
        steps *= n("alg.training_args.gradient_accumulation_steps", 1)
        return 50 * (n("alg.training_args.num_train_epochs", 3) * n("datapool.args.n_train", 2000) + steps * batch)
    envs, length = n("env.n_envs", 1), min(n("alg.policy.args.generation_kwargs.max_new_tokens", 20), 512)
    own = DEFAULTS.get(text(at(asked, "alg.id")), DEFAULTS["ppo"])
    rollout = max(n("alg.args.n_steps", own["n_steps"]), length) * envs
    passes = 2 + n("alg.args.n_epochs", 10) + n("alg.args.n_critic_updates", 10) + n("alg.args.cg_max_steps", 15)
    evaluated = (n("datapool.args.n_eval", 200) + n("datapool.args.n_samples", 100)) * length
    return n("train_evaluation.n_iters", 1) * (passes * rollout + 2 * evaluated)


def is_supervised(asked: Mapping[str, Any]) -> bool:
    """Whether it is a supervised run."""
    return text(at(asked, "alg.id")) == "supervised"


# --- what the run did ------------------------------------------------------------------------------------------------


def faults_of_run(asked: Mapping[str, Any], folder: Path, run: Any) -> list[str]:
    """Everything in which a run that ended well did not do as its config says.

    Args:
        asked: for, see `asked_for`.
        folder: of the run.
        run: the `AssembledRun` or `SupervisedRun` that was assembled.
    """
    facts = supervised_facts if is_supervised(asked) else rl_facts
    return [f"{name}: expected {e}, found {f}" for name, e, f in facts(asked, folder, run) if not _equal(e, f)]


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, int | float | str) and isinstance(found, float) and not isinstance(expected, bool):
        return math.isclose(number(expected), found, rel_tol=1e-6)
    if isinstance(found, dict):
        return (
            isinstance(expected, Mapping)
            and expected.keys() == found.keys()
            and not list(differences(expected, found, {}))
        )
    return same(expected, found) if not isinstance(found, list) else bool(expected == found)


Fact = tuple[str, Any, Any]
"""What, as asked for, as found."""


def rl_facts(asked: Mapping[str, Any], folder: Path, run: Any) -> Iterator[Fact]:
    """An RL run's."""
    n_iters = int(number(at(asked, "train_evaluation.n_iters")))
    yield from schedule_facts(asked, folder, run, n_iters)
    yield from algorithm_facts(asked, folder, run, n_iters)
    yield from credit_facts(asked, folder, run)
    policy, kwargs = at(asked, "alg.policy.args", {}), at(asked, "alg.policy.args.generation_kwargs", {})
    envs = int(number(at(asked, "env.n_envs", 1)))
    yield "environments", envs, run.env.num_envs
    longest = number(kwargs.get("max_new_tokens") or kwargs.get("max_length") or 20)
    if not kwargs.get("max_new_tokens") and run.policy.generator.is_encoder_decoder:
        longest -= 1
    longest = int(min(longest, number(at(asked, "env.args.max_episode_length", 512))))
    yield "longest episode", longest, run.env.get_attr("max_episode_length", [0])[0]
    if at(asked, "env.args.max_prompt_length") is not None:
        yield "longest prompt", at(asked, "env.args.max_prompt_length"), run.max_prompt_length
        yield from prompt_facts(int(number(at(asked, "env.args.max_prompt_length"))), run)
    yield (
        "terminate_on_eos",
        at(asked, "env.args.terminate_on_eos", False),
        run.env.get_attr("terminate_on_eos", [0])[0],
    )
    yield "critic", at(policy, "critic", "separate") == "shared", run.policy.value_model is None
    yield "sampling", kwargs, {**run.policy.generator.generation_kwargs}
    yield "adapters", at(policy, "peft") is not None, any("lora" in name for name, _ in run.policy.named_parameters())
    lines = read_lines(folder / "rollout_info.jsonl")
    for line in lines:
        tokens, episodes = line["rollout_info/n_tokens"], line["rollout_info/n_episodes"]
        least = int(number(at(asked, "alg.args.n_steps", run.algorithm.n_steps))) * envs
        yield "a rollout's tokens", True, least <= tokens < least + envs * longest
        yield "a rollout's episodes", 0, episodes % envs
        yield "an episode's tokens", True, 1 <= line["rollout_info/ep_lens"] <= longest
        if longest == 1 or not at(asked, "env.args.terminate_on_eos", False):
            yield "every episode's tokens", longest, line["rollout_info/ep_lens"]
    coeff, most = number(at(asked, "alg.kl_div.coeff")), at(asked, "alg.kl_div.max_coeff")
    yield "reference model", coeff > 0, run.policy.ref_model is not None
    if lines:
        yield "first KL coefficient", min(coeff, number(most or math.inf)), lines[0]["rollout_info/kl_coeff"]


def prompt_facts(longest: int, run: Any) -> Iterator[Fact]:
    """How much of each prompt the policy read in its last rollout."""
    episodes, infos = run.algorithm.rollout_buffer.episodes, run.algorithm.collector.episode_infos
    texts = {str(sample.id): sample.prompt_or_input_text for sample in run.samples["train"]}
    if episodes is not None:
        wanted = [min(len(run.tokenizer(texts[info["sample_id"]])["input_ids"]), longest) for info in infos]
        yield "tokens of the prompts", wanted, episodes.prompt_mask.sum(dim=1).tolist()


def credit_facts(asked: Mapping[str, Any], folder: Path, run: Any) -> Iterator[Fact]:
    """Returns, rewards without KL penalties and clipping, recomputed from the tokens that were recorded."""
    id, given = text(at(asked, "alg.id")), at(asked, "alg.args", {})
    if id not in DEFAULTS:
        return
    args = {**DEFAULTS[id], **{key: value for key, value in given.items() if value is not None}}
    gamma, gae_lambda = number(args["gamma"]), number(args["gae_lambda"])
    for line in read_lines(folder / "token_credit.jsonl"):
        if "clip_range" in args:
            yield "clip_range", args["clip_range"], line["clip_range"]
        for episode in line["episodes"]:
            if not episode["terminated"] and same(args.get("bootstrap_truncated", False), True):
                continue
            returns = returns_of(episode["rewards"], episode["values"], gamma, gae_lambda)
            yield "returns", True, _close(returns, episode["returns"])
            if "kl" in episode and not same(at(asked, "alg.kl_div.norm_reward", False), True):
                estimator = at(asked, "alg.kl_div.estimator", "k1")
                paid = sum(episode["rewards"]) + line["kl_coeff"] * sum(
                    _penalised(kl, estimator) for kl in episode["kl"]
                )
                yield "task reward", True, math.isclose(paid, episode["reward"], rel_tol=1e-3, abs_tol=1e-4)


def returns_of(rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float) -> list[float]:
    """The critic's targets, by the definition of generalised advantages (arXiv 1506.02438)."""
    advantage = after = 0.0
    returns: list[float] = []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * after - value + gamma * gae_lambda * advantage
        returns.append(advantage + value)
        after = value
    return returns[::-1]


def _penalised(kl: float, estimator: str) -> float:
    return {"k1": kl, "k2": kl * kl / 2, "k3": math.expm1(-kl) + kl}[estimator]


def _close(expected: Sequence[float], found: Sequence[float]) -> bool:
    size = max(map(abs, found), default=0.0)
    return all(
        math.isclose(e, f, rel_tol=1e-3, abs_tol=1e-4 * size + 1e-6) for e, f in zip(expected, found, strict=True)
    )


def schedule_facts(asked: Mapping[str, Any], folder: Path, run: Any, n_iters: int) -> Iterator[Fact]:
    """What was iterated, evaluated and saved when."""
    every, save = (int(number(at(asked, f"train_evaluation.{key}", 20))) for key in ("eval_every", "save_every"))
    lines = read_lines(folder / "rollout_info.jsonl")
    yield "iterations", list(range(1, n_iters + 1)), [line["iteration"] for line in lines]
    keeps = at(asked, "train_evaluation.save_model", True)
    saves = str(keeps).strip().lower() in _TRUE
    yield "model/", saves, (folder / "model").is_dir()
    wanted = [i for i in range(1, n_iters + 1) if i % save == 0 and saves]
    keep = at(asked, "train_evaluation.keep_last")
    if keep is None and at(asked, "train_evaluation.keep_best") is None:
        yield "checkpoints", wanted, sorted(int(path.name[-5:]) for path in folder.glob("checkpoints/iteration_*"))
    for split, epochs in (
        ("val", sorted({0, n_iters, *range(every, n_iters + 1, every)})),
        ("test", sorted({0, n_iters})),
    ):
        yield from evaluation_facts(asked, folder, run, split, epochs)


def evaluation_facts(
    asked: Mapping[str, Any], folder: Path, run: Any, split: str, epochs: Sequence[Any] | None
) -> Iterator[Fact]:
    """One split's: at these epochs, or at any."""
    n_samples = len(run.samples[split])
    metrics: list[Any] = []
    for metric in at(asked, "train_evaluation.metrics", []):
        metrics += [metric] if metric not in metrics else []
    if not metrics and "reward_fn" in asked:  # reported by default; no case has a reward that calls a server
        metrics = [{"id": "reward"}]
    yield f"metrics of {split}", len(metrics), len(run.metrics)
    lines = read_lines(folder / f"{split}_split_metrics.jsonl")
    found = [line["epoch"] for line in lines]
    wanted = {
        f"{key}/{metric['name']}" if metric.get("name") else key
        for metric in metrics
        for key in KEYS.get(metric["id"], ())
    }
    yield (
        f"scores of {split}",
        [],
        sorted(wanted - {key for line in lines[:1] for key in line["metrics"]} if lines else ()),
    )
    if not n_samples:
        yield f"evaluations of {split}", [], found
        return
    if epochs is not None:
        yield f"evaluations of {split}", list(epochs), found
    n_texts = min(n_samples, int(number(at(asked, "train_evaluation.max_eval_samples", n_samples))))
    for path in folder.glob(f"epoch_*_{split}_split_predictions.json"):
        yield f"texts of {path.name}", n_texts, len(json.loads(path.read_text()))


def algorithm_facts(asked: Mapping[str, Any], folder: Path, run: Any, n_iters: int) -> Iterator[Fact]:
    """Which algorithm, with which numbers."""
    id, algorithm = text(at(asked, "alg.id")), run.algorithm
    if id not in DEFAULTS:
        return
    yield "algorithm", id, type(algorithm).__name__.lower()
    args = {
        key: value for key, value in at(asked, "alg.args", {}).items() if value is not None or key == "max_grad_norm"
    }
    for key, value in {**DEFAULTS[id], **args}.items():
        if key == "max_grad_norm":
            yield key, math.inf if value is None else number(value), algorithm.max_grad_norm
        elif key in ("gamma", "gae_lambda", "ent_coef", "vf_coef", "n_steps", "batch_size", "n_epochs"):
            yield key, value, getattr(algorithm, key)
    seed = at(args, "seed", at(asked, "seed", 0))
    yield "seed", seed, algorithm.seed
    yield "seed of the rollouts", seed, algorithm.collector.seeds.seed
    rate = number(at(args, "learning_rate", DEFAULTS[id]["learning_rate"]))
    logged = [line["train/learning_rate"] for line in read_lines(folder / "training_info.jsonl")]
    if at(args, "learning_rate_schedule", "constant") == "constant":
        yield "learning rates", True, all(math.isclose(rate, each, rel_tol=1e-6) for each in logged)
        rates = {group["role"]: group["lr"] for group in algorithm.policy.optimizer.param_groups}
        if n_iters:
            yield "actor's rate", rate, rates["actor"]
            usual = rate if id == "trpo" else 10 * rate
            yield "critic's rate", at(args, "critic_learning_rate", usual), rates["critic"]


def supervised_facts(asked: Mapping[str, Any], folder: Path, run: Any) -> Iterator[Fact]:
    """A supervised run's."""
    args = at(asked, "alg.training_args", {})
    keeps = at(asked, "train_evaluation.save_model", True)
    yield "model/", str(keeps).strip().lower() in _TRUE, (folder / "model").is_dir()
    for split in ("val", "test"):
        yield from evaluation_facts(asked, folder, run, split, None)
    yield "sampling", at(asked, "alg.generation_kwargs", {}), {**run.generator.generation_kwargs}
    yield "adapters", at(asked, "alg.peft") is not None, any("lora" in name for name, _ in run.model.named_parameters())
    lines = read_lines(folder / "training_info.jsonl")
    stops = at(asked, "alg.early_stopping_patience") is not None
    if lines and not stops and number(at(args, "max_steps", -1)) > 0:
        yield "optimizer steps", args["max_steps"], lines[-1]["iteration"]
    if lines and at(args, "lr_scheduler_type", "linear") == "constant" and not stops:
        yield "learning rate", at(args, "learning_rate", 5e-5), lines[-1]["train/learning_rate"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
