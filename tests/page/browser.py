"""A headless Chromium, spoken to through its debugging pipe: nothing but Python's standard library is needed."""
import base64
import json
import os
import subprocess
import time

# Longest wait for anything.
PATIENCE_S = 60


class Browser:
    """One page in one Chromium."""

    def __init__(self, width, height, profile):
        commands, self._send = os.pipe()
        self._receive, answers = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 "--no-first-run", "--disable-extensions", f"--user-data-dir={profile}",
                 f"--window-size={width},{height}", "about:blank"]

        def as_3_and_4():
            # Chromium reads its commands at 3 and answers at 4.
            spare = os.dup(commands), os.dup(answers)
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        self._process = subprocess.Popen(["chromium", *flags], close_fds=False, preexec_fn=as_3_and_4,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._buffer, self._last, self._session = b"", 0, None
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def close(self):
        self._process.kill()
        self._process.wait()

    def call(self, method, **parameters):
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._receive, 1 << 16)
            if not chunk:
                raise AssertionError("Chromium has ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(message["params"]["exceptionDetails"]["exception"].get("description", "an exception"))
        entry = message.get("params", {}).get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry["source"] != "network":
            self.complaints.append(entry["text"])
        return message

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("location.protocol === 'http:' && document.readyState === 'complete'")

    def ask(self, expression):
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression):
        """Waits until an expression is true, and returns its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.ask(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"in vain: {expression}\n{self.ask('document.body.innerText')}")
            time.sleep(0.1)
        return value

    def press(self, key, code, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      text=text if kind == "keyDown" else "")

    def type(self, text):
        self.call("Input.insertText", text=text)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def prefer(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        print(path)
