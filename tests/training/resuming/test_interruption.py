"""A run that gets a signal loses nothing: it goes on in the midst of its iteration, to the same files, byte for byte.

Signals are real ones, sent to this process at chosen places.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import stable_baselines3

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.on_policy import trainer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.progress import UpdateProgress
from rl4lms_like.run import resume
from rl4lms_like.system.errors import CheckpointError, MetricError, RewardError
from rl4lms_like.training.resuming import checkpoints
from rl4lms_like.training.resuming.resume import hold_run, resumption
from tests.config_errors import raises_at
from tests.conftest import REPOSITORY
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import ALGORITHMS, PAIRS, Stateful, blocks, started


@pytest.fixture(autouse=True)
def both_signals_are_heard():
    """Also where the tests run in a shell's background, which ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def short(family, folder, algorithm):
    """A run of two iterations that saves after the second and evaluates after each; four minibatches an epoch."""
    mapping = blocks(family, folder, algorithm)
    mapping["datapool"]["args"] |= {"n_eval": 2}
    mapping["train_evaluation"] |= {"n_iters": 2, "eval_every": 1, "save_every": 2}
    return mapping


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_gpt2_dir, tiny_t5_dir):
    """Runs that nothing stopped, made when asked for."""
    made = {}

    def get(family="causal", algorithm="ppo"):
        if (family, algorithm) not in made:
            folder = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
            made[family, algorithm] = started(short(family, folder, algorithm), tmp_path_factory.mktemp("whole"))
        return made[family, algorithm]

    return get


def send():
    os.kill(os.getpid(), signal.SIGINT)


class After:
    """Does something at the n-th call."""

    def __init__(self, n, what=send):
        self.left, self.what = n, what

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            self.what()


def at_minibatch(patch, act):
    """Counted over all updates of the run."""
    original = UpdateProgress.remaining

    def remaining(self, *arguments):
        for numbered_minibatch in original(self, *arguments):
            act()
            yield numbered_minibatch

    patch.setattr(UpdateProgress, "remaining", remaining)


def at_call(patch, owner, name, act):
    original = getattr(owner, name)

    def called(*arguments, **named):
        result = original(*arguments, **named)
        act()
        return result

    patch.setattr(owner, name, called)


