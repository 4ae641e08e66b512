"""Kept rollouts train another run: the same one byte for byte, or a corrected one, or none."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl4lms_like.algorithms import base
from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.on_policy.replay import Replay
from rl4lms_like.preview import preview
from rl4lms_like.python_api.python_run import train
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.testing import models
from tests.config_errors import raises_at
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_interruption import After, at_call, at_minibatch
from tests.training.resuming.test_resume import PAIRS, blocks

FAMILIES = {"causal": "tiny_gpt2_dir", "seq2seq": "tiny_t5_dir"}
N_ITERS = 3
CONFIG_OR_POSITION = ("config.json", "training_state.json", "manifest.json", "model/README.md")


def run_blocks(request, algorithm="ppo", family="causal"):
    """A run that keeps its rollouts, with a reward that draws random numbers."""
    mapping = blocks(family, request.getfixturevalue(FAMILIES[family]), algorithm)
    mapping["reward_fn"] = {"id": "tests.training.resuming.test_resume:Drawing"}
    if algorithm in ("ppo", "nlpo"):
        mapping["alg"]["policy"]["args"]["dropout"] = True  # continues the random numbers of the reward
    mapping["train_evaluation"] |= {"n_iters": N_ITERS, "save_rollouts": True}
    return mapping


def trained(mapping, folder, name="run", **values):
    mapping = copy.deepcopy(mapping)
    mapping["train_evaluation"] |= values
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def replayed(mapping, source, folder, selected="", **values):
    return trained(mapping, folder, "replayed", replay=f"{source}{selected}", **values)


@pytest.fixture
def no_generation(monkeypatch):
    """Make rollouts fail to generate, once it is called."""

    def batch(self):
        raise AssertionError("a replay generated a rollout")

    return lambda: monkeypatch.setattr(RolloutCollector, "generation_batch", batch)


def rollout_lines(folder):
    return [json.loads(line) for line in (folder / "rollout_info.jsonl").read_text().splitlines()]


def results_of(folder):
    """All files of a run without clock times, its config (also that of the model card), and its position."""
    found = files_of(folder)
    return {name: content for name, content in found.items() if not name.endswith(CONFIG_OR_POSITION)}


def assert_equal(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_a_replay_under_its_own_config_equals_its_run_byte_for_byte(
    family, algorithm, request, tmp_path, no_generation
):
    mapping = run_blocks(request, algorithm, family)
    original = trained(mapping, tmp_path)
    no_generation()
    copied = replayed(mapping, original, tmp_path)
    ours, theirs = results_of(copied), results_of(original)
    assert {"model/model.safetensors", "rollouts/iteration_00003.safetensors"} <= ours.keys()
    assert_equal(ours, theirs)


def test_the_critics_pretraining_is_replayed_too(request, tmp_path, no_generation):
    mapping = run_blocks(request)
    mapping["alg"]["args"] = mapping["alg"]["args"] | {"critic_pretrain": {"max_rollouts": 2}}
    original = trained(mapping, tmp_path, n_iters=1)
    no_generation()
    ours = results_of(replayed(mapping, original, tmp_path, n_iters=1))
    assert {"critic/value_head.safetensors", "rollouts/critic_00002.safetensors"} <= ours.keys()
    assert_equal(ours, results_of(original))
    mapping["alg"]["args"] |= {"learning_rate": 1e-4}
    with raises_at("alg.args.critic_pretrain", mentions=str(original / "critic")):
        replayed(mapping, original, tmp_path)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_gpt2_dir):
    """A run of PPO with kept rollouts, and its config."""
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"] |= {"n_iters": N_ITERS, "save_rollouts": True, "eval_every": 3}
    return mapping, trained(mapping, tmp_path_factory.mktemp("original"))


def with_learning_rate(mapping, algorithm="ppo"):
    return mapping | {
        "alg": mapping["alg"] | {"id": algorithm, "args": {**mapping["alg"]["args"], "learning_rate": 1e-2}}
    }


def test_a_replay_with_another_learning_rate_is_corrected_from_the_second_iteration_on(
    original, tmp_path, no_generation
):
    mapping, source = original
    no_generation()
    folder = replayed(with_learning_rate(mapping), source, tmp_path)
    lines, before = rollout_lines(folder), rollout_lines(source)
    names = ("rollout_info/importance_weight", "rollout_info/effective_sample_size")
    assert [lines[0][name] for name in names] == pytest.approx([1, 1], abs=1e-6)  # of the sampling, and of a pass
    assert all(abs(line[names[0]] - 1) > 1e-6 for line in lines[1:])
    assert all(0 < line[names[1]] < 1 - 1e-9 for line in lines[1:])
    assert [line["rollout_info/ep_rew"] for line in lines] == [line["rollout_info/ep_rew"] for line in before]
    assert lines[0]["rollout_info/log_prob"] == pytest.approx(before[0]["rollout_info/log_prob"], rel=1e-6)
    assert lines[1]["rollout_info/log_prob"] != before[1]["rollout_info/log_prob"]
    gaps = [json.loads(line)["train/ratio_gap"] for line in (folder / "training_info.jsonl").read_text().splitlines()]
    assert max(gaps) < 1e-5


def test_selected_iterations_are_replayed_in_their_order(original, tmp_path):
    mapping, source = original
    folder = replayed(mapping, source, tmp_path, ":2-3")
    rewards = [line["rollout_info/ep_rew"] for line in rollout_lines(source)]
    assert [line["rollout_info/ep_rew"] for line in rollout_lines(folder)] == rewards[1:]
    assert json.loads((folder / "config.json").read_text())["train_evaluation"]["n_iters"] == 2
    assert "importance_weight" in (folder / "rollout_info.jsonl").read_text()


def test_the_loss_of_another_policys_rollouts_is_weighted(original, tmp_path, monkeypatch):
    mapping, source = original
    weighted = replayed(mapping, source, tmp_path / "weighted", ":2-3")
    monkeypatch.setattr(base, "correction_weights", lambda log_ratio, *others: torch.ones_like(log_ratio))
    plain = replayed(mapping, source, tmp_path / "plain", ":2-3")
    assert results_of(weighted)["model/model.safetensors"] != results_of(plain)["model/model.safetensors"]


def test_a_replay_of_replayed_rollouts_of_another_policy_is_corrected_as_well(original, tmp_path):
    mapping, source = original
    first = trained(mapping, tmp_path, "first", replay=f"{source}:2-3", n_iters=2)
    again = replayed(mapping, first, tmp_path, n_iters=2)
    names = ("model/model.safetensors", "training_info.jsonl")
    assert [(again / name).read_bytes() for name in names] == [(first / name).read_bytes() for name in names]
    assert [line["rollout_info/importance_weight"] for line in rollout_lines(again)] == [
        line["rollout_info/importance_weight"] for line in rollout_lines(first)
    ]


def test_other_starting_weights_are_noticed(original, tmp_path, tiny_gpt2_dir):
    mapping, _ = original
    model = tmp_path / "model"
    shutil.copytree(tiny_gpt2_dir, model)
    mapping = copy.deepcopy(mapping)
    mapping["alg"]["policy"]["args"]["model_name"] = mapping["tokenizer"]["model_name"] = str(model)
    source = trained(mapping, tmp_path, n_iters=1)
    weights = load_file(model / "model.safetensors")
    save_file({name: 1.01 * weight for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    (line,) = rollout_lines(replayed(mapping, source, tmp_path, n_iters=1))
    assert line["rollout_info/importance_weight"] != 1


@pytest.mark.parametrize("learning_rate", [1e-3, 1e-2], ids=["stored", "scored again"])
@pytest.mark.parametrize("where", ["rollout", "update"])
def test_an_interrupted_replay_resumes_to_the_same_end(where, learning_rate, original, tmp_path):
    mapping, source = copy.deepcopy(original[0]), original[1]
    mapping["alg"]["args"] = mapping["alg"]["args"] | {"learning_rate": learning_rate}
    expected = results_of(replayed(mapping, source, tmp_path / "whole"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "update":
            at_minibatch(patch, After(10))
        else:
            at_call(patch, Replay, "next_rollout", After(2))
        replayed(mapping, source, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "replayed"
    n_kept = len(list((folder / "rollouts").glob("*.safetensors")))
    assert n_kept == (2 if where == "update" else 1)
    assert_equal(results_of(resume(folder, quiet=True)), expected)


def test_rollouts_after_the_checkpoint_are_deleted_when_a_run_resumes(original, tmp_path):
    mapping, _ = original
    folder = trained(mapping, tmp_path, save_every=1)
    resume(folder / "checkpoints" / "iteration_00002", overrides=["train_evaluation.n_iters=2"], quiet=True)
    assert {file.stem for file in (folder / "rollouts").iterdir()} == {"iteration_00001", "iteration_00002"}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("alg.id", lambda alg: alg.update(id="trpo", args={"n_steps": 10, "batch_size": 40})),
        ("alg.id", lambda alg: alg.update(id="stable_baselines3:PPO", args={"n_steps": 10, "batch_size": 40})),
    ],
    ids=["trpo", "stable_baselines3"],
)
def test_an_algorithm_that_cannot_be_corrected_refuses_rollouts_of_another_policy(path, change, original, tmp_path):
    mapping, source = copy.deepcopy(original[0]), original[1]
    change(mapping["alg"])
    with raises_at(path):
        replayed(mapping, source, tmp_path)
    assert not (tmp_path / "rl4lm_exps").exists(), "refused before anything is loaded or written"


@pytest.mark.parametrize(
    ("path", "block", "value"),
    [
        ("reward_fn.id", "reward_fn", {"id": "sentiment"}),
        ("datapool.args.n_train", "datapool", {"id": "film_opinions", "args": {"n_train": 31, "n_eval": 6}}),
        ("env.n_envs", "env", {"n_envs": 4}),
    ],
)
def test_another_task_is_refused(path, block, value, original, tmp_path):
    mapping, source = original
    with raises_at(path):
        replayed(mapping | {block: mapping[block] | value}, source, tmp_path)


@pytest.mark.parametrize(
    ("selected", "mentions"),
    [(":4", "1-3"), (":2-4", "1-3"), (":3-2", "write 2-3"), (":1-99999999999", "1-3"), ("/nothing", "nothing")],
)
def test_rollouts_that_do_not_exist_are_refused_with_those_that_do(selected, mentions, original, tmp_path):
    mapping, source = original
    with raises_at("train_evaluation.replay", mentions=mentions):
        replayed(mapping, source, tmp_path, selected)


def test_rollouts_of_another_tokenizer_family_or_kind_of_policy_are_refused(
    original, tmp_path, tiny_gpt2_dir, tiny_t5_dir
):
    mapping, source = original
    masked = blocks("causal", tiny_gpt2_dir, "nlpo")
    with raises_at("alg.policy.id"):
        replayed(masked, source, tmp_path)
    seq2seq = copy.deepcopy(mapping)
    seq2seq["tokenizer"]["model_name"] = seq2seq["alg"]["policy"]["args"]["model_name"] = str(tiny_t5_dir)
    seq2seq["alg"]["policy"]["id"] = "seq2seq_lm_actor_critic_policy"
    with raises_at("alg.policy.id"):
        replayed(seq2seq, source, tmp_path)
    other = models.make_tokenizer(["a b c", "film films"])
    models.save_model(tmp_path / "other", models.make_causal_lm("gpt2", other), other)
    mapping = copy.deepcopy(mapping)
    mapping["tokenizer"]["model_name"] = mapping["alg"]["policy"]["args"]["model_name"] = str(tmp_path / "other")
    with raises_at("tokenizer.model_name"):
        replayed(mapping, source, tmp_path)


@pytest.mark.parametrize("stored", [1, 2])
def test_groups_of_another_size_are_refused(stored, original, tmp_path):
    mapping, source = original
    grouped = copy.deepcopy(mapping)
    grouped["alg"] |= {"id": "grpo", "args": {"n_steps": 10, "batch_size": 40, "group_size": stored}}
    if stored > 1:
        source = trained(grouped, tmp_path, "source", n_iters=1)
    grouped["alg"]["args"]["group_size"] = 4
    with raises_at("alg.args.group_size"):
        replayed(grouped, source, tmp_path)
    if stored > 1:
        grouped["alg"]["args"] |= {"group_size": 2, "learning_rate": 1e-2}
        assert len(rollout_lines(replayed(grouped, source, tmp_path))) == 1


def test_a_damaged_rollout_is_named(original, tmp_path):
    mapping, source = original
    copied = tmp_path / "source"
    shutil.copytree(source, copied)
    file = copied / "rollouts" / "iteration_00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RL4LMsLikeError, match=file.name):
        replayed(mapping, copied, tmp_path)


def edited(source, tmp_path, change, *, keeps_digest=True, of_header=None):
    """A copy of a run whose second rollout was edited: its tensors by `change`, its header by `of_header`."""
    copied = tmp_path / "source"
    shutil.copytree(source, copied)
    file = copied / "rollouts" / "iteration_00002.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="pt") as stored:
        header = json.loads(stored.metadata()["rollout"])
    change(tensors)
    if of_header is not None:
        of_header(header)
    if not keeps_digest:
        del header["digest"]
    save_file(tensors, file, {"rollout": json.dumps(header)})
    return copied


def changed_reward(tensors):
    tensors["0.rewards"] = tensors["0.rewards"] + 1


def test_a_rollout_that_was_edited_is_refused_unless_the_config_accepts_it(original, tmp_path, caplog):
    mapping, source = original
    copied = edited(source, tmp_path, changed_reward)
    with pytest.raises(RL4LMsLikeError, match=r"iteration_00002.*accept_edited_rollouts"):
        replayed(mapping, copied, tmp_path / "refused")
    with caplog.at_level("WARNING"):
        folder = replayed(mapping, copied, tmp_path / "accepted", accept_edited_rollouts=True)
    assert "iteration_00002.safetensors was edited" in caplog.text
    assert json.loads((folder / "config.json").read_text())["train_evaluation"]["accept_edited_rollouts"] is True
    rewards, before = (line["rollout_info/ep_rew"] for line in (rollout_lines(folder)[1], rollout_lines(source)[1]))
    assert rewards > before


def test_a_rollout_without_a_digest_is_replayed_with_one_notice(original, tmp_path, caplog):
    mapping, source = original
    copied = edited(source, tmp_path, lambda tensors: None, keeps_digest=False)
    with caplog.at_level("WARNING"):
        folder = replayed(mapping, copied, tmp_path)
    assert caplog.text.count("without a digest") == 1
    assert (folder / "model" / "model.safetensors").read_bytes() == (source / "model/model.safetensors").read_bytes()


def test_the_flag_for_edited_rollouts_needs_a_replay(original, tmp_path):
    mapping, _ = original
    with raises_at("train_evaluation", mentions="accept_edited_rollouts"):
        trained(mapping, tmp_path, accept_edited_rollouts=True)


def filled(name, value):
    def change(tensors):
        tensors[name] = torch.full_like(tensors[name], value)

    return change


def as_type(name, dtype):
    def change(tensors):
        tensors[name] = tensors[name].to(dtype)

    return change


IMPOSSIBLE = {
    "log-prob above 0": filled("0.scores.log_prob", 3.0),
    "log-prob of -1e30": filled("0.scores.raw_log_prob", -1e30),
    "reward NaN": filled("0.rewards", float("nan")),
    "ids out of the vocabulary": filled("0.episodes.response_ids", 10**6),
    "negative ids": filled("0.episodes.prompt_ids", -1),
    "ids are floats": as_type("0.episodes.response_ids", torch.float32),
    "masks are numbers": as_type("0.episodes.response_mask", torch.int64),
    "rewards are float64": as_type("0.rewards", torch.float64),
    "no state of the generators": filled("random.torch", 0),
}


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_numbers_that_cannot_be_are_refused_whatever_the_flag_says(change, original, tmp_path):
    mapping, source = original
    copied = edited(source, tmp_path, IMPOSSIBLE[change])
    with pytest.raises(RL4LMsLikeError, match=r"iteration_00002\.safetensors"):
        replayed(mapping, copied, tmp_path, accept_edited_rollouts=True)


@pytest.mark.parametrize(
    "header",
    [{"batches": []}, {"random": {}}, {"random": None}, {"batches": [{}]}, {"origin": None}, {"digest": 5}],
    ids=str,
)
def test_a_header_that_no_run_wrote_is_refused_with_the_file(header, original, tmp_path):
    mapping, source = original
    copied = edited(source, tmp_path, lambda tensors: None, of_header=lambda stored: stored.update(header))
    with pytest.raises(RL4LMsLikeError, match=r"iteration_00002\.safetensors"):
        replayed(mapping, copied, tmp_path)


@pytest.mark.parametrize("algorithm", ["ppo", "nlpo"])
def test_check_reports_the_size_of_kept_rollouts(algorithm, tmp_path, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, algorithm)
    mapping["datapool"] = {"id": "dummy_pool", "args": {"prompt": "a film " * 40, "n_samples": 8}}  # of full length
    mapping["env"] = {
        "n_envs": 16,
        "args": {"max_prompt_length": 32, "max_episode_length": 32, "terminate_on_eos": False},
    }
    mapping["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"] = 32
    mapping["alg"]["args"] = mapping["alg"]["args"] | {"n_steps": 200, "batch_size": 4000, "n_epochs": 1}
    mapping["train_evaluation"] |= {"n_iters": 2, "save_rollouts": True}
    (text,) = [part for part in preview(parse_config(mapping)) if part.startswith("# rollouts\n")]
    per_iteration, in_all = (int(size) * 2**10 for size in re.findall(r"(\d+) KiB", text))
    assert in_all == pytest.approx(2 * per_iteration, rel=0.01)
    files = list((trained(mapping, tmp_path) / "rollouts").iterdir())
    assert len(files) == 4
    assert sum(file.stat().st_size for file in files) == pytest.approx(in_all, rel=0.15)


# --- command line and report ------------------------------------------------------------------------------------------


def test_the_commands_replay_check_and_print(original, tmp_path, capsys, monkeypatch):
    mapping, source = original
    file = tmp_path / "run.yml"
    file.write_text(dump_yaml(mapping | {"train_evaluation": mapping["train_evaluation"] | {"save_rollouts": False}}))
    place = ["--base_path_to_store_results", str(tmp_path), "--experiment_name", "again"]
    assert main(["train", str(file), "--replay", os.path.relpath(source), *place]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", str(tmp_path / "rl4lm_exps" / "again")]) == 0
    again = tmp_path / "rl4lm_exps" / "again"
    assert (again / "model" / "model.safetensors").read_bytes() == (source / "model" / "model.safetensors").read_bytes()
    in_python = train(file, replay=source, base_path_to_store_results=tmp_path, experiment_name="in_python")
    assert rollout_lines(in_python)[-1]["rollout_info/values"] == rollout_lines(source)[-1]["rollout_info/values"]
    assert main(["train", "--resume", str(again), "--replay", str(source)]) == 2
    capsys.readouterr()
    assert main(["check", str(file), "--set", f"train_evaluation.replay={source}:2"]) == 0
    assert f"replay of {source}, iterations 2: scored again" in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert main(["rollouts", str(again)]) == 1
    assert "save_rollouts" in capsys.readouterr().err


def test_episodes_are_filtered(original, capsys):
    _, source = original

    def printed(*options):
        assert main(["rollouts", str(source), "--json", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    everything = printed()
    assert [line["iteration"] for line in everything] == sorted(line["iteration"] for line in everything)
    means = {line["iteration"]: line["rollout_info/ep_rew"] for line in rollout_lines(source)}
    for iteration, mean in means.items():
        rewards = [line["reward"] for line in everything if line["iteration"] == iteration]
        assert sum(rewards) / len(rewards) == pytest.approx(mean, rel=1e-5)
    middle = sorted(line["reward"] for line in everything)[len(everything) // 2]
    high = printed("--min_reward", str(middle), "--iteration", "2")
    assert high == [line for line in everything if line["reward"] >= middle and line["iteration"] == 2] != []
    assert printed("--max_reward", str(middle)) == [line for line in everything if line["reward"] <= middle]
    for text in (everything[3]["prompt"], everything[3]["response"]):
        found = printed("--contains", text)
        assert everything[3] in found and all(text in f"{line['prompt']}\n{line['response']}" for line in found)
    assert printed("--limit", "2") == everything[:2]
    assert main(["rollouts", str(source), "--iteration", "9"]) == 1
    assert "1-3" in capsys.readouterr().err
    assert main(["rollouts", str(source), "--contains", "in no text"]) == 0
    captured = capsys.readouterr()
    assert not captured.out and "no episode" in captured.err
    assert main(["rollouts", str(source), "--limit", "1"]) == 0
    assert capsys.readouterr().out.startswith("iteration 1, episode 0 · reward ")


def test_the_report_links_iterations_episodes_and_tokens(original):
    _, source = original
    page = (source / "report.html").read_text(encoding="utf-8")
    links = set(re.findall(r'href="#(tokens-\d+-\d+)"', page))
    credit = [json.loads(line) for line in (source / "token_credit.jsonl").read_text().splitlines()]
    recorded = {(line["iteration"], episode["episode"]) for line in credit for episode in line["episodes"]}
    assert links == {f"tokens-{iteration}-{episode}" for iteration, episode in recorded}
    assert len(links) > 3 and all(page.count(f'id="{link}"') == 1 for link in links)
    texts = {
        (line["iteration"], line["episode"]): line["response"]
        for file in (source / "rollouts").glob("*.jsonl")
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    }
    for line in credit:
        for episode in line["episodes"]:
            assert "".join(episode["tokens"]) == texts[line["iteration"], episode["episode"]]
