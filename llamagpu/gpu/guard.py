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
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from llamagpu.errors import DeviceLost

STOP_S = 10.0  # a device that hangs must not keep the process from ending

Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


def device_lost() -> DeviceLost:
    cause = "the device went away while it was working (driver reset, sleep, or out of memory)"
    return DeviceLost(cause, "try again; a smaller -c or -ub asks less of it")


def outcome(job: "Future[Any]") -> Any:
    """The result of a call, as Future.result has it. A Ctrl-C while that waits can leave its Condition broken."""
    done = threading.Lock()
    done.acquire()
    job.add_done_callback(lambda _: done.release())
    done.acquire()
    return job.result()


class GuardedThread:
    """Runs calls one after another in a thread, which starts with the first of them."""

    def __init__(self, name: str, lost: threading.Event) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.lost = lost  # whether the device is; its threads share it
        self.ended = threading.Event()  # the thread has returned, or is parked
        self.thread = threading.Thread(target=_run, args=(self.jobs, lost, self.ended), name=name, daemon=True)
        self.stopped = False
        weakref.finalize(self, self.jobs.put, None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if self.stopped:
            raise DeviceLost("the model was closed", "load it again")
        if self.thread.ident is None:
            catch_aborts()
            self.thread.start()
            running.add(self)
        job: Future[Any] = Future()
        self.jobs.put((job, function, arguments))
        if self.lost.is_set():
            _fail_all(self.jobs)
        return job

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return outcome(self.submit(function, *arguments))

    def stop(self) -> None:
        """Finish the calls that were submitted, and take no more."""
        self.stopped = True
        self.jobs.put(None)
        if self in running:
            self.ended.wait(STOP_S)
        running.discard(self)


def _run(jobs: "SimpleQueue[Job | None]", lost: threading.Event, ended: threading.Event) -> None:
    ident = threading.get_ident()
    while entry := jobs.get():
        job, function, arguments = entry
        guarded[ident] = job, jobs, lost, ended
        try:
            if lost.is_set():
                raise device_lost()
            result = function(*arguments)
        except BaseException as error:
            job.set_exception(error)
        else:
            job.set_result(result)
            del result
        del entry, job, function, arguments, guarded[ident]  # an idle thread keeps nothing alive
    ended.set()


def _fail_all(jobs: "SimpleQueue[Job | None]") -> None:
    with suppress(Empty):
        while True:
            if entry := jobs.get_nowait():
                entry[0].set_exception(device_lost())


running: "weakref.WeakSet[GuardedThread]" = weakref.WeakSet()
guarded: dict[int, tuple["Future[Any]", "SimpleQueue[Job | None]", threading.Event, threading.Event]] = {}  # by thread
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
    job.set_exception(device_lost())
    _fail_all(jobs)
    ended.set()
    threading.Event().wait()
