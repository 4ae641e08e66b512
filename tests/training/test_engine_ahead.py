"""Rollouts that an engine generates during the updates before them."""

from __future__ import annotations

import copy
import json
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import stable_baselines3
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample
from rl4lms_like.on_policy import resume_point
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.policy_engine import PolicyEngine
from rl4lms_like.rollouts.ahead import AheadRollout, DrawnBatch, ahead_state, finished, saved_episodes
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.text_rollouts import RunHooks, with_text_rollouts
from rl4lms_like.run import resume
from rl4lms_like.system.errors import CheckpointError, EngineError, RL4LMsLikeError
from rl4lms_like.system.ranks import Ranks
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.engines.constant import Constant
from tests.engines.weight_versions import WeightVersions
from tests.training.resuming.test_interruption import After, at_call, at_minibatch, stopped
from tests.training.test_engine_runs import ENGINE, VLLM, config, lines, run, server  # noqa: F401

AHEAD = f"{ENGINE}.ahead"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (AHEAD, {AHEAD: -1}),
        (AHEAD, {AHEAD: 1.5}),
        (AHEAD, {ENGINE: {"id": "transformers", "ahead": 1}}),
        (AHEAD, {"alg.id": "trpo", "alg.args": {}}),
        (AHEAD, {AHEAD: 2, "alg.id": "trpo", "alg.args": {}}),
        (AHEAD, {AHEAD: 2, "alg.id": "online_dpo", "alg.args": {"group_size": 5}}),
        ("alg.args.importance_correction", {AHEAD: 2, "alg.args.importance_correction": "none"}),
        (AHEAD, {"alg.id": "online_dpo", "alg.args": {"group_size": 5}}),
        (AHEAD, {"env.vec_env": "dummy"}),
        (AHEAD, {"train_evaluation.replay": "run"}),
        (f"{ENGINE}.args.sleep", {f"{ENGINE}.args.sleep": True}),
    ],
)
def test_what_cannot_generate_ahead_is_refused(path, changes):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["engine"] = {**VLLM, "ahead": 1}
    blocks, issues = apply_values(blocks, changes, "test")
    with raises_at(path):
        parse_config(blocks, issues=issues)


def test_algorithms_of_other_libraries_cannot_generate_ahead():
    policy = {"model_name": "gpt2", "engine": {"id": f"{__name__}:Waiting", "ahead": 1}}
    with pytest.raises(RL4LMsLikeError, match="ahead"):
        with_text_rollouts(stable_baselines3.A2C)(CausalLMActorCriticPolicy, None, policy_kwargs=policy)


class Waiting(Constant):
    """Engine whose second and later rollouts are finished only during an update."""

    def __init__(self) -> None:
        super().__init__(7)
        self.in_update, self.rollouts = threading.Event(), 0

    def generate(self, *args, **arguments):
        self.rollouts += 1
        if self.rollouts > 1 and not self.in_update.wait(20):
            raise EngineError("no update has begun")
        return super().generate(*args, **arguments)


def test_an_engine_generates_during_the_update(tiny_config):
    tiny_config["env"]["n_envs"], tiny_config["alg"]["args"]["n_steps"] = 4, 3
    tiny_config["alg"]["policy"]["args"]["engine"] = {"id": f"{__name__}:Waiting", "ahead": 1}
    built = assemble(parse_config(tiny_config))
    engine = built.policy.engine.external
    hooks = RunHooks(on_step=engine.in_update.set)
    for iteration in range(3):
        engine.in_update.clear()
        built.algorithm.learn_iteration(iteration, 3, hooks)
    assert engine.rollouts == 4, "also after the last update, since a run can be continued"
    assert engine.rests == 0


