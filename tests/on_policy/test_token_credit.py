"""What is recorded of single tokens is what the loss was given, and recording it changes nothing."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.losses import clipped_surrogate
from rl4lms_like.core.token_masks import unpack
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.on_policy.token_credit import TokenCredit, chosen_episodes, clipping, is_recorded, listed
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.run import resume, train_config
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from rl4lms_like.training.resuming.resume import resumption
from tests.training.resuming.test_interruption import After, at_minibatch
from tests.training.resuming.test_interruption import stopped as interrupted
from tests.training.resuming.test_resume import StoppedError, stop_after

GAMMA, GAE_LAMBDA, CLIP_RANGE, COEFF = 0.9, 0.8, 0.05, 0.3
LISTS = {"rewards", "advantages", "returns", "values", "probs", "ratios"}


class Lines:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.written: list[tuple[str, dict]] = []

    def log_line(self, file, line):
        self.written.append((file, json.loads(json.dumps(line))))


@pytest.fixture(scope="module")
def tiny_gpt2_dir(deeper_gpt2_dir):
    """The model of `tiny_config`; one with a single layer writes texts that are too much alike."""
    return deeper_gpt2_dir


@pytest.fixture
def config(tiny_config):
    """Prompts that differ; rewards at every token; a KL penalty that is not the plain one."""
    tiny_config["datapool"] = {"id": "film_opinions", "args": {"n_train": 12, "n_eval": 4}}
    tiny_config["reward_fn"] = {"id": "tests.on_policy.test_token_credit:PaysForLetters"}
    tiny_config["alg"]["args"] |= {
        "gamma": GAMMA, "gae_lambda": GAE_LAMBDA, "clip_range": CLIP_RANGE, "learning_rate": 3e-3,
    }  # fmt: skip
    tiny_config["alg"]["kl_div"] = {"coeff": COEFF, "controller": "fixed", "estimator": "k3"}
    tiny_config["train_evaluation"] |= {"n_iters": 3, "eval_every": 2, "save_every": 2}
    return tiny_config


class PaysForLetters(RewardFunction):
    """Pays every token for the letters of the text so far."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return len(set(current_observation.context_text)) / 10 - len(prev_observation.context_text) / 50


def learned(config, n_iterations: int = 2):
    """A run after some iterations, its policy as it wrote the last rollout, and what was recorded of that."""
    run = assemble(parse_config(config))
    from stable_baselines3.common.logger import Logger

    run.algorithm.set_logger(Logger(None, []))
    for iteration in range(n_iterations):
        run.algorithm.logger.name_to_value.clear()
        before = copy.deepcopy(run.policy.policy_model.state_dict())
        values = copy.deepcopy(run.policy.value_model)
        head = copy.deepcopy(run.policy.value_head)
        run.algorithm.learn_iteration(iteration, n_iterations)
    tracker = Lines()
    TokenCredit(run, tracker).on_iteration_end(1)
    ((file, line),) = tracker.written
    assert file == CREDIT_FILE
    return run, (before, values, head), line


