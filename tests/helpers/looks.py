"""How long a call works between two points at which it handles interrupts."""

import signal
import sys
import time
from collections.abc import Callable


class TimeOverError(Exception):
    """The measurement time is over."""


def longest_between_looks(call: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Return (longest time between two points, number of points) during at most `seconds` of a call on the main thread.

    A signal arrives every 10 ms; Python runs its handler at the next point at which Ctrl-C would be handled too.
    Times are this thread's CPU time, so a busy machine does not lengthen them. Compilation is not counted.
    """
    gaps: list[float] = []
    last, end, is_over = time.thread_time(), time.monotonic() + 60, False

    def look(*_: object) -> None:
        nonlocal last, end, is_over
        if is_over:  # a signal that arrived before the timer was stopped
            return
        now = time.thread_time()
        if _is_compiling():
            end = time.monotonic() + seconds
        else:
            gaps.append(now - last)
            if time.monotonic() > end:
                is_over = True
                raise TimeOverError
        last = now

    before = signal.signal(signal.SIGALRM, look)
    try:
        end = time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        call()
        is_over = True
    except TimeOverError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return max([*gaps, time.thread_time() - last]), len(gaps)


def _is_compiling() -> bool:
    """Whether Numba is compiling or a module is being imported."""
    if "sjlt.backends.cpu.jit" not in sys.modules:
        return True
    from numba.core.compiler_lock import global_compiler_lock

    return bool(global_compiler_lock.is_locked())
