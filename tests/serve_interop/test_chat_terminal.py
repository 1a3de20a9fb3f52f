"""`furious chat` on a terminal: editing, history, Ctrl-C while it writes and while one types, Ctrl-D.

FURIOUS_BINARY and FURIOUS_MODEL name the binary and a model (run.sh sets them).
"""
import os
import pty
import select
import time

import pytest


class Terminal:
    def __init__(self, *flags):
        self.text = ""
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.environ["TERM"] = "xterm"
            binary = os.environ["FURIOUS_BINARY"]
            os.execv(binary, [binary, "chat", os.environ["FURIOUS_MODEL"], "--threads", "1", *flags])

    def write(self, text):
        self.text = ""
        os.write(self.file, text.encode())

    def until(self, part, seconds=60):
        end = time.time() + seconds
        while part not in self.text:
            assert time.time() < end, f"{part!r} did not come: {self.text!r}"
            if select.select([self.file], [], [], 0.1)[0]:
                self.text += os.read(self.file, 1 << 16).decode(errors="replace")

    def status(self):
        try:
            while os.read(self.file, 1 << 16):
                pass
        except OSError:
            pass
        return os.waitpid(self.process, 0)[1]


@pytest.mark.skipif("FURIOUS_BINARY" not in os.environ, reason="run.sh sets FURIOUS_BINARY")
def test_terminal():
    terminal = Terminal("--tokens", "1000000")
    terminal.until("> ")
    terminal.write("/helq\x7fp\r")
    terminal.until("Ctrl-C stops an answer")
    terminal.until("> ")
    terminal.write("\x1b[A\r")  # the line before
    terminal.until("Ctrl-C stops an answer")
    terminal.until("> ")
    terminal.write("/bränch 1\r")
    terminal.until('unknown command "bränch"')
    terminal.write("Hello\r")
    terminal.until("\r\n")
    time.sleep(0.5)
    terminal.write("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    time.sleep(0.5)  # a signal between the prompt and the read does nothing
    terminal.write("half a line\x03")
    terminal.until("\r\n")
    terminal.until("> ")
    terminal.write("/branches\r")
    terminal.until("1: 2 messages, last: Hello")
    terminal.write("\x04")
    assert terminal.status() == 0
