"""A run in Python: trained, continued, evaluated, saved; each through the folder that it writes."""

from __future__ import annotations

import gc
import weakref

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like import Run, Sample
from rl4lms_like.data_pools.dummy import DummyPool
from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError
from tests.config_errors import raises_at

REWARD = {"id": "tests.builders:LowTokens"}
PROMPTS = ["Count with me: 1", "Count with me: 2", "3 4 5"]


@pytest.fixture
def make(tiny_gpt2_dir, tmp_path):
    """A run of two iterations of sixteen responses."""

    def make_run(name: str = "run", model=None, prompts=PROMPTS, **settings) -> Run:
        sizes = {"n_episodes": 16, "group_size": 4, "max_new_tokens": 8, "n_iters": 2, "learning_rate": 1e-3}
        return Run(model or tiny_gpt2_dir, prompts, REWARD, folder=tmp_path / "a" / name, **(sizes | settings))

    return make_run


def weights(run: Run) -> bytes:
    """The weights of a finished run, which are not those that it began with."""
    return (run.folder / "model" / "model.safetensors").read_bytes()


def test_a_run_trains_once_and_then_says_that_it_is_finished(make, capsys):
    run = make()
    assert run.folder is None and run.history == [] and not run.is_finished
    assert run.train(quiet=True) is run
    before = weights(run)
    assert run.is_finished and run.n_done == 2
    assert [line["iteration"] for line in run.history] == [1, 2]
    capsys.readouterr()
    run.train(quiet=True)
    assert "is finished" in capsys.readouterr().out
    assert weights(run) == before and not run.folder.with_name("run_2").exists()


def test_a_finished_run_continues_to_the_weights_of_a_longer_one(make):
    longer = make("longer", n_iters=4).train(quiet=True)
    continued = make("continued").train(quiet=True).train(n_iters=4, quiet=True)
    assert continued.n_done == 4 and weights(continued) == weights(longer)
    assert [line["rollout_info/ep_rew"] for line in continued.history] == [
        line["rollout_info/ep_rew"] for line in longer.history
    ]


def test_a_run_whose_learning_rate_decays_has_a_fixed_length(make):
    run = make(learning_rate_schedule="linear").train(quiet=True)
    with raises_at("n_iters"):
        run.train(n_iters=4)


def test_a_run_that_another_object_began_is_continued_from_its_folder(make):
    first = make().train(quiet=True)
    again = Run.from_folder(first.folder).train(n_iters=3, quiet=True)
    assert again.folder == first.folder and again.n_done == 3
    assert weights(again) == weights(make("longer", n_iters=3).train(quiet=True))


def test_two_runs_that_take_turns_do_not_disturb_each_other(make):
    alone = [make(f"alone_{seed}", seed=seed, n_iters=4).train(quiet=True) for seed in (1, 2)]
    first, second = (make(f"turns_{seed}", seed=seed, n_iters=1) for seed in (1, 2))
    for n_iters in (1, 2, 4):
        first.train(n_iters=n_iters, quiet=True)
        second.train(n_iters=n_iters, quiet=True)
        second.generate("Count")
    assert [weights(first), weights(second)] == [weights(run) for run in alone]


def test_the_initial_model_answers_before_the_training_and_the_trained_one_after_it(make):
    run = make(eval_prompts=PROMPTS, metrics=["length"], n_iters=3, learning_rate=1e-1)
    before = run.generate(PROMPTS, decoding="greedy"), run.evaluate()
    run.train(quiet=True)
    after = run.generate(PROMPTS, decoding="greedy")
    assert len(before[0]) == len(after) == 3 and before[0] != after

    # An evaluation has the numbers of the run's own one.
    import json

    lines = (run.folder / "val_split_metrics.jsonl").read_text().splitlines()
    own = {line["epoch"]: line["metrics"] for line in map(json.loads, lines)}
    assert before[1] == own[0] and run.evaluate() == own[3]


def test_generate_returns_what_it_was_asked_for(make):
    run = make()
    assert isinstance(run.generate("Count"), str)
    assert len(run.generate("Count", n=2)) == 2
    texts = run.generate(["Count", "1"], n=3, max_new_tokens=2)
    assert [len(group) for group in texts] == [3, 3]
    assert run.generate("Count", seed=1) == run.generate("Count", seed=1)
    with raises_at("prompts"):
        run.generate([5])


def test_the_saved_model_loads(make, tmp_path):
    run = make()
    with pytest.raises(RL4LMsLikeError, match="train"):
        run.save(tmp_path / "saved")
    folder = run.train(quiet=True).save(tmp_path / "further" / "saved")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert not {"manifest.json", "training_state.json"} & {file.name for file in folder.iterdir()}


