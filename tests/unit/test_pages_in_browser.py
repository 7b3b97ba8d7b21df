"""The pages of ``vllm-gsd`` in headless Chromium, with real clicks and keys. ``scripts/setup`` installs it as root."""

import shutil

import pytest
from made_up_report import report
from made_up_trace import HOSTILE, REQUEST, records, step

from vllm_gsd.tools.bench.page import bench_page
from vllm_gsd.tools.inspect.page import inspect_page
from vllm_gsd.tools.inspect.trace import Trace

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; scripts/setup does it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("Chromium is not installed; scripts/setup does it as root", allow_module_level=True)
# These keep Chromium from contacting Google for updates.
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
PHONE, DESKTOP = {"width": 390, "height": 800}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *QUIET])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """``open_page(html, **context)`` opens a page. Its console messages, errors and requests fail the test."""
    contexts, problems = [], []

    def start(html: str, **options):
        contexts.append(browser.new_context(**{"viewport": DESKTOP, **options}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
        (tmp_path / "page.html").write_text(html, "utf-8")
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []


def inspector(trace: list[dict]) -> str:
    return inspect_page(Trace(trace[0], trace[1:]))


def loaded(page) -> float:
    """Seconds that the page took to load and draw."""
    return page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1e3


def fits(page) -> bool:
    """Whether the page is no wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_slider_keys_and_clicks(open_page):
    trace = [REQUEST, step(1, [" a", " b", " c"]), step(2, [" d"]), step(3, [" e", " f"])]
    page = open_page(inspector(trace))
    place, slider, answer = page.locator("#place"), page.locator("#slider"), page.locator("#answer")
    assert answer.inner_text() == " a b c d e f"
    assert place.inner_text() == "Step 1 of 3"
    page.keyboard.press("ArrowRight")
    assert place.inner_text() == "Step 2 of 3"
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert place.inner_text() == "Step 3 of 3"
    assert slider.get_attribute("aria-valuetext") == "Step 3 of 3: e f"
    page.keyboard.press("Home")
    assert place.inner_text() == "Step 1 of 3"
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    assert place.inner_text() == "Step 3 of 3"
    assert page.get_by_role("button", name="Next step").is_disabled()
    page.get_by_role("button", name="Previous step").click()
    assert place.inner_text() == "Step 2 of 3"
    answer.get_by_text(" b", exact=False).first.click()
    assert place.inner_text() == "Step 1 of 3"
    assert page.locator(".step.now").inner_text() == " a b c"
    graph = page.locator("#graph")
    assert graph.locator(".node.accepted").count() == 3  # the root and two others
    assert graph.locator(".node.chosen").text_content().endswith("target's choice")
    assert graph.locator(".edge.joins").count() == 1
    assert graph.locator(".node.pruned").count() == 0
    page.get_by_label("all candidates").check()
    assert graph.locator(".node.pruned").count() == 1
    assert "accepted 2" in graph.get_by_role("img").get_attribute("aria-label")
    page.get_by_text("The graph as a table").click()
    assert page.locator("#table tr").count() == 1 + 7
    assert page.locator("#table").get_by_text("the target's choice").is_visible()
    assert page.locator(".charts svg").count() >= 3


def test_hostile_text_stays_text(open_page):
    page = open_page(inspector(records(12, hostile=True)))
    assert page.locator("#answer").inner_text().count("</script>") == 12 * HOSTILE.count("</script>")
    for number in range(3):
        page.keyboard.press("ArrowRight")
        page.get_by_label("all candidates").set_checked(number % 2 == 0)
    assert page.evaluate("window.hurt") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(open_page, scheme):
    page = open_page(inspector(records(100)), viewport=PHONE, color_scheme=scheme, has_touch=True)
    page.get_by_role("button", name="Next step").tap()
    assert page.locator("#place").inner_text().startswith("Step 2 of")
    assert fits(page)


@pytest.mark.parametrize("tokens", [0, 500, 2000])
def test_long_and_empty_answers(open_page, tokens):
    page = open_page(inspector(records(tokens)))
    loads = [loaded(page)]
    while min(loads) > 1 and len(loads) < 5:  # other tests may slow it down
        page.reload()
        loads.append(loaded(page))
    assert min(loads) < 1 or tokens > 500, loads
    assert page.locator(".token").count() >= tokens
    if tokens:
        page.locator("#slider").focus()
        page.keyboard.press("End")
        assert f"word{tokens - 1}" in page.locator(".step.now").inner_text()
        assert page.locator(".step.now").is_visible()
    else:
        assert page.get_by_text("no step of this request").is_visible()
        assert not page.locator("#slider").is_visible()
    assert fits(page)


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_bench_page(open_page, viewport):
    page = open_page(bench_page(report()), viewport=viewport)
    top = page.locator("#columns")
    assert top.bounding_box()["y"] < viewport["height"] / 2
    bars = top.locator("svg[aria-label] rect title")
    bars.nth(8).wait_for(state="attached")  # a busy machine draws late
    assert [bar.text_content() for bar in bars.all()[:3]] == [
        "plain vLLM, 1 at once: 1.00",
        "our engine without a graph, 1 at once: 1.60",
        "with the graph, 1 at once: 2.73",
    ]
    assert bars.count() == 9
    assert "2.73" in top.inner_text()
    page.locator("#charts figure").last.scroll_into_view_if_needed()
    charts = page.locator("#charts figure svg[aria-label]")
    charts.nth(10).wait_for(state="attached")
    assert charts.count() == 11
    assert page.get_by_role("row").filter(has_text="gsd compiled").count() == 3
    assert page.locator("b").count() == 0  # a hostile name stays text
    assert fits(page)


def test_a_bench_page_without_plain_vllm(open_page):
    without = report(("gsd",), whole=False)
    for rows in without["batches"].values():
        del rows["gsd"]["ratio_to_plain"]
    page = open_page(bench_page(without))
    assert "did not run" in page.locator("#columns").inner_text()
    assert fits(page)