def stopped(mapping, base, where, act, error=KeyboardInterrupt):
    """The folder of a run in which something happens at a place."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        where(patch, act)
        started(mapping, base)
    return base / "rl4lm_exps" / "run"


def in_rollout(patch, act):
    at_call(patch, RolloutCollector, "generation_batch", act)


def in_evaluation(patch, act):
    at_call(patch, trainer, "evaluate_on_samples", act)


def in_checkpoint(patch, act):
    at_call(patch, checkpoints, "write_tensors", act)


def saved_in(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- everywhere in a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_stopped_in_an_update_it_goes_on_with_the_next_minibatch(
    family, algorithm, whole, tmp_path, tiny_gpt2_dir, tiny_t5_dir
):
    mapping = short(family, tiny_gpt2_dir if family == "causal" else tiny_t5_dir, algorithm)
    n = {"a2c": 2, "ppo": 5, "nlpo": 11, "trpo": 4}[algorithm]
    folder = stopped(mapping, tmp_path, at_minibatch, After(n))
    (name,) = [name for name in saved_in(folder) if name.startswith("interrupted_")]
    assert "update" in checkpoints.read_checkpoint(folder / "checkpoints" / name).numbers
    drawn = sum(1 for _ in (folder / "rollout_info.jsonl").open()) if (folder / "rollout_info.jsonl").exists() else 0
    assert drawn == int(name[-5:]), "its iteration is not logged before it is done"
    assert files_of(resume(folder, quiet=True)) == files_of(whole(family, algorithm))


def test_trpo_stopped_in_its_policys_step_goes_on_with_the_critic(whole, tmp_path, tiny_gpt2_dir):
    from rl4lms_like.algorithms.trpo import TRPO

    def in_step(patch, act):
        at_call(patch, TRPO, "_gradient", act)

    folder = stopped(short("causal", tiny_gpt2_dir, "trpo"), tmp_path, in_step, After(2))
    assert files_of(resume(folder, quiet=True)) == files_of(whole("causal", "trpo"))


@pytest.mark.parametrize("where, n, saved", [
    (in_rollout, 1, ["interrupted_00000"]),
    (in_rollout, 3, ["interrupted_00001"]),
    (in_evaluation, 1, ["interrupted_00000"]),
    (in_evaluation, 3, ["interrupted_00001"]),
    (in_evaluation, 4, ["interrupted_00002"]),
    (in_evaluation, 5, ["iteration_00002"]),
    (in_checkpoint, 1, ["iteration_00002"]),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_stopped_elsewhere_it_goes_on_from_there(where, n, saved, whole, tmp_path, tiny_gpt2_dir):
    folder = stopped(short("causal", tiny_gpt2_dir, "ppo"), tmp_path, where, After(n))
    assert saved_in(folder) == saved
    found = resume(folder, quiet=True)
    assert files_of(found) == files_of(whole())
    assert saved_in(found) == ["iteration_00002"]


@pytest.mark.parametrize("where", [in_evaluation, in_rollout])
def test_stopped_before_its_first_update_prompts_that_step_come_from_the_seed(where, tmp_path, tiny_gpt2_dir):
    """Stable-Baselines3 hands the seed to its environments at their first reset."""
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["env"] |= {"vec_env": "dummy", "n_envs": 3}
    expected = started(mapping, tmp_path / "whole")
    folder = stopped(mapping, tmp_path, where, After(1))
    assert saved_in(folder) == ["interrupted_00000"]
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


def test_stopped_again_and_again(whole, tmp_path, tiny_gpt2_dir):
    folder = stopped(short("causal", tiny_gpt2_dir, "ppo"), tmp_path, at_minibatch, After(2))
    for n, where in ((1, at_minibatch), (1, in_evaluation), (1, in_rollout), (3, at_minibatch)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            where(patch, After(n))
            resume(folder, quiet=True)
    assert files_of(resume(folder, quiet=True)) == files_of(whole())


@pytest.mark.parametrize("settings, critic", [
    ({"micro_batch_size": 16, "normalize_advantage": "rollout"}, {"dropout": True, "peft": {"r": 2}}),
    ({"target_kl": 1e-4, "length_sorted_minibatches": True, "learning_rate_schedule": "cosine"}, {"critic": "shared"}),
], ids=["dropout, adapters, micro-batches", "early stop, sorted, schedule"])  # fmt: skip
def test_what_an_update_depends_on_is_saved(settings, critic, tmp_path, tiny_gpt2_dir):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["alg"]["args"] = ALGORITHMS["ppo"] | settings
    mapping["alg"]["policy"]["args"] |= critic
    expected = started(mapping, tmp_path / "whole")
    folder = stopped(mapping, tmp_path, at_minibatch, After(4))
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


# --- two signals, errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where, n", [(at_minibatch, 4), (in_rollout, 3), (in_checkpoint, 1)])
def test_a_second_signal_saves_nothing_and_leaves_nothing_half(where, n, whole, tmp_path, tiny_gpt2_dir):
    def twice():
        try:
            send()
        except KeyboardInterrupt:  # in a rollout the first raises; the second comes while it is saved
            at_call(pytest_patch, checkpoints, "write_tensors", send)
            raise
        send()

    with pytest.MonkeyPatch.context() as pytest_patch:
        folder = stopped(short("causal", tiny_gpt2_dir, "ppo"), tmp_path, where, After(n, twice))
    assert not (folder / "checkpoints").exists() or saved_in(folder) == []
    assert "lost" in (folder / "log.txt").read_text()


class FailsOnce(Stateful):
    """Fails at one call; in another process, or repaired, it does not."""

    broken = True

    def __call__(self, *arguments):
        if self.broken and self.calls == 20:
            raise ValueError("no reward")
        return super().__call__(*arguments)


def test_a_repaired_reward_goes_on_from_the_start_of_its_iteration(tmp_path, tiny_gpt2_dir, monkeypatch):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["reward_fn"]["id"] = f"{__name__}:FailsOnce"
    with monkeypatch.context() as patch:
        patch.setattr(FailsOnce, "broken", False)
        expected = started(mapping, tmp_path / "whole")
    with pytest.raises(RewardError):
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    monkeypatch.setattr(FailsOnce, "broken", False)
    assert resumption(folder).checkpoint.name.startswith("interrupted_")
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


class FailsAtFirst(BaseMetric):
    def compute(self, *arguments):
        raise ValueError("no score")


def test_before_anything_was_learned_an_error_saves_nothing(tmp_path, tiny_gpt2_dir):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"]["metrics"] = [{"id": f"{__name__}:FailsAtFirst"}]
    with pytest.raises(MetricError):
        started(mapping, tmp_path)
    assert not list((tmp_path / "rl4lm_exps" / "run").glob("checkpoints/*"))


def test_an_error_between_two_steps_loses_none_and_one_within_a_step_is_not_gone_on_from(
    whole, tmp_path, tiny_gpt2_dir
):
    def fail():
        raise ZeroDivisionError

    def before_step(patch, act):
        at_call(patch, PPO, "loss", act)

    def within_step(patch, act):
        at_call(patch, PPO, "weights_change", act)

    mapping = short("causal", tiny_gpt2_dir, "ppo")
    folder = stopped(mapping, tmp_path / "before", before_step, After(5, fail), ZeroDivisionError)
    assert files_of(resume(folder, quiet=True)) == files_of(whole())
    folder = stopped(mapping, tmp_path / "within", within_step, After(5, fail), ZeroDivisionError)
    (left,) = (folder / "checkpoints").iterdir()
    assert (left / "model.safetensors").is_file() and not (left / checkpoints.MANIFEST).exists()


def test_what_a_run_goes_on_from_stays_where_it_fails_before_there_is_more(whole, tmp_path, tiny_gpt2_dir):
    """As one whose memory runs out in the same minibatch again, and one that fails within the next step."""

    def fail():
        raise ZeroDivisionError

    def within_step(patch, act):
        at_call(patch, PPO, "weights_change", act)

    folder = stopped(short("causal", tiny_gpt2_dir, "ppo"), tmp_path, at_minibatch, After(2))
    for where in (at_minibatch, within_step):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            where(patch, After(1, fail))
            resume(folder, quiet=True)
        assert resumption(folder).checkpoint.name == "interrupted_00000"
    assert files_of(resume(folder, quiet=True)) == files_of(whole())


@pytest.mark.parametrize(("rename", "is_done", "left"), [(1, False, "old"), (1, True, "old"), (2, True, "new")])
def test_stopped_while_it_saves_again_one_of_the_two_is_there_whole(rename, is_done, left, tmp_path, monkeypatch):
    """A second Ctrl-C, within an update that was stopped before."""

    def write(content):
        return lambda folder: (folder.mkdir(), (folder / "weights").write_text(content))

    renamed, replace = [], os.replace

    def stop(*places):
        renamed.append(places)
        if len(renamed) != rename or is_done:
            replace(*places)
        if len(renamed) == rename:
            raise KeyboardInterrupt

    folder = checkpoints.write_folder(tmp_path / "interrupted_00003", write("old"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", stop)
        checkpoints.write_folder(folder, write("new"))
    assert (folder / "weights").read_text() == left
    checkpoints.write_folder(folder, write("newest"))
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted_00003"]


@pytest.mark.parametrize("again", ["resume", "same command"])
def test_killed_between_the_two_renames_it_goes_on_from_the_old_one(again, whole, tmp_path, tiny_gpt2_dir):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    folder = stopped(mapping, tmp_path, at_minibatch, After(2))
    saved = folder / "checkpoints" / "interrupted_00000"
    shutil.copytree(saved, saved.with_name("interrupted_00000.partial"))
    saved.rename(saved.with_name("interrupted_00000.replaced"))
    if again == "resume":
        assert resumption_held(folder) == saved
        resume(folder, quiet=True)
    else:
        assert started(mapping, tmp_path) == folder
    assert files_of(folder) == files_of(whole())


def resumption_held(folder):
    """The checkpoint that `--resume` takes."""
    with hold_run(folder):
        return resumption(folder).checkpoint


def test_without_save_model_nothing_is_saved_and_that_is_said(tmp_path, tiny_gpt2_dir):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"]["save_model"] = False
    folder = stopped(mapping, tmp_path, at_minibatch, After(2))
    assert not (folder / "checkpoints").exists()
    assert "saves nothing: train_evaluation.save_model is false" in (folder / "log.txt").read_text()


def test_algorithms_of_other_libraries_stop_after_their_iteration(tmp_path, tiny_gpt2_dir, capfd):
    def in_train(patch, act):
        at_call(patch, stable_baselines3.PPO, "train", act)

    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["alg"] |= {"id": "stable_baselines3:PPO", "args": {"n_steps": 10, "batch_size": 40, "n_epochs": 2}}
    expected = started(mapping, tmp_path / "whole")
    folder = stopped(mapping, tmp_path, in_train, After(1))
    assert "stopping once this iteration is done" in capfd.readouterr().err
    assert saved_in(folder) == ["interrupted_00001"]
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped_late(tmp_path, tiny_gpt2_dir):
    """The folder of a run that stopped one iteration after its checkpoint."""
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"]["n_iters"] = 3
    folder = stopped(mapping, tmp_path, in_evaluation, After(5))
    assert saved_in(folder) == ["interrupted_00003", "iteration_00002"]
    return folder


def test_from_an_older_checkpoint_what_was_interrupted_is_forgotten(stopped_late):
    folder = stopped_late
    assert resumption(folder).checkpoint.name == "interrupted_00003"
    older = folder / "checkpoints" / "iteration_00002"
    written = (older / checkpoints.MANIFEST).stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        in_rollout(patch, After(1))
        resume(older, quiet=True)
    assert resumption(folder).checkpoint == older
    assert (older / checkpoints.MANIFEST).stat().st_mtime_ns == written, "it is there already"


def test_at_the_end_of_the_run_what_was_interrupted_is_gone(stopped_late):
    assert saved_in(resume(stopped_late, quiet=True)) == ["iteration_00002"]


def test_damaged_it_is_refused_and_the_checkpoint_before_it_offered(stopped_late):
    (stopped_late / "checkpoints" / "interrupted_00003" / checkpoints.TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        resumption(stopped_late)
    assert f"an older one is intact: --resume {stopped_late / 'checkpoints' / 'iteration_00002'}" in str(caught.value)


def test_an_iteration_that_has_begun_is_within_the_length_of_the_run(tmp_path, tiny_gpt2_dir):
    folder = stopped(short("causal", tiny_gpt2_dir, "ppo"), tmp_path, at_minibatch, After(5))
    done = int(resumption(folder).checkpoint.name[-5:])
    with raises_at("train_evaluation.n_iters", mentions=f"interrupted_0000{done}"):
        resumption(folder, [f"train_evaluation.n_iters={done}"])


def test_in_one_process_too(whole, tmp_path, tiny_gpt2_dir):
    """As in a notebook, whose user asks the same trainer again."""
    from rl4lms_like.on_policy.assemble import assemble
    from rl4lms_like.tracking.base import Tracker
    from rl4lms_like.training.resuming.resume import as_started

    config = as_started(parse_config(short("causal", tiny_gpt2_dir, "ppo")), "2026-01-01")
    run = assemble(config)
    with Tracker(tmp_path, config.to_dict(), "rl4lm_exps", "run", quiet=True) as tracker:
        made = trainer.OnPolicyTrainer(run, tracker)
        before = signal.getsignal(signal.SIGINT)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            at_minibatch(patch, After(5))
            made.train_and_eval()
        assert signal.getsignal(signal.SIGINT) is before
        made.train_and_eval()
        tracker.finish()
    expected = files_of(whole())
    for name in ("environment.json", "model/README.md"):  # written where a config is trained
        del expected[name]
    assert files_of(tracker.run_path) == expected


# --- a process of its own ---------------------------------------------------------------------------------------------

SIGNALLED = """
import os, signal, sys
from rl4lms_like.rollouts.progress import UpdateProgress

