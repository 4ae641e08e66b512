"""A base model gets a chat format: `chat_template: chatml` and `tokenizer.add_tokens`, in SFT, preferences and RL.

What a run saves is loaded as everybody loads it, by transformers or PEFT alone, and ends its turn as the run did.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like import Run
from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.preview import preview
from rl4lms_like.run import resume, train_config
from rl4lms_like.testing import models
from tests.config_errors import raises_at
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
