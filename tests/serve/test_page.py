"""The page at `/`: its routes and headers, the trees in streams, and the page itself in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import pytest
from test_api import STORY, Running, events, eventually, server

from yggdrasil.picture import Picture
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.serve.web import PAGE_PATHS

KEY = "a key"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TREES = {"stream": True, "stream_options": {"include_trees": True}}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


# ---- routes ----


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_the_files_need_no_key_and_allow_nothing_from_elsewhere(path: str) -> None:
    with server(api_key=KEY) as running:
        response = running.get(path)
        assert response.status_code == 200
        policy = dict(
            part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert running.get("/server_info").status_code == running.get("/metrics").status_code == 401


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_no_page_means_no_file_and_a_key_for_every_path(path: str) -> None:
    with server(page=False) as running:
        assert running.get(path).status_code == 404
    with server(page=False, api_key=KEY) as running:
        assert running.get(path).status_code == 401


def test_the_page_answers_to_this_server_s_names_only(shared: Running) -> None:
    assert shared.get("/", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_the_files_name_no_other_place_and_have_nothing_inline(shared: Running, path: str) -> None:
    text = shared.get(path).text
    assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", text) is None
    if path == "/":
        assert re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)", text) is None


# ---- trees in streams ----


def test_a_stream_that_asks_has_the_tree_of_every_step(shared: Running) -> None:
    chunks = events(shared.post(prompt="Once", max_tokens=4, **TREES))[:-1]
    trees = [chunk["choices"][0]["tree"] for chunk in chunks]
    assert len(trees) == 2
    tokenizer = shared.serving.tokenizer
    texts = [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(STORY)[:4]]
    for place, tree in enumerate(trees):
        assert tree["path"] == [0, 1]
        assert [node[0] for node in tree["nodes"]] == [-1, 0, 0]
        assert [tree["nodes"][1][1], tree["bonus"]] == texts[2 * place : 2 * place + 2]
        assert tree["drafted"] == 5


def test_a_chat_has_trees_too_and_also_where_a_step_releases_no_text() -> None:
    with server() as running:
        running.service.story = "🦊🦊🦊"
        chunks = events(running.chat(max_tokens=6, **TREES))[:-1]
        deltas = [chunk["choices"][0] for chunk in chunks]
        assert len(running.service.tokenizer.encode("🦊🦊🦊")) > 3
        assert len([delta for delta in deltas if "tree" in delta]) == 3
        assert any("tree" in delta and not delta["delta"].get("content") for delta in deltas)


def test_after_the_end_of_the_text_a_tree_has_no_path(shared: Running) -> None:
    chunks = events(shared.post(prompt="Once", max_tokens=1, **TREES))[:-1]
    [tree] = [chunk["choices"][0]["tree"] for chunk in chunks]
    assert (tree["path"], len(tree["bonus"]) > 0) == ([0], True)


def test_nobody_gets_a_tree_unasked_and_an_answer_without_a_stream_has_none(shared: Running) -> None:
    chunks = events(shared.post(prompt="Once", max_tokens=4, stream=True))[:-1]
    assert not any("tree" in chunk["choices"][0] for chunk in chunks)
    assert not shared.service.submitted[-1].trees
    response = shared.post(prompt="Once", max_tokens=4, stream_options={"include_trees": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened(browser: Any, running: Running, scheme: str = "light") -> Iterator[Any]:
    """A page that is connected; asserts that it asks nobody else, and that nothing is refused or fails."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(20_000)
    others: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: others.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
    page.goto(running.url)
    yield page
    context.close()
    assert [url for url in others if not url.startswith((f"{running.url}/", "data:"))] == []
    assert [text for text in failures if "Failed to load resource" not in text] == []


