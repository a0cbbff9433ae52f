"""How far an operation is that takes long: a line on the terminal, or in the log.

SPDX-License-Identifier: Apache-2.0
"""

import sys
import time

from ..manager import bytes_text, logger

QUIET_S = 2  # what ends sooner says nothing
TERMINAL_S, LINES_S, LOG_S = 0.5, 2, 10  # at most so often


class Progress:
    """Counts bytes of an operation: `with Progress("loading", total) as progress: ... progress.add(n)`.

    total: 0 when nobody knows it. show: True: lines on stderr even when that is no terminal; False: the log only; None:
    on stderr if it is a terminal. What is not shown is logged at INFO.
    """

    def __init__(self, what, total=0, show=None, clock=time.monotonic):
        self.what, self.total, self.done, self.clock = what, total, 0, clock
        self.terminal = show is not False and sys.stderr is not None and sys.stderr.isatty()
        self.shown = self.terminal or bool(show)
        self.interval = TERMINAL_S if self.terminal else LINES_S if self.shown else LOG_S
        self.begun = clock()
        self.next = self.begun + max(QUIET_S, self.interval)
        self.said = 0  # lines so far

    def add(self, count):
        self.done += count
        now = self.clock()
        if now >= self.next:
            self.next = now + self.interval
            self.say(self.line(now - self.begun))

    def line(self, seconds):
        rate = self.done / seconds
        if not self.total:
            return f"{self.what}: {bytes_text(self.done)}, {bytes_text(rate)}/s"
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate else ""
        return f"{self.what}: {bytes_text(self.done)} of {bytes_text(self.total)}, {bytes_text(rate)}/s{left}"

    def say(self, text):
        self.said += 1
        if self.terminal:
            sys.stderr.write(f"\r{text:<79}")
            sys.stderr.flush()
        elif self.shown:
            print(text, file=sys.stderr, flush=True)
        else:
            logger.info("%s", text)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if not self.said:
            return
        seconds = self.clock() - self.begun
        how = f"stopped after {bytes_text(self.done)}" if kind else bytes_text(self.done)
        self.say(f"{self.what}: {how} in {seconds:.0f} s, {bytes_text(self.done / seconds)}/s")
        if self.terminal:
            sys.stderr.write("\n")
