"""Model card: the `README.md` beside a saved model, made from the run's folder.

    run folder ──read_run──► RunRecord ──► front matter, facts, metrics, samples ──model_card.md.j2──► README.md

The card has no times, speeds or paths, so that equal runs have equal cards: `training.shared_config` leaves of a path
its name. Texts of models are in code blocks, in which they are not markup.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.system.wording import printable
from rl4lms_like.tracking.record import RunRecord, number, read_predictions, read_run, written_by_a_run
from rl4lms_like.tracking.run_folder import ENVIRONMENT_FILE, write_whole
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.training.saved_model import BEST, BEST_FILE, MODEL, SavedModel, find_saved_model
from rl4lms_like.training.shared_config import is_local, is_on_hub, local_name, shared_config

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PretrainedConfig

FILE = "README.md"
REPOSITORY = "FOLDER_OR_REPOSITORY"
"""Name of the model in the card's code, which `push` replaces by that of the repository."""

N_SAMPLES = 3
"""Number of prompts in the card."""

LONGEST_TEXT = 1000
"""Number of characters of a prompt or response in the card."""

_NUMBER_OF_CHECKPOINT = re.compile(r"\d+$")
_SAMPLES_SECTION = re.compile(r"^## Samples[ \t]*\r?$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluations:
    """Scores of a split, before training and of the model."""

    split: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]  # key of the metric, its score for each column


@dataclass(frozen=True)
class CardSample:
    """A prompt and its responses, as code blocks."""

    prompt: str
    responses: Sequence[tuple[str, str]]  # name of the column, response


@dataclass(frozen=True)
class CardSamples:
    """Samples of a split."""

    split: str
    samples: Sequence[CardSample]


def write_model_card(run_folder: Path) -> None:
    """Write the card of a run's final model; a failure is only logged, since the run itself has succeeded."""
    try:
        saved = find_saved_model(run_folder / MODEL)
        if saved is not None:
            write_whole(saved.folder / FILE, model_card(saved))
    except Exception as error:
        logger.warning("the model card could not be written: %s", error)


def model_card(saved: SavedModel) -> str:
    """Return the card of a model that a run has saved, whether the run is finished or not.

    Raises:
        RL4LMsLikeError: a file of the run folder was not written by a run.
    """
    import yaml

    run = read_run(saved.run_folder)
    epoch = _epoch_of(saved, run)
    unit = "iterations" if isinstance(saved.config, RunConfig) else "epochs"
    config, supplied = shared_config(run.config)
    text: str = _template().render(
        front_matter=yaml.safe_dump(_front_matter(saved), sort_keys=False, allow_unicode=True).strip(),
        title=f"{_short_name(_base_model(saved))} trained with {_algorithm(saved)}",
        summary=_summary(saved),
        facts=_facts(saved, run),
        usage=_usage(saved),
        evaluations=_evaluations(run, epoch, unit),
        samples=_samples(run, epoch, unit),
        versions=_versions(saved.run_folder),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100).strip(),
        has_local_paths=config != run.config,
        supplied=[_code(name) for name in supplied],
        is_masked=(saved.folder / "mask_model").is_dir(),
    )
    return text


def written_card(folder: Path) -> str | None:
    """Return the card in a model's folder, which users may have edited; None if there is none.

    Raises:
        RL4LMsLikeError: the file is not UTF-8.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RL4LMsLikeError(f"{file} is not UTF-8 ({error}): save it as UTF-8, or remove it") from error


def shows_samples(card: str) -> bool:
    """Return True if a card shows prompts and responses."""
    return _SAMPLES_SECTION.search(card) is not None


def without_samples(card: str) -> str:
    """Return a card without its prompts and responses, which are indented: the next heading ends their section."""
    return _SAMPLES_SECTION.sub("", card)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    # Not HTML: what could be markup of Markdown is escaped or in a code block.
    loader = PackageLoader("rl4lms_like", "training")
    environment = Environment(
        loader=loader, autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("model_card.md.j2")


# --- what the model is ------------------------------------------------------------------------------------------------


def _base_model(saved: SavedModel) -> str:
    config = saved.config
    return str(config.alg.policy.args["model_name"] if isinstance(config, RunConfig) else config.alg.model_name)


def _is_seq2seq(saved: SavedModel) -> bool:
    config = saved.config
    if isinstance(config, RunConfig):
        return "seq2seq" in config.alg.policy.id
    return config.alg.model_type == "seq2seq"


def _short_name(name: str) -> str:
    """Return the name of a model or dataset; of a local folder, only its last part."""
    return local_name(name) if is_local(name) else name


def _algorithm(saved: SavedModel) -> str:
    """Return the id of the algorithm, which may be the import path of a user's class."""
    return str(shared_config({"id": saved.config.alg.id})[0]["id"])


