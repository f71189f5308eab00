"""Looks at the page of a cluster in a headless Chromium, as a user does.

    browse.py LINK [--host NAME] [--run NAME] [--console NAME --types TEXT] [--picture FILE] [--width N] [--dark]

Fails with a sentence where something is not as it should be; 77 where Chromium lacks. With
--host it drains that host by the keyboard and takes that back; with --console it types into the
console of a machine that echoes. Chromium is driven through the
pipe of its debugging protocol, so nothing else listens."""
import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

BOUND = 30


class Browser:
    def __init__(self, width, dark):
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            print("chromium is not installed", file=sys.stderr)
            sys.exit(77)
        self.folder = tempfile.TemporaryDirectory(prefix="weft-page-", ignore_cleanup_errors=True)
        to_child, self.to = os.pipe()
        self.back, from_child = os.pipe()

        def descriptors():
            # The protocol's pipes are 3 and 4; neither may be one of these yet.
            high = [os.dup2(fd, 20 + n) for n, fd in enumerate((to_child, from_child))]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        arguments = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                     "--disable-background-networking", "--remote-debugging-pipe",
                     f"--user-data-dir={self.folder.name}", f"--window-size={width},1400"]
        if dark:
            arguments.append("--force-dark-mode")
        self.process = subprocess.Popen(
            arguments + ["about:blank"], preexec_fn=descriptors, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self.number, self.read, self.events = 0, b"", []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self.session = None
        self.session = self.call("Target.attachToTarget", **attach)["sessionId"]

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if getattr(self, "session", None):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            while b"\0" in self.read:
                text, self.read = self.read.split(b"\0", 1)
                answer = json.loads(text)
                if answer.get("id") == self.number:
                    if "error" in answer:
                        raise SystemExit(f"{method}: {answer['error']['message']}")
                    return answer["result"]
                self.events.append(answer)
            if select.select([self.back], [], [], 1)[0]:
                self.read += os.read(self.back, 1 << 20)
        raise SystemExit(f"{method}: no answer within {BOUND} s")

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{expression}: {result['exceptionDetails']['text']}")
        return result["result"].get("value")

    def until(self, what, expression):
        end = time.monotonic() + BOUND
        while not self.value(expression):
            if time.monotonic() > end:
                shown = self.value("document.body.innerText")
                raise SystemExit(f"{what}: not within {BOUND} s; the page shows:\n{shown}")
            time.sleep(0.05)

    def press(self, key, text=None):
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key)
        press = {"key": key, "text": text if text is not None else (key if len(key) == 1 else "")}
        if key == "Enter":
            press["text"] = "\r"
        if code:
            press["windowsVirtualKeyCode"] = code
        self.call("Input.dispatchKeyEvent", type="keyDown", **press)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def look(browser, arguments):
    for domain in ("Page", "Runtime", "Network", "Log"):
        browser.call(f"{domain}.enable")
    begun = time.monotonic()
    browser.call("Page.navigate", url=arguments.link)
    browser.until("hosts", "document.querySelectorAll('.host').length > 0")
    first = time.monotonic() - begun
    print(f"the first picture came after {first:.2f} s")
    if browser.value("location.hash") != "":
        raise SystemExit("the key is still in the address")
    if arguments.run:
        browser.until("the aggregate", f"document.getElementById('run-{arguments.run}') !== null")
    if arguments.host:
        drain(browser, arguments.host)
    if arguments.console:
        type_into(browser, arguments.console, arguments.types)
    wide = browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 0:
        raise SystemExit(f"the page is {wide} pixels wider than the window")
    unnamed = browser.value(
        "[...document.querySelectorAll('button, input, [role=img]')].filter((e) => !e.hidden && "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length")
    if unnamed:
        raise SystemExit(f"{unnamed} controls or pictures have no name for a screen reader")
    if arguments.picture:
        tall = browser.value("Math.ceil(document.body.getBoundingClientRect().height)")
        clip = {"x": 0, "y": 0, "width": arguments.width, "height": min(tall, 1400), "scale": 1}
        picture = browser.call("Page.captureScreenshot", format="png", clip=clip,
                               captureBeyondViewport=True)["data"]
        with open(arguments.picture, "wb") as file:
            file.write(base64.b64decode(picture))
    origin = arguments.link.split("/#")[0]
    for event in browser.events:
        if event["method"] == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith((origin, "data:", "about:")):
                raise SystemExit(f"the page asks elsewhere: {url}")
        if event["method"] == "Runtime.exceptionThrown":
            raise SystemExit(f"the script failed: {event['params']['exceptionDetails']}")
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            raise SystemExit(f"the console has: {event['params']['entry']['text']}")


def drain(browser, host):
    """By the keyboard: the filter, the button, the question."""
    card = f"document.getElementById('host-{host}')"
    browser.press("/")
    browser.until("the filter has the focus", "document.activeElement.id === 'filter'")
    for letter in host:
        browser.press(letter)
    browser.until("one host is left", "document.querySelectorAll('.host').length === 1")
    browser.value(f"document.getElementById('drain-{host}').focus()")
    browser.press("Enter")
    browser.until("the question", "document.getElementById('ask').open")
    browser.press("Escape")
    browser.until("no question", "!document.getElementById('ask').open")
    browser.value(f"document.getElementById('drain-{host}').focus()")
    browser.press("Enter")
    browser.until("the question", "document.getElementById('ask').open")
    browser.value("document.getElementById('ask-yes').focus()")
    browser.press("Enter")
    browser.until("the host is drained", f"{card}.textContent.includes('drained')")
    browser.value(f"document.getElementById('uncordon-{host}').focus()")
    browser.press("Enter")
    browser.until("the host lends", f"{card}.textContent.includes('lends')")
    browser.value("document.getElementById('filter').focus()")
    browser.press("Escape")
    browser.until("the filter is empty", "document.getElementById('filter').value === ''")


def type_into(browser, name, text):
    """Opens the console of a machine that writes back what it gets."""
    browser.until("the machine", f"document.getElementById('run-{name}') !== null")
    browser.value(f"document.getElementById('run-{name}').focus()")
    browser.press("Enter")
    browser.until("its buttons", "document.getElementById('open-console') !== null")
    browser.value("document.getElementById('open-console').focus()")
    browser.press("Enter")
    shown = "document.getElementById('console').textContent"
    browser.until("what it said before", f"{shown}.includes('ready')")
    browser.until("the console has the focus", "document.activeElement.id === 'console'")
    for letter in text:
        browser.press(letter)
    browser.until("the echo", f"{shown}.includes({json.dumps(text)})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("link")
    parser.add_argument("--host")
    parser.add_argument("--run")
    parser.add_argument("--console")
    parser.add_argument("--types", default="")
    parser.add_argument("--picture")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    browser = Browser(arguments.width, arguments.dark)
    try:
        look(browser, arguments)
    finally:
        browser.end()


main()
