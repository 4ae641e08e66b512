from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking import Tracker, write_report
from rl4lms_like.tracking.charts import CURVES
from rl4lms_like.tracking.console import COLUMNS
from rl4lms_like.tracking.record import read_run

CONFIG = {
    "alg": {"id": "ppo", "kl_div": {"target_kl": 0.1}, "policy": {"args": {"model_name": "tiny"}}},
    "train_evaluation": {"n_iters": 3},
    "seed": 7,
}
HOSTILE = "</details><script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\""
VOID = {"meta", "rect", "line", "circle", "polyline", "polygon", "img", "br"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page_of(path: Path) -> Page:
    return Page(write_report(path).read_text(encoding="utf-8"))


def predictions(epoch: int, ids=range(3), text: str = "text") -> list[dict]:
    return [
        {"split_name": "val", "sample_id": i, "prompt_text": f"prompt-{i}", "generated_text": f"{text} {i} at {epoch}"}
        | {"ref_text": "<START-1>first<END-1><START-2>second<END-2>", "m/score": 0.1 * epoch, "m/none": "n/a"}
        for i in ids
    ]


@pytest.fixture
def tracker(tmp_path):
    with Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True) as tracker:
        yield tracker


def whole_run(tracker: Tracker) -> None:
    tracker.log_metrics(0, "val", {"m/score": 0.25})
    tracker.log_predictions(0, "val", predictions(0))
    for iteration in range(1, 4):
        tracker.log_rollout_infos({key: 0.1 * iteration for curve in CURVES for key in rollout_keys(curve)})
        tracker.log_training_infos({key: 0.1 * iteration for curve in CURVES for key in training_keys(curve)})
    tracker.log_metrics(3, "val", {"m/score": 0.75})
    tracker.log_predictions(3, "val", list(reversed(predictions(3))))


def first_keys(curve) -> list[str]:
    return [keys[0] for keys in curve.lines.values()]


def rollout_keys(curve) -> list[str]:
    return [key for key in first_keys(curve) if key.startswith(("rollout_info/", "time/"))]


def training_keys(curve) -> list[str]:
    return [key for key in first_keys(curve) if key not in rollout_keys(curve)]


def test_a_whole_run_shows_every_curve_and_metric(tracker):
    whole_run(tracker)
    page = page_of(tracker.run_path)
    assert page.count("svg") == len(CURVES) + 1
    for curve in CURVES:
        assert curve.title in page.text
    for part in ("experiment", "ppo", "tiny", "3 iterations", "+0.5", "0.25", "0.75", "target 0.1"):
        assert part in page.text
    assert any(attrs.get("class") == "target" for tag, attrs in page.tags if tag == "line")


def test_every_part_of_a_combined_reward_has_a_chart(tracker):
    for iteration in range(1, 4):
        parts = {"meteor": 0.25 * iteration, "length_std": -0.5}
        logged = {f"rollout_info/reward/{name}{end}": value for name, value in parts.items() for end in ("", "_std")}
        tracker.log_rollout_infos({"rollout_info/ep_rew": 0.1} | logged)
    page = page_of(tracker.run_path)
    assert page.count("svg") == 3
    for message in ("Reward components", "meteor", "length_std", "contribution to an episode's reward"):
        assert message in page.text


def test_every_number_of_a_callback_has_a_chart(tracker):
    for iteration in range(1, 4):
        numbers = {"callback/Longest/tokens": 2.0 * iteration, "callback/Longest/words": 1.0}
        tracker.log_training_infos({"ppo/value_loss": 0.1} | numbers)
    page = page_of(tracker.run_path)
    assert page.count("svg") == 3
    for message in ("Numbers of callbacks", "Longest/tokens", "Longest/words"):
        assert message in page.text


