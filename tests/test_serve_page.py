"""The chat page: what it loads and what may run in it; in a browser, against a real server."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from package_data import default_model
from serving import START_S, Served, served

from llamagpu.serve.page import read_page

SCREENSHOT = os.environ.get("LLAMAGPU_SCREENSHOT")  # where to write the README's picture
HOSTILE = """# Title <script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1"> <b>bold?</b> [link](javascript:window.hacked=1) [good](https://example.com/a)

```html
<script>window.hacked = 1</script>
```

1. one **bold**
2. two `<i>code</i>`

| a | b |
|---|---|
| <svg onload=window.hacked=1> | 2 |
"""
QUESTION = "Why is the sky blue? Answer in two sentences."
CONVERSATION = [
    {"role": "user", "content": "How do I reverse a list in Python?"},
    {
        "role": "assistant",
        "content": "Use `reversed` for an iterator, or a **slice** for a copy:\n\n```python\nletters = list('abc')\n"
        "print(letters[::-1])      # ['c', 'b', 'a']\n```\n\n| way | copies |\n|---|---|\n| `letters[::-1]` | yes |\n"
        "| `letters.reverse()` | no, in place |\n",
        "stats": "",
    },
]


def test_the_page_loads_nothing_and_allows_only_its_script() -> None:
    page, policy = read_page()
    text = page.decode()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(|innerHTML|document\.write|eval\(""", text)
    (script,) = re.findall("<script>(.*?)</script>", text, re.S)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("style-src")[0]
    assert not re.search(r"\son\w+=", text.split("<script>")[0])  # no handlers in the markup


class Browser:
    """Chromium, driven through its debugging pipe."""

    def __init__(self, chromium: str, folder: Path) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = [chromium, *flags.split(), f"--user-data-dir={folder}", "about:blank"]

        def place_pipes() -> None:
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        self.process = subprocess.Popen(
            command, close_fds=False, preexec_fn=place_pipes, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._held, self._number, self.requests = b"", 0, list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = os.read(self._from, 65536)
            assert piece, "the browser has ended"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        deadline = time.monotonic() + START_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def type(self, text: str) -> None:
        self.run("input.focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "ArrowUp": 38}[key]
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium here")
    found = Browser(chromium, tmp_path / "profile")
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture(scope="module")
def server(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("serve")) as found:
        yield found


def set_options(browser: Browser, **options: Any) -> None:
    browser.run(f"Object.assign(state.options, {json.dumps(options)}); keep()")


@pytest.mark.slow
def test_a_conversation_in_a_browser(server: Served, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("$('model').textContent === 'tiny'")
    set_options(browser, temperature=0, max_tokens=6)
    browser.type("hello you")
    browser.press("Enter")
    browser.wait("!running && state.messages.length === 2")
    first = browser.run("state.messages[1].content")
    assert first and browser.run("document.querySelector('.assistant .tools').textContent").endswith("cut off")
    assert "tok/s" in browser.run("state.messages[1].stats")
    browser.run("[...document.querySelectorAll('.assistant button')].at(-1).click()")  # regenerate
    browser.wait("!running && state.messages.length === 2")
    assert browser.run("state.messages[1].content") == first
    browser.press("ArrowUp")  # edit the last message
    assert browser.run("input.value") == "hello you" and browser.run("state.messages.length") == 0
    set_options(browser, max_tokens=1900)
    browser.press("Enter")
    browser.wait("running && state.messages[1]?.content")
    browser.press("Escape")  # stop
    browser.wait("!running && state.messages[1].stats === 'stopped'")
    browser.open(server.url)  # again
    browser.wait("document.querySelectorAll('.message').length === 2")
    set_options(browser, temperature=-1)
    browser.type("again")
    browser.press("Enter")
    assert "temperature" in browser.wait("!running && document.querySelector('.error')?.textContent")
    browser.run("$('new').click()")
    assert browser.run("document.querySelectorAll('.message').length") == 0
    assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {server.url.split("/")[2]}


@pytest.mark.slow
def test_text_of_the_model_cannot_run(server: Served, browser: Browser) -> None:
    browser.open(server.url)
    message = {"role": "assistant", "content": HOSTILE, "reasoning": "<script>window.hacked = 1</script>"}
    browser.run(f"state.messages = [{json.dumps(message)}]; keep()")
    browser.open(server.url)
    browser.wait("document.querySelector('.message table') !== null")
    assert browser.run("window.hacked === undefined")
    counts = "['script', 'img', 'svg', 'b', 'i'].map((name) => log.getElementsByTagName(name).length).join()"
    assert browser.run(counts) == "0,0,0,0,0"
    assert browser.run("[...log.querySelectorAll('a')].map((a) => a.href).join()") == "https://example.com/a"
    assert browser.run("log.querySelector('pre code').textContent") == "<script>window.hacked = 1</script>"
    assert browser.run("log.querySelectorAll('ol li').length") == 2
    browser.run("log.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.hacked = 1\">')")
    time.sleep(0.3)
    assert browser.run("window.hacked === undefined")  # the policy


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looks(server: Served, browser: Browser, scheme: str) -> None:
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", features=feature)
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    browser.open(server.url)
    browser.run(f"state.messages = {json.dumps(CONVERSATION)}; draw()")
    assert browser.run("document.documentElement.scrollWidth <= 360")
    colours = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    background, text = re.findall(r"rgb\((\d+)", browser.run(colours))
    assert (int(background) > int(text)) == (scheme == "light")


@pytest.mark.slow
@pytest.mark.skipif(not SCREENSHOT, reason="LLAMAGPU_SCREENSHOT names no file")
def test_picture_of_the_readme(browser: Browser, tmp_path: Path) -> None:
    """The default model answers a question."""
    browser.call("Emulation.setDeviceMetricsOverride", width=900, height=480, deviceScaleFactor=1, mobile=False)
    with served(tmp_path, model=default_model(), template=None) as server:
        browser.open(server.url)
        set_options(browser, temperature=0, max_tokens=200)
        browser.type(QUESTION)
        browser.press("Enter")
        browser.wait("!running && state.messages.length === 2")
        browser.run("log.scrollTop = 0")
        picture = browser.call("Page.captureScreenshot", format="png")["data"]
    Path(str(SCREENSHOT)).write_bytes(base64.b64decode(picture))
