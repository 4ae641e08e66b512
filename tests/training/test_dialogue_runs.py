"""Whole runs of dialogues: every algorithm, every command, resumed and replayed to the same bytes."""

from __future__ import annotations

import copy
import json

import gymnasium
import pytest

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.config.load import parse_config
from rl4lms_like.envs.dialogues import Dialogues
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.python_api.python_run import Run
from rl4lms_like.rewards.text import LastTokenReward
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ConfigError, DialogueError
from tests.config_errors import raises_at
from tests.dialogues import Chatter
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_interruption import After, at_minibatch, stopped


class Digits(Chatter):
    """A `Chatter` that a config can name."""


class NumberOfTurns(LastTokenReward):
    """A point for each turn."""

    def score(self, observation):
        return float(len(observation.meta_info["turns"]))


def run_blocks(folder, algorithm="ppo", **args):
    masked = algorithm == "nlpo"
    policy_args = {"model_name": str(folder), "generation_kwargs": {"do_sample": True, "top_k": 0}}
    if masked:
        policy_args |= {"mask_type": "learned_top_p", "top_mask": 0.9, "min_tokens_to_keep": 5}
    args = {"n_steps": 8, "learning_rate": 1e-3} | args
    if algorithm not in ("a2c", "trpo"):
        args |= {"n_epochs": 2, "batch_size": 120}
    return {
        "tokenizer": {"model_name": str(folder)},
        "env": {
            "n_envs": 16,
            "args": {"max_prompt_length": 40, "max_episode_length": 40, "terminate_on_eos": True},
            "dialogue": {"id": "tests.training.test_dialogue_runs:Digits", "max_turns": 4, "max_turn_length": 5},
        },
        "alg": {
            "id": algorithm,
            "args": args,
            "kl_div": {"coeff": 0.05},
            "policy": {"id": f"{'maskable_' * masked}causal_lm_actor_critic_policy", "args": policy_args},
        },
        "datapool": {"id": "episodes", "args": {"eval_episodes": 5}},
        "train_evaluation": {"eval_batch_size": 3, "n_iters": 2, "eval_every": 1, "save_every": 1},
        "seed": 3,
        "device": "cpu",
    }


