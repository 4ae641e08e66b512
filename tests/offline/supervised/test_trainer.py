"""A supervised run learns the references and nothing else, and leaves the files of any other run behind."""

import copy
import functools
import json
import time
from contextlib import ExitStack
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, TrainingArguments

from rl4lms_like.catalogue import description
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.offline.assemble_supervised import assemble_supervised, learns_response_of_dialogues
from rl4lms_like.offline.reference_trainer import trained
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.preview import preview
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import CheckpointError, DataPoolError, MetricError, ModelError, RL4LMsLikeError
from rl4lms_like.testing.models import make_causal_lm, save_model
from rl4lms_like.training.resuming.states import LEARNED_TURNS, check_frozen, frozen_digests
from tests.chat_models import chat_tokenizer
from tests.config_errors import raises_at
from tests.configs import supervised_blocks

AUTO = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
PAIRS = {"sea": "blue", "sun": "gold", "moss": "green"}


class Colours(TextGenPool):
    """What colour something has: to be learned by heart."""

    @classmethod
    def prepare(cls, split: str, n: int = 24, with_references: bool = True):
        return cls([
            Sample(f"{split}_{i}", f"The {name} is", [colour] if with_references else [])
            for i, (name, colour) in ((i, list(PAIRS.items())[i % 3]) for i in range(n if split == "train" else 3))
        ])  # fmt: skip


class OnlyTrain(Colours):
    """Nothing to evaluate on."""

    @classmethod
    def prepare(cls, split: str):
        return super().prepare(split) if split == "train" else cls([])


class Uneven(Colours):
    """References of one word to four."""

    @classmethod
    def prepare(cls, split: str):
        return cls([Sample(f"{split}_{i}", "The sea is", [" ".join(["blue"] * (1 + i % 4))]) for i in range(8)])


class Right(BaseMetric):
    """Share of exact answers. Draws from torch's own numbers, as a metric may that makes a model."""

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        torch.rand(3)
        each = [float(text.strip() == refs[0]) for text, refs in zip(generated_texts, reference_texts, strict=True)]
        return {"test/right": (each, sum(each) / len(each))}


class Scripted(BaseMetric):
    """Says on `val` what it was told: before training, then at one evaluation after the other."""

    message: ClassVar[list] = []

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        score = Scripted.message.pop(0) if split_name == "val" and Scripted.message else 0.0
        return {"test/scripted": (None, score)}


@pytest.fixture(params=["causal", "seq2seq"])
def kind(request):
    return request.param


@pytest.fixture
def blocks(kind, tiny_gpt2_dir, tiny_t5_dir):
    """A supervised run of six optimizer steps."""
    return six_steps(kind, tiny_gpt2_dir if kind == "causal" else tiny_t5_dir)


@pytest.fixture(scope="module")
def six_steps_done(tmp_path_factory, tiny_gpt2_dir, tiny_t5_dir):
    """The folders of such runs, by family; each runs once for all tests that only look at it."""
    folders = {
        kind: run(six_steps(kind, model), tmp_path_factory.mktemp(kind))
        for kind, model in (("causal", tiny_gpt2_dir), ("seq2seq", tiny_t5_dir))
    }
    return folders


@pytest.fixture
def finished(six_steps_done, kind):
    """The folder of a run of `blocks`."""
    return six_steps_done[kind]


def six_steps(kind, model_dir):
    name = str(model_dir)
    return copy.deepcopy({
        "tokenizer": {"model_name": name, "max_length": 16},
        "datapool": {"id": f"{__name__}:Colours"},
        "alg": {
            "id": "supervised",
            "model_type": kind,
            "model_name": name,
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "post_processing_fn": None},
            "training_args": {"num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 2, "eval_steps": 2},
        },
        "train_evaluation": {"eval_batch_size": 4, "metrics": [{"id": f"{__name__}:Right"}]},
    })  # fmt: skip


