"""Evaluate a model on a split: generate responses or play dialogues, compute metrics, and keep every text.

samples ─ sorted by length ─ batches ─ generate ─ original order ─ post-process ─ metrics ─> scores, predictions
samples ─ batches ─ dialogues with environments ─ last turns ─────────────────── metrics ─> the same
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl4lms_like.config.rules import ENVIRONMENT_KEY, generation_of_turns
from rl4lms_like.core.episodes import EpisodeBatch, real_ids
from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.dialogues import Dialogue, Dialogues, DialogueSettings, episode_seed
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.metrics.call import compute_metrics
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.post_processors import post_process
from rl4lms_like.rewards.call import texts_to_score
from rl4lms_like.rollouts.play_dialogues import play_dialogues
from rl4lms_like.system.closing import closed_after
from rl4lms_like.system.errors import ConfigError, ConfigIssue, MetricError, ModelError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.wording import beginning

NOT_APPLICABLE = "n/a"
"""Value in a prediction for a metric that only scores whole splits."""


@dataclass(frozen=True)
class Evaluation:
    """Result on one split."""

    scores: dict[str, float]  # metric key -> corpus score
    predictions: list[dict[str, Any]]  # one object per sample, with RL4LMs' keys


class Response(NamedTuple):
    """Generated response: its text, the ids of the prompt `[prompt_length]` and its own ids `[response_length]`.

    Of a dialogue, it is the whole of turns and answers.
    """

    text: str
    prompt_ids: np.ndarray
    ids: np.ndarray
    dialogue: Dialogue | None = None


class SplitModel:
    """The argument `model` of metrics, if the weights of the model are split and an engine generates.

    Metrics are computed in one process, which cannot make a forward pass without the others.
    """

    def __getattr__(self, name: str) -> Any:
        raise ModelError(
            f"uses the model ({name}), whose weights are split: remove the metric, use engine: {{id: transformers}}, "
            f"with which each process gathers them, or distributed.strategy: ddp"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the same error."""
        return self.__getattr__("forward")


