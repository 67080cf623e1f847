"""The pages of the dashboard, as a browser gets them. What a browser makes of them is in checks/test_browser.py."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from qwengyre.bench.made_up_run import HOSTILE, MadeUpRun, write_made_up_run
from qwengyre.core.ids import execution_id
from qwengyre.dashboard.demo import unpack_demo
from qwengyre.dashboard.server import dashboard_app
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord, Decided
from qwengyre.scheduler.commands import Start
from qwengyre.telemetry.folder import RunFolder

EVERY_PAGE = (
    "/",
    "/run/first/",
    "/run/first/executions",
    "/run/first/executions?text=zzz&sort=reward&down=0&page=99",
    "/run/first/executions/e000000-0",
    "/run/first/executions/e000000-3",
    "/run/first/executions/e000004-4",
    "/run/first/executions/e000000-0/calls/c0",
    "/run/first/executions/e000000-0/file?path=workspace/src/a.py",
    "/run/first/groups/0",
    "/run/first/tasks",
    "/run/first/task?name=task-000",
    "/run/first/search?q=owned",
    "/run/first/search?q=%3Cscript%3E",
    "/run/first/config",
    "/run/first/logs",
    "/compare?run=first&run=second",
    "/compare",
    "/run/first/executions/none",
    "/run/none/",
    "/none",
)


def listed(html: str) -> list[str]:
    return re.findall(r"data-open>(e\d+-\d+)</a>", html)


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_what_a_policy_wrote_is_never_markup(browser: TestClient, page: str):
    html = browser.get(page).text
    assert html.startswith("<!doctype html>")
    assert re.findall(r"<script[^>]*>", html) == ['<script src="/static/live.js" defer>', '<script src="/static/keys.js" defer>']
    assert "<img" not in html and not re.search(r"<[^>]*\son\w+=", html) and "javascript:" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html)
    assert not re.search(r'(?:src|href|action)="(?!/|#|\?|data:,|")', html), "a page leads nowhere else"
    assert not re.search(r"<[^>]*\sstyle=", html), "the policy of the pages forbids inline styles"


def test_hostile_text_is_shown_as_it_was_written(browser: TestClient):
    shown = unescape(browser.get("/run/first/executions/e000000-0").text)
    assert "</pre></details><script>document.title='owned'</script><img src=x" in shown
    assert "\\x1b[31m\\u202egnp.exe" in shown
    assert HOSTILE not in browser.get("/run/first/executions/e000000-0").text


def test_runs_of_a_folder_are_listed_with_their_state(browser: TestClient):
    html = browser.get("/").text
    assert re.findall(r"data-open>(\w+)</a>", html) in (["first", "second"], ["second", "first"])
    assert html.count('<span class="state good">finished</span>') == 2
    assert "0.64" in html and "from 0.21" in html


def test_a_single_run_is_shown_at_once(made_up: Path):
    alone = TestClient(dashboard_app(made_up / "first"), base_url="http://localhost")
    assert alone.get("/", follow_redirects=False).headers["location"] == "/run/first/"
    assert "Reward by step" in alone.get("/").text


def test_executions_are_paged_and_sorted(browser: TestClient):
    first, second = (listed(browser.get(f"/run/first/executions?sort=id&down=0&page={page}").text) for page in (1, 2))
    assert [*first, *second] == [execution_id(group, index) for group in range(12) for index in range(8)]
    assert len(first) == 50
    worst = browser.get("/run/first/executions?sort=reward&down=0").text
    best = browser.get("/run/first/executions?sort=reward").text
    assert listed(worst)[0] != listed(best)[0]
    assert 'aria-sort="descending"' in best and 'aria-sort="ascending"' in worst


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("group=3&sort=id&down=0", [execution_id(3, index) for index in range(8)]),
        ("text=e000002-5", ["e000002-5"]),
        ("text=TOOL+IS+MISSING&sort=id&down=0", ["e000004-4", "e000009-1"]),
        ("end=crashed", ["e000004-4"]),
        ("end=placeholder&sort=id&down=0", ["e000004-4", "e000009-1"]),
        ("task=task-001&with=compactions&sort=id&down=0", ["e000001-1", "e000007-2"]),
        ("kind=evaluation", []),
        ("step=2&group=6&with=compactions&sort=id&down=0", ["e000006-3"]),
        ("step=1&group=6", []),
    ],
)
def test_executions_are_filtered(browser: TestClient, query: str, expected: list[str]):
    assert listed(browser.get(f"/run/first/executions?{query}").text) == expected


def test_a_filter_on_the_spread_keeps_groups_that_teach(browser: TestClient):
    spread = listed(browser.get("/run/first/executions?reward=spread&group=5").text)
    advantages = re.findall(r'<td class="num">([+-]\d\.\d+)</td>', browser.get("/run/first/groups/5").text)
    assert bool(spread) == any(float(value) for value in advantages)


def test_a_conversation_is_read_by_the_runs_own_renderer(browser: TestClient):
    html = browser.get("/run/first/executions/e000000-0").text
    assert '<summary>reasoning <span class="of">' in html and "calls <b>run</b>" in html
    assert unescape(html).count('"command": "ls -la"') == 1
    assert "All tests pass now." in html and "<|im_end|>" not in unescape(html).split("<main")[1]
    assert html.count('<span class="who">tool result</span>') == 4


@pytest.mark.parametrize(
    ("execution", "threads"),
    [
        ("e000000-0", [("main agent", "")]),
        ("e000000-1", [("main agent", ""), ("sub-agent", "started by c4")]),
        (
            "e000000-2",
            [
                ("main agent", ""),
                ("main agent, summary", "continues for another purpose from c4"),
                ("main agent", "continues from the summary c5"),
            ],
        ),
        ("e000000-3", [("main agent", ""), ("main agent", "asks again c0")]),
    ],
)
def test_branches_are_threads_that_name_what_they_left(browser: TestClient, execution: str, threads: list[tuple[str, str]]):
    html = browser.get(f"/run/first/executions/{execution}").text
    outline = html.split('aria-label="Outline"')[1].split("</nav>")[0]
    found = re.findall(r'<a href="#thread-\d+">([^<]+)</a>.*?</span>(?:<div class="of">([^<]+)</div>)?</li>', outline)
    assert found == threads


def test_what_was_trained_is_told_with_its_advantage(browser: TestClient):
    group = browser.get("/run/first/groups/0").text
    rows = re.findall(r'data-open>(e000000-\d)</a>.*?<td class="num">([^<]*)</td><td><span', group, re.DOTALL)
    execution, advantage = next((name, value) for name, value in rows if value and float(value))
    page = browser.get(f"/run/first/executions/{execution}").text
    assert f'<div class="value">{advantage}</div>' in page and "trained in step 1" in page


def test_every_token_of_a_call_has_its_numbers(browser: TestClient):
    html = browser.get("/run/first/executions/e000000-0/calls/c0").text
    shown = re.findall(
        r'<span class="lp-\d[^"]*" title="(\d+): token \d+, log-prob (-?[\d.]+), probability ([\d.]+), version 0[^"]*">', html
    )
    assert [int(number) for number, _, _ in shown] == list(range(len(shown))) and len(shown) > 50
    assert "".join(unescape(text) for text in re.findall(r'version 0[^"]*">([^<]*)</span>', html)).startswith(
        "<think>\nWhat is to be done?"
    )


def test_logs_and_files_that_were_kept_are_shown_but_no_link_is_followed(browser: TestClient):
    html = browser.get("/run/first/executions/e000000-0").text
    assert "Harness output" in html and "3 of 4 tests pass" in html
    assert 'workspace/out <span class="of">a link or device: not followed' in html
    assert "x = 4" in browser.get("/run/first/executions/e000000-0/file?path=workspace/src/a.py").text
    assert "Not text." in browser.get("/run/first/executions/e000000-0/file?path=workspace/picture.bin").text


@pytest.mark.parametrize(
    "path",
    [
        *(
            "workspace/out",
            "workspace/away/config.toml",
            "../../config.toml",
            "/etc/passwd",
            "workspace",
            "",
            ".",
            "workspace/none",
        ),
        *("workspace/../../../config.toml", "workspace/src/../../../../config.toml", "workspace/\x00"),
    ],
)
def test_no_file_outside_of_what_was_kept_is_shown(browser: TestClient, path: str):
    found = browser.get("/run/first/executions/e000000-0/file", params={"path": path})
    assert found.status_code == 404 and "learning_rate" not in found.text and "root:" not in found.text


def test_an_unchanged_page_costs_no_drawing(browser: TestClient):
    for page in ("/run/first/", "/run/first/executions", "/run/first/executions/e000000-0"):
        tag = browser.get(page).headers["etag"]
        again = browser.get(page, headers={"if-none-match": tag})
        assert again.status_code == 304 and not again.content


def test_a_run_that_goes_on_is_read_on(tmp_path: Path):
    write_made_up_run(tmp_path, MadeUpRun(num_executions=16, num_tasks=2, is_finished=False, name="live"))
    folder = RunFolder(tmp_path / "live")
    browser = TestClient(dashboard_app(tmp_path), base_url="http://127.0.0.1")
    assert browser.get("/run/live/executions").text.count("data-row") == 16
    with Journal.open(folder.controller_journal, ControllerRecord) as journal:
        tag = browser.get("/run/live/executions").headers["etag"]
        journal.append(Decided((Start(execution_id(1, 0), 1, "cell-0"),)))  # type: ignore[arg-type]
        found = browser.get("/run/live/executions?text=e000001-0", headers={"if-none-match": tag})
        assert found.status_code == 200 and '<span class="state run">running</span>' in found.text
        assert 'data-live="3"' in found.text
    assert "interrupted" in browser.get("/").text


def test_a_damaged_run_is_named_and_hides_no_other(tmp_path: Path, made_up: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("")
    (tmp_path / "broken" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "whole").symlink_to(made_up / "first")
    html = TestClient(dashboard_app(tmp_path), base_url="http://127.0.0.1").get("/").text
    assert "unreadable" in html and "this line is not a metric" in html and "finished" in html


def test_our_own_files_are_served_and_no_others(browser: TestClient):
    assert browser.get("/static/dashboard.css").headers["content-type"].startswith("text/css")
    assert browser.get("/static/live.js").status_code == 200
    assert browser.get("/static/../server.py").status_code == 404 and browser.get("/static/server.py").status_code == 404


def test_a_task_has_its_history(browser: TestClient):
    tasks = browser.get("/run/first/tasks").text
    assert re.findall(r"data-open>(task-\d+)</a>", tasks) and "6 tasks" in tasks
    task = browser.get("/run/first/task?name=task-003").text
    assert re.findall(r"data-open>(\d+)</a>", task) == ["9", "3"]
    assert "version 1:" in task and "group 9" in task
    assert browser.get("/run/first/task?name=none").status_code == 404


def test_what_was_said_is_searched(browser: TestClient):
    for _ in range(200):
        html = browser.get("/run/first/search?q=mend+TASK-004").text
        if "% of the journal searched" not in html:
            break
    assert len(re.findall("<section", html)) >= 16 and "<mark>Mend task-004</mark>" in html
    execution = re.findall(r"executions/(e\d+-\d+)\?attempt=0&amp;call=(c\d+)#", html)
    assert {int(name[1:7]) % 6 for name, _ in execution} == {4}
    assert "0 calls found" in browser.get("/run/first/search?q=nobody+said+this").text


def test_runs_are_compared_by_curves_configuration_and_tasks(browser: TestClient):
    html = browser.get("/compare?run=first&run=second").text
    settings = html.split('id="settings"')[1].split("</section>")[0]
    assert re.findall(r"<code>([^<]+)</code>", settings) == ["trainer.learning_rate", "1e-05", "2e-05"]
    assert html.count("<svg") == 9
    tasks = html.split('id="same-tasks"')[1]
    assert len(re.findall("data-row", tasks)) == 6 and "/run/second/task?name=task-00" in tasks
    assert "Choose two runs" in browser.get("/compare?run=first").text


def test_the_demo_is_a_finished_run_with_conversations(tmp_path: Path):
    demo = TestClient(dashboard_app(unpack_demo(tmp_path)), base_url="http://127.0.0.1")
    assert "finished" in demo.get("/").text
    found = demo.get("/run/quickstart/executions?with=sub-agents&kind=train&sort=id").text
    page = demo.get(f"/run/quickstart/executions/{listed(found)[0]}").text
    assert "sub-agent" in page and "calls <b>" in page and "trained in step" in page


def test_a_conversation_that_is_still_being_read_comes_by_itself(browser: TestClient, monkeypatch: pytest.MonkeyPatch):
    """The script puts in what stands below `data-live-id`: the conversation has to."""
    monkeypatch.setattr("qwengyre.dashboard.execution_pages.READING_S", -1.0)
    monkeypatch.setattr("qwengyre.dashboard.journal_follower.RECORDS_PER_LOOK", 1)
    first = browser.get("/run/second/executions/e000011-1").text
    assert "Still reading" in first and 'data-live="1"' in first
    monkeypatch.undo()
    later = browser.get("/run/second/executions/e000011-1").text
    for page, shown in ((first, "Still reading"), (later, 'aria-label="Outline"')):
        assert shown in page.split('<div data-live-id="conversation">')[1]