causal = pytest.mark.parametrize("kind", ["causal"], indirect=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def trainer_of(tmp_path):
    """Makes trainers that have not run yet."""
    from rl4lms_like.offline.trainer import SupervisedTrainer
    from rl4lms_like.tracking.base import Tracker

    with ExitStack() as trackers:

        def make(blocks):
            tracker = trackers.enter_context(Tracker(tmp_path, {}, "p", "e", quiet=True))
            return SupervisedTrainer(assemble_supervised(parse_config(blocks)), tracker)

        yield make


def without_dropout(compute_loss):
    """The same loss, in a model that the Trainer's `train()` did not reach."""

    def compute(model, inputs, **arguments):
        return compute_loss(model.eval(), inputs, **arguments)

    return compute


# --- what is learned -------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_reference_and_its_end(blocks, kind, trainer_of):
    trainer = trainer_of(blocks)
    model, tokenizer = trainer.run.model.eval(), trainer.run.tokenizer
    rows = [trainer.run.examples["train"].rows[i] for i in (0, 2)]
    batch = trainer.trainer.data_collator(rows)
    expected = []
    for prompt, answer in (("The sea is", "blue"), ("The moss is", "green")):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        if kind == "causal":
            text = f" {answer}"
            written = torch.tensor([[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]])
            logits = model(input_ids=torch.cat([ids, written], 1)).logits[:, ids.shape[1] - 1 : -1]
        else:
            written = tokenizer(answer, return_tensors="pt").input_ids
            start = torch.full_like(written[:, :1], model.config.decoder_start_token_id)
            logits = model(input_ids=ids, decoder_input_ids=torch.cat([start, written[:, :-1]], 1)).logits
        assert written[0, -1] == tokenizer.eos_token_id
        expected.append(F.cross_entropy(logits[0], written[0], reduction="none"))
    loss = trainer.trainer.compute_loss(model, batch)
    assert loss.item() == pytest.approx(torch.cat(expected).mean().item(), abs=1e-5)


@causal
def test_loss_on_prompt_learns_the_prompt_too(blocks):
    plain = assemble_supervised(parse_config(blocks)).examples["train"]
    blocks["alg"]["loss_on_prompt"] = True
    everything = assemble_supervised(parse_config(blocks)).examples["train"]
    assert all(row["labels"] == [-100, *row["input_ids"][1:]] for row in everything.rows)
    assert all(row["labels"][0] == -100 for row in plain.rows)
    assert [row["input_ids"] for row in plain.rows] == [row["input_ids"] for row in everything.rows]


def test_a_prompt_becomes_its_answer_and_ends(blocks, kind, tmp_path):
    blocks["alg"]["generation_kwargs"] = {"do_sample": False, "max_new_tokens": 8}
    blocks["alg"]["training_args"] |= {"num_train_epochs": 20, "logging_steps": 1000, "save_strategy": "no"}
    folder = run(blocks, tmp_path)
    assert lines(folder / "val_split_metrics.jsonl")[-1]["metrics"]["test/right"] == 1
    losses = [line["supervised/val_loss"] for line in lines(folder / "training_info.jsonl")]
    assert losses[-1] < 0.3
    texts = generate_texts(folder, ["The sun is"], decoding="greedy", max_new_tokens=30)
    assert texts == [[" gold" if kind == "causal" else "gold"]]


@causal
def test_the_end_is_learned_where_it_is_the_pad_token(blocks, tmp_path, tiny_gpt2_dir, trainer_of):
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    blocks["tokenizer"]["model_name"] = str(tmp_path / "tokenizer")
    trainer = trainer_of(blocks)
    rows = trainer.run.examples["train"].rows[:3]
    batch = trainer.trainer.data_collator(rows)
    lengths = [len(row["labels"]) for row in rows]
    assert len(set(lengths)) > 1
    for labels, length in zip(batch["labels"], lengths, strict=True):
        assert labels[length - 1] == tokenizer.eos_token_id
        assert (labels[length:] == -100).all()


# --- the run ---------------------------------------------------------------------------------------------------------


def test_a_run_leaves_the_files_of_any_run_behind(blocks, kind, finished):
    folder = finished
    updates = lines(folder / "training_info.jsonl")
    assert [line["iteration"] for line in updates] == [2, 4, 6]
    assert {"timesteps", "supervised/loss", "supervised/val_loss", "train/learning_rate"} <= set(updates[0])
    n_learned = assemble_supervised(parse_config(blocks)).examples["train"].n_learned
    assert updates[-1]["timesteps"] == 2 * n_learned
    assert [line["epoch"] for line in lines(folder / "val_split_metrics.jsonl")] == [0, 0.6667, 1.3333, 2]
    assert [line["epoch"] for line in lines(folder / "test_split_metrics.jsonl")] == [0, 2]
    predictions = json.loads((folder / "epoch_2_test_split_predictions.json").read_text())
    expected = {"split_name", "sample_id", "prompt_text", "generated_text", "ref_text", "test/right"}
    assert len(predictions) == 3 and set(predictions[0]) == expected
    assert (folder / "epoch_0.6667_val_split_predictions.json").is_file()
    report = (folder / "report.html").read_text()
    assert "Loss" in report and "6 steps" in report and "test/right" in report
    model = AUTO[kind].from_pretrained(folder / "model")
    start = AUTO[kind].from_pretrained(blocks["alg"]["model_name"])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder / "model")("sea").input_ids
    saved, own = model.config.to_dict(), start.config.to_dict()
    for key in ("use_cache", "dropout_rate", "resid_pdrop", "pad_token_id", "eos_token_id"):
        assert saved.get(key) == own.get(key), key
    checkpoint = folder / "checkpoints" / "checkpoint-6"
    assert AUTO[kind].from_pretrained(checkpoint) and AutoTokenizer.from_pretrained(checkpoint)
    assert not [path for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin")]


@causal
def test_the_step_rate_is_that_of_the_time_in_steps(blocks, tmp_path):
    began = time.perf_counter()
    folder = run(blocks, tmp_path)
    elapsed = time.perf_counter() - began
    rates = [line["time/steps_per_s"] for line in lines(folder / "training_info.jsonl")]  # each of two steps
    assert 0 < sum(2 / rate for rate in rates) < elapsed


@causal
def test_progress_is_shown_from_the_first_step_and_not_recorded(blocks, tmp_path, capsys):
    mapping = blocks
    mapping["alg"]["training_args"] |= {"logging_strategy": "no", "eval_strategy": "no"}
    folder = train_config(parse_config(mapping), base_path_to_store_results=tmp_path)
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1/6"]]
    assert float(line[1]) > 0, "the loss of the first step"
    assert not (folder / "training_info.jsonl").exists()


def test_one_seed_one_result(blocks, tmp_path, finished):
    again = run(blocks, tmp_path)
    assert weights(again) == weights(finished)
    assert (again / "val_split_metrics.jsonl").read_text() == (finished / "val_split_metrics.jsonl").read_text()


@causal
def test_another_seed_another_result(blocks, tmp_path, finished):
    assert weights(run({**blocks, "seed": 1}, tmp_path)) != weights(finished)


def test_evaluations_do_not_change_training(blocks, tmp_path, finished):
    blocks["alg"]["training_args"] |= {"eval_strategy": "no"}
    blocks["train_evaluation"]["metrics"] = []
    seldom = run(blocks, tmp_path)
    assert len(lines(seldom / "val_split_metrics.jsonl")) == 2
    assert weights(seldom) == weights(finished)


def test_gradient_accumulation_is_a_larger_batch(blocks, monkeypatch, trainer_of):
    blocks["datapool"]["id"] = f"{__name__}:Uneven"
    changes = []
    for batch_size, accumulated in ((8, 1), (2, 4)):
        blocks["alg"]["training_args"] = {
            "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulated, "max_steps": 1,
            "optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant", "eval_strategy": "no", "save_strategy": "no",
        }  # fmt: skip
        trainer = trainer_of(blocks)
        model = trainer.run.model
        monkeypatch.setattr(trainer.trainer, "compute_loss", without_dropout(trainer.trainer.compute_loss))
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        trainer.trainer.train()
        changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert float((changes[0] - changes[1]).norm()) < 1e-4 * float(changes[0].norm())


def test_the_loss_of_val_does_not_depend_on_its_batches(blocks, trainer_of):
    blocks["datapool"]["id"] = f"{__name__}:Uneven"
    losses = []
    for batch_size in (1, 2, 3):
        blocks["alg"]["training_args"]["per_device_eval_batch_size"] = batch_size
        losses.append(trainer_of(blocks).trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


@causal
def test_a_loss_that_is_no_number_ends_the_run_before_its_step(blocks, tmp_path):
    blocks["alg"]["training_args"] |= {"learning_rate": 1e30, "logging_steps": 100}
    with pytest.raises(ModelError, match=r" 2,.*alg.training_args.learning_rate"):
        run(blocks, tmp_path)


@causal
def test_the_best_checkpoint_by_our_metric_is_the_model(blocks, tmp_path, monkeypatch):
    from transformers import trainer

    monkeypatch.setattr(trainer.logger, "warning", lambda *message: pytest.fail(str(message)))
    Scripted.message = [0.9, 0.1, 0.8, 0.3, 0.5]
    blocks["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Scripted"}]
    blocks["alg"]["training_args"] |= {"load_best_model_at_end": True, "metric_for_best_model": "test/scripted"}
    folder = run(blocks, tmp_path)
    best = folder / "checkpoints" / "checkpoint-4" / "model.safetensors"
    assert weights(folder) == best.read_bytes()
    assert "the best checkpoint is of step 4" in (folder / "log.txt").read_text()
    evaluations = [
        (line["epoch"], line["metrics"]["test/scripted"]) for line in lines(folder / "val_split_metrics.jsonl")
    ]
    assert evaluations == [(0, 0.9), (0.6667, 0.1), (1.3333, 0.8), (2, 0.3), (2, 0.5)]


@causal
def test_a_metric_that_is_better_when_smaller_and_a_score_that_is_no_number(blocks, tmp_path):
    Scripted.message = [0.0, float("nan"), 0.8, 0.3]
    blocks["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Scripted"}]
    blocks["alg"]["training_args"] |= {
        "load_best_model_at_end": True, "metric_for_best_model": "test/scripted", "greater_is_better": False,
    }  # fmt: skip
    assert "the best checkpoint is of step 6" in (run(blocks, tmp_path) / "log.txt").read_text()


