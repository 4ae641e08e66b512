"""The card beside a saved model says what the model is, and nothing of the machine or the time."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
from huggingface_hub import ModelCard
from transformers import GenerationConfig

from rl4lms_like.config.load import parse_config
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.run import resume, train_config
from rl4lms_like.training.model_card import model_card
from rl4lms_like.training.saved_model import find_saved_model
from tests.chat_models import END, chat_tokenizer
from tests.offline.preferences.preference_runs import blocks, written


def trained(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def card_of(folder) -> str:
    saved = find_saved_model(folder)
    assert saved is not None
    return model_card(saved)


class Strange(BaseMetric):
    """Metric whose key could be markup."""

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        return {"odd | `key`": (None, float("nan"))}


class Falling(BaseMetric):
    """Metric whose score becomes smaller with each evaluation."""

    def __init__(self):
        self.score = 0.0

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        self.score -= 1.0
        return {"falling": (None, self.score)}


def test_the_card_of_a_run_has_what_the_hub_and_readers_need(tiny_config, tmp_path):
    run = trained(tiny_config, tmp_path)
    text = (run / "model" / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl4lms-like", "reinforcement-learning", "ppo"],
    }
    for line in (
        '| Data | `dummy_pool` `{"prompt": "Count with me:", "n_samples": 6}` |',
        '| Reward | `increasing_numbers` `{"min_tokens": 8}` |',
        "| Training | 3 iterations, 96 tokens |",
        "| val | before training | after 3 iterations |",
        "output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=8)",
        "   Count with me:",
        "   Response after 3 iterations",
    ):
        assert line in text.splitlines()
    assert "Versions: Python 3" in text


def test_a_resumed_run_has_the_card_of_the_uninterrupted_one(tiny_config, tmp_path):
    first, second = trained(tiny_config, tmp_path / "a"), trained(copy.deepcopy(tiny_config), tmp_path / "b", "other")
    card = (first / "model" / "README.md").read_bytes()
    shutil.rmtree(second / "model")
    (second / "finished.json").unlink()
    resume(second, quiet=True)
    assert (second / "model" / "README.md").read_bytes() == card


def test_folders_of_the_machine_have_only_their_names(tiny_gpt2_dir, tmp_path):
    config = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    config["tokenizer"]["chat_template"] = False
    text = card_of(trained(config, tmp_path))
    assert str(tmp_path) not in text and str(tiny_gpt2_dir) not in text
    assert f"`{tiny_gpt2_dir.name}` (a local folder)" in text and '"train": "pairs.jsonl"' in text
    assert "rl4lms-like train run.yml" not in text
    assert f"does not have: `{tiny_gpt2_dir.name}`, " in text and "`pairs.jsonl`" in text


def test_a_card_has_no_folder_of_moved_files_and_of_functions(tiny_config, tmp_path, monkeypatch):
    code = tmp_path / "acme" / "secret_rewards.py"
    code.parent.mkdir()
    code.write_text("def score(responses):\n    return [0.0 for _ in responses]\n")
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(code.parent))
    rows = code.with_name("q.jsonl")
    rows.write_text('{"question": "Count with me:"}\n' * 8)
    files = {split: str(rows) for split in ("train", "val", "test")}
    tiny_config["reward_fn"] = {"id": f"{code}:score"}
    tiny_config["datapool"] = {"id": "jsonl", "args": {"data_files": files, "prompt_column": "question"}}
    tiny_config["train_evaluation"]["n_iters"] = 1
    run = trained(tiny_config, tmp_path / "results")
    rows.unlink()

    text = card_of(run)
    assert "acme" not in text and "secret_rewards.py:score" in text and '"train": "q.jsonl"' in text
    assert "rl4lms-like train run.yml" not in text and "`q.jsonl`" in text.partition("does not have: ")[2]


def test_only_names_of_the_hub_are_base_models_and_datasets_there(tiny_config, tmp_path, monkeypatch):
    run = trained(tiny_config, tmp_path)
    for name, is_named in (("org/model", True), ("gpt2", True), ("embedded/gpt2-films", False), ("/models/x", False)):
        text = (run / "config.json").read_text()
        before = tiny_config["alg"]["policy"]["args"]["model_name"]
        (run / "config.json").write_text(text.replace(before, name))
        data = ModelCard(card_of(run)).data.to_dict()
        assert data.get("base_model") == (name if is_named else None)
        (run / "config.json").write_text(text)


def test_the_command_is_in_the_card_of_a_run_that_others_can_train(tiny_config, tmp_path):
    for block in (tiny_config["tokenizer"], tiny_config["alg"]["policy"]["args"]):
        block["model_name"] = "embedded/gpt2-numbers"
    tiny_config["train_evaluation"]["n_iters"] = 1
    assert "```sh\nrl4lms-like train run.yml\n```" in card_of(trained(tiny_config, tmp_path))


def test_texts_and_names_cannot_be_markup(tiny_config, tmp_path):
    tiny_config["datapool"]["args"]["prompt"] = "a | b\n```\n# not a heading\n<b>"
    tiny_config["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Strange"}]
    text = card_of(trained(tiny_config, tmp_path))
    assert "````text\n   a | b\n   ```\n   # not a heading\n   <b>\n   ````" in text
    assert "| `` odd \\| `key` `` | n/a | n/a |" in text
    (data,) = [line for line in text.splitlines() if line.startswith("| Data |")]
    assert data.replace("\\|", "").count("|") == 3


def test_the_best_model_has_the_scores_of_its_evaluation(tiny_config, tmp_path):
    tiny_config["train_evaluation"] |= {
        "metrics": [{"id": f"{__name__}:Falling"}],
        "keep_best": {"metric": "falling", "mode": "min"},
        "eval_every": 1,
        "n_iters": 2,
    }
    run = trained(tiny_config, tmp_path)
    # val, test; val, val, test: the best model is the last one, of the first three evaluations on val.
    assert "| `falling` | -1 | -4 |" in card_of(run / "best")
    assert "It is the best model of its run on the split `val`" in card_of(run / "best")
    (run / "best" / "best.json").write_text('{"epoch": 1}')
    assert "| val | before training | after 1 iteration |" in card_of(run / "best")
    assert "| `falling` | -1 | -3 |" in card_of(run / "best")


def test_the_length_of_the_run_is_not_that_of_an_earlier_model(tiny_config, tmp_path):
    run = trained(tiny_config, tmp_path)
    assert "| Training | 3 iterations, 96 tokens |" in card_of(run)
    earlier = card_of(run / "checkpoints" / "iteration_00002")
    assert "| Training of the whole run | 3 iterations, 96 tokens |" in earlier and "| Training |" not in earlier


def test_the_code_of_a_model_with_code_of_its_own_trusts_it(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["n_iters"] = 1
    run = trained(tiny_config, tmp_path)
    assert "trust_remote_code=" not in card_of(run)
    config = json.loads((run / "config.json").read_text())
    config["tokenizer"]["trust_remote_code"] = config["alg"]["policy"]["args"]["trust_remote_code"] = True
    (run / "config.json").write_text(json.dumps(config))
    lines = card_of(run).splitlines()
    assert 'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY", trust_remote_code=True)' in lines
    assert 'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_REPOSITORY", trust_remote_code=True)' in lines


def test_the_code_of_a_chat_model_applies_its_template(tmp_path, tiny_config):
    from rl4lms_like.testing import models

    tokenizer = chat_tokenizer()
    folder = models.save_model(tmp_path / "chat", models.make_causal_lm("gpt2", tokenizer, n_layers=1), tokenizer)
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(folder)
    tiny_config["tokenizer"] = {"model_name": str(folder), "chat_template": True, "system_prompt": "Be kind."}
    tiny_config["env"]["args"]["max_prompt_length"] = 64
    run = trained(tiny_config, tmp_path)
    ends = GenerationConfig.from_pretrained(run / "model").eos_token_id
    assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    text = card_of(run)
    assert "messages = [{'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'your prompt'}]" in text
    program = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(program.replace("FOLDER_OR_REPOSITORY", str(run / "model")), "card", "exec"), {})


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_the_code_of_a_card_runs(family, request, tmp_path, capsys):
    config = request.getfixturevalue("tiny_config" if family == "causal" else "tiny_seq2seq_config")
    config["train_evaluation"]["n_iters"] = 1
    config["alg"]["policy"]["args"]["generation_kwargs"]["stop_strings"] = ["zz"]
    run = trained(config, tmp_path)
    text = (run / "model" / "README.md").read_text(encoding="utf-8")
    program = text.partition("```python\n")[2].partition("```")[0].replace("FOLDER_OR_REPOSITORY", str(run / "model"))
    capsys.readouterr()
    exec(compile(program, "card", "exec"), {})
    assert capsys.readouterr().out