def log_probs_of(model, prompt, response, mask=None) -> np.ndarray:
    """One text at a time, without padding: the plain definition."""
    with torch.no_grad():
        ids = torch.tensor([prompt + response], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double().cpu()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    chosen = logits.log_softmax(-1)
    return chosen[torch.arange(len(response)), response].numpy()


def gae(rewards, values) -> np.ndarray:
    advantages, advantage, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + GAMMA * after - value + GAMMA * GAE_LAMBDA * advantage
        advantages.append(advantage)
        after = value
    return np.array(advantages[::-1])


@pytest.mark.parametrize("normalize", [False, True, "rollout"])
def test_the_numbers_are_those_of_the_definitions(config, normalize):
    config["alg"]["args"]["normalize_advantage"] = normalize
    config["train_evaluation"]["n_credit_episodes"] = 99
    run, (before, value_model, head), line = learned(config)
    assert line["normalized"] == {False: None, True: "minibatch", "rollout": "rollout"}[normalize]
    assert (line["clip_range"], line["kl_coeff"]) == (CLIP_RANGE, COEFF)
    assert len(line["episodes"]) == line["n_episodes"] == run.algorithm.rollout_buffer.episodes.n_episodes
    policy, reference = run.policy.policy_model, run.policy.ref_model
    after = copy.deepcopy(policy.state_dict())
    raw, recorded, sides = [], [], set()
    samples = {sample.id: sample for sample in run.samples["train"]}
    for episode in line["episodes"]:
        prompt = run.tokenizer(samples[episode["sample_id"]].prompt_or_input_text)["input_ids"][-16:]
        assert run.tokenizer.decode(prompt, skip_special_tokens=True) == episode["prompt"]
        ids = episode["token_ids"]
        new, ref = log_probs_of(policy, prompt, ids), log_probs_of(reference, prompt, ids)
        policy.load_state_dict(before)
        old = log_probs_of(policy, prompt, ids)
        policy.load_state_dict(after)
        with torch.no_grad():
            states = value_model.base_model(torch.tensor([prompt + ids])).last_hidden_state[0]
            values = head(states)[len(prompt) - 1 : -1, 0].double().numpy()
        kl = old - ref
        penalty = -COEFF * (np.exp(-kl) - 1 + kl)
        text = [run.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
        paid = np.array([len(set(text[n + 1])) / 10 - len(text[n]) / 50 for n in range(len(ids))])
        advantages = gae(paid + penalty, values)
        expected = {
            "rewards": paid + penalty, "kl_rewards": penalty, "values": values, "returns": advantages + values,
            "kl": kl, "probs": np.exp(old), "ratios": np.exp(new - old),
        }  # fmt: skip
        for name, numbers in expected.items():
            near_zero = 1e-8 if name in ("probs", "ratios") else 2e-5
            np.testing.assert_allclose(episode[name], numbers, atol=near_zero, rtol=5e-5, err_msg=name)
        assert episode["reward"] == pytest.approx(paid.sum(), abs=1e-5)
        raw += advantages.tolist()
        recorded += episode["advantages"]
        ratios, signs = np.array(episode["ratios"]), np.sign(episode["advantages"])
        beyond = np.where(ratios > 1 + CLIP_RANGE, 1, np.where(ratios < 1 - CLIP_RANGE, -1, 0))
        assert episode["clipped"] == np.where(beyond == signs, beyond, 0).tolist()
        sides |= set(episode["clipped"])
    expected = (np.array(raw) - np.mean(raw)) / (np.std(raw, ddof=1) + 1e-8) if normalize else raw
    np.testing.assert_allclose(recorded, expected, atol=1e-4, rtol=1e-4)
    assert {-1, 1} <= sides


def test_the_penalty_is_that_of_the_rollouts_coefficient_though_the_controller_has_gone_on(config):
    config["alg"]["kl_div"] = {"coeff": COEFF, "target_kl": 1e-3, "gain": 0.9}
    run, _, line = learned(config)
    assert line["kl_coeff"] != pytest.approx(float(run.algorithm.collector.kl.coeff), rel=1e-3)
    for episode in line["episodes"]:
        paid = sum(episode["rewards"]) - sum(episode["kl_rewards"])
        assert paid == pytest.approx(episode["reward"], abs=1e-5)


def test_numbers_are_written_with_the_digits_of_their_precision():
    numbers = torch.tensor([0.1, 1 / 3, -2e-10, 16_777_217.0, 3.4e38, 0.0])
    assert listed(numbers)[0] == 0.1
    assert torch.equal(torch.tensor(listed(numbers)), numbers)
    assert math.isnan(listed(torch.tensor([math.nan]))[0])


def test_clipped_is_where_the_surrogate_has_no_gradient():
    generator = torch.Generator().manual_seed(0)
    log_ratio = (torch.randn(500, generator=generator) * 0.3).requires_grad_()
    advantages = torch.randn(500, generator=generator)
    clipped_surrogate(log_ratio, advantages, 0.2).mean().backward()
    sides = clipping(log_ratio.detach(), advantages, 0.2, 0.2)
    assert torch.equal(log_ratio.grad == 0, sides != 0)
    assert sides.unique().tolist() == [-1, 0, 1]
    assert bool((log_ratio[sides == 1] > 0).all()) and bool((log_ratio[sides == -1] < 0).all())


def test_pieces_join_to_the_response(config):
    run, _, line = learned(config, 1)
    for episode in line["episodes"]:
        assert "".join(episode["tokens"]) == run.tokenizer.decode(episode["token_ids"], skip_special_tokens=True)
        assert episode["terminated"] == (episode["token_ids"][-1] == run.tokenizer.eos_token_id)
        named = {str(i): "<eos>" for i, id in enumerate(episode["token_ids"]) if id == run.tokenizer.eos_token_id}
        assert named.items() <= episode["special"].items()


# --- other algorithms, other policies ---------------------------------------------------------------------------------


def as_algorithm(config, name: str):
    config["alg"]["args"] = {"n_steps": 8, "learning_rate": 1e-3}
    config["alg"]["id"] = name
    if name == "nlpo":
        config["alg"]["policy"]["id"] = "maskable_causal_lm_actor_critic_policy"
        config["alg"]["policy"]["args"] |= {"mask_type": "learned_top_p", "top_mask": 0.5, "min_tokens_to_keep": 5}
    return config


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ("a2c", set()),
        ("trpo", set()),
        ("nlpo", {"clipped", "n_allowed"}),
        ("stable_baselines3:PPO", {"clipped"}),
        ("stable_baselines3:A2C", set()),
    ],
    ids=["a2c", "trpo", "nlpo", "their ppo", "their a2c"],
)
def test_every_algorithm_has_the_columns_that_mean_something(config, algorithm, own):
    _, _, line = learned(as_algorithm(config, algorithm))
    for episode in line["episodes"]:
        lists = {name for name, field in episode.items() if isinstance(field, list)} - {"tokens", "token_ids"}
        assert lists == LISTS | {"kl", "kl_rewards"} | own
        assert {len(episode[name]) for name in lists} == {len(episode["tokens"])}
    assert ("clip_range" in line) == ("clipped" in own)
    assert line["normalized"] == (None if "a2c" in algorithm.lower() else "rollout")


