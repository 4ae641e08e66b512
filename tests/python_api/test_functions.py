"""Functions as rewards and metrics: a script that is killed and started again, a run opened from its folder."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from rl4lms_like import Run
from rl4lms_like.system.errors import CheckpointError
from tests.config_errors import raises_at

SCRIPT = '''
import os
import signal

from rl4lms_like import Run

CALLS = []


def length(responses, topic):
    """Many characters, and a kill in the third iteration of the first process."""
    CALLS.append(topic)
    if KILLED and len(CALLS) == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(response)) for response in responses]


if __name__ == "__main__":
    KILLED = int(os.environ.get("KILL_AT", 0))
    prompts = [{{"prompt": f"Count {{number}}", "topic": "numbers"}} for number in range(6)]
    run = Run(
        {model!r}, prompts, length, folder={folder!r}, n_iters=4, save_every=1, n_episodes=16, group_size=4,
        max_new_tokens=6, learning_rate=1e-3,
    )
    run.train(quiet=True)
    print(run.folder)
'''


def run_script(model, folder, script, kill_at=0):
    import os

    script.write_text(SCRIPT.format(model=str(model), folder=str(folder)))
    environment = os.environ | {"KILL_AT": str(kill_at)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_a_script_that_is_killed_and_started_again_ends_with_the_same_weights(tiny_gpt2_dir, tmp_path):
    weights = []
    for name, kill_at in (("undisturbed", 0), ("killed", 3)):
        folder = tmp_path / "a" / name
        script = tmp_path / f"{name}.py"
        if kill_at:
            killed = run_script(tiny_gpt2_dir, folder, script, kill_at)
            assert killed.returncode == -signal.SIGKILL and not (folder / "finished.json").exists()
        done = run_script(tiny_gpt2_dir, folder, script)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(folder)
        weights.append((folder / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != (tiny_gpt2_dir / "model.safetensors").read_bytes()


def length(responses):
    return [float(len(response)) for response in responses]


def brevity(completions, prompts, **kwargs):
    return [-float(len(completion)) for completion in completions]


PROMPTS = ["Count with me: 1", "Count with me: 2", "3 4 5"]
SIZES = {"n_episodes": 16, "group_size": 4, "max_new_tokens": 6, "n_iters": 2, "learning_rate": 1e-3}


def test_several_functions_have_weights_and_their_own_numbers(tiny_gpt2_dir, tmp_path):
    run = Run(
        tiny_gpt2_dir,
        PROMPTS,
        [length, brevity, length],
        reward_weights=[1.0, 0.5, 0.25],
        eval_prompts=PROMPTS,
        metrics=[length, "reward"],
        folder=tmp_path / "a" / "run",
        **SIZES,
    ).train(quiet=True)
    last = run.history[-1]
    total = sum(last[f"rollout_info/reward/{name}"] for name in ("length", "brevity", "length_2"))
    assert last["rollout_info/ep_rew"] == pytest.approx(total)
    scores = run.evaluate()
    assert scores["reward/mean"] == pytest.approx(0.75 * scores["python/length"])


def test_the_runs_own_reward_is_evaluated_unless_metrics_are_given(tiny_gpt2_dir, tmp_path):
    run = Run(tiny_gpt2_dir, PROMPTS, length, eval_prompts=PROMPTS, folder=tmp_path / "a" / "run", **SIZES)
    assert set(run.evaluate()) == {"reward/mean", "reward/std"}
    assert set(run.evaluate(metrics=[length])) == {"python/length"}


def test_a_folder_is_opened_with_its_function(tiny_gpt2_dir, tmp_path):
    # A function of a notebook cannot be imported.
    namespace = {"__name__": "__main__"}
    exec("def score(responses):\n    return [float(len(response)) for response in responses]\n", namespace)
    score = namespace["score"]
    run = Run(tiny_gpt2_dir, PROMPTS, score, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    assert run.generate("Count", seed=3) == Run.from_folder(run.folder).generate("Count", seed=3)
    again = Run.from_folder(run.folder, reward=score).train(n_iters=3, quiet=True)
    longer = Run(tiny_gpt2_dir, PROMPTS, score, folder=tmp_path / "a" / "longer", **(SIZES | {"n_iters": 3}))
    longer.train(quiet=True)
    models = [one.folder / "model" / "model.safetensors" for one in (again, longer)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_setting_that_changes_on_continuing_is_listed(tiny_gpt2_dir, tmp_path):
    import json

    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    run.train(n_iters=3, change={"learning_rate": 1e-4}, quiet=True)
    (change,) = json.loads((run.folder / "accepted_changes.json").read_text())
    assert change == {"iteration": 2, "path": "alg.args.learning_rate", "old": 1e-3, "new": 1e-4}
    assert Run.from_folder(run.folder).config.alg.args["learning_rate"] == 1e-4


def test_a_run_whose_changed_reward_does_not_fit_its_checkpoint_stays_as_it_was(tiny_gpt2_dir, tmp_path):
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    config = (run.folder / "config.json").read_bytes()

    again = Run.from_folder(run.folder, reward=[length, brevity])
    with pytest.raises(CheckpointError, match="reward with the same parts, or start a new run"):
        again.train(n_iters=3, change=["reward"], quiet=True)
    assert (run.folder / "config.json").read_bytes() == config
    assert not (run.folder / "accepted_changes.json").exists()
    assert run.train(n_iters=3, quiet=True).n_done == 3


def test_an_accepted_change_is_part_of_the_run_from_then_on(tiny_gpt2_dir, tmp_path):
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    run.train(n_iters=3, change={"learning_rate": 1e-4, "reward": brevity}, quiet=True)
    assert run.config.alg.args["learning_rate"] == 1e-4 and run.config.reward_fn.args["function"].value is brevity
    assert run.train(n_iters=4, quiet=True).n_done == 4


def interrupting(responses):
    """Interrupts the third iteration, once."""
    CALLS.append(len(responses))
    if len(CALLS) == 3:
        raise KeyboardInterrupt
    return [float(len(response)) for response in responses]


CALLS = []


def test_an_interrupted_extension_continues_to_its_end(tiny_gpt2_dir, tmp_path):
    CALLS.clear()
    run = Run(tiny_gpt2_dir, PROMPTS, interrupting, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    with pytest.raises(KeyboardInterrupt):
        run.train(n_iters=4, quiet=True)
    assert not run.is_finished and run.train(quiet=True).n_done == 4


def test_a_refused_length_is_not_that_of_the_run(tiny_gpt2_dir, tmp_path):
    settings = SIZES | {"learning_rate_schedule": "linear"}
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **settings).train(quiet=True)
    with raises_at("n_iters") as caught:
        run.train(n_iters=3, quiet=True)
    assert "train(change=['n_iters'])" in str(caught.value) and "--" not in str(caught.value)
    assert run.config.train_evaluation.n_iters == 2
    assert run.train(n_iters=3, change=["n_iters"], quiet=True).n_done == 3


CHANGES = {
    "a text": ("learning_rate", "change=['learning_rate']"),
    "unknown name": (["rewrd"], "did you mean 'reward'"),
    "unknown name with a value": ({"learnig_rate": 1.0}, "did you mean 'learning_rate'"),
    "no list": (3, "list of names"),
    "number as a name": ([3], "names of settings"),
}


@pytest.mark.parametrize("mistake", CHANGES)
def test_a_change_of_nothing_is_refused(mistake, tiny_gpt2_dir, tmp_path):
    change, mentioned = CHANGES[mistake]
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES)
    with raises_at("change") as caught:
        run.train(change=change)
    assert mentioned in str(caught.value) and run.folder is None


def test_a_setting_of_a_file_or_of_a_block_is_changed_by_its_name(tiny_gpt2_dir, tmp_path):
    sizes = {name: value for name, value in SIZES.items() if name != "learning_rate"}
    folder = tmp_path / "a" / "run"
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=folder, alg={"args": {"learning_rate": 1e-3}}, **sizes)
    run.train(quiet=True)
    run.train(n_iters=3, change={"learning_rate": 1e-4}, quiet=True)
    assert run.config.alg.args["learning_rate"] == 1e-4

    # With a config, the names of arguments are not those of its errors.
    again = Run(config=run.config, folder=folder)
    again.folder = folder
    again.train(n_iters=4, change={"learning_rate": 1e-5}, quiet=True)
    assert again.config.alg.args["learning_rate"] == 1e-5


def test_a_finished_run_says_that_it_does_not_apply_a_change(tiny_gpt2_dir, tmp_path, capsys):
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES).train(quiet=True)
    run.train(change={"learning_rate": 1e-4}, quiet=True)
    assert "not applied: change=['learning_rate']" in capsys.readouterr().out
    assert run.config.alg.args["learning_rate"] == 1e-3


def test_a_training_leaves_the_generators_of_the_session_as_they_were(tiny_gpt2_dir, tmp_path):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **SIZES)
    numbers = []
    for act in (lambda: None, lambda: run.train(quiet=True)):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        act()
        numbers.append(drawn())
    assert run.is_finished and numbers[0] == numbers[1]


def test_an_unfinished_run_of_another_function_is_skipped_with_the_way_to_continue_it(tiny_gpt2_dir, tmp_path, capsys):
    CALLS.clear()
    folder = tmp_path / "a" / "run"
    with pytest.raises(KeyboardInterrupt):
        Run(tiny_gpt2_dir, PROMPTS, interrupting, folder=folder, **(SIZES | {"n_iters": 3})).train(quiet=True)
    restarted = Run(tiny_gpt2_dir, PROMPTS, length, folder=folder, **(SIZES | {"n_iters": 3})).train(quiet=True)
    assert restarted.folder.name == "run_2"
    call = f"Run.from_folder({str(folder)!r}, reward=...).train(change=['reward'])"
    assert call in capsys.readouterr().out
    assert Run.from_folder(folder, reward=length).train(change=["reward"], quiet=True).n_done == 3
