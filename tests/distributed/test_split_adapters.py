"""Processes that split the weights of networks with adapters compute what one process computes.

The shortest such run is among those of `test_several_processes.py`.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4lms_like.system.ranks import Ranks
from tests.distributed.cells import (
    ENGINE_WITH_ADAPTERS,
    MERGED_ON_SAVE,
    QUANTIZED,
    SPLIT_ADAPTERS,
    STATEFUL_ADAPTERS,
    run_cell,
    train_adapters_in_group,
)
from tests.distributed.test_several_processes import TOLERANCE, assert_close, free_port, logged
from tests.engines.vllm_server import VllmServer
from tests.expert_models import save_experts

peft_package = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def server(tiny_gpt2_dir) -> Iterator[VllmServer]:
    server = VllmServer(tiny_gpt2_dir)
    yield server
    server.close()


@pytest.fixture(scope="module")
def models(server, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "gpt2").symlink_to(tiny_gpt2_dir)
    (folder / "t5").symlink_to(tiny_t5_dir)
    save_experts(folder / "mixtral", "mixtral", tiny_tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    args = {"url": server.url, "weights_dir": str(folder / "weights"), "max_gap": 1e-4, "retries": 0}
    (folder / "engine.json").write_text(json.dumps({"id": "vllm", "args": args}))
    return folder


@pytest.fixture(scope="module")
def by_one(models, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("one")
    for cell in SPLIT_ADAPTERS:
        run_cell(cell, models, output, Ranks())
    return output


@pytest.fixture(scope="module")
def by_two(models, by_one, tmp_path_factory) -> Path:
    output, port = tmp_path_factory.mktemp("two"), free_port()
    context = multiprocessing.get_context("fork")  # a new interpreter would import torch again
    processes = [
        context.Process(target=train_adapters_in_group, args=(rank, 2, port, models, output)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return output


@pytest.mark.parametrize("cell", SPLIT_ADAPTERS)
def test_adapters_are_those_of_one_process(cell, by_one, by_two):
    """After at least ten optimizer steps."""
    first, second = (load_file(by_two / f"{cell}.rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert_close(first, load_file(by_one / f"{cell}.rank0.safetensors"))


@pytest.mark.parametrize("cell", SPLIT_ADAPTERS)
def test_logged_numbers_are_those_of_one_process(cell, by_one, by_two):
    alone, several = (logged(folder / "cells" / cell) for folder in (by_one, by_two))
    assert alone.keys() == several.keys()
    for key, value in alone.items():
        is_number = isinstance(value, int | float)
        expected = pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE, nan_ok=True) if is_number else value
        assert several[key] == expected, key


@pytest.mark.parametrize("cell", SPLIT_ADAPTERS)
def test_each_process_has_its_part_of_the_base(cell, by_two):
    shares = [float((by_two / f"{cell}.rank{rank}.share").read_text()) for rank in (0, 1)]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 0.52


@pytest.mark.parametrize("cell", SPLIT_ADAPTERS)
def test_saved_adapters_are_those_of_one_process(cell, by_one, by_two):
    """Also in checkpoints. With `merge_on_save`, they are merged into whole models."""
    saved = sorted((by_one / "cells" / cell).rglob("*model.safetensors"))
    names = [str(file.relative_to(by_one)) for file in saved]
    prefix = "" if cell in (MERGED_ON_SAVE, QUANTIZED) else "adapter_"
    assert f"cells/{cell}/model/{prefix}model.safetensors" in names
    for name in names:
        assert_close(*(load_file(folder / name) for folder in (by_two, by_one)))
        config = Path(name).with_name(f"{prefix}config.json")
        assert (by_two / config).read_text() == (by_one / config).read_text()


def test_the_engine_has_all_merged_weights(server, by_two, models):
    """The last evaluation is one of the last weights, which the engine got from two processes."""
    adapters = by_two / "cells" / ENGINE_WITH_ADAPTERS / "model"
    base = AutoModelForCausalLM.from_pretrained(models / "gpt2")
    expected = peft_package.PeftModel.from_pretrained(base, adapters).merge_and_unload().state_dict()
    before = AutoModelForCausalLM.from_pretrained(models / "gpt2").state_dict()
    changed = [name for name, weight in expected.items() if not torch.equal(weight, before[name])]
    assert len(changed) == 4 * base.config.n_layer  # in each block: c_attn, c_fc and two c_proj

    received = server.model.state_dict()
    assert received.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((received[name] - weight).abs().max()) <= 1e-6, name


def test_a_resumed_run_equals_the_uninterrupted_one(by_two):
    """With adapters separate, although the speedup that would merge them is on."""
    folders = [by_two / f"{STATEFUL_ADAPTERS}_{name}" for name in ("whole", "resumed")]
    whole, resumed = (load_file(folder / f"{STATEFUL_ADAPTERS}.rank0.safetensors") for folder in folders)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    whole, resumed = (logged(folder / "cells" / STATEFUL_ADAPTERS) for folder in folders)
    assert whole == resumed
    assert not [key for key in whole if "merged_gap" in key]
