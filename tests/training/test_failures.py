"""What goes wrong is said once, by name, and what was logged before stays."""

import json

import pytest

from rl4lms_like.cli import main
from rl4lms_like.core.errors import ConfigError, DataPoolError, ModelError, RewardError
from rl4lms_like.training.config import parse_config
from rl4lms_like.training.run import train_config

HERE = "tests.training.failing"


def run(config, folder):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name="run", quiet=True)


@pytest.mark.parametrize(("what", "said"), [("raise", "the_missing_key"), ("nan", "nan"), ("text", "text")])
def test_a_reward_that_fails_in_the_third_iteration(what, said, tiny_config, tmp_path):
    tiny_config["env"]["args"]["terminate_on_eos"] = False
    tiny_config["reward_fn"] = {"id": f"{HERE}:Late", "args": {"after": 8, "what": what}}
    with pytest.raises(RewardError, match=rf"(?s)Late.*{said}"):
        run(tiny_config, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert len((folder / "rollout_info.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "val_split_metrics.jsonl").read_text().splitlines()[0])["epoch"] == 0
    assert (folder / "report.html").exists()
    assert "Late" in (folder / "log.txt").read_text()


def test_a_reward_with_too_few_values(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:TooFew"}
    with pytest.raises(RewardError, match=r"TooFew.*3.*4|TooFew.*4.*3"):
        run(tiny_config, tmp_path)


def test_a_missing_model_is_named_before_anything_is_written(tiny_config, tmp_path, capsys):
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(tmp_path / "nowhere")
    file = tmp_path / "config.yml"
    file.write_text(json.dumps(tiny_config))
    status = main(["train", str(file), "--base_path_to_store_results", str(tmp_path)])
    assert status in (1, 2)
    error = capsys.readouterr().err
    assert str(tmp_path / "nowhere") in error and "Traceback" not in error
    assert not (tmp_path / "rl4lm_exps").exists()


@pytest.mark.parametrize("broken", ["config", "weights", "empty"])
def test_a_damaged_model_folder_is_named(broken, tiny_config, tiny_gpt2_dir, tmp_path):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(tiny_gpt2_dir, folder)
    if broken == "config":
        (folder / "config.json").write_text("{")
    elif broken == "weights":
        (folder / "model.safetensors").write_bytes(b"no weights")
    else:
        for path in folder.iterdir():
            path.unlink()
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(folder)
    with pytest.raises((ModelError, ConfigError), match="damaged"):
        run(tiny_config, tmp_path)


def test_an_unreadable_data_file_is_named(tiny_config, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": \n')
    tiny_config["datapool"] = {"id": "jsonl", "args": {"path": str(data), "prompt_column": "prompt"}}
    with pytest.raises(DataPoolError, match=r"data\.jsonl"):
        run(tiny_config, tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_config, tmp_path, tiny_gpt2_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(9)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tiny_config["tokenizer"]["model_name"] = str(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=r"329 tokens, the model .* only 320"):
        run(tiny_config, tmp_path)


def test_prompts_and_responses_must_fit_the_models_positions(tiny_config, tmp_path):
    tiny_config["env"]["args"]["max_prompt_length"] = 125
    with pytest.raises(ConfigError, match="128 positions, prompt and response together may need 133"):
        run(tiny_config, tmp_path)


def test_what_only_torch_and_transformers_know_is_said_before_weights_are_read(tiny_config, tmp_path, monkeypatch):
    from rl4lms_like.training import assemble

    monkeypatch.setattr(assemble, "build_tokenizer", lambda config: pytest.fail("went on"))
    tiny_config["device"] = "quantum"
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["max_new_token"] = 3
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["eos_token_id"] = 3
    with pytest.raises(ConfigError) as error:
        run(tiny_config, tmp_path)
    paths = [mistake.path for mistake in error.value.mistakes]
    assert paths == [f"alg.policy.args.generation_kwargs.{key}" for key in ("max_new_token", "eos_token_id")] + [
        "device"
    ]
    assert "did you mean 'max_new_tokens'" in str(error.value)


def test_settings_that_would_have_no_effect_are_mistakes(tiny_config, tmp_path):
    tiny_config["alg"]["kl_div"]["coeff"] = 0
    tiny_config["alg"]["policy"]["args"]["optimizer_kwargs"] = {"lr": 1, "weight_decay": 0.5, "eps": 1e-6}
    with pytest.raises(ConfigError) as error:
        run(tiny_config, tmp_path)
    assert len(error.value.mistakes) == 3
    for said in ("optimizer_kwargs.lr", "optimizer_kwargs.weight_decay", "target_kl has no effect"):
        assert said in str(error.value)


def test_an_empty_prompt_is_found_before_the_model_loads(tiny_config, tmp_path, monkeypatch):
    """A decoder-only model has nothing to go on from; GPT-2's tokenizer puts nothing before an empty text."""
    tiny_config["datapool"]["args"]["prompt"] = ""
    monkeypatch.setattr("rl4lms_like.training.assemble.build_alg", None)
    with pytest.raises(DataPoolError, match=r"prompts of 6 samples of 'train' are empty .* begin with the token"):
        run(tiny_config, tmp_path)


def test_an_encoder_reads_empty_prompts(tiny_seq2seq_config, tmp_path):
    tiny_seq2seq_config["datapool"]["args"]["prompt"] = ""
    folder = run(tiny_seq2seq_config, tmp_path)
    updates = [json.loads(line) for line in (folder / "training_info.jsonl").read_text().splitlines()]
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)
