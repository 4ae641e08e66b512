"""Responses end with the token that completes a stop string, in generation as in the environment."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.stepping import make_vec_env, play_by_stepping
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.rewards import RewardFunction
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing.models import EOS_TOKEN
from tests.builders import MASKABLE, make_policy
from tests.config_errors import raises_at

STOPS = ["e", "4"]
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "stop_strings": STOPS}
N = 24


class Length(RewardFunction):
    """Pays the characters so far, and ten for the end."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return len(current_observation.context_text) + 10.0 * done


@pytest.fixture(params=["causal", "seq2seq", "masked"])
def policy(request, tiny_gpt2_dir, deeper_t5_dir):
    if request.param == "masked":
        settings = {"mask_type": "learned_top_k", "top_mask": 100, "min_tokens_to_keep": 2}
        return make_policy("causal", tiny_gpt2_dir, policies=MASKABLE, generation_kwargs=SAMPLING, **settings)
    folder = tiny_gpt2_dir if request.param == "causal" else deeper_t5_dir
    return make_policy(request.param, folder, generation_kwargs=SAMPLING)


def make_env(kind, tokenizer, **changes):
    arguments = {
        "tokenizer": tokenizer,
        "reward_function": Length(),
        "samples": [Sample(str(n), f"Count 4 e {n}") for n in range(5)],  # the stop strings of a prompt end nothing
        "max_episode_length": 12,
        "max_prompt_length": 16,
        "terminate_on_eos": True,
        "stop_strings": STOPS,
    }
    env = make_vec_env(kind, N, **(arguments | changes))
    env.seed(0)
    return env


def generated(policy, env, tokenizer, **options):
    observation = env.reset()
    ids, mask = (torch.as_tensor(observation[f"prompt_or_input_{name}_pt"]) for name in ("encoded", "attention_mask"))
    settings = {"eos_token_ids": [1], "max_new_tokens": 12, "seed": 3, "tokenizer": tokenizer}
    return policy.generate(ids, mask, **(settings | options))


def test_playing_equals_stepping(policy, tiny_tokenizer):
    played, stepped = (make_env(kind, tiny_tokenizer) for kind in ("text", "dummy"))
    episodes = generated(policy, played, tiny_tokenizer)
    stepped.reset()
    np.testing.assert_array_equal(played.play(episodes), play_by_stepping(stepped, episodes).total)


def test_responses_end_with_the_first_stop_string(policy, tiny_tokenizer):
    episodes = generated(policy, make_env("text", tiny_tokenizer), tiny_tokenizer)
    n_ended = 0
    for ids, mask, terminated in zip(
        episodes.response_ids, episodes.response_mask, episodes.terminated.tolist(), strict=True
    ):
        ids = ids[mask].tolist()
        texts = [tiny_tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(1, len(ids) + 1)]
        stopped = [any(stop in text for stop in STOPS) for text in texts]
        assert not any(stopped[:-1])
        assert terminated == (stopped[-1] or ids[-1] == 1)
        assert terminated or len(ids) == 12
        n_ended += stopped[-1]
    assert 3 < n_ended < N
    if episodes.allowed is not None:
        assert len(episodes.allowed) == episodes.n_tokens


def test_a_stop_string_at_the_length_limit_terminates(tiny_tokenizer):
    env = make_env("dummy", tiny_tokenizer, max_episode_length=1).envs[0]
    for text, terminates in (("4", True), ("5", False)):
        env.reset()
        _, _, terminated, truncated, _ = env.step(tiny_tokenizer(text)["input_ids"][0])
        assert (terminated, truncated) == (terminates, not terminates)


def test_without_stop_strings_in_the_environment_generation_is_refused(tiny_gpt2_dir, tiny_tokenizer):
    policy = make_policy("causal", tiny_gpt2_dir, generation_kwargs=SAMPLING)
    with pytest.raises(ModelError, match="stop_strings"):
        generated(policy, make_env("text", tiny_tokenizer), None)


def test_beams_end_with_them_too(tiny_gpt2_dir, tiny_tokenizer):
    policy = make_policy("causal", tiny_gpt2_dir)
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "stop_strings": "e"}
    episodes = generated(policy, make_env("text", tiny_tokenizer), tiny_tokenizer, generation_kwargs=beams)
    responses = [ids[mask].tolist() for ids, mask in zip(episodes.response_ids, episodes.response_mask, strict=True)]
    for ids, terminated in zip(responses, episodes.terminated.tolist(), strict=True):
        assert "e" not in tiny_tokenizer.decode(ids[:-1])
        assert terminated == ("e" in tiny_tokenizer.decode(ids) or ids[-1] == 1)


@pytest.mark.parametrize("kind", ["text", "dummy"])
def test_a_run_uses_them_in_rollouts_evaluations_and_inference(kind, tiny_config, tiny_gpt2_dir, tmp_path):
    prompt = "Count with me:"
    ((whole,),) = generate_texts(tiny_gpt2_dir, [prompt], decoding="greedy", max_new_tokens=8)
    stop = whole[len(whole) // 2]
    tiny_config["env"]["vec_env"] = kind
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"] |= {"stop_strings": stop, "do_sample": False}
    tiny_config["train_evaluation"]["n_iters"] = 0
    config = parse_config(tiny_config)
    run = assemble(config)
    assert run.env.get_attr("stop_strings", [0]) == [(stop,)]
    run.env.close()
    folder = train_config(config, base_path_to_store_results=tmp_path, quiet=True)
    evaluate_run(folder, split="val")
    texts = {
        row["generated_text"] for file in folder.rglob("*_predictions.json") for row in json.loads(file.read_text())
    }
    ((generated,),) = generate_texts(folder, [prompt], decoding="greedy")
    assert texts == {generated}
    assert whole.startswith(generated) and stop in generated and len(generated) < len(whole)


def test_rollouts_of_stepped_environments_end_with_them(tiny_config, tmp_path):
    tiny_config["env"]["vec_env"] = "dummy"
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["stop_strings"] = [" ", "e", "o"]
    tiny_config["train_evaluation"]["n_iters"] = 1
    folder = train_config(parse_config(tiny_config), base_path_to_store_results=tmp_path, quiet=True)
    (line,) = (folder / "rollout_info.jsonl").read_text().splitlines()
    assert json.loads(line)["rollout_info/truncated_share"] < 1


@pytest.mark.parametrize("value", ["", [""], ["a", 3], 5, ["e", f"e{EOS_TOKEN}"]])
def test_what_is_no_stop_string_is_an_error(value, tiny_config):
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["stop_strings"] = value
    with raises_at("alg.policy.args.generation_kwargs.stop_strings"):
        assemble(parse_config(tiny_config))