@causal
def test_early_stopping_stops(blocks, tmp_path):
    Scripted.message = [0.0, 0.5, 0.4, 0.3, 0.9, 0.9]
    blocks["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Scripted"}]
    blocks["alg"] |= {"early_stopping_patience": 2}
    blocks["alg"]["training_args"] |= {"num_train_epochs": 10, "metric_for_best_model": "test/scripted"}
    folder = run(blocks, tmp_path)
    assert lines(folder / "training_info.jsonl")[-1]["iteration"] == 6
    assert weights(folder) == (folder / "checkpoints" / "checkpoint-2" / "model.safetensors").read_bytes()


@causal
def test_an_unknown_metric_is_said_before_training(blocks, tmp_path):
    blocks["alg"]["training_args"] |= {"load_best_model_at_end": True, "metric_for_best_model": "test/rihgt"}
    with raises_at("alg.training_args.metric_for_best_model", mentions="'test/right'"):
        run(blocks, tmp_path)
    assert not (tmp_path / "rl4lm_exps" / "run" / "training_info.jsonl").exists()


@causal
def test_an_interrupted_run_saves_what_it_has(blocks, tmp_path, monkeypatch):
    from rl4lms_like.offline import trainer as supervised

    original = supervised.ReferenceTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(supervised.ReferenceTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(blocks, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "interrupted_00004")
    assert "interrupted after 4 steps" in (folder / "log.txt").read_text()
    assert (folder / "report.html").exists()


@causal
def test_why_a_run_ended_is_not_hidden_by_a_disk_that_is_full(blocks, tmp_path, monkeypatch):
    from rl4lms_like.offline import trainer as supervised
    from rl4lms_like.tracking.base import Tracker

    def failing(*args, **kwargs):
        raise OSError("no space left")

    def failing_step(self, *args, **kwargs):
        monkeypatch.setattr(Tracker, "log_values", failing)
        monkeypatch.setattr(supervised, "save_language_model", failing)
        monkeypatch.setattr("rl4lms_like.tracking.report.write_report", failing)
        self.state.global_step = 1
        reporter = next(each for each in self.callback_handler.callbacks if isinstance(each, supervised.Reporter))
        reporter._values["supervised/loss"] = 1.0
        raise MetricError("the metric has a bug")

    monkeypatch.setattr(supervised.ReferenceTrainer, "training_step", failing_step)
    with pytest.raises(MetricError):
        run(blocks, tmp_path)


@causal
def test_a_disk_that_is_full_is_an_error_of_the_folder(blocks, tmp_path, monkeypatch, trainer_of):
    trainer = trainer_of(blocks)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(trainer.run.model), "save_pretrained", full)
    with pytest.raises(RL4LMsLikeError, match=str(tmp_path / "model")):
        trainer.save(tmp_path / "model")


