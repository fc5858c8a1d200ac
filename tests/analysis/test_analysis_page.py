"""The report page in a real browser: headless Chromium (Debian's package `chromium`) driven by playwright."""

import os
import shutil

import pytest
from synth import Point, standard_grid, write_sweep

from analysis.report import write_report

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "the Python package playwright is not installed"
    else:
        missing = "" if CHROMIUM else "chromium is not installed (apt-get install chromium)"
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    long = "rank 1: RuntimeError: " + "a_very_long_word_that_can_not_be_broken_" * 8
    points = standard_grid() + [
        Point(64, "fsdp", status="crashed", reason=long, done=3, host={"driver": "570.1"}),
        Point(24, "ddp", 70_000, host={"driver": "570.1"}, given=["model=dense_1b", "data.path=" + "long/" * 60]),
    ]
    return write_report(write_sweep(tmp_path_factory.mktemp("page") / ("sweep-with-a-long-name-" * 4), points))


@pytest.fixture
def page(browser, report, request):
    """The page at the width that the test asks for; fails on any console message, error or request to elsewhere."""
    width = getattr(request, "param", 1280)
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: said.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    page.goto(report.as_uri())
    yield page
    page.close()
    assert said == []


def column(page, index):
    """Texts of one column, rows in the order on the page, hidden ones left out."""
    return page.eval_on_selector_all(
        "#points tbody tr:not([hidden])", f"rows => rows.map(row => row.cells[{index}].textContent.trim())"
    )


def headers(page):
    return page.eval_on_selector_all("#points thead th", "cells => cells.map(cell => cell.textContent.trim())")


@pytest.mark.parametrize("page", [1280, 390], indirect=True)
def test_nothing_overflows(page):
    """No sideways scrolling of the page, and nothing that ends beyond the part it stands in (tables scroll by themselves)."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
    beyond = page.evaluate(
        """() => [...document.querySelectorAll('main *')]
            .filter(e => !e.closest('.scroll') || e.classList.contains('scroll'))
            .filter(e => e.getBoundingClientRect().width > 0)
            .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
            .map(e => e.tagName + '.' + e.className)"""
    )
    assert beyond == []
    broken = page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth > 100)).length")
    assert page.evaluate("document.images.length") >= 5 and broken == 0


@pytest.mark.parametrize("page", [1280, 390], indirect=True)
def test_the_answer_is_seen_first(page):
    top = page.eval_on_selector(".answer h2", "e => e.getBoundingClientRect().top")
    assert "reduction=zero2o micro_batch=12" in page.text_content(".answer h2")
    assert top < 400 and page.eval_on_selector("#points", "e => e.getBoundingClientRect().top") > top


def test_sorting(page):
    names = headers(page)
    rate = names.index("tokens/s")
    page.click(f"#points thead th:nth-child({rate + 1}) button")
    values = [float(text.replace(",", "")) for text in column(page, rate) if text]
    assert values == sorted(values) and len(values) >= 7
    assert column(page, rate)[-1] == ""  # what has no value stays at the end
    page.click(f"#points thead th:nth-child({rate + 1}) button")
    values = [float(text.replace(",", "")) for text in column(page, rate) if text]
    assert values == sorted(values, reverse=True) and column(page, rate)[-1] == ""
    assert page.get_attribute(f"#points thead th:nth-child({rate + 1})", "aria-sort") == "descending"
    knob = names.index("micro-batch")
    page.click(f"#points thead th:nth-child({knob + 1}) button")
    assert column(page, knob) == [
        "4",
        "4",
        "8",
        "8",
        "12",
        "12",
        "16",
        "24",
        "48",
        "48",
        "64",
    ]  # as numbers, not as text
    assert page.get_attribute(f"#points thead th:nth-child({rate + 1})", "aria-sort") is None


def test_sorting_by_keyboard(page):
    page.focus("#points thead th:nth-child(3) button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#points thead th:nth-child(3)", "aria-sort") == "ascending"


def test_filtering(page):
    assert page.text_content("#shown") == "11 of 11"
    page.fill("#filter", "zero2o ok")
    shown = column(page, headers(page).index("reduction"))
    assert shown == ["zero2o"] * 3 and page.text_content("#shown") == "3 of 11"
    page.fill("#filter", "")
    page.select_option("#status", "oom")
    assert page.text_content("#shown") == "1 of 11"
    page.fill("#filter", "nothing like that")
    assert page.text_content("#shown") == "0 of 11"


def test_without_scripts_the_table_is_complete(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#points tbody tr").count() == 11
    context.close()


def test_it_prints(page, tmp_path):
    """On paper: no controls, nothing cut off at the side."""
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 794, "height": 1123})  # A4 at 96 dpi
    assert not page.is_visible(".controls")
    assert page.evaluate("document.documentElement.scrollWidth") <= 794
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"
