"""The page at ``/``: its files, and what a person does with it in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from headless_browser import Page, browser, find_chromium
from server_fake_engine import ANSWER
from server_under_test import Running, running_server

from ingle_server.routes.page import MEDIA_TYPES

FILES = ["/", *(f"/page/{name}" for name in MEDIA_TYPES)]
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
LAST = ".turn.assistant:last-child"


@pytest.mark.parametrize("path", FILES)
def test_the_pages_files_forbid_everything_from_elsewhere(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
    assert "innerHTML" not in answer.text
    assert not re.search(r"\son\w+=|<style|style=", answer.text.partition("<body>")[2])


@pytest.mark.parametrize("name", ["nope", "..%2fapp.py", "%2e%2e%2fapp.py"])
def test_names_of_files_are_keys(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code in (404, 405)


def test_the_page_opens_without_a_key_and_its_requests_need_one() -> None:
    with running_server(api_key=("k",)) as running, running.client() as http:
        assert all(http.get(path).status_code == 200 for path in FILES)
        assert http.get("/v1/models").status_code == 401


needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def fresh(tab: Page, shared: Running) -> Page:
    """The page, as somebody sees it who was never here."""
    tab.size(*SIZES["desktop"])
    tab.open(shared.url)
    tab.js("localStorage.clear(); sessionStorage.clear()")
    tab.open(shared.url)
    tab.wait("document.querySelector('#model').options.length > 0")
    tab.errors.clear()
    tab.requests.clear()
    shared.engine.answer = ANSWER
    return tab


def say(page: Page, text: str) -> None:
    page.click("#input")
    page.type(text)
    page.press_enter()


def wait_for_answer(page: Page, text: str = ANSWER) -> None:
    page.wait(
        f"[...document.querySelectorAll('{LAST} .text')].some("
        f"e => e.textContent.trim() === {json.dumps(text)})"
        " && !document.querySelector('#send').hidden"
    )


def requests_of(shared: Running) -> Any:
    return shared.engine.seen[-1].params


@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_a_chat_on_every_size(fresh: Page, shared: Running, size: str) -> None:
    fresh.size(*SIZES[size], phone=size == "phone")
    if size == "phone":  # the list slides away
        fresh.wait("getComputedStyle(document.querySelector('#side')).visibility === 'hidden'")
    say(fresh, "How are you?")
    wait_for_answer(fresh)
    assert fresh.text(".turn.user .text") == "How are you?"
    foot = fresh.text(f"{LAST} .foot")
    assert "tokens/s" in foot
    assert "cached" in foot
    assert fresh.js("document.documentElement.scrollWidth <= innerWidth")
    box = fresh.js(
        "(b => [b.left, b.right])(document.querySelector('#composer').getBoundingClientRect())"
    )
    assert box[0] >= 0
    assert box[1] <= SIZES[size][0]
    assert fresh.errors == []
    assert all(url.startswith(shared.url) for url in fresh.requests)


@needs_chromium
def test_the_phones_drawers_open_and_close(fresh: Page) -> None:
    fresh.size(*SIZES["phone"], phone=True)
    hidden = "getComputedStyle(document.querySelector('#side')).visibility === 'hidden'"
    fresh.wait(hidden)
    fresh.click("#menu")
    fresh.wait(f"!({hidden})")
    fresh.wait("document.querySelector('#side').getBoundingClientRect().left === 0")
    fresh.click("#new")
    fresh.wait(hidden)
    fresh.click("#tune")
    fresh.wait("!document.querySelector('#panel').hidden")
    fresh.click("#close")
    fresh.wait("document.querySelector('#panel').hidden")


@needs_chromium
def test_text_of_users_and_models_never_becomes_html(fresh: Page, shared: Running) -> None:
    evil = "<img src=x onerror=document.title='owned'> **bold** `<b>x</b>`"
    shared.engine.answer = evil
    say(fresh, evil)
    wait_for_answer(fresh, "<img src=x onerror=document.title='owned'> bold <b>x</b>")
    assert fresh.text(".turn.user .text") == evil
    assert fresh.js("document.querySelectorAll('#log img, #log b').length") == 0
    assert fresh.text(f"{LAST} strong") == "bold"
    assert fresh.js("document.title") == "Ingle"


@needs_chromium
def test_stopping_keeps_what_came_and_regenerating_asks_again(fresh: Page, shared: Running) -> None:
    shared.engine.hold = 8
    say(fresh, "Tell me a story.")
    fresh.wait(f"document.querySelector('{LAST} .text').textContent.length >= 7")
    num_aborted = len(shared.engine.aborted)
    fresh.click("#stop")
    fresh.wait(f"document.querySelector('{LAST} .foot')?.textContent.includes('stopped')")
    assert fresh.text(f"{LAST} .text") == "Zoë say"
    for _ in range(200):
        if len(shared.engine.aborted) > num_aborted:
            break
        fresh.js("new Promise(go => setTimeout(go, 10))")
    assert len(shared.engine.aborted) > num_aborted
    shared.engine.hold = None
    fresh.click(f"{LAST} .again")
    wait_for_answer(fresh)
    assert fresh.js("document.querySelectorAll('.turn').length") == 2


@needs_chromium
def test_settings_reach_the_engine_and_conversations_survive_a_reload(
    fresh: Page, shared: Running
) -> None:
    fresh.click("#tune")
    fresh.click("#system")
    fresh.type("Be brief.")
    fresh.click("input[name=min_p]")
    fresh.type("0.05")
    say(fresh, "First")
    wait_for_answer(fresh)
    assert requests_of(shared).min_p == 0.05
    assert shared.engine.chats[-1].messages[0] == {"role": "system", "content": "Be brief."}
    fresh.click("#new")
    say(fresh, "Second")
    wait_for_answer(fresh)
    fresh.open(shared.url)
    fresh.wait("document.querySelectorAll('#list .title').length === 2")
    assert fresh.text("#list div[aria-current=true] .title") == "Second"
    fresh.js("document.querySelectorAll('#list .title')[1].click()")
    assert fresh.text(".turn.user .text") == "First"
    fresh.js("document.querySelector('#list div[aria-current=true] .drop').click()")
    assert fresh.js("document.querySelectorAll('#list .title').length") == 1
    fresh.click("#tune")
    fresh.click("#reset")
    assert fresh.js("document.querySelector('input[name=min_p]').value") == ""


@needs_chromium
def test_light_and_dark_follow_the_system_until_told(fresh: Page, shared: Running) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = fresh.js(background)
    fresh.size(*SIZES["desktop"], dark=True)
    fresh.wait(f"{background} !== {json.dumps(light)}")
    fresh.click("#theme")
    fresh.wait(f"{background} === {json.dumps(light)}")
    fresh.open(shared.url)
    fresh.wait(f"{background} === {json.dumps(light)}")


@needs_chromium
def test_refusals_are_shown_and_the_panel_is_alive(fresh: Page, shared: Running) -> None:
    fresh.wait("/GiB/.test(document.querySelector('#m-memory').textContent)")
    fresh.wait("/%/.test(document.querySelector('#m-cache').textContent)")
    assert fresh.text("#m-waiting") == "0"
    say(fresh, "template, refuse!")
    fresh.wait("document.querySelector('.error')?.textContent.includes('refuses')")


@needs_chromium
def test_a_key_is_asked_for_and_kept_for_the_tab_only(tab: Page) -> None:
    tab.size(*SIZES["desktop"])
    with running_server(api_key=("secret",)) as running:
        tab.open(running.url)
        tab.wait("document.querySelector('#state').classList.contains('bad')")
        tab.click("#tune")
        tab.click("#key")
        tab.type("secret")
        tab.js("document.querySelector('#key').blur()")
        tab.wait("document.querySelector('#model').options.length === 1")
        say(tab, "Hi")
        wait_for_answer(tab)
        assert "secret" not in tab.js("JSON.stringify(localStorage)")
