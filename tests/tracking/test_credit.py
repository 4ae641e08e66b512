"""The report's section on tokens: one scale for all, nothing by colour alone, texts are texts."""

from __future__ import annotations

import json
import re
from math import exp

import numpy as np
import pytest

from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking import Tracker, credit, write_report
from rl4lms_like.tracking.credit import QUANTITIES, Scale, classes_of, visible
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from tests.conftest import REPOSITORY
from tests.tracking.test_report import CONFIG, HOSTILE, Page

ADVANTAGE, KL, RATIO, CLIPPING, REWARD = QUANTITIES
TEMPLATES = REPOSITORY / "rl4lms_like" / "tracking"


def episode(tokens=("A", " good", " film", ""), rank=1, followed=False, terminated=True, **lists):
    n = len(tokens)
    numbers = {
        "rewards": [-0.1] * (n - 1) + [1.0], "kl_rewards": [-0.1] * n, "advantages": [0.5] * n, "returns": [0.25] * n,
        "values": [-0.25] * n, "kl": [0.02] * n, "probs": [0.5] * n, "ratios": [1.1] * n, "clipped": [0] * n,
    } | lists  # fmt: skip
    return {
        "sample_id": "film_7", "rank": rank, "followed": followed, "reward": 0.75, "terminated": terminated,
        "prompt": "We saw", "tokens": list(tokens), "token_ids": list(range(n)), "special": {str(n - 1): "<eos>"},
        **{name: numbers for name, numbers in numbers.items() if numbers is not None},
    }  # fmt: skip


def line(iteration, *episodes, **head):
    known = {"iteration": iteration, "n_episodes": 9, "normalized": "rollout", "clip_range": 0.2, "kl_coeff": 0.1}
    return {**known, **head, "episodes": list(episodes) or [episode()]}


@pytest.fixture
def report(tmp_path):
    """The page of a run with these lines."""
    with Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True) as tracker:
        for iteration in range(1, 4):
            tracker.log_rollout_infos({"rollout_info/ep_rew": iteration / 4, "time/iteration": iteration})

        def write(*lines):
            for each in lines:
                tracker.log_line(CREDIT_FILE, each)
            return write_report(tracker.run_path).read_text(encoding="utf-8")

        yield write


def tokens_of(html: str) -> list[tuple[str, str, str]]:
    """Class, title and text of every token on the page."""
    return re.findall(r'<span(?: class="([^"]*)")? title="([^"]*)">(.*?)</span>', html, re.DOTALL)


def test_a_run_that_recorded_nothing_has_no_such_section(report):
    plain = report()
    assert "redit" not in plain
    assert report({"iteration": 1, "n_episodes": 4, "episodes": []}) == plain


def test_every_quantity_can_be_chosen_without_script(report):
    html = report(line(1))
    page = Page(html)
    radios = [attrs for tag, attrs in page.tags if tag == "input"]
    labels = [attrs["for"] for tag, attrs in page.tags if tag == "label"]
    assert [radio["id"] for radio in radios] == labels == ["credit-a", "credit-k", "credit-r", "credit-c", "credit-w"]
    assert [radio["id"] for radio in radios if "checked" in radio] == ["credit-a"]
    assert {radio["name"] for radio in radios} == {"credit"}
    assert html.index('id="credit-w"') < html.index('class="views"') < html.index('class="rollouts"')
    style = html.partition("</style>")[0]
    for key in "akrcw":
        for level, side in ((level, side) for level in range(1, 6) for side in ("up", "down")):
            name = f"{key}{level}" if side == "up" else f"{key}-{level}"
            assert f"#credit-{key}:checked ~ * .{name} {{ background: var(--{side}-{level}); }}" in style
    assert page.count("script") == 0


def test_iterations_stand_in_order_and_the_newest_is_open(report):
    html = report(*(line(iteration) for iteration in (1, 2, 3)))
    folds = re.findall(r'<details class="fold"( open)?>\s*<summary>Iteration (\d+) <small>(.*?)</small>', html)
    assert folds == [("", "1", "reward 0.25"), ("", "2", "reward 0.5"), (" open", "3", "reward 0.75")]


def test_a_line_that_was_written_again_counts_once(report):
    html = report(line(1), line(2), line(2, episode(("again",))))
    assert html.count("<summary>Iteration 2 ") == 1 and ">again" in html


def test_what_has_no_meaning_has_no_column(report):
    bare = episode(kl=None, kl_rewards=None, clipped=None)
    html = report(line(1, bare))
    page = Page(html)
    assert [attrs["for"] for tag, attrs in page.tags if tag == "label"] == ["credit-a", "credit-r", "credit-w"]
    assert "There is no reference model" in page.text
    assert not re.search(r"<th[^>]*>(KL|gradient|allowed tokens)", html)
    assert "<th" in html and "allowed tokens" in report(line(2, episode(n_allowed=[3, 4, 5, 6])))


