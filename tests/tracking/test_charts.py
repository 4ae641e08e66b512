from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.tracking.charts import MAX_POINTS, Series, format_number, line_chart, nice_ticks, thinned, trend

finite = st.floats(-1e39, 1e39)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def points(*ys: float | None) -> list[tuple[float, float | None, float | None]]:
    return [(float(x), y, None) for x, y in enumerate(ys)]


@settings(deadline=None)
@given(low=st.floats(-1e3, 1e3), span=st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low, span):
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-6 * span <= tick <= low + 1.000001 * span for tick in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert any(mantissa == pytest.approx(nice, rel=1e-6) for nice in (1, 2, 5))


def test_ticks_of_a_familiar_range():
    assert nice_ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(3.0, 3.0) == [3.0]


@settings(deadline=None)
@given(
    ys=st.lists(st.none() | finite, min_size=1, max_size=40).filter(lambda ys: any(y is not None for y in ys)),
    std=st.none() | st.floats(0, 1e6),
    log=st.booleans(),
    from_zero=st.booleans(),
    target=st.none() | finite,
)
def test_any_series_gives_a_chart_with_finite_coordinates(ys, std, log, from_zero, target):
    line = Series("y", [(float(x), y, std) for x, y in enumerate(ys)])
    svg = line_chart([line], title="t", log=log, from_zero=from_zero, target=target)
    parse(svg)
    assert "nan" not in svg.lower().replace("explan", "") and "inf" not in svg.lower()


@pytest.mark.parametrize(("top", "labels"), [(50.0, {"0", "10", "20"}), (0.5, {"0.0", "0.1", "0.2"})])
def test_labels_have_as_many_decimals_as_their_step(top, labels):
    svg = parse(line_chart([Series("y", points(0.0, top))], title="t"))
    assert labels <= {text.text for text in svg.iter() if "tick" in text.get("class", "")}


def test_a_gap_breaks_the_line():
    svg = parse(line_chart([Series("y", points(1, 2, None, 3, 4))], title="t"))
    assert len(svg.findall(".//polyline")) == 2


def test_higher_values_lie_higher_and_the_band_is_around_them():
    svg = parse(line_chart([Series("y", [(0, 1.0, 0.5), (1, 2.0, 0.5)])], title="t"))
    places = [tuple(map(float, place.split(","))) for place in svg.find(".//polyline").get("points").split()]
    assert places[0][0] < places[1][0] and places[0][1] > places[1][1]
    band = [float(place.split(",")[1]) for place in svg.find(".//polygon").get("points").split()]
    assert max(band) > places[0][1] and min(band) < places[1][1]


def test_on_a_logarithmic_axis_decades_are_equally_far_apart():
    svg = parse(line_chart([Series("y", points(1e-6, 1e-4, 1e-2))], title="t", log=True))
    heights = [float(place.split(",")[1]) for place in svg.find(".//polyline").get("points").split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)


def test_every_point_has_a_tooltip():
    svg = parse(line_chart([Series("gap", points(0.5, None, 0.25))], title="t"))
    assert [title.text for title in svg.iter("title")] == ["iteration 0\ngap: 0.5", "iteration 2\ngap: 0.25"]


def test_names_are_escaped():
    svg = line_chart([Series("<b>", points(1.0))], title='"><script>')
    parse(svg)
    assert "<script>" not in svg and "<b>" not in svg


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError):
        line_chart([Series("y", points(None, None))], title="t")


def test_a_long_series_is_thinned_without_losing_its_peak():
    ys = [math.sin(x / 50) for x in range(10_000)]
    ys[7001] = 40.0
    kept = thinned(points(*ys))
    assert len(kept) <= MAX_POINTS + 2
    assert (7001.0, 40.0, None) in kept
    assert len(trend(points(*ys))) <= MAX_POINTS
    assert max(y for _, y, _ in trend(points(*ys))) <= 1.0


def test_one_long_series_smooths_all_lines_of_a_chart():
    short, long = Series("short", points(1.0, 2.0)), Series("long", points(*map(float, range(MAX_POINTS + 1))))
    assert 'class="raw"' not in line_chart([short, short], title="t")
    assert line_chart([short, long], title="t").count('class="raw"') == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "–"), (math.nan, "–"), (0, "0"), (0.01234, "0.0123"), (12345.6, "12,346"), (1.5e6, "1.5M")),
        *((3.1e-6, "3.1e-6"), (-0.25, "−0.25"), (-2e-7, "−2e-7"), (1e12, "1e12"), (999.7, "1,000"), (999_900, "1M")),
    ],
)
def test_numbers_for_people(value, text):
    assert format_number(value) == text