def test_a_model_is_saved_over_an_earlier_copy_and_over_nothing_else(make, tmp_path, monkeypatch):
    run = make().train(quiet=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    run.save(mine)
    (mine / "tokenizer.json").unlink()
    assert (run.save(mine) / "tokenizer.json").is_file()

    # With a file of the user, a file in place of a folder, the run, a folder around it, and the current folder.
    (mine / "thesis.txt").write_text("mine")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "link").symlink_to(run.folder)
    for folder in (mine, mine / "thesis.txt", run.folder, tmp_path / "link", run.folder.parent, tmp_path / "here"):
        with raises_at("folder"):
            run.save(folder)
    assert (mine / "thesis.txt").read_text() == "mine"
    assert run.is_finished and len(run.history) == 2


@pytest.mark.parametrize("act", ["check", "train", "new", "evaluate", "generate"])
def test_code_of_a_foreign_folder_runs_only_with_consent(act, make, monkeypatch):
    import json

    run = make(eval_prompts=PROMPTS).train(quiet=True)
    file = run.folder / "config.json"
    blocks = json.loads(file.read_text())
    blocks["tokenizer"]["trust_remote_code"] = True
    file.write_text(json.dumps(blocks))
    files = {path: path.stat().st_mtime_ns for path in run.folder.parent.rglob("*")}

    again = Run.from_folder(run.folder)
    acts = {
        "check": again.check,
        "train": lambda: again.train(n_iters=3),
        "new": lambda: again.train(new=True),
        "evaluate": again.evaluate,
        "generate": lambda: again.generate("Count"),
    }
    with pytest.raises(ConfigError, match=r"Run\.from_folder\(folder, trust_remote_code=True\)"):
        acts[act]()
    assert {path: path.stat().st_mtime_ns for path in run.folder.parent.rglob("*")} == files
    assert isinstance(Run.from_folder(run.folder, trust_remote_code=True).generate("Count"), str)


