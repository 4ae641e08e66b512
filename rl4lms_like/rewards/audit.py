"""Audit of a reward before training: what it pays for texts that do not deserve it, and whether its values are stable.

    samples, layout ─ Probes ─> the same few texts for every reward
    reward ─ alone, together, again, in reverse, ... ─> rewards of each text ─> findings

A finding is a property to know, not an error: a penalty for length, alone, is highest for an empty response. A combined
reward is audited as a whole and by its parts, from the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import AnyReward, RewardOfParts
from rl4lms_like.rewards.call import Leaf, is_batched, is_terminal, leaves, score_episodes
from rl4lms_like.rewards.probes import N_PAD, N_WORDS, Probes
from rl4lms_like.system.errors import RewardError

KINDS = {
    "empty": "an empty response pays as much as a reference",
    "repetition": "one repeated word pays as much as a reference",
    "prompt_copy": "a copy of the prompt pays as much as a reference",
    "answer_list": "a list of many answers, one of them right, pays as much as the right one",
    "long_tail": "a reference followed by 200 other words pays as much as the reference",
    "word_order": "a reference with its words in another order pays as much as the reference",
    "verbosity": "300 or 1200 words, repeated from prompts and references, pay more than a reference",
    "truncation": "the first half of a reference pays more than the reference",
    "whitespace": "a reference with spaces and newlines around it does not pay the same as the reference",
    "padding": "more padding, behind the response or in the arrays, changes the reward",
    "reference": "a reference pays no more than the worst text",
    "constant": "all texts get the same reward",
    "magnitude": "a reward is above 10 or below -10",
    "unstable": "a second call with the same texts returns other rewards",
    "order": "the same texts in reverse order get other rewards",
    "batch": "a text gets another reward alone than together with others",
    "alone": "the reward fails for single texts, but not for several texts",
    "failure": "the reward fails, or does not return a finite number, for a text",
    "slow": "a call takes over half a second for 1200 words, and more than 8 times as long as for 300",
}
"""Kinds of findings, with their meaning."""

LARGEST = 10.0
"""Absolute value above which a reward is reported."""

TOLERANCE = 0.05
"""Fraction of the larger one of two rewards by which they may differ and count as equal."""

_OF_ANY_REWARD = {"empty": "empty", "repeated": "repetition", "keyword": "repetition", "prompt": "prompt_copy"}
_OF_COMPARISONS = {"answer_list": "answer_list", "long_tail": "long_tail", "shuffled": "word_order"}
"""Probe -> kind of the finding that it pays as much as a reference; the second only for rewards that use references."""

_MAX_GROWTH = 8.0
_MIN_MS = 500.0
"""Time of a call below which its growth is not judged."""
_N_TRIED = 3
"""Number of texts that are scored alone if the reward fails for them and for all texts together."""
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Finding:
    """One property of a reward that the audit found; `kind` is one of `KINDS`."""

    kind: str
    message: str


@dataclass(frozen=True)
class AuditedReward:
    """Result for a reward, or for one part of a combined reward.

    Args:
        name: name of the part; empty for the whole reward.
        rewards: probe -> mean reward of an episode over the samples, NaN where the reward failed.
        findings: in the order of `KINDS`.
        ms_alone: median time of scoring one text, in milliseconds.
        ms_together: time per text of scoring all texts in one call.
        errors: messages of failed calls.
    """

    name: str
    rewards: Mapping[str, float]
    findings: list[Finding]
    ms_alone: float
    ms_together: float
    errors: list[str]


def n_calls(reward: AnyReward, probes: Probes) -> int:
    """Return the maximum number of calls that an audit makes of a reward, or of all its parts together."""
    total = 0
    for leaf in leaves(reward):
        # Each text alone, and five calls with all texts or, once some have failed, with the others.
        if is_batched(leaf.reward):
            total += len(probes) + 5
            continue

        # A reward of tokens is called for each token: of each text alone, of all texts five times, and of the
        # references with more padding.
        per_text = [_calls_of(leaf, episode) for episode in probes.episodes]
        n_with_padding = sum(per_text[index] for index in probes.of("reference").values())
        total += 6 * sum(per_text) + n_with_padding
    return total


def _calls_of(leaf: Leaf, episode: Observation) -> int:
    return 1 if is_terminal(leaf.reward) else episode.n_actions


def audit_reward(reward: AnyReward, probes: Probes) -> list[AuditedReward]:
    """Call a reward with all probes, and return the results of the whole reward and of each of its parts.

    Each text is scored alone, and four times together with all others: twice in the same order, in reverse order, and
    with other references. Texts for which the reward fails are not scored together.
    """
    by_part = {leaf.name: _measure(leaf, probes) for leaf in leaves(reward)}
    if not isinstance(reward, RewardOfParts):
        return [_audit_result("", measurements, probes) for measurements in by_part.values()]

    # The whole reward is the sum of what its parts returned: it is not called once more.
    by_name = {"": _sum(by_part), **by_part}
    return [_audit_result(name, measurements, probes) for name, measurements in by_name.items()]


def _audit_result(name: str, measurements: _Measurements, probes: Probes) -> AuditedReward:
    mean_rewards = {}
    for probe in dict.fromkeys(probes.names):
        indices = list(probes.of(probe).values())
        mean_rewards[probe] = float(np.mean(measurements.rewards[indices]))

    # The time of a usual response, so without the texts of 300 and 1200 words.
    short = [index for index, probe in enumerate(probes.names) if probe not in N_WORDS]
    return AuditedReward(
        name=name,
        rewards=mean_rewards,
        findings=sorted(_findings(measurements, probes), key=lambda finding: list(KINDS).index(finding.kind)),
        ms_alone=float(np.median(measurements.seconds[short])) * 1000,
        ms_together=measurements.seconds_together / len(probes) * 1000,
        errors=list(measurements.errors.values()),
    )


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass
class _Measurements:
    """Rewards `[n]` of all probes in each way of calling, NaN where a call failed, with times and errors."""

    alone: np.ndarray  # one text per call
    together: np.ndarray  # all texts in one call
    again: np.ndarray  # a second time
    backwards: np.ndarray  # in reverse order; the entries are in the order of the probes
    others: np.ndarray  # with other references
    wider: np.ndarray  # with more padding in the arrays of references; otherwise as `together`
    seconds: np.ndarray  # of a call with one text
    seconds_per_call: np.ndarray  # the same, divided by the tokens for rewards that are called for each token
    seconds_together: float  # of a call with all texts
    errors: dict[tuple[int, ...], str]  # indices of the texts of a failed call -> message

    @property
    def rewards(self) -> np.ndarray:
        """Reward of each text in the first call with all texts; where that failed, alone."""
        return np.where(np.isnan(self.together), self.alone, self.together)

    @property
    def noise(self) -> float:
        """Largest difference of two rewards of one text: smaller differences mean nothing."""
        return max(_ROUNDING, np.nan_to_num(np.abs(self.again - self.together)).max())


@dataclass
class _Calls:
    """Calls of a reward, weighted; errors are collected."""

    leaf: Leaf
    errors: dict[tuple[int, ...], str] = field(default_factory=dict)

    def __call__(self, episodes: Sequence[Observation], indices: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the rewards of the episodes with these indices, NaN for others, and the seconds of the call."""
        rewards = np.full(len(episodes), np.nan)
        chosen = [episodes[index] for index in indices]

        start = time.perf_counter()
        try:
            token_rewards = score_episodes(self.leaf.reward, chosen)
        except RewardError as error:
            self.errors[tuple(indices)] = str(error)
            return rewards, time.perf_counter() - start
        seconds = time.perf_counter() - start

        # Sum over each episode of the flat `[n_tokens]` rewards, from its first token to that of the next episode.
        lengths = [episode.n_actions for episode in chosen]
        first_tokens = np.cumsum([0, *lengths[:-1]])
        rewards[list(indices)] = self.leaf.weight * np.add.reduceat(token_rewards.astype(float), first_tokens)
        return rewards, seconds