@causal
def test_a_checkpoint_that_cannot_be_written_is_named(blocks, tmp_path, monkeypatch):
    from transformers.trainer_callback import TrainerState

    def full(self, path):
        raise OSError("no space left")

    monkeypatch.setattr(TrainerState, "save_to_json", full)
    with pytest.raises(RL4LMsLikeError, match=r"checkpoints: "):
        run(blocks, tmp_path)


def test_an_rl_run_starts_from_its_model(finished, kind, tmp_path, request):
    folder = finished
    rl = request.getfixturevalue("tiny_config" if kind == "causal" else "tiny_seq2seq_config")
    rl["tokenizer"]["model_name"] = rl["alg"]["policy"]["args"]["model_name"] = str(folder / "model")
    rl["train_evaluation"]["n_iters"] = 1
    assert len(lines(run(rl, tmp_path, "rl") / "rollout_info.jsonl")) == 1


def test_a_finished_run_can_be_evaluated(finished, tmp_path):
    scores = evaluate_run(finished, split="test", output=tmp_path)
    assert scores == lines(finished / "test_split_metrics.jsonl")[-1]["metrics"]


@causal
def test_without_val_samples_it_only_trains(blocks, tmp_path):
    blocks["datapool"]["id"] = f"{__name__}:OnlyTrain"
    folder = run(blocks, tmp_path)
    assert [line["iteration"] for line in lines(folder / "training_info.jsonl")] == [2, 4, 6]
    blocks["alg"]["early_stopping_patience"] = 1
    with raises_at("alg.training_args.metric_for_best_model"):
        run(blocks, tmp_path)


