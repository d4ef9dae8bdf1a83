"""How long calls work between two moments at which they see an interrupt."""

import signal
import sys
import time
from collections.abc import Callable


class TimeOverError(Exception):
    """The measured time is over."""


def longest_between_looks(call: Callable[[], object], seconds: float) -> tuple[float, int]:
    """(the longest time between two looks, the number of looks) of at most `seconds` of a call by the main thread.

    A signal comes every 10 ms; Python runs its handler at the next point at which Ctrl-C, too, would be seen. The times
    are this thread's processor time, so that a busy machine does not lengthen them. Compilation does not count.
    """
    gaps: list[float] = []
    last, end = time.thread_time(), time.monotonic() + 60

    def look(*_: object) -> None:
        nonlocal last, end
        now = time.thread_time()
        if _is_compiling():
            end = time.monotonic() + seconds
        else:
            gaps.append(now - last)
            if time.monotonic() > end:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise TimeOverError
        last = now

    before = signal.signal(signal.SIGALRM, look)
    try:
        end = time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        call()
    except TimeOverError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return max([*gaps, time.thread_time() - last]), len(gaps)


def _is_compiling() -> bool:
    """Whether Numba compiles, or a module is being imported."""
    if "sjlt.backends.cpu.jit" not in sys.modules:
        return True
    from numba.core.compiler_lock import global_compiler_lock

    return bool(global_compiler_lock.is_locked())
