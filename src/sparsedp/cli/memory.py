"""The memory that is left, and errors of what has no room in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsedp.errors import SparseDPError

_MEMINFO = Path("/proc/meminfo")
# What a group of processes, such as a container, may have and has: of the second version of Linux' groups and of the first.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def memory_left() -> int | None:
    """Bytes that this process can still take without others having to give theirs up, as Linux says; None: not known."""
    left = [_left_in_machine(), *(_left_in_group(Path(most), Path(used), pages) for most, used, pages in _GROUPS)]
    return min((count for count in left if count is not None), default=None)


def _left_in_machine() -> int | None:
    try:
        found = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * sum(map(int, found)) if found else None


def _left_in_group(most: Path, used: Path, file_pages: str) -> int | None:
    try:
        limit, taken = most.read_text().strip(), int(used.read_text())
        pages = re.search(rf"^{file_pages} (\d+)$", used.with_name("memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():  # "max"
        return None
    # Pages of files are taken back before a process is killed.
    return max(0, int(limit) - taken + (0 if pages is None else int(pages[1])))


@contextmanager
def naming_what_has_no_room(what: str, instead: str) -> Iterator[None]:
    """Lets an error of memory that there is none say, in one line, what to do `instead`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"allocate memory|not enough memory", str(error)):
            raise
        size = re.search(r"allocate [\d,.]+ ?\w*", str(error))
        wanted = f" (it was to {size[0]})" if size else ""
        raise SparseDPError(f"There is too little memory for {what}{wanted}. {instead}") from error
