"""Give the model of a run to others: `rl4lms-like merge` and `rl4lms-like push`.

    merge   run ─ model, with its adapters merged ─> folder with whole weights, tokenizer, model card
    push    run ─ files of its model, model card ──> repository of the Hugging Face Hub

Both use the model that `generate` uses, also of a run that was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.system.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.tracking.record import written_by_a_run
from rl4lms_like.training.model_card import FILE as CARD
from rl4lms_like.training.model_card import REPOSITORY, model_card, shows_samples, without_samples, written_card
from rl4lms_like.training.saved_model import HEAD, MODEL, SavedModel, find_saved_model, is_model
from rl4lms_like.training.shared_config import is_on_hub

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_DIGITS = "[0-9]" * 5
WEIGHT_FILES = (
    "model.safetensors",
    f"model-{_DIGITS}-of-{_DIGITS}.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
CONFIG_FILES = ("config.json", "adapter_config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "spm_char.model",
    "tiktoken.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files that `push` uploads, besides the card. No other file is uploaded, whatever else a folder contains: training
states, optimizers, data and predictions have other names."""


@dataclass(frozen=True)
class PushedModel:
    """Result of `push_run`."""

    repo_id: str  # with the name of the account
    url: str
    is_private: bool
    model: Path  # folder whose files were uploaded
    files: list[str]  # in the repository
    left_out: list[str]  # other files of the folder