@dataclass(frozen=True)
class Responder:
    """Model and settings with which responses are generated."""

    model: TextGenerator | LMActorCriticPolicy
    tokenizer: PreTrainedTokenizerBase  # encodes prompts and decodes responses
    batch_size: int  # prompts per generation call
    max_prompt_length: int  # tokens; longer prompts are truncated on the model's `prompt_truncation_side`
    eos_token_ids: Sequence[int]  # tokens that end a response
    dialogue: DialogueSettings | None  # of a run whose episodes have several turns; None: one response to each prompt
    generation_kwargs: Mapping[str, Any] | None = None  # sampling, greedy or beam search; None: the model's
    seed: int = 0  # of the sampling
    ranks: Ranks = field(default_factory=Ranks)  # processes that share the prompts; each receives all responses

    def respond(self, samples: Sequence[Sample]) -> list[str]:
        """Return the text of one response for each sample, see `generate`.

        Raises:
            ConfigError: an environment does not begin its dialogue with the prompt of the sample.
        """
        responses = self.generate(samples)
        for sample, response in zip(samples, responses, strict=True):
            dialogue = response.dialogue
            if dialogue is not None and sample.prompt_or_input_text not in dialogue.sample.prompt_or_input_text:
                assert self.dialogue is not None
                first = beginning(dialogue.sample.prompt_or_input_text)
                message = f"begins its dialogue with {first}, not with the given {sample.prompt_or_input_text!r}"
                way_out = f"rl4lms-like play {self.dialogue.name} RUN plays its own episodes"
                issue = ConfigIssue("env.dialogue", f"{self.dialogue.name!r} {message}; {way_out}")
                raise ConfigError([issue], "the run")
        return [response.text for response in responses]

    def generate(self, samples: Sequence[Sample], *, split: str = "test") -> list[Response]:
        """Return one response for each sample.

        Args:
            samples: with rendered prompts.
            split: of the samples; environments of dialogues get other seeds in each.

        Raises:
            ConfigError: the generation arguments are not for dialogues.
            DialogueError: an environment failed.
        """
        if isinstance(self.model, LMActorCriticPolicy):
            self.model.engine.prepare(self.model)
        if self.dialogue is not None:
            return self._played(self.dialogue, samples, split)
        return self._generated(samples)

    def _generated(self, prompts: Sequence[Sample]) -> list[Response]:
        """Return one response for each prompt; those of similar length are generated together."""
        layout = TextLayout(
            self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            max_context_length=1,
            prompt_truncation_side=self.model.prompt_truncation_side,
            is_encoder_decoder=bool(self.model.model.config.is_encoder_decoder),
            pictures=self.model.pictures,
        )
        encoded = layout.encode_all(prompts) if prompts else []

        # Sorted by length, so that little of a batch is padding. The processes take the batches in turn.
        order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
        starts = range(0, len(order), self.batch_size)[self.ranks.rank :: self.ranks.size]

        def of_this_process() -> dict[int, Response]:
            responses: dict[int, Response] = {}  # index of the prompt -> its response
            for start in starts:
                batch = order[start : start + self.batch_size]

                # A seed for each batch, whichever process generates it: one process or several write the same texts.
                seed = derived_seed(self.seed, "evaluation", start)
                numbers = layout.numbers([prompts[i] for i in batch])
                episodes = self.generated([encoded[i] for i in batch], layout.pad_token_id, seed, numbers)

                response_ids = real_ids(episodes.response_ids, episodes.response_mask)
                texts = layout.continuations.texts([encoded[i] for i in batch], response_ids)
                for i, text, ids in zip(batch, texts, response_ids, strict=True):
                    responses[i] = Response(text, encoded[i], np.asarray(ids, dtype=np.int64))
            return responses

        # Back in the order of the prompts.
        responses: dict[int, Response] = {}
        for responses_of_process in self.ranks.gather_from(of_this_process):
            responses |= responses_of_process
        return [responses[i] for i in range(len(prompts))]

    def _played(self, settings: DialogueSettings, samples: Sequence[Sample], split: str) -> list[Response]:
        """Return a dialogue from each sample; those of `batch_size` samples are played together."""
        self._check_turns(settings)
        layout = TextLayout(
            self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            max_context_length=settings.max_episode_length,
            prompt_truncation_side=self.model.prompt_truncation_side,
        )
        dialogues = Dialogues(settings, layout)
        starts = range(0, len(samples), self.batch_size)[self.ranks.rank :: self.ranks.size]

        def of_this_process() -> dict[int, Response]:
            responses: dict[int, Response] = {}  # index of the sample -> its dialogue
            for start in starts:
                batch = samples[start : start + self.batch_size]

                # The seeds of the environments are the same in each evaluation.
                seeds = [episode_seed(self.seed, split, start + row) for row in range(len(batch))]
                played = dialogues.start(batch, seeds)
                with blame_memory_errors_on("evaluation"):
                    episodes = play_dialogues(
                        self.model,
                        dialogues,
                        seed=derived_seed(self.seed, "evaluation", start),
                        eos_token_ids=self.eos_token_ids,
                        generation_kwargs=self._generation_kwargs,
                        tokenizer=self.tokenizer,
                    )

                response_ids = real_ids(episodes.response_ids, episodes.response_mask)
                prompts = [dialogue.prompt_ids for dialogue in played]
                texts = layout.continuations.texts(prompts, response_ids)
                for row, dialogue in enumerate(played):
                    ids = np.asarray(response_ids[row], dtype=np.int64)
                    responses[start + row] = Response(texts[row], prompts[row], ids, dialogue.without_env())
            return responses

        responses: dict[int, Response] = {}
        with closed_after(dialogues.close):
            for responses_of_process in self.ranks.gather_from(of_this_process):
                responses |= responses_of_process
        return [responses[i] for i in range(len(samples))]

    @property
    def _generation_kwargs(self) -> Mapping[str, Any]:
        """Generation arguments: those of the model by default."""
        if self.generation_kwargs is not None:
            return self.generation_kwargs
        if isinstance(self.model, LMActorCriticPolicy):
            return self.model.arguments.generation_kwargs
        return self.model.generation_kwargs

    def _check_turns(self, settings: DialogueSettings) -> None:
        """Raise a `ConfigError` for generation arguments that turns of a dialogue cannot have."""
        issues = list(generation_of_turns(self._generation_kwargs, settings.max_turn_length))
        if issues:
            raise ConfigError(issues, "the generation arguments")

    def generated(
        self, prompts: Sequence[Any], pad_token_id: int, seed: int, numbers: Sequence[int] | None = None
    ) -> EpisodeBatch:
        """Return the episodes of a batch of encoded prompts, arrays `[length]` of token ids.

        Args:
            prompts: the prompts.
            pad_token_id: fills shorter prompts.
            seed: seed of the sampling.
            numbers: of the prompts' pictures; None if the model reads texts only.
        """
        # Padded on the left `[n, width]`: a decoder-only model continues each row at its right end. A batch of empty
        # prompts has one column of padding.
        width = max(*map(len, prompts), 1)
        ids = torch.full((len(prompts), width), pad_token_id)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = True

        # Only models with pictures know the argument.
        pictures: dict[str, Any] = {} if numbers is None else {"pictures": torch.tensor(numbers)}
        with blame_memory_errors_on("evaluation"):
            return self.model.generate(
                ids,
                mask,
                eos_token_ids=self.eos_token_ids,
                generation_kwargs=self.generation_kwargs,
                seed=seed,
                tokenizer=self.tokenizer,
                **pictures,
            )


