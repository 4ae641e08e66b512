"""Runs that are killed over and over, and must end as if nothing had happened.

    python -m tests.robustness.killed_runs                       # PPO, NLPO, A2C, TRPO x causal, seq2seq, 25 kills each
    python -m tests.robustness.killed_runs --cells nlpo/seq2seq --kills 5
    python -m tests.robustness.killed_runs --by int --kills 10   # by Ctrl-C, which saves what it goes on from
    python -m tests.robustness.killed_runs --by mixed   # all ways in turn, also SIGKILL while Ctrl-C saves
    python -m tests.robustness.killed_runs --cells grpo/causal,dapo/causal --kills 10
    python -m tests.robustness.killed_runs --cells reward_model/causal,dpo/causal,kto/seq2seq --kills 10
    python -m tests.robustness.killed_runs --cells ppo/causal --ranks 2 --by kill_or_term --kills 20
    python -m tests.robustness.killed_runs --cells ppo/dialogue,grpo/dialogue --kills 10 --n_iters 60

Each cell is trained once in peace. Then the same command is started, killed by SIGKILL at a random moment after its
first new iteration (every third time within a save), gone on with by `--resume`, killed again ..., and left alone at
last. Weights, training state, numbers and texts of both must be equal, byte for byte, but for clock times. With
`--by int` or `term` it is asked to stop instead: then it must also end with status 130, and go on at once from where it
was, be that in the midst of an update. With `--ranks`, torchrun starts several processes; SIGKILL then goes to one of
them, other signals to torchrun. The cells `.../dialogue` play episodes of several turns and are always killed within
one; `in_an_episode` counts those for which the environment's own file shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from rl4lms_like.testing import models
from rl4lms_like.training.resuming.checkpoints import checkpoints_in, newest_checkpoint
from tests.robustness.logged_game import is_in_an_episode

KILL, INT, TERM = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
WAYS = {"kill": [(KILL,)], "int": [(INT,)], "term": [(TERM,)]}
WAYS["kill_or_term"] = [(KILL,), (TERM,)]
WAYS["mixed"] = [(KILL,), (INT,), (TERM,), (INT, KILL), (INT, INT), (TERM, KILL)]
"""The signals of one stop, in their order."""
RESULTS = Path(__file__).parent / "results" / "killed_runs.json"
STEPS = {"n_steps": 10, "batch_size": 40, "n_epochs": 2, "learning_rate": 1e-3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": STEPS,
    "nlpo": STEPS,
    "a2c": {"n_steps": 10, "learning_rate": 1e-3},
    "trpo": {"n_steps": 10, "batch_size": 40, "n_critic_updates": 2, "sub_sampling_factor": 2, "target_kl": 0.01},
    "grpo": {**STEPS, "group_size": 4},
    "dapo": {**STEPS, "group_size": 4, "first_token_temperature": 1.5, "importance_correction": "tis"},
}
OFFLINE = ("reward_model", "dpo", "kto")
"""Objectives of preference training, whose iterations are optimizer steps."""
CELLS = [f"{algorithm}/{family}" for algorithm, family in product((*ALGORITHMS, *OFFLINE), ("causal", "seq2seq"))]
CELLS += ["ppo/dialogue", "grpo/dialogue"]
GAME_LOG = "game.log"
"""File in a cell's folder that its environment writes."""
PAIRS = Path(__file__).parents[2] / "task_configs" / "preferences" / "film_preferences.jsonl"
LONGEST_WAIT_S = 1.5
"""After the first new iteration; it holds several iterations, each with a checkpoint."""
LONGEST_SAVE_S = 0.03
LONGEST_RESCUE_S = 0.1
"""Between the signals of one stop: the first is being obeyed."""