def _measure(leaf: Leaf, probes: Probes) -> _Measurements:
    """Call a reward without parts in all ways; see `_Measurements`."""
    episodes = probes.episodes
    everything = list(range(len(probes)))
    call = _Calls(leaf)
    together, seconds_together = call(episodes, everything)  # before timing anything: this call loads models

    # Each text alone. If the first texts and all texts together fail, the reward fails for all: a server that is down
    # would otherwise get a request, with all retries, for each text.
    alone = np.full(len(probes), np.nan)
    seconds = np.full(len(probes), np.nan)
    for index in everything:
        rewards, seconds[index] = call(episodes, [index])
        alone[index] = rewards[index]
        if index + 1 == _N_TRIED and len(call.errors) == _N_TRIED + 1:
            break

    # If some texts fail, the comparisons between the calls are over the others.
    chosen = everything
    if tuple(everything) in call.errors and not np.isnan(alone).all():
        chosen = [index for index in everything if not np.isnan(alone[index])]
        del call.errors[tuple(everything)]
        together, _ = call(episodes, chosen)

    # Failures with changed references or arrays are not reported: no sample of the task has these.
    call_changed = _Calls(leaf)
    again = backwards = others = np.full(len(probes), np.nan)
    wider = together.copy()
    if not np.isnan(together).all():
        again, seconds_together = call(episodes, chosen)
        backwards, _ = call(episodes, chosen[::-1])
        others, _ = call_changed([_with_other_references(episode) for episode in episodes], chosen)

        # Only rewards for tokens can read the padded arrays; batched ones get texts.
        if not is_batched(leaf.reward):
            wider_episodes = [_with_more_padding(episode) for episode in episodes]
            for index in probes.of("reference").values():
                rewards, _ = call_changed(wider_episodes, [index])
                wider[index] = rewards[index]

    return _Measurements(
        alone=alone,
        together=together,
        again=again,
        backwards=backwards,
        others=others,
        wider=wider,
        seconds=seconds,
        seconds_per_call=seconds / [_calls_of(leaf, episode) for episode in episodes],
        seconds_together=seconds_together,
        errors=call.errors,
    )