@pytest.mark.parametrize("id", ["ppo", "a2c"])
def test_rollouts_that_are_generated_ahead_are_corrected_by_default(id, tiny_config):
    norms = {}
    for ahead in (0, 1):
        blocks = copy.deepcopy(tiny_config)
        blocks["env"]["n_envs"] = 4
        blocks["alg"] |= {"id": id, "args": {"n_steps": 3}}
        engine = {"id": "tests.engines.constant:Constant", "args": {"token": 7}, "ahead": ahead}  # all have log-prob 0
        blocks["alg"]["policy"]["args"]["engine"] = engine
        algorithm = assemble(parse_config(blocks)).algorithm
        algorithm.learn_iteration(0, 1)
        norms[ahead] = algorithm.logger.name_to_value["train/grad_norm"]
    assert 0 < norms[1] < 0.1 * norms[0]


def test_responses_that_take_too_long_are_generated_again_by_a_resumed_run(caplog):
    mask = torch.ones(1, 3).bool()
    generated = finished(EpisodeBatch(mask.long(), mask, mask.long(), mask, mask[:, 0]))
    samples = [Sample("a", "?")]
    batches = [DrawnBatch(samples, mask.long(), mask, seed, of) for seed, of in ((1, generated), (2, Future()))]
    with caplog.at_level("WARNING"):
        numbers, tensors = ahead_state([AheadRollout({"position": 3}, tuple(batches))], Ranks(), timeout=0.01)
    assert [batch["seed"] for batch in numbers["batches"]] == [1, 2] and "0.01 s" in caplog.text
    assert saved_episodes(0, tensors).response_ids.tolist() == [[1, 1, 1]]
    assert saved_episodes(1, tensors) is None


class Waits(Ranks):
    """One of two processes, which are threads here; its exchanges wait for the other."""

    size = 2
    both = threading.Barrier(2)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def any(self, flag: bool) -> bool:
        self.both.wait(20)
        return flag

    def from_main(self, work):
        result = work() if self.is_main else None
        self.both.wait(20)
        return result


def test_weights_are_passed_on_after_the_responses_of_all_processes():
    order = []

    class Slow(Constant):
        def generate(self, *args, **arguments):
            time.sleep(0.2)
            order.append("generated")
            return super().generate(*args, **arguments)

        def update(self, policy):
            order.append("updated")

    prompts = torch.ones(1, 1).long()
    engines = [PolicyEngine(Slow(7), is_ahead=True) for _ in range(2)]
    for rank, engine in enumerate(engines):
        engine.share(Waits(rank))
    engines[1].generate_in_background([(prompts, prompts, {})])  # those of the main process are finished
    policy = SimpleNamespace(led_by_main=nullcontext)
    other = threading.Thread(target=engines[1].pass_on, args=(policy,))
    other.start()
    engines[0].pass_on(policy)
    other.join()
    assert order == ["generated", "updated"]


def test_saved_responses_need_the_prompts_that_the_sampler_draws(tiny_config):
    tiny_config["env"]["n_envs"], tiny_config["alg"]["args"]["n_steps"] = 4, 3
    tiny_config["alg"]["policy"]["args"]["engine"] = {"id": f"{__name__}:Waiting", "ahead": 1}
    built = assemble(parse_config(tiny_config))
    built.algorithm.learn_iteration(0, 2, RunHooks(on_step=built.policy.engine.external.in_update.set))
    next_rollouts = built.algorithm.collector.next_rollouts
    numbers, tensors = ahead_state(next_rollouts.for_checkpoint, Ranks())
    assert numbers.keys() == {"sampler", "batches"} and "0.response_ids" in tensors, "the format of earlier versions"
    next_rollouts.load(numbers, tensors)
    assert ahead_state(next_rollouts.for_checkpoint, Ranks())[0] == numbers
    numbers["batches"][0]["sample_ids"][0] = "another"
    with pytest.raises(CheckpointError):
        next_rollouts.load(numbers, tensors)


class Unreliable(Constant):
    """Engine that fails in the second rollout (after two evaluations), or returns no log-probs."""

    def __init__(self, fails: bool = True) -> None:
        super().__init__(7)
        self.fails, self.rollouts = fails, 0

    def generate(self, *args, **arguments):
        self.rollouts += 1
        if self.fails and self.rollouts == 4:
            raise EngineError("out of order")
        return super().generate(*args, **arguments | ({} if self.fails else {"record_log_prob": False}))