def test_each_split_has_a_colour_of_its_own_and_those_of_averages_come_last(tracker):
    for split in ("average_test", "average_val", "test", "val"):
        tracker.log_metrics(0, split, {"m/score": 0.25})
        tracker.log_metrics(1, split, {"m/score": 0.5})
    html = write_report(tracker.run_path).read_text(encoding="utf-8")
    assert re.findall(r"<caption>(\w+)", html) == ["val", "test", "average_val", "average_test"]
    colours = re.findall(r"\.line-\d \.line \{ stroke: (var\(--\w+\))", html)
    assert len(set(colours)) == 4


def test_the_page_is_self_contained(tracker):
    whole_run(tracker)
    html = write_report(tracker.run_path).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)
    assert not re.search(r"https?://|@import|url\(", html)


def test_generated_text_is_text(tracker):
    tracker.log_predictions(0, "val", predictions(0, text=HOSTILE))
    tracker.log_metrics(0, "val", {f"m/{HOSTILE}": 0.5})
    page = page_of(tracker.run_path)
    assert page.count("script") == page.count("img") == 0
    assert f"{HOSTILE} 0 at 0" in page.text


def test_samples_are_paired_by_id_between_the_first_and_the_last_evaluation(tracker):
    whole_run(tracker)
    text = page_of(tracker.run_path).text
    for i in range(3):
        before, after = text.index(f"text {i} at 0"), text.index(f"text {i} at 3")
        assert text.index(f"prompt-{i}") < before < after
    assert "0 → 0.3" in text and "2 references" in text


def test_a_sample_that_one_of_the_evaluations_lacks_is_not_paired(tracker):
    tracker.log_predictions(0, "val", predictions(0, ids=[0, 1, 2]))
    tracker.log_predictions(1, "val", predictions(1, ids=[2, 0, 5]))
    text = page_of(tracker.run_path).text
    assert "text 0 at 1" in text and "text 2 at 1" in text
    assert "prompt-1" not in text and "prompt-5" not in text


def test_long_texts_are_folded_and_many_samples_too(tracker):
    tracker.log_predictions(0, "val", predictions(0, ids=range(100), text="long " * 300))
    page = page_of(tracker.run_path)
    assert "24 of 100, evenly spaced" in page.text
    assert sum(attrs.get("class") == "long" for tag, attrs in page.tags if tag == "details") == 24
    assert "18 more" in page.text


def test_an_unfinished_run_is_called_so(tracker):
    tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})
    assert "unfinished, 1 of 3 iterations" in page_of(tracker.run_path).text


@pytest.mark.parametrize("value", [1.0, 0.0, float("nan")])
def test_one_point_is_enough_and_none_draws_nothing(tracker, value):
    tracker.log_rollout_infos({"rollout_info/ep_rew": value, "rollout_info/ep_rew_std": 0.5})
    tracker.log_training_infos({"train/ratio_gap": value})
    assert page_of(tracker.run_path).count("svg") == (0 if value != value else 2)


@pytest.mark.parametrize(("penalty", "title"), [(-0.5, "KL penalty"), (0.0, "KL loss")], ids=["reward", "loss"])
def test_the_kl_penalty_is_shown_where_it_is(tracker, penalty, title):
    tracker.log_rollout_infos({"rollout_info/ep_kl_rew": penalty})
    if not penalty:
        tracker.log_training_infos({"ppo/kl_loss": 0.1})
    text = page_of(tracker.run_path).text
    assert [name for name in ("KL penalty", "KL loss") if name in text] == [title]


def test_a_run_that_logged_nothing_still_has_a_report(tracker):
    page = page_of(tracker.run_path)
    assert page.count("svg") == 0
    assert "no iteration yet" in page.text


def test_a_single_evaluation_has_no_change(tracker):
    tracker.log_metrics(0, "test", {"m/score": 0.5, "m/none": float("nan")})
    page = page_of(tracker.run_path)
    assert "change" not in page.text
    assert page.count("svg") == 1


