"""What a config comes to, seen in the run that it makes: one function for each place where keys act.

    config ─ assemble ─> run ─┬─ attributes that parts of the run work with
                              ├─ one iteration: texts, rewards, weights
                              └─ the whole run: files

Each takes a `Made` and returns something that can be compared; a config that is refused is seen as its message.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stable_baselines3.common.logger import Logger
from transformers import AutoConfig, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.masked import MaskablePolicy
from rl4lms_like.policies.offloaded_activations import to_main_memory
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.averages import WeightAverage
from rl4lms_like.training.evaluation import Evaluation
from tests.on_policy.doctor.histories import history


@dataclass
class Made:
    """A run and what may be asked of it.

    Args:
        run: `AssembledRun` or `SupervisedRun`.
        folder: empty.
        loaded: keyword arguments that transformers was asked for models and tokenizers with, and compiled modules.
    """

    run: Any
    folder: Path
    loaded: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def policy(self) -> Any:
        return self.run.policy

    @property
    def algorithm(self) -> Any:
        return self.run.algorithm


@dataclass(frozen=True)
class Refused:
    """Why there is no such run."""

    message: str


Sight = Callable[[Made], Any]


def observed(blocks: dict[str, Any], sight: Sight, folder: Path, patch: Any) -> Any:
    """What a config's run shows; its message where it is refused."""
    threads = torch.get_num_threads()
    loaded = spies(patch)
    config = parse_config(blocks)
    try:
        if isinstance(config, RunConfig):
            from rl4lms_like.on_policy.assemble import assemble

            made = Made(shared(blocks, config) if sight in LOOKS else assemble(config), folder, loaded)
        else:
            from rl4lms_like.offline.assemble_supervised import assemble_supervised

            made = Made(assemble_supervised(config), folder, loaded)
        try:
            return sight(made)
        finally:
            if isinstance(config, RunConfig):
                made.run.env.close()
    except RL4LMsLikeError as error:
        return Refused(str(error))
    finally:
        torch.set_num_threads(threads)


LOOKS: list[Sight] = []
"""Sights that change nothing of a run, and see nothing of its `doctor` block but in its config."""

_SHARED: dict[str, Any] = {}


def shared(blocks: dict[str, Any], config: RunConfig) -> Any:
    """A run that differs from others in its `doctor` block only, whose objects they have in common."""
    from rl4lms_like.on_policy.assemble import assemble

    rest = repr({key: value for key, value in blocks.items() if key != "doctor"})
    if rest not in _SHARED:
        _SHARED[rest] = assemble(config)
    return replace(_SHARED[rest], config=config)


def spies(patch: Any) -> list[tuple[str, dict[str, Any]]]:
    """Lists what transformers is asked to load, and what torch is asked to compile, which it then does not."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def listed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append((name, kwargs))
            return function(*args, **kwargs)

        return call

    for kind in (AutoTokenizer, AutoConfig):
        patch.setattr(kind, "from_pretrained", listed(kind.__name__, kind.from_pretrained))
    patch.setattr(torch, "compile", listed("compile", lambda module, **kwargs: module))
    patch.setattr(
        LMActorCriticPolicy, "_check_parity", lambda policy: None
    )  # a fifth of the time, and tested elsewhere
    patch.setattr(MaskablePolicy, "_check_parity", lambda policy: None)
    return asked


# --- of an RL run ----------------------------------------------------------------------------------------------------


def iterated(made: Made, n: int = 1) -> Any:
    """The algorithm after so many of two iterations, and what it logged."""
    made.algorithm.set_logger(Logger(None, []))
    for iteration in range(n):
        made.algorithm.learn_iteration(iteration, 2)
    return made.algorithm


def weights(made: Made, n: int = 1) -> list[float]:
    """Of actor and critic, after an iteration."""
    iterated(made, n)
    named = made.policy.training_state()
    return [float(value.double().sum()) for value in named.values()] + [
        float(value.flatten()[0]) for value in named.values()
    ]


def weights_of_two(made: Made) -> list[float]:
    """Of actor and critic, after two iterations."""
    return weights(made, 2)


def texts(made: Made) -> list[list[int]]:
    """What the first rollout wrote."""
    episodes = iterated(made).rollout_buffer.episodes
    return [row[mask].tolist() for row, mask in zip(episodes.response_ids, episodes.response_mask, strict=True)]


def lengths(made: Made) -> list[int]:
    return sorted({len(text) for text in texts(made)})


def paid(made: Made) -> list[float]:
    """Task rewards of the first rollout's episodes."""
    return [info["r"] for info in iterated(made).collector.episode_infos]


