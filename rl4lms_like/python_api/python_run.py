"""One class for a run in Python.

    run = Run("gpt2", prompts, reward, algorithm="grpo", n_iters=50)
    run.check(); run.train(); run.evaluate(); run.generate("..."); run.save("tuned"); run.report

It has the config that a YAML file would have, and a folder. Nothing that was loaded for training stays in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.config.run_config import AnyConfig, PreferenceConfig, RunConfig
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.python_api.argument_names import SOURCE, ArgumentNames
from rl4lms_like.python_api.changes import WHOLE, Changes
from rl4lms_like.python_api.generators import kept_generators
from rl4lms_like.python_api.given import argument_error, check_generation, is_conversation, metric_list
from rl4lms_like.python_api.main_guard import unguarded_script
from rl4lms_like.python_api.short_errors import with_short_errors
from rl4lms_like.python_api.shown import Report, table_html
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.ranks import is_main_process
from rl4lms_like.system.secrets import masked
from rl4lms_like.system.wording import excerpt
from rl4lms_like.tracking.run_folder import CONFIG_FILE, FINISHED_FILE, experiment_folder, is_untrained, to_json

if TYPE_CHECKING:
    from rl4lms_like.training.evaluation import Responder

DEFAULT_FOLDER = "rl4lm_exps/rl4lm_experiment"

FUNCTIONS = ("reward_fn", "train_evaluation.metrics", "train_evaluation.callbacks", "env.dialogue.args")
"""Paths in a config whose values may be functions or objects."""

COMMAND = "; to change it"
"""Beginning of what a refusal says about the command line."""

REWARD = "rollout_info/ep_rew"
"""Key of the mean reward in the history."""


class Run:
    """A training run: before, during and after its training.

    Args:
        model: name or folder of a model, or a loaded `PreTrainedModel`, then with `tokenizer`.
        prompts: what rollouts begin with: a list of texts, of conversations (lists of messages) or of dictionaries; a
            `datasets.Dataset`, a `DataFrame`, a `TextGenPool` or a file of rows (JSON Lines, JSON, CSV, parquet); a
            dictionary of these by split; or the id of a data pool.
        reward: a function, a list of functions, a `RewardFunction`, or the id of a reward. With `dialogue`, prompts and
            reward may be left out.
        algorithm: an id, `grpo` or `ppo` ... With `dpo` and other objectives a run learns from preferences, with `sft`
            from texts; both are given as `data`.
        data: rows of preferences or of texts, in the same forms as `prompts`.
        eval_prompts: prompts of evaluations (the split `val`).
        eval_data: the same for runs that learn from `data`.
        tokenizer: name, folder or loaded; default: that of the model.
        metrics: functions, metrics or ids, which evaluations compute.
        folder: folder of the run. If it holds another run or a finished one, `<folder>_2` is used.
        config: a config, or the blocks of a file, in place of all arguments but `folder`.
        settings: further settings by their names, or blocks of a file as dictionaries; `reward_weights` with a list of
            rewards.

    Attributes:
        config: the config of the run, as from a file.
        folder: the folder of the run; None before its training.

    Raises:
        ConfigError: lists all errors in the arguments.
    """

    @with_short_errors
    def __init__(
        self,
        model: Any = None,
        prompts: Any = None,
        reward: Any = None,
        *,
        algorithm: str = "grpo",
        data: Any = None,
        eval_prompts: Any = None,
        eval_data: Any = None,
        tokenizer: Any = None,
        metrics: Any = None,
        folder: str | Path = DEFAULT_FOLDER,
        config: AnyConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise argument_error("folder", f"expected the path of a folder, got {excerpt(folder)}")
        self.folder: Path | None = None
        self._chosen_folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self._names = ArgumentNames()
        self._is_trusted = True  # the caller's own config, in contrast to one in a folder
        self._responder: Responder | None = None

        if config is None:
            # Loads transformers, which a config from a file does not need.
            from rl4lms_like.python_api.arguments import config_of

            self.config, self._names, _ = config_of(
                model=model,
                prompts=prompts,
                reward=reward,
                algorithm=algorithm,
                data=data,
                eval_prompts=eval_prompts,
                eval_data=eval_data,
                tokenizer=tokenizer,
                metrics=metrics,
                settings=settings,
            )
            return
        others = [model, prompts, reward, data, eval_prompts, eval_data, tokenizer, metrics]
        if settings or any(value is not None for value in others):
            raise argument_error(
                "config", "has all settings of a run; remove the other arguments, or change the config"
            )
        if not isinstance(config, Mapping | AnyConfig):
            hint = f"; a file is read by Run.from_file({config!r})" if isinstance(config, str | os.PathLike) else ""
            raise argument_error("config", f"expected a config or the blocks of a file, got {excerpt(config)}{hint}")
        self.config = parse_config(config, data=True) if isinstance(config, Mapping) else config

    # --- other ways to a run ------------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = (), *, folder: str | Path = DEFAULT_FOLDER) -> Run:
        """Return the run that a YAML file describes.

        Args:
            path: the file.
            overrides: `train_evaluation.n_iters=200`, applied in order.
            folder: folder of the run.

        Raises:
            ConfigError: lists all errors in the file and the overrides.
        """
        return cls(config=load_config(path, overrides), folder=folder)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        reward: Any = None,
        metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        dialogue: Any = None,
        trust_remote_code: bool = False,
    ) -> Run:
        """Return the run in a folder, to continue it, or to evaluate and generate with its model.

        Args:
            folder: folder of the run.
            reward: the reward of the run, if it is a function or an object, which a folder cannot have.
            metrics: the metrics of the run, likewise.
            callbacks: the callbacks of the run, likewise.
            dialogue: the environment of the run, likewise: an object, or a class that needs no arguments.
            trust_remote_code: allow code that comes with models to run, if the config in the folder requests it.

        Raises:
            CheckpointError: this is not the folder of a run.
            ConfigError: the config in the folder has errors.
        """
        from rl4lms_like.training.resuming.resume import own_config

        run_folder = Path(os.path.abspath(os.path.expanduser(folder)))
        blocks = own_config(run_folder)
        if reward is not None:
            blocks["reward_fn"] = reward
        if metrics is not None:
            blocks["train_evaluation"]["metrics"] = metric_list(metrics)
        if callbacks is not None:
            blocks["train_evaluation"]["callbacks"] = list(callbacks)
        if dialogue is not None:
            blocks["env"]["dialogue"] = {**(blocks["env"].get("dialogue") or {}), "id": dialogue, "args": {}}

        run = cls(config=parse_config(blocks, source=str(run_folder / CONFIG_FILE)), folder=run_folder)
        run.folder = run_folder
        run._names = ArgumentNames.of_config(run.config)
        run._is_trusted = trust_remote_code
        return run

    # --- what a run does ----------------------------------------------------------------------------------------------

    @with_short_errors
    def check(self, *, full: bool = False) -> Run:
        """Print sizes, memory and data of the run, without training; `full` adds the config with all defaults.

        Raises:
            ConfigError: lists all errors in settings, models and data.
            RL4LMsLikeError: a component, the tokenizer or the data cannot be loaded.
        """
        from rl4lms_like.preview import preview

        self._require_trust()
        with self._names:
            for section in preview(self.config, full=full):
                _say(section)
        return self

    @with_short_errors
    def train(
        self,
        n_iters: int | None = None,
        *,
        new: bool = False,
        change: Mapping[str, Any] | Iterable[str] = (),
        quiet: bool = False,
        entity_name: str | None = None,
        log_to_wandb: bool = False,
        log_to_trackio: bool = False,
        tensorboard_log: str | Path | None = None,
        wandb_project: str | None = None,
        keep_last_state: bool = True,
    ) -> Run:
        """Train. After an interruption or an error, the same call continues; with more iterations, it trains longer.

        Args:
            n_iters: number of iterations in all; default: that of the config. A learning rate that decays over the run
                has a fixed length.
            new: start a new run in any case.
            change: settings by name that a continued run has from now on, although they affect its results; or names of
                what has changed, such as `["reward"]`. The run folder lists the changes.
            quiet: print only warnings.
            entity_name: of Weights & Biases.
            log_to_wandb: log to Weights & Biases.
            log_to_trackio: log to Trackio.
            tensorboard_log: folder for TensorBoard's files.
            wandb_project: project of Weights & Biases.
            keep_last_state: keep the state after the last iteration, to train longer later.

        Returns:
            This run.

        Raises:
            ConfigError: settings do not fit together, or cannot change.
            KeyboardInterrupt: the run was interrupted, after it was saved.
            RL4LMsLikeError: the run failed; subclasses name the cause. Files written before remain.
        """
        self._require_trust()
        destinations: dict[str, Any] = {
            "quiet": quiet,
            "entity_name": entity_name,
            "log_to_wandb": log_to_wandb,
            "log_to_trackio": log_to_trackio,
            "tensorboard_log": tensorboard_log,
            "wandb_project": wandb_project,
            "keep_last_state": keep_last_state,
        }
        config = self.config if n_iters is None else self._with_length(n_iters)
        _check_guard(config)
        changes = Changes.of(change, config, self._names)
        self._responder = None  # its weights are not those after the training

        with self._names, kept_generators():
            if self.folder is None or new:
                if changes:
                    raise argument_error("change", "is for a run that has begun; give the setting to Run itself")
                self._start(config, self._chosen_folder, destinations, new=new)
            elif self.is_finished and not self._can_continue(config):
                _say(f"{self.folder} is finished, after {self.n_done} {_unit(config)}; nothing is left to train")
                if changes:
                    _say(f"not applied: change={list(changes.names)}; train(n_iters=..., change=...) applies it")
            elif _has_begun(self.folder):
                self._continue(config, changes, destinations)
            else:
                if changes:
                    message = "this run ended before its first iteration; train(new=True) of a Run with the setting"
                    raise argument_error("change", f"{message} starts a new one")
                self._start(config, self.folder, destinations)
        return self

    @with_short_errors
    def evaluate(self, split: str = "val", *, metrics: Any = None, limit: int | None = None) -> dict[str, float]:
        """Return the metrics of the current model on a split; before the training, those of the initial model.

        Without `metrics`, those of a preference run include the scores of the preferences, `rewards/accuracies` and
        others.

        Args:
            split: `train`, `val` or `test`.
            metrics: functions, metrics or ids; default: those of the run.
            limit: evaluate only the first `limit` samples.

        Raises:
            ConfigError: there are no metrics, or one of them has errors.
            RL4LMsLikeError: there are no samples, or the evaluation failed; subclasses name the cause.
        """
        from rl4lms_like.inference import components_to_evaluate, evaluate_split
        from rl4lms_like.training.inputs import build_datapool, render_prompts

        self._require_trust()
        config = self.config
        with self._names:
            if metrics is not None:
                blocks = config.to_dict()
                blocks["train_evaluation"]["metrics"] = metric_list(metrics)
                config = parse_config(blocks, source=SOURCE)
            components = components_to_evaluate(config)
            reads_preferences = metrics is None and isinstance(config, PreferenceConfig)
            if not components.metrics and not reads_preferences:
                raise argument_error("metrics", "missing; this run has none: evaluate(metrics=['length'])")

            # The data before the model, which takes longer to load.
            pool = {split: build_datapool(config.datapool, split)}
            if not len(pool[split]):
                argument = "prompts" if isinstance(config, RunConfig) else "data"
                way_out = f"eval_{argument}" if split == "val" else f"{argument}={{'train': ..., {split!r}: ...}}"
                raise argument_error("split", f"there are no samples of {split!r}; give {way_out} to Run")
            measured = self._measured(config, split, limit) if reads_preferences else {}
            if not components.metrics:
                return measured
            responder = self._model()
            samples = [sample for sample, _ in render_prompts(pool, config.tokenizer, responder.tokenizer)[split]]
            evaluation = evaluate_split(config, responder, components, samples[:limit], split)
        return measured | evaluation.scores

    @with_short_errors
    def generate(
        self,
        prompts: Any,
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        decoding: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Return responses of the current model; before the training, those of the initial model.

        Args:
            prompts: a text or a conversation, or a list of them.
            n: number of responses to each prompt.
            max_new_tokens: maximum length of a response; default: that of the run.
            decoding: `sampling`, `greedy` or `beam`; default: as in the run.
            temperature: of the sampling.
            top_k: sample from the k most likely tokens; 0 samples from all.
            seed: of the sampling.

        Returns:
            A text for one prompt and a list for several; with `n` above 1, a list in place of each text.

        Raises:
            ConfigError: an argument has another value.
        """
        from rl4lms_like.core.sample import Sample
        from rl4lms_like.inference import decoding_arguments
        from rl4lms_like.training.inputs import chat_template_of

        self._require_trust()

        check_generation(
            prompts, n=n, max_new_tokens=max_new_tokens, decoding=decoding, temperature=temperature, top_k=top_k
        )

        # Each prompt `n` times in a row.
        is_single = isinstance(prompts, str) or is_conversation(prompts)
        listed = [prompts] if is_single else list(prompts)
        samples = []
        for index, prompt in enumerate(listed):
            if not isinstance(prompt, str) and not is_conversation(prompt):
                raise argument_error("prompts", f"entry {index} is {excerpt(prompt)}; expected a text or messages")
            id = str(index)
            samples += [Sample(id, prompt) if isinstance(prompt, str) else Sample.of_messages(id, prompt)] * n

        responder = self._model()
        arguments = decoding_arguments(responder.generation_kwargs or {}, decoding, None, max_new_tokens)
        further = {"temperature": temperature, "top_k": top_k}
        arguments |= {name: value for name, value in further.items() if value is not None}
        template = chat_template_of(self.config.tokenizer, responder.tokenizer)
        if template is not None:
            samples = [template.with_rendered_prompt(sample) for sample in samples]

        texts = replace(responder, generation_kwargs=arguments, seed=seed).respond(samples)
        if n == 1:
            return texts[0] if is_single else texts
        groups = [texts[start : start + n] for start in range(0, len(texts), n)]
        return groups[0] if is_single else groups

    @with_short_errors
    def save(self, folder: str | Path) -> Path:
        """Copy the current model with its tokenizer to a folder, ready for `from_pretrained`.

        Args:
            folder: a new or empty folder, or one with an earlier copy of a model, which is replaced.

        Raises:
            ConfigError: the folder has other files, or is that of the run.
            RL4LMsLikeError: the run has no model yet, or the folder cannot be written.
        """
        from rl4lms_like.python_api.save_target import check_save_target
        from rl4lms_like.system.disk import saving
        from rl4lms_like.training.resuming.checkpoints import ALL_ROWS, MANIFEST, STATE, TENSORS, write_folder

        target = Path(os.path.abspath(os.path.expanduser(folder)))
        source = self.model_folder
        if is_main_process():
            assert self.folder is not None
            check_save_target(target, source, self.folder)
            with saving(f"the model to {target}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                left_out = shutil.ignore_patterns(MANIFEST, STATE, TENSORS, ALL_ROWS)
                write_folder(target, lambda partial: shutil.copytree(source, partial, ignore=left_out))
        return target

    # --- what a run has -----------------------------------------------------------------------------------------------

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged numbers of each iteration, with `iteration`; `pandas.DataFrame(run.history)` is a table of them."""
        from rl4lms_like.tracking.record import read_run

        return read_run(self.folder).iterations if self.folder is not None and self._is_run(self.folder) else []

    @property
    def report(self) -> Report:
        """The report of the run, written now; a notebook shows it inline.

        Raises:
            RL4LMsLikeError: the run has not begun.
        """
        from rl4lms_like.tracking.report import write_report
        from rl4lms_like.tracking.run_folder import REPORT_FILE

        if self.folder is None:
            raise RL4LMsLikeError("this run has no report yet; call train() first")
        return Report(write_report(self.folder) if is_main_process() else self.folder / REPORT_FILE)

    @property
    def model_folder(self) -> Path:
        """Folder of the current model: that of the finished run, or else of the newest checkpoint.

        Raises:
            RL4LMsLikeError: there is none yet.
        """
        from rl4lms_like.training.resuming.checkpoints import newest_checkpoint

        if self.folder is None:
            raise RL4LMsLikeError("this run has no model yet; call train() first")
        if self.is_finished and (self.folder / "model").is_dir():
            return self.folder / "model"
        try:
            return newest_checkpoint(self.folder)
        except CheckpointError as error:
            raise RL4LMsLikeError(f"this run has no model yet: {error}") from error

    @property
    def n_done(self) -> int:
        """Number of completed iterations (RL runs) or optimizer steps."""
        history = self.history
        return int(history[-1]["iteration"]) if history else 0

    @property
    def is_finished(self) -> bool:
        """True if the training is complete."""
        return self.folder is not None and (self.folder / FINISHED_FILE).exists()

    def __repr__(self) -> str:
        state = "not trained" if self.folder is None else f"{self.n_done} {_unit(self.config)}, {str(self.folder)!r}"
        return f"Run({self.config.alg.id!r}, {state})"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"algorithm": self.config.alg.id, "folder": self.folder or "not trained yet"}
        if self.folder is not None:
            rows[_unit(self.config)] = f"{self.n_done}{'' if self.is_finished else ', not finished'}"
        rewards = [line[REWARD] for line in self.history if line.get(REWARD) is not None]
        if rewards:
            rows["reward"] = f"{rewards[0]:.3f} at first, {rewards[-1]:.3f} at last"
        return table_html(rows)

    # --- training -----------------------------------------------------------------------------------------------------

    def _start(self, config: AnyConfig, folder: Path, destinations: Mapping[str, Any], *, new: bool = False) -> None:
        """Train a new run, or the unfinished run of this config in its folder."""
        from rl4lms_like.run import train_config

        def use(run_folder: Path) -> None:
            self.folder = run_folder  # known before the training begins, so that an interrupted run can be continued
            self._adopt(_functions_of(config))
            if not new:
                _say_what_is_skipped(config, folder, run_folder)

        train_config(
            config,
            base_path_to_store_results=folder.parent.parent,
            project_name=folder.parent.name,
            experiment_name=folder.name,
            new=new,
            on_folder=use,
            **destinations,
        )

    def _continue(self, config: AnyConfig, changes: Changes, destinations: Mapping[str, Any]) -> None:
        """Continue the run in its folder, with the functions of this process."""
        from rl4lms_like.run import resume

        assert self.folder is not None
        values = _functions_of(config)
        if isinstance(config, RunConfig):
            values["train_evaluation.n_iters"] = config.train_evaluation.n_iters
        values |= changes.values
        try:
            resume(
                self.folder,
                values=values,
                accepted=changes.paths,
                trust_remote_code=self._is_trusted,
                **destinations,
            )
        except ConfigError as error:
            raise _with_way_out(self._names.renamed(error)) from None
        finally:
            self._adopt(values)

    def _adopt(self, values: Mapping[str, Any]) -> None:
        """Take over the config of the folder, which a training may have changed, with the functions of this process.

        Args:
            values: config path -> value, with the functions.
        """
        from rl4lms_like.training.resuming.resume import own_config

        assert self.folder is not None
        blocks = own_config(self.folder)
        functions = {path: value for path, value in values.items() if path in FUNCTIONS}
        with_functions, _ = apply_values(blocks, functions, "")
        config = parse_config(with_functions, source=str(self.folder / CONFIG_FILE))

        # Functions that the run has refused are not those of its folder: it keeps the config that it has.
        if to_json(masked(config.to_dict())) == blocks:
            self.config = config

    def _with_length(self, n_iters: int) -> AnyConfig:
        """Return the config with another number of iterations."""
        if not isinstance(self.config, RunConfig):
            message = "is for runs with rollouts; the length of this run is its num_train_epochs or max_steps"
            raise argument_error("n_iters", message)
        blocks = self.config.to_dict()
        blocks["train_evaluation"]["n_iters"] = n_iters
        with ArgumentNames({"train_evaluation.n_iters": "n_iters"}):
            return parse_config(blocks, source=SOURCE)

    def _can_continue(self, config: AnyConfig) -> bool:
        """Return True if a config is longer than the finished run in the folder."""
        from rl4lms_like.training.resuming.resume import own_config

        assert self.folder is not None
        if not isinstance(config, RunConfig):
            return False

        # A run that has stopped early has a length that it did not need.
        length = self.n_done
        if config.train_evaluation.early_stopping is not None:
            length = own_config(self.folder)["train_evaluation"]["n_iters"]
        return config.train_evaluation.n_iters > length

    @staticmethod
    def _is_run(folder: Path) -> bool:
        return (folder / CONFIG_FILE).is_file()

    def _require_trust(self) -> None:
        """Raise a `ConfigError` if the config is one of a folder, and allows code to run that the caller has not."""
        from rl4lms_like.system.import_paths import trusting

        if self._is_trusted:
            return
        allowed = "Run.from_folder(folder, trust_remote_code=True)"
        message = f"true in a run's folder, which may come from another user: if you trust the code, use {allowed}"
        issues = [ConfigIssue(path, message) for path in trusting(self.config.to_dict())]
        if issues:
            raise ConfigError(issues, f"the config of {self.folder}")

    # --- the current model --------------------------------------------------------------------------------------------

    def _measured(self, config: Any, split: str, limit: int | None) -> dict[str, float]:
        """Return the scores of a split's preferences under the current model."""
        from rl4lms_like.offline.measured_split import measured_split
        from rl4lms_like.run import silence_libraries
        from rl4lms_like.small_models.embedded import with_embedded_models

        silence_libraries()
        trained = None
        with suppress(RL4LMsLikeError):  # before the training
            trained = self.model_folder
        if trained is not None and config.alg.peft is not None and not (config.alg.writes_text or self.is_finished):
            raise RL4LMsLikeError("a reward model with adapters is evaluated after the training; call train() first")
        name = None if trained is None else str(trained)
        return measured_split(with_embedded_models(config), name, split, limit=limit)

    def _model(self) -> Responder:
        """Return the current model, loaded once until the next training."""
        from rl4lms_like.config.added_tokens import with_created_models
        from rl4lms_like.inference import responder_of
        from rl4lms_like.run import silence_libraries
        from rl4lms_like.training.inputs import build_tokenizer

        if self._responder is not None:
            return self._responder
        silence_libraries()

        # Before the training the initial model, decoding as in the run's evaluations.
        config = with_created_models(self.config)
        if isinstance(config, RunConfig):
            initial = config.alg.policy.args["model_name"]
            arguments = config.alg.policy.args.get("generation_kwargs")
            if config.train_evaluation.generation_kwargs is not None:
                arguments = config.train_evaluation.generation_kwargs
        else:
            initial = config.alg.model_name
            arguments = config.alg.generation_kwargs
        try:
            name = str(self.model_folder)
        except RL4LMsLikeError:
            name = initial

        self._responder = responder_of(
            config,
            name,
            build_tokenizer(config.tokenizer),
            batch_size=config.train_evaluation.eval_batch_size,
            generation_kwargs=arguments,
            seed=config.seed,
        )
        return self._responder


def train(
    config_path: str | Path,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    log_to_trackio: bool = False,
    overrides: Sequence[str] = (),
    replay: str | Path | None = None,
    new: bool = False,
) -> Path:
    """Train a model as configured in a YAML file; after an interruption, the same call resumes the run.

    Args:
        config_path: the YAML file.
        project_name: second folder of the results.
        experiment_name: third folder; if it holds another run, or a finished one, `<experiment_name>_2` is used.
        entity_name: of Weights & Biases.
        base_path_to_store_results: first folder.
        log_to_wandb: log to Weights & Biases.
        log_to_trackio: log to Trackio.
        overrides: `train_evaluation.n_iters=200`, applied in order.
        replay: value of `train_evaluation.replay`; default: the config's.
        new: start a new run in any case.

    Returns:
        The run folder.

    Raises:
        RL4LMsLikeError: the run failed; subclasses name the cause. Files written before remain.
    """
    import json

    # Values of overrides are parsed as YAML. The quotes of JSON keep a path such as `0123` or `runs: old` a text.
    if replay is not None:
        overrides = [*overrides, f"train_evaluation.replay={json.dumps(str(replay))}"]

    folder = experiment_folder(base_path_to_store_results, project_name, experiment_name)
    run = Run.from_file(config_path, overrides, folder=folder)
    run.train(
        new=new,
        entity_name=entity_name,
        log_to_wandb=log_to_wandb,
        log_to_trackio=log_to_trackio,
        keep_last_state=False,
    )
    assert run.folder is not None
    return run.folder


def _check_guard(config: AnyConfig) -> None:
    """Raise a `ConfigError` if processes for the reward would run the script again that is running now."""
    if not isinstance(config, RunConfig) or not config.env.reward_workers:
        return
    script = unguarded_script()
    if script is not None:
        message = f"its processes import {script}, and would train as well: put the calls of Run below a line"
        raise argument_error("reward_workers", f'{message} `if __name__ == "__main__":`')


def _has_begun(folder: Path) -> bool:
    """Return False if a run ended before its first iteration, without a state to continue from."""
    from rl4lms_like.training.resuming.checkpoints import newest_checkpoint

    try:
        newest_checkpoint(folder)
    except CheckpointError:
        return not is_untrained(folder)
    return True


def _functions_of(config: AnyConfig) -> dict[str, Any]:
    """Return the blocks of a config that may have functions, by their paths."""
    metrics = []
    for metric in config.train_evaluation.metrics:
        metrics.append({"id": metric.id, "args": metric.args, "name": metric.name})
    callbacks = [{"id": callback.id, "args": callback.args} for callback in config.train_evaluation.callbacks]
    functions: dict[str, Any] = {"train_evaluation.metrics": metrics, "train_evaluation.callbacks": callbacks}
    if isinstance(config, RunConfig):
        functions["reward_fn"] = {"id": config.reward_fn.id, "args": config.reward_fn.args}
        if config.env.dialogue is not None and config.env.dialogue.id == "object":
            functions["env.dialogue.args"] = config.env.dialogue.args
    return functions


def _say_what_is_skipped(config: AnyConfig, first: Path, used: Path) -> None:
    """Print which unfinished runs are not continued because they differ, and how one with another function is."""
    from rl4lms_like.training.resuming.accepted_changes import is_covered
    from rl4lms_like.training.resuming.resume import in_short, unfinished_others

    if not is_main_process():
        return
    for folder, differences in unfinished_others(config, first, used):
        _say(f"{folder} is not finished, but is another run: {in_short(differences)}; this one is in {used}")
        arguments = {"reward_fn": "reward", "train_evaluation.metrics": "metrics"}
        changed = [difference.path for difference in differences]
        names = [name for block, name in arguments.items() if any(is_covered(path, [block]) for path in changed)]
        if _has_begun(folder) and all(is_covered(path, arguments) for path in changed):
            functions = ", ".join(f"{name}=..." for name in names)
            call = f"Run.from_folder({str(folder)!r}, {functions}).train(change={names})"
            _say(f"to continue it with what has changed: {call}")


def _with_way_out(error: ConfigError) -> ConfigError:
    """Add to the refusal of a changed setting how it is accepted."""
    issues = []
    for issue in error.issues:
        message, command, _ = issue.message.partition(COMMAND)
        if command:  # what follows is the option of the command line
            head = issue.path.partition(".")[0]
            name = head if head in WHOLE else issue.path
            message += f"; train(change=[{name!r}]) accepts it, and the run folder lists it"
        issues.append(ConfigIssue(issue.path, message))
    return ConfigError(issues, error.source)


def _say(text: str) -> None:
    """Print in the main process only."""
    if is_main_process():
        print(text)


def _unit(config: AnyConfig) -> str:
    return "iterations" if isinstance(config, RunConfig) else "steps"