def connected(page: Any) -> Any:
    expect(page.locator("#model")).to_contain_text("nightjar")
    return page


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator, None)


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_text_goes_on_chunk_by_chunk_and_with_what_is_added(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        expect(page.locator("#hint")).to_contain_text("no chat template")
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        expect(page.locator("#stop")).to_be_hidden()
        ask(page, " Then")
        expect(page.locator("#log .assistant").nth(1)).to_have_text(STORY)
        prompt = running.service.tokenizer.decode(list(running.service.submitted[1].prompt))
        assert prompt == f"Once{STORY} Then"
        expect(page.locator("#aal")).not_to_have_text("–")


def test_a_model_with_a_template_is_asked_with_the_whole_conversation(browser: Any) -> None:
    template = ChatTemplate(TEMPLATE)
    with server(template=template) as running, opened(browser, running) as page:
        connected(page)
        expect(page.locator("#hint")).to_have_text("")
        for text in ("Hi", "Go on"):
            ask(page, text)
            expect(page.locator("#stop")).to_be_hidden()
            expect(page.locator("#log .assistant").last).to_have_text(STORY)
        prompt = running.service.tokenizer.decode(list(running.service.submitted[1].prompt))
        assert prompt == f"user: Hi\nassistant: {STORY}\nuser: Go on\nassistant:"


def test_the_page_draws_a_step_as_the_package_draws_it(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        ask(page, "Once")
        expect(page.locator("#stop")).to_be_hidden()
        page.locator("#log .chunk").first.click()
        expect(page.locator("#step-line")).to_contain_text("Step 1 of")
        drawn = groups(
            page.locator("#tree svg").evaluate("image => new XMLSerializer().serializeToString(image)")
        )
        [first, *_] = events(running.post(prompt="Once", max_tokens=60, **TREES))
        tree = first["choices"][0]["tree"]
        parents = [parent for parent, _, _ in tree["nodes"]]
        picture = Picture(
            [*parents, tree["path"][-1]],
            [f"'{text}'" for text in (*(text for _, text, _ in tree["nodes"]), tree["bonus"])],
            [""] * (len(parents) + 1),
            [*(-log_prob for _, _, log_prob in tree["nodes"]), float("-inf")],
            accepted=tree["path"],
            bonus=len(parents),
        )
        assert drawn == groups(picture.svg())


def groups(svg: str) -> list[tuple[str, str, float, float]]:
    """Class, text and place of every node."""
    found = []
    for group in ElementTree.fromstring(svg).findall(f"{SVG}g"):
        text = group.find(f"{SVG}text")
        assert text is not None
        place = (round(float(text.attrib[name])) for name in ("x", "y"))
        found.append((group.attrib["class"], text.text or "", *place))
    return found


def test_keys_walk_through_the_steps_and_mark_their_text(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        running.service.story = " there was a fox by the sea."  # no token is part of a character
        ask(page, "Once")
        expect(page.locator("#stop")).to_be_hidden()
        count = page.locator("#log .chunk").count()
        expect(page.locator("#step-line")).to_contain_text(f"Step {count} of {count}")
        page.keyboard.press("Alt+ArrowLeft")
        expect(page.locator("#step-line")).to_contain_text(f"Step {count - 1} of {count}")
        expect(page.locator("#log .chunk").nth(count - 2)).to_have_class("chunk shown")
        page.locator("#steps").press("Home")
        expect(page.locator("#step-line")).to_contain_text(f"Step 1 of {count}")


def test_the_reasoning_of_an_answer_is_whole_and_goes_back_apart(browser: Any) -> None:
    options = {"template": ChatTemplate(TEMPLATE), "reasoning_parser": "think"}
    with server(**options) as running, opened(browser, running) as page:
        connected(page)
        running.service.story = "<think>I see a fox.</think> It is red."
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text("I see a fox.It is red.")
        expect(page.locator("#stop")).to_be_hidden()
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Why?")
        reply = asked.value.post_data_json["messages"][1]
        assert reply == {"role": "assistant", "content": "It is red.", "reasoning_content": "I see a fox."}


def test_the_key_is_asked_for_kept_for_the_tab_and_sent(browser: Any) -> None:
    with server(api_key=KEY) as running, opened(browser, running) as page:
        page.fill("#key", "another")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_contain_text("did not take this key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        connected(page)
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        assert page.evaluate("[localStorage.length, Object.values(sessionStorage)]") == [0, [KEY]]
        page.reload()
        connected(page)
        expect(page.locator("#key-dialog")).to_be_hidden()


def test_the_key_is_asked_for_again_after_every_escape(browser: Any) -> None:
    """A browser lets a page refuse the first one only."""
    with server(api_key=KEY) as running, opened(browser, running) as page:
        expect(page.locator("#key-dialog")).to_be_visible()
        for _ in range(4):
            page.keyboard.press("Escape")
            expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        connected(page)
        expect(page.locator("#key-dialog")).to_be_hidden()


def test_a_key_may_have_any_letters(browser: Any) -> None:
    key = "Schlüssel ключ 鍵 🔑"
    with server(api_key=key) as running, opened(browser, running) as page:
        for wrong in ("другой", key):
            page.fill("#key", wrong)
            page.press("#key", "Enter")
            if wrong != key:
                expect(page.locator("#key-error")).to_contain_text("did not take this key")
        connected(page)
        page.reload()
        connected(page)
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text(STORY)


@pytest.mark.parametrize("writes", (True, False))
def test_a_new_conversation_during_an_answer_begins_with_nothing(browser: Any, writes: bool) -> None:
    """Whether the answer has begun or not: neither it nor its question comes back."""
    with server() as running, opened(browser, running) as page:
        connected(page)
        if writes:
            running.service.pauses_after = 6
        else:
            running.service.is_stuck = True
        ask(page, "Once")
        if writes:
            expect(page.locator("#log .chunk").first).to_be_visible()
        eventually(lambda: len(running.service.live) == 1)
        page.click("#new")
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator("#log .message")).to_have_count(0)
        expect(page.locator("#prompt")).to_have_value("")
        running.service.is_stuck = False
        running.service.pauses_after = None
        ask(page, "Twice")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        expect(page.locator("#stop")).to_be_hidden()
        ask(page, " more")
        expect(page.locator("#log .assistant").nth(1)).to_have_text(STORY)
        first, *others = (
            running.service.tokenizer.decode(list(request.prompt)) for request in running.service.submitted
        )
        assert (first, others) == ("Once", ["Twice", f"Twice{STORY} more"])


def test_a_refusal_is_shown_and_the_text_is_not_lost(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        running.service.is_full = True
        ask(page, "Once")
        expect(page.get_by_role("alert").first).to_contain_text("4 requests")
        expect(page.locator("#prompt")).to_have_value("Once")
        expect(page.locator("#log .message")).to_have_count(0)
        running.service.is_full = False
        page.press("#prompt", "Enter")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        expect(page.locator("#error")).to_be_hidden()


def test_escape_stops_the_answer_and_frees_its_row(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        running.service.is_stuck = True
        ask(page, "Once")
        eventually(lambda: len(running.service.live) == 1)
        page.keyboard.press("Escape")
        expect(page.locator("#stop")).to_be_hidden()
        eventually(lambda: running.service.cancelled == 1)


def test_the_switch_and_the_parameters_are_part_of_the_request(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        page.uncheck("#speculation")
        page.click("summary")
        for name, value in (("temperature", "0.5"), ("top_p", "0.9"), ("seed", "7"), ("max_tokens", "4")):
            page.fill(f"#{name}", value)
        ask(page, "Once")
        expect(page.locator("#stop")).to_be_hidden()
        eventually(lambda: len(running.service.submitted) == 1)
        [request] = running.service.submitted
        sampling = request.config.sampling
        assert (request.speculation, request.config.max_new_tokens, request.trees) == (0, 4, True)
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)


def test_a_parameter_beyond_its_range_is_shown_and_not_sent_however_the_text_is_sent(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        page.click("summary")
        page.fill("#temperature", "99")
        for press in (lambda: ask(page, "Once"), lambda: page.click("#send")):
            page.click("summary")
            expect(page.locator("#temperature")).to_be_hidden()
            press()
            expect(page.locator("#temperature")).to_be_focused()
        assert running.service.submitted == []
        page.fill("#temperature", "0.5")
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        expect(page.locator("#prompt")).to_have_value("")


def test_enter_sends_and_with_shift_begins_a_line(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        page.fill("#prompt", "One")
        page.press("#prompt", "Shift+Enter")
        page.keyboard.type("two")
        page.press("#prompt", "Enter")
        expect(page.locator("#log .assistant")).to_have_text(STORY)
        expect(page.locator("#log .user")).to_have_text("One\ntwo")


def test_what_a_model_writes_is_text_and_never_markup(browser: Any) -> None:
    with server() as running, opened(browser, running) as page:
        connected(page)
        running.service.story = "<img src=x onerror=alert(1)> <b>bold</b>"
        ask(page, "Once")
        expect(page.locator("#log .assistant")).to_have_text("<img src=x onerror=alert(1)> <b>bold</b>")
        assert page.locator("#log img, #log b, #tree img").count() == 0


def test_the_page_is_light_or_dark_as_the_reader_s_system_is(browser: Any) -> None:
    colours = {}
    with server() as running:
        for scheme in ("light", "dark"):
            with opened(browser, running, scheme) as page:
                connected(page)
                style = "getComputedStyle(document.body)"
                colours[scheme] = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
    brightness = {
        scheme: [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in both]
        for scheme, both in colours.items()
    }
    assert brightness["light"][0] > 600 > brightness["light"][1]
    assert brightness["dark"][0] < 150 < brightness["dark"][1]
