"""The page in headless Chromium: send, stream, stop, fork, reload, named states, dark and light.

FURIOUS_URL names a running server (make test-serve starts one); FURIOUS_SCREENSHOTS a folder for pictures.
"""
import os
import re

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

URL = os.environ.get("FURIOUS_URL", "http://127.0.0.1:8081/")
PICTURES = os.environ.get("FURIOUS_SCREENSHOTS")


@pytest.fixture
def page():
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--lang=en"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    page = Page(driver)
    page.open()
    yield page
    wrong = [entry for entry in driver.get_log("browser")
             if entry["level"] == "SEVERE" and "status of 4" not in entry["message"]]
    driver.quit()
    assert not wrong


class Page:
    def __init__(self, driver):
        self.driver = driver

    def open(self):
        self.driver.get(URL)
        self.until(lambda: self.find("#model").text not in ("…", "not connected"))

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition, seconds=60):
        WebDriverWait(self.driver, seconds, poll_frequency=0.05,
                      ignored_exceptions=(Exception,)).until(lambda _: condition())

    def idle(self):
        self.until(lambda: self.find("#send").is_displayed() and not self.all(".cursor"))

    def texts(self):
        return [element.text for element in self.all(".message .text")]

    def write(self, text):
        self.find("#input").send_keys(text, Keys.ENTER)

    def send(self, text):
        count = len(self.all(".message"))
        self.write(text)
        self.until(lambda: len(self.all(".message")) == count + 2)
        self.idle()
        assert not self.all(".error"), self.find(".error").text

    def click(self, selector, text):
        next(e for e in self.all(selector) if e.text == text).click()

    def picture(self, name):
        if PICTURES:
            self.driver.save_screenshot(os.path.join(PICTURES, name + ".png"))

    def set_tokens(self, count):
        self.find("#settings").click()
        field = self.find("#set-max_tokens")
        field.clear()
        field.send_keys(str(count))
        self.find("#settings-close").click()

    def cached(self):
        self.until(lambda: "prompt tokens" in self.find("#cached").text)
        return [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", self.find("#cached").text)]


def test_sends_and_streams(page):
    page.set_tokens(200)
    page.driver.execute_script("""
        window.lengths = new Set();
        new MutationObserver(() => {
          const texts = document.querySelectorAll(".message.assistant .text");
          if (texts.length) lengths.add(texts[0].textContent.length);
        }).observe(document.getElementById("messages"), {childList: true, subtree: true, characterData: true});""")
    page.send("Hello")
    lengths = page.driver.execute_script("return [...lengths]")
    assert page.texts()[0] == "Hello"
    assert len(lengths) > 3, "the answer came in one piece"
    page.until(lambda: "tokens/s" in page.find("#rate").text)
    assert "state" in page.find("#memory").text and "KV cache" in page.find("#memory").text
    page.picture("light")


def test_stops(page):
    page.set_tokens(4000)
    page.write("Count to a million")
    page.until(lambda: len(page.texts()) == 2 and len(page.texts()[1]) > 5)
    page.find("body").send_keys(Keys.ESCAPE)
    page.idle()
    first = page.texts()[1]
    assert first and "stopped" in page.all(".message")[1].text or not page.find("#stop").is_displayed()
    page.set_tokens(10)
    page.send("Go on")
    assert page.texts()[1] == first


def test_forks_and_returns(page):
    page.set_tokens(12)
    page.send("First question")
    page.send("Second question")
    old = page.texts()
    page.click(".message.user:nth-of-type(3) .tools button", "Edit")
    area = page.find(".message textarea")
    area.send_keys(Keys.CONTROL, "a")
    area.send_keys("Another question", Keys.ENTER)
    page.until(lambda: len(page.texts()) == 4 and page.texts()[2] == "Another question")
    page.idle()
    assert page.texts()[:2] == old[:2]
    cached, prompt = page.cached()
    assert 0 < cached < prompt, "the branch was read from its beginning"
    assert "2/2" in page.all(".message")[2].text
    page.picture("fork")
    page.find("body").send_keys(Keys.ALT, Keys.ARROW_LEFT)
    page.until(lambda: page.texts() == old)
    page.find("body").send_keys(Keys.ALT, Keys.ARROW_RIGHT)
    page.until(lambda: page.texts()[2] == "Another question")
    page.click(".message.assistant:last-of-type .tools button", "Retry")
    page.idle()
    assert "2/2" in page.all(".message")[3].text
    next(e for e in page.all("#tree button") if e.text.startswith("Second")).click()
    page.until(lambda: len(page.texts()) == 3 and page.texts()[2] == "Second question")


def test_survives_a_reload(page):
    page.set_tokens(12)
    page.send("Remember this")
    before = page.texts()
    page.open()
    page.until(lambda: page.texts() == before)
    page.send("And this")
    assert page.texts()[:2] == before
    cached, prompt = page.cached()
    assert 0 < cached < prompt


def test_named_state(page):
    name = "browser-" + os.urandom(4).hex()
    page.set_tokens(12)
    page.find("#read").click()
    page.find("#read-name").send_keys(name)
    page.find("#read-text").send_keys("The treasure lies under the third oak. " * 5)
    page.picture("read")
    page.find("#read-go").click()
    page.until(lambda: not page.find("#read-dialog").is_displayed())
    page.until(lambda: page.find("#base").get_attribute("value") == name)
    page.send("Where is it?")
    cached, prompt = page.cached()
    assert cached > 30 and prompt > cached
    assert not page.find("#base").is_enabled()
    page.picture("state")
    page.find("#read").click()
    page.find("#read-name").send_keys(name)
    page.find("#read-text").send_keys("x")
    page.find("#read-go").click()
    page.until(lambda: "exists" in page.find("#read-note").text)
    page.find("#read-cancel").click()
    next(b for b in page.all("#states button") if b.get_attribute("aria-label") == f"Delete state {name}").click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: name not in page.find("#states").text)