def test_equal_colours_are_equal_numbers_in_all_iterations(report):
    many = ["x"] * 50
    first, second = [0.5, -0.5, 4.0, 8.0] * 12 + [0.1, 0.0], [-8.0, 1e9, None, 0.5] + [8.0] * 46
    html = report(line(1, episode(many, advantages=first)), line(2, episode(many, advantages=second)))
    found = [re.findall(r"\ba-?\d", classes) for classes, _, _ in tokens_of(html)]
    assert found[:4] == [["a1"], ["a-1"], ["a4"], ["a5"]] and found[48:50] == [[], []]
    assert found[50:54] == [["a-5"], ["a5"], [], ["a1"]]


@pytest.mark.parametrize("values", [[0.5, -7.0, 3.0] * 20 + [900.0], [-1e-6] * 60, [3.0]])
def test_a_scale_is_symmetric_doubles_and_reaches_over_most_tokens(values):
    scale = Scale.over(ADVANTAGE, values)
    sizes = np.abs(values)
    assert f"{scale.step:.0e}"[0] in "125"
    for level in range(1, 6):
        middle = scale.step * 2 ** (level - 1)
        assert (scale.level(middle), scale.level(-middle)) == (level, -level)
        assert level == 1 or scale.level(middle * 0.75) in (level - 1, level)
    assert np.mean(sizes <= scale.step * 16 * 1.0001) >= 0.98
    assert scale.step * 16 < 2.6 * np.quantile(sizes, 0.98)
    assert (scale.level(0.0), scale.level(None), scale.level(scale.step / 2)) == (0, 0, 0)


def test_a_ratio_is_as_far_from_one_as_its_inverse():
    scale = Scale.over(RATIO, [exp(0.16), exp(-0.3), 1.0, None, 0.0])
    assert [scale.level(exp(0.16)), scale.level(exp(-0.16)), scale.level(1.0), scale.level(0.0)] == [4, -4, 0, -5]
    assert scale.level(None) == 0
    words = [word for _, word in scale.legend]
    assert words[5] == "1.00" and words[0].startswith("≤ 0.") and words[-1].startswith("≥ 1.")


def test_the_legend_has_a_number_for_every_colour():
    legend = Scale(ADVANTAGE, 0.5).legend
    assert [word for _, word in legend] == ["≤ −8", "−4", "−2", "−1", "−0.5", "0", "+0.5", "+1", "+2", "+4", "≥ +8"]
    assert [level for level, _ in legend] == [*range(-5, 6)]
    assert Scale.over(KL, [0.0, None]).level(0.0) == 0


def test_clipped_tokens_are_underlined_and_said(report):
    lists = {"ratios": [1.3, 0.7, 1.3, 1.1], "advantages": [1.0, -1.0, -1.0, 1.0], "clipped": [1, -1, 0, 0]}
    html = report(line(1, episode(**lists)))
    (cut, title, _), (below, _, _), (out, _, _), (within, _, _) = tokens_of(html)
    assert "cut" in cut.split() and "c5" in cut.split() and "gradient cut above" in title
    assert "cut" in below.split() and "c-5" in below.split()
    assert "out" in out.split() and "c2" in out.split() and "cut" not in out.split()
    assert not {"cut", "out"} & set(within.split())
    assert "#credit-c:checked ~ * .cut { text-decoration: underline" in html
    assert classes_of({"ratios": 1.3}, [], None) == ""  # no clip range: nothing is out of it


def test_a_title_and_a_row_have_all_numbers_with_their_signs(report):
    html = report(line(1, episode(values=[-0.25, None, 0.0, 1.0])))
    _, title, _ = tokens_of(html)[1]
    assert title.split("\n") == [
        "“good”", "advantage +0.5", "return +0.25", "value –", "probability 0.5", "after the update 0.55", "ratio 1.1",
        "KL +0.02", "reward −0.1", "KL penalty −0.1",
    ]  # fmt: skip
    rows = re.findall(r"<tr>(<td>.*?)</tr>", html.partition("Credit assignment")[2], re.DOTALL)
    assert re.findall(r"<td>(.*?)</td>", rows[1])[:4] == [" good", "+0.5", "+0.25", "–"]


def test_generated_text_is_text_and_what_cannot_be_seen_is_shown(report):
    tokens = (HOSTILE, "\n", "  ", " a\tb", "\x00\x1b\u202e", "", "x")
    html = report(line(1, episode(tokens, terminated=False, special={})))
    page = Page(html)
    assert page.count("script") == page.count("img") == 0
    assert HOSTILE in page.text
    texts = [text for _, _, text in tokens_of(html)]
    assert texts[1:] == ["↵\n", "␣␣", " a⇥\tb", "␀␛▫", "▫", "x"]
    assert "cut at the length limit" in page.text


def test_the_end_of_a_text_is_a_sign_and_special_tokens_have_their_name(report):
    tokens = ("A", "", "")
    html = report(line(1, episode(tokens, special={"1": "<pad>", "2": "<eos>"})))
    assert [text for _, _, text in tokens_of(html)] == ["A", "&lt;pad&gt;", "■"]
    assert "cut at the length limit" not in html
    assert visible("\u00a0") == "␣" and visible("") == "" and visible("\r\n") == "↵\n"


