"""What goes wrong is said once, by name, and what was logged before stays."""

import json
import signal
import subprocess
import sys

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ComponentError, ConfigError, DataPoolError, MetricError, ModelError, RewardError
from rl4lms_like.system.import_paths import use_code_from
from tests.config_errors import raises_at
from tests.conftest import REPOSITORY

HERE = "tests.training.failing"


def run(config, folder):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name="run", quiet=True)


@pytest.mark.parametrize(("what", "datum"), [("raise", "the_missing_key"), ("nan", "nan"), ("text", "text")])
def test_a_reward_that_fails_in_the_third_iteration(what, datum, tiny_config, tmp_path):
    tiny_config["env"]["args"]["terminate_on_eos"] = False
    tiny_config["reward_fn"] = {"id": f"{HERE}:Late", "args": {"after": 8, "what": what}}
    with pytest.raises(RewardError, match=rf"(?s)Late.*{datum}"):
        run(tiny_config, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert len((folder / "rollout_info.jsonl").read_text("utf-8").splitlines()) == 2
    assert json.loads((folder / "val_split_metrics.jsonl").read_text("utf-8").splitlines()[0])["epoch"] == 0
    assert (folder / "report.html").exists()
    assert "Late" in (folder / "log.txt").read_text("utf-8")


def test_the_texts_that_a_reward_failed_on_are_kept_until_the_run_goes_on(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:Late", "args": {"after": 8, "what": "raise"}}
    tiny_config["env"]["args"]["terminate_on_eos"] = False
    with pytest.raises(RewardError):
        run(tiny_config, tmp_path)
    file = tmp_path / "rl4lm_exps" / "run" / "failed_batch.json"
    failed = json.loads(file.read_text("utf-8"))
    assert "the_missing_key" in failed["error"]
    assert [text["prompt_text"] for text in failed["texts"]] == ["Count with me:"] * 4
    assert all(text["generated_text"] and text["sample_id"] in "012345" for text in failed["texts"])
    log = (file.parent / "log.txt").read_text("utf-8")
    assert 'raise KeyError("the_missing_key")' in log, "where it was raised"
    run(tiny_config, tmp_path)  # it goes on, with a reward that can pay for the one iteration that is left
    assert len((file.parent / "rollout_info.jsonl").read_text("utf-8").splitlines()) == 3
    assert not file.exists()


def test_a_metric_that_exits_does_not_end_the_run_as_if_it_were_done(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["metrics"] = [{"id": f"{HERE}:Broken"}]
    with pytest.raises(MetricError):
        run(tiny_config, tmp_path)
    texts = json.loads((tmp_path / "rl4lm_exps" / "run" / "failed_batch.json").read_text("utf-8"))["texts"]
    assert len(texts) == 6 and texts[0].keys() >= {"sample_id", "prompt_text", "generated_text", "references"}


def test_a_reward_that_changes_the_current_folder_does_not_move_the_run(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tiny_config["reward_fn"] = {"id": f"{HERE}:Wanders", "args": {"folder": str(tmp_path / "elsewhere")}}
    assert run(tiny_config, ".") == tmp_path / "rl4lm_exps" / "run"
    assert (tmp_path / "rl4lm_exps" / "run" / "finished.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs SIGALRM")
def test_a_reward_that_hangs_ends_the_run_by_name(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:Hangs"}
    tiny_config["env"]["reward_timeout"] = 0.3
    with pytest.raises(RewardError, match=r"Hangs .*TimeIsUp: .*0\.3 s"):
        run(tiny_config, tmp_path)


@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_a_timeout_that_would_do_nothing_is_a_mistake(kind, tiny_config):
    tiny_config["env"] |= {"vec_env": kind, "reward_timeout": 3, "reward_workers": 1}
    with raises_at("env.reward_workers", "env.reward_timeout"):
        parse_config(tiny_config)


def test_a_reward_with_too_few_values(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:TooFew"}
    with pytest.raises(RewardError, match=r"TooFew.* 3 .* 4"):
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
        shutil.rmtree(folder)
        folder.mkdir()
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(folder)
    with pytest.raises((ModelError, ConfigError), match="damaged"):
        run(tiny_config, tmp_path)


def test_a_pool_without_its_file_is_named(tiny_config, tmp_path):
    tiny_config["datapool"] = {"id": "jsonl", "args": {"path": "0", "prompt_column": "text"}}
    with pytest.raises(DataPoolError, match=r"'train' .*'jsonl': .* 0:"):
        run(tiny_config, tmp_path)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("exit", ": SystemExit: 0"),
        ("nothing", ": TypeError"),
        ("texts", r"\('a text', 1\.0\)"),
        ("no list", "'train_0'"),
    ],
)
def test_a_pool_that_exits_or_has_no_samples_is_named(what, data, tiny_config, tmp_path):
    tiny_config["datapool"] = {"id": f"{HERE}:Samples", "args": {"what": what}}
    with pytest.raises(DataPoolError, match=f"'train' .*'{HERE}:Samples' .*{data}"):
        run(tiny_config, tmp_path)


def test_a_component_that_exits_when_it_is_made_is_named(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:Exits"}
    with pytest.raises(ComponentError, match=f"'{HERE}:Exits' .*: SystemExit: 0"):
        run(tiny_config, tmp_path)


def test_a_module_that_exits_when_it_is_imported_is_named(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "a_script_that_exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("RL4LMS_LIKE_CODE", "")
    use_code_from(tmp_path)
    tiny_config["reward_fn"] = {"id": "a_script_that_exits:Reward"}
    with raises_at("reward_fn.id", mentions="SystemExit: 0"):
        run(tiny_config, tmp_path)


def test_a_state_that_cannot_be_asked_for_is_named(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:Forgets"}
    with pytest.raises(ComponentError, match=r"Forgets .*: KeyError: 'forgotten'"):
        run(tiny_config, tmp_path)


def test_half_of_a_surrogate_pair_in_the_samples_is_kept_as_it_is(tiny_config, tmp_path):
    tiny_config["datapool"] = {"id": f"{HERE}:Samples", "args": {"what": "half"}}
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_model": False}
    folder = run(tiny_config, tmp_path)
    (first, *_) = json.loads((folder / "epoch_0_val_split_predictions.json").read_text("utf-8"))
    assert first["ref_text"] == "<START-1>half a pair \ud83d<END-1>"
    tiny_config["reward_fn"] = {"id": f"{HERE}:TooFew"}
    with pytest.raises(RewardError):
        run(tiny_config, tmp_path / "failed")
    failed = json.loads((tmp_path / "failed" / "rl4lm_exps" / "run" / "failed_batch.json").read_text("utf-8"))
    assert failed["texts"][0]["meta_info"] == {"half": "\udfff"}


def test_a_run_goes_on_whose_reward_changes_the_samples(tiny_config, tmp_path):
    tiny_config["datapool"] = {"id": f"{HERE}:Samples", "args": {"what": "two"}}
    tiny_config["reward_fn"] = {"id": f"{HERE}:Sorts"}
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_every": 1}
    folder = run(tiny_config, tmp_path)
    resume(folder, overrides=["train_evaluation.n_iters=2"], quiet=True)
    assert len((folder / "rollout_info.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs SIGALRM")
def test_the_command_ends_though_a_reward_hangs_in_threads(tiny_config, tmp_path):
    tiny_config["reward_fn"] = {"id": f"{HERE}:HangsInThreads"}
    tiny_config["env"]["reward_timeout"] = 0.3
    tiny_config["train_evaluation"]["metrics"] = []
    (tmp_path / "c.yml").write_text(json.dumps(tiny_config))
    command = [sys.executable, "-m", "rl4lms_like", "train", str(tmp_path / "c.yml")]
    options = ["--base_path_to_store_results", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 1
    assert "HangsInThreads failed on a batch of 4" in done.stderr and "TimeIsUp" in done.stderr


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
    with pytest.raises(ModelError, match=r"329 .* 320"):
        run(tiny_config, tmp_path)


def test_prompts_and_responses_must_fit_the_models_positions(tiny_config, tmp_path):
    tiny_config["env"]["args"]["max_prompt_length"] = 125
    with raises_at("env.args", mentions="133"):
        run(tiny_config, tmp_path)


def test_what_only_torch_and_transformers_know_is_said_before_weights_are_read(tiny_config, tmp_path, monkeypatch):
    from rl4lms_like.on_policy import assemble

    monkeypatch.setattr(assemble, "tokenizer_and_pictures", lambda config: pytest.fail("went on"))
    tiny_config["device"] = "quantum"
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["max_new_token"] = 3
    tiny_config["alg"]["policy"]["args"]["generation_kwargs"]["eos_token_id"] = 3
    paths = [f"alg.policy.args.generation_kwargs.{key}" for key in ("max_new_token", "eos_token_id")]
    with raises_at(*paths, "device", mentions="'max_new_tokens'"):
        run(tiny_config, tmp_path)


def test_settings_that_would_have_no_effect_are_issues(tiny_config, tmp_path):
    tiny_config["alg"]["kl_div"]["coeff"] = 0
    tiny_config["alg"]["policy"]["args"]["optimizer_kwargs"] = {"lr": 1, "weight_decay": 0.5, "eps": 1e-6}
    place = "alg.policy.args.optimizer_kwargs"
    with raises_at("alg.kl_div", f"{place}.lr", f"{place}.weight_decay", mentions="target_kl"):
        run(tiny_config, tmp_path)


def test_an_empty_prompt_is_found_before_the_model_loads(tiny_config, tmp_path, monkeypatch):
    """A decoder-only model has nothing to go on from; GPT-2's tokenizer puts nothing before an empty text."""
    tiny_config["datapool"]["args"]["prompt"] = ""
    monkeypatch.setattr("rl4lms_like.on_policy.assemble.build_alg", None)
    with pytest.raises(DataPoolError, match=r" 6 .*'train' "):
        run(tiny_config, tmp_path)


def test_an_encoder_reads_empty_prompts(tiny_seq2seq_config, tmp_path):
    tiny_seq2seq_config["datapool"]["args"]["prompt"] = ""
    folder = run(tiny_seq2seq_config, tmp_path)
    updates = [json.loads(line) for line in (folder / "training_info.jsonl").read_text().splitlines()]
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)
