"""A progress bar: tqdm's, or plain lines where tqdm is not installed."""

import importlib
import sys


def progress_bar(total: int):
    """A context manager with `describe(text)`, `write(line)` and `update()`."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return _Lines(total)
    return _Bar(tqdm(total=total, unit="case", dynamic_ncols=True, mininterval=1))


class _Bar:
    def __init__(self, bar):
        self._bar = bar
        self.write, self.update = bar.write, bar.update

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._bar.close()

    def describe(self, text: str) -> None:
        # In a log file every refresh is one more line.
        self._bar.set_description(text, refresh=sys.stderr.isatty())


class _Lines:
    def __init__(self, total: int):
        self._done, self._total = 0, total

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def describe(self, text: str) -> None:
        print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)

    def write(self, line: str) -> None:
        print(line, flush=True)

    def update(self) -> None:
        self._done += 1