@causal
def test_without_references_there_is_nothing_to_learn(blocks, tmp_path):
    blocks["datapool"]["args"] = {"with_references": False}
    with pytest.raises(DataPoolError, match=r"Colours.*'train'"):
        run(blocks, tmp_path)


@causal
@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_trained_saved_and_chosen(merge, blocks, tmp_path):
    pytest.importorskip("peft")
    Scripted.message = [0.0, 0.1, 0.8, 0.3]
    blocks["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Scripted"}]
    blocks["alg"] |= {"peft": {"r": 4}, "merge_on_save": merge}
    blocks["alg"]["training_args"] |= {"load_best_model_at_end": True, "metric_for_best_model": "test/scripted"}
    folder = run(blocks, tmp_path)
    assert (folder / "model" / "adapter_config.json").exists() is not merge
    assert (folder / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors").is_file()
    if not merge:
        best = folder / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"
        assert (folder / "model" / "adapter_model.safetensors").read_bytes() == best.read_bytes()
    assert generate_texts(folder, ["The sea is"], decoding="greedy")


# --- mistakes --------------------------------------------------------------------------------------------------------


@causal
def test_dropout_of_adapters_is_active_in_training(blocks):
    pytest.importorskip("peft")
    blocks["alg"]["peft"] = {"r": 4, "lora_dropout": 0.25}
    model = assemble_supervised(parse_config(blocks)).model
    rates = {module.p for name, module in model.named_modules() if "lora_dropout" in name and hasattr(module, "p")}
    assert rates == {0.25}


def test_mistakes_are_said_together_before_anything_is_loaded(blocks, tmp_path, monkeypatch):
    from rl4lms_like.offline import assemble_supervised as assembly

    monkeypatch.setattr(assembly, "load_model_config", lambda *args: pytest.fail("went on"))
    blocks["device"] = "quantum"
    blocks["alg"]["generation_kwargs"]["max_new_token"] = 3
    blocks["alg"]["training_args"] = {
        "num_train_epoch": 3, "learning_rate": "fast", "output_dir": "here", "seed": 3, "eval_strategy": "sometimes",
        "per_device_train_batch_size": 0,
    }  # fmt: skip
    paths = [f"alg.training_args.{key}" for key in blocks["alg"]["training_args"]]
    with raises_at(*paths, "alg.generation_kwargs.max_new_token", "device", mentions="'num_train_epochs'"):
        run(blocks, tmp_path)
    assert not (tmp_path / "rl4lm_exps").exists()


@causal
@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"deepspeed": "zero.json"}, "deepspeed"),
        ({"push_to_hub": True}, "push_to_hub"),
        ({"max_steps": 0}, "max_steps"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"learning_rate": -1e-3}, "learning_rate"),
        ({"save_strategy": "best"}, "metric_for_best_model"),
        ({"load_best_model_at_end": True, "eval_strategy": "no"}, "eval_strategy"),
    ],
)
def test_arguments_that_mean_nothing_are_found_by_the_check(given, key, blocks):
    blocks["alg"]["training_args"] |= given
    with raises_at(f"alg.training_args.{key}"):
        list(preview(parse_config(blocks)))