def evaluate_on_samples(
    responder: Responder,
    samples: Sequence[Sample],
    metrics: Sequence[BaseMetric],
    *,
    split_name: str,
    post_processor: Callable[[str], str] | None = None,
) -> Evaluation:
    """Generate a response for every sample of a split and compute the metrics on them.

    The post-processor is applied to each response before metrics and predictions. Of a dialogue, they read the last
    turn; its sample has the first text of the environment as the prompt, and all turns in its `meta_data`.

    Raises:
        ComponentError: the post-processor failed.
        MetricError: a metric failed; the message names it.
    """
    raw_responses = responder.generate(samples, split=split_name)
    dialogues = [response.dialogue for response in raw_responses if response.dialogue is not None]
    responses = [response.text for response in raw_responses]
    if dialogues:
        samples = [dialogue.finished_sample() for dialogue in dialogues]
        responses = [dialogue.turns[-1].text for dialogue in dialogues]
    if post_processor is not None:
        responses = post_process(post_processor, responses)

    # For metrics that read more than texts. The ids are those that the model generated, before the post-processor.
    generated = []
    for sample, text, raw in zip(samples, responses, raw_responses, strict=True):
        if raw.dialogue is None:
            generated.append(Generated(sample, text, raw.prompt_ids, raw.ids))
        else:
            last_turn = raw.ids[-raw.dialogue.turns[-1].n_actions :]
            reward = raw.dialogue.reward
            generated.append(Generated(sample, text, raw.prompt_ids, last_turn, environment_reward=reward))

    # In the main process only; the others get its results, so that all of them decide alike which model is the best.
    prompts = [sample.prompt_or_input_text for sample in samples]
    references = [sample.references for sample in samples]
    meta_infos = [sample.meta_data for sample in samples]
    model: Any = responder.model.model
    if isinstance(responder.model, LMActorCriticPolicy) and responder.model.stays_split:
        model = SplitModel()
    try:
        results = responder.ranks.from_main(
            lambda: compute_metrics(
                metrics,
                prompts,
                responses,
                references,
                meta_infos=meta_infos,
                model=model,
                split_name=split_name,
                generated=generated,
            )
        )
    except MetricError as error:
        error.texts = texts_to_score(samples, responses)  # the run keeps them, to try the metric on them
        raise

    results = {**results, **environment_scores(dialogues)}

    # The score of a single text has the key of the corpus score; metrics of whole splits have none.
    predictions = []
    for i, (sample, response) in enumerate(zip(samples, responses, strict=True)):
        prediction: dict[str, Any] = {
            "split_name": split_name,
            "sample_id": sample.id,
            "prompt_text": sample.prompt_or_input_text,
            "generated_text": response,
            "ref_text": reference_text(sample.references),
        }
        for key, (scores_of_texts, _) in results.items():
            prediction[key] = NOT_APPLICABLE if scores_of_texts is None else scores_of_texts[i]
        if dialogues:
            prediction["turns"] = [turn.to_dict() for turn in dialogues[i].turns]
        if sample.images:
            prediction["images"] = sample.images
        predictions.append(prediction)
    return Evaluation({key: score for key, (_, score) in results.items()}, predictions)


def environment_scores(dialogues: Sequence[Dialogue]) -> MetricResults:
    """Return the numbers of dialogues as results of metrics: reward, turns, end, and what the environments report.

    An episode for which an environment did not report a number does not count in its mean.
    """
    results: MetricResults = {}
    for name in sorted({name for dialogue in dialogues for name in dialogue.numbers}):
        of_episodes: list[Any] = [dialogue.numbers.get(name) for dialogue in dialogues]
        numbers = [number for number in of_episodes if number is not None]
        results[ENVIRONMENT_KEY.format(name=name)] = (of_episodes, fmean(numbers))
    return results


def reference_text(references: Sequence[str]) -> str:
    """Join all references into one text in RL4LMs' format: `<START-1>first<END-1><START-2>second<END-2>`."""
    return "".join(f"<START-{i}>{text}<END-{i}>" for i, text in enumerate(references, start=1))