def _front_matter(saved: SavedModel) -> dict[str, Any]:
    """Return the metadata that the hub reads, as in `huggingface_hub.ModelCardData`."""
    metadata: dict[str, Any] = {"library_name": "peft" if saved.is_adapter else "transformers"}

    # Names of local folders would be taken for models of the hub, which are others.
    base_model = _base_model(saved)
    if is_on_hub(base_model):
        metadata["base_model"] = base_model
        metadata["base_model_relation"] = "adapter" if saved.is_adapter else "finetune"
    dataset = saved.config.datapool.args.get("path")
    if saved.config.datapool.id == "hf_dataset" and isinstance(dataset, str) and "/" in dataset and is_on_hub(dataset):
        metadata["datasets"] = [dataset]

    if saved.is_reward_model:
        metadata["pipeline_tag"] = "text-classification"
    elif saved.reads_pictures:
        metadata["pipeline_tag"] = "image-text-to-text"
    elif not _is_seq2seq(saved):
        metadata["pipeline_tag"] = "text-generation"
    kind = "reinforcement-learning" if isinstance(saved.config, RunConfig) else "fine-tuning"
    metadata["tags"] = ["rl4lms-like", kind, _algorithm(saved)]
    return metadata


def _summary(saved: SavedModel) -> str:
    base_model = _short_name(_base_model(saved))
    text = f"A model trained from `{base_model}` with rl4lms-like."
    if saved.is_adapter:
        text = f"A LoRA adapter of `{base_model}`, trained with rl4lms-like. It is loaded together with its base model."
    if saved.name == BEST:
        text += " It is the best model of its run on the split `val`."
    elif saved.name != MODEL:
        text += f" It is not the final model of its run but `{saved.name}`."
    return text


def _facts(saved: SavedModel, run: RunRecord) -> list[tuple[str, str]]:
    """Return what the model was trained on, and how, as (name, value)."""
    config = saved.config
    base_model = _base_model(saved)
    origin = " (a local folder)" if is_local(base_model) else ""
    facts = [("Base model", _code(_short_name(base_model)) + origin)]
    facts.append(("Data", _component(config.datapool.id, config.datapool.args)))
    facts.append(("Algorithm", _component(config.alg.id, getattr(config.alg, "args", {}))))
    if isinstance(config, RunConfig):
        facts.append(("Reward", _component(config.reward_fn.id, config.reward_fn.args)))

    if run.iterations:
        last = run.iterations[-1]
        unit = "iterations" if isinstance(config, RunConfig) else "steps"
        length = f"{last['iteration']} {unit}"
        if n_tokens := number(last.get("timesteps")):
            length += f", {n_tokens:,.0f} tokens"
        facts.append(("Training" if saved.name == MODEL else "Training of the whole run", length))
    facts.append(("Seed", str(config.seed)))
    return facts


def _component(id: str, args: Mapping[str, Any]) -> str:
    """Return the id of a component and its arguments, for a cell of a table."""
    block, _ = shared_config({"id": id, "args": args})
    if not args:
        return _code(block["id"])
    arguments = json.dumps(block["args"], ensure_ascii=False, default=str)
    return f"{_code(block['id'])} {_code(arguments)}"


def _code(text: str) -> str:
    """Return a text as inline code that can stand in a table's cell."""
    line = printable(" ".join(text.split())).replace("|", "\\|")
    fence = _fence(line, shortest=1)
    space = " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def _fence(text: str, *, shortest: int) -> str:
    """Return a row of backticks that is longer than all rows in the text."""
    rows = re.findall("`+", text)
    return "`" * max([shortest, *(len(row) + 1 for row in rows)])


