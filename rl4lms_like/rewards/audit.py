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

import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import AnyReward, RewardOfParts
from rl4lms_like.rewards.call import Leaf, is_batched, is_terminal, leaves, score_episodes
from rl4lms_like.rewards.probes import N_PAD, N_WORDS, Probes

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
        per_text = [_calls_of(leaf, episode) for episode in probes.episodes]
        n_references = sum(per_text[index] for index in probes.of("reference").values())
        total += len(probes) + 5 if is_batched(leaf.reward) else 6 * sum(per_text) + n_references
    return total


def _calls_of(leaf: Leaf, episode: Observation) -> int:
    return 1 if is_terminal(leaf.reward) else episode.n_actions


def audit_reward(reward: AnyReward, probes: Probes) -> list[AuditedReward]:
    """Call a reward with all probes, and return the results of the whole reward and of each of its parts.

    Each text is scored alone, and four times together with all others: twice in the same order, in reverse order, and
    with other references. Texts for which the reward fails are not scored together.
    """
    by_part = {leaf.name: _measured(leaf, probes) for leaf in leaves(reward)}
    if not isinstance(reward, RewardOfParts):
        return [_audited("", measured, probes) for measured in by_part.values()]
    return [_audited(name, measured, probes) for name, measured in [("", _sum(by_part)), *by_part.items()]]


def _audited(name: str, measured: _Measured, probes: Probes) -> AuditedReward:
    of_probe = {probe: list(probes.of(probe).values()) for probe in dict.fromkeys(probes.names)}
    short = [index for index, probe in enumerate(probes.names) if probe not in N_WORDS]
    return AuditedReward(
        name,
        {probe: float(np.mean(measured.paid[indices])) for probe, indices in of_probe.items()},
        sorted(_findings(measured, probes), key=lambda finding: list(KINDS).index(finding.kind)),
        float(np.median(measured.seconds[short])) * 1000,
        measured.seconds_together / len(probes) * 1000,
        list(measured.errors.values()),
    )


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass
class _Measured:
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
    def paid(self) -> np.ndarray:
        """Reward of each text in the first call with all texts; where that failed, alone."""
        return np.where(np.isnan(self.together), self.alone, self.together)


@dataclass
class _Calls:
    """Calls of a reward, weighted; errors are collected."""

    leaf: Leaf
    errors: dict[tuple[int, ...], str] = field(default_factory=dict)

    def __call__(self, episodes: Sequence[Observation], indices: Sequence[int]) -> tuple[np.ndarray, float]:
        """Return the rewards of the episodes with these indices, NaN for others, and the seconds of the call."""
        rewards = np.full(len(episodes), np.nan)
        chosen = [episodes[index] for index in indices]
        began = time.perf_counter()
        try:
            of_tokens = score_episodes(self.leaf.reward, chosen)
        except RewardError as error:
            self.errors[tuple(indices)] = str(error)
            return rewards, time.perf_counter() - began
        seconds = time.perf_counter() - began
        starts = np.cumsum([0, *(episode.n_actions for episode in chosen[:-1])])
        rewards[list(indices)] = self.leaf.weight * np.add.reduceat(of_tokens.astype(float), starts)
        return rewards, seconds


def _measured(leaf: Leaf, probes: Probes) -> _Measured:
    episodes, everything = probes.episodes, list(range(len(probes)))
    call, call_changed = _Calls(leaf), _Calls(leaf)
    together, seconds_together = call(episodes, everything)  # before timing anything: this call loads models
    alone, seconds = np.full((2, len(probes)), np.nan)
    for index in everything:
        rewards, seconds[index] = call(episodes, [index])
        alone[index] = rewards[index]
        if index + 1 == _N_TRIED and len(call.errors) == _N_TRIED + 1:
            break  # a server that is down is not asked for each text
    chosen = everything
    if tuple(everything) in call.errors and not np.isnan(alone).all():
        chosen = [index for index in everything if not np.isnan(alone[index])]
        del call.errors[tuple(everything)]
        together, _ = call(episodes, chosen)
    again = backwards = others = np.full(len(probes), np.nan)
    wider = together.copy()
    if not np.isnan(together).all():
        again, seconds_together = call(episodes, chosen)
        backwards, _ = call(episodes, chosen[::-1])
        others, _ = call_changed([_with_other_references(episode) for episode in episodes], chosen)
        for index in () if is_batched(leaf.reward) else probes.of("reference").values():  # batched ones get no arrays
            wider[index] = call_changed([_with_more_padding(episode) for episode in episodes], [index])[0][index]
    per_call = seconds / [_calls_of(leaf, episode) for episode in episodes]
    return _Measured(alone, together, again, backwards, others, wider, seconds, per_call, seconds_together, call.errors)


def _with_other_references(episode: Observation) -> Observation:
    sample = replace(episode.sample, references=["another answer, 12345"] if episode.sample.references else [])
    return replace(episode, sample=sample)


def _with_more_padding(episode: Observation) -> Observation:
    layout = episode.layout
    lengths = layout.max_prompt_length + N_PAD, layout.max_context_length + N_PAD
    return replace(episode, layout=replace(layout, max_prompt_length=lengths[0], max_context_length=lengths[1]))


