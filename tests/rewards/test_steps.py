"""Rewards of steps equal a plain loop over the steps of a response."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.on_policy.rollout_files import read_rollout
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.call import score_episodes, score_transition
from rl4lms_like.rewards.steps import ProcessReward, Step, StepFunctionReward, split_steps
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ConfigError, ModelError, RewardError
from rl4lms_like.testing.checkers import check_reward_function
from rl4lms_like.testing.models import make_tokenizer
from tests.configs import run_blocks
from tests.local_models import LOCAL_MODELS

SAMPLE = Sample("0", "What is 2 + 3?", ["5"], {"unit": "m"})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prm")
    LOCAL_MODELS["step_classifier"](folder)
    return str(folder)


def layout(tokenizer=None) -> TextLayout:
    return TextLayout(tokenizer or make_tokenizer(), max_prompt_length=64, max_context_length=256)


def episode(text_or_ids, tokenizer=None, sample=SAMPLE) -> Observation:
    shape = layout(tokenizer)
    ids = text_or_ids
    if isinstance(text_or_ids, str):
        ids = shape.tokenizer(text_or_ids, add_special_tokens=False)["input_ids"]
    return Observation(sample, shape.encode(sample), np.asarray(ids), n_actions=len(ids), layout=shape)


def lengths_of_steps(steps):
    return [float(len(step)) for step in steps]


def random_texts(n_texts: int) -> list[str]:
    draw = random.Random(0)
    pieces = ("a", " film", "é", "\n", "\n\n", ".", " 12", "😀", "\n\n\n", " ")
    return ["".join(draw.choices(pieces, k=draw.randint(1, 25))) for _ in range(n_texts)]


def credited_by_a_loop(observation, separator, score):
    """Decode the response token by token, and credit a step where the text first has one more separator."""
    rewards = [0.0] * observation.n_actions
    whole = observation.context_text
    n_seen = 0
    scored_any = False
    for n_actions in range(1, observation.n_actions + 1):
        text = observation.after(n_actions).context_text
        while text.count(separator) > n_seen and whole.startswith(separator.join(whole.split(separator)[: n_seen + 1])):
            step = whole.split(separator)[n_seen]
            n_seen += 1
            if step.strip():
                rewards[n_actions - 1] += score(step)
                scored_any = True
    rest = whole.split(separator)[-1]
    if rest.strip() or not scored_any:
        rewards[-1] += score(rest if rest.strip() else "")
    return rewards


def test_credit_equals_a_loop_over_the_tokens_of_random_texts():
    reward = StepFunctionReward(lengths_of_steps)
    episodes = [episode(text) for text in random_texts(60)]
    expected = np.concatenate([credited_by_a_loop(each, "\n\n", lambda step: float(len(step))) for each in episodes])
    assert np.array_equal(score_episodes(reward, episodes), expected.astype(np.float32))
    assert (expected != 0).sum() > 100


def test_steps_end_at_their_separators_and_empty_ones_are_none():
    observation = episode("one\n\ntwo\n\n\n\nthree\n\n")
    steps = split_steps(observation, "\n\n")
    assert [step.text for step in steps] == ["one", "two", "three"]
    for step in steps:
        text = observation.after(step.end).context_text
        assert text.endswith(f"{step.text}\n\n")
        assert not observation.after(step.end - 1).context_text.endswith(f"{step.text}\n\n")
    assert split_steps(episode("  "), "\n\n") == [Step("", episode("  ").n_actions)]


def test_a_token_may_hold_a_separator_and_the_beginning_of_the_next_step():
    tokenizer = make_tokenizer(["a;! b;! c;!"] * 50)
    observation = episode("a;!b;c", tokenizer)
    assert observation.action_history == ["a", ";!", "b", ";", "c"]
    assert split_steps(observation, ";") == [Step("a", 2), Step("!b", 4), Step("c", 5)]


def test_a_separator_that_is_a_special_token_is_found_by_its_id():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<step>"]})
    step_id = tokenizer.convert_tokens_to_ids("<step>")
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a film", " and more"))
    observation = episode([*first, step_id, *second, step_id, tokenizer.eos_token_id], tokenizer)
    assert "<step>" not in observation.context_text
    assert split_steps(observation, "<step>") == [
        Step("a film", len(first) + 1),
        Step(" and more", len(first) + len(second) + 2),
    ]


def expected_probabilities(folder, prompt, steps, separator, label=1):
    """As TRL's `PRMTrainer` builds its inputs; each step is scored by a forward pass up to its separator."""
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    probabilities = []
    for step in steps:
        ids += tokenizer(step, add_special_tokens=False)["input_ids"]
        ids += tokenizer(separator, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        probabilities.append(logits.softmax(dim=0)[label].item())
    return probabilities


def test_a_process_reward_model_scores_each_step_as_one_pass_per_step(model_folder):
    reward = ProcessReward(model_folder, batch_size=2)
    texts = ["first\n\nsecond step\n\nand so on", "alone", "a film\n\nthe end\n\n"]
    episodes = [episode(text, sample=replace(SAMPLE, prompt_or_input_text=f"{text[:3]}?")) for text in texts]
    rewards = score_episodes(reward, episodes)

    start = 0
    for text, observation in zip(texts, episodes, strict=True):
        own = rewards[start : start + observation.n_actions]
        start += observation.n_actions
        steps = [step for step in text.split("\n\n") if step]
        expected = expected_probabilities(model_folder, f"{text[:3]}?", steps, "\n\n")
        assert own[own != 0] == pytest.approx(expected, abs=1e-6)
        assert [index + 1 for index in np.flatnonzero(own)] == [step.end for step in split_steps(observation, "\n\n")]


def test_label_and_separator_of_the_model(model_folder):
    observation = episode("first\n\nsecond")
    rewards = score_episodes(ProcessReward(model_folder, model_separator="!", label="LABEL_0"), [observation])
    expected = expected_probabilities(model_folder, SAMPLE.prompt_or_input_text, ["first", "second"], "!", label=0)
    assert rewards[rewards != 0] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ModelError, match="there is no label 7; its labels are 0 \\('LABEL_0'\\), 1 \\('LABEL_1'\\)"):
        ProcessReward(model_folder, label=7)


