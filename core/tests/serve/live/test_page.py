"""The page at / in a real browser: it chats, shows numbers and the Plan, with an API key, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on the PATH, and CHROMIUM names none")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.problems = []
    page.asked = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: page.asked.append(asked.url))
    yield page
    context.close()


@pytest.fixture(scope="module")
def keyed(start: Any) -> Iterator[Any]:
    with start("--api-key", "key-1", "--disable-uvicorn-access-log", "--chat-template", TEMPLATE) as server:
        yield server


def until(page: Any, condition: str) -> None:
    """Wait; the test's time limit is the limit. The page's policy lets no one evaluate in it, playwright's waiting included."""
    while not page.evaluate(condition):
        page.wait_for_timeout(50)


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def test_a_person_can_chat_and_see_what_the_engine_does(keyed: Any, page: Any) -> None:
    page.goto(keyed.url)
    page.get_by_label("API key").fill("key-1")
    page.get_by_label("API key").press("Enter")
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    page.get_by_label("Most tokens").fill("300")
    page.get_by_label("Message", exact=True).fill("<b>Hello</b>")
    page.get_by_label("Message", exact=True).press("Enter")
    said = page.locator(".message.user")
    assert said.inner_text() == "<b>Hello</b>", "text stays text"
    answer = page.locator(".message.assistant")
    until(page, "document.querySelector('.message.assistant')?.textContent.length > 50")
    until(page, "!document.getElementById('send').disabled")
    assert answer.inner_text()
    until(page, "document.getElementById('answer-rate').textContent.includes('tokens/s')")
    until(page, "document.getElementById('rate').textContent.includes('tokens/s')")
    until(page, "document.getElementById('running').textContent === '0'")
    assert "%" in page.locator("#kv-text").inner_text()
    assert page.locator("#state").inner_text() == "ready"
    plan = page.locator("#plan").inner_text()
    assert "NullForCausalLM" in plan
    assert "cpu" in plan
    assert page.locator("#rejected-title").inner_text().startswith("Rejected: ")
    assert page.locator("#bindings tr").count() > 3
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".message").count() == 0
    # Before the key was given two requests were refused, which a browser reports; nothing else was wrong.
    assert [one for one in page.problems if "401" not in one] == []
    assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {keyed.url.split("/")[2]}


def test_an_answer_can_be_stopped_and_an_error_is_shown(keyed: Any, page: Any) -> None:
    page.goto(keyed.url)
    page.get_by_label("Message", exact=True).fill("no key yet")
    page.get_by_role("button", name="Send").click()
    page.locator(".message.error").wait_for()
    assert "API key is wrong" in page.locator(".message.error").inner_text()
    page.get_by_label("API key").fill("key-1")
    page.get_by_label("API key").press("Enter")
    page.get_by_label("Most tokens").fill("1900")
    page.get_by_label("Message", exact=True).fill("go on")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    until(page, "!document.getElementById('send').disabled")
    assert page.locator(".message.error").count() == 1


def test_a_script_from_elsewhere_would_not_run(keyed: Any, page: Any) -> None:
    page.goto(keyed.url)
    page.evaluate("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)")
    page.evaluate("const i = new Image(); i.src = 'https://elsewhere.example/x.png'; document.body.append(i)")
    assert page.evaluate("window.ran") is None
    page.wait_for_timeout(200)
    assert any("Content Security Policy" in one for one in page.problems)