def _with_other_references(episode: Observation) -> Observation:
    sample = replace(episode.sample, references=["another answer, 12345"] if episode.sample.references else [])
    return replace(episode, sample=sample)


def _with_more_padding(episode: Observation) -> Observation:
    layout = replace(
        episode.layout,
        max_prompt_length=episode.layout.max_prompt_length + N_PAD,
        max_context_length=episode.layout.max_context_length + N_PAD,
    )
    return replace(episode, layout=layout)


def _sum(by_part: Mapping[str, _Measurements]) -> _Measurements:
    """Return the measurements of a weighted sum, from those of its parts; a text that fails in one part is NaN."""
    measurements = list(by_part.values())
    sums: dict[str, Any] = {}
    for name in vars(measurements[0]):
        if name != "errors":
            sums[name] = sum(getattr(of_part, name) for of_part in measurements)

    errors = {}
    for name, part in by_part.items():
        for indices, message in part.errors.items():
            errors[indices] = f"part {name!r}: {message}"
    return _Measurements(**sums, errors=errors)


# --- findings --------------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """Text for which a reward may pay the wrong amount, and the reward that it is compared with."""

    text_index: int
    reward: float
    compared_with: float


def _findings(measurements: _Measurements, probes: Probes) -> Iterator[Finding]:
    rewards = measurements.rewards
    known = rewards[~np.isnan(rewards)]
    if measurements.errors:
        indices, message = next(iter(measurements.errors.items()))
        where = _where(probes, indices[0]) if len(indices) == 1 else "all texts together"
        fails_alone = bool(np.isnan(measurements.alone).all() and len(known))
        kind = "alone" if fails_alone else "failure"
        yield _finding(kind, f"{where}: {message} ({len(measurements.errors)} failed calls)")
    if not len(known):
        return
    yield from _differences(measurements, probes)

    # If all texts pay the same, every comparison below would be a finding.
    if np.ptp(known) <= _ROUNDING:
        yield _finding("constant", f"{known[0]:.3g}")
        return
    if np.abs(known).max() > LARGEST:
        index = int(np.nanargmax(np.abs(rewards)))
        yield _finding("magnitude", f"{rewards[index]:.3g} for {_where(probes, index)}")

    # Of each kind, the case with the largest difference is shown.
    for kind, cases in (_undeserved(measurements, probes) | _changed_by_space(measurements, probes)).items():
        if cases:
            worst = max(cases, key=lambda case: abs(case.reward - case.compared_with))
            n_samples = len({probes.episodes[case.text_index].sample.id for case in cases})
            numbers = f"{worst.reward:.3g} against {worst.compared_with:.3g} for {_where(probes, worst.text_index)}"
            yield _finding(kind, f"{numbers}; {n_samples} of {len(probes.samples)} samples")

    # Four times the words should take about four times as long; short times are mostly overhead.
    ms_per_call = measurements.seconds_per_call * 1000
    long_ms = ms_per_call[probes.names.index("long")]
    very_long_ms = ms_per_call[probes.names.index("very_long")]
    if very_long_ms > max(_MIN_MS, _MAX_GROWTH * long_ms):
        yield _finding("slow", f"{very_long_ms:.0f} ms against {long_ms:.0f} ms")