@causal
@pytest.mark.parametrize("given", [{"eval_strategy": "no"}, {"metric_for_best_model": None}])
def test_early_stopping_needs_something_to_stop_by(given, blocks):
    blocks["alg"]["early_stopping_patience"] = 2
    blocks["alg"]["training_args"] |= {"load_best_model_at_end": False} | given
    with raises_at(f"alg.training_args.{next(iter(given))}"):
        list(preview(parse_config(blocks)))


@causal
def test_what_transformers_refuses_is_a_mistake_in_the_config(blocks):
    blocks["alg"]["training_args"] |= {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_steps": 3}
    with raises_at("alg.training_args", mentions="load_best_model_at_end"):
        make_training_arguments(parse_config(blocks), "out")


def test_settings_that_would_have_no_effect_are_issues(blocks, kind):
    blocks["alg"]["early_stopping_threshold"] = 0.1
    with raises_at("alg", mentions="early_stopping_threshold"):
        parse_config(blocks)
    del blocks["alg"]["early_stopping_threshold"]
    for key, value in (("loss_on_prompt", True), ("separator", " ")) if kind == "seq2seq" else ():
        with raises_at("alg", mentions=key):
            parse_config({**blocks, "alg": {**blocks["alg"], key: value}})


def test_the_models_family_must_be_the_one_named(blocks, kind, tmp_path):
    other = {"causal": "seq2seq", "seq2seq": "causal"}[kind]
    blocks["alg"]["model_type"] = other
    with raises_at("alg.model_type", mentions=kind):
        run(blocks, tmp_path)


@causal
def test_responses_must_leave_room_for_a_prompt(blocks, tmp_path):
    blocks["alg"]["generation_kwargs"]["max_new_tokens"] = 128
    with raises_at("alg.generation_kwargs.max_new_tokens"):
        run(blocks, tmp_path)


# --- defaults and plans ----------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_rl4lms_without_their_traps():
    config = parse_config(supervised_blocks())
    arguments = make_training_arguments(config, "out")
    assert (arguments.output_dir, arguments.seed, arguments.report_to) == ("out", 0, [])
    assert arguments.eval_strategy == "epoch"
    assert arguments.save_strategy == "steps" and not arguments.save_only_model
    assert arguments.learning_rate == 1e-5 and not arguments.bf16
    assert make_training_arguments(config, "out", has_val=False).eval_strategy == "no"


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({}, "epoch"),
        ({"logging_steps": 3}, "epoch"),
        ({"eval_steps": 3}, "steps"),
        ({"eval_strategy": "no"}, "no"),
        ({"eval_strategy": "steps", "logging_steps": 3}, "steps"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_strategy": "steps"}, "steps"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "loss"}, "epoch"),
    ],
)
def test_val_is_evaluated_after_each_epoch_unless_something_else_is_asked_for(given, strategy):
    blocks = supervised_blocks()
    blocks["alg"]["training_args"] = given
    assert make_training_arguments(parse_config(blocks), "out").eval_strategy == strategy


@pytest.mark.parametrize(
    ("given", "n_examples", "interval"),
    [
        ({}, 8, 1),
        ({"per_device_train_batch_size": 2, "num_train_epochs": 4}, 100, 20),
        ({"max_steps": 70}, 100_000, 7),
        ({}, 1_000_000, 500),
        ({"logging_steps": 3}, 8, 3),
        ({"logging_strategy": "epoch"}, 8, 500),
    ],
)
def test_short_runs_log_ten_losses_and_long_ones_every_500_steps(given, n_examples, interval):
    blocks = supervised_blocks()
    blocks["alg"]["training_args"] = {"num_train_epochs": 1, **given}
    arguments = make_training_arguments(parse_config(blocks), "out", n_examples=n_examples)
    assert arguments.logging_steps == interval