def merge_run(run: str | Path, out: str | Path, *, trust_remote_code: bool = False, has_samples: bool = True) -> Path:
    """Write a run's model with whole weights in float32, for transformers without PEFT.

    Args:
        run: folder of a run, or of one of its models.
        out: folder to create.
        trust_remote_code: allow code that comes with the model to run, if the config in the run's folder requests it.
        has_samples: False leaves the prompts and responses out of the card, as does a card of the run without them.

    Returns:
        The folder of the model that was merged.

    Raises:
        ConfigError: `out` exists; or the config in the run's folder requests code to run that is not trusted.
        RL4LMsLikeError: it is not a run, the run has no model, its card is not UTF-8, or `out` cannot be written.
    """
    from rl4lms_like.core.processors import load_processor, save_processor
    from rl4lms_like.policies.loading import save_language_model
    from rl4lms_like.run import silence_libraries
    from rl4lms_like.system.disk import saving
    from rl4lms_like.system.import_paths import refuse_unless_trusted
    from rl4lms_like.tracking.run_folder import write_whole
    from rl4lms_like.training.inputs import build_tokenizer, chat_template_of, end_tokens, load_generation_config
    from rl4lms_like.training.resuming.checkpoints import write_folder

    # Before anything is loaded. An existing folder may be a run's, or a model that is not to be overwritten.
    silence_libraries()
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise ConfigError([ConfigIssue("OUT", f"{out} exists already; name a new folder")], "the command line")
    saved = find_saved_model(Path(run))
    if saved is None:
        raise RL4LMsLikeError(f"{run} is not the folder of a run (config.json and model/) or of one of its models")
    refuse_unless_trusted(saved.config.to_dict(), trust_remote_code, f"the config of {run}", ("tokenizer", "alg"))

    card = _new_card(replace(saved, is_adapter=False), has_samples=has_samples)

    # The tokenizer that was saved with the model, as the run's config sets it up.
    folder = str(saved.folder)
    tokenizer_config = saved.tokenizer_config
    tokenizer = build_tokenizer(tokenizer_config)
    model, dropout_rates = _load_whole(saved)
    template = chat_template_of(tokenizer_config, tokenizer)
    eos_token_ids = end_tokens(tokenizer, model.config, load_generation_config(folder), template)

    def write(partial: Path) -> None:
        save_language_model(model, partial, tokenizer, checkpoint_dropout=dropout_rates, eos_token_ids=eos_token_ids)
        if saved.reads_pictures:
            save_processor(load_processor(folder, model.config), partial, tokenizer)
        write_whole(partial / CARD, card)

    with saving(f"the merged model to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_folder(out, write)
    return saved.folder


def _load_whole(saved: SavedModel) -> tuple[Any, dict[str, float]]:
    """Load a saved model with its adapters merged; return it and the dropout rates of its checkpoint."""
    from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

    from rl4lms_like.core.vision_rewards import AutoVisionRewardModel
    from rl4lms_like.offline.assemble_supervised import head_modules, load_head
    from rl4lms_like.policies.loading import auto_class_of, load_model, load_model_config
    from rl4lms_like.scoring.classifier import RECORDED
    from rl4lms_like.scoring.vision_rewards import RECORD

    folder = str(saved.folder)
    if not saved.is_reward_model:
        trusts_code = saved.trusts_model_code
        model_config = load_model_config(folder, trust_remote_code=trusts_code)
        auto_class = AutoModelForImageTextToText if saved.reads_pictures else auto_class_of(model_config)
        return load_model(auto_class, folder, trust_remote_code=trusts_code)

    # A checkpoint with adapters has the output layer of a reward model in a file of its own.
    head = saved.folder / HEAD
    unused = head_modules if head.is_file() else None
    auto_class = AutoVisionRewardModel if saved.reads_pictures else AutoModelForSequenceClassification
    model, dropout_rates = load_model(auto_class, folder, unused=unused, n_labels=1)
    if head.is_file():
        load_head(model, head)

    # A checkpoint with adapters has the config of their base.
    alg: Any = saved.config.alg
    setattr(model.config, RECORDED, alg.arguments.append_eos)
    if saved.reads_pictures:
        setattr(model.config, RECORD, {"max_pixels": alg.max_pixels})
    return model, dropout_rates


def push_run(run: str | Path, repo: str, *, is_public: bool = False, has_samples: bool = True) -> PushedModel:
    """Upload a run's model and its card to a repository of the Hugging Face Hub, in one commit.

    The token is that of the environment (`HF_TOKEN`) or of `hf auth login`. Files of an earlier model in the repository
    that this one does not have are deleted.

    Args:
        run: folder of a run, of one of its models, or one that `merge_run` wrote.
        repo: `account/name`, or `name` in the account of the token; created if it does not exist.
        is_public: create a public repository; otherwise a private one, and an existing one must be private.
        has_samples: False leaves the prompts and responses out of the card.

    Raises:
        RL4LMsLikeError: there is no model or no token, the model is an adapter of a local one, the card is not UTF-8,
            the repository is public, or the hub refused.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    saved, folder = _model_to_push(Path(run))
    files, left_out = _files_to_push(folder)
    card = _card(saved, folder, has_samples=has_samples)
    if get_token() is None:
        raise RL4LMsLikeError("there is no token for the Hugging Face Hub: set HF_TOKEN, or run `hf auth login`")

    # Whatever these calls raise (a name that is not valid, no network, no permission) is of the hub.
    api = HfApi(library_name="rl4lms-like")
    try:
        repo_id = api.create_repo(repo, private=not is_public, exist_ok=True).repo_id
        info = api.model_info(repo_id)
    except Exception as error:
        raise RL4LMsLikeError(f"cannot push to {repo}: {error}") from error
    if not is_public and not info.private:
        raise RL4LMsLikeError(f"the repository {repo_id} is public: add --public to upload the model to it")

    operations: list[Any] = [CommitOperationAdd(name, folder / name) for name in files]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.replace(REPOSITORY, repo_id).encode()))
        files = [*files, CARD]
    operations += [CommitOperationDelete(name) for name in _files_of_earlier_model(info) if name not in files]
    try:
        api.create_commit(repo_id, operations, commit_message="Upload the model of an rl4lms-like run")
    except Exception as error:
        raise RL4LMsLikeError(f"cannot push to {repo_id}: {error}") from error

    return PushedModel(
        repo_id=repo_id,
        url=f"{api.endpoint}/{repo_id}",
        is_private=bool(info.private),
        model=folder,
        files=files,
        left_out=left_out,
    )


def _model_to_push(run: Path) -> tuple[SavedModel | None, Path]:
    """Return the model of a run, None if it is not of a run, and the folder to push.

    Raises:
        RL4LMsLikeError: there is no model, or others could not load its adapter.
    """
    saved = find_saved_model(run)
    folder = run if saved is None else saved.folder
    has_weights = any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)
    if not is_model(folder) or not has_weights:
        raise RL4LMsLikeError(f"{run} is neither the folder of a run nor of a model")
    if (folder / HEAD).is_file():
        raise RL4LMsLikeError(
            f"the output layer of the reward model {folder} is not part of its adapters: write whole weights with "
            f"`rl4lms-like merge`, and push those"
        )
    _refuse_local_base(folder)
    return saved, folder


def _card(saved: SavedModel | None, folder: Path, *, has_samples: bool) -> str | None:
    """Return the card in a folder, which users may have edited, else a new one; None if there is no run to describe."""
    card = written_card(folder)
    if card is not None:
        return card if has_samples else without_samples(card)
    return None if saved is None else _new_card(saved, has_samples=has_samples)


def _new_card(saved: SavedModel, *, has_samples: bool) -> str:
    """Return the card of a model, without samples if the user has removed them from a card of the run."""
    cards = [written_card(folder) for folder in (saved.folder, saved.run_folder / MODEL)]
    if not all(shows_samples(card) for card in cards if card is not None):
        has_samples = False
    card = model_card(saved)
    return card if has_samples else without_samples(card)


def _files_to_push(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of a folder's files to upload and of those that are left out, both without the card.

    Raises:
        RL4LMsLikeError: a file to upload is a link, which could lead to any file of this machine.
    """
    files: list[str] = []
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_pushed = name == CARD or _is_of_a_model(name)
        if is_pushed and path.is_symlink():
            raise RL4LMsLikeError(f"{path} is a symbolic link and will not be uploaded; replace it with a copy")
        if path.is_dir() or name == CARD:
            continue
        (files if is_pushed else left_out).append(name)
    return files, left_out


def _is_of_a_model(name: str) -> bool:
    # `*` would also stand for slashes.
    patterns = (*WEIGHT_FILES, *CONFIG_FILES, *TOKENIZER_FILES)
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _files_of_earlier_model(info: ModelInfo) -> list[str]:
    """Return the model files in a repository: an adapter next to whole weights would be loaded on top of them."""
    return [file.rfilename for file in info.siblings or () if _is_of_a_model(file.rfilename)]


def _refuse_local_base(folder: Path) -> None:
    """Raise for an adapter whose base model is on this machine: others could not load it, but would read its path."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    with written_by_a_run(file):
        base = str(read_json(file)["base_model_name_or_path"])

    if not is_on_hub(base):
        raise RL4LMsLikeError(
            f"the adapter's base model is {base}, a folder that others do not have: push the output of "
            f"`rl4lms-like merge`, or set base_model_name_or_path in {file} to a model of the hub"
        )