@pytest.mark.parametrize("fails", [True, False])
def test_an_engine_that_fails_in_the_background_ends_the_run(fails, tiny_config, tmp_path, monkeypatch):
    tiny_config["env"]["n_envs"], tiny_config["alg"]["args"]["n_steps"] = 4, 3
    engine = {"id": f"{__name__}:Unreliable", "args": {"fails": fails}, "ahead": 1}
    tiny_config["alg"]["policy"]["args"]["engine"] = engine
    tiny_config["train_evaluation"] |= {"eval_every": 100, "max_eval_samples": 1}
    with pytest.raises(EngineError, match="out of order" if fails else "log-probs"):
        run(tiny_config, tmp_path)
    if fails:
        (folder,) = (tmp_path / "rl4lm_exps").iterdir()
        monkeypatch.setattr(Unreliable, "generate", Constant.generate)
        assert len(lines(resume(folder, quiet=True) / "rollout_info.jsonl")) == 3


def test_prompts_of_batches_that_a_rollout_did_not_need_are_drawn_again(tiny_config):
    tiny_config["env"]["n_envs"], tiny_config["alg"]["args"]["n_steps"] = 4, 3
    tiny_config["datapool"]["sampler"] = {"id": "shuffled"}
    engine = {"id": "tests.engines.constant:Constant", "args": {"token": 7}, "ahead": 1}
    tiny_config["alg"]["policy"]["args"]["engine"] = engine
    built = assemble(parse_config(tiny_config))
    sampler, next_rollouts = built.env.envs[0].sampler, built.algorithm.collector.next_rollouts
    next_rollouts.start(n_batches=3)
    assert sampler.n_drawn == 12
    next_rollouts.begin()
    next_rollouts.pop()
    next_rollouts.drop_rest()
    assert sampler.n_drawn == 4


@pytest.mark.parametrize("n_ahead", [1, 2, 3])
def test_a_restored_queue_is_the_saved_one(n_ahead, tiny_config):
    tiny_config["env"]["n_envs"], tiny_config["alg"]["args"]["n_steps"] = 4, 6  # two batches
    tiny_config["datapool"]["sampler"] = {"id": "shuffled"}
    engine = {"id": "tests.engines.constant:Constant", "args": {"token": 7}, "ahead": n_ahead}
    tiny_config["alg"]["policy"]["args"]["engine"] = engine
    built = assemble(parse_config(tiny_config))
    sampler, next_rollouts = built.env.envs[0].sampler, built.algorithm.collector.next_rollouts
    for iteration in range(2):
        built.algorithm.learn_iteration(iteration, 2)
    numbers, tensors = ahead_state(next_rollouts.for_checkpoint, Ranks())
    assert len(numbers.get("later", [])) == n_ahead - 1

    n_drawn = sampler.n_drawn
    next_rollouts.load(numbers, tensors)
    assert sampler.n_drawn == n_drawn == (2 + n_ahead) * 8
    same_numbers, same_tensors = ahead_state(next_rollouts.for_checkpoint, Ranks())
    assert same_numbers == numbers and same_tensors.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in same_tensors.items())

    # Prompts of batches that are not needed are put back only if none were drawn after them.
    next_rollouts.begin()
    next_rollouts.drop_rest()
    assert sampler.n_drawn == (n_drawn - 8 if n_ahead == 1 else n_drawn)


@pytest.fixture
def ahead(config):  # noqa: F811
    config["alg"]["policy"]["args"]["engine"]["ahead"] = 1
    config["alg"] |= {"id": "grpo", "args": {"learning_rate": 1e-3, "n_steps": 10, "group_size": 2}}  # two batches
    config["datapool"]["sampler"] = {"id": "difficulty"}
    config["env"]["n_envs"], config["reward_fn"] = 4, {"id": "tests.builders:LowTokens"}
    config["train_evaluation"] |= {"eval_every": 1, "save_every": 2}
    return config


