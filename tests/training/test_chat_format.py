"""A base model gets a chat format: `chat_template: chatml` and `tokenizer.add_tokens`, in SFT, preferences and RL.

What a run saves is loaded as everybody loads it, by transformers or PEFT alone, and ends its turn as the run did.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like import Run
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.inference import generate_texts
from rl4lms_like.preview import preview
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.offline.supervised.test_resume import stopped
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, stop_after

peft_package = pytest.importorskip("peft")

START, END = "<|im_start|>", "<|im_end|>"
PROMPTS = ["Who wrote the letter?", "Count with me:", "The film was"]
ANSWER = "Nobody."
FAMILIES = {"gpt2": "causal", "llama": "causal", "t5": "seq2seq"}
"""GPT-2 has one weight for embeddings and output layer, Llama two."""
PLAIN = {
    "causal": (AutoModelForCausalLM, peft_package.AutoPeftModelForCausalLM),
    "seq2seq": (AutoModelForSeq2SeqLM, peft_package.AutoPeftModelForSeq2SeqLM),
}
PEFT = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
GREEDY = {"do_sample": False, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Base models, whose tokenizers have neither ChatML's tokens nor a template; 30 rows are spare."""
    folder = tmp_path_factory.mktemp("bases")
    for family, kind in FAMILIES.items():
        tokenizer = models.make_tokenizer(append_eos=kind == "seq2seq")
        make = models.make_causal_lm if kind == "causal" else models.make_seq2seq_lm
        models.save_model(folder / family, make(family, tokenizer, scale=1.0 if kind == "seq2seq" else 10.0), tokenizer)
    spare = models.make_causal_lm("gpt2", models.make_tokenizer())
    spare.resize_token_embeddings(350, mean_resizing=False)
    models.save_model(folder / "spare", spare, models.make_tokenizer())
    return folder


