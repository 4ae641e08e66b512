"""A run leaves RL4LMs' files behind, on both model families, and its model loads like any other."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import decoding_arguments, evaluate_run, generate_texts
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.python_api.python_run import train
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import MetricError

ROLLOUT_KEYS = {
    f"rollout_info/{name}{suffix}"
    for name in ("ep_rew", "kl_div_mean", "ep_lens", "ep_kl_rew", "log_prob", "ref_log_prob", "values")
    for suffix in ("", "_std")
} | {"rollout_info/kl_coeff"}
TRAINING_KEYS = {
    "ppo/entropy_loss", "ppo/policy_gradient_loss", "ppo/value_loss", "ppo/approx_kl", "ppo/explained_variance",
}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


@pytest.fixture(params=["causal", "seq2seq"])
def config(request):
    return request.getfixturevalue("tiny_config" if request.param == "causal" else "tiny_seq2seq_config")


def test_a_run_leaves_everything_behind(config, tmp_path):
    folder = run(config, tmp_path)
    assert folder == tmp_path / "rl4lm_exps" / "run"
    rollouts, updates = lines(folder / "rollout_info.jsonl"), lines(folder / "training_info.jsonl")
    assert [line["iteration"] for line in rollouts] == [line["iteration"] for line in updates] == [1, 2, 3]
    assert set(rollouts[0]) >= ROLLOUT_KEYS and set(updates[0]) >= TRAINING_KEYS
    assert rollouts[0]["rollout_info/kl_div_mean"] == pytest.approx(0, abs=1e-6)
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)
    assert [line["epoch"] for line in lines(folder / "val_split_metrics.jsonl")] == [0, 2, 3]
    assert [line["epoch"] for line in lines(folder / "test_split_metrics.jsonl")] == [0, 3]
    predictions = json.loads((folder / "epoch_3_test_split_predictions.json").read_text())
    assert len(predictions) == 6
    expected = {"split_name", "sample_id", "prompt_text", "generated_text", "ref_text", "length/words"}
    assert set(predictions[0]) >= expected
    assert json.loads((folder / "config.json").read_text())["alg"]["id"] == "ppo"
    assert "<html" in (folder / "report.html").read_text()[:400]
    auto = AutoModelForSeq2SeqLM if "seq2seq" in config["alg"]["policy"]["id"] else AutoModelForCausalLM
    start = auto.from_pretrained(config["tokenizer"]["model_name"])
    trained = auto.from_pretrained(folder / "model")
    assert (
        max(float((a - b).detach().abs().max()) for a, b in zip(start.parameters(), trained.parameters(), strict=True))
        > 0
    )
    assert AutoTokenizer.from_pretrained(folder / "model")("Count")["input_ids"]
    halfway = auto.from_pretrained(folder / "checkpoints" / "iteration_00002")
    assert any(not torch.equal(a, b) for a, b in zip(halfway.parameters(), trained.parameters(), strict=True))
    for field in ("dropout", "resid_pdrop", "dropout_rate"):
        assert getattr(trained.config, field, None) == getattr(start.config, field, None)


def test_one_seed_one_result(config, tmp_path):
    first, second = run(config, tmp_path, "first"), run(config, tmp_path, "second")
    assert (first / "model" / "model.safetensors").read_bytes() == (second / "model" / "model.safetensors").read_bytes()
    for file in ("val_split_metrics.jsonl", "epoch_3_val_split_predictions.json", "training_info.jsonl"):
        assert (first / file).read_text() == (second / file).read_text()
    timeless = [
        [
            {key: value for key, value in line.items() if not key.startswith("time/")}
            for line in lines(folder / "rollout_info.jsonl")
        ]
        for folder in (first, second)
    ]
    assert timeless[0] == timeless[1]
    other = run({**config, "seed": 1}, tmp_path, "other")
    assert (first / "model" / "model.safetensors").read_bytes() != (other / "model" / "model.safetensors").read_bytes()


def test_evaluations_do_not_change_training(tiny_config, tmp_path):
    often = run(tiny_config, tmp_path, "often")
    tiny_config["train_evaluation"] |= {"eval_every": 100, "metrics": []}
    seldom = run(tiny_config, tmp_path, "seldom")
    assert (often / "model" / "model.safetensors").read_bytes() == (seldom / "model" / "model.safetensors").read_bytes()


def test_an_interrupted_run_saves_what_it_has(tiny_config, tmp_path, monkeypatch):
    from rl4lms_like.algorithms.ppo import PPO

    original = PPO.learn_iteration

    def interrupted(self, iteration, n_iterations, hooks):
        if iteration == 1:
            raise KeyboardInterrupt
        original(self, iteration, n_iterations, hooks)

    monkeypatch.setattr(PPO, "learn_iteration", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_config, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert len(lines(folder / "rollout_info.jsonl")) == 1
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "interrupted_00001")
    assert "interrupted after 1 iterations" in (folder / "log.txt").read_text()
    assert (folder / "report.html").exists()


def test_a_model_that_cannot_be_saved_does_not_hide_why_the_run_ended(tiny_config, tmp_path, monkeypatch):
    from rl4lms_like.algorithms.ppo import PPO
    from rl4lms_like.policies.base import LMActorCriticPolicy

    original = PPO.learn_iteration

    def failing(self, iteration, n_iterations, hooks):
        if iteration == 1:
            raise ZeroDivisionError("the reason")
        original(self, iteration, n_iterations, hooks)

    def full_disk(self, *args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(PPO, "learn_iteration", failing)
    monkeypatch.setattr(LMActorCriticPolicy, "save_model", full_disk)
    with pytest.raises(ZeroDivisionError):
        run(tiny_config, tmp_path)
    assert "no space left" in (tmp_path / "rl4lm_exps" / "run" / "log.txt").read_text()


class FailsLate(BaseMetric):
    """A metric that cannot score what comes out of training."""

    calls = 0

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        FailsLate.calls += 1
        if FailsLate.calls > 2:
            raise ValueError("too late")
        return {"test/late": (None, 0.0)}


def test_a_metric_that_fails_at_the_end_does_not_cost_the_model(tiny_config, tmp_path):
    FailsLate.calls = 0
    tiny_config["train_evaluation"] |= {
        "eval_every": 100,
        "save_every": 100,
        "metrics": [{"id": f"{__name__}:FailsLate"}],
    }
    with pytest.raises(MetricError):
        run(tiny_config, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "rl4lm_exps" / "run" / "model")


def test_the_model_is_saved_also_if_the_checkpoint_it_came_from_is_gone(tiny_config, tmp_path, monkeypatch):
    import shutil

    from rl4lms_like.algorithms.ppo import PPO

    folder = tmp_path / "start"
    shutil.copytree(tiny_config["alg"]["policy"]["args"]["model_name"], folder)
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(folder)
    original = PPO.learn_iteration

    def without_start(self, *args):
        shutil.rmtree(folder, ignore_errors=True)
        original(self, *args)

    monkeypatch.setattr(PPO, "learn_iteration", without_start)
    assert AutoModelForCausalLM.from_pretrained(run(tiny_config, tmp_path) / "model")


def test_what_ends_a_response_also_stands_in_generation_config(tiny_gpt2_dir, tmp_path, tiny_tokenizer):
    import shutil

    from rl4lms_like.policies.arguments import PolicyArguments
    from rl4lms_like.training.inputs import end_tokens, load_generation_config, load_model_config

    folder = tmp_path / "chat"
    shutil.copytree(tiny_gpt2_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    config = load_model_config(PolicyArguments(model_name=str(folder)))
    assert end_tokens(tiny_tokenizer, config, load_generation_config(str(folder))) == [1, 7]
    assert end_tokens(tiny_tokenizer, config, None) == [1]
    (folder / "generation_config.json").unlink()
    assert load_generation_config(str(folder)) is None


def test_no_iterations_only_evaluate(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["n_iters"] = 0
    folder = run(tiny_config, tmp_path)
    assert [line["epoch"] for line in lines(folder / "val_split_metrics.jsonl")] == [0]
    assert not (folder / "rollout_info.jsonl").exists()


@pytest.mark.parametrize("generation_kwargs", [
    {"do_sample": False, "num_beams": 1, "max_new_tokens": 5},
    {"num_beams": 3, "max_new_tokens": 5},
    {"num_beams": 2, "do_sample": True, "max_new_tokens": 5},
    {"do_sample": True, "top_k": 5, "min_length": 4, "max_new_tokens": 5},
])  # fmt: skip
def test_evaluation_decodes_greedily_by_beams_and_by_sampling(config, generation_kwargs, tmp_path):
    config["train_evaluation"] |= {"n_iters": 0, "generation_kwargs": generation_kwargs}
    folder = run(config, tmp_path)
    assert len(json.loads((folder / "epoch_0_val_split_predictions.json").read_text())) == 6


def test_without_a_penalty_no_reference_is_loaded(tiny_config, tmp_path, monkeypatch):
    from rl4lms_like.on_policy import trainer

    seen = []
    original = trainer.OnPolicyTrainer.train_and_eval
    monkeypatch.setattr(
        trainer.OnPolicyTrainer, "train_and_eval", lambda self: (seen.append(self.run.policy), original(self))
    )
    tiny_config["alg"]["kl_div"] = {"coeff": 0.0}
    tiny_config["alg"]["policy"]["args"]["critic"] = "shared"
    run(tiny_config, tmp_path)
    assert seen[0].ref_model is None and seen[0].value_model is None


def test_another_checkpoint_as_reference(tiny_config, tmp_path, tiny_tokenizer):
    from rl4lms_like.testing import models

    other = models.save_model(tmp_path / "other", models.make_causal_lm("llama", tiny_tokenizer), tiny_tokenizer)
    tiny_config["alg"]["policy"]["args"]["reference_model"] = str(other)
    folder = run(tiny_config, tmp_path)
    assert abs(lines(folder / "rollout_info.jsonl")[0]["rollout_info/kl_div_mean"]) > 1e-4


def test_a_finished_run_can_be_evaluated_and_asked_for_texts(config, tmp_path, capsys):
    folder = run(config, tmp_path)
    again = evaluate_run(folder, split="test")
    assert again == lines(folder / "test_split_metrics.jsonl")[-1]["metrics"]
    assert (folder / "evaluation" / "test_split_metrics.jsonl").exists()
    beams = evaluate_run(folder, split="val", decoding="beam", num_beams=2, limit=3, output=tmp_path / "beams")
    assert set(beams) == set(again)
    assert "3 samples of val" in capsys.readouterr().out
    texts = generate_texts(folder, ["Count with me:", "The film"], n=2, seed=1)
    assert [len(part) for part in texts] == [2, 2]
    assert texts == generate_texts(folder, ["Count with me:", "The film"], n=2, seed=1)
    assert generate_texts(folder / "model", ["Count"], decoding="greedy", max_new_tokens=3)


def test_decoding_arguments_leave_nothing_of_the_old_way():
    sampled = {"do_sample": True, "top_k": 7, "temperature": 0.5, "max_new_tokens": 9}
    assert decoding_arguments(sampled, None) == sampled
    assert decoding_arguments(sampled, "greedy") == {"do_sample": False, "num_beams": 1, "max_new_tokens": 9}
    assert decoding_arguments(sampled, "beam", num_beams=3, max_new_tokens=4) == {
        "do_sample": False, "num_beams": 3, "max_new_tokens": 4,
    }  # fmt: skip
    assert decoding_arguments(sampled, "sampling")["top_k"] == 7


def test_a_yaml_file_with_overrides_trains(tiny_config, tmp_path):
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(tiny_config))
    folder = train(
        file,
        base_path_to_store_results=tmp_path,
        overrides=["train_evaluation.n_iters=1", "alg.id=a2c", "alg.args={n_steps: 4}"],
    )
    assert len(lines(folder / "rollout_info.jsonl")) == 1


def test_rewards_in_worker_processes_give_the_same_run(tiny_config, tmp_path):
    here = run(tiny_config, tmp_path, "here")
    tiny_config["env"]["reward_workers"] = 2
    there = run(tiny_config, tmp_path, "there")
    assert (here / "model" / "model.safetensors").read_bytes() == (there / "model" / "model.safetensors").read_bytes()


def test_token_by_token_environments_give_the_same_rewards(tiny_config, tmp_path):
    tiny_config["env"]["vec_env"] = "dummy"
    folder = run(tiny_config, tmp_path)
    assert len(lines(folder / "rollout_info.jsonl")) == 3
