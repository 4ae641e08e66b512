"""Tokens of the environment inside a response: the model reads them, no loss and no count sees them."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from tests.algorithms.test_update import build
from tests.builders import episodes_of_lengths

LENGTHS = [6, 3, 8]
HOLES = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 0, 0]]).bool()


@pytest.fixture(params=["causal", "seq2seq"])
def family(request, tiny_gpt2_dir, tiny_t5_dir):
    return request.param, (tiny_gpt2_dir if request.param == "causal" else tiny_t5_dir)


def with_holes(side="left", **options) -> EpisodeBatch:
    episodes = episodes_of_lengths(LENGTHS, prompt_lengths=[2, 5, 3], side=side, **options)
    padded = torch.zeros_like(episodes.response_mask)
    padded[:, : HOLES.shape[1]] = HOLES
    return dataclasses.replace(
        episodes,
        observed=padded,
        group_ids=torch.tensor([0, 0, 1]),
        prompt_rows=torch.tensor([0, 1, 2]),
        behavior_log_prob=-torch.arange(1.0, 1.0 + int((episodes.response_mask & ~padded).sum())),
    )


def own_log_probs(kind, model_dir, episodes):
    """Of every action, by the model's own forward on each episode alone, without padding."""
    model = (AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM).from_pretrained(model_dir).eval()
    found = []
    for row in range(episodes.n_episodes):
        prompt = episodes.prompt_ids[row][episodes.prompt_mask[row]][None]
        response = episodes.response_ids[row][episodes.response_mask[row]][None]
        with torch.no_grad():
            if kind == "causal":
                logits = model(torch.cat([prompt, response], dim=1)).logits[:, prompt.shape[1] - 1 : -1]
            else:
                logits = model(input_ids=prompt, labels=response).logits
        of_all = logits.log_softmax(-1).gather(2, response[..., None])[0, :, 0]
        found.append(of_all[episodes.action_mask[row][: response.shape[1]]])
    return torch.cat(found)


def test_log_probs_are_those_of_the_models_own_forward(family, tiny_tokenizer):
    kind, model_dir = family
    policy = build(PPO, model_dir, tiny_tokenizer, kind).policy
    side = "left" if kind == "causal" else "right"
    for options in ({}, {"prompt_padding": 3, "response_padding": 2}):
        episodes = with_holes(side, **options)
        scores = policy.score(episodes)
        assert scores.log_prob.shape == (episodes.n_tokens,) == (12,)
        torch.testing.assert_close(scores.log_prob, own_log_probs(kind, model_dir, episodes), atol=1e-6, rtol=1e-6)
        alone = torch.cat([policy.score(episodes.select(torch.tensor([row]))).log_prob for row in range(3)])
        torch.testing.assert_close(scores.log_prob, alone, atol=1e-6, rtol=1e-6)


def test_the_value_after_the_last_token_is_read_behind_all_tokens(family, tiny_tokenizer):
    kind, model_dir = family
    policy = build(PPO, model_dir, tiny_tokenizer, kind, policy_kwargs={"value_head_init": "default"}).policy
    episodes = with_holes("left" if kind == "causal" else "right")
    whole = dataclasses.replace(episodes, observed=None, behavior_log_prob=None)
    torch.testing.assert_close(policy.final_values(episodes), policy.final_values(whole))


def test_flat_fields_have_one_number_for_each_action():
    episodes = with_holes()
    assert episodes.lengths.tolist() == [4, 3, 5] and episodes.response_lengths.tolist() == LENGTHS
    assert torch.equal(episodes.actions, episodes.response_ids[episodes.response_mask & ~episodes.observed])
    flat = torch.arange(1.0, 1.0 + episodes.n_tokens)
    padded = episodes.pad(flat, fill=-1.0)
    assert torch.equal(padded[episodes.action_mask], flat) and float(padded[episodes.observed].max()) == -1.0
    chosen = episodes.select(torch.tensor([2, 0]))
    assert torch.equal(chosen.actions, torch.cat([episodes.actions[7:], episodes.actions[:4]]))
    assert torch.equal(chosen.behavior_log_prob, -torch.cat([flat[7:], flat[:4]]))
    assert chosen.group_ids.tolist() == [1, 0] and chosen.prompt_rows.tolist() == [2, 0]
    assert chosen.to("cpu").observed.shape == chosen.response_mask.shape == (2, 8)


def test_joined_batches_keep_their_groups_and_prompts_apart():
    one, other = with_holes(), with_holes(response_padding=1, seed=1)
    joined = EpisodeBatch.concatenated([one, other, one])
    assert joined.group_ids.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert joined.prompt_rows.tolist() == list(range(9))
    assert torch.equal(joined.actions, torch.cat([one.actions, other.actions, one.actions]))
    assert torch.equal(joined.select(torch.arange(3, 6)).observed, other.trimmed().observed)


def test_a_batch_without_observed_tokens_joins_as_all_actions():
    holes = dataclasses.replace(with_holes(), group_ids=None, prompt_rows=None, behavior_log_prob=None)
    joined = EpisodeBatch.concatenated([episodes_of_lengths([2]), holes])
    assert joined.lengths.tolist() == [2, *holes.lengths.tolist()]
    with pytest.raises(ValueError):
        EpisodeBatch.concatenated([episodes_of_lengths([2]), with_holes()])


def test_advantages_skip_what_was_observed():
    """As if the actions of each episode stood next to each other."""
    episodes = with_holes()
    plain = episodes_of_lengths(episodes.lengths.tolist())
    rewards, values = torch.randn(2, episodes.n_tokens, generator=torch.Generator().manual_seed(0))
    buffers = []
    for each in (episodes, plain):
        buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
        buffer.add(each, rewards, values, torch.zeros(each.n_tokens))
        buffer.compute_returns_and_advantage()
        buffers.append(buffer)
    assert torch.equal(buffers[0].advantages, buffers[1].advantages)
    assert (buffers[0].returns == buffers[1].returns).all()


def test_an_episode_without_actions_is_refused():
    episodes = with_holes()
    nothing = dataclasses.replace(episodes, observed=episodes.response_mask, behavior_log_prob=None)
    with pytest.raises(ValueError):
        EpisodeBuffer().add(nothing, *torch.zeros(3, 0))


def test_an_update_reads_them_and_learns_actions_only(family, tiny_tokenizer):
    """The first ratio is 1, micro-batches change nothing, and no minibatch has a number for an observed token."""
    kind, model_dir = family
    weights = []
    for micro_batch_size in (None, 9):
        sgd = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}}  # AdamW makes steps of rounding errors
        built = build(PPO, model_dir, tiny_tokenizer, kind, sgd, micro_batch_size=micro_batch_size, batch_size=400)
        built.learn_iteration(0, 2)
        episodes = with_holes("left" if kind == "causal" else "right")
        scores = built.policy.score(episodes)
        built.rollout_buffer.reset()
        rewards = torch.linspace(-1, 1, episodes.n_tokens)
        built.rollout_buffer.add(episodes, rewards, scores.values, scores.log_prob)
        built.rollout_buffer.compute_returns_and_advantage()
        built.update_progress = None
        built.train()
        assert built.logger.name_to_value["train/ratio_gap"] < 1e-5
        weights.append(torch.cat([parameter.detach().flatten() for parameter in built.policy.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-7, rtol=1e-5)
    (minibatch,) = built.rollout_buffer.get(None)
    assert {len(field) for field in minibatch[1:] if field is not None} == {episodes.n_tokens}