def test_a_short_run_logs_its_losses_and_one_evaluation_per_epoch(blocks, tmp_path):
    blocks["alg"]["training_args"] = {"num_train_epochs": 3, "learning_rate": 1e-2}
    folder = run(blocks, tmp_path)
    logged = lines(folder / "training_info.jsonl")
    assert len(logged) == 9, "9 steps of 8 examples, the loss in the line of the evaluation"
    assert logged[-1]["supervised/loss"] < logged[0]["supervised/loss"]
    assert [line["supervised/epoch"] for line in logged if "supervised/val_loss" in line] == [1, 2, 3]
    assert [line["epoch"] for line in lines(folder / "val_split_metrics.jsonl")] == [0, 1, 2, 3]


def test_the_check_tells_examples_and_steps(blocks):
    text = "\n".join(preview(parse_config(blocks)))
    assert "24 references of 24 samples" in text
    assert "6 in 2 epochs" in text
    blocks["alg"]["training_args"]["nonsense"] = 1
    with raises_at("alg.training_args.nonsense"):
        list(preview(parse_config(blocks)))


@causal
def test_texts_without_prompts_are_learned_in_blocks(blocks, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "The sea is blue and the sun is gold"}\n' * 9, encoding="utf-8")
    blocks["datapool"] = {"id": "jsonl", "args": {"path": str(texts)}}
    blocks["alg"]["block_length"] = 4
    blocks["train_evaluation"]["metrics"] = []
    with pytest.raises(DataPoolError, match=r"generate: false evaluates the loss alone"):
        assemble_supervised(parse_config(blocks))

    blocks["train_evaluation"]["generate"] = False
    shown = "\n".join(preview(parse_config(blocks)))
    n_blocks = len(assemble_supervised(parse_config(blocks)).examples["train"].rows)
    assert f"about {n_blocks} blocks of 7 texts" in shown and n_blocks > 7
    folder = run(blocks, tmp_path)
    losses = [
        line["supervised/val_loss"] for line in lines(folder / "training_info.jsonl") if "supervised/val_loss" in line
    ]
    assert losses[-1] < 0.7 * losses[0]


@causal
def test_a_run_of_an_earlier_version_that_learned_more_of_its_dialogues_is_not_continued(blocks, tmp_path):
    dialogue = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": dialogue, "completion": [{"role": "assistant", "content": "d"}]}) + "\n")
    tokenizer = chat_tokenizer()
    model = save_model(tmp_path / "model", make_causal_lm("gpt2", tokenizer, n_positions=128), tokenizer)
    blocks["tokenizer"] |= {"model_name": str(model), "chat_template": True, "max_length": 32}
    blocks["alg"]["model_name"] = str(model)
    blocks["datapool"] = {"id": "jsonl", "args": {"data_files": dict.fromkeys(("train", "val", "test"), str(rows))}}
    blocks["train_evaluation"]["metrics"] = []
    assembled = assemble_supervised(parse_config(blocks))
    assert learns_response_of_dialogues(assembled)

    of_before = frozen_digests(assembled.model, trained(assembled.model), assembled.samples)
    with pytest.raises(CheckpointError, match="learned messages of the prompts"):
        check_frozen({**of_before, LEARNED_TURNS: "none"}, of_before, assembled.config.tokenizer)


def test_its_block_can_be_shown():
    text = description("supervised")
    assert "early_stopping_patience: a whole number of at least 1, or null (default null)" in text


def test_the_check_of_a_model_that_is_elsewhere_says_so():
    blocks = supervised_blocks() | {"datapool": {"id": f"{__name__}:Uneven"}}
    assert "no plan" in "\n".join(preview(parse_config(blocks)))


def test_each_of_several_processes_has_its_own_gpu(blocks, monkeypatch):
    def first_of_two(self):
        self._n_gpu = 2
        return torch.device("cuda", 0)

    first = functools.cached_property(first_of_two)
    first.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", first)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    made = make_training_arguments(parse_config(blocks), "out")
    assert made.device == torch.device("cuda", 1) == chosen[-1]
    assert made.n_gpu == 1