def test_the_prompt_is_cut_to_the_models_limit_and_never_a_step(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    long_prompt = "0 1 2 3 4 5 " * 200
    observation = episode("first\n\nsecond", sample=replace(SAMPLE, prompt_or_input_text=long_prompt))
    rewards = score_episodes(ProcessReward(model_folder), [observation])

    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("first", "\n\n", "second", "\n\n")]
    response_ids = [id for part in parts for id in part]
    prompt_ids = tokenizer(long_prompt, add_special_tokens=False)["input_ids"]
    ids = [*prompt_ids[len(prompt_ids) - (512 - len(response_ids)) :], *response_ids]
    with torch.no_grad():
        logits = AutoModelForTokenClassification.from_pretrained(model_folder)(torch.tensor([ids])).logits[0, -1]
    assert len(ids) == 512
    assert rewards[-1] == pytest.approx(logits.softmax(dim=0)[1].item(), abs=1e-6)

    with pytest.raises(RewardError, match="reads at most 512"):
        score_episodes(ProcessReward(model_folder), [episode("0 1 2 3 4 5 6 " * 200)])


@pytest.mark.parametrize(("aggregate", "of"), [("mean", np.mean), ("min", min), ("last", lambda values: values[-1])])
def test_an_aggregate_is_paid_at_the_last_token(aggregate, of):
    reward = StepFunctionReward(lengths_of_steps, aggregate=aggregate)
    texts = ["one\n\nthree\n\nto", "alone"]
    rewards = score_episodes(reward, [episode(text) for text in texts])
    ends = np.cumsum([episode(text).n_actions for text in texts]) - 1
    assert reward.terminal
    assert rewards[ends] == pytest.approx([of([3, 5, 2]), of([5])])
    assert np.count_nonzero(rewards) == 2


def test_a_function_gets_the_names_of_its_parameters():
    seen = []

    def score(steps, prompt, references, unit):
        seen.append((steps, prompt, references, unit))
        return np.ones(len(steps))

    score_episodes(StepFunctionReward(score), [episode("one\n\ntwo")])
    assert seen == [(["one", "two"], SAMPLE.prompt_or_input_text, ["5"], "m")]
    with pytest.raises(ValueError, match="has no parameter 'steps'"):
        StepFunctionReward(lambda responses: [])


async def asynchronous(steps):
    return [1.0] * len(steps)


def test_an_async_function_scores_steps():
    assert score_episodes(StepFunctionReward(asynchronous), [episode("one\n\ntwo")]).sum() == 2


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0, 3.0], 1.0, None, [1.0, math.nan], [1.0, None], ["1", "2"]])
@pytest.mark.parametrize("aggregate", [None, "min"])
def test_what_is_not_one_number_for_each_step_is_an_error(returned, aggregate):
    def score(steps):
        return returned

    with pytest.raises(RewardError, match="expected one finite number for each of 2 steps of sample '0'"):
        score_episodes(StepFunctionReward(score, aggregate=aggregate), [episode("one\n\ntwo")])


