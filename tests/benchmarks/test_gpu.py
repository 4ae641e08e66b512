"""The benchmark for GPUs, with tiny work on the processor."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.environments import is_installed
from benchmarks.gpu import ENTRIES, QUICK, config_of, main, make_model, make_texts, n_flops
from rl4lms_like.config.load import parse_config


@pytest.mark.parametrize("name", ["grpo", pytest.param("sft", marks=pytest.mark.slow)])
def test_an_entry_is_measured_and_what_is_missing_is_named(name, tmp_path, capsys):
    if is_installed("vllm"):
        pytest.skip("vLLM is installed, and would be started")
    main(["--quick", "--entries", f"{name},grpo_vllm", "--output", str(tmp_path / "gpu.json")])
    rows = json.loads((tmp_path / "gpu.json").read_text())["entries"]
    assert rows["grpo_vllm"] == {"note": "skipped: vllm not installed"}
    row = rows[name]
    if name == "grpo":
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(16 * 8)  # responses of 8 tokens
    assert row["peak_bytes"] > 100 * 2**20 and 0 < row["mfu"] < 1
    assert f"│ {name} " in capsys.readouterr().out


def test_every_entry_has_a_valid_config(tmp_path):
    make_model(QUICK, tmp_path / "model")
    make_texts(QUICK, tmp_path)
    for entry in ENTRIES.values():
        url = "http://127.0.0.1:8000" if entry.engine else ""
        assert parse_config(config_of(entry, QUICK, tmp_path, url=url)).alg.id == entry.algorithm


def test_tokens_and_operations_are_those_of_torch(tmp_path):
    make_model(QUICK, tmp_path / "model")
    n_tokens = make_texts(QUICK, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = []
    for line in (tmp_path / "texts.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts.append(tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id])
    assert sum(map(len, texts)) == n_tokens["texts"]

    # A forward and a backward pass over each text. torch counts attention whole, also what the causal mask leaves out.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        for ids in texts:
            model(torch.tensor([ids])).logits.sum().backward()
    assert n_flops(ENTRIES["sft"], QUICK, n_tokens) == pytest.approx(counter.get_total_flops(), rel=0.05)
