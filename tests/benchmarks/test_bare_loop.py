"""The yardstick of the benchmark is only worth something if it really does PPO's work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import workload
from benchmarks.systems.bare import BareLoop, gae
from benchmarks.workers import WorkerError, check_work
from benchmarks.workload import Shape, save_model

TINY = Shape(
    "tiny", prompt_len=3, response_len=6, episodes=16, n_epochs=4, minibatch=8, n_layer=2, n_embd=32, vocab_size=16
)


@pytest.fixture
def loop(tmp_path):
    save_model(TINY, tmp_path, seed=0)
    torch.manual_seed(0)
    return BareLoop(TINY, str(tmp_path), learning_rate=1e-3)


def test_cached_decoding_samples_what_the_scoring_pass_scores(loop):
    """Sampled often enough, a first token's frequency is its teacher-forced probability."""
    prompt = workload.prompts(TINY, 0)[:1].expand(4000, -1)
    input_ids = loop.generate(prompt)
    assert torch.equal(input_ids[:, : TINY.prompt_len], prompt)
    assert input_ids.shape == (4000, TINY.prompt_len + TINY.response_len)
    with torch.no_grad():
        probabilities = loop.log_probs(loop.policy, input_ids).exp()
    second = TINY.prompt_len + 1  # the first token that was decoded from the cache
    first_token = input_ids[0, TINY.prompt_len]
    same_start = input_ids[:, TINY.prompt_len] == first_token
    for token in input_ids[same_start, second].unique():
        chosen = same_start & (input_ids[:, second] == token)
        expected = probabilities[chosen][0, 1]
        count = int(same_start.sum())
        assert abs(float(chosen.sum()) / count - expected) < 5 * (expected * (1 - expected) / count) ** 0.5


def test_log_probs_are_those_of_the_full_logits(loop):
    input_ids = loop.generate(workload.prompts(TINY, 0))
    with torch.no_grad():
        full = loop.policy(input_ids=input_ids).logits.log_softmax(-1)
        expected = full[:, TINY.prompt_len - 1 : -1].gather(-1, input_ids[:, TINY.prompt_len :, None]).squeeze(-1)
        torch.testing.assert_close(loop.log_probs(loop.policy, input_ids), expected)


def test_advantages_are_the_discounted_sum_of_temporal_differences():
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    gamma, gae_lambda = 0.9, 0.8
    next_values = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    deltas = rewards + gamma * next_values - values
    expected = torch.stack(
        [sum((gamma * gae_lambda) ** (k - t) * deltas[:, k] for k in range(t, 5)) for t in range(5)], dim=1
    )
    torch.testing.assert_close(gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda), expected)


def test_an_update_takes_the_steps_of_the_shape_and_moves_actor_and_critic_only(loop):
    before = [parameter.clone() for parameter in loop.parameters]
    reference = [parameter.clone() for parameter in loop.reference.parameters()]
    assert loop.update(loop.rollout(workload.prompts(TINY, 0))) == TINY.optimizer_steps == 8
    used = [index for index, parameter in enumerate(loop.parameters) if parameter.grad is not None]
    assert len(used) == len(before)
    assert all(not torch.equal(before[index], loop.parameters[index]) for index in used)
    assert all(map(torch.equal, reference, loop.reference.parameters()))


def test_the_bare_loop_learns(tmp_path):
    shape = replace(TINY, episodes=64, minibatch=16)
    save_model(shape, tmp_path, seed=0)
    torch.manual_seed(0)
    loop = BareLoop(shape, str(tmp_path), learning_rate=1e-3)

    def mean_reward() -> float:
        input_ids = loop.generate(workload.prompts(shape, 0).repeat(8, 1))
        return float(workload.reward(input_ids[:, shape.prompt_len :]).mean())

    before = mean_reward()
    for iteration in range(20):
        loop.update(loop.rollout(workload.prompts(shape, iteration)))
    assert mean_reward() > before + 0.06


def test_reward_is_the_share_of_rises():
    response_ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1, 3, 2, 4, 4]])
    torch.testing.assert_close(workload.reward(response_ids), torch.tensor([1.0, 0.0, 0.5]))


def test_a_system_that_does_other_work_stops_the_benchmark():
    done = {"optimizer_steps": TINY.optimizer_steps, "response_tokens": TINY.response_tokens}
    check_work("trl_ppo", TINY, done)
    with pytest.raises(WorkerError):
        check_work("trl_ppo", TINY, {**done, "optimizer_steps": 2})
    with pytest.raises(WorkerError):
        check_work("trl_ppo", TINY, {**done, "response_tokens": 90})
