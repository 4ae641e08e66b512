"""The model of a run's folder, for everything that uses a trained model: generation, evaluation, merging, sharing.

run                                model/, else best/, else the newest checkpoint that has a model
run/best                           itself
run/checkpoints/iteration_00020    itself
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig, PreferenceConfig, RunConfig, TokenizerConfig
from rl4lms_like.system.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.tracking.run_folder import FINISHED_FILE
from rl4lms_like.training.resuming.checkpoints import FOLDER, all_in
from rl4lms_like.training.resuming.resume import own_config

MODEL = "model"
"""Name of the folder of a finished run's model."""
BEST = "best"
"""Name of the folder of the best model of a run with `train_evaluation.keep_best`."""
BEST_FILE = "best.json"
"""File in it with the epoch and the score."""
HEAD = "head.safetensors"
"""File of a checkpoint with the output layer of a reward model, which is not part of its adapters."""


@dataclass(frozen=True)
class SavedModel:
    """Model that a run has saved."""

    run_folder: Path
    config: AnyConfig
    folder: Path  # of the model
    is_adapter: bool  # its folder has only adapters

    @property
    def name(self) -> str:
        """Path of the model's folder within the run's: `model`, `best` or `checkpoints/iteration_00020`."""
        return self.folder.relative_to(self.run_folder).as_posix()

    @property
    def is_reward_model(self) -> bool:
        """True for a model that has a head for a score in place of one for tokens."""
        return isinstance(self.config, PreferenceConfig) and self.config.alg.id == "reward_model"

    @property
    def reads_pictures(self) -> bool:
        """True for a vision-language model that was trained on prompts with pictures."""
        return self.config.reads_pictures

    @property
    def trusts_model_code(self) -> bool:
        """True if code that comes with the model is allowed to run."""
        return isinstance(self.config, RunConfig) and bool(self.config.alg.policy.args.get("trust_remote_code"))

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The run's `tokenizer` block for the tokenizer that was saved with the model."""
        return saved_with_model(self.config.tokenizer, str(self.folder))


def find_saved_model(folder: Path) -> SavedModel | None:
    """Return the model for the folder of a run or of one of its models; None if this is not the folder of a run.

    Raises:
        RL4LMsLikeError: the run has not saved a model.
    """
    if not folder.is_dir():
        return None
    folder = Path(os.path.abspath(folder))  # `.` has no parents

    # run/        run/best        run/checkpoints/iteration_00020
    for run_folder in (folder, folder.parent, folder.parent.parent):
        try:
            content = own_config(run_folder)
        except CheckpointError:
            continue

        # Any model's folder has a `config.json`, too: only that of a run has this block.
        if "train_evaluation" not in content:
            continue
        model = _model_of(run_folder) if folder == run_folder else folder
        if is_model(model):
            config = parse_config(content, source=str(run_folder / "config.json"), components=False)
            return SavedModel(run_folder, config, model, (model / "adapter_config.json").is_file())
    return None


def saved_with_model(config: TokenizerConfig, model: str) -> TokenizerConfig:
    """Return a run's `tokenizer` block for the tokenizer that was saved with its model."""
    # A chat template from a file was saved with the model, so that the file itself is no longer needed.
    return replace(config, model_name=model, chat_template=bool(config.chat_template))


def is_model(folder: Path) -> bool:
    """Return True if a folder has the config of a model or of an adapter."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _model_of(run_folder: Path) -> Path:
    """Return the folder of a run's model; without `model/`, that of its best or its newest model."""
    if is_model(run_folder / MODEL):
        return run_folder / MODEL

    saved = [run_folder / BEST, *reversed(all_in(run_folder / FOLDER))]
    model = next((model for model in saved if is_model(model)), None)
    if model is None:
        where = "neither in model/ nor in best/ or checkpoints/"
        why = "it ended before it saved one, or has train_evaluation.save_model: false"
        raise RL4LMsLikeError(f"the run {run_folder} has no model, {where}: {why}")

    # Not on standard output, which has the texts and scores.
    why = "has no folder model/" if (run_folder / FINISHED_FILE).exists() else "is not finished"
    print(f"the run {run_folder} {why}: using its model {model}", file=sys.stderr)
    return model