def prompts(made: Made) -> Any:
    """Token ids of the first prompts."""
    return made.run.env.reset()["prompt_or_input_encoded_pt"].tolist()


def contexts(made: Made) -> Any:
    """What a decoder begins with."""
    return made.run.env.reset()["context_encoded_pt"].tolist()


def kl_coefficient(made: Made) -> float:
    """Of the second rollout."""
    return float(iterated(made).kl_controller.coeff)


def logged(key: str) -> Sight:
    """A number of the first iteration."""
    return lambda made: iterated(made).logger.name_to_value.get(key)


def loaded_with(key: str, of: str) -> Sight:
    """What `from_pretrained` of a class was given under a key."""
    return lambda made: [kwargs.get(key) for name, kwargs in made.loaded if name == of]


def modules(attribute: Callable[[Any], Any]) -> Sight:
    """Something of each module of the policy's network, named where there is any."""
    return lambda made: [
        (name, seen)
        for name, module in made.policy.policy_model.named_modules()
        if (seen := attribute(module)) is not None
    ]


def adapters(made: Made) -> Any:
    """Names and shapes of what is trained, and how much the adapters are scaled by."""
    shapes = [(name, tuple(p.shape)) for name, p in made.policy.policy_model.named_parameters() if p.requires_grad]
    return shapes, modules(lambda module: dict(module.scaling) if hasattr(module, "lora_A") else None)(made)


def adapter_weights(made: Made) -> list[float]:
    return [float(p.abs().sum()) for name, p in made.policy.policy_model.named_parameters() if "lora_A" in name]


def saved_files(made: Made) -> list[str]:
    """Of the model."""
    return sorted(path.name for path in made.policy.save_model(made.folder / "saved", made.run.tokenizer).iterdir())


def saved_tokenizer(made: Made) -> dict[str, Any]:
    """Sides, as the saved tokenizer has them."""
    made.run.tokenizer.save_pretrained(made.folder / "tokenizer")
    config = json.loads((made.folder / "tokenizer" / "tokenizer_config.json").read_text())
    return {key: value for key, value in config.items() if key.endswith("_side")}


def whole_run(made: Made) -> dict[str, Any]:
    """Which files a run leaves, how many lines and texts they have, and how many prompts it generated for at a time."""
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer

    batches: list[int] = []
    generate = made.policy.generator.generate

    def counted(ids: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(len(ids))
        return generate(ids, *args, **kwargs)

    made.policy.generator.generate = counted
    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        OnPolicyTrainer(made.run, tracker).train_and_eval()
    return {"batches": batches, **files_of(tracker.run_path)}


def replays_of_edited_rollouts(made: Made) -> str:
    """Whether a run trains on rollouts that were edited after another run wrote them."""
    from rl4lms_like.run import train_config

    def trained(**changes: Any) -> Path:
        schedule = replace(made.run.config.train_evaluation, n_iters=1, **changes)
        config = replace(made.run.config, train_evaluation=schedule)
        return train_config(config, base_path_to_store_results=made.folder, quiet=True)

    source = trained(replay=None, accept_edited_rollouts=False, save_rollouts=True)
    (file,) = (source / "rollouts").glob("iteration_*.safetensors")
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    save_file({**tensors, "0.rewards": tensors["0.rewards"] + 1}, file, metadata)
    try:
        trained(replay=str(source))
    except RL4LMsLikeError:
        return "refused"
    return "trained"


def passes(made: Made) -> int:
    """How often an iteration's update runs its networks."""
    calls: list[None] = []
    for network in (made.policy.policy_model, made.policy.value_model):
        embeddings = network.get_input_embeddings()
        embeddings.register_forward_pre_hook(lambda *args: calls.append(None) if torch.is_grad_enabled() else None)
    iterated(made)
    return len(calls)


def table_lines(made: Made) -> int:
    """How many lines of Stable-Baselines3's tables a run prints."""
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer

    out = io.StringIO()
    with contextlib.redirect_stdout(out), Tracker(made.folder, {}, "p", "e", None, False) as tracker:
        OnPolicyTrainer(made.run, tracker).train_and_eval()
    return sum(line.startswith("| ") for line in out.getvalue().splitlines())


class TrackerReachedError(Exception):
    """Ends a run where it would start to write."""


def at_the_tracker(made: Made, observe: Callable[[dict[str, Any]], Any]) -> Any:
    """What is observed when a run creates its tracker, from the tracker's arguments."""
    from rl4lms_like import run
    from rl4lms_like.offline import assemble_supervised as supervised
    from rl4lms_like.on_policy import assemble
    from rl4lms_like.tracking import base

    found: list[Any] = []

    def tracker(*_: Any, **given: Any) -> None:
        found.append(observe(given))
        raise TrackerReachedError

    unused = SimpleNamespace(env=SimpleNamespace(close=lambda: None))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrackerReachedError):
        patch.setattr(base, "Tracker", tracker)
        patch.setattr(assemble, "assemble", lambda config, ranks: unused)
        patch.setattr(supervised, "assemble_supervised", lambda config, ranks: unused)
        run.train_config(made.run.config, base_path_to_store_results=made.folder, quiet=True)
    return found[0]


