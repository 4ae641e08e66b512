"""Two processes with half a minibatch each: the sum of their gradients is that of the whole minibatch."""

import multiprocessing
import socket

import pytest
import torch

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.objective import action_weights, weighted_mean
from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch
from tests.algorithms.test_update import build
from tests.builders import episodes_of_lengths


def minibatch_of(rows: list[int]) -> Minibatch:
    """Some of six episodes of different lengths, with the weights of all."""
    episodes = episodes_of_lengths([9, 2, 5, 7, 1, 4], prompt_lengths=[3, 6, 2, 4, 5, 3])
    numbers = torch.randn(3, episodes.n_tokens, generator=torch.Generator().manual_seed(0))
    buffer = EpisodeBuffer(gamma=1.0, gae_lambda=0.9)
    buffer.add(episodes, numbers[0], numbers[1], -2 + 0.1 * numbers[2])
    buffer.compute_returns_and_advantage()
    chosen = torch.tensor(rows)
    weights = action_weights(episodes.lengths, "seq_mean_token_mean")
    return buffer.samples(chosen)._replace(weights=weights[episodes.token_index(chosen)])


def gradient(model_dir, tokenizer, rows: list[int], n_actions: int) -> torch.Tensor:
    """Of a share of the loss, through `evaluate_actions`."""
    torch.manual_seed(0)
    algorithm = build(PPO, model_dir, tokenizer, policy_kwargs={"value_head_init": "default"})
    minibatch = minibatch_of(rows)
    objective = algorithm.loss(minibatch)
    loss = weighted_mean("policy", objective.policy, minibatch.weights) + 0.5 * objective.value.mean()
    (len(minibatch.actions) / n_actions * loss).backward()
    return torch.cat([p.grad.flatten() for p in algorithm.policy.parameters() if p.grad is not None])


def rank(number: int, port: int, model_dir, tokenizer, n_actions: int, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    found = gradient(model_dir, tokenizer, [[0, 3, 4], [1, 2, 5]][number], n_actions)
    torch.distributed.all_reduce(found)
    if number == 0:
        results.put(found.numpy())
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_gradients_of_two_processes_sum_to_that_of_one(tiny_gpt2_dir, tiny_tokenizer):
    n_actions = minibatch_of(list(range(6))).observations.n_tokens
    whole = gradient(tiny_gpt2_dir, tiny_tokenizer, list(range(6)), n_actions)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (port, tiny_gpt2_dir, tiny_tokenizer, n_actions, results)
    processes = [context.Process(target=rank, args=(number, *arguments)) for number in range(2)]
    for process in processes:
        process.start()
    summed = torch.from_numpy(results.get(timeout=120))
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert float((summed - whole).norm() / whole.norm()) < 1e-6
