"""`check` says what a run would say before it loads anything."""

import json
import shutil

import pytest

from rl4lms_like.core.errors import ConfigError, ModelError
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.training.assemble import assemble, load_model_config
from rl4lms_like.training.config.fit import response_length
from rl4lms_like.training.config.run_config import parse_config
from rl4lms_like.training.preview import preview
from tests.training.configs import run_blocks, supervised_blocks


def test_arguments_of_generate_are_checked():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["max_new_token"] = 3
    with pytest.raises(ConfigError, match=r"generation_kwargs.max_new_token: .*did you mean 'max_new_tokens'"):
        list(preview(parse_config(blocks)))


def test_arguments_of_the_optimizer_are_checked():
    blocks = run_blocks()
    for kwargs in ({"momentum": 0.9}, {"eps": "tiny"}, {"betas": [2, 3]}):
        blocks["alg"]["policy"]["args"]["optimizer_kwargs"] = kwargs
        with pytest.raises(ConfigError, match=r"alg.policy.args.optimizer_kwargs: torch's AdamW does not take them"):
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


def test_models_and_lengths_are_held_against_each_other_before_weights_are_read(on, tiny_t5_dir):
    assert "fit: " in "\n".join(preview(parse_config(on())))
    family = on(model=tiny_t5_dir, critic_model=str(tiny_t5_dir))
    with pytest.raises(ConfigError) as caught:
        list(preview(parse_config(family)))
    assert [mistake.path for mistake in caught.value.mistakes] == [
        "alg.policy.args.model_name",
        "alg.policy.args.critic_model",
    ]
    for key, value, message in (
        ("max_prompt_length", 200, "env.args: the model has 128 positions, prompt and response together may need 220"),
        ("max_prompt_length", None, "env.args.max_prompt_length: the tokenizer names no length limit"),
    ):
        blocks = on()
        blocks["env"]["args"][key] = value
        with pytest.raises(ConfigError, match=message) as caught:
            list(preview(parse_config(blocks)))
        with pytest.raises(ConfigError) as trained:
            assemble(parse_config(blocks))
        assert trained.value.mistakes == caught.value.mistakes


@pytest.mark.parametrize("key", ["model_name", "critic_model", "reference_model"])
def test_a_folder_that_lacks_weights_is_refused_by_check_and_before_training(on, key, tiny_gpt2_dir, tmp_path):
    pytest.importorskip("accelerate")
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
    pytest.importorskip("accelerate")
    folder = shutil.copytree(tiny_gpt2_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 50}))
    blocks = supervised_blocks()
    blocks["alg"] |= {"model_name": str(folder), "model_type": "causal"}
    blocks["tokenizer"]["model_name"] = str(folder)
    with pytest.raises(ModelError, match=r"transformer.h.\*.attn"):
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
    with pytest.raises(ConfigError, match=r"alg.model_type: .* is a causal model: write causal"):
        list(preview(parse_config(blocks)))


def test_a_device_that_is_elsewhere_is_not_a_mistake_of_the_file():
    blocks = run_blocks() | {"device": "cuda:7"}
    assert "# memory" in "\n".join(preview(parse_config(blocks)))


@pytest.mark.parametrize(("place", "device"), [("device", "CPU"), ("device", "cuda:-1"), ("alg.args.device", "gpu")])
def test_a_device_that_is_none_on_any_machine_is_told_with_its_key(place, device):
    blocks = run_blocks()
    (blocks if place == "device" else blocks["alg"]["args"])["device"] = device
    with pytest.raises(ConfigError, match=f"{place}: expected auto, cpu, cuda, cuda:1 or the like, got '{device}'"):
        list(preview(parse_config(blocks)))


def test_a_supervised_runs_device_is_told_by_check_where_no_machine_has_it(tiny_gpt2_dir):
    blocks = supervised_blocks()
    for device, said in [("CPU", "expected auto, cpu"), ("cuda:1", "takes the first GPU it sees")]:
        with pytest.raises(ConfigError, match=f"device: .*{said}"):
            list(preview(parse_config(blocks | {"device": device})))