original = UpdateProgress.remaining

def remaining(self, *arguments):
    for numbered_minibatch in original(self, *arguments):
        for number in sys.argv.pop().split():
            os.kill(0 if number == "2" else os.getpid(), int(number))  # Ctrl-C goes to the whole group
        sys.argv.append("")
        yield numbered_minibatch

UpdateProgress.remaining = remaining
from rl4lms_like.cli import main
sys.exit(main(sys.argv[1:-1]))
"""


@pytest.mark.parametrize("signals", ["2", "15 15", "1 1"], ids=["Ctrl-C", "SIGTERM twice", "a closing terminal"])
def test_exit_status_130_and_no_traceback_also_from_reward_workers(signals, tmp_path, tiny_gpt2_dir):
    mapping = short("causal", tiny_gpt2_dir, "ppo")
    mapping["reward_fn"]["id"] = "sentiment"
    mapping["env"]["reward_workers"] = 1 if signals == "2" else 0
    config = tmp_path / "config.yml"
    config.write_text(dump_yaml(mapping))
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, "train", str(config), signals], cwd=tmp_path, start_new_session=True,
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("stopping once this minibatch is done") == 1
    saved = list((tmp_path / "rl4lm_exps" / "rl4lm_experiment").glob("checkpoints/*"))
    assert [path.name for path in saved] == ([] if signals == "15 15" else ["interrupted_00000"])
