"""`check` says what a run would say before it loads anything."""

import json
import shutil

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.settings import response_length
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.measured_time import measure_iteration
from rl4lms_like.on_policy import assemble as training_assemble
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.speedups import all_speedups
from rl4lms_like.preview import preview, time_section
from rl4lms_like.system.errors import DataPoolError, ModelError, RL4LMsLikeError
from rl4lms_like.training.inputs import load_model_config
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks
from tests.offline.preferences import preference_runs


def test_arguments_of_generate_are_checked():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["max_new_token"] = 3
    with raises_at("alg.policy.args.generation_kwargs.max_new_token", mentions="'max_new_tokens'"):
        list(preview(parse_config(blocks)))


def test_arguments_of_the_optimizer_are_checked():
    blocks = run_blocks()
    for kwargs in ({"momentum": 0.9}, {"eps": "tiny"}, {"betas": [2, 3]}):
        blocks["alg"]["policy"]["args"]["optimizer_kwargs"] = kwargs
        with raises_at("alg.policy.args.optimizer_kwargs"):
            list(preview(parse_config(blocks)))
    blocks["alg"] |= {"id": "a2c", "args": {}}
    blocks["alg"]["policy"]["args"]["optimizer_kwargs"] = {"momentum": 0.9}
    list(preview(parse_config(blocks)))


@pytest.fixture
def on(tmp_path, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    """A config of a run on local models."""

    def blocks(model=tiny_gpt2_dir, tokenizer=tiny_gpt2_dir, **args):
        made = run_blocks()
        made["tokenizer"]["model_name"] = str(tokenizer)
        made["alg"]["policy"]["args"] |= {"model_name": str(model), **args}
        return made

    return blocks


def test_mistakes_of_settings_models_and_data_are_reported_together(on):
    blocks = on()
    blocks["env"]["args"]["max_prompt_length"] = 200
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["no_such_setting"] = 1
    blocks["reward_fn"] = {"id": "rouge", "args": {"rouge_type": "rouge1"}}
    with raises_at("alg.policy.args.generation_kwargs.no_such_setting", "env.args", "reward_fn"):
        list(preview(parse_config(blocks)))


def test_models_and_lengths_are_held_against_each_other_before_weights_are_read(on, tiny_t5_dir):
    assert "fit: " in "\n".join(preview(parse_config(on())))
    family = on(model=tiny_t5_dir, critic_model=str(tiny_t5_dir))
    with raises_at("alg.policy.args.model_name", "alg.policy.args.critic_model"):
        list(preview(parse_config(family)))
    for value, path in ((200, "env.args"), (None, "env.args.max_prompt_length")):
        blocks = on()
        blocks["env"]["args"]["max_prompt_length"] = value
        with raises_at(path) as caught:
            list(preview(parse_config(blocks)))
        with raises_at(path) as trained:
            assemble(parse_config(blocks))
        assert trained.value.issues == caught.value.issues


def test_a_speedup_that_is_set_and_cannot_apply_has_a_notice(on, caplog):
    def notices(**speedups):
        text = "\n".join(preview(parse_config(on(speedups=speedups))))
        return [line for line in text.splitlines() if line.startswith("alg.policy.args.speedups")]

    # GPT-2 has one key and value for each head.
    line = "alg.policy.args.speedups.grouped_attention: no effect: the model's attention has no groups"
    assert notices(grouped_attention=True, fused_activations=True) == [line]
    assert notices(grouped_attention=False) == notices() == []
    assert notices(**all_speedups()) == []  # as a run stores them

    assemble(parse_config(on(speedups={"grouped_attention": True})))
    assert line in caplog.messages


@pytest.mark.parametrize("key", ["model_name", "critic_model", "reference_model"])
def test_a_folder_that_lacks_weights_is_refused_by_check_and_before_training(on, key, tiny_gpt2_dir, tmp_path):
    assert "weights: complete" in "\n".join(preview(parse_config(on())))
    folder = shutil.copytree(tiny_gpt2_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 50}))
    blocks = on()
    blocks["alg"]["policy"]["args"][key] = str(folder)
    for refuse in (lambda config: list(preview(config)), assemble):
        with pytest.raises(ModelError, match=r"transformer.h.\*.attn"):
            refuse(parse_config(blocks))


def test_a_supervised_model_that_lacks_weights_is_refused_by_check(tiny_gpt2_dir, tmp_path):
    folder = shutil.copytree(tiny_gpt2_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 50}))
    blocks = supervised_blocks()
    blocks["alg"] |= {"model_name": str(folder), "model_type": "causal"}
    blocks["tokenizer"]["model_name"] = str(folder)
    with pytest.raises(RL4LMsLikeError) as caught:
        list(preview(parse_config(blocks)))
    assert "transformer.h.*.attn" in str(caught.value)
    assert "no sample of the split 'train' has a reference" in str(caught.value), "and what else is wrong"