def _sum(by_part: Mapping[str, _Measured]) -> _Measured:
    parts = list(by_part.values())
    sums = {name: sum(getattr(part, name) for part in parts) for name in vars(parts[0]) if name != "errors"}
    errors = {key: f"part {name!r}: {text}" for name, part in by_part.items() for key, text in part.errors.items()}
    return _Measured(**sums, errors=errors)


# --- findings --------------------------------------------------------------------------------------------------------


def _findings(measured: _Measured, probes: Probes) -> Iterator[Finding]:
    paid = measured.paid
    known = paid[~np.isnan(paid)]
    alone_fails = bool(np.isnan(measured.alone).all() and len(known))
    if measured.errors:
        indices, text = next(iter(measured.errors.items()))
        where = _where(probes, indices[0]) if len(indices) == 1 else "all texts together"
        yield _finding("alone" if alone_fails else "failure", f"{where}: {text} ({len(measured.errors)} failed calls)")
    if not len(known):
        return
    yield from _differences(measured, probes)
    if np.ptp(known) <= _ROUNDING:
        yield _finding("constant", f"{known[0]:.3g}")
        return
    if np.abs(known).max() > LARGEST:
        index = int(np.nanargmax(np.abs(paid)))
        yield _finding("magnitude", f"{paid[index]:.3g} for {_where(probes, index)}")
    for kind, cases in _payments(measured, probes).items():
        if cases:
            index, reward, other = max(cases, key=lambda case: abs(case[1] - case[2]))
            n_samples = len({probes.episodes[case[0]].sample.id for case in cases})
            numbers = f"{reward:.3g} against {other:.3g} for {_where(probes, index)}"
            yield _finding(kind, f"{numbers}; {n_samples} of {len(probes.samples)} samples")
    long, very_long = (measured.seconds_per_call[probes.names.index(name)] * 1000 for name in N_WORDS)
    if very_long > max(_MIN_MS, _MAX_GROWTH * long):
        yield _finding("slow", f"{very_long:.0f} ms against {long:.0f} ms")


def _differences(measured: _Measured, probes: Probes) -> Iterator[Finding]:
    """Yield the first cause of rewards that differ for the same text."""
    ways = {"unstable": measured.again, "order": measured.backwards, "batch": measured.alone}
    for kind, rewards in ways.items():
        gaps = np.nan_to_num(np.abs(rewards - measured.together))
        index = int(gaps.argmax())
        if gaps[index] > _ROUNDING * max(1.0, abs(rewards[index])):
            yield _finding(kind, f"{measured.together[index]:.4g} and {rewards[index]:.4g} for {_where(probes, index)}")
            return


def _payments(measured: _Measured, probes: Probes) -> dict[str, list[tuple[int, float, float]]]:
    """Return the cases of each kind: index of the text, its reward, the reward that it is compared with."""
    paid, references = measured.paid, probes.of("reference")
    low, high = np.nanmin(paid), np.nanmax(paid)
    noise = max(_ROUNDING, np.nan_to_num(np.abs(measured.again - measured.together)).max())
    uses_references = not (np.abs(measured.others - paid) <= noise)[~np.isnan(measured.together)].all()
    best = max((paid[index] for index in references.values()), default=high)

    def is_more(reward: float, other: float) -> bool:
        return reward > other + max(noise, TOLERANCE * max(abs(reward), abs(other)))

    def against(probe: str) -> Iterator[tuple[int, float, float]]:
        """Yield the cases of a probe; a reward that does not use references is compared with its best reference."""
        for id, index in probes.of(probe).items():
            if not uses_references:
                yield index, paid[index], best
            elif id in references and is_more(paid[references[id]], low):  # otherwise every text pays as much
                yield index, paid[index], paid[references[id]]

    found: dict[str, list[tuple[int, float, float]]] = {}
    for probe, kind in (_OF_ANY_REWARD | (_OF_COMPARISONS if uses_references else {})).items():
        cases = [case for case in against(probe) if not is_more(case[2], case[1]) and is_more(case[1], low)]
        found[kind] = found.get(kind, []) + cases
    long = [case for probe in N_WORDS for case in against(probe)]
    found["verbosity"] = [case for case in long if is_more(case[1], case[2])]
    if uses_references:
        found["truncation"] = [case for case in against("truncated") if is_more(case[1], case[2])]
        unpaid = [index for index in references.values() if not is_more(paid[index], low)]
        found["reference"] = [(index, paid[index], low) for index in unpaid]
    wrapped, padded = (
        [(index, paid[index], paid[references[id]]) for id, index in probes.of(probe).items()]
        for probe in ("whitespace", "padded")
    )
    padded += [(index, measured.wider[index], paid[index]) for index in references.values()]
    for kind, cases in (("whitespace", wrapped), ("padding", padded)):
        found[kind] = [case for case in cases if is_more(*case[1:]) or is_more(*case[:0:-1])]
    return found


def _finding(kind: str, numbers: str) -> Finding:
    return Finding(kind, f"{KINDS[kind]}: {numbers}")


def _where(probes: Probes, index: int) -> str:
    return f"the text {probes.names[index]!r} of sample {probes.episodes[index].sample.id!r}"
