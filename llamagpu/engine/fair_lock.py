"""A lock for threads that take it again at once: without an order, whoever runs steps would keep the others from it."""

import threading
from collections import deque


class FairLock:
    """A reentrant lock that threads get in the order in which they ask."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # thread, what it waits on
        self._owner: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._mutex:
                waits = (me, turn) in self._waiting
                if waits:
                    self._waiting.remove((me, turn))
            if not waits:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()
