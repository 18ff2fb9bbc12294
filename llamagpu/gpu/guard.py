"""Threads for the calls of wgpu-native that abort the process when the device is lost: there they raise DeviceLost.

wgpuQueueSubmit, wgpuDevicePoll and wgpuDeviceRelease panic, and Rust ends a panic that would leave a C function with
abort(). Nothing else is broken then: wgpu-core has returned its error and holds no lock, and other devices work. Only
the thread that called cannot go on. So these calls run in threads of their own: a handler of SIGABRT, which comes in
the calling thread, gives the error to whoever waits and parks the thread for ever. On Windows abort() raises no signal,
and the process ends.
"""

import atexit
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from llamagpu.errors import DeviceLost

STOP_S = 10.0  # a device that hangs must not keep the process from ending
AGAIN_S = 0.05  # after this time a wait looks again


def device_lost() -> DeviceLost:
    cause = "the device went away while it was working (driver reset, sleep, or out of memory)"
    return DeviceLost(cause, "try again; a smaller -c or -ub asks less of it")


class Mark:
    """What one thread waits for and another one sets.

    A Ctrl-C in a method of a Condition can leave its lock taken, and then a Future or an Event stops every thread that
    uses it. Here whoever finds the lock taken looks again a little later.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            with suppress(RuntimeError):  # not taken: set twice at a time
                self._wake.release()

    def wait(self, timeout_s: float = float("inf")) -> bool:
        """Whether it was set in this time."""
        end = time.monotonic() + timeout_s
        while not self.is_set and (left := end - time.monotonic()) > 0:
            if self._wake.acquire(timeout=min(left, AGAIN_S)):
                self._wake.release()
        return self.is_set


class Job:
    """A call in another thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = Mark()

    def run(self) -> None:
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        del self.function, self.arguments  # they may hold what is to be freed
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    def result(self) -> Any:
        """What the call returned, or raised, once it has."""
        self.done.wait()
        try:
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            del self  # else the error's traceback holds the error


class GuardedThread:
    """Runs calls one after another in a thread, which starts with the first of them."""

    def __init__(self, name: str, lost: threading.Event) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.lost = lost  # whether the device is; its threads share it
        self.ended = Mark()  # the thread has returned, or is parked
        self.thread = threading.Thread(target=_run, args=(self.jobs, lost, self.ended), name=name, daemon=True)
        self.stopped = False
        weakref.finalize(self, self.jobs.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Job:
        if self.stopped:
            raise DeviceLost("the model was closed", "load it again")
        if self.thread.ident is None:
            catch_aborts()
            self.thread.start()
            running.add(self)
        job = Job(function, arguments)
        self.jobs.put(job)
        if self.lost.is_set():
            _fail_all(self.jobs)
        return job

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.submit(function, *arguments).result()

    def stop(self) -> None:
        """Finish the calls that were submitted, and take no more."""
        self.stopped = True
        self.jobs.put(None)
        if self in running:
            self.ended.wait(STOP_S)
        running.discard(self)


def _run(jobs: "SimpleQueue[Job | None]", lost: threading.Event, ended: Mark) -> None:
    ident = threading.get_ident()
    while job := jobs.get():
        guarded[ident] = job, jobs, lost, ended
        if lost.is_set():
            job.fail(device_lost())
        else:
            job.run()
        del job, guarded[ident]  # an idle thread keeps nothing alive
    ended.set()


def _fail_all(jobs: "SimpleQueue[Job | None]") -> None:
    with suppress(Empty):
        while True:
            if job := jobs.get_nowait():
                job.fail(device_lost())


running: "weakref.WeakSet[GuardedThread]" = weakref.WeakSet()
guarded: dict[int, tuple[Job, "SimpleQueue[Job | None]", threading.Event, Mark]] = {}  # by thread
previous: list[int | None] = []  # the handler of SIGABRT before this one
ending = threading.Event()  # the process is


@atexit.register
def _stop_all() -> None:
    """The driver is unloaded when the process ends: nothing may run in it then."""
    ending.set()
    for thread in list(running):
        thread.stop()


def catch_aborts() -> None:
    """Install the handler. Python's `signal` cannot: it would run the handler after abort() has returned."""
    if os.name != "posix":
        return
    before = _libc_signal(ctypes.cast(_on_abort, ctypes.c_void_p))
    if before != ctypes.cast(_on_abort, ctypes.c_void_p).value:
        previous[:] = [before]


def _libc_signal(handler: ctypes.c_void_p | None) -> int | None:
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before: int | None = function(signal.SIGABRT, handler)
    return before


@ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
def _on_abort(number: int) -> None:
    """Runs in the thread that called abort(). The guarded calls give up the GIL, so Python code can run here."""
    call = guarded.pop(threading.get_ident(), None)
    if call is None:  # somebody else's abort: it is signalled again when this handler returns
        _libc_signal(ctypes.c_void_p(*previous))
        signal.raise_signal(number)
        return
    job, jobs, lost, ended = call
    lost.set()
    job.fail(device_lost())
    _fail_all(jobs)
    ended.set()
    threading.Event().wait()