def _usage(saved: SavedModel) -> str:
    """Return Python code that loads the model and generates, with the arguments of the run's rollouts."""
    auto_class = "AutoModelForSeq2SeqLM" if _is_seq2seq(saved) else "AutoModelForCausalLM"
    if saved.is_reward_model:
        auto_class = "AutoModelForSequenceClassification"
    if saved.reads_pictures and saved.is_reward_model:
        return _usage_of_image_rewards()
    if saved.reads_pictures:
        return _usage_with_image(saved)
    lines = [f"from transformers import {auto_class}, AutoTokenizer"]
    tokenizer_code = ", trust_remote_code=True" if saved.config.tokenizer.trust_remote_code else ""
    model_code = ", trust_remote_code=True" if saved.trusts_model_code else ""

    # PEFT loads the base model first. Its class for a folder with an adapter has the same name, with its prefix.
    loader = auto_class
    if saved.is_adapter:
        loader = auto_class.replace("Auto", "AutoPeft", 1)
        lines = [f"from peft import {loader}", "from transformers import AutoTokenizer"]
    name = json.dumps(REPOSITORY)
    lines += ["", f"tokenizer = AutoTokenizer.from_pretrained({name}{tokenizer_code})"]
    lines += [f"model = {loader}.from_pretrained({name}{model_code})"]

    if saved.is_reward_model:
        lines += ['inputs = tokenizer("prompt and response", return_tensors="pt")']
        return "\n".join([*lines, "print(model(**inputs).logits)"])

    # A model that was trained on chats expects the turns of its template around each prompt.
    tokenizer_config = saved.config.tokenizer
    if tokenizer_config.chat_template:
        messages = [{"role": "user", "content": "your prompt"}]
        if tokenizer_config.system_prompt:
            messages.insert(0, {"role": "system", "content": tokenizer_config.system_prompt})
        lines += [f"messages = {messages!r}"]
        lines += ["inputs = tokenizer.apply_chat_template("]
        lines += ['    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"', ")"]
    else:
        lines += ['inputs = tokenizer("your prompt", return_tensors="pt")']

    arguments = ""
    generation_kwargs = _generation_kwargs(saved)
    for key, value in generation_kwargs.items():
        arguments += f", {key}={value!r}"
    if STOP_STRINGS in generation_kwargs:  # transformers finds them in the text
        arguments += ", tokenizer=tokenizer"
    lines += [f"output = model.generate(**inputs{arguments})"]
    start = "" if _is_seq2seq(saved) else '[inputs["input_ids"].shape[1] :]'
    return "\n".join([*lines, f"print(tokenizer.decode(output[0]{start}, skip_special_tokens=True))"])


def _usage_of_image_rewards() -> str:
    """Return Python code that computes a reward; transformers has no class for these models."""
    lines = ["from huggingface_hub import snapshot_download", "from rl4lms_like import Picture, Sample"]
    lines += ["from rl4lms_like.core.generated import Generated", "from rl4lms_like.rewards.learned import RewardModel"]
    lines += ["from rl4lms_like.scoring.score import Texts", ""]
    lines += [f"reward = RewardModel(snapshot_download({json.dumps(REPOSITORY)}))"]
    lines += ['sample = Sample("0", "<image>your prompt", images=(Picture.of("photo.png"),))']
    lines += ['print(reward.per_text(Texts.of([Generated(sample, "a response")])))']
    return "\n".join(lines)


def _usage_with_image(saved: SavedModel) -> str:
    """Return Python code that loads a vision-language model and generates."""
    from rl4lms_like.core.picture_encoder import place_in_text

    name = json.dumps(REPOSITORY)
    lines = ["from PIL import Image", "from transformers import AutoModelForImageTextToText, AutoProcessor", ""]
    lines += [f"processor = AutoProcessor.from_pretrained({name})"]
    lines += [f"model = AutoModelForImageTextToText.from_pretrained({name})"]
    lines += ['image = Image.open("photo.png").convert("RGB")']
    if saved.config.tokenizer.chat_template:
        content = [{"type": "image"}, {"type": "text", "text": "your prompt"}]
        lines += [f"messages = {[{'role': 'user', 'content': content}]!r}"]
        lines += ["prompt = processor.apply_chat_template(messages, add_generation_prompt=True)"]
    else:
        place = place_in_text(*_processor_and_config(saved))
        lines += [f"prompt = {json.dumps(place + 'your prompt')}"]
    lines += ['inputs = processor(text=[prompt], images=[[image]], return_tensors="pt")']
    arguments = "".join(f", {key}={value!r}" for key, value in _generation_kwargs(saved).items())
    lines += [f"output = model.generate(**inputs{arguments})"]
    start = '[inputs["input_ids"].shape[1] :]'
    return "\n".join([*lines, f"print(processor.decode(output[0]{start}, skip_special_tokens=True))"])


def _processor_and_config(saved: SavedModel) -> tuple[Any, PretrainedConfig]:
    """Return the processor of a vision-language model, which was saved with it, and the config of the model."""
    from rl4lms_like.core.processors import load_processor
    from rl4lms_like.policies.loading import load_model_config

    model_config = load_model_config(str(saved.folder))
    return load_processor(str(saved.folder), model_config, local_files_only=True), model_config


