"""Several processes compute what one process computes."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.optimizers import bytes_of_moments
from rl4lms_like.policies.parity import probe_episodes
from rl4lms_like.policies.sharding import like
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.policies.unread_weights import tensors_in_parts
from rl4lms_like.system.errors import CheckpointError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.training.resuming.checkpoints import read_checkpoint
from tests.distributed.cells import (
    BEST_LOADED,
    BFLOAT16,
    CELLS,
    CHECKPOINTS,
    FROM_ONE,
    OF_SPLIT_OFFLINE,
    OF_THREE,
    OFFLINE,
    PACKED_EXPERTS,
    PACKED_PAIRS,
    SHAPES_IN_8_BITS,
    SLOW,
    SPLIT,
    STATEFUL,
    TOLERANCES,
    assembled_offline,
    config_of,
    resume_other,
    run_cell,
    step_in_8_bits,
    train_in_group,
)
from tests.engines.vllm_server import VllmServer
from tests.expert_models import save_experts
from tests.offline.preferences.preference_runs import PAIRS, written
from tests.policies.test_packing import shapes_of_passes
from tests.vision_models import save_vision_model

TOLERANCE = 1e-5
RUNS = [(2, cell) for cell in (*CELLS, *OFFLINE)] + [(3, cell) for cell in OF_THREE]


def each_cell(*parameters: Any) -> list[Any]:
    """Return parameters that are cells, or end with one; those of `SLOW` cells have the mark."""
    marked = []
    for values in parameters:
        values = values if isinstance(values, tuple) else (values,)
        marked.append(pytest.param(*values, marks=[pytest.mark.slow] if values[-1] in SLOW else []))
    return marked


@pytest.fixture(scope="module")
def models(tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer, tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "gpt2").symlink_to(tiny_gpt2_dir)
    (folder / "t5").symlink_to(tiny_t5_dir)
    for family in ("gpt2", "t5"):
        other = Path(shutil.copytree(folder / family, folder / f"{family}_without_dropout"))
        config = json.loads((other / "config.json").read_text())
        rates = [key for key in config if "drop" in key]
        (other / "config.json").write_text(json.dumps({**config, **dict.fromkeys(rates, 0.0)}))
    experts = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    save_experts(folder / "mixtral", "mixtral", tiny_tokenizer, **experts)
    save_vision_model(folder / "idefics3", "idefics3")
    written(folder)
    (folder / "eleven").mkdir()
    written(folder / "eleven", PAIRS[:11])
    texts = ["The sea is blue.", "A letter was lost in the town.", "Rain.", "Nobody asked, and nobody knew."]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    server = VllmServer(tiny_gpt2_dir)
    args = {"url": server.url, "weights_dir": str(folder / "weights"), "max_gap": 1e-4, "retries": 0}
    (folder / "engine.json").write_text(json.dumps({"id": "vllm", "args": args}))
    yield folder
    server.close()


@pytest.fixture(scope="module")
def left_out(request) -> frozenset[str]:
    """Cells that no selected test compares."""
    items = [item for item in request.session.items if item.path == request.path]
    has_slow = any(item.get_closest_marker("slow") for item in items)
    return frozenset() if has_slow else SLOW


@pytest.fixture(scope="module")
def by_one(models, left_out, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("one")
    for cell in (*CELLS, *OFFLINE):
        if cell not in left_out:
            run_cell(cell, models, output, Ranks())
    step_in_8_bits(output, Ranks())
    return output


@pytest.fixture(scope="module")
def by_several(models, by_one, left_out, tmp_path_factory) -> dict[int, Path]:
    """The output folder of two and of three processes."""
    outputs = {n_ranks: tmp_path_factory.mktemp(f"by_{n_ranks}") for n_ranks in (2, 3)}
    context = multiprocessing.get_context("fork")  # a new interpreter would import torch again
    for n_ranks, output in outputs.items():
        group = (n_ranks, free_port(), models, output, outputs.get(n_ranks - 1, by_one), left_out)
        processes = [context.Process(target=train_in_group, args=(rank, *group)) for rank in range(n_ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * n_ranks
    return outputs


@pytest.mark.parametrize(("n_ranks", "cell"), each_cell(*RUNS))
def test_weights_are_those_of_one_process(n_ranks, cell, by_one, by_several):
    several = by_several[n_ranks]
    first, *others = (load_file(several / f"{cell}.rank{rank}.safetensors") for rank in range(n_ranks))
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
    assert_close(first, load_file(by_one / f"{cell}.rank0.safetensors"), TOLERANCES.get(cell, TOLERANCE))


@pytest.mark.parametrize(("n_ranks", "cell"), each_cell(*RUNS))
def test_logged_numbers_are_those_of_one_process(n_ranks, cell, by_one, by_several):
    alone, several = (logged(folder / "cells" / cell) for folder in (by_one, by_several[n_ranks]))
    assert alone.keys() == several.keys()
    tolerance = TOLERANCES.get(cell, TOLERANCE)
    for key, value in alone.items():
        is_number = isinstance(value, int | float)
        expected = pytest.approx(value, abs=tolerance, rel=tolerance, nan_ok=True) if is_number else value
        assert several[key] == expected, key


@pytest.mark.parametrize("cell", ["ppo_of_minibatches", "dpo"])
def test_averaged_weights_and_callbacks_are_those_of_one_process(cell, by_one, by_several):
    several, alone = (folder / "cells" / cell for folder in (by_several[3], by_one))
    assert_close(*(load_file(folder / "average" / "model.safetensors") for folder in (several, alone)))
    calls = json.loads((alone / "model" / "calls.json").read_text())
    assert calls == json.loads((several / "model" / "calls.json").read_text()) and len(calls) > 4


@pytest.mark.parametrize("cell", each_cell(*CHECKPOINTS))
def test_a_resumed_run_equals_the_uninterrupted_one(cell, by_several):
    """Also where the processes differ: in their random numbers and in the state of their rewards."""
    folders = [by_several[2] / f"{cell}_{name}" for name in ("whole", "resumed")]
    whole, resumed = (load_file(folder / f"{cell}.rank0.safetensors") for folder in folders)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    whole, resumed = (logged(folder / "cells" / cell) for folder in folders)
    assert whole == resumed


def test_a_run_of_two_processes_is_resumed_by_one(by_several, models, tmp_path):
    shutil.copytree(by_several[2] / f"{STATEFUL}_whole" / "cells", tmp_path / "cells")
    checkpoint = tmp_path / "cells" / STATEFUL / "checkpoints" / "iteration_00002"
    run_cell(STATEFUL, models, tmp_path, Ranks(), resume_from=checkpoint)
    log = (tmp_path / "cells" / STATEFUL / "log.txt").read_text()
    assert "number of processes: 2 before, 1 now" in log


@pytest.mark.parametrize("cell", each_cell(*SPLIT, *OF_SPLIT_OFFLINE))
def test_each_process_has_its_part_of_the_weights(cell, by_several):
    shares = [float((by_several[2] / f"{cell}.rank{rank}.share").read_text()) for rank in (0, 1)]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 0.52


FILES = (
    "model/model.safetensors",
    "critic/model.safetensors",
    "critic/value_head.safetensors",
    "checkpoints/iteration_00001/model.safetensors",
)


@pytest.mark.parametrize("file", FILES)
def test_files_of_split_weights_are_those_of_one_process(file, by_one, by_several):
    several, alone = (load_file(folder / "cells" / FROM_ONE / file) for folder in (by_several[2], by_one))
    assert_close(several, alone)


def test_checkpoints_in_parts_have_the_tensors_of_one_process(by_one, by_several):
    folders = [run / "cells" / FROM_ONE / "checkpoints" / "iteration_00001" for run in (by_several[2], by_one)]
    n_files = [len(list(folder.glob("training_state*.safetensors"))) for folder in folders]
    assert n_files == [3, 1]  # what is not split, and the rows of each process
    states = []
    for folder in folders:
        tensors = {name: tensor for name, tensor in read_checkpoint(folder).tensors.items() if "random." not in name}
        states.append({name: like(torch.empty(0), tensor) for name, tensor in tensors.items()})
    assert_close(*states)


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing"])
def test_a_damaged_part_of_a_checkpoint_is_found(damage, by_several, tmp_path):
    source = by_several[2] / "cells" / FROM_ONE / "checkpoints" / "iteration_00001"
    folder = Path(shutil.copytree(source, tmp_path / "iteration_00001"))
    part = folder / "training_state-00002-of-00002.safetensors"
    content = bytearray(part.read_bytes())
    if damage == "missing":
        part.unlink()
    elif damage == "shorter":
        part.write_bytes(content[:-4])
    else:
        content[-1] ^= 1
        part.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(part.name)):
        read_checkpoint(folder)


@pytest.mark.parametrize("cell", each_cell(*OF_SPLIT_OFFLINE))
def test_files_of_split_weights_on_given_texts_are_those_of_one_process(cell, by_one, by_several):
    """Those of checkpoints and of the final model: the best one, in some cells."""
    alone, several = (folder / "cells" / cell for folder in (by_one, by_several[2]))
    names = [
        sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()) for run in (alone, several)
    ]
    assert names[0] == names[1]
    tolerance = TOLERANCES.get(cell, TOLERANCE)
    for name in [name for name in names[0] if name.endswith("model.safetensors")]:
        assert_close(*(load_file(run / name) for run in (several, alone)), tolerance)
    for name in [name for name in names[0] if name.endswith("training_state.safetensors")]:
        states = [load_file(run / name) for run in (several, alone)]
        for state in states:
            for random in [key for key in state if "random." in key]:
                del state[random]
        assert_close(*states, tolerance)


@pytest.mark.parametrize(("cell", "checkpoint"), [(FROM_ONE, "iteration_00001"), (BEST_LOADED, "checkpoint-5")])
def test_a_run_is_resumed_with_another_strategy(cell, checkpoint, models, by_one, by_several, tmp_path):
    """By two processes that split the weights from one that did not, and the reverse."""
    resume_other(cell, checkpoint, by_several[2], models, tmp_path, Ranks())
    alone = load_file(by_one / f"{cell}.rank0.safetensors")
    for folder in (by_several[2] / "by_fewer", tmp_path):
        assert_close(load_file(folder / f"{cell}.rank0.safetensors"), alone)


def test_a_checkpoint_of_two_processes_in_parts_is_resumed_by_three(by_one, by_several):
    resumed = load_file(by_several[3] / "by_fewer" / f"{FROM_ONE}.rank0.safetensors")
    assert_close(resumed, load_file(by_one / f"{FROM_ONE}.rank0.safetensors"))


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_moments_in_8_bits_have_the_blocks_of_one_process(n_ranks, by_one, by_several):
    """Also after a resume from a state of one process less; where a block would be in two, its values stay the same."""
    one, several = (folder / "in_8_bits" for folder in (by_one, by_several[n_ranks]))
    states = [load_file(one / "whole.safetensors"), load_file(several / "whole.safetensors")]
    for name, tensor in tensors_in_parts(sorted(several.glob("training_state-*"))).items():
        states[1][name] = like(torch.empty(0), tensor)
    names = [{name for name in state if ".codes" in name or ".scale" in name} for state in states]
    assert len(names[0]) == 4 * 4  # codes and scales of two moments
    assert names[0] - names[1] == {name for name in names[0] if n_ranks == 3 and name.startswith("optimizer.3.")}
    assert all(torch.equal(states[1][name], states[0][name]) for name in names[1])

    # Estimates know their bytes. Each process has a table of the codes' values.
    moments = {name: tensor for name, tensor in states[1].items() if "exp_avg" in name}
    tables = [tensor.nbytes for name, tensor in moments.items() if name.endswith(".qmap")]
    arguments = PolicyArguments.known_in({"model_name": "gpt2", "optimizer": {"id": "adamw_8bit"}})
    estimate = n_ranks * bytes_of_moments(SHAPES_IN_8_BITS, arguments, n_ranks)
    assert estimate == pytest.approx(sum(tensor.nbytes for tensor in moments.values()) + (n_ranks - 1) * sum(tables))

    expected = load_file(one / "fourth.safetensors")
    resumed = load_file(several / "resumed.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("cell", "compute"),
    [
        (PACKED_EXPERTS, lambda run, batch: run.objective.loss(run.model, batch)),
        (PACKED_PAIRS, lambda run, batch: run.objective.scores(batch)),
    ],
)
def test_rows_of_a_process_are_packed(cell, compute, models):
    run = assembled_offline(config_of(cell, models), Ranks())
    batch = run.objective.collate(run.examples["train"].rows[:3])  # half of a batch
    ((n_rows, _),) = shapes_of_passes(run.model, lambda: compute(run, batch))
    assert n_rows < (6 if cell == PACKED_PAIRS else 3)


def test_whole_blocks_are_kept_for_the_backward_pass_and_freed_by_it(by_several):
    n_whole = json.loads((by_several[2] / "whole_blocks.json").read_text())
    assert n_whole == {"no_grad": 0, "forward": n_whole["all"], "backward": 0, "all": n_whole["all"]}
    assert n_whole["all"]


def test_logits_of_rows_that_each_process_has_read_are_those_of_the_whole_model(models, by_several):
    model = AutoModelForCausalLM.from_pretrained(models / "gpt2").eval()
    reader = CausalReader(model)
    with torch.no_grad():
        logits = reader.logits(probe_episodes(model.config.vocab_size, reader.prompt_side))
    for rank in range(2):
        assert torch.equal(load_file(by_several[2] / f"logits.rank{rank}.safetensors")["logits"], logits)


def test_small_steps_in_bfloat16_change_the_split_weights(models, by_several):
    """They have relative sizes of about 1e-6, so that weights stored in bfloat16 would stay the same."""
    before = load_file(models / "gpt2" / "model.safetensors")
    after = load_file(by_several[2] / f"{BFLOAT16}.rank0.safetensors")
    for name in [name for name in before if name.endswith("mlp.c_fc.weight")]:
        change = (after[f"policy_model.{name}"] - before[name]) / before[name]
        assert 0 < float(change.abs().median()) < 1e-4


def assert_close(
    tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert tensors.keys() == others.keys()
    gaps = {name: float((tensors[name].float() - tensor.float()).abs().max()) for name, tensor in others.items()}
    for codes in [name for name in gaps if name.endswith(".codes")]:
        assert gaps.pop(codes) <= 1  # the next value
    assert max(gaps.values()) <= tolerance, max(gaps, key=gaps.__getitem__)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def logged(run: Path) -> dict[str, object]:
    """Return all numbers and texts of a run but clock times, by file, line and key."""
    found: dict[str, object] = {}
    for file in sorted(run.rglob("*.jsonl")):
        for index, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            values = {
                key: value
                for key, value in json.loads(line).items()
                if not key.startswith("time/") and key != "rollout_info/engine/sync_s"
            }
            found |= dict(leaves(values, f"{file.name}:{index}"))
    assert found
    return found


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{path}:{key}")
    else:
        yield path, value
