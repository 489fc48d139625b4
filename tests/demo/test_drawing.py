"""A round's picture: its structure, its geometry, and that nothing a model writes becomes markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from recguide.demo.answer import answer_html, counters_html, legend, notice
from recguide.demo.drawing import detail, picture, round_svg, shown, strip
from recguide.demo.figures import stack
from recguide.demo.timeline import Came, Counts, Step, timelines
from recguide.structs import Branch, BranchKind, BranchRecord, Outcome
from recguide.trace import Record

from .test_timeline import EVENTS, FULL, draft, forward, only, text_of

EVIL = "</text><script>alert(1)</script><img src=x onerror='alert(2)'>&\"'"


def outline(svg: str) -> list[str]:
    """The picture's parts in order: class, and text if any. What a snapshot compares."""
    found = []
    for element in ET.fromstring(svg).iter():
        if element.tag == "text" or element.get("class"):
            found.append(" ".join(filter(None, [element.tag, element.get("class"), (element.text or "").strip()])))
    return found


def test_a_rejected_round_as_a_whole() -> None:
    assert outline(round_svg(only(EVENTS).steps[0])) == [
        "svg rg-round",
        "path rail start",
        "circle station",
        "path hang hit",
        "path hang",
        "path rail",
        "g c seed",
        "text ◆ <1>",
        "g c accepted",
        "text <2>",
        "g c rejected",
        "text <3>",
        "path strike",
        "path risky",
        "g c rejected",
        "text <4>",
        "path strike",
        "path hang own",
        "g c correction",
        "text <103>",
        "g lane hit",
        "g c drafted first seed-next",
        "text <103>",
        "g c drafted",
        "text <31>",
        "g c drafted",
        "text <32>",
        "g c drafted",
        "text <33>",
        "text lane-name ✓ hit: correction at 2",
        "g lane missed",
        "g c drafted first",
        "text <5>",
        "g c drafted",
        "text <51>",
        "g c drafted",
        "text <52>",
        "g c drafted",
        "text <53>",
        "text lane-name continuation at 4",
        "text number 1",
        "text head correction 1 hit · 2 tokens · 2 forwards",
    ]


