"""Responses of a rollout and their rewards, as tracking services get them."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.tracking import Sink, Tracker


class NumberOfCharacters(BatchedRewardFunction):
    """Reward that differs from text to text."""

    terminal = True

    def __call__(self, prompts, texts, references, dones, meta_infos=None):
        return [float(len(text)) for text in texts]


class Responses(Sink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.by_epoch: dict = {}

    def log_responses(self, epoch, responses) -> None:
        self.by_epoch[epoch] = list(responses)


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_each_evaluation_has_responses_with_the_rewards_that_the_policy_was_trained_with(family, request, tmp_path):
    mapping = request.getfixturevalue("tiny_config" if family == "causal" else "tiny_seq2seq_config")
    mapping["reward_fn"] = {"id": f"{__name__}:NumberOfCharacters"}
    mapping["train_evaluation"] |= {"eval_every": 1, "n_iters": 2, "save_rollouts": True, "save_model": False}
    config = parse_config(mapping)
    sink = Responses()
    run = assemble(config)
    with Tracker(tmp_path, config.to_dict(), "p", "e", quiet=True, sinks=[sink]) as tracker:
        OnPolicyTrainer(run, tracker).train_and_eval()

    assert list(sink.by_epoch) == [1, 2], "before the first rollout there are none"
    for iteration, responses in sink.by_epoch.items():
        file = tracker.run_path / "rollouts" / f"iteration_{iteration:05d}.jsonl"
        episodes = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(responses) == min(16, len(episodes)) > 0
        for response, episode in zip(responses, episodes, strict=False):
            assert response["generated_text"] == episode["response"]
            assert response["reward"] == episode["reward"] == len(response["generated_text"])
            assert list(response) == ["sample_id", "prompt_text", "generated_text", "reward"]