def config_of(stage, kind, model, tmp_path, **changes):
    """Return the config of a stage; `changes` are those of the block with the model."""
    rows = [{"prompt": prompt, "references": [ANSWER]} for prompt in PROMPTS]
    if stage == "dpo":
        rows = [{"prompt": prompt, "chosen": ANSWER, "rejected": "It was cold"} for prompt in PROMPTS]
    file = tmp_path / f"{stage}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = tmp_path / f"{stage}_train.jsonl"  # longer, so that there are fewer evaluations
    train.write_text(20 * file.read_text())
    splits = {"train": str(train), "val": str(file), "test": None}
    mapping = {
        "tokenizer": {"model_name": str(model), "chat_template": "chatml"},
        "datapool": {"id": "preferences", "args": {"data_files": splits}},
        "device": "cpu",
        "train_evaluation": {"eval_batch_size": 4},
    }
    if stage != "dpo":
        mapping["datapool"] = {"id": "jsonl", "args": {"data_files": splits, "prompt_column": "prompt"}}
    if stage == "grpo":
        return mapping | {
            "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 8}},
            "env": {"n_envs": 4, "args": {"max_prompt_length": 48, "max_episode_length": 16, "terminate_on_eos": True}},
            "alg": {
                "id": "grpo",
                "args": {"n_episodes": 4, "minibatch_episodes": 4, "group_size": 2, "learning_rate": 1e-4},
                "kl_div": {"coeff": 0.01},
                "policy": {
                    "id": f"{kind}_lm_actor_critic_policy",
                    "args": {
                        "model_name": str(model),
                        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 16},
                        **changes,
                    },
                },
            },
            "train_evaluation": {
                "eval_batch_size": 4,
                "n_iters": 2,
                "eval_every": 2,
                "save_every": 1,
                "generation_kwargs": GREEDY,
            },
        }
    mapping["datapool"]["args"] |= {"reference_column": "references"} if stage == "supervised" else {}
    mapping["alg"] = {
        "id": stage,
        "model_type": kind,
        "model_name": str(model),
        "generation_kwargs": GREEDY,
        "training_args": {"max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 1e-3},
        **changes,
    }
    if stage == "supervised":
        mapping["alg"]["training_args"] |= {"max_steps": 100, "learning_rate": 1e-2}
    return mapping


def run(mapping, folder, name="run"):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def plain_answer(model, folder, kind, prompt=PROMPTS[0]):
    """Return the tokens that transformers alone generates, with the folder's tokenizer and nothing set."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=1)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )[0]
    answer = answer[ids.shape[1] :] if kind == "causal" else answer[1:]
    return tokenizer.convert_ids_to_tokens(answer), tokenizer.decode(answer, skip_special_tokens=True)


def check_that_it_ends_its_turn(folder, kind, is_whole):
    libraries = PLAIN[kind][:1] if is_whole else PLAIN[kind]
    assert (folder / "adapter_config.json").exists() != is_whole
    for library in libraries:
        tokens, text = plain_answer(library.from_pretrained(folder), folder, kind)
        assert tokens[-1] == (END if kind == "causal" else "<eos>"), f"{library.__name__}: {tokens}"
        assert text == ANSWER


@pytest.mark.parametrize("merge_on_save", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_every_stage_plain_loading_ends_its_turn(family, merge_on_save, bases, tmp_path):
    kind = FAMILIES[family]
    model = bases / family
    for stage in ("supervised", "dpo", "grpo"):
        mapping = config_of(stage, kind, model, tmp_path, peft=PEFT, merge_on_save=merge_on_save)
        model = run(mapping, tmp_path, stage) / "model"
        check_that_it_ends_its_turn(model, kind, is_whole=merge_on_save)
        assert generate_texts(model, [PROMPTS[0]], decoding="greedy", max_new_tokens=16) == [[ANSWER]]

        # Old rows are those of the base; the rows of the two tokens are new, and trained.
        before = PLAIN[kind][0].from_pretrained(bases / family).get_input_embeddings().weight
        after = PLAIN[kind][0].from_pretrained(model)
        after = after.get_input_embeddings()
        after = (after.weight if merge_on_save else after.weight.detach())[: len(before) + 2]
        assert torch.equal(after[: len(before)], before)
        assert (after[len(before) :] - before.mean(dim=0)).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_weights_get_the_format_too(family, bases, tmp_path):
    kind = FAMILIES[family]
    mapping = config_of("supervised", kind, bases / family, tmp_path)
    mapping["alg"]["training_args"]["learning_rate"] = 5e-3
    check_that_it_ends_its_turn(run(mapping, tmp_path) / "model", kind, is_whole=True)


@pytest.fixture(scope="module")
def first_stage(bases, tmp_path_factory):
    """The model of a supervised run with adapters."""
    folder = tmp_path_factory.mktemp("first")
    return run(config_of("supervised", "causal", bases / "llama", folder, peft=PEFT), folder) / "model"


def test_the_reference_is_the_model_at_the_start_of_the_stage(first_stage, tmp_path):
    folder = run(config_of("dpo", "causal", first_stage, tmp_path, peft=PEFT), tmp_path, "dpo")
    before = json.loads((folder / "val_split_metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert before["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    folder = run(config_of("grpo", "causal", first_stage, tmp_path, peft=PEFT), tmp_path, "grpo")
    assert json.loads((folder / "rollout_info.jsonl").read_text().splitlines()[0])["rollout_info/kl_div_mean"] < 1e-6


@pytest.mark.parametrize("stage", ["supervised", "dpo"])
def test_a_stopped_run_on_given_texts_is_resumed_to_the_same_files(stage, bases, first_stage, tmp_path, monkeypatch):
    model = bases / "llama" if stage == "supervised" else first_stage
    mapping = config_of(stage, "causal", model, tmp_path, peft=PEFT)
    mapping["alg"]["training_args"] |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    expected = run(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, 5, monkeypatch)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


@pytest.mark.parametrize(("algorithm", "critic"), [("grpo", "none"), ("ppo", "separate")])
def test_a_stopped_run_of_rl_is_resumed_to_the_same_files(algorithm, critic, first_stage, tmp_path, monkeypatch):
    mapping = config_of("grpo", "causal", first_stage, tmp_path, peft=PEFT, critic=critic)
    mapping["alg"]["id"] = algorithm
    mapping["train_evaluation"]["n_iters"] = 3
    expected = run(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "files")
        run(mapping, tmp_path, "run")
    folder = tmp_path / "rl4lm_exps" / "run"
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


def test_the_check_of_a_run_restores_a_deleted_base_of_its_adapters(bases, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "cache"))
    mapping = config_of("supervised", "causal", bases / "gpt2", tmp_path, peft=PEFT)
    mapping["alg"]["training_args"]["max_steps"] = 1
    folder = run(mapping, tmp_path)
    expected = generate_texts(folder, PROMPTS, decoding="greedy")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelError, match="with_added_tokens"):
        generate_texts(folder, PROMPTS, decoding="greedy")
    "".join(preview(load_config(folder / "config.json")))
    assert generate_texts(folder, PROMPTS, decoding="greedy") == expected


def test_a_run_in_python_has_the_same_format(bases, tmp_path):
    rows = [{"prompt": prompt, "completion": ANSWER} for prompt in PROMPTS] * 4
    settings = {"chat_template": "chatml", "add_tokens": ["<think>"], "peft": PEFT, "max_new_tokens": 16}
    training = {"max_steps": 100, "per_device_train_batch_size": 3, "learning_rate": 1e-2}
    model = AutoModelForCausalLM.from_pretrained(bases / "gpt2")
    for name in (str(bases / "gpt2"), model):
        tokenizer = {} if isinstance(name, str) else {"tokenizer": AutoTokenizer.from_pretrained(bases / "gpt2")}
        folder = tmp_path / str(isinstance(name, str))
        made = Run(name, data=rows, algorithm="sft", folder=folder, **settings, **training, **tokenizer)
        made.train()
        assert made.generate(PROMPTS[0], decoding="greedy") == ANSWER
        check_that_it_ends_its_turn(folder / "model", "causal", is_whole=False)


def test_the_check_shows_the_tokens_of_the_format(bases, tmp_path):
    for stage in ("supervised", "dpo", "grpo"):
        shown = "".join(preview(parse_config(config_of(stage, "causal", bases / "spare", tmp_path, peft=PEFT))))
        lines = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
        assert lines["end of turn"].split() == [f"'{END}'", "(321)"]
        assert repr(f"{START}user\n{PROMPTS[0]}{END}\n{START}assistant\n") in shown


@pytest.mark.parametrize("algorithm", ["nlpo", "trpo", "a2c"])
def test_rows_are_trained_by_other_algorithms(algorithm, bases, tmp_path):
    """Masks come from a copy with merged rows, TRPO needs second derivatives."""
    mapping = config_of("grpo", "causal", bases / "gpt2", tmp_path, peft=PEFT)
    mapping["alg"] |= {"id": algorithm, "args": {"n_steps": 8, "learning_rate": 1e-2}}
    mapping["alg"]["policy"]["args"]["value_head_init"] = "default"  # all rewards are 0: the values make the advantages
    if algorithm == "nlpo":
        mapping["alg"]["policy"]["id"] = "maskable_causal_lm_actor_critic_policy"
        mapping["alg"]["policy"]["args"] |= {"top_mask": 200, "target_update_iterations": 1}
    model = AutoModelForCausalLM.from_pretrained(run(mapping, tmp_path) / "model")
    rows = model.get_input_embeddings().weight[320:]
    before = AutoModelForCausalLM.from_pretrained(bases / "gpt2").get_input_embeddings().weight.mean(dim=0)
    assert (rows - before).abs().amax(dim=1).min() > 1e-6
