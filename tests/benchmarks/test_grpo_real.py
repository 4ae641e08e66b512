"""The copy of a real model that the benchmark of GRPO with LoRA gives to both systems, and its ratios."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import grpo_real
from benchmarks.workload import SPECIAL, Shape, prompts
from tests.chat_models import save_chat_model


def test_prompts_are_one_token_a_word_and_the_end_cannot_be_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_real, "WORD", grpo_real.re.compile("[a-z]{2,}"))  # this tokenizer splits at spaces
    model = save_chat_model(tmp_path / "chat")
    copy = tmp_path / "copy"
    copy.mkdir()
    words = grpo_real.with_an_end_that_is_never_sampled(model, copy)

    tokenizer = AutoTokenizer.from_pretrained(copy)
    shape = Shape("test", prompt_len=5, response_len=4, episodes=8)
    drawn = prompts(shape, 0, words=words)
    encoded = tokenizer([tokenizer.decode(row) for row in drawn], add_special_tokens=False)["input_ids"]
    assert encoded == drawn.tolist() and len(set(map(tuple, encoded))) == 8
    assert tokenizer.eos_token == SPECIAL
    loaded = AutoModelForCausalLM.from_pretrained(copy)
    assert tokenizer.eos_token_id >= loaded.get_input_embeddings().num_embeddings


def test_the_ratio_is_the_median_of_ratios_within_a_round():
    def system(seconds):
        keys = ("cpu_s", "wall_s", "rollout_s", "update_s")
        return {"iterations": [dict.fromkeys(keys, s) | {"others_cores": 0.0, "peak_mb": 1.0} for s in seconds]}

    systems = {"ours_grpo": system([1.0, 4.0, 3.0]), "trl_grpo": system([2.0, 4.0, 10.0])}
    rows = grpo_real.summary(systems, grpo_real.SHAPE, "cpu_s")
    assert rows["ours_grpo"]["times_trl"] == pytest.approx(0.5) and rows["trl_grpo"]["times_trl"] == 1.0
    assert rows["ours_grpo"]["tokens_per_s"] == pytest.approx(32 * 32 / 3.0)
