"""
The page in a browser, at two widths and in both themes; nothing it does leaves the machine.

Needs Debian's chromium (or `CHROMIUM`) and Playwright. Screenshots go to `SCREENSHOTS` if that is set, else to pytest's temporary folder.
"""

# ruff: noqa: E402
# What may be missing is asked for first.

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the demo's tests need gradio: pip install 'recguide[demo]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need chromium")]

from playwright.sync_api import Browser, Page, expect

from recguide.demo.app import serve
from recguide.demo.desk import Desk
from recguide.loading import TINY, load
from recguide.tiny.examples import EXAMPLES

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
PATIENCE = 90_000
"""Milliseconds that a step may take on a busy machine; none is waited for in vain."""


@cache
def loaded() -> tuple[Any, Any]:
    return load(TINY, "float32", "cpu")


class Gate:
    """Lets a few forwards through, so that some tokens are written, and then none until it is opened."""

    def __init__(self) -> None:
        self._passed, self._open = 0, threading.Event()

    def __call__(self, *_: Any) -> None:
        self._passed += 1
        if self._passed > 4:
            self._open.wait(timeout=600)

    def close(self) -> None:
        self._passed = 0
        self._open.clear()

    def open_once_cancelled(self, desk: Desk) -> None:
        """Wait until the engine has been told to end a request, which it does after its present forward; then let that go."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not desk.model("slow").engine._cancellations and time.monotonic() < deadline:
            time.sleep(0.01)
        self._open.set()


GATE = Gate()


def slow() -> tuple[Any, Any]:
    """A model of its own that takes as long as a test wants."""
    model, tokenizer = load(TINY, "float32", "cpu")
    model.register_forward_pre_hook(GATE)
    return model, tokenizer


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    desk = Desk({TINY: loaded, "slow": slow})
    yield desk
    GATE._open.set()
    desk.close()


@pytest.fixture(scope="module")
def connections() -> Iterator[list[str]]:
    """Addresses outside of this machine that this process tried to reach; none gets through."""
    tried: list[str] = []
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(
            ("127.", "::1", "localhost")
        ):
            tried.append(str(address))
            raise OSError(f"no way out to {address}")
        connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign]
    yield tried
    socket.socket.connect = connect  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def address(desk: Desk, connections: list[str]) -> Iterator[str]:
    page, address = serve(desk, "127.0.0.1", block=False)
    yield address
    page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        # Chromium itself asks its makers for updates; the page is what is tested.
        arguments = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Visit:
    """A page that was opened, what it asked for, and what went wrong in it."""

    def __init__(self, browser: Browser, address: str, width: str = "desktop", theme: str = "light") -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self.context = browser.new_context(viewport=size, color_scheme=theme, accept_downloads=True)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        self.name = f"{width}-{theme}"
        self.outside: list[str] = []
        self.faults: list[str] = []
        allowed = (address, "data:", "blob:")
        self.page.on("request", lambda r: None if r.url.startswith(allowed) else self.outside.append(r.url))
        self.page.on("websocket", lambda w: self.outside.append(w.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.goto(address)
        expect(self.page.locator("#generate-run")).to_be_enabled()

    def tab(self, name: str) -> None:
        tab = self.page.get_by_role("tab", name=name)
        if tab.count() and tab.first.is_visible():
            tab.first.click()
        else:
            self.page.locator(".overflow-menu button").first.click()
            self.page.get_by_text(name, exact=True).last.click()

    def generate(self) -> None:
        self.page.click("#generate-run")
        expect(self.page.locator("#see-rounds")).to_be_enabled()
        expect(self.page.locator("#generate-run")).to_be_enabled()

    def shot(self, shots: Path, name: str) -> None:
        self.page.screenshot(path=shots / f"{name}-{self.name}.png", full_page=True)
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.page.viewport_size["width"]  # type: ignore[index]

    def leave(self) -> None:
        self.context.close()
        assert self.outside == []
        assert self.faults == []


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    visit = Visit(browser, address)
    yield visit
    visit.leave()


def plain_answer(prompt: str, most: int = 256) -> str:
    from recguide.loading import chat_ids

    model, tokenizer = loaded()
    ids = chat_ids(tokenizer, prompt)
    output = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=most, do_sample=False)
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_answer_and_its_rounds(browser: Browser, address: str, shots: Path, width: str, theme: str) -> None:
    visit = Visit(browser, address, width, theme)
    page = visit.page
    assert ("dark" in (page.locator("body").get_attribute("class") or "")) == (theme == "dark")
    page.click("#generate-text")
    expect(page.locator("#generate-prompt textarea")).to_have_value(EXAMPLES["text"])
    visit.generate()
    tokens = page.locator("#answer .rg-answer .tok")
    text = "".join("" if one == "∎" else one for one in tokens.all_text_contents())
    assert text == plain_answer(EXAMPLES["text"]), "streamed, coloured, and not a letter changed"
    kinds = set(tokens.evaluate_all("all => all.map(one => one.classList[1])"))
    assert kinds >= {"seed", "accepted", "bonus"}
    assert "tokens per forward" in page.locator("#counters").inner_text()

    tokens.nth(4).hover() if width == "desktop" else tokens.nth(4).click()
    card = page.locator(".rg-card")
    expect(card).to_be_visible()
    for name in ("round", "margin", "second", "entropy"):
        assert name in card.inner_text()
    before = card.inner_text()
    page.locator(".rg-answer").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert card.inner_text() != before
    visit.shot(shots, "generate")

    page.click("#see-rounds")
    rounds = page.locator("#rounds .rg-slot")
    expect(page.locator("#rounds .rg-slot.current svg")).to_be_visible()
    count, place = rounds.count(), page.locator("#rounds output")
    expect(place).to_have_text(f"1 / {count}")
    page.locator("#rounds .rg-player").focus()
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text(f"2 / {count}")
    assert "Round 2" in page.locator("#rounds .rg-side").inner_text()
    page.keyboard.press("End")
    expect(place).to_have_text(f"{count} / {count}")
    page.keyboard.press("Home")
    expect(place).to_have_text(f"1 / {count}")
    page.locator("#rounds input[type=range]").fill("2")
    expect(place).to_have_text(f"3 / {count}")
    page.locator("#rounds .rg-strip g").nth(1).click()
    expect(place).to_have_text(f"2 / {count}")
    wide = page.locator("#rounds .rg-slot.current").bounding_box()
    page.click("#rounds [data-do=out]")
    narrow = page.locator("#rounds .rg-slot.current").bounding_box()
    assert wide is not None
    assert narrow is not None
    assert narrow["height"] < wide["height"]
    page.click("#rounds [data-do=in]")
    visit.shot(shots, "branches")
    page.click("#rounds [data-do=play]")
    expect(place).to_have_text(f"{count} / {count}")
    visit.leave()


@pytest.mark.parametrize(("width", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_all_strategies_race(browser: Browser, address: str, shots: Path, width: str, theme: str) -> None:
    visit = Visit(browser, address, width, theme)
    page = visit.page
    visit.tab("3 Compare")
    page.click("#race-run")
    expect(page.locator("#race-message")).to_contain_text("All 5 wrote the same")
    expect(page.locator("#race .rg-lane")).to_have_count(5)
    rows = page.locator("#race-figures tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["AR", "LinearSS", "Quadratic", "RecGuide", "Auto"]
    tokens, forwards = {row.split()[1] for row in rows}, [int(row.split()[3]) for row in rows]
    assert len(tokens) == 1, "the same text"
    assert forwards[0] == int(tokens.pop()) > max(forwards[1:])
    expect(page.locator("#race .rg-lane.won")).to_have_count(1)
    expect(page.locator("#race .place", has_text="5.")).to_have_count(1)
    visit.shot(shots, "compare")
    page.locator("#race input[type=range]").fill("300")
    seen = page.locator("#race .rg-lane .tok.unseen").count()
    assert seen > 0, "before the end of the race not all is written"
    visit.leave()


def test_stopping_frees_the_place_and_others_are_not_disturbed(
    visit: Visit, browser: Browser, address: str, desk: Desk
) -> None:
    page = visit.page
    page.locator("#model input").click()
    page.get_by_role("option", name="slow").click()
    page.locator("#strategy input[value=ar]").check()
    for _ in range(2):
        # The second one begins at once, since the first has left nothing behind.
        GATE.close()
        page.click("#generate-run")
        expect(page.locator("#generate-stop")).to_be_enabled()
        expect(page.locator("#answer .tok").nth(1)).to_be_attached()
        assert desk.under_way == 1
        other = Visit(browser, address)
        other.generate()
        assert desk.under_way == 1, "the other session's answer has come and gone"
        other.leave()
        page.click("#generate-stop")
        GATE.open_once_cancelled(desk)
        expect(page.locator("#generate-message")).to_contain_text("Stopped")
        assert desk.under_way == 0
        runner = desk.model("slow").engine._runner
        assert runner.idle
        assert page.locator("#answer .tok").count() > 1, "what was written stays"
        expect(page.locator("#generate-run")).to_be_enabled()


def test_leaving_the_page_frees_the_place(browser: Browser, address: str, desk: Desk) -> None:
    visit = Visit(browser, address)
    visit.page.locator("#model input").click()
    visit.page.get_by_role("option", name="slow").click()
    visit.page.locator("#strategy input[value=ar]").check()
    GATE.close()
    visit.page.click("#generate-run")
    expect(visit.page.locator("#answer .tok").nth(1)).to_be_attached()
    visit.leave()
    GATE.open_once_cancelled(desk)
    deadline = time.monotonic() + 120
    runner = desk.model("slow").engine._runner
    while (desk.under_way or not runner.idle) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert desk.under_way == 0
    assert runner.idle


def test_bad_input_is_told_and_nothing_is_lost(visit: Visit, shots: Path, tmp_path: Path) -> None:
    page = visit.page
    visit.generate()
    written = page.locator("#answer .rg-answer").inner_text()
    alert = page.locator("#generate-message [role=alert]")
    for prompt, message in (("", "The prompt is empty"), ("word " * 3000, "context is 2048")):
        page.fill("#generate-prompt textarea", prompt)
        page.click("#generate-run")
        expect(alert).to_contain_text(message)
        assert page.input_value("#generate-prompt textarea") == prompt
        assert page.locator("#answer .rg-answer").inner_text() == written
        expect(page.locator("#generate-run")).to_be_enabled()
    visit.shot(shots, "bad-prompt")

    visit.tab("2 Branches")
    count = page.locator("#rounds output").inner_text()
    bad = {
        "not-a-trace.jsonl": ("hello\n", "not a recguide trace"),
        "evil.jsonl": (
            '{"event": "trace", "version": 1}\n{"event": "commit", "seed": "<img src=x onerror=alert(1)>"}\n',
            "not an event of a trace",
        ),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_text(content)
        page.set_input_files("#open-trace input[type=file], input[type=file]", tmp_path / name)
        expect(page.locator("#branches-message [role=alert]")).to_contain_text(message)
        assert page.locator("#rounds output").inner_text() == count, "what was shown stays"
    visit.shot(shots, "bad-trace")


def test_a_trace_is_saved_and_opened_by_somebody_else(
    visit: Visit, browser: Browser, address: str, tmp_path: Path
) -> None:
    page = visit.page
    visit.generate()
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "shared.jsonl"
    download.value.save_as(path)
    lines = path.read_text().splitlines()
    # A text that would be markup, as a model might write one.
    header = json.loads(lines[0])
    token = str(json.loads(next(line for line in lines if '"commit"' in line))["seed"])
    header["tokens"][token] = "<img src=x onerror=alert(1)>"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    other = Visit(browser, address)
    other.tab("2 Branches")
    other.page.set_input_files("#open-trace input[type=file], input[type=file]", path)
    expect(other.page.locator("#branches-message")).to_contain_text("shared.jsonl: recguide, recguide-tiny.")
    expect(other.page.locator("#rounds .rg-slot.current svg")).to_be_visible()
    page.click("#see-rounds")
    expect(page.locator("#rounds .rg-slot.current svg")).to_be_visible()
    assert other.page.locator("#rounds .rg-slot").count() == page.locator("#rounds .rg-slot").count()
    assert other.page.locator("#rounds img").count() == 0
    assert "<img" in (other.page.locator("#rounds .rg-slot.current svg").text_content() or "")
    other.leave()


def test_two_hundred_rounds_can_be_stepped_through(visit: Visit, shots: Path, tmp_path: Path) -> None:
    from recguide.demo.recordings import Recording

    from .test_drawing import many_events
    from .test_timeline import text_of

    path = Recording({"strategy": "recguide"}, tuple(many_events(200))).save(tmp_path / "long.jsonl", text_of)
    visit.tab("2 Branches")
    page = visit.page
    page.set_input_files("#open-trace input[type=file], input[type=file]", path)
    place = page.locator("#rounds output")
    expect(place).to_have_text("1 / 200")
    page.locator("#rounds input[type=range]").fill("150")
    expect(place).to_have_text("151 / 200")
    expect(page.locator("#rounds .rg-slot.current svg")).to_be_visible()
    assert page.locator("#rounds .rg-slot svg").count() < 60, "only what is near is in the page"
    visit.shot(shots, "two-hundred")


def test_load_simulator_and_tables(visit: Visit, shots: Path) -> None:
    page = visit.page
    visit.tab("4 Load")
    page.locator("#users input[type=number]").fill("2")
    page.locator("#users input[type=number]").press("Enter")
    page.click("#load-run")
    expect(page.locator("#load-frontier img").first).to_be_attached()
    expect(page.locator("#load-run")).to_be_enabled()
    assert "bucket occupancy" in page.locator("#load-now").inner_text()
    assert re.search(r"\d+: \d+%", page.locator("#load-now").inner_text())
    page.click("#simulate-run")
    expect(page.locator("#simulate-frontier img").first).to_be_attached()
    expect(page.locator("#simulate-message")).not_to_contain_text("Simulating")
    visit.shot(shots, "load")
    visit.tab("5 Calibration")
    page.click("#tables-run")
    expect(page.locator("#tables img.day")).to_have_count(4)
    visit.shot(shots, "calibration")
    page.click("#theme")
    expect(page.locator("#tables img.night").first).to_be_visible()


def test_nothing_is_fetched_from_elsewhere(address: str, browser: Browser, connections: list[str]) -> None:
    """The tests above have seen every request of the page; this one sees that they could, and what the server tried."""
    visit = Visit(browser, address)
    visit.page.evaluate("fetch('http://192.0.2.1/').catch(() => 0); 0")
    visit.page.wait_for_timeout(200)
    assert visit.outside == ["http://192.0.2.1/"]
    visit.context.close()
    assert connections == []
    with pytest.raises(OSError, match="no way out"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    connections.clear()


def test_the_configuration_asks_for_nothing(address: str, browser: Browser) -> None:
    visit = Visit(browser, address)
    config = visit.page.evaluate("fetch('config').then(r => r.json())")
    visit.leave()
    assert config["analytics_enabled"] is False
    assert not config.get("space_id")
    assert [one for one in config["stylesheets"] if "://" in one] == []