def test_a_line_that_is_being_written_is_left_out_and_later_lines_replace_earlier_ones(tracker):
    for value in (1.0, 2.0):
        tracker.log_values({"rollout_info/ep_rew": value, "time/iteration": 1})
    with (tracker.run_path / "rollout_info.jsonl").open("a") as stream:
        stream.write('{"iteration": 2, "roll')
    assert read_run(tracker.run_path).curve("rollout_info/ep_rew") == [(1, 2.0)]


def test_a_run_folder_of_rl4lms_is_read_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "rollout_info.jsonl").write_text('{"rollout_info/ep_rew": 1.0}\n{"rollout_info/ep_rew": NaN}\n')
    assert read_run(tmp_path).curve("rollout_info/ep_rew") == [(1, 1.0), (2, None)]
    assert page_of(tmp_path).count("svg") == 1


def test_a_folder_without_a_run_and_a_broken_file_are_errors(tmp_path, tracker):
    with pytest.raises(RL4LMsLikeError, match=str(tmp_path)):
        write_report(tmp_path)
    (tracker.run_path / "val_split_metrics.jsonl").write_text("not json\n")
    with pytest.raises(RL4LMsLikeError, match=r"val_split_metrics\.jsonl"):
        write_report(tracker.run_path)


@pytest.mark.parametrize(
    "file",
    [
        *("config.json", "epoch_0_val_split_predictions.json"),
        *("rollout_info.jsonl", "val_split_metrics.jsonl", "alarms.jsonl", "token_credit.jsonl"),
    ],
)
@pytest.mark.parametrize("content", ["[" * 200_000, "[1]", "3", "9" * 5000, "\udcff", '{"a": 1'])
def test_a_file_that_no_run_wrote_is_named(tracker, file, content):
    whole_run(tracker)
    (tracker.run_path / file).write_text(content + "\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(RL4LMsLikeError, match=re.escape(file)):
        write_report(tracker.run_path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        *(("rollout_info.jsonl", f'{{"iteration": {value}}}') for value in ('"1"', "null", "[1]", "NaN", "1e308")),
        *(("val_split_metrics.jsonl", f'{{"epoch": {value}, "metrics": {{}}}}') for value in ('"1"', "Infinity")),
        ("val_split_metrics.jsonl", '{"metrics": {}}'),
        ("val_split_metrics.jsonl", '{"epoch": 1, "metrics": null}'),
        ("alarms.jsonl", "{}"),
        ("alarms.jsonl", '{"alarm": "x", "examples": [1]}'),
    ],
)
def test_a_line_that_no_run_wrote_is_named_with_its_file(tracker, file, line):
    whole_run(tracker)
    with (tracker.run_path / file).open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RL4LMsLikeError, match=re.escape(file)):
        write_report(tracker.run_path)


def test_numbers_too_large_for_a_chart_are_gaps_and_a_time_that_never_was_is_none(tracker):
    lines = "".join(
        f'{{"iteration": {i}, "rollout_info/ep_rew": {x}}}\n' for i, x in enumerate(("1e308", "-1e308", "1"))
    )
    (tracker.run_path / "rollout_info.jsonl").write_text(
        lines + f'{{"iteration": 3, "rollout_info/ep_rew": {10**400}}}\n'
    )
    (tracker.run_path / "log.txt").write_text("2026-99-99 99:99:99 a message\n")
    assert read_run(tracker.run_path).curve("rollout_info/ep_rew") == [(0, None), (1, None), (2, 1.0), (3, None)]
    page_of(tracker.run_path)


def test_every_key_that_is_drawn_or_shown_is_explained():
    explained = (Path(__file__).parents[2] / "docs" / "metrics_explained.md").read_text(encoding="utf-8")
    drawn = [(key, curve.band) for curve in CURVES for keys in curve.lines.values() for key in keys]
    drawn += [(key, False) for column in COLUMNS for key in column.keys]
    missing = [key for key, _ in drawn if f"`{key}`" not in explained]
    missing += [
        f"{key}_std" for key, band in drawn if band and "rollout_info" in key and f"`{key}_std`" not in explained
    ]
    assert missing == []