def test_one_prompt_is_followed_over_time(report):
    assert "One prompt over time" not in report(line(1, episode(rank=4, followed=True)))
    html = report(line(2, episode()), line(3, episode(("Much", " better"), rank=9, followed=True)))
    strip = html.partition("One prompt over time")[2].partition("Iteration 1 ")[0]
    assert re.findall(r"<b>(iteration \d)</b> · reward 0.75, ([\w ]+)", strip) == [
        ("iteration 1", "rank 4 of 9"), ("iteration 3", "worst of 9"),
    ]  # fmt: skip
    assert "Much" in strip


def test_a_long_run_of_long_texts_stays_small(report):
    many = [" word"] * 1000
    html = report(*(line(iteration, *(episode(many, rank=rank) for rank in (1, 5, 9))) for iteration in range(1, 41)))
    shown = re.findall(r"<summary>Iteration (\d+)", html)
    assert (shown[0], shown[-1]) == ("1", "40") and len(shown) == 6
    assert f"of {40} recorded" in html and "… 600 tokens are not shown …" in html
    assert len(tokens_of(html)) == 6 * 3 * credit.LONGEST <= credit.N_TOKENS
    assert len(html) < 5e6


def test_of_many_recorded_episodes_a_few_are_shown_and_the_others_counted(report):
    assert "more in token_credit" not in report(line(1))
    many = [episode([" word"] * 100, rank=rank) for rank in range(1, 201)]
    many[7]["followed"] = True
    html = report(line(1, *many, n_episodes=200), line(2, *many, n_episodes=200))
    shown = re.findall(r"<b>([\w ]+) of 200</b>", html.partition("Iteration 1 ")[2].partition("Iteration 2 ")[0])
    assert (shown[0], shown[-1], len(shown)) == ("best", "worst", 11) and "rank 8" in shown
    assert "Each iteration has up to 189 more in token_credit.jsonl." in html
    assert len(tokens_of(html)) == 2 * 12 * 100  # the followed ones stand above, too


@pytest.mark.parametrize("text", ["\u200b", "\u200f", "\ufeff", "\u00ad", "\u200d\ufe0f", "\u061c", "\U000e0041"])
def test_a_token_without_width_is_a_sign_and_within_a_text_does_its_work(text):
    assert visible(text) == "▫"
    assert visible(f"a{text}b") == f"a{text}b"


def test_a_wide_scale_of_ratios_has_words_that_fit():
    words = [word for _, word in Scale.over(RATIO, [1e9, 0.0, 1.0]).legend]
    assert max(map(len, words)) < 10 and words[5] == "1.00"


def test_many_short_texts_are_thinned_evenly(report):
    html = report(*(line(iteration) for iteration in range(1, 35)))
    assert re.findall(r"<summary>Iteration (\d+)", html) == [str(1 + 3 * step) for step in range(12)]


@pytest.mark.parametrize(
    "damage",
    [{"rank": "first"}, {"tokens": None}, {"kl": [1.0]}, {"special": 3, "tokens": ["", "", "", ""]}],
)
def test_a_file_that_is_something_else_is_named(report, damage):
    with pytest.raises(RL4LMsLikeError, match=r"token_credit\.jsonl"):
        report(line(1, episode() | damage))


# --- colours ---------------------------------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    """The light and the dark colours, page and section together."""
    texts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.html.j2", "credit.css.j2")]
    blocks = [re.findall(r"(?::root|\.credit) \{(.*?)\}", text, re.DOTALL)[:2] for text in texts]
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", " ".join(both))) for both in zip(*blocks, strict=True)]


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""
    high, low = sorted((linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_texts_are_legible_on_every_colour(mode):
    colours = palettes()[mode]
    backgrounds = [f"{side}-{level}" for side in ("up", "down") for level in range(1, 6)]
    assert all(contrast(colours["ink"], colours[name]) >= 4.5 for name in backgrounds)
    assert contrast(colours["soft"], colours["paper"]) >= 4.5  # labels and legend
    steps = [contrast(colours[f"up-{level}"], colours["paper"]) for level in range(1, 6)]
    assert steps == sorted(steps)


# Viénot, Brettel, Mollon (1999): what linear RGB looks like without L or M cones.
BLIND = {
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranopia": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ rgb / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("kind", BLIND)
def test_the_two_sides_differ_for_colour_blind_eyes_too(mode, kind):
    colours, matrix = palettes()[mode], np.array(BLIND[kind])
    for level in range(2, 6):
        up, down = (lab(np.clip(matrix @ linear(colours[f"{side}-{level}"]), 0, 1)) for side in ("up", "down"))
        assert np.linalg.norm(up - down) > 12  # 2.3 is just noticeable


def test_the_module_keeps_to_the_styles_levels():
    style = (TEMPLATES / "credit.css.j2").read_text(encoding="utf-8")
    assert f"range(1, {credit.LEVELS + 1})" in style
    assert json.loads(json.dumps([level for level, _ in Scale(CLIPPING, 1.0).legend])) == [-5, -2, 0, 2, 5]
    assert REWARD.field == "rewards"