def test_the_memory_of_each_process_is_shown_for_split_weights(on):
    shown = "\n".join(preview(parse_config({**on(), "distributed": {"strategy": "fsdp"}})))
    assert [n for n in range(1, 10) if f"each of {n} processes" in shown] == [2, 4, 8]


def test_no_memory_is_estimated_for_lengths_that_the_model_does_not_have(on):
    blocks = on()
    blocks["env"]["args"]["max_prompt_length"] = 2**31
    with raises_at("env.args"):
        list(preview(parse_config(blocks)))


def test_episodes_are_no_longer_than_their_default_limit(on, tiny_t5_dir):
    blocks = on()
    del blocks["env"]["args"]["max_episode_length"]
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"] = 1000
    network = load_model_config(PolicyArguments(model_name=str(tiny_t5_dir)))
    assert response_length(parse_config(blocks), network) == 512


def test_a_family_that_a_supervised_model_is_not_of_is_told_by_check(tiny_gpt2_dir):
    blocks = supervised_blocks()
    blocks["alg"]["model_name"] = blocks["tokenizer"]["model_name"] = str(tiny_gpt2_dir)
    with raises_at("alg.model_type", among_others=True, mentions="causal"):
        list(preview(parse_config(blocks)))


def test_a_device_that_is_elsewhere_is_not_a_mistake_of_the_file():
    blocks = run_blocks() | {"device": "cuda:7"}
    assert "# memory" in "\n".join(preview(parse_config(blocks)))


@pytest.mark.parametrize(("place", "device"), [("device", "CPU"), ("device", "cuda:-1"), ("alg.args.device", "gpu")])
def test_a_device_that_is_none_on_any_machine_is_told_with_its_key(place, device):
    blocks = run_blocks()
    (blocks if place == "device" else blocks["alg"]["args"])["device"] = device
    with raises_at(place, mentions=f"'{device}'"):
        list(preview(parse_config(blocks)))


def test_a_supervised_runs_device_is_told_by_check_where_no_machine_has_it(tiny_gpt2_dir):
    blocks = supervised_blocks()
    for device in ("CPU", "cuda:1"):
        with raises_at("device", among_others=True):
            list(preview(parse_config(blocks | {"device": device})))


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    """A `jsonl` pool of 30 rows, of which every third has a long prompt and every fifth no reference."""
    path = tmp_path / "rows.jsonl"
    texts = ["Count from one to ten, and back again." if i % 3 == 0 else "Count." for i in range(30)]
    lines = [{"q": text, "a": None if i % 5 == 0 else "one two"} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"train": str(path), "val": str(path), "test": str(path)}
    return {"id": "jsonl", "args": {"data_files": files, "prompt_column": "q", "reference_column": "a"}}


def test_the_data_are_summarised(on, rows, tiny_tokenizer):
    blocks = on() | {"datapool": rows}
    blocks["env"]["args"]["max_prompt_length"] = len(tiny_tokenizer("Count.")["input_ids"])
    longest = len(tiny_tokenizer("Count from one to ten, and back again.")["input_ids"])
    data = "\n".join(preview(parse_config(blocks))).split("# data")[1]
    assert "train   30 samples; 10 prompts are longer than" in data and f"(up to {longest}) and cut" in data
    assert data.count("6 without references") == 3
    assert data.count("prompt  'Count from one") == data.count("prompt  'Count.'") == 1


def test_data_of_the_hub_are_not_waited_for(on, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("the hub is asked"))
    for pool in ({"id": "imdb"}, {"id": "hf_dataset", "args": {"path": "stanfordnlp/imdb", "prompt_column": "text"}}):
        data = "\n".join(preview(parse_config(on() | {"datapool": pool}))).split("# data")[1]
        assert "not checked" in data


def test_local_files_of_a_format_of_datasets_are_looked_at(on, rows):
    pytest.importorskip("datasets")
    blocks = on() | {"datapool": {"id": "hf_dataset", "args": rows["args"] | {"path": "json"}}}
    blocks["datapool"]["args"]["split_names"] = {"val": "val"}
    assert "train   30 samples" in "\n".join(preview(parse_config(blocks)))


class Broken(TextGenPool):
    @classmethod
    def prepare(cls, split):
        raise ValueError("it is broken")