def test_a_reused_round_begins_on_the_rail_and_has_no_station() -> None:
    parts = outline(round_svg(only(EVENTS).steps[1]))
    assert parts[1] == "path rail"
    assert "circle station" not in parts
    assert "g c bonus" in parts


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    found = []
    for group in ET.fromstring(svg).iter("g"):
        rect = group.find("rect")
        if rect is not None and (group.get("class") or "").startswith("c "):
            x, y, width, height = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
            found.append((group.get("class", ""), x, y, width, height))
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_cells_do_not_overlap_and_lie_inside(number: int) -> None:
    svg = round_svg(only(EVENTS).steps[number])
    found, root = boxes(svg), ET.fromstring(svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for i, (_, x, y, w, h) in enumerate(found):
        assert x >= 0
        assert x + w <= width
        assert y + h <= height
        for _, x2, y2, w2, h2 in found[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_a_branch_begins_where_it_leaves_the_block() -> None:
    found = boxes(round_svg(only(EVENTS).steps[0]))
    rejected = next(box for box in found if "rejected" in box[0])
    replacement = next(box for box in found if "first" in box[0])
    correction = next(box for box in found if "correction" in box[0])
    assert rejected[1] == replacement[1] == correction[1]


def test_the_quadratic_layout_spells_out_the_used_branch_only() -> None:
    branches = tuple(BranchRecord(Branch(BranchKind.ANY_BONUS, d, 4), 90, draft(70, 71)) for d in (1, 2, 3, 4))
    layout = replace(FULL, branches=branches, outcome=Outcome.ANY_BONUS_HIT, hit=3)
    (timeline,) = timelines([forward("prefill", 3), forward("fused", 20), ("commit", layout)], text_of)
    parts = outline(round_svg(timeline.steps[0]))
    assert parts.count("rect sliver") == 3
    assert parts.count("g lane hit") == 1
    assert "3 other branches" in detail(timeline.steps[0], 1)


def many_events(rounds: int) -> list[tuple[str, Record]]:
    """A request of many rounds, in turn rejected and whole."""
    events = [forward("prefill", 10)]
    for i in range(rounds):
        events += EVENTS[1:4] if i % 2 == 0 else EVENTS[4:6]
    return events


def test_two_hundred_rounds_are_a_picture_of_moderate_size() -> None:
    timeline = only(many_events(200))
    made = picture(timeline)
    assert len(made["rounds"]) == 200
    assert made["strip"].count("data-round=") == 200
    assert sum(len(one["svg"]) + len(one["detail"]) for one in made["rounds"]) < 2_000_000
    assert made["rounds"][199]["label"] == "Round 200: 4 tokens, 1 forward, continuation wrong token"
    assert {int(one) for one in re.findall(r'data-round="(\d+)"', made["strip"])} == set(range(200))


def test_the_strip_shows_what_was_accepted_and_whether_a_branch_was_used() -> None:
    root = ET.fromstring(strip(only(EVENTS).steps))
    first, second = root.findall("g")
    assert [rect.get("class") for rect in first] == ["hover", "ghost", "accepted", "correction", "fresh"]
    assert [rect.get("class") for rect in second] == ["hover", "ghost", "accepted", "bonus", "reused"]
    heights = [float(rect.get("height", "0")) for rect in second]
    assert heights[2] / heights[1] == pytest.approx(3 / 4, abs=0.01), "three of a block of four"


def test_details_say_how_it_ended_and_where_it_goes_on() -> None:
    first, second = only(EVENTS).steps
    text = re.sub(r"<[^>]+>", " ", detail(first, 2, second))
    for said in (
        "correction 1 hit",
        "2 of a block of 4",
        "draft (4 query tokens, 12 ms)",
        "goes on as the block of round 2",
    ):
        assert said in text
    text = re.sub(r"<[^>]+>", " ", detail(second, 2))
    assert "by the correction at 2 of round 1: no draft forward" in text


def test_what_a_model_writes_is_never_markup() -> None:
    (timeline,) = timelines(EVENTS, lambda token: EVIL)
    made = picture(timeline)
    answer = answer_html(timeline.written, [EVIL] * len(timeline.written))
    everything = answer + "".join(one["svg"] + one["detail"] + one["label"] for one in made["rounds"])
    assert "<script" not in everything
    assert "<img" not in everything
    assert "onerror='" not in everything
    for one in made["rounds"]:
        ET.fromstring(one["svg"])
    assert "<script" not in notice(EVIL)
    assert "<script" not in stack({EVIL: 1.0}, EVIL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", "the"),
        ("\n", "⏎"),
        ("  ", "␣␣"),
        ("", "∅"),
        ("a\x00b", "a\ufffdb"),
        ("x" * 30, "x" * 13 + "…"),
    ],
)
def test_tokens_in_cells(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_each_kind_of_token_has_a_look_and_the_legend_names_it() -> None:
    timeline = only(EVENTS)
    answer = answer_html(timeline.written, [one.cell.text for one in timeline.written])
    for came in (Came.SEED, Came.ACCEPTED, Came.CORRECTION, Came.BONUS):
        assert f'class="tok {came.value}"' in answer
        assert f'class="tok {came.value}"' in legend()
    assert 'data-r="1" data-p="0.900" data-m="0.850" data-s="&lt;103&gt;" data-q="0.050" data-e="0.700"' in answer


def test_counters() -> None:
    text = re.sub(r"<[^>]+>", "|", counters_html(Counts(100, 10, 6, 14, 500, 10), 2.0, "recguide", False))
    assert "|7.14|" in text
    assert "|50|" in text, "tokens a second"
    assert "|86|" in text, "forwards saved against plain decoding"
    assert "|6|" in text
    assert "|–|" in re.sub(r"<[^>]+>", "|", counters_html(Counts(), 0.0, "linear", True)), "against itself"


def test_own_token_columns_are_in_the_grid() -> None:
    step = only(EVENTS).steps[1]
    assert isinstance(step, Step)
    bonus = next(box for box in boxes(round_svg(replace(step, lanes=()))) if "bonus" in box[0])
    assert bonus[1] > 0
