"""A page tells what a run has shown, needs nothing from elsewhere, and escapes whatever comes from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from parity import mistakes
from parity.errors import ReportError
from parity.report.of_run import told
from parity.report.page import Page, Told, render
from parity.run import Reports, run, select

SILENT = Console(quiet=True)
EVIL = "<script>alert('x')</script> & \"more\""


class Tags(HTMLParser):
    """What a page consists of, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page about a run in which gate and up are swapped."""
    path: Path = tmp_path_factory.mktemp("report") / "page.html"
    with mistakes.find("swaps gate and up").planted():
        selection = select("llama", ["mlp"], ["forward", "gradients"], ["float64"])
        assert run(selection, 4, 0, Reports(html=path), SILENT) == 1
    return path.read_text(encoding="utf-8")


def test_a_page_tells_of_every_row_and_mismatch(page: str) -> None:
    assert "2 of 2 rows FAIL" in page
    assert len(re.findall("LlamaMLP   (output|gradient) differs? from transformers", page)) == 2
    assert "parity run llama --layer mlp --property forward" in page
    assert "first departs at act_fn" in page
    for caption in ("over positions", "over channels", "against magnitude", "each of the reference"):
        assert caption in page, caption


def test_a_page_needs_nothing_from_elsewhere(page: str) -> None:
    parsed = Tags(page)
    assert parsed.fetched == []
    assert "script" not in parsed.tags
    assert parsed.tags.count("svg") >= 8


def test_what_comes_from_outside_is_escaped() -> None:
    row = {"name": EVIL, "property": EVIL, "cells": {"output": {"result": "fails", "text": EVIL}}, "cases": EVIL}
    evil = Told(EVIL, [("what", EVIL), ("again", EVIL)], course=[(EVIL, 1.0)], first=EVIL)
    parsed = Tags(render(Page(EVIL, EVIL, False, EVIL, [row], [evil], [EVIL])))
    assert "script" not in parsed.tags


def test_a_run_that_holds_makes_a_page_without_mismatches(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert run(select("llama", ["norm"], ["forward"], ["float64"]), 2, 0, Reports(html=path), SILENT) == 0
    assert "the row holds" in path.read_text(encoding="utf-8")
    assert "<section>" not in path.read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="directory"):
        Reports(html=tmp_path).check()


def test_a_mismatch_that_is_only_told_has_a_page_too() -> None:
    """One where the candidate breaks off, so that there are no numbers to look at."""
    from parity.mismatch import Mismatch
    from parity.scenario import parse_scenario

    family, layer, prop = select("llama", ["mlp"], ["forward"], []).rows[0]
    broken = told(Mismatch(prop, family, layer, parse_scenario("b1 s2 f64"), "the candidate raises RuntimeError"))
    assert broken.pictures == []
    assert "the candidate raises RuntimeError" in render(Page("", "", False, "", [], [broken]))