def test_a_pool_that_cannot_be_prepared_is_told_by_check(on):
    with pytest.raises(DataPoolError, match="ValueError: it is broken"):
        list(preview(parse_config(on() | {"datapool": {"id": f"{__name__}:Broken"}})))


def test_a_sampler_that_rejects_its_arguments_is_told_by_check(on):
    blocks = on()
    blocks["datapool"]["sampler"] = {"id": "difficulty", "args": {"hard_below": 0.8, "easy_above": 0.2}}
    with raises_at("datapool.sampler.args"):
        list(preview(parse_config(blocks)))


@pytest.mark.parametrize("reward", [
    {"id": "exact_match"},
    {"id": "combine", "args": {"rewards": [{"id": "repetition_penalty"}, {"id": "exact_match"}]}},
    {"id": "increasing_numbers", "args": {"min_tokens": 3, "shaping_fn": {"id": "exact_match"}}},
])  # fmt: skip
def test_a_reward_that_needs_references_refuses_samples_without_them_before_weights_are_read(
    on, rows, reward, monkeypatch
):
    monkeypatch.setattr(training_assemble, "build_alg", lambda *args: pytest.fail("weights are read"))
    blocks = on() | {"datapool": rows, "reward_fn": reward}
    blocks["train_evaluation"]["metrics"] = [{"id": "exact_match"}, {"id": "length"}]
    for checked in (assemble, lambda config: list(preview(config))):
        with raises_at("reward_fn", mentions="'train_0'"):
            checked(parse_config(blocks))


@pytest.mark.parametrize("metric", [
    {"id": "exact_match"},
    {"id": "exact_match", "name": "again"},
    {"id": "pass_at_k"},
    {"id": "pass_at_k", "args": {"scorer": {"id": "math_equal"}}},
])  # fmt: skip
def test_a_metric_that_needs_references_refuses_splits_without_any(on, metric):
    blocks = on()
    blocks["train_evaluation"]["metrics"] = [{"id": "length"}, {"id": "length"}, metric]
    with raises_at("train_evaluation.metrics.2"):
        assemble(parse_config(blocks))


def test_what_needs_no_references_is_not_refused(on):
    blocks = on()
    scorer = {"id": "regex", "args": {"pattern": "a"}}
    blocks["train_evaluation"]["metrics"] = [{"id": "pass_at_k", "args": {"scorer": scorer}}, {"id": "distinct_n"}]
    assert "all without references" in "\n".join(preview(parse_config(blocks)))


def test_a_metric_takes_a_split_of_which_some_have_references(on, rows):
    blocks = on() | {"datapool": rows}
    blocks["train_evaluation"]["metrics"] = [{"id": "exact_match"}]
    assert "6 without references" in "\n".join(preview(parse_config(blocks)))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_best_metric_that_cannot_be_computed_is_told_by_check(is_there, tiny_gpt2_dir, tmp_path):
    file = preference_runs.written(tmp_path)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_steps": 2}
    blocks = preference_runs.blocks("dpo", tiny_gpt2_dir, file, **best)
    blocks["datapool"]["args"] = {"path": file, "split_ratios": [0.5, 0.25, 0.25] if is_there else [0.5, 0, 0.5]}
    if is_there:
        list(preview(parse_config(blocks)))
        return
    with raises_at("alg.training_args.metric_for_best_model"):
        list(preview(parse_config(blocks)))


# --- the time of an iteration ----------------------------------------------------------------------------------------


def test_the_time_of_an_iteration_is_measured_on_one_batch(tiny_config, tmp_path, capsys):
    tiny_config["alg"]["args"] = {"n_episodes": 12, "minibatch_episodes": 4, "n_epochs": 2}
    measured = measure_iteration(parse_config(tiny_config))
    assert measured.batches == 3, "12 episodes in batches of 4"
    assert 4 <= measured.tokens <= 4 * 8
    assert measured.iteration_s == pytest.approx(3 * (measured.rollout_s + measured.update_s))
    assert min(measured.rollout_s, measured.update_s) > 0

    file = tmp_path / "run.yml"
    file.write_text(dump_yaml(tiny_config))
    assert main(["check", str(file), "--time"]) == 0
    out = capsys.readouterr().out
    assert "# time" in out and "per iteration" in out
    assert not (tmp_path / "rl4lm_exps").exists()


def test_the_time_of_what_calls_a_server_or_has_no_iterations_is_not_measured(tiny_config):
    tiny_config["reward_fn"] = {"id": "http", "args": {"url": "http://127.0.0.1:1"}}
    with raises_at("--time"):
        time_section(parse_config(tiny_config))
    with raises_at("--time"):
        time_section(parse_config(supervised_blocks()))