def config_of(cell: str, n_iters: int, models_folder: Path) -> dict[str, Any]:
    """A run on a tiny model that saves after every iteration."""
    algorithm, family = cell.split("/")
    if algorithm in OFFLINE:
        return offline_config_of(algorithm, family, n_iters, models_folder)
    if family == "dialogue":
        return dialogue_config_of(algorithm, n_iters, models_folder)
    masked = algorithm == "nlpo"
    model = str(models_folder / family)
    policy_args = {"model_name": model, "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8}}
    if masked:
        policy_args |= {"mask_type": "learned_top_p", "top_mask": 0.8, "target_update_iterations": 3}
        policy_args["min_tokens_to_keep"] = 5
    return {
        "tokenizer": {"model_name": model},
        "reward_fn": {"id": "sentiment", "args": {"shaping_fn": {"id": "length_penalty", "args": {"max_length": 2}}}},
        "datapool": {"id": "film_opinions", "args": {"n_train": 50, "n_eval": 8}},
        "env": {"n_envs": 8, "args": {"max_prompt_length": 12, "max_episode_length": 8, "terminate_on_eos": True}},
        "alg": {
            "id": algorithm,
            "args": ALGORITHMS[algorithm],
            "kl_div": {"coeff": 0.1, "target_kl": 0.05},
            "policy": {"id": f"{'maskable_' * masked}{family}_lm_actor_critic_policy", "args": policy_args},
        },
        "train_evaluation": {
            "eval_batch_size": 8,
            "n_iters": n_iters,
            "eval_every": 10,
            "save_every": 1,
            "metrics": [{"id": "length"}, {"id": "distinct_n"}],
        },
        "device": "cpu",
        "n_threads": 1,
    }


def dialogue_config_of(algorithm: str, n_iters: int, models_folder: Path) -> dict[str, Any]:
    """A run of the causal model with an environment that answers, without reward function and data."""
    config = config_of(f"{algorithm}/causal", n_iters, models_folder)
    del config["reward_fn"], config["datapool"]
    del config["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"]
    config["env"]["args"]["max_episode_length"] = 40
    config["env"]["dialogue"] = {
        "id": "logged_game:LoggedGame",
        "args": {"log": GAME_LOG},
        "max_turns": 5,
        "max_turn_length": 4,
    }
    return config


def offline_config_of(objective: str, family: str, n_steps: int, models_folder: Path) -> dict[str, Any]:
    """A preference run with dropout on a tiny model that saves after every step."""
    model, has_text = str(models_folder / family), objective != "reward_model"
    return {
        "tokenizer": {"model_name": model} | ({"max_length": 24} if has_text else {}),
        "datapool": {"id": "preferences", "args": {"path": str(PAIRS)}},
        "alg": {
            "id": objective,
            "args": {"dropout": True},
            "model_type": family,
            "model_name": model,
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8} if has_text else {},
            "training_args": {
                "max_steps": n_steps,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-3,
                "logging_steps": 10,
                "eval_steps": 20,
                "save_steps": 1,
                "save_strategy": "steps",
            },
        },
        "train_evaluation": {
            "eval_batch_size": 8,
            "max_eval_samples": 8,
            "metrics": [{"id": "length"}] if has_text else [],
        },
        "device": "cpu",
        "n_threads": 1,
    }


def run_cell(
    cell: str, kills: int, n_iters: int, folder: Path, seed: int, by: str = "kill", ranks: int = 1
) -> dict[str, Any]:
    """Trains in peace and under fire; the differences between both, none of them expected."""
    config = folder / "config.yml"
    config.write_text(yaml.safe_dump(config_of(cell, n_iters, folder.parent / "models")))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    train = [sys.executable, "-m", *(torchrun if ranks > 1 else ()), "rl4lms_like", "train"]
    train += ["--code", str(Path(__file__).parent)]  # of the environment
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*train, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    finish(start("config.yml", "--experiment_name", "peace"))
    under_fire, rng = folder / "rl4lm_exps" / "fire", random.Random(seed)
    plays, log = cell.endswith("/dialogue"), folder / GAME_LOG
    done, during_save, in_an_episode, at_iterations, within = 0, 0, 0, [], Counter[str]()
    while done < kills:
        found = checkpoints_in(under_fire / "checkpoints")
        process = start("--resume", str(under_fire)) if found else start("config.yml", "--experiment_name", "fire")
        if not wait_for_another(process, under_fire, found):
            break  # it came to its end
        time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        if plays:
            wait_for_a_turn(process, log)
        elif done % 3 == 2:
            wait_for_a_save(process, under_fire)
            time.sleep(rng.uniform(0, LONGEST_SAVE_S))
        signals = rng.choice(WAYS[by])
        for number, each in enumerate(signals):
            time.sleep(rng.uniform(0, LONGEST_RESCUE_S) if number else 0)
            to = rng.choice(children(process.pid)) if ranks > 1 and each == KILL else process.pid
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(to, each)
        _, error = process.communicate()
        if process.returncode == 0:
            break  # it was about to end
        expected = {-KILL if each == KILL else 130 for each in signals}
        expected |= {-each for each in signals[1:]}  # it found the interpreter at its end, which hears nothing more
        is_expected = process.returncode in expected and b"Traceback" not in error
        if not is_expected and ranks == 1:  # torchrun prints a traceback and ends with status 1
            raise SystemExit(f"{cell} ended with status {process.returncode}:\n{error.decode()}")
        done += 1
        within[where_it_stopped(under_fire)] += 1
        in_an_episode += is_in_an_episode(log)
        during_save += any((under_fire / "checkpoints").glob("*.partial"))
        at_iterations.append(int(re.split("[_-]", newest_checkpoint(under_fire).name)[-1]))
    finish(start("--resume", str(under_fire)))
    peace, fire = files_of(folder / "rl4lm_exps" / "peace"), files_of(under_fire)
    differ = sorted(name for name in peace.keys() | fire.keys() if peace.get(name) != fire.get(name))
    return {
        "kills": done,
        "during_save": during_save,
        **({"in_an_episode": in_an_episode} if plays else {}),
        "stopped_in": dict(sorted(within.items())),
        "at_iterations": at_iterations,
        "n_iters": n_iters,
        "differ": differ,
    }


