"""Preference runs: what they learn, what they leave behind, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4lms_like.catalogue import description
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.inference import evaluate_run
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.preview import preview
from rl4lms_like.scoring.classifier import RewardModelScore
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import DataPoolError, RL4LMsLikeError
from rl4lms_like.testing import models
from tests.chat_models import BOS, END, START, chat_tokenizer
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import OBJECTIVES, PAIRS, blocks, lines, run, written

LORA = {"r": 4, "lora_alpha": 16}


def scores_of(folder, split="val"):
    found = lines(folder / f"{split}_split_metrics.jsonl")
    return found[0]["metrics"], found[-1]["metrics"]


@pytest.mark.parametrize(
    ("id", "kind", "peft"),
    [
        ("reward_model", "causal", None),
        ("reward_model", "causal", LORA),
        ("reward_model", "seq2seq", None),
        ("dpo", "causal", None),
        ("dpo", "causal", LORA),
        ("dpo", "seq2seq", None),
        ("orpo", "seq2seq", LORA),
    ],
)
def test_it_learns_to_prefer(id, kind, peft, tmp_path, tiny_gpt2_dir, tiny_t5_dir):
    model = tiny_gpt2_dir if kind == "causal" else tiny_t5_dir
    mapping = blocks(id, model, written(tmp_path), kind, num_train_epochs=6)
    mapping["alg"] |= {"peft": peft, "merge_on_save": peft is not None}
    before, after = scores_of(run(mapping, tmp_path))
    assert after["preference/loss"] < before["preference/loss"] - 0.05
    prefix = "mean_logps" if id == "orpo" else "rewards"
    assert after[f"{prefix}/margins"] > before[f"{prefix}/margins"] + 0.01


def test_training_logs_the_numbers_of_the_field(tmp_path, tiny_gpt2_dir):
    for id in OBJECTIVES:
        folder = run(blocks(id, tiny_gpt2_dir, written(tmp_path), max_steps=2), tmp_path, id)
        logged, expected = lines(folder / "training_info.jsonl")[0], parse_config(blocks(id, tiny_gpt2_dir, "pairs"))
        assert expected.alg.id == id
        keys = {"preference/loss", "logps/chosen", "logps/rejected"}
        if id == "reward_model":
            keys = {"preference/loss"}
        own = "mean_logps" if id in ("orpo", "simpo") else "rewards"
        keys |= {f"{own}/chosen", f"{own}/rejected", f"{own}/margins"}
        assert keys <= logged.keys()
        assert logged[f"{own}/margins"] == pytest.approx(logged[f"{own}/chosen"] - logged[f"{own}/rejected"], abs=1e-6)
        for split in ("val", "test"):
            assert keys - {"diversity_metrics/distinct-1"} <= scores_of(folder, split)[1].keys()


@pytest.mark.parametrize("append_eos", [True, False])
def test_a_reward_model_is_used_as_it_was_trained(append_eos, tmp_path, tiny_gpt2_dir):
    mapping = blocks("reward_model", tiny_gpt2_dir, written(tmp_path), num_train_epochs=6)
    mapping["alg"]["args"] = {"append_eos": append_eos}
    folder = run(mapping, tmp_path)
    score = RewardModelScore(model_name=str(folder / "model"), device="cpu")
    assert score.ends_with_eos is append_eos
    for column in ("chosen", "rejected"):
        responses = [f" {pair[column]}" for pair in PAIRS]
        found = score.per_text(Texts([pair["prompt"] for pair in PAIRS], responses, [], []))
        assert sum(found) / len(found) == pytest.approx(scores_of(folder)[1][f"rewards/{column}"], abs=1e-4)


def test_a_seq2seq_reward_model_is_used_as_it_was_trained(tmp_path, tiny_t5_dir):
    folder = run(blocks("reward_model", tiny_t5_dir, written(tmp_path), "seq2seq"), tmp_path)
    score = RewardModelScore(model_name=str(folder / "model"), device="cpu")
    found = score.per_text(Texts([pair["prompt"] for pair in PAIRS], [f" {pair['chosen']}" for pair in PAIRS], [], []))
    assert sum(found) / len(found) == pytest.approx(scores_of(folder)[1]["rewards/chosen"], abs=1e-4)


def test_the_best_reward_model_with_adapters_is_the_final_one(tmp_path, tiny_gpt2_dir):
    mapping = blocks("reward_model", tiny_gpt2_dir, written(tmp_path), load_best_model_at_end=True)
    mapping["alg"]["training_args"] |= {"metric_for_best_model": "rewards/margins", "greater_is_better": False}
    mapping["alg"] |= {"peft": LORA, "merge_on_save": True}
    folder = run(mapping, tmp_path)
    best = min(scores["metrics"]["rewards/margins"] for scores in lines(folder / "val_split_metrics.jsonl")[1:])
    assert scores_of(folder)[1]["rewards/margins"] == pytest.approx(best, abs=1e-5)


def test_a_reference_that_differs_is_compared_with(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    other = models.save_model(tmp_path / "other", models.make_causal_lm("gpt2", tiny_tokenizer, seed=3), tiny_tokenizer)
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path), max_steps=1, logging_steps=1)
    mapping["alg"]["args"]["reference_model"] = str(other)
    before, _ = scores_of(run(mapping, tmp_path))
    assert abs(before["rewards/chosen"]) > 1e-3


def test_without_dropout_a_run_is_deterministic_and_with_it_differs(tmp_path, tiny_gpt2_dir):
    weights = []
    for dropout in (False, True):
        mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path), max_steps=2)
        mapping["alg"]["args"]["dropout"] = dropout
        folder = run(mapping, tmp_path, f"run_{dropout}")
        weights.append(load_file(folder / "model" / "model.safetensors"))
        rate = AutoModelForCausalLM.from_pretrained(folder / "model").config.resid_pdrop
        assert rate == AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).config.resid_pdrop > 0
    assert not all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("id", ["reward_model", "dpo", "kto"])
def test_a_run_without_val_and_test(id, tmp_path, tiny_gpt2_dir):
    mapping = blocks(id, tiny_gpt2_dir, written(tmp_path), max_steps=1, logging_steps=1)
    mapping["datapool"]["args"] = {"path": written(tmp_path), "split_ratios": [1, 0, 0]}
    mapping["train_evaluation"] |= {"metrics": [], "save_model": False}
    folder = run(mapping, tmp_path)
    assert lines(folder / "training_info.jsonl") and not list(folder.glob("*_split_*"))


def test_a_run_of_labels(tmp_path, tiny_gpt2_dir):
    rows = [
        {"prompt": pair["prompt"], "response": pair[column], "label": column == "chosen"}
        for pair in PAIRS
        for column in ("chosen", "rejected")
    ]
    mapping = blocks("kto", tiny_gpt2_dir, written(tmp_path, rows), max_steps=2)
    mapping["datapool"]["args"]["label_column"] = "label"
    before, after = scores_of(run(mapping, tmp_path))
    assert after["preference/loss"] < before["preference/loss"]
    mapping["alg"]["id"] = "dpo"
    with pytest.raises(DataPoolError, match="train_0"):
        assemble_preferences(parse_config(mapping))


def test_conversations_are_rendered_by_the_chat_template(tmp_path):
    tokenizer = chat_tokenizer()
    model = models.save_model(tmp_path / "chat", models.make_causal_lm("gpt2", tokenizer), tokenizer)
    turns = [[{"role": "user", "content": f"is it {n}"}, {"role": "assistant", "content": "{}"}] for n in range(4)]
    rows = [
        {column: [turn, {**answer, "content": column}] for column in ("chosen", "rejected")} for turn, answer in turns
    ]
    for id in ("dpo", "reward_model"):
        mapping = blocks(id, model, written(tmp_path, rows))
        mapping["tokenizer"]["chat_template"] = True
        pairs = assemble_preferences(parse_config(mapping)).examples["train"]
        row = pairs.rows[0]
        prompt = f"{BOS}{START}user\nis it 0{END}\n{START}assistant\n"
        assert tokenizer.decode(row["prompt"]) == prompt
        end = END if id == "dpo" else f"{END}\n{tokenizer.eos_token}"
        assert [tokenizer.decode(ids) for ids in row["responses"]] == [f"chosen{end}", f"rejected{end}"]
        assert (pairs.n_without_end, pairs.n_implicit) == (0, 0)


def test_a_pool_without_preferences_is_refused(tmp_path, tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["datapool"] = {"id": "film_opinions", "args": {"n_train": 5, "n_eval": 2}}
    with pytest.raises(DataPoolError, match="preferences"):
        assemble_preferences(parse_config(mapping))


def test_a_supervised_run_learns_the_better_responses(tmp_path, tiny_gpt2_dir):
    mapping = blocks("supervised", tiny_gpt2_dir, written(tmp_path), max_steps=1, logging_steps=1)
    del mapping["alg"]["args"]
    assert (run(mapping, tmp_path) / "model").is_dir()


@pytest.mark.parametrize(
    ("id", "changes", "path"),
    [
        ("dpo", {"args": {"bta": 0.1}}, "alg.args.bta"),
        ("dpo", {"args": {"beta": 0}}, "alg.args.beta"),
        ("dpo", {"args": {"loss": "hinge", "label_smoothing": 0.1}}, "alg.args.label_smoothing"),
        ("dpo", {"args": {"loss": "robust"}}, "alg.args.label_smoothing"),
        ("dpo", {"args": {"reference_model": "./nowhere"}}, "alg.args.reference_model"),
        ("dpo", {"args": {"dropout": "adapters"}}, "alg.args.dropout"),
        ("dpo", {"args": {"dropout": "adapters"}, "peft": LORA}, "alg.args.dropout"),
        ("dpo", {"loss_on_prompt": True}, "alg.loss_on_prompt"),
        ("dpo", {"training_args": {"label_smoothing_factor": 0.1}}, "alg.training_args.label_smoothing_factor"),
        (
            "dpo",
            {"training_args": {"train_sampling_strategy": "group_by_length"}},
            "alg.training_args.train_sampling_strategy",
        ),
        ("dpo", {"training_args": {"metric_for_best_model": "rewards/x"}}, "alg.training_args.metric_for_best_model"),
        ("reward_model", {"generation_kwargs": {"top_k": 0}}, "alg.generation_kwargs"),
        ("reward_model", {"peft": LORA}, "alg.merge_on_save"),
    ],
)
def test_what_has_no_effect_is_an_error_at_its_path(id, changes, path, tmp_path, tiny_gpt2_dir):
    mapping = blocks(id, tiny_gpt2_dir, written(tmp_path))
    mapping["alg"] |= changes
    with raises_at(path):
        parse_config(mapping)


def test_a_reward_model_has_no_metrics_of_texts_and_cuts_no_prompts(tmp_path, tiny_gpt2_dir):
    mapping = blocks("reward_model", tiny_gpt2_dir, written(tmp_path))
    mapping["train_evaluation"]["metrics"] = [{"id": "distinct_n"}]
    mapping["tokenizer"]["max_length"] = 8
    with raises_at("train_evaluation.metrics", "tokenizer.max_length"):
        parse_config(mapping)


def test_metrics_need_texts(tmp_path, tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["train_evaluation"]["generate"] = False
    with raises_at("train_evaluation"):
        parse_config(mapping)


def test_a_reward_model_generates_no_text(tmp_path, tiny_gpt2_dir):
    folder = run(blocks("reward_model", tiny_gpt2_dir, written(tmp_path), max_steps=1, logging_steps=1), tmp_path)
    with pytest.raises(RL4LMsLikeError, match="reward_model"):
        evaluate_run(folder)


def test_check_reports_everything_unusual_about_the_data(tmp_path, tiny_gpt2_dir):
    rows = [*PAIRS, {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}, {**PAIRS[1], "rejected": ""}]
    rows.append({"prompt": PAIRS[0]["prompt"], "chosen": f"{'so ' * 60}good", "rejected": f"{'so ' * 60}bad"})
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path, rows))
    mapping["alg"]["args"] = {"max_response_length": 40, "beta": 0.3}
    text = "".join(preview(parse_config(mapping)))
    for expected in (
        "15 pairs",
        "identical pairs          1; 1 more after truncation",
        "empty responses          1",
        "0 prompts, 2 responses",
        "without end token        2 responses",
        "d = 0.3 (l_chosen - l_rejected)",
        "one forward pass over",
    ):
        assert " ".join(expected.split()) in " ".join(text.split())
    folder = run(mapping, tmp_path)
    log = (folder / "log.txt").read_text()
    assert "train: 1 pairs are identical after truncation" in log
    assert "train: 2 responses were truncated" in log


@pytest.mark.parametrize("id", OBJECTIVES)
def test_show_prints_the_formula(id):
    assert "loss = " in description(id)


def test_task_configs_are_accepted(repository):
    for id in OBJECTIVES:
        assert load_config(repository / f"task_configs/preferences/tiny_gpt2_{id}.yml", data=False).alg.id == id


def test_only_the_samples_that_are_evaluated_are_scored(tmp_path, tiny_gpt2_dir):
    mapping = blocks("dpo", tiny_gpt2_dir, written(tmp_path))
    mapping["train_evaluation"]["max_eval_samples"] = 3
    examples = assemble_preferences(parse_config(mapping)).examples
    assert {split: len(each.rows) for split, each in examples.items()} == {"train": len(PAIRS), "val": 3, "test": 3}