def test_of_masked_tokens_the_ratio_is_that_of_the_allowed_ones(config):
    config["train_evaluation"]["n_credit_episodes"] = 99
    run, (before, _, _), line = learned(as_algorithm(config, "nlpo"))
    policy, after = run.policy.policy_model, copy.deepcopy(run.policy.policy_model.state_dict())
    episodes = run.algorithm.rollout_buffer.episodes
    responses = [row[keep].tolist() for row, keep in zip(episodes.response_ids, episodes.response_mask, strict=True)]
    masks = unpack(episodes.allowed, run.policy.vocab_size).split(episodes.lengths.tolist())
    for episode in line["episodes"]:
        mask = masks[responses.index(episode["token_ids"])]
        prompt = run.tokenizer(episode["prompt"])["input_ids"]
        new = log_probs_of(policy, prompt, episode["token_ids"], mask)
        policy.load_state_dict(before)
        old = log_probs_of(policy, prompt, episode["token_ids"], mask)
        policy.load_state_dict(after)
        np.testing.assert_allclose(episode["ratios"], np.exp(new - old), rtol=5e-5)
        np.testing.assert_allclose(episode["probs"], np.exp(old), rtol=5e-5)
        assert episode["n_allowed"] == mask.sum(dim=1).tolist()
    assert min(min(episode["n_allowed"]) for episode in line["episodes"]) < run.policy.vocab_size / 2


def test_without_a_reference_there_is_no_kl(config):
    config["alg"]["kl_div"] = {"coeff": 0.0}
    _, _, line = learned(config, 1)
    assert "kl_coeff" not in line
    assert not {"kl", "kl_rewards"} & line["episodes"][0].keys()


# --- which iterations, which episodes ---------------------------------------------------------------------------------


def test_recorded_are_the_first_the_evaluated_and_the_last():
    turns = [i for i in range(1, 24) if is_recorded(i, eval_every=5, n_iters=23)]
    assert turns == [1, 5, 10, 15, 20, 23]


def test_long_runs_stay_small_and_a_longer_run_records_the_same():
    turns = [i for i in range(1, 100_001) if is_recorded(i, eval_every=1, n_iters=100_000)]
    assert turns[:20] == [*range(1, 17), 18, 20, 22, 24]
    assert len(turns) < 130
    for n_iters in (7, 40, 999):
        shorter = [i for i in range(1, n_iters) if is_recorded(i, eval_every=1, n_iters=n_iters)]
        assert shorter == [i for i in turns if i < n_iters]