def test_only_an_interrupted_training_says_that_it_is_saved(make, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("rl4lms_like.python_api.short_errors.is_interactive", lambda: True)
    run = make(eval_prompts=PROMPTS).train(quiet=True)
    monkeypatch.setattr("rl4lms_like.training.evaluation.Responder.respond", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run.generate("Count")
    assert str(caught.value) == ""

    # Before there is a folder, and with one.
    for n_iters, name in ((2, "new"), (3, "run")):
        monkeypatch.setattr("rl4lms_like.run.train_config", interrupt)
        monkeypatch.setattr("rl4lms_like.run.resume", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            (run if name == "run" else make(name)).train(n_iters, quiet=True)
        assert ("train() continues it" in str(caught.value)) == (name == "run")


def test_the_report_and_the_table_are_html(make):
    run = make()
    with pytest.raises(RL4LMsLikeError, match="train"):
        _ = run.report
    assert "not trained" in run._repr_html_()
    run.train(quiet=True)
    assert run.report.path.is_file() and run.report._repr_html_().startswith("<iframe")
    assert "grpo" in run._repr_html_() and "at last" in run._repr_html_() and "2 iterations" in repr(run)


FORMS = {
    "texts": lambda texts: texts,
    "rows": lambda texts: [{"prompt": text} for text in texts],
    "generator": lambda texts: (text for text in texts),
    "samples": lambda texts: [Sample("0", text) for text in texts],
    "dataset": lambda texts: Dataset.from_dict({"prompt": texts}),
    "splits": lambda texts: DatasetDict({"train": Dataset.from_dict({"prompt": texts})}),
    "frame": lambda texts: pd.DataFrame({"prompt": texts}),
    "pool": lambda texts: DummyPool([Sample("0", text) for text in texts]),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_given_in_any_form(form, make):
    from rl4lms_like.training.inputs import build_datapools

    pools = build_datapools(make(prompts=FORMS[form](PROMPTS)).config.datapool)
    assert [sample.prompt_or_input_text for sample in pools["train"].samples] == PROMPTS
    assert len(pools["val"]) == len(pools["test"]) == 0


MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
DATA = {
    "messages": ("sft", [{"messages": MESSAGES}], lambda sample: sample.references == ["So."]),
    "completions": ("sft", [{"prompt": "a", "completion": " b"}], lambda sample: sample.references == [" b"]),
    "alpaca": ("sft", [{"instruction": "Add.", "output": "4"}], lambda sample: sample.references == ["4"]),
    "pairs": ("dpo", [{"prompt": "a", "chosen": " b", "rejected": " c"}], lambda sample: sample.rejected == " c"),
    "labels": ("kto", [{"prompt": "a", "completion": " b", "label": False}], lambda sample: sample.rejected == " b"),
}


@pytest.mark.parametrize("form", DATA)
def test_data_are_recognised_by_their_columns(form, tiny_gpt2_dir):
    from rl4lms_like.training.inputs import build_datapools

    algorithm, rows, is_right = DATA[form]
    config = Run(tiny_gpt2_dir, data=rows, algorithm=algorithm).config
    (sample,) = build_datapools(config.datapool)["train"].samples
    assert is_right(sample)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_column_of_prompts_is_named(algorithm, tiny_gpt2_dir):
    from rl4lms_like.training.inputs import build_datapools

    rows = [{"question": "1", "completion": " 2", "prompt": "3"}]
    given = {"prompts": rows, "reward": REWARD} if algorithm == "grpo" else {"data": rows}
    config = Run(tiny_gpt2_dir, algorithm=algorithm, prompt_column="question", **given).config
    (sample,) = build_datapools(config.datapool)["train"].samples
    assert sample.prompt_or_input_text == "1" and sample.references == [" 2"]


def test_columns_reach_rewards_and_missing_cells_are_null(make):
    from rl4lms_like.training.inputs import build_datapool

    frame = pd.DataFrame({"prompt": PROMPTS, "answer": [1.0, None, 3.0], "references": [["a"], ["b"], ["c", "d"]]})
    samples = build_datapool(make(prompts=frame).config.datapool, "train").samples
    assert [sample.meta_data for sample in samples] == [{"answer": 1.0}, {"answer": None}, {"answer": 3.0}]
    assert samples[2].references == ["c", "d"]


def test_a_loaded_model_is_the_model_of_its_folder(make, tiny_gpt2_dir):
    loaded = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    run = make("loaded", model=loaded, tokenizer=tokenizer).train(quiet=True)
    assert weights(run) == weights(make("named").train(quiet=True))

    # One folder for the same weights, another one for others.
    first = run.config.alg.policy.args["model_name"]
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=4)  # which stays in the tokenizer
    assert make(model=loaded, tokenizer=tokenizer).config.alg.policy.args["model_name"] == first
    loaded.transformer.wte.weight.data[0, 0] += 1
    assert make(model=loaded, tokenizer=tokenizer).config.alg.policy.args["model_name"] != first


def test_a_conversation_is_rendered_by_the_chat_template(tmp_path):
    from tests.chat_models import save_chat_model

    model = save_chat_model(tmp_path / "chat")
    prompts = [[{"role": "user", "content": f"Count to {n}"}] for n in range(4)]
    sizes = {"n_episodes": 8, "group_size": 4, "max_new_tokens": 4, "n_iters": 1}
    run = Run(model, prompts, REWARD, folder=tmp_path / "a" / "run", **sizes)
    assert run.config.tokenizer.chat_template is True
    assert isinstance(run.train(quiet=True).generate(prompts[0]), str)


def test_completions_may_be_messages(tmp_path):
    from tests.chat_models import save_chat_model

    model = save_chat_model(tmp_path / "chat")
    data = [{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}] * 4
    run = Run(model, data=data, algorithm="sft", max_steps=1, folder=tmp_path / "run")
    assert run.config.datapool.args.keys() == {"data_files"} and run.config.tokenizer.chat_template is True
    assert run.train(quiet=True).is_finished


def test_nothing_of_the_training_stays_in_memory(make, monkeypatch):
    from rl4lms_like.policies.base import CausalLMActorCriticPolicy

    policies = []
    build = CausalLMActorCriticPolicy.__init__

    def remember(self, *args, **kwargs):
        build(self, *args, **kwargs)
        policies.append(weakref.ref(self))

    monkeypatch.setattr(CausalLMActorCriticPolicy, "__init__", remember)
    run = make().train(quiet=True)
    gc.collect()
    assert run.is_finished and policies and all(policy() is None for policy in policies)


def test_a_run_that_ended_early_is_finished(make):
    stopping = {"metric": "reward/mean", "mode": "max", "patience": 1}
    run = make(eval_prompts=PROMPTS, n_iters=9, eval_every=1, learning_rate=1e-9, early_stopping=stopping)
    run.train(quiet=True)
    ended = run.n_done
    assert run.is_finished and ended < 9
    assert run.train(quiet=True).n_done == ended


def test_texts_without_prompts_are_learned_with_the_defaults(tiny_gpt2_dir, tmp_path):
    texts = [{"text": "The film was a wonderful story."}] * 8
    settings = {"data": texts, "eval_data": texts, "algorithm": "sft", "folder": tmp_path / "run", "max_steps": 2}
    run = Run(tiny_gpt2_dir, **settings).train(quiet=True)
    assert "supervised/val_loss" in run.history[-1]
    assert isinstance(run.generate("The film", max_new_tokens=4), str)
    assert Run(tiny_gpt2_dir, metrics=["length"], **settings).config.train_evaluation.generate