def _generation_kwargs(saved: SavedModel) -> dict[str, Any]:
    config = saved.config
    if isinstance(config, RunConfig):
        return dict(config.alg.policy.args.get("generation_kwargs") or {})
    return dict(config.alg.generation_kwargs or {})


# --- what it does -----------------------------------------------------------------------------------------------------


def _epoch_of(saved: SavedModel, run: RunRecord) -> float:
    """Return the epoch of a model, as in the files of evaluations; infinity for the final model."""
    if saved.name == MODEL:
        return float("inf")
    if saved.name == BEST:
        with written_by_a_run(saved.folder / BEST_FILE):
            return float(read_json(saved.folder / BEST_FILE)["epoch"])

    # Checkpoints are named by completed iterations, which are the epochs of an RL run, or by optimizer steps.
    match = _NUMBER_OF_CHECKPOINT.search(saved.folder.name)
    completed = int(match[0]) if match else 0
    if isinstance(saved.config, RunConfig):
        return float(completed)
    epoch = 0.0
    for line in run.iterations:
        if line["iteration"] <= completed:
            passes = [number(value) for key, value in line.items() if key.endswith("/epoch")]
            epoch = max([epoch, *(value for value in passes if value is not None)])
    return epoch


def _before_and_after(epochs: Sequence[Epoch], epoch: float) -> list[Epoch]:
    """Return the first evaluation's epoch, and that of the last one up to the model's epoch if it is another."""
    until_model = [evaluated for evaluated in epochs if evaluated <= epoch]
    return list(dict.fromkeys([*until_model[:1], *until_model[-1:]]))


def _column(epoch: Epoch, unit: str) -> str:
    return "before training" if epoch == 0 else f"after {epoch} {unit.removesuffix('s') if epoch == 1 else unit}"


def _evaluations(run: RunRecord, epoch: float, unit: str) -> list[Evaluations]:
    evaluations = []
    for split, scores_by_epoch in run.evaluations.items():
        epochs = _before_and_after(list(scores_by_epoch), epoch)
        keys: dict[str, None] = {}
        for evaluated in epochs:
            keys |= dict.fromkeys(scores_by_epoch[evaluated])

        rows = []
        for key in keys:
            scores = [_score(scores_by_epoch[evaluated].get(key)) for evaluated in epochs]
            rows.append((_code(key), scores))
        if rows:
            evaluations.append(Evaluations(split, [_column(evaluated, unit) for evaluated in epochs], rows))
    return evaluations


def _score(value: Any) -> str:
    finite = number(value)
    return "n/a" if finite is None else f"{finite:.4g}"


def _samples(run: RunRecord, epoch: float, unit: str) -> CardSamples | None:
    """Return the first prompts of a split that has texts, with their responses before training and of the model."""
    # `test` if it was evaluated with this model; it is not in the midst of a run.
    split = "test"
    epochs: list[Epoch] = []
    for candidate in ("test", "val"):
        epochs_of_candidate = _before_and_after(list(run.predictions.get(candidate, {})), epoch)
        if len(epochs_of_candidate) > len(epochs):
            split = candidate
            epochs = epochs_of_candidate
    if not epochs:
        return None

    # The same samples in the same order at every evaluation.
    rows_by_epoch = []
    for evaluated in epochs:
        rows_by_epoch.append((evaluated, read_predictions(run.predictions[split][evaluated])[:N_SAMPLES]))
    samples = []
    for i, row in enumerate(rows_by_epoch[0][1]):
        responses = []
        for evaluated, rows in rows_by_epoch:
            if i < len(rows):
                responses.append((_column(evaluated, unit), _code_block(rows[i].get("generated_text"))))
        samples.append(CardSample(_code_block(row.get("prompt_text")), responses))
    return CardSamples(split, samples)


def _code_block(text: Any) -> str:
    """Return a text as a code block within an item of a list."""
    text = printable(str(text or ""))
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ..."
    fence = _fence(text, shortest=3)
    lines = [f"{fence}text", *text.split("\n"), fence]
    return "\n".join(f"   {line}" for line in lines)


def _versions(run_folder: Path) -> str:
    """Return the versions of Python and of packages with which the run ended; empty if they are not known."""
    try:
        entry = read_json(run_folder / ENVIRONMENT_FILE)[-1]
        versions = {"Python": entry["python"], **entry["packages"]}
    except (OSError, ValueError, LookupError, TypeError, RL4LMsLikeError):
        return ""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