def test_the_rewards_pass_the_checker(model_folder):
    for aggregate in (None, "mean"):
        check_reward_function(ProcessReward(model_folder, separator=" ", aggregate=aggregate))
        check_reward_function(StepFunctionReward(lengths_of_steps, separator=" ", aggregate=aggregate))


def test_stepping_needs_an_aggregate_and_then_equals_playing():
    observation = episode("one\n\nthree")
    reward = StepFunctionReward(lengths_of_steps, aggregate="mean")
    previous, action = observation.after(observation.n_actions - 1), int(observation.action_ids[-1])
    assert score_transition(reward, previous, action, observation, done=True) == 4.0
    assert score_transition(reward, observation.after(0), 5, observation.after(1), done=False) == 0.0

    env = TextGenEnv(make_tokenizer(), StepFunctionReward(lengths_of_steps), [SAMPLE], 8, 16)
    env.reset()
    with pytest.raises(RewardError, match="by an environment or by another reward: set aggregate to mean"):
        env.step(5)


def share_of_o(steps):
    return [(1 + step.count("o")) / len(step) if step else 0.0 for step in steps]


def test_a_run_logs_the_rewards_of_a_loop_over_the_steps_also_with_workers(tiny_config, tmp_path):
    """The rewards of tokens that a run with two reward workers keeps are those of a loop over the steps."""
    args = {"function": f"{__name__}:share_of_o", "separator": "e"}
    tiny_config["reward_fn"] = {"id": "step_function", "args": args}
    tiny_config["env"]["reward_workers"] = 2
    tiny_config["alg"]["args"]["n_steps"] = 128  # enough responses for a separator within one of them
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_rollouts": True, "metrics": []}
    config = parse_config(tiny_config)
    folder = train_config(config, base_path_to_store_results=tmp_path, experiment_name="run", quiet=True)

    tokenizer = AutoTokenizer.from_pretrained(tiny_config["tokenizer"]["model_name"])
    (file,) = (folder / "rollouts").glob("*.safetensors")
    n_early = 0
    for batch in read_rollout(file).batches:
        rewards = batch.episodes.pad(batch.rewards)  # [n, response_len]
        for ids, mask, of_tokens in zip(
            batch.episodes.response_ids, batch.episodes.response_mask, rewards, strict=True
        ):
            observation = episode(ids[mask].tolist(), tokenizer)
            expected = credited_by_a_loop(observation, "e", lambda step: share_of_o([step])[0])
            assert of_tokens[mask].tolist() == pytest.approx(expected, abs=1e-6)
            n_early += np.count_nonzero(expected[:-1])
    assert n_early  # credit before the last token


def of_config(reward_fn, algorithm="grpo", vec_env="text", **arguments):
    blocks = run_blocks()
    blocks["reward_fn"] = reward_fn
    blocks["env"] |= {"n_envs": 16, "vec_env": vec_env}
    blocks["alg"] |= {"id": algorithm, "args": arguments}
    if algorithm == "ppo":
        blocks["alg"]["args"] = {"n_steps": 128, "batch_size": 128}
    return parse_config(blocks)


STEPS = {"id": "step_function", "args": {"function": f"{__name__}:lengths_of_steps"}}


@pytest.mark.parametrize(
    ("reward_fn", "path"),
    [
        (STEPS, "reward_fn.args.aggregate"),
        ({"id": "combine", "args": {"rewards": ["sentiment", STEPS]}}, "reward_fn.args.rewards.1.args.aggregate"),
        ({"id": "sentiment", "args": {"shaping_fn": STEPS}}, "reward_fn.args.shaping_fn.args.aggregate"),
        (StepFunctionReward(lengths_of_steps), "reward_fn"),
    ],
)
def test_algorithms_that_compare_responses_need_an_aggregate(reward_fn, path):
    for algorithm in ("grpo", "rloo", "online_dpo"):
        with pytest.raises(ConfigError) as error:
            of_config(reward_fn, algorithm)
        assert path in [issue.path for issue in error.value.issues], error.value
    of_config(reward_fn, "ppo")
    of_config(reward_fn, "reinforce_pp")  # returns of each token
    of_config(reward_fn, "grpo", baseline="none", scale="none")


def test_environments_that_step_need_an_aggregate():
    with pytest.raises(ConfigError, match="not known token by token, as 'dummy' needs them"):
        of_config(STEPS, "ppo", "dummy")
    aggregated = {**STEPS, "args": STEPS["args"] | {"aggregate": "last"}}
    of_config(aggregated, "ppo", "dummy")
    of_config(aggregated, "grpo")


def test_the_catalogue_builds_both(model_folder):
    assert isinstance(REWARDS.get("process_reward", {"model_name": model_folder}), ProcessReward)
    assert isinstance(REWARDS.get("step_function", {"function": lengths_of_steps}), StepFunctionReward)