def trained(mapping, folder, name="run", **values):
    mapping = copy.deepcopy(mapping)
    mapping["train_evaluation"] |= values
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def lines_of(run, name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_trains_on_guess_number(algorithm, tiny_gpt2_dir, deeper_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir, algorithm)
    mapping["env"]["dialogue"] = {"id": "guess_number", "args": {"high": 7}, "max_turns": 3, "max_turn_length": 4}
    mapping["train_evaluation"] |= {"n_iters": 1, "eval_every": 5}
    if "group_size" in vars(ALGORITHMS.signature(algorithm)).get("__dataclass_fields__", {}):
        mapping["alg"]["args"] |= {"group_size": 2 if algorithm == "online_dpo" else 4}
    if algorithm == "maxrl":
        mapping["alg"]["args"]["scale"] = "none"  # its own needs rewards of 0 or 1
    if algorithm == "opd":
        mapping["alg"]["policy"]["args"]["teacher_model"] = str(deeper_gpt2_dir)
    run = trained(mapping, tmp_path)
    (numbers,) = lines_of(run, "rollout_info.jsonl")
    assert 1 <= numbers["rollout_info/environment/turns"] <= 3
    assert numbers["rollout_info/environment/reward"] == pytest.approx(numbers["rollout_info/ep_rew"], rel=1e-5)
    (numbers,) = lines_of(run, "training_info.jsonl")
    assert numbers.get("train/ratio_gap", 0.0) <= 1e-5


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "nlpo"])
def test_a_stopped_and_a_replayed_run_end_with_the_same_bytes(algorithm, tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir, algorithm, **({"group_size": 4} if algorithm == "grpo" else {}))
    mapping["train_evaluation"] |= {"n_iters": 3, "save_rollouts": True}
    mapping["reward_fn"] = {"id": "tests.training.test_dialogue_runs:NumberOfTurns"}
    whole = trained(mapping, tmp_path / "whole")
    again = trained(mapping, tmp_path / "again")
    assert files_of(again) == files_of(whole)

    # In the second update, after its first minibatch, and from the checkpoint of the first iteration.
    folder = stopped(parse_config(mapping).to_dict(), tmp_path / "stopped", at_minibatch, After(3, interrupt))
    resume(folder)
    assert files_of(folder) == files_of(whole)

    replayed = trained(mapping, tmp_path / "replayed", replay=str(whole), save_rollouts=False)
    weights = [run / "model" / "model.safetensors" for run in (whole, replayed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def in_later_turns(patch, act):
    """Counted over rollouts and evaluations."""
    step = Dialogues.step

    def acting(self, rows, turn_ids):
        if self.running[rows[0]].turns:
            act()
        return step(self, rows, turn_ids)

    patch.setattr(Dialogues, "step", acting)


def test_a_run_that_stopped_in_the_middle_of_episodes_ends_with_the_same_bytes(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir, "grpo", group_size=2, n_steps=60)
    mapping["env"]["n_envs"] = 4
    mapping["train_evaluation"] |= {"n_iters": 3}
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        in_later_turns(patch, lambda: calls.append(1))
        whole = trained(mapping, tmp_path / "whole")

    # At several places, in rollouts of several batches and in evaluations.
    assert len(calls) > 50
    for number in (len(calls) // 4, len(calls) // 2, len(calls) * 3 // 4 + 3):
        stop = After(number, interrupt)
        folder = stopped(parse_config(mapping).to_dict(), tmp_path / str(number), in_later_turns, stop)
        resume(folder)
        assert files_of(folder) == files_of(whole)


def interrupt():
    raise KeyboardInterrupt


def test_the_command_evaluate_reports_what_the_run_reported(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["reward_fn"] = {"id": "tests.training.test_dialogue_runs:NumberOfTurns"}
    run = trained(mapping, tmp_path)
    for split in ("val", "test"):
        scores = evaluate_run(run, split=split, seed=3, batch_size=3)
        (of_run,) = [line for line in lines_of(run, f"{split}_split_metrics.jsonl") if line["epoch"] == 2]
        assert scores == {key: pytest.approx(of_run["metrics"][key], rel=1e-6) for key in scores}
        assert scores.keys() == of_run["metrics"].keys()
        assert scores["environment/turns"] > 1
        parts = scores["reward/parts/environment"] + scores["reward/parts/reward_fn"]
        assert scores["reward/mean"] == pytest.approx(parts, rel=1e-6)
        assert scores["reward/parts/environment"] == pytest.approx(scores["environment/reward"], rel=1e-6)
    assert evaluate_run(run, split="val") != evaluate_run(run, split="test"), "each split has seeds of its own"


def test_predictions_have_the_turns(tiny_gpt2_dir, tmp_path):
    run = trained(run_blocks(tiny_gpt2_dir), tmp_path)
    predictions = json.loads((run / "epoch_2_test_split_predictions.json").read_text())
    assert len(predictions) == 5 and {len(line["turns"]) for line in predictions} > {1}
    for line in predictions:
        assert line["generated_text"] == line["turns"][-1]["text"]
        assert line["environment/reward"] == pytest.approx(sum(turn["reward"] for turn in line["turns"]))
        assert line["prompt_text"] and line["turns"][0].keys() == {"text", "answer", "reward"}


def test_an_episode_is_generated_for_a_first_text_that_the_environment_accepts(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["train_evaluation"]["n_iters"] = 0
    refusing = trained(mapping, tmp_path, "refusing")
    with pytest.raises(
        ConfigError, match=r"Digits' begins its dialogue with .* not with the given 'Count with me'; rl4lms-like play "
    ):
        generate_texts(refusing, ["Count with me"])

    mapping["env"]["dialogue"]["id"] = "tests.training.test_dialogue_runs:Answering"
    run = trained(mapping, tmp_path, "answering")
    (texts,) = generate_texts(run, ["Count with me"], n=3)
    assert len(texts) == 3 and all(text.count("[and?]") == 3 for text in texts), "4 turns with the answers between them"
    with pytest.raises(ConfigError, match="max_turn_length, 5"):
        generate_texts(run, ["Count with me"], max_new_tokens=9)
    with pytest.raises(ConfigError, match="beams"):
        evaluate_run(run, decoding="beam")


class Answering(Chatter):
    """Begins with the given text."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return options["sample"].prompt_or_input_text or "Nobody knew", {}

    def step(self, action):
        return "[and?]", 0.0, False, False, {}


class Broken(Chatter):
    """Fails after some turns, as a server that is gone; then it cannot be closed either."""

    def step(self, action):
        result = super().step(action)
        self.turn = getattr(self, "turn", 0) + 1
        if self.turn > 20:
            raise KeyError("x")
        return result

    def close(self):
        if getattr(self, "turn", 0) > 20:
            raise OSError("gone")


def test_a_faulty_environment_ends_the_run_with_its_name(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["env"]["dialogue"]["id"] = "tests.training.test_dialogue_runs:Broken"
    with pytest.raises(DialogueError, match=r"test_dialogue_runs:Broken' with sample .*: step in turn \d failed: Key"):
        trained(mapping, tmp_path, n_iters=20)


def test_an_environment_that_cannot_be_built_is_found_before_weights_are_loaded(tiny_gpt2_dir, monkeypatch):
    def loaded(*args):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("rl4lms_like.on_policy.assemble.build_alg", loaded)
    for dialogue, message in (
        (
            {"id": "tools", "args": {"tools": ["no_module:f"]}},
            r"env.dialogue.args.tools\[0\]: cannot import 'no_module",
        ),
        ({"id": "CartPole-v1"}, "env.dialogue: the actions of 'CartPole-v1' are Discrete"),
    ):
        mapping = run_blocks(tiny_gpt2_dir)
        mapping["env"]["dialogue"] = dialogue | {"max_turn_length": 5}
        with pytest.raises(ConfigError, match=message):
            assemble(parse_config(mapping))


def test_what_cannot_be_combined_is_refused_by_name(tiny_gpt2_dir, tiny_t5_dir):
    def refused(path, text, change):
        mapping = run_blocks(tiny_gpt2_dir)
        change(mapping)
        with raises_at(path, mentions=text):
            parse_config(mapping)

    def setting(path, value):
        def change(mapping):
            *blocks, key = path.split(".")
            for block in blocks:
                mapping = mapping.setdefault(block, {})
            mapping[key] = value

        return change

    kwargs = "alg.policy.args.generation_kwargs"
    refused("env.vec_env", "whole turns", setting("env.vec_env", "dummy"))
    refused("env.vec_env", "whole turns", setting("env.vec_env", "subproc"))
    refused(f"{kwargs}.num_beams", "beams", setting(f"{kwargs}.num_beams", 3))
    refused(f"{kwargs}.max_new_tokens", "max_turn_length, 5", setting(f"{kwargs}.max_new_tokens", 8))
    refused(f"{kwargs}.max_length", "max_turn_length", setting(f"{kwargs}.max_length", 8))
    evaluated = "train_evaluation.generation_kwargs"
    refused(f"{evaluated}.max_new_tokens", "max_turn_length, 5", setting(evaluated, {"max_new_tokens": 8}))
    refused("env.dialogue", "decoder-only", setting("alg.policy.id", "seq2seq_lm_actor_critic_policy"))
    refused("env.dialogue.max_turn_length", "41 tokens", setting("env.dialogue.max_turn_length", 41))
    refused("env.dialogue.id", "unknown environment 'guess'", setting("env.dialogue.id", "guess"))
    refused("env.dialogue.args.x", "unknown key", setting("env.dialogue.args", {"x": 1}))
    with raises_at("reward_fn.id", "datapool.id", mentions="set env.dialogue"):
        parse_config(run_blocks(tiny_gpt2_dir) | {"env": {"n_envs": 16}, "reward_fn": {"id": "environment"}})
    engine = {"id": "vllm", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}, "ahead": 1}
    refused("alg.policy.args.engine.ahead", "env.dialogue", setting("alg.policy.args.engine", engine))


def test_a_reward_of_single_tokens_is_refused(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir)
    mapping["reward_fn"] = {"id": "tests.builders:LowTokens"}
    with raises_at("reward_fn", mentions="LowTokens scores single tokens"):
        trained(mapping, tmp_path)


def test_a_config_of_a_dialogue_needs_neither_reward_nor_data(tiny_gpt2_dir):
    mapping = run_blocks(tiny_gpt2_dir)
    del mapping["datapool"]
    config = parse_config(mapping)
    assert (config.reward_fn.id, config.datapool.id) == ("environment", "episodes")
    assert config.alg.policy.args["generation_kwargs"]["max_new_tokens"] == 5
    assert parse_config(config.to_dict()) == config
    del mapping["env"]["dialogue"]
    with raises_at("reward_fn", "datapool"):
        parse_config(mapping)


def test_python_takes_classes_and_objects(tiny_gpt2_dir, tmp_path):
    settings = {
        "n_iters": 1,
        "n_episodes": 16,
        "device": "cpu",
        "eval_batch_size": 64,
        "env": {"args": {"max_prompt_length": 20}},
    }
    limits = {"max_turns": 3, "max_turn_length": 4}
    by_class = Run(
        str(tiny_gpt2_dir), algorithm="grpo", folder=tmp_path / "class", group_size=4,
        dialogue={"id": Answering, "args": {"end": 0.5}, **limits}, datapool={"args": {"eval_episodes": 2}}, **settings,
    )  # fmt: skip
    assert by_class.config.env.dialogue.id == "object"
    assert by_class.config.alg.policy.args["generation_kwargs"]["max_new_tokens"] == 4
    by_class.train(quiet=True)
    assert by_class.evaluate("test")["environment/turns"] == 3
    assert by_class.generate("Count with me").count("[and?]") == 2

    by_object = Run(
        str(tiny_gpt2_dir), algorithm="grpo", folder=tmp_path / "object", group_size=4,
        dialogue={"id": Answering(end=0.5), **limits}, datapool={"args": {"eval_episodes": 2}}, **settings,
    )  # fmt: skip
    by_object.train(quiet=True)
    weights = [run.folder / "model" / "model.safetensors" for run in (by_class, by_object)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again = Run.from_folder(by_object.folder, dialogue=Answering(end=0.5))
    assert again.evaluate("test") == by_object.evaluate("test")

    with pytest.raises(ConfigError, match="Answering cannot be built: TypeError"):
        Run(str(tiny_gpt2_dir), dialogue={"id": Answering, "args": {"x": 1}})
    with pytest.raises(ConfigError, match="args are for a class"):
        Run(str(tiny_gpt2_dir), dialogue={"id": Answering(), "args": {"end": 1}})


def test_python_reports_what_would_have_no_effect(tiny_gpt2_dir):
    with pytest.raises(ConfigError) as error:
        Run(str(tiny_gpt2_dir), dialogue=Answering, reward_weights=[1.0], eval_prompts=["Count"])
    assert [issue.path for issue in error.value.issues] == ["prompts", "reward"]


def test_environments_of_gymnasium_are_made_by_their_ids(tiny_gpt2_dir, tmp_path):
    gymnasium.register("tests/Answering-v0", entry_point=Answering, max_episode_steps=2)
    try:
        mapping = run_blocks(tiny_gpt2_dir)
        mapping["env"]["dialogue"] |= {"id": "tests/Answering-v0", "args": {"end": 0.1}}
        run = trained(mapping, tmp_path, n_iters=1)
        (numbers,) = lines_of(run, "rollout_info.jsonl")
        assert numbers["rollout_info/environment/turns"] == 2, "Gymnasium's own limit truncates"
    finally:
        gymnasium.registry.pop("tests/Answering-v0")


class OutOfOrder(gymnasium.Env):
    """Answers everything with the same text and never ends."""

    def reset(self, *, seed=None, options=None):
        return "Count", {"metrics": {"calls": 2.0, "failed_calls": 2.0, "calls/search": 0.0}}

    def step(self, action):
        return " out of order ", float(len(action)), False, False, {}


def test_the_run_doctor_reports_a_broken_environment(tiny_gpt2_dir, tmp_path):
    mapping = run_blocks(tiny_gpt2_dir, n_steps=16)
    mapping["env"]["args"]["max_episode_length"] = 80
    mapping["env"]["dialogue"]["id"] = "tests.training.test_dialogue_runs:OutOfOrder"
    mapping["doctor"] = {"patience": 2, "window": 2}
    broken = {alarm["alarm"] for alarm in lines_of(trained(mapping, tmp_path, "broken"), "alarms.jsonl")}
    expected = {"equal_answers", "failed_calls", "unused_tool", "all_truncated"}
    assert expected <= broken

    mapping["env"]["dialogue"]["id"] = "tests.training.test_dialogue_runs:Digits"
    healthy = trained(mapping, tmp_path, "healthy") / "alarms.jsonl"
    assert not healthy.exists() or not expected & {
        json.loads(line)["alarm"] for line in healthy.read_text().splitlines()
    }
