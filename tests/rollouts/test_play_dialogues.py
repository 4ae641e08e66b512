"""Dialogues: the batch is what each environment would have played alone, and the model reads what was sampled."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like.core.episodes import real_ids
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import episode_seed
from rl4lms_like.rewards.text import LastTokenReward
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.rollouts.play_dialogues import play_dialogues
from rl4lms_like.rollouts.rollout import RolloutOptions
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model
from tests.builders import MASKABLE, SAMPLING, make_policy
from tests.dialogues import Chatter, Scripted, dialogue_env

FAMILIES = ("gpt2", "llama", "qwen2")  # whose keys and values are kept between turns


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models whose probabilities are far from uniform, by family."""
    tokenizer = make_tokenizer()
    folders = {}
    for family in (*FAMILIES, "gemma2"):
        folder = tmp_path_factory.mktemp(family)
        folders[family] = save_model(folder, make_causal_lm(family, tokenizer, scale=4.0), tokenizer)
    return folders


@pytest.fixture(scope="module")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models["gpt2"])


def collected(policy, env, *, n_tokens=150, **options):
    collector = RolloutCollector(env, policy, kl=FixedKLController(0.1), options=RolloutOptions(**options), seed=5)
    buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
    return buffer, collector.collect(buffer, n_tokens), collector