def waits(made: Made) -> Any:
    """Seconds that a process of several waits for the others."""
    from rl4lms_like import run

    found: list[float] = []

    def group(timeout: float) -> None:
        found.append(timeout)
        raise TrackerReachedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrackerReachedError):
        patch.setattr(run, "process_ranks", group)
        run.train_config(made.run.config, base_path_to_store_results=made.folder, quiet=True)
    return found


def event_files(made: Made) -> Any:
    """Where a run is asked to write what TensorBoard reads."""
    return at_the_tracker(made, lambda given: given["tensorboard_log"])


def files_of(folder: Path) -> dict[str, Any]:
    """Files and what can be counted in them; without numbers."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.endswith("_metrics.jsonl"):
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found[name] = [(line["epoch"], sorted(line["metrics"])) for line in lines]
        elif name.endswith("token_credit.jsonl"):
            found[name] = [len(json.loads(line)["episodes"]) for line in path.read_text("utf-8").splitlines()]
        elif name.endswith(".jsonl"):
            found[name] = len(path.read_text("utf-8").splitlines())
        elif name.endswith("predictions.json"):
            found[name] = [each["generated_text"] for each in json.loads(path.read_text("utf-8"))]
        else:
            found[name] = None
    return found


def best(made: Made) -> Any:
    """Which evaluation is the best, and by which score."""
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer

    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        trainer = OnPolicyTrainer(made.run, tracker)
        trainer.train_and_eval()
    return trainer.callbacks["best_model"].state_dict()


def averaged(made: Made) -> list[float]:
    """The averaged weights of three iterations of changing weights."""
    config = made.run.config.train_evaluation.average
    model = made.run.model if hasattr(made.run, "model") else made.policy.policy_model
    average = WeightAverage(config, model)
    for iteration in range(1, 4):
        with torch.no_grad():
            for weight in average.weights.values():
                weight.add_(iteration)
        average.update(iteration)
    with average.in_model():
        return [float(weight.double().sum()) for weight in average.weights.values()]


def callbacks(made: Made) -> list[Any]:
    """Which callbacks are called, and with which argument they were made."""
    return [(type(callback).__name__, callback.name) for callback in made.run.callbacks]


def stops_after(made: Made) -> int | None:
    """After how many of some evaluations the training ends."""
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer

    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        stopping = OnPolicyTrainer(made.run, tracker).callbacks["early_stopping"]
    for epoch, (words, distinct) in enumerate([(1.0, 3.0), (2.0, 2.0), (1.0, 1.0), (3.0, 0.0), (2.0, 0.0), (1.0, 0.0)]):
        scores = {"length/words": words, "diversity_metrics/distinct-1": distinct}
        stopping.on_evaluation_end(epoch, "val", Evaluation(scores, []))
        if stopping.is_over:
            return epoch
    return None


def after_a_nan(made: Made) -> Any:
    """The weights after updates whose first loss was NaN, or why there are none."""
    loss, calls = made.algorithm.loss, []

    def spoiled(minibatch: Any) -> Any:
        calls.append(minibatch)
        terms = loss(minibatch)
        return terms._replace(policy=terms.policy * float("nan")) if len(calls) == 1 else terms

    made.algorithm.loss = spoiled
    try:
        return weights(made)
    except RL4LMsLikeError as error:
        return str(error)


def deterministic(made: Made) -> bool:
    """Whether torch is asked for deterministic operations while it trains."""
    return at_the_tracker(made, lambda given: torch.are_deterministic_algorithms_enabled())


SICK = {
    "ratio_gap": 0.01, "kl": 5.0, "entropy": 1e-3, "reward_spread": 0.0, "value_loss": [0.1] * 10 + [9.0] * 5,
    "explained_variance": -3.0, "truncated": [0.0] + [1.0] * 14, "empty": 1.0, "duplicates": [0.0] + [0.9] * 14,
    "near_duplicates": [0.0] + [0.9] * 14, "length_correlation": 0.99, "clip_fraction": 0.9, "approx_kl": 0.5,
    "grad_norm": 0.0, "minibatch_episodes": 1.0,
}  # fmt: skip
"""A run in which nearly everything goes wrong."""


def alarms(**signs: Any) -> Sight:
    """What the doctor finds, with the numbers it compares: in a sick history, some of its signs changed."""

    def seen(made: Made) -> Any:
        from rl4lms_like.on_policy.doctor.alerts import ALERTS, reward_hacking
        from rl4lms_like.on_policy.doctor.callback import context_of
        from rl4lms_like.on_policy.doctor.diagnostics import Evaluations, HeldOutScore

        case = context_of(made.run)
        past = history(**{**SICK, **signs})
        for key in case.modes:
            worse = 0.5 if case.modes[key] == "max" else 1.5
            ends = [HeldOutScore(epoch, worse, 0.0, 2.0, 0.0) for epoch in (9, 10)]
            past.held_out[key] = Evaluations(HeldOutScore(0, 1.0, 0.0, 0.0, 0.0), ends)
        found = {name: alarm(past, case) for name, alarm in {**ALERTS, "hacking": reward_hacking}.items()}
        return {name: (each.message, each.evidence, each.metric) for name, each in found.items() if each is not None}

    LOOKS.append(seen)
    return seen


def evaluated(made: Made) -> dict[str, float]:
    """The scores of the first evaluation on `val`."""
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer

    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        evaluation = OnPolicyTrainer(made.run, tracker).evaluate(("val",))["val"]
    return {key: score for key, score in evaluation.scores.items()} | {"prompts": len(evaluation.predictions)}


def cut_prompts(made: Made) -> Any:
    """What an evaluation keeps of prompts that are too long."""
    side = (made.run.generator if hasattr(made.run, "generator") else made.policy.generator).prompt_truncation_side
    layout = TextLayout(made.run.tokenizer, made.run.max_prompt_length, 1, prompt_truncation_side=side)
    return [ids.tolist() for ids in layout.encode_all(made.run.samples["val"])]


# --- of a supervised run ---------------------------------------------------------------------------------------------


def examples(made: Made) -> Any:
    """What is learned."""
    return json.loads(json.dumps(made.run.examples["train"].rows, default=lambda value: value.tolist()))


def tuned(made: Made) -> Any:
    """The weights and files of the whole run."""
    from rl4lms_like.offline.trainer import SupervisedTrainer

    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        SupervisedTrainer(made.run, tracker).train_and_eval()
    state = made.run.model.state_dict()
    return [float(value.double().sum()) for value in state.values()], files_of(tracker.run_path)


def written_together(made: Made) -> list[int]:
    """How many prompts an evaluation writes answers to at a time."""
    batches: list[int] = []
    generate = made.run.generator.generate

    def counted(ids: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(len(ids))
        return generate(ids, *args, **kwargs)

    made.run.generator.generate = counted
    written(made)
    return batches


def written(made: Made) -> list[Any]:
    """Texts and scores of the first evaluation."""
    from rl4lms_like.offline.trainer import SupervisedTrainer

    with Tracker(made.folder, {}, "p", "e", None, False, quiet=True) as tracker:
        evaluation = SupervisedTrainer(made.run, tracker).evaluate(("val",))["val"]
    return [each["generated_text"] for each in evaluation.predictions] + sorted(evaluation.scores.items())


def saved_in_main_memory(made: Made, train: Sight = iterated) -> bool:
    """Return whether tensors are copied that the passes of a training save."""
    copies = []

    def recorded(tensor: Any) -> Any:
        copies.append(tensor)
        return to_main_memory(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl4lms_like.policies.offloaded_activations.to_main_memory", recorded)
        train(made)
    return bool(copies)