def infos(rewards, ids="abcdefgh"):
    return [{"r": reward, "sample_id": id} for reward, id in zip(rewards, ids, strict=False)]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [(0, 3)]),
        (2, [(3, 1), (2, 5)]),
        (3, [(3, 1), (0, 3), (2, 5)]),
        (9, [(3, 1), (4, 2), (0, 3), (1, 4), (2, 5)]),
    ],
)
def test_episodes_are_chosen_at_even_steps_of_their_rank(n, expected):
    chosen = chosen_episodes(infos([0.5, 0.5, -1.0, 2.0, 1.0]), n, "nobody")
    assert [(choice.episode, choice.rank) for choice in chosen] == expected
    assert not any(choice.followed for choice in chosen)


def test_the_followed_prompt_is_added_once():
    rewards = [0.5, 0.4, -1.0, 2.0, 1.0]
    assert chosen_episodes(infos(rewards), 3, "e")[-1] == (4, 2, True)
    assert [choice.followed for choice in chosen_episodes(infos(rewards), 3, "d")] == [True, False, False]
    twice = chosen_episodes(infos(rewards, "axcxa"), 2, "a")
    assert [choice for choice in twice if choice.followed] == [(0, 3, True)]


# --- a run ------------------------------------------------------------------------------------------------------------


def started(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def lines_of(run_folder) -> list[dict]:
    file = run_folder / CREDIT_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_that_was_stopped_records_the_same_bytes(config, tmp_path, monkeypatch):
    config["train_evaluation"] |= {"n_iters": 5}
    whole = started(config, tmp_path, "whole")
    assert [line["iteration"] for line in lines_of(whole)] == [1, 2, 4, 5]
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")  # after the fourth line, before its checkpoint
        started(config, tmp_path)
    stopped = tmp_path / "rl4lm_exps" / "run"
    assert (stopped / CREDIT_FILE).read_bytes() != (whole / CREDIT_FILE).read_bytes()
    assert (resume(stopped, quiet=True) / CREDIT_FILE).read_bytes() == (whole / CREDIT_FILE).read_bytes()
    within_update = interrupted(config, tmp_path / "other", at_minibatch, After(3))
    assert len(lines_of(within_update)) == 0  # the first iteration takes four steps
    assert (resume(within_update, quiet=True) / CREDIT_FILE).read_bytes() == (whole / CREDIT_FILE).read_bytes()


def test_how_much_is_recorded_may_change_and_changes_nothing_else(config, tmp_path):
    config["alg"]["policy"]["args"]["dropout"] = True  # a pass with dropout on would draw random numbers
    runs = {}
    for n in (0, 2):
        config["train_evaluation"]["n_credit_episodes"] = n
        runs[n] = started(config, tmp_path, f"n_{n}")
    assert not (runs[0] / CREDIT_FILE).exists()
    assert [line["iteration"] for line in lines_of(runs[2])] == [1, 2, 3]
    weights = {n: (folder / "model" / "model.safetensors").read_bytes() for n, folder in runs.items()}
    assert weights[0] == weights[2]
    changed = resumption(runs[2], ["train_evaluation.n_credit_episodes=0"])
    assert changed.config.train_evaluation.n_credit_episodes == 0


def test_recording_leaves_the_policy_in_its_mode_and_draws_no_random_numbers(config):
    config["alg"]["policy"]["args"]["dropout"] = True
    run, _, line = learned(config, 1)
    for mode in (True, False):
        run.policy.set_training_mode(mode)
        state, tracker = torch.get_rng_state(), Lines()
        modes = [module.training for module in run.policy.modules()]
        TokenCredit(run, tracker).on_iteration_end(1)
        assert [module.training for module in run.policy.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        assert tracker.written[0][1] == {"iteration": 1, **{key: line[key] for key in line if key != "iteration"}}


def test_an_algorithm_without_episodes_is_left_out(config, monkeypatch):
    run = assemble(parse_config(config))
    tracker = Lines()
    TokenCredit(run, tracker).on_iteration_end(1)  # nothing was collected yet
    monkeypatch.setattr(run.algorithm, "rollout_buffer", object())
    TokenCredit(run, tracker).on_iteration_end(1)
    assert tracker.written == []


def test_the_followed_prompt_is_remembered(config):
    run, _, line = learned(config, 1)
    first = TokenCredit(run, Lines())
    first.on_iteration_end(1)
    second = TokenCredit(run, Lines())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (sample_id,) = {episode["sample_id"] for episode in line["episodes"] if episode["followed"]}
    assert second.state_dict() == first.state_dict() == {"followed": sample_id}
