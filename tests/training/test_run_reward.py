"""The run's own reward as a metric: of the ids that were generated, once per text, without traces in the training."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.observation import Observation
from rl4lms_like.inference import evaluate_run
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import MetricError
from rl4lms_like.tracking.base import Tracker
from tests.config_errors import raises_at
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, stop_after

REWARD = {"id": "reward"}


class Ids(RewardFunction):
    """Pays for token ids, which no text restores."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return float(current_observation.action_ids.sum() + 1000 * len(current_observation.prompt_ids))


class Counting(BatchedRewardFunction):
    """Counts its calls and draws random numbers: both are state of the run."""

    terminal = True

    def __init__(self):
        self.texts: list[str] = []
        self.calls = 0

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        self.calls += 1
        self.texts += gen_texts
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return [0.001 * self.calls + 0.001 * noise + len(set(text)) / 10 for text in gen_texts]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def of(cls):
    return {"id": f"{__name__}:{cls.__name__}"}


@pytest.fixture
def mapping(tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    evaluation = {"eval_batch_size": 6, "n_iters": 2, "eval_every": 1, "save_every": 1}
    return mapping | {"reward_fn": of(Ids), "train_evaluation": evaluation}


def with_evaluation(mapping, **keys):
    return mapping | {"train_evaluation": mapping["train_evaluation"] | keys}


def trained(mapping, folder):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name="run", quiet=True)