def wait_for_another(process: subprocess.Popen[bytes], run: Path, found: list[Path]) -> bool:
    """Waits for one more checkpoint than before; False if the process ends first."""
    newest = found[-1].name if found else None
    while process.poll() is None:
        now = checkpoints_in(run / "checkpoints")
        if now and now[-1].name != newest:
            return True
        time.sleep(0.01)
    finish(process)
    return False


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def where_it_stopped(run: Path) -> str:
    """What its newest checkpoint says of it."""
    newest = newest_checkpoint(run)
    state = newest / "training_state.json"
    if state.is_file() and "update" in json.loads(state.read_text()):
        return "update"
    return "rollout or evaluation" if newest.name.startswith("interrupted_") else "after a save"


def wait_for_a_save(process: subprocess.Popen[bytes], run: Path) -> None:
    """Waits until a checkpoint is being written."""
    while process.poll() is None and not any((run / "checkpoints").glob("*.partial")):
        time.sleep(0.0005)


def wait_for_a_turn(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until an environment has answered a turn that others follow, in this process."""
    size = log.stat().st_size
    while process.poll() is None and (log.stat().st_size == size or not is_in_an_episode(log)):
        time.sleep(0.0005)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end, which must be a good one."""
    _, error = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a run ended with status {process.returncode}:\n{error.decode()}")


def files_of(run: Path) -> dict[str, Any]:
    """What a run leaves behind, without clock times, messages and what tells of them."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if name in ("log.txt", "report.html", ".lock") or ".partial" in name:
            continue
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
        elif name.endswith(("manifest.json", "_state.json")):
            state = json.loads(path.read_text())
            state.pop("files", None)  # lengths of files with clock times in them
            found[name] = state
        else:
            found[name] = path.read_bytes()
    return found


def make_models(folder: Path) -> None:
    """A tiny GPT-2 and a tiny T5."""
    tokenizer, with_end = models.make_tokenizer(), models.make_tokenizer(append_eos=True)
    models.save_model(folder / "causal", models.make_causal_lm("gpt2", tokenizer), tokenizer)
    models.save_model(folder / "seq2seq", models.make_seq2seq_lm("t5", with_end), with_end)


def main() -> int:
    """Runs the cells, prints a line each, writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", default=",".join(CELLS), help="comma-separated, of " + ", ".join(CELLS))
    parser.add_argument("--kills", type=int, default=25, help="of each cell (%(default)s)")
    parser.add_argument("--n_iters", type=int, default=200, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--parallel", type=int, default=2, help="cells at a time (%(default)s)")
    parser.add_argument("--by", choices=WAYS, default="kill", help="which signal, SIG...; or all (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    cells = options.cells.split(",")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_models(base / "models")

        def run(index: int) -> None:
            cell = cells[index]
            folder = base / cell.replace("/", "_")
            folder.mkdir()
            seed = options.seed + CELLS.index(cell)
            results[cell] = run_cell(cell, options.kills, options.n_iters, folder, seed, options.by, options.ranks)
            shutil.rmtree(folder)
            print(cell, json.dumps(results[cell]), flush=True)

        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(run, range(len(cells))))
    known = json.loads(options.output.read_text()) if options.output.is_file() else {}
    by = options.by if options.ranks == 1 else f"{options.by}, {options.ranks} processes"
    cells_before = known.get(by, {}).get("cells", {})
    found = known | {by: {"seed": options.seed, "cells": cells_before | results}}
    options.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return int(any(cell["differ"] for cell in results.values()))


if __name__ == "__main__":
    sys.exit(main())