def test_keeps_the_state_after_an_answer(page):
    name = "kept-" + os.urandom(4).hex()
    page.set_tokens(12)
    page.send("Remember me")
    page.click(".message.assistant .tools button", "Keep")
    alert = page.driver.switch_to.alert
    alert.send_keys(name)
    alert.accept()
    page.until(lambda: name in page.find("#states").text)
    next(b for b in page.all("#states button") if b.text.startswith(name)).click()
    page.until(lambda: page.find("#base").get_attribute("value") == name and not page.texts())
    page.send("Who am I?")
    cached, prompt = page.cached()
    assert 0 < cached < prompt


def test_settings_stay(page):
    page.find("body").send_keys(Keys.ALT, ",")
    page.find("#set-key").send_keys("secret")
    page.find("#set-system").send_keys("Be brief.")
    page.find("#settings-close").click()
    page.open()
    stored = page.driver.execute_script("return JSON.parse(localStorage['furious.settings'])")
    assert stored["key"] == "secret" and stored["system"] == "Be brief."
    page.driver.execute_script("""
        window.sent = [];
        const real = window.fetch;
        window.fetch = (url, options) => { sent.push([String(url), options]); return real(url, options); };""")
    page.set_tokens(4)
    page.send("Hello")
    url, options = next(s for s in page.driver.execute_script("return sent.map(([u, o]) => [u, {headers: o.headers, body: o.body}])")
                        if s[0].endswith("completions"))
    assert options["headers"]["Authorization"] == "Bearer secret"
    assert '"role":"system","content":"Be brief."' in options["body"]


def test_text_is_never_html(page):
    page.set_tokens(12)
    page.send("<img src=x onerror=\"document.title='owned'\"><b>bold</b>")
    assert page.texts()[0].startswith("<img")
    assert not page.all("#messages img, #messages b")
    assert "owned" not in page.driver.title


def test_dark_and_small(page):
    page.set_tokens(12)
    page.send("Hello")
    background = lambda: page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    before = background()
    page.find("#theme").click()
    page.until(lambda: background() != before)
    page.picture("dark")
    page.driver.set_window_size(500, 800)
    assert not page.find("#side").is_displayed()
    page.find("#menu").click()
    assert page.find("#side").is_displayed()
    page.picture("small")
    assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_uses_nothing_from_outside(page):
    hosts = page.driver.execute_script("return performance.getEntriesByType('resource').map(e => new URL(e.name).origin)")
    assert set(hosts) <= {page.driver.execute_script("return location.origin")}
