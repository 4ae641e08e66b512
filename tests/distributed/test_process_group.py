"""The interface of several processes, and what they do when one of them fails."""

from __future__ import annotations

import copy
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.system.errors import RankError
from rl4lms_like.system.ranks import ProcessGroup, Ranks, process_ranks
from tests.config_errors import raises_at
from tests.distributed.cells import BASE, GROUPS, POLICY
from tests.distributed.test_several_processes import free_port


def test_a_group_does_not_read_the_keys_of_the_one_before(monkeypatch):
    """As under torchrun, whose store outlives the groups of a program."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with ProcessGroup(10) as first:
        first._announce(ValueError("the disk is full"))
        assert first._announced() and store.num_keys()
    with ProcessGroup(10) as second:
        assert second._announced() is None


class Two(Ranks):
    size = 2


def in_group(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found: dict[str, Any] = {}
    with process_ranks(30) as ranks:
        assert isinstance(ranks, ProcessGroup)
        found["gathered"] = ranks.gather({"rank": rank, "tensor": torch.full((rank,), float(rank))})
        found["main"] = ranks.from_main(lambda: f"computed by {rank}")
        found["any"] = ranks.any(rank == 1), ranks.any(False)
        found["share"] = ranks.share([5, 1, 1, 1, 4])
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        weights[0].grad = torch.tensor([1.0, rank])
        weights[1].grad = torch.ones(2) if rank else None
        ranks.sum_gradients(weights)
        found["gradients"] = [weight.grad for weight in weights]
        try:
            ranks.gather_from(lambda: 1 // (1 - rank))
        except Exception as error:
            found["failure"] = error
        torch.save(found, folder / f"{rank}.pt")
        if rank:
            raise ValueError("the disk is full")
        try:
            ranks.gather(rank)
        except RankError as error:
            (folder / "reason").write_text(str(error))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("group")
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=in_group, args=(rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    each = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return [*each, {"reason": (folder / "reason").read_text()}]


def test_all_receive_what_each_has(found):
    for each in found[:2]:
        assert [item["rank"] for item in each["gathered"]] == [0, 1]
        assert [item["tensor"].tolist() for item in each["gathered"]] == [[], [1.0]]
        assert each["main"] == "computed by 0"
        assert each["any"] == (True, False)
    assert [list(each["share"]) for each in found[:2]] == [[0, 1], [2, 3, 4]]


def test_gradients_are_summed_and_unused_parameters_stay_without(found):
    for each in found[:2]:
        first, second, third = each["gradients"]
        assert first.tolist() == [2.0, 1.0]
        assert second.tolist() == [1.0, 1.0]
        assert third is None


def test_an_error_is_raised_where_it_occurred_and_reported_in_the_others(found):
    assert isinstance(found[1]["failure"], ZeroDivisionError)
    assert isinstance(found[0]["failure"], RankError)
    assert "rank 1" in str(found[0]["failure"])
    assert "ZeroDivisionError" in str(found[0]["failure"])


def test_a_process_that_waits_for_one_that_ended_names_the_reason(found):
    assert "rank 1" in found[2]["reason"]
    assert "the disk is full" in found[2]["reason"]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("env.n_envs", {"env.n_envs": 5}),
        ("env.vec_env", {"env.vec_env": "dummy"}),
        ("env.n_envs", {**GROUPS, "alg.id": "grpo", "alg.args.group_size": 6}),
        ("train_evaluation.replay", {"train_evaluation.replay": "run"}),
    ],
)
def test_settings_that_several_processes_cannot_share_are_refused(path, changes, tiny_gpt2_dir):
    model = str(tiny_gpt2_dir)
    named = {"tokenizer.model_name": model, f"{POLICY}.model_name": model}
    blocks, issues = apply_values(copy.deepcopy(BASE), {**named, **changes}, "the test")
    with raises_at(path):
        assemble(parse_config(blocks, issues=issues), Two())


CONNECTED = """
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.system.ranks import process_ranks

try:
    with process_ranks(60) as ranks:
        print("processes:", ranks.size)
except ConfigError as error:
    print("refused:", error.issues[0].message)
"""


@pytest.mark.parametrize(("n_processes", "printed"), [(1, "processes: 1"), (2, "refused: ")])
def test_one_process_of_several_that_accelerate_should_start_is_refused(n_processes, printed, tmp_path):
    script = tmp_path / "connected.py"
    script.write_text(CONNECTED)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    command = [*launch, "--num_processes", str(n_processes), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (line,) = done.stdout.splitlines()
    assert line.startswith(printed) and ("torchrun --nproc_per_node" in line) == (n_processes > 1)
