"""Pipeline files run unchanged, what they say is done, refused or reported, and a model that fails stops no other."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rl4lms_like.catalogue import table_rows
from rl4lms_like.cli import main
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.config.run_config import PreferenceConfig
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.pipeline import VISIBLE, load_pipeline, parse_pipeline
from rl4lms_like.offline.pipeline_file import METHODS, Pipeline
from rl4lms_like.offline.reference_trainer import ReferenceTrainer
from rl4lms_like.system.schema import at, signature_of
from rl4lms_like.testing import models
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import PAIRS, lines, written
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError

datasets = pytest.importorskip("datasets")
FAMILIES = {
    "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "sshleifer/tiny-gpt2": "gpt2",
    "EleutherAI/pythia-160m-deduped": "gpt_neox",
    "EleutherAI/pythia-410m-deduped": "gpt_neox",
}
"""Models of the published files -> the family of their stand-in."""
WHOLE = [
    {"chosen": f"{row['prompt']} {row['chosen']}", "rejected": f"{row['prompt']} {row['rejected']}"} for row in PAIRS
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_tokenizer) -> Path:
    """A folder with a stand-in for each hub id of the published files."""
    base = tmp_path_factory.mktemp("hub")
    for name, family in FAMILIES.items():
        model = models.make_causal_lm(family, tiny_tokenizer, n_layers=1, hidden_size=16, n_positions=512)
        models.save_model(base / name, model, tiny_tokenizer)
    tables = {"HumanLLMs/Human-Like-DPO-Dataset": {"train": PAIRS * 2}}
    tables["Anthropic/hh-rlhf"] = {"train": WHOLE * 2, "test": WHOLE}
    for name, splits in tables.items():
        found = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
        datasets.DatasetDict(found).save_to_disk(base / name)
    return base


@pytest.fixture
def workplace(place, tmp_path, monkeypatch) -> Path:
    for owner in place.iterdir():
        (tmp_path / owner.name).symlink_to(owner)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VISIBLE, "0")
    return tmp_path


def tiny(**changes: Any) -> dict[str, Any]:
    """A file of one model and twelve pairs: two steps of six, with a checkpoint and an evaluation at each."""
    blocks: dict[str, Any] = {
        "models": [{"name": "a", "huggingface_id": "sshleifer/tiny-gpt2"}],
        "dataset": {"name": "pairs.jsonl", "validation_split": 0.2},
        "training": {"num_epochs": 1, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1,
            "learning_rate": 1e-2, "warmup_steps": 0, "max_seq_length": 64, "logging_steps": 1, "save_steps": 1,
            "gradient_checkpointing": False},
    }  # fmt: skip
    for path, value in changes.items():
        block, _, key = path.partition("__")
        if key:
            blocks.setdefault(block, {})[key] = value
        else:
            blocks[block] = value
    return blocks


def save(blocks: Mapping[str, Any], folder: Path, name: str = "file.yaml") -> str:
    written(folder)
    (folder / name).write_text(dump_yaml(blocks))
    return str(folder / name)


def post_train(file: str, *arguments: str) -> int:
    return main(["post-train", "--config", file, *arguments])


# --- the published files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo_example.yaml", "simple_dpo.yaml", "multi_model_dpo.yaml"])
def test_the_published_files_run_unchanged(name, workplace, shared_dir, capsys):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    blocks = json.loads((shared_dir / "spec" / "preference_configs.json").read_text())[name]
    file, names = save(blocks, workplace, name), [model["name"] for model in blocks["models"]]
    mended = []
    if name == "dpo_example.yaml":  # its layers are those of another family
        assert post_train(file) == 1
        out = capsys.readouterr().out
        assert "lora.target_modules: 'query_key_value' is not a layer of 'meta-llama/Llama-3.2-1B-Instruct'" in out
        assert "k_proj" in out and "q_proj" in out
        mended = ["--set", "lora.target_modules=[q_proj, v_proj]"]
    assert post_train(file, *mended) == 0
    out = capsys.readouterr().out
    for each in names:
        folder = workplace / "outputs" / each
        assert f"{each}: {folder / 'final'}" in out
        assert (folder / "final" / "adapter_model.safetensors").is_file()
        assert list((workplace / "logs" / each).glob("events.out.tfevents.*"))
        assert (folder / "wandb").is_dir() is ("wandb" in blocks["logging"]["report_to"])
        scores = lines(folder / "val_split_metrics.jsonl")
        assert scores[0]["metrics"]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
        assert not any("generated" in path.read_text() for path in folder.glob("*_predictions.json"))
        log = (folder / "log.txt").read_text()
        assert ("gpu.device_ids: ignored" in log) is not torch.cuda.is_available()
        assert ("prompts are the common beginning" in log) is (name == "multi_model_dpo.yaml")
        n_pairs = len(PAIRS) * 2 * 0.9  # of the split `train` only
        config: Any = parse_config(json.loads((folder / "config.json").read_text()))
        assert len(assemble_preferences(config).examples["train"].rows) == round(n_pairs)


def test_the_example_is_accepted(repository, monkeypatch):
    monkeypatch.chdir(repository)
    (run,) = load_pipeline("task_configs/preferences/tiny_gpt2_pipeline.yaml")[1]
    assert run.config.alg.model_name == "embedded/gpt2-films"


# --- several models --------------------------------------------------------------------------------------------------


def test_a_model_that_fails_stops_no_other_and_finished_ones_are_skipped(workplace, capsys):
    blocks = tiny(lora__target_modules=["c_attn"], lora__r=2)
    others = ["EleutherAI/pythia-160m-deduped", "sshleifer/tiny-gpt2"]
    blocks["models"] = [{"name": name, "huggingface_id": id} for name, id in zip("ab", others, strict=True)]
    file = save(blocks, workplace)
    assert post_train(file) == 1
    out = capsys.readouterr().out
    assert "a: failed: lora.target_modules: 'c_attn'" in out and "b: " in out
    folder = workplace / "outputs" / "b"
    assert not (workplace / "outputs" / "a").exists()
    names = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert names == {"checkpoint-1", "checkpoint-2", "final"}
    assert (folder / "final").readlink() == Path("model")
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").is_file()
    before = files_of(folder)
    assert post_train(file, "--resume", "--model-index", "1") == 0
    assert files_of(folder) == before and not (workplace / "outputs" / "b_2").exists()
    assert post_train(file, "--model-index", "1", "--output-dir", "outputs") == 0
    assert (workplace / "outputs" / "b_2" / "final").is_dir()


def test_a_model_is_not_written_through_a_link_in_the_folder_of_the_results(workplace, capsys):
    file = save(tiny(), workplace)
    (workplace / "elsewhere").mkdir()
    (workplace / "outputs").mkdir()
    (workplace / "outputs" / "a").symlink_to(workplace / "elsewhere")
    assert post_train(file, "--output-dir", "outputs", "--model-index", "0") == 1
    assert "outputs/a is a symbolic link" in capsys.readouterr().out
    assert not any((workplace / "elsewhere").iterdir())
    (workplace / "linked").symlink_to(workplace / "elsewhere")
    assert post_train(file, "--output-dir", "linked", "--model-index", "0") == 0


def test_an_interrupted_model_is_resumed(workplace, monkeypatch):
    file = save(tiny(training__num_epochs=2, training__save_total_limit=2, lora__lora_dropout=0.3), workplace)
    assert post_train(file, "--output-dir", "whole") == 0
    original = ReferenceTrainer.training_step

    def training_step(self, *arguments, **named):
        loss = original(self, *arguments, **named)
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceTrainer, "training_step", training_step)
        assert post_train(file) == 130
    folder = workplace / "outputs" / "a"
    assert (folder / "checkpoint-1").is_dir() and not (folder / "final").exists()
    assert post_train(file, "--set", "finetuning.resume_from_checkpoint=true") == 0
    assert files_of(folder) == files_of(workplace / "whole" / "a")
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


def test_another_error_of_a_model_is_reported_too(workplace, monkeypatch, capsys):
    def training_step(self, *arguments, **named):
        raise StoppedError("by the test")

    monkeypatch.setattr(ReferenceTrainer, "training_step", training_step)
    assert post_train(save(tiny(), workplace)) == 1
    assert "a: failed: StoppedError: by the test" in capsys.readouterr().out


def test_a_dry_run_shows_what_check_shows_and_trains_nothing(workplace, capsys):
    file = save(tiny(dataset__prompt_column="prompt", gpu__use_ddp=True), workplace)
    assert post_train(file, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "# a" in out and "10 pairs" in out and "torchrun" in out
    assert not (workplace / "outputs").exists()
    assert post_train(file, "--dry-run", "--set", "models.0.huggingface_id=EleutherAI/nowhere") == 2
    assert post_train(file, "--dry-run", "--set", "lora={target_modules: [nowhere]}") == 1
    assert "lora.target_modules: 'nowhere'" in capsys.readouterr().out


def test_the_best_model_is_the_final_one_and_training_stops_early(workplace):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/margins", "greater_is_better": False}
    blocks = tiny(
        finetuning={**best, "early_stopping_patience": 1}, training__num_epochs=3, training__learning_rate=0.1
    )
    assert post_train(save(blocks, workplace)) == 0
    folder = workplace / "outputs" / "a"
    scores = lines(folder / "val_split_metrics.jsonl")
    margins = [each["metrics"]["rewards/margins"] for each in scores]
    assert margins[-1] == pytest.approx(min(margins[1:]), abs=1e-6) and len(scores) < 8


# --- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("loss", [None, "sigmoid", "hinge", "ipo", "kto_pair"])
def test_method_and_loss_select_the_objective(method, loss, workplace):
    given = {key: value for key, value in (("method", method), ("loss_type", loss)) if value is not None}
    blocks = tiny(post_training={**given, "beta": 0.3})
    save(blocks, workplace)
    of_method = {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo"}[method or "dpo"]
    of_loss = {"hinge": "dpo", "ipo": "ipo", "kto_pair": "kto"}.get(loss or "")
    if of_loss is not None and of_method not in ("dpo", of_loss):
        with raises_at("post_training.loss_type"):
            parse_pipeline(blocks)
        return
    (run,) = parse_pipeline(blocks)[1]
    expected = of_loss if of_method == "dpo" and of_loss else of_method
    assert run.config.alg.id == expected
    assert run.config.alg.args["odds_ratio_weight" if expected == "orpo" else "beta"] == 0.3
    assert run.config.alg.args.get("loss", "sigmoid") == (loss if loss == "hinge" else "sigmoid")
    reported = [notice.path for notice in run.config.notices]
    assert ("post_training.loss_type" in reported) is (loss == "sigmoid" and method not in (None, "dpo"))


# --- keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Becomes:
    """A value of the file, and where it is in the config of the run, or what is seen there."""

    value: Any
    ours: str | Callable[[PreferenceConfig], Any]
    expected: Any = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    value: Any
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Reported:
    """A value that is ignored, which a notice reports."""

    value: Any
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """A key whose effect another test checks."""

    test: str


BEST = {"finetuning.load_best_model_at_end": True}
TABLE = {"dataset.name": "Anthropic/hh-rlhf"}
TRAINING = "alg.training_args"
RUNS = "test_the_published_files_run_unchanged"
KEYS: dict[str, list[Becomes | Refused | Reported | Elsewhere]] = {
    "models.name": [Elsewhere(RUNS), Refused("b/c"), Refused(".."), Refused(3)],
    "models.huggingface_id": [
        Becomes("meta-llama/Llama-3.2-1B-Instruct", "alg.model_name"),
        Becomes("meta-llama/Llama-3.2-1B-Instruct", "tokenizer.model_name"),
        Refused("EleutherAI/nowhere"),
    ],
    "models.trust_remote_code": [Refused(True)],
    "models.task_type": [Becomes("SEQ_2_SEQ_LM", "alg.model_type", "seq2seq"), Refused("SEQ_CLS")],
    "dataset.name": [Becomes("Anthropic/hh-rlhf", "datapool.args.dataset"), Refused("nothing.jsonl")],
    "dataset.split": [Becomes("test", "datapool.args.divided_split", others=TABLE), Reported("test")],
    "dataset.subset": [Becomes("small", "datapool.args.name", others=TABLE), Reported("small")],
    "dataset.prompt_column": [
        Becomes("question", "datapool.args.prompt_column", others=TABLE),
        Becomes("prompt", lambda config: config.datapool.args.get("prompt_column")),
    ],
    "dataset.chosen_column": [Becomes("rejected", "datapool.args.chosen_column")],
    "dataset.rejected_column": [Becomes("chosen", "datapool.args.rejected_column")],
    "dataset.max_samples": [Becomes(8, "datapool.args.max_rows"), Refused(0)],
    "dataset.validation_split": [Becomes(0.25, "datapool.args.split_ratios", [0.75, 0.25, 0.0]), Refused(1.0)],
    "dataset.chat_template": [Becomes(True, "tokenizer.chat_template")],
    "post_training.method": [Elsewhere("test_method_and_loss_select_the_objective"), Refused("ppo")],
    "post_training.loss_type": [Elsewhere("test_method_and_loss_select_the_objective"), Refused("robust")],
    "post_training.beta": [Becomes(0.5, "alg.args.beta"), Refused(0)],
    "post_training.label_smoothing": [
        Becomes(0.1, "alg.args.label_smoothing"),
        Refused(0.1, {"post_training.loss_type": "hinge"}),
        Refused(0.1, {"post_training.method": "ipo"}),
        Refused(0.5),
    ],
    "post_training.use_ref_model": [
        Refused(False),
        Reported(False, {"lora.target_modules": ["c_attn"]}),
        Reported(True, {"post_training.method": "orpo"}),
    ],
    "post_training.ref_model_id": [
        Becomes("EleutherAI/pythia-160m-deduped", "alg.args.reference_model"),
        Refused("EleutherAI/nowhere"),
        Refused("sshleifer/tiny-gpt2", {"post_training.method": "orpo"}),
    ],
    "lora.r": [Becomes(3, "alg.peft.r")],
    "lora.lora_alpha": [Becomes(3, "alg.peft.lora_alpha")],
    "lora.lora_dropout": [
        Becomes(0.3, "alg.peft.lora_dropout"),
        Becomes(0.3, "alg.args.dropout", "adapters"),
        Becomes(0.0, lambda config: config.alg.args.get("dropout")),
    ],
    "lora.bias": [Refused("all")],
    "lora.target_modules": [Becomes(["c_proj"], "alg.peft.target_modules"), Refused([])],
    "lora.task_type": [Becomes("SEQ_2_SEQ_LM", "alg.model_type", "seq2seq"), Refused("SEQ_CLS")],
    "lora.use_rslora": [Becomes(True, "alg.peft.use_rslora")],
    "lora.use_dora": [Becomes(True, "alg.peft.use_dora")],
    "training.output_dir": [Elsewhere(RUNS)],
    "training.num_epochs": [Becomes(0.5, f"{TRAINING}.num_train_epochs"), Refused(0)],
    "training.max_seq_length": [Becomes(20, "alg.args.max_response_length", 10), Refused(1)],
    "training.max_prompt_length": [Becomes(9, "tokenizer.max_length"), Reported(33), Reported("33"), Refused("long")],
    "training.max_completion_length": [
        Becomes(9, "alg.args.max_response_length"),
        Becomes(9, "alg.generation_kwargs.max_new_tokens"),
        Becomes(60, "tokenizer.max_length", 4),
        Reported(64),
    ],
    "training.save_steps": [Becomes(7, f"{TRAINING}.save_steps"), Becomes(7, f"{TRAINING}.save_strategy", "steps")],
    "training.eval_steps": [
        Becomes(7, f"{TRAINING}.eval_steps"),
        Reported(7, {"dataset.validation_split": 0.0}),
    ],
    "training.fp16": [Becomes(True, f"{TRAINING}.fp16")],
    **{
        f"training.{key}": [Becomes(value, f"{TRAINING}.{key}"), Refused("much")]
        for key, value in {
            "per_device_train_batch_size": 3,
            "per_device_eval_batch_size": 3,
            "gradient_accumulation_steps": 3,
            "learning_rate": 0.3,
            "warmup_steps": 3,
            "logging_steps": 3,
            "save_total_limit": 2,
            "bf16": True,
            "gradient_checkpointing": True,
            "weight_decay": 0.3,
            "max_grad_norm": 0.3,
        }.items()
    },
    "training.optim": [Becomes("sgd", f"{TRAINING}.optim")],
    "gpu.device_ids": [Elsewhere("test_gpus_are_selected_before_torch_is_used"), Reported([3]), Refused("all")],
    "gpu.use_ddp": [Elsewhere("test_a_dry_run_shows_what_check_shows_and_trains_nothing")],
    "finetuning.resume_from_checkpoint": [Elsewhere("test_an_interrupted_model_is_resumed"), Refused("outputs/a")],
    "finetuning.load_best_model_at_end": [
        Becomes(True, f"{TRAINING}.load_best_model_at_end"),
        Becomes(True, "alg.early_stopping_patience", 3),
        Refused(True, {"dataset.validation_split": 0.0}),
    ],
    "finetuning.metric_for_best_model": [
        Becomes("eval_rewards/margins", f"{TRAINING}.metric_for_best_model", others=BEST),
        Refused("eval_reward", BEST),
        Reported("eval_loss"),
    ],
    "finetuning.greater_is_better": [
        Becomes(True, f"{TRAINING}.greater_is_better", others=BEST),
        Reported(True),
    ],
    "finetuning.early_stopping_patience": [Becomes(2, "alg.early_stopping_patience", others=BEST), Reported(2)],
    "logging.report_to": [Elsewhere(RUNS), Refused(["mlflow"])],
    "logging.logging_dir": [Elsewhere(RUNS), Reported("logs")],
    "logging.log_level": [Elsewhere("test_a_quiet_run_prints_the_result_only"), Reported("debug"), Refused("loud")],
    "wandb.project_name": [Elsewhere("test_the_project_of_wandb_is_that_of_the_file"), Reported("mine")],
    "seed": [Becomes(3, "seed"), Becomes(3, "datapool.args.seed"), Refused(-1)],
}


def documented_rows(block: Any) -> list[str]:
    """Rows of the table of keys, as `table_rows` of the catalogue, with the name of the block before the key."""
    found = []
    for argument in signature_of(block).arguments:
        inner = [kind for kind in _kinds(argument.annotation) if dataclasses.is_dataclass(kind)]
        rows = table_rows(inner[0]) if inner else []
        found += [row.replace("| `", f"| `{argument.name}.", 1) for row in rows]
    return [*found, *(row for row in table_rows(block) if row.startswith("| `seed`"))]


def test_the_page_has_every_key_with_its_default(repository):
    page = (repository / "docs" / "preferences.md").read_text()
    assert [row for row in documented_rows(Pipeline) if row not in page] == []


def keys_of(block: Any) -> list[str]:
    found = []
    for argument in signature_of(block).arguments:
        inner = [kind for kind in _kinds(argument.annotation) if dataclasses.is_dataclass(kind)]
        found += [f"{argument.name}.{key}" for key in keys_of(inner[0])] if inner else [argument.name]
    return found


def _kinds(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(kind for each in inner for kind in _kinds(each))]


def test_every_key_has_a_row():
    assert set(keys_of(Pipeline)) == set(KEYS)
    named = [row.test for rows in KEYS.values() for row in rows if isinstance(row, Elsewhere)]
    assert all(callable(globals()[name]) for name in named)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_acts_or_is_refused_or_reported(key, workplace):
    for row in KEYS[key]:
        if isinstance(row, Elsewhere):
            continue
        blocks = tiny()
        save(blocks, workplace)
        for path, value in {**row.others, key: row.value}.items():
            block, _, name = path.partition(".")
            if block == "models":
                blocks["models"][0][name] = value
            elif name:
                blocks.setdefault(block, {})[name] = value
            else:
                blocks[block] = value
        where = key.replace("models.", "models.0.")
        if isinstance(row, Refused):
            with raises_at(where if row.value != ["mlflow"] else "logging.report_to", among_others=True):
                parse_pipeline(blocks)
            continue
        (run,) = parse_pipeline(blocks)[1]
        if isinstance(row, Reported):
            assert key in [notice.path for notice in run.config.notices]
        elif isinstance(row.ours, str):
            assert at(run.config.to_dict(), row.ours) == (row.value if row.expected is None else row.expected)
        else:
            assert row.ours(run.config) == row.expected


def test_adapters_have_dropout_and_the_model_has_none(workplace):
    save(tiny(), workplace)
    (run,) = parse_pipeline(tiny(lora__lora_dropout=0.3, lora__target_modules=["c_attn"]))[1]
    made = assemble_preferences(run.config)
    rates = {name: module.p for name, module in made.model.named_modules() if hasattr(module, "p")}
    assert {rate for name, rate in rates.items() if "lora_dropout" in name} == {0.3}
    assert {rate for name, rate in rates.items() if "lora_dropout" not in name} == {0.0}
    assert made.objective.needs_training_mode and made.generator is None


def test_gpus_are_selected_before_torch_is_used(workplace, monkeypatch):
    file = save(tiny(gpu__device_ids=[0, 2]), workplace)
    monkeypatch.delenv(VISIBLE)  # restored from the fixture's value
    assert post_train(file, "--dry-run") == 0
    assert os.environ[VISIBLE] == "0,2"


def test_a_quiet_run_prints_the_result_only(workplace, capsys):
    assert post_train(save(tiny(logging__log_level="error"), workplace)) == 0
    assert capsys.readouterr().out == f"# a\na: {workplace / 'outputs' / 'a' / 'final'}\n"


def test_the_project_of_wandb_is_that_of_the_file(workplace, monkeypatch):
    from rl4lms_like.tracking import services

    found = []
    monkeypatch.setattr(services.WandbSink, "open", lambda self, run: found.append((self._project, run.project)))
    blocks = tiny(logging__report_to=["wandb"], wandb__project_name="mine", training__max_grad_norm=0.5)
    assert post_train(save(blocks, workplace)) == 0
    assert found == [("mine", "outputs")]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors_of_a_run_name_the_keys_of_the_file(workplace, tiny_t5_dir, capsys):
    file = save(tiny(), workplace)
    assert post_train(file, "--set", f"models.0.huggingface_id={tiny_t5_dir}") == 1
    assert "models.0.task_type: " in (out := capsys.readouterr().out) and "write SEQ_2_SEQ_LM" in out
    texts = [
        [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": text}] for text in ("Yes.", "No.")
    ]
    written(workplace, [dict(zip(("chosen", "rejected"), texts, strict=True))] * 12)
    assert post_train(file) == 1
    assert "dataset.chat_template: " in capsys.readouterr().out


def test_all_errors_of_a_file_are_reported_with_its_paths(workplace, capsys):
    blocks = tiny(post_training={"method": "kto", "loss_type": "hinge"}, traning={}, seed=1)
    file = save(blocks, workplace)
    blocks["models"] += [copy.deepcopy(blocks["models"][0]), {"name": "c", "huggingface_id": "EleutherAI/nowhere"}]
    blocks["training"] |= {"learning_rate": "fast", "num_epoch": 3}
    blocks["lora"] = {"r": 0}
    paths = ["traning", "training.learning_rate", "training.num_epoch", "lora.r", "models.1.name"]
    with raises_at("models.2.huggingface_id", "post_training.loss_type", *paths):
        parse_pipeline(blocks)
    Path(file).write_text(dump_yaml(blocks))
    assert post_train(file) == 2
    assert not (workplace / "outputs").exists()
    with raises_at("models", "dataset.name"):
        parse_pipeline({"models": [], "dataset": {}})
    assert post_train(save(tiny(), workplace), "--model-index", "1") == 2


def test_settings_that_need_torch_are_checked_before_the_first_model(workplace, capsys):
    blocks = tiny(training__optim="none_such", finetuning={"load_best_model_at_end": True}, training__eval_steps=2)
    assert post_train(save(blocks, workplace)) == 2
    assert "training.optim" in capsys.readouterr().err
    assert not (workplace / "outputs").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_other_commands_name_this_one(command, workplace, capsys):
    file = save(tiny(), workplace)
    assert main([command, file]) == 2
    assert f"rl4lms-like post-train --config {file}" in capsys.readouterr().err
    with raises_at(""):
        load_config(file)
