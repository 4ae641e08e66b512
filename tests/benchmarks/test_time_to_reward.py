"""How the time-to-reward benchmark measures policies, chooses settings, and keeps its runs."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import time_to_reward
from benchmarks.time_to_reward import GRIDS, SEEDS, TUNING_SEEDS, HeldOut, Setting, choices, key, reached, tuned
from benchmarks.workers import SYSTEMS
from rl4lms_like.scoring.sentiment import sentiment
from rl4lms_like.small_models.warm_start import WarmStartSettings, make_warm_start


def curve(cpu_s: float, kl: float, *, reward: float = 0.8, iterations: int = 2) -> list[dict[str, float]]:
    """Return a run of equal iterations, the last one with this reward and KL."""
    rows = [{"cpu_s": cpu_s, "rollout_cpu_s": cpu_s / 4, "reward": 0.1, "kl": 0.0} for _ in range(iterations)]
    rows[-1] |= {"reward": reward, "kl": kl}
    return rows


def test_the_time_is_that_of_all_iterations_of_a_run_that_reached_the_target():
    expected = {"CPU s": 6.0, "CPU s of rollouts": 1.5, "iterations": 3, "KL": 0.25}
    assert reached(curve(2.0, 0.25, iterations=3)) == expected
    assert reached(curve(2.0, 0.25, reward=0.69)) is None
    assert reached([]) is None


def grid_runs(times_and_kls):
    """Return runs of two settings of each system, on all tuning seeds: system -> [(CPU seconds, KL), ...]."""
    return {
        key(system, setting, seed): curve(cpu_s, kl)
        for system, pairs in times_and_kls.items()
        for setting, (cpu_s, kl) in zip(GRIDS[system.split("_")[1]], pairs, strict=False)
        for seed in TUNING_SEEDS
    }


def test_ours_is_the_fastest_setting_whose_kl_is_not_above_that_of_trls_fastest():
    runs = grid_runs(
        {
            "trl_ppo": [(5.0, 0.1), (4.0, 0.2)],
            "trl_grpo": [(3.0, 0.1), (6.0, 0.9)],
            "ours_ppo": [(1.0, 0.15), (2.0, 0.05)],
            "ours_grpo": [(0.5, 0.3), (0.9, 0.2)],
        }
    )
    ppo, grpo = GRIDS["ppo"], GRIDS["grpo"]
    assert choices(runs) == {
        "trl_ppo": ("trl_ppo", ppo[1]),
        "ours_ppo for trl_ppo": ("ours_ppo", ppo[0]),
        "ours_grpo for trl_ppo": ("ours_grpo", grpo[1]),
        "trl_grpo": ("trl_grpo", grpo[0]),
        "ours_ppo for trl_grpo": ("ours_ppo", ppo[1]),
    }


def test_a_setting_that_failed_on_one_tuning_seed_is_not_chosen():
    runs = grid_runs({"ours_ppo": [(1.0, 0.1), (2.0, 0.1)]})
    runs[key("ours_ppo", GRIDS["ppo"][0], TUNING_SEEDS[1])] = curve(1.0, 0.1, reward=0.5)
    assert [setting for setting, *_ in tuned(runs, "ours_ppo")] == [GRIDS["ppo"][1]]


def test_a_system_that_never_reached_the_target_is_named():
    with pytest.raises(ValueError, match="trl_ppo"):
        choices(grid_runs({"trl_grpo": [(1.0, 0.1)]}))


def test_both_libraries_have_grids_of_equal_size_and_measured_seeds_are_others():
    assert len(GRIDS["ppo"]) == len(GRIDS["grpo"]) == len(set(GRIDS["ppo"])) == len(set(GRIDS["grpo"])) == 12
    assert not set(SEEDS) & set(TUNING_SEEDS)


def test_systems_of_one_environment_have_the_same_requirements():
    """Otherwise each one makes the environment again."""
    requirements = {}
    for system in SYSTEMS.values():
        requirements.setdefault(system.environment or system.module.replace("_", "-"), set()).add(system.requirements)
    assert all(len(of_environment) == 1 for of_environment in requirements.values())
    assert {"trl-ppo", "trl-grpo"} <= requirements.keys()


def test_kept_runs_are_read_as_they_were_written(tmp_path):
    runs = {key("ours_ppo", Setting(1e-3, 64), 0): curve(1.5, 0.2), "other": curve(0.5, 0.1, iterations=3)}
    time_to_reward.write(tmp_path / "runs.json", runs)
    assert time_to_reward.read(tmp_path / "runs.json") == runs


def test_the_kl_of_held_out_responses_is_that_of_a_plain_loop_over_their_tokens(tmp_path):
    start, trained = tmp_path / "start", tmp_path / "trained"
    make_warm_start(start, WarmStartSettings(n_texts=200, n_held_out=20, steps=20))
    model = AutoModelForCausalLM.from_pretrained(start).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(trained)
    held_out = HeldOut(start)
    held_out.prompts = [*held_out.prompts[:3], "a"]

    kls, rewards = [], []
    end = held_out.tokenizer.eos_token_id
    for row, mask in zip(*held_out.sampled(model), strict=True):
        prompt, response = row[: len(mask)][mask.bool()].tolist(), row[len(mask) :].tolist()
        response = response[: response.index(end) + 1] if end in response else response
        ids = torch.tensor([prompt + response])
        of_model, of_start = (network(ids).logits[0].double().softmax(dim=-1) for network in (model, held_out.start))
        for place in range(len(prompt) - 1, ids.shape[1] - 1):
            p, q = of_model[place], of_start[place]
            kls.append(float((p * (p / q).log()).sum()))
        rewards.append(sentiment(held_out.tokenizer.decode(prompt + response, skip_special_tokens=True)))

    measured = held_out.measure(trained)
    assert measured["kl"] == pytest.approx(fmean(kls), rel=1e-4)
    assert measured["kl"] > 0.01
    assert measured["reward"] == pytest.approx(fmean(rewards))