def test_a_run_that_saves_nothing_does_not_wait_for_responses(ahead, tmp_path, monkeypatch):
    ahead["train_evaluation"]["save_model"] = False
    del ahead["train_evaluation"]["save_every"]
    monkeypatch.setattr(resume_point, "ahead_state", lambda *_: pytest.fail("nothing is saved"))
    folder = stopped(ahead, tmp_path, at_minibatch, After(1))
    assert "saves nothing" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(("n_ahead", "expected"), [(1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2]), (3, [0, 0, 0, 0, 1])])
def test_a_rollout_is_of_the_weights_that_many_updates_before(n_ahead, expected, ahead):
    ahead["alg"]["policy"]["args"]["engine"]["ahead"] = n_ahead
    ahead["alg"]["args"] = {"learning_rate": 1e-3, "group_size": 2, "n_episodes": 8}
    built = assemble(parse_config(ahead))
    policy, buffer = built.policy.policy_model, built.algorithm.rollout_buffer
    versions = WeightVersions()
    hooks = RunHooks(on_rollout_end=lambda: versions.add_rollout(policy, buffer.episodes))
    for iteration in range(5):
        built.algorithm.learn_iteration(iteration, 5, hooks)
    assert versions.of_rollouts == expected


@pytest.mark.parametrize(
    ("sampler", "size", "n_ahead"),
    [("difficulty", {"n_steps": 10}, 1), ("shuffled", {"n_episodes": 8}, 1), ("difficulty", {"n_steps": 10}, 2)],
)
def test_older_weights_are_corrected_and_a_resumed_run_equals_the_uninterrupted_one(
    sampler, size, n_ahead, ahead, tmp_path
):
    ahead["alg"]["policy"]["args"]["engine"]["ahead"] = n_ahead
    ahead["datapool"]["sampler"]["id"] = sampler
    ahead["alg"]["args"] = {"learning_rate": 1e-3, "group_size": 2, **size}
    n_iters = ahead["train_evaluation"]["n_iters"] = 2 + n_ahead
    whole = run(ahead, tmp_path / "whole")
    if sampler == "shuffled":
        n_passes = [line["rollout_info/sampler/n_passes"] for line in lines(whole / "rollout_info.jsonl")]
        assert n_passes == pytest.approx([4 / 6, 8 / 6, 12 / 6]), "4 of 6 prompts in each rollout"
    rollouts, updates = (lines(whole / f"{name}_info.jsonl") for name in ("rollout", "training"))
    weights = [line["rollout_info/importance_weight"] for line in rollouts]
    assert abs(weights[0] - 1) < 1e-5 and all(abs(weight - 1) > 1e-5 for weight in weights[1:])
    assert all(line["rollout_info/engine/max_gap"] < 1e-5 for line in rollouts)
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)

    in_scoring = partial(at_call, owner=RolloutCollector, name="score")
    for n, where in {3: at_minibatch, 4 * n_ahead: lambda patch, act: in_scoring(patch, act=act)}.items():
        folder = stopped(ahead, tmp_path / f"stopped_{n}", where, After(n))
        assert any(path.name.startswith("interrupted_") for path in (folder / "checkpoints").iterdir())
        assert without_times(resume(folder, quiet=True)) == without_times(whole)

    shorter = copy.deepcopy(ahead)
    shorter["train_evaluation"]["n_iters"] = 2
    folder = run(shorter, tmp_path / "shorter")
    resumed = resume(folder, overrides=[f"train_evaluation.n_iters={n_iters}"], quiet=True)
    assert without_times(resumed) == without_times(whole)


def without_times(folder):
    """The rollouts of a run, its last texts, and its weights."""
    rollouts = [
        {key: value for key, value in line.items() if not key.endswith("_s") and "time" not in key}
        for line in lines(folder / "rollout_info.jsonl")
    ]
    texts = json.loads((folder / f"epoch_{len(rollouts)}_test_split_predictions.json").read_text())
    return rollouts, texts, (folder / "model" / "model.safetensors").read_bytes()