def metrics_of(folder, split="val"):
    lines = (folder / f"{split}_split_metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.fixture
def trainer_of(tmp_path):
    """A function that returns the trainer of a config."""
    with ExitStack() as stack:

        def made(mapping):
            run = assemble(parse_config(mapping))
            stack.callback(run.env.close)
            tracker = Tracker(tmp_path, run.config.to_dict(), "project", "run", quiet=True)
            return OnPolicyTrainer(run, stack.enter_context(tracker))

        yield made


# --- what it reports --------------------------------------------------------------------------------------------------


def test_it_scores_the_ids_that_were_generated(mapping, trainer_of, monkeypatch):
    trainer = trainer_of(mapping)
    ids = {}
    original = trainer.run.policy.generate

    def generate(prompts, mask, **arguments):
        episodes = original(prompts, mask, **arguments)
        for prompt, keep, row, response in zip(
            prompts, mask, episodes.response_ids, episodes.response_mask, strict=True
        ):
            ids[tuple(prompt[keep].tolist())] = row[response]
        return episodes

    monkeypatch.setattr(trainer.run.policy, "generate", generate)
    evaluation = trainer.evaluate(("val",))["val"]
    layout = trainer.run.env.layout
    for sample, prediction in zip(trainer.run.samples["val"], evaluation.predictions, strict=True):
        prompt_ids = layout.encode(sample)
        response_ids = ids[tuple(prompt_ids.tolist())].numpy()
        assert prediction["reward/mean"] == response_ids.sum() + 1000 * len(prompt_ids)
        observation = Observation(sample, prompt_ids, response_ids, n_actions=len(response_ids), layout=layout)
        assert observation.context_text == prediction["generated_text"]

    totals = [prediction["reward/mean"] for prediction in evaluation.predictions]
    assert evaluation.scores == {"reward/mean": np.mean(totals), "reward/std": pytest.approx(np.std(totals))}


@pytest.mark.parametrize("kind", [{"reward_workers": 2}, {"vec_env": "dummy"}])
def test_workers_and_environments_of_other_kinds_report_the_same(mapping, tmp_path, kind):
    # Environments that are stepped need responses of full length.
    env = mapping["env"] | {"args": mapping["env"]["args"] | {"terminate_on_eos": False}}

    # They draw other prompts. transformers samples the same tokens after them all the same, from probabilities that are
    # almost equal; the cumulated ones of the decode loop differ more.
    policy = mapping["alg"]["policy"]
    policy = policy | {"args": policy["args"] | {"speedups": {"fast_decoding": False}}}
    mapping = mapping | {"env": env, "alg": mapping["alg"] | {"policy": policy}}
    plain = trained(mapping, tmp_path / "plain")
    other = trained(mapping | {"env": env | kind}, tmp_path / "other")
    assert metrics_of(other) == metrics_of(plain)


def test_names_parts_and_several_instances(mapping, tmp_path):
    numbers = {"id": "increasing_numbers", "args": {"min_tokens": 2}, "weight": 2}
    parts = {"id": "combine", "args": {"rewards": [{**of(Ids), "name": "ids"}, numbers]}}
    evaluation = {"metrics": [REWARD, REWARD | {"name": "again"}]}
    (first, *_) = metrics_of(trained(with_evaluation(mapping | {"reward_fn": parts}, **evaluation), tmp_path))
    keys = ["reward/mean", "reward/std", "reward/parts/ids", "reward/parts/increasing_numbers"]
    assert list(first) == [*keys, *(f"{key}/again" for key in keys)]
    assert first["reward/mean"] == pytest.approx(first["reward/parts/ids"] + first["reward/parts/increasing_numbers"])


def test_evaluate_computes_it_for_a_finished_run(mapping, tmp_path):
    folder = trained(mapping | {"env": mapping["env"] | {"reward_workers": 1}}, tmp_path)
    assert evaluate_run(folder, split="val", seed=3) == pytest.approx(metrics_of(folder)[-1])


# --- once per text, and no traces -------------------------------------------------------------------------------------


def test_every_text_is_scored_once_whatever_reads_the_reward(mapping, trainer_of):
    evaluation = {"metrics": [REWARD, REWARD | {"name": "b"}], "keep_best": {"metric": "reward/mean", "mode": "max"}}
    mapping = with_evaluation(mapping | {"reward_fn": of(Counting)}, **evaluation)
    mapping["doctor"] = {"held_out": [{"metric": "reward/mean", "mode": "max"}]}
    trainer = trainer_of(mapping)
    reward = trainer.run.env.envs[0].reward_function
    evaluation = trainer.evaluate(("val",))["val"]
    assert sorted(reward.texts) == sorted(prediction["generated_text"] for prediction in evaluation.predictions)
    assert reward.calls == 0  # its state is restored


def test_it_does_not_change_the_training(mapping, tmp_path):
    mapping = mapping | {"reward_fn": of(Counting)}
    without = trained(with_evaluation(mapping, metrics=[{"id": "length"}]), tmp_path / "without")
    reported = trained(with_evaluation(mapping, metrics=[{"id": "length"}, REWARD]), tmp_path / "reported")
    name = "model/model.safetensors"
    assert files_of(reported)[name] == files_of(without)[name]
    assert (reported / "rollout_info.jsonl").exists()


def test_a_resumed_run_reports_the_same(mapping, tmp_path, monkeypatch):
    mapping = mapping | {"reward_fn": of(Counting)}
    whole = trained(mapping, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 1, "rollout")
        trained(mapping, tmp_path / "stopped")
    folder = tmp_path / "stopped" / "rl4lm_exps" / "run"
    resume(folder, quiet=True)
    assert files_of(folder) == files_of(whole)


# --- by default -------------------------------------------------------------------------------------------------------


class Paid(Ids):
    is_local = False


class Wrapper(RewardFunction):
    def __init__(self, inner: RewardFunction) -> None:
        self.inner = inner

    def __call__(self, *arguments):
        return self.inner(*arguments)


def reported_by(mapping):
    run = assemble(parse_config(mapping))
    run.env.close()
    return [type(metric).__name__ for metric in run.metrics]


async def later(response):
    return 1.0


@pytest.mark.parametrize(
    "reward",
    [
        of(Paid),
        {"id": "combine", "args": {"rewards": [of(Ids), of(Paid)]}},
        {"id": f"{__name__}:Wrapper", "args": {"inner": of(Paid)}},
        {"id": "http", "args": {"url": "http://127.0.0.1:9/score"}},
        later,
    ],
)
def test_a_reward_that_asks_a_service_is_reported_only_on_request(mapping, reward):
    assert reported_by(mapping | {"reward_fn": reward}) == []
    assert reported_by(with_evaluation(mapping | {"reward_fn": reward}, metrics=[REWARD])) == ["RewardMetric"]
    best = {"metric": "reward/mean", "mode": "max"}
    assert reported_by(with_evaluation(mapping | {"reward_fn": reward}, keep_best=best)) == ["RewardMetric"]


def test_a_local_reward_is_reported_if_no_metric_is_named(mapping):
    assert reported_by(mapping) == ["RewardMetric"]
    assert reported_by(with_evaluation(mapping, metrics=[{"id": "length"}])) == ["Length"]


# --- keep_best --------------------------------------------------------------------------------------------------------


def test_the_best_model_may_be_chosen_by_the_reward_or_a_part_of_it(mapping, tmp_path):
    parts = {"id": "combine", "args": {"rewards": [{**of(Ids), "name": "ids"}, of(Paid)]}}
    best = {"metric": "reward/parts/ids", "mode": "max"}
    evaluation = {"keep_best": best, "metrics": [{"id": "length"}]}
    folder = trained(with_evaluation(mapping | {"reward_fn": parts}, **evaluation), tmp_path)
    metrics = metrics_of(folder)
    scores = [line["reward/parts/ids"] for line in metrics]
    if (folder / "best").exists():
        assert json.loads((folder / "best" / "best.json").read_text())["score"] == max(scores[1:])
    else:
        assert scores[0] >= max(scores[1:])
    assert set(metrics[0]) == {"length/words", "reward/mean", "reward/std", "reward/parts/ids", "reward/parts/Paid"}


def test_an_unknown_part_or_key_is_an_error_before_a_model_is_loaded(mapping):
    best = {"metric": "reward/parts/missing", "mode": "max"}
    with raises_at("train_evaluation.keep_best.metric", mentions="reward/parts/missing"):
        assemble(parse_config(with_evaluation(mapping, keep_best=best)))
    with raises_at("train_evaluation.keep_best.metric", mentions="did you mean 'reward/mean'"):
        parse_config(with_evaluation(mapping, keep_best={"metric": "reward/means", "mode": "max"}))


# --- failures ---------------------------------------------------------------------------------------------------------


class FailsAtEvaluation(RewardFunction):
    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        raise KeyError("judge")


def test_a_failure_names_reward_and_sample(mapping, trainer_of):
    trainer = trainer_of(mapping | {"reward_fn": of(FailsAtEvaluation)})
    with pytest.raises(MetricError, match=r"RewardMetric failed .* FailsAtEvaluation failed on .*'val_\d'.*KeyError"):
        trainer.evaluate(("val",))


def test_a_supervised_run_has_no_reward_to_report(tiny_gpt2_dir):
    mapping = {
        "tokenizer": {"model_name": str(tiny_gpt2_dir)},
        "datapool": {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 2}},
        "alg": {"id": "supervised", "model_type": "causal", "model_name": str(tiny_gpt2_dir)},
        "train_evaluation": {"eval_batch_size": 2, "metrics": [REWARD]},
    }
    with raises_at("train_evaluation.metrics.0", mentions="RL run"):
        parse_config(mapping)
