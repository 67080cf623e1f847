"""The dashboard in a real browser: clicks, filters, live updates, hostile text, the keyboard, a phone's width. `make test-browser`.

With QWENGYRE_SCREENSHOTS=FOLDER it also writes the pictures that docs/dashboard.md shows.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import uvicorn

from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run
from qwengyre.core.ids import execution_id
from qwengyre.dashboard.demo import unpack_demo
from qwengyre.dashboard.server import dashboard_app, listen
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler.commands import Start
from qwengyre.telemetry.folder import RunFolder

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright, or make test-browser")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = os.environ.get("QWENGYRE_SCREENSHOTS")
WAIT_MS = 90_000
"""As long as a machine takes that has much else to do; nothing here asserts how long anything takes."""
TOKEN = "the-token"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium, or set CHROMIUM")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpack_demo(tmp_path_factory.mktemp("runs"))
    write_made_up_run(folder, MadeUpRun(num_executions=144, num_tasks=6, name="made-up"))
    write_made_up_run(folder, MadeUpRun(num_executions=96, num_tasks=6, seed=1, name="live", is_finished=False))
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """Of a dashboard in this process."""
    listener = listen(0)
    server = uvicorn.Server(uvicorn.Config(dashboard_app(runs, token=TOKEN), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=WAIT_MS)
        yield browser
        browser.close()


class Tab:
    """A page of the browser, with everything that it complained about."""

    def __init__(self, chromium, address: str, **settings):
        self.context = chromium.new_context(**({"viewport": {"width": 1180, "height": 760}} | settings))
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type in ("error", "warning") else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = address
        self.page.goto(f"{address}/?token={TOKEN}")

    def open(self, path: str):
        self.page.goto(self.address + path, wait_until="load")
        return self.page

    def picture(self, name: str) -> None:
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), timeout=WAIT_MS, animations="disabled")


@pytest.fixture
def tab(chromium, address: str) -> Iterator[Tab]:
    tab = Tab(chromium, address)
    yield tab
    tab.context.close()
    assert tab.complaints == []
    assert {url.split("/")[2] for url in tab.requests if not url.startswith("data:")} == {address.split("/")[2]}, "from elsewhere"


def first_execution(page) -> str:
    return page.locator("tbody [data-open]").first.inner_text()


def test_from_the_list_of_runs_to_a_token(tab: Tab):
    page = tab.page
    page.wait_for_selector("text=quickstart")
    tab.picture("runs")
    page.click("text=quickstart")
    page.wait_for_selector("text=Waterlevel and cell roles")
    tab.picture("overview")
    page.click("nav.tabs >> text=Executions")
    page.select_option("select[name=kind]", "train")
    page.select_option("select[name=with]", "sub-agents")
    page.select_option("select[name=reward]", "spread")
    page.click("button:has-text('Show')")
    page.wait_for_url("**with=sub-agents**")
    tab.picture("executions")
    page.locator("tbody [data-open]").first.click()
    page.wait_for_selector(".outline >> text=sub-agent")
    tab.picture("execution")
    details = page.locator("details.tokens").first
    details.locator("summary").click()
    details.locator(".tokens-text span").first.wait_for()
    assert "log-prob" in details.locator(".tokens-text span").first.get_attribute("title")
    details.scroll_into_view_if_needed()
    tab.picture("tokens")


def test_a_group_a_call_the_configuration_and_the_logs(tab: Tab):
    page = tab.open("/run/quickstart/groups/100")
    assert page.locator("main tbody tr").count() == 8
    tab.picture("group")
    page = tab.open("/run/quickstart/executions/e000114-3/calls/c0")
    page.locator("summary:has-text('as a table')").click()
    assert page.locator("main table tr").count() > 4
    tab.picture("call")
    page = tab.open("/run/quickstart/config")
    assert "max_concurrent_harnesses = " in page.locator("main").inner_text()
    tab.picture("config")
    page = tab.open("/run/made-up/logs")
    assert "run_opened" in page.locator("main").inner_text()
    tab.picture("logs")


def test_sorting_and_paging_by_clicks(tab: Tab):
    page = tab.open("/run/made-up/executions?sort=id&down=0")
    assert first_execution(page) == "e000000-0"
    page.click("a[rel=next]")
    page.wait_for_url("**page=2**")
    assert first_execution(page) == "e000006-2"
    page.click("th >> text=reward")
    page.wait_for_url("**sort=reward**")
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert page.locator("tbody tr").first.locator(".reward").inner_text() == "1.00"


def test_hostile_text_is_text(tab: Tab):
    for path in ("executions/e000000-0", "executions?text=owned", "search?q=owned", "executions/e000004-4"):
        page = tab.open(f"/run/made-up/{path}")
        for details in page.locator("main details").all():
            details.evaluate("one => { one.open = true }")
        assert page.title() != "owned" and page.locator("main script, main img, main iframe").count() == 0
    page = tab.open("/run/made-up/executions/e000000-0")
    assert "<script>document.title='owned'</script>" in page.locator("main").text_content()


def test_the_keyboard_reaches_everything(tab: Tab):
    page = tab.open("/run/made-up/executions?sort=id&down=0")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "e000000-1"
    page.keyboard.press("Enter")
    page.wait_for_url("**/e000000-1")
    page.keyboard.press("o")
    assert page.locator("main details:not(.tokens):not([open])").count() == 0
    page.keyboard.press("]")
    page.wait_for_url("**/e000000-2")
    page.keyboard.press("u")
    page.wait_for_url("**/executions")
    page.keyboard.press("/")
    page.keyboard.type("task-003")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=task-003**")
    page.keyboard.press("?")
    assert page.locator("dialog#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog#keys").is_visible()


def test_a_run_that_goes_on_appears_by_itself_and_keeps_what_is_unfolded(tab: Tab, runs: Path):
    folder = RunFolder(runs / "live")
    with Journal.open(folder.controller_journal, ControllerRecord) as journal:
        page = tab.open("/run/live/executions?text=e000000-0")
        page.wait_for_selector("#live.on")
        assert page.locator("tbody .state").first.inner_text() == "exited"
        journal.append(Decided((Start(execution_id(0, 0), 1, "cell-0"),)))  # type: ignore[arg-type]
        page.wait_for_selector("tbody .state.run >> text=running")
        page = tab.open("/run/live/")
        steps = page.locator("details:has-text('steps as a table')").first
        steps.locator("summary").click()
        with open(folder.metrics, "ab") as metrics:
            metrics.write(b'{"type":"RunEnded","at":99.0,"reason":"stopped"}\n')
        page.wait_for_selector(".sub >> text=stopped")
        assert steps.evaluate("one => one.open"), "what was unfolded stays so"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_and_never_sideways(chromium, address: str, scheme: str):
    tab = Tab(
        chromium, address, viewport={"width": 375, "height": 720}, color_scheme=scheme, is_mobile=True, device_scale_factor=2
    )
    for path in ("/", "/run/quickstart/", "/run/quickstart/executions", "/run/made-up/executions/e000000-1", "/run/quickstart/tasks",
                 "/compare?run=quickstart&run=made-up", "/run/quickstart/config"):  # fmt: skip
        page = tab.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, path
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", dark)[:3])) < 60) == (scheme == "dark")
    tab.open("/run/made-up/executions/e000000-1")
    tab.picture(f"phone-{scheme}")
    assert tab.complaints == []
    tab.context.close()


def test_tasks_and_comparisons(tab: Tab):
    page = tab.open("/run/quickstart/tasks?sort=gain&down=1")
    page.wait_for_selector("text=groups with a spread")
    tab.picture("tasks")
    page.locator("tbody [data-open]").first.click()
    page.wait_for_selector("text=Reward by version")
    tab.picture("task")
    page = tab.open("/")
    for name in ("made-up", "live"):
        page.check(f"input[value='{name}']")
    page.click("button:has-text('Compare')")
    page.wait_for_selector("text=What differs in the configuration")
    assert "run=made-up" in unquote(page.url) and "run=live" in page.url
    tab.picture("compare")


def test_a_search_in_what_was_said_leads_to_the_call(tab: Tab):
    page = tab.open("/run/made-up/executions?text=parse")
    page.click("text=in what they said")
    page.locator(".hit").first.wait_for()
    tab.picture("search")
    link = page.locator(".hit [data-open]").first
    call = link.inner_text().split()[1]
    link.click()
    page.wait_for_selector(f"article#{call}")
    assert "parse" in page.locator(f"article#{call}").text_content()


def test_nothing_is_seen_without_the_token(chromium, address: str):
    page = chromium.new_context().new_page()
    for path in ("/", "/run/made-up/", "/static/live.js"):
        assert page.goto(address + path).status == 403
    page.context.close()