def _differences(measurements: _Measurements, probes: Probes) -> Iterator[Finding]:
    """Yield the first cause of rewards that differ for the same text."""
    # In this order, because a reward that is random also differs by order and by batch.
    together = measurements.together
    other_calls = {"unstable": measurements.again, "order": measurements.backwards, "batch": measurements.alone}
    for kind, rewards in other_calls.items():
        gaps = np.nan_to_num(np.abs(rewards - together))
        index = int(gaps.argmax())

        # Relative for large rewards, whose last digits differ more.
        if gaps[index] > _ROUNDING * max(1.0, abs(rewards[index])):
            yield _finding(kind, f"{together[index]:.4g} and {rewards[index]:.4g} for {_where(probes, index)}")
            return


def _uses_references(measurements: _Measurements) -> bool:
    """Return True if other references change the reward of a text by more than the noise."""
    is_unchanged = np.abs(measurements.others - measurements.rewards) <= measurements.noise
    return not is_unchanged[~np.isnan(measurements.together)].all()


def _compared_with_references(measurements: _Measurements, probes: Probes) -> dict[str, list[_Case]]:
    """Return the cases of each probe: its texts, compared with the reward of their sample's reference.

    If the reward does not use references, a sample's own one is no standard: the best of all is taken.
    """
    rewards = measurements.rewards
    lowest = np.nanmin(rewards)
    references = probes.of("reference")
    best = max((rewards[index] for index in references.values()), default=np.nanmax(rewards))
    uses_references = _uses_references(measurements)

    cases: dict[str, list[_Case]] = {}
    for probe in dict.fromkeys(probes.names):
        cases[probe] = []
        for sample_id, index in probes.of(probe).items():
            if not uses_references:
                cases[probe].append(_Case(index, rewards[index], best))
            # A reference that pays no more than the worst text says nothing about the others: all pay as much.
            elif sample_id in references and _is_more(rewards[references[sample_id]], lowest, measurements.noise):
                cases[probe].append(_Case(index, rewards[index], rewards[references[sample_id]]))
    return cases


def _undeserved(measurements: _Measurements, probes: Probes) -> dict[str, list[_Case]]:
    """Return the cases of each kind in which a text pays too much, or a reference too little."""
    rewards = measurements.rewards
    noise = measurements.noise
    lowest = np.nanmin(rewards)
    compared = _compared_with_references(measurements, probes)
    as_much_as_reference = dict(_OF_ANY_REWARD)
    more_than_reference = {probe: "verbosity" for probe in N_WORDS}
    if _uses_references(measurements):
        as_much_as_reference |= _OF_COMPARISONS
        more_than_reference["truncated"] = "truncation"

    # Texts that should pay less than a reference. The lowest of all rewards is never too much.
    undeserved: dict[str, list[_Case]] = {kind: [] for kind in KINDS}
    for probe, kind in as_much_as_reference.items():
        for case in compared.get(probe, []):
            pays_as_much = not _is_more(case.compared_with, case.reward, noise)
            if pays_as_much and _is_more(case.reward, lowest, noise):
                undeserved[kind].append(case)

    # Texts that may pay as much, but not more: a long text can be right, half a reference can be enough.
    for probe, kind in more_than_reference.items():
        for case in compared.get(probe, []):
            if _is_more(case.reward, case.compared_with, noise):
                undeserved[kind].append(case)

    if _uses_references(measurements):
        for index in probes.of("reference").values():
            if not _is_more(rewards[index], lowest, noise):
                undeserved["reference"].append(_Case(index, rewards[index], lowest))
    return undeserved


def _changed_by_space(measurements: _Measurements, probes: Probes) -> dict[str, list[_Case]]:
    """Return the references that pay another amount with white space around them, or with more padding."""
    rewards = measurements.rewards
    references = probes.of("reference")
    cases: dict[str, list[_Case]] = {}
    for probe, kind in {"whitespace": "whitespace", "padded": "padding"}.items():
        compared = probes.of(probe).items()
        cases[kind] = [_Case(index, rewards[index], rewards[references[id]]) for id, index in compared]
    cases["padding"] += [_Case(index, measurements.wider[index], rewards[index]) for index in references.values()]

    noise = measurements.noise
    changed: dict[str, list[_Case]] = {}
    for kind, compared_texts in cases.items():
        changed[kind] = []
        for case in compared_texts:
            pays_more = _is_more(case.reward, case.compared_with, noise)
            if pays_more or _is_more(case.compared_with, case.reward, noise):
                changed[kind].append(case)
    return changed


def _is_more(reward: float, other: float, noise: float) -> bool:
    return reward > other + max(noise, TOLERANCE * max(abs(reward), abs(other)))


def _finding(kind: str, numbers: str) -> Finding:
    return Finding(kind, f"{KINDS[kind]}: {numbers}")


def _where(probes: Probes, index: int) -> str:
    return f"the text {probes.names[index]!r} of sample {probes.episodes[index].sample.id!r}"
