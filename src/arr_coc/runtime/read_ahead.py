"""Read items on a thread of their own while the caller works on earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


class _End:
    """The last entry of a queue: what the iterable raised, if anything."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def read_ahead(items: Iterable[Item], ahead: int) -> Generator[Item]:
    """The items of an iterable, in order, read by one thread that is never more than `ahead` items before the caller.

    What the iterable raises is raised in its place. The thread starts with the first item asked for. It ends with the
    iterable, or when this generator is closed, which waits for the item that is being read.

    Example:

    ```python
    >>> from arr_coc.runtime.read_ahead import read_ahead
    >>> list(read_ahead((number**2 for number in range(5)), ahead=2))
    [0, 1, 4, 9, 16]

    ```
    """
    queue: SimpleQueue[Item | _End] = SimpleQueue()
    room, closed = threading.Semaphore(ahead), threading.Event()

    def read() -> None:
        try:
            stream = iter(items)
            while room.acquire() and not closed.is_set():
                queue.put(next(stream))
        except StopIteration:
            queue.put(_End(None))
        except BaseException as error:
            queue.put(_End(error))

    # a daemon, so that a generator that was never closed does not keep the process alive
    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            room.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        room.release()
        thread.join()