def own_log_probs(model_dir, episodes):
    """Of every action, by the model's own forward on each episode alone, without padding."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    rows = []
    for row in range(episodes.n_episodes):
        prompt = episodes.prompt_ids[row][episodes.prompt_mask[row]][None]
        response = episodes.response_ids[row][episodes.response_mask[row]][None]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response], dim=1)).logits[:, prompt.shape[1] - 1 : -1]
        of_all = logits.log_softmax(-1).gather(2, response[..., None])[0, :, 0]
        rows.append(of_all[episodes.action_mask[row][: response.shape[1]]])
    return torch.cat(rows)


def test_playing_a_batch_equals_stepping_each_environment_by_hand(models, tokenizer):
    policy = make_policy("causal", models["gpt2"])
    env = dialogue_env(tokenizer, models["gpt2"], n_envs=30, max_turns=5)
    env.reset()
    episodes = play_dialogues(
        policy, env.dialogues, eos_token_ids=[tokenizer.eos_token_id], generation_kwargs=SAMPLING, seed=3
    )
    n_turns = [len(dialogue.turns) for dialogue in env.dialogues.running]
    assert min(n_turns) == 1 and max(n_turns) == 5 and episodes.observed.any()
    rewards = np.split(env.play(episodes), np.cumsum(episodes.lengths.numpy())[:-1])

    for row, dialogue in enumerate(env.dialogues.running):
        # The same seed and sample, the ids as they were sampled, turn by turn.
        alone = Chatter()
        sample = env.samples[row]
        original = next(s for s in env.envs[0].sampler.samples if s.id == sample.id)
        first, _ = alone.reset(seed=episode_seed(0, "train", 0, row), options={"sample": original})
        prompt = real_ids(episodes.prompt_ids, episodes.prompt_mask)[row]
        assert prompt == tokenizer(first)["input_ids"]

        ids = real_ids(episodes.response_ids, episodes.response_mask)[row]
        is_observed = episodes.observed[row][: len(ids)].tolist()
        position, paid = 0, []
        for number, turn in enumerate(dialogue.turns):
            action_ids = ids[position : position + turn.n_actions]
            assert not any(is_observed[position : position + turn.n_actions])
            position += turn.n_actions
            paid += [0.0] * (turn.n_actions - 1)
            text = tokenizer.decode(action_ids, skip_special_tokens=True)
            answer, reward, terminated, _, _ = alone.step(text)
            paid.append(reward)
            assert terminated == (number == n_turns[row] - 1 and bool(episodes.terminated[row]))
            if number < n_turns[row] - 1:
                answer_ids = tokenizer(answer)["input_ids"]
                assert tokenizer.decode(ids[position : position + len(answer_ids)]) == answer
                assert all(is_observed[position : position + len(answer_ids)])
                position += len(answer_ids)
        assert position == len(ids), "an episode ends with an action"
        np.testing.assert_allclose(rewards[row], paid, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_full_read_of_each_episode(models, tokenizer, family):
    policy = make_policy("causal", models[family])
    buffer, _, _ = collected(policy, dialogue_env(tokenizer, models[family]), record_log_prob=True)
    episodes = buffer.episodes
    assert episodes.observed.sum() > 50
    expected = own_log_probs(models[family], episodes)
    torch.testing.assert_close(policy.score(episodes).log_prob, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(episodes.behavior_log_prob, expected, atol=1e-6, rtol=0)
    alone = torch.cat([policy.score(episodes.select(torch.tensor([row]))).log_prob for row in range(8)])
    torch.testing.assert_close(alone, expected[: len(alone)], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_log_probs_and_entropies_of_the_sampling_are_those_of_the_policy_in_every_turn(models, tokenizer, family):
    policy = make_policy("causal", models[family])
    arguments = {"generation_kwargs": SAMPLING, "seed": 3, "record_log_prob": True, "record_entropy": True}
    env = dialogue_env(tokenizer, models[family], n_envs=30)
    env.reset()
    episodes = play_dialogues(policy, env.dialogues, eos_token_ids=[tokenizer.eos_token_id], **arguments)
    assert episodes.observed.any()
    scores = policy.score(dataclasses.replace(episodes, behavior_log_prob=None, behavior_entropy=None))
    torch.testing.assert_close(episodes.behavior_log_prob, scores.log_prob, atol=2e-6, rtol=0)
    torch.testing.assert_close(episodes.behavior_entropy, scores.entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_kept_keys_give_the_episodes_of_reading_everything_again(models, tokenizer, family, monkeypatch):
    policy = make_policy("causal", models[family])
    arguments = {"eos_token_ids": [tokenizer.eos_token_id], "generation_kwargs": SAMPLING, "record_log_prob": True}
    n_read = []
    hook = policy.model.register_forward_pre_hook(
        lambda _, args, kwargs: n_read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )

    def played():
        env = dialogue_env(tokenizer, models[family], n_envs=24, max_turns=6, max_episode_length=60)
        env.reset()
        n_read.clear()
        episodes = play_dialogues(policy, env.dialogues, seed=3, **arguments)
        n_turns = {len(dialogue.turns) for dialogue in env.dialogues.running}
        assert len(n_turns) > 3 and {"", "higher"} < {t.answer for d in env.dialogues.running for t in d.turns}
        return episodes, sum(n_read)

    kept, n_kept = played()
    monkeypatch.setattr(policy, "new_contexts", lambda: None)
    again, n_again = played()
    hook.remove()
    assert torch.equal(kept.response_ids, again.response_ids) and torch.equal(kept.observed, again.observed)
    torch.testing.assert_close(kept.behavior_log_prob, again.behavior_log_prob, atol=1e-6, rtol=0)
    if family == "gemma2":  # a sliding window: nothing is kept
        assert torch.equal(kept.behavior_log_prob, again.behavior_log_prob) and n_kept == n_again
    else:
        assert n_kept < 0.7 * n_again


@pytest.mark.parametrize(
    "arguments",
    [
        {"stop_strings": ["e", "an"]},
        {"min_new_tokens": 3},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"do_sample": False},
        {"num_beams": 2},  # not with the loop that keeps keys
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_kept_keys_with_other_arguments_of_generate(models, tokenizer, arguments, monkeypatch):
    policy = make_policy("causal", models["gpt2"])

    def played():
        env = dialogue_env(tokenizer, models["gpt2"], n_envs=12)
        env.reset()
        ends, kwargs = [tokenizer.eos_token_id], {**SAMPLING, **arguments}
        return play_dialogues(
            policy, env.dialogues, seed=3, eos_token_ids=ends, generation_kwargs=kwargs, tokenizer=tokenizer
        )

    kept = played()
    monkeypatch.setattr(policy, "new_contexts", lambda: None)
    again = played()
    assert torch.equal(kept.response_ids, again.response_ids) and bool(kept.observed.any())


def test_masks_of_nlpo_are_those_of_the_actions(models, tokenizer):
    policy = make_policy("causal", models["gpt2"], policies=MASKABLE, top_mask=100)
    buffer, _, _ = collected(policy, dialogue_env(tokenizer, models["gpt2"]))
    episodes = buffer.episodes
    assert len(episodes.allowed) == episodes.n_tokens
    log_prob = policy.score(episodes).log_prob
    assert bool(torch.isfinite(log_prob).all()), "every action is among those that its mask allowed"
    assert float((log_prob - own_log_probs(models["gpt2"], episodes)).max()) > 0.01


def test_an_episode_ends_where_no_action_fits_and_is_then_truncated(models, tokenizer):
    answer = "Count with me: 0 1 2 3"
    length = len(tokenizer(answer)["input_ids"])
    make = lambda: Scripted((answer, 1.0, False, False, {}))  # noqa: E731
    policy = make_policy("causal", models["gpt2"])
    for limit, n_turns in ((10 + length + 1, 2), (10 + length, 1), (5, 1)):
        env = dialogue_env(
            tokenizer, models["gpt2"], make, terminate_on_eos=False,
            max_turn_length=10, max_episode_length=limit, max_turns=9,
        )  # fmt: skip
        buffer, info, _ = collected(policy, env, n_tokens=1)
        episodes = buffer.episodes
        actions = min(10, limit) + (1 if n_turns == 2 else 0)
        assert episodes.lengths.tolist() == [actions] * 8
        assert int(episodes.response_lengths.max()) == actions + length * (n_turns - 1) <= limit
        assert info["rollout_info/environment/turns"] == n_turns and info["rollout_info/truncated_share"] == 1.0
        last = env.dialogues.running[0].turns[-1]
        assert last.answer == answer, "it is in predictions"


def test_rewards_of_steps_and_of_the_reward_function_are_added_and_logged(models, tokenizer):
    class TextLength(LastTokenReward):
        def score(self, observation):
            turns = observation.meta_info["turns"]
            assert observation.context_text == turns[-1]["text"], "not the environment's text, nor earlier turns"
            return float(len(turns))

    env = dialogue_env(tokenizer, models["gpt2"], reward=TextLength())
    policy = make_policy("causal", models["gpt2"])
    buffer, info, _ = collected(policy, env, n_tokens=1)
    running = env.dialogues.running
    steps = np.mean([dialogue.reward for dialogue in running])
    n_turns = np.mean([len(dialogue.turns) for dialogue in running])
    assert info["rollout_info/reward/environment"] == pytest.approx(steps, rel=1e-5)
    assert info["rollout_info/reward/reward_fn"] == pytest.approx(n_turns)
    assert info["rollout_info/ep_rew"] == pytest.approx(steps + n_turns, rel=1e-5)
    assert info["rollout_info/environment/drawn"] == np.mean([dialogue.metrics["drawn"] for dialogue in running])

    # At the last action of each turn, that of the reward function at the last of the episode.
    paid = env.reward_parts["reward_fn"]
    ends = np.cumsum(buffer.episodes.lengths.numpy()) - 1
    assert np.flatnonzero(paid).tolist() == ends.tolist()
    turn_ends = np.cumsum([turn.n_actions for dialogue in running for turn in dialogue.turns]) - 1
    assert np.flatnonzero(env.reward_parts["environment"]).tolist() == turn_ends.tolist()


def test_a_group_has_one_secret_and_each_batch_another(models, tokenizer):
    env = dialogue_env(tokenizer, models["gpt2"], n_envs=6)
    policy = make_policy("causal", models["gpt2"])
    collector = RolloutCollector(env, policy, kl=FixedKLController(0.1), options=RolloutOptions(group_size=3), seed=5)

    def batch():
        buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
        collector.collect(buffer, 1)
        return buffer.episodes

    batches = [batch() for _ in range(2)]
    for episodes in batches:
        prompts = real_ids(episodes.prompt_ids, episodes.prompt_mask)
        assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
        assert episodes.prompt_rows.unique().tolist() == [0, 1] and episodes.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    texts = [real_ids(episodes.prompt_ids, episodes.prompt_mask) for episodes in batches]
    assert texts[0] != texts[1]

    # A restored environment draws what the first one drew next.
    state, seeds = env.state_dict(), collector.seeds.state_dict()
    later = batch()
    env.load_state_dict(state)
    collector.seeds.load_state_dict(seeds)
    again = batch()
    assert torch.equal(again.response_ids, later.response_ids) and torch.equal(again.prompt_ids, later.prompt_ids)


def test_processes_play_the_episodes_of_one_process(models, tokenizer):
    """Samples and seeds of the environments do not depend on the number of processes."""

    def first_texts(n_envs, ranks):
        env = dialogue_env(tokenizer, models["gpt2"], n_envs=n_envs, ranks=ranks)
        env.group_size = 2
        batches = []
        for _ in range(3):
            env.reset()
            env.reset()  # a batch that was started again has the same seeds
            batches.append([(dialogue.sample, dialogue.metrics) for dialogue in env.dialogues.running])
            episodes = play_dialogues(policy, env.dialogues, eos_token_ids=[], generation_kwargs=SAMPLING, seed=1)
            env.play(episodes)
        return batches

    policy = make_policy("causal", models["gpt2"])
    whole = first_texts(8, Ranks())
    parts = []
    for rank in range(2):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, 2
        parts.append(first_texts(4, ranks))
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    assert whole[0] != whole[1] != whole[2]


def test_members_of_a_group_with_other_prompts_do_not_share_them(models, tokenizer):
    prompts = iter(["a b", "c d e", "a b", "a b"] * 2)
    env = dialogue_env(
        tokenizer, models["gpt2"], lambda: Scripted(("", 1.0, True, False, {}), first=next(prompts)), n_envs=4
    )
    policy = make_policy("causal", models["gpt2"])
    buffer, _, _ = collected(policy, env, n_tokens=1, group_size=4)
    rows = buffer.episodes.prompt_rows.tolist()
    assert rows[0] == rows[2] == rows[3] != rows[1]


def test_environments_in_threads_play_the_same(models, tokenizer):
    policy = make_policy("causal", models["gpt2"])
    played = []
    for threads in (0, 3):
        env = dialogue_env(tokenizer, models["gpt2"], threads=threads, timeout=30.0 if threads else None)
        played.append(collected(policy, env)[0])
    assert torch.equal(played[0].episodes.response_ids, played[1].episodes.response_ids)
    assert np.array_equal(played[0].rewards, played[1].rewards)


def test_the_sample_of_an_episode_keeps_its_references(models, tokenizer):
    env = dialogue_env(tokenizer, models["gpt2"], n_envs=2)
    sample = Sample("q", "Question", ["42"], {"level": 3})
    env.start([sample, sample])
    opened = env.samples[0]
    assert (opened.id, opened.references, opened.meta_data) == ("q", ["42"], {"level": 3})
    assert opened.prompt_or_input_text != "Question"


def test_turns_after_empty_answers_are_counted_anew(models, tokenizer):
    """Also where a turn was cut, so that neither an observed token nor an end token is between two turns."""
    policy = make_policy("causal", models["gpt2"])
    silent = [("", 0.0, False, False, {})]
    env = dialogue_env(tokenizer, models["gpt2"], lambda: Scripted(*silent), n_envs=12, max_turns=3, max_turn_length=4)
    env.reset()
    episodes = play_dialogues(
        policy, env.dialogues, eos_token_ids=[tokenizer.eos_token_id], generation_kwargs=SAMPLING, seed=3
    )
    assert episodes.observed is None
    expected, n_cut = [], 0
    for dialogue in env.dialogues.running:
        for turn in dialogue.turns:
            expected += range(turn.n_actions)
            n_cut += turn.n_actions == 4
    assert n_cut and episodes.n_before_in_turn().tolist() == expected

    # As part of another batch, and in another order.
    both = type(episodes).concatenated([episodes, episodes.select([3, 1])])
    lengths = episodes.lengths.tolist()
    per_episode = torch.tensor(expected).split(lengths)
    assert both.n_before_in_turn().tolist() == expected + torch.cat([per_episode[3], per_episode[1]]).tolist()
