"""Limits on open files and sockets: raised in time, and never mistaken for a damaged file."""

import errno
import os
import resource
from contextlib import suppress

_MOST_FILES = 1 << 16  # asked for where the hard limit is higher, or none
# Errors whose cause is the process or its user; they say nothing about the file.
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})


def raise_limit() -> None:
    """Let this process open as many files as the hard limit allows: connections to ranks take many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError):  # macOS: the kernel has another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def blame_no_file(error: BaseException, path: object) -> None:
    """Raise an error whose cause is not the file; return if it may be.

    For handlers that would then report ``path`` as damaged or missing.

    Raises:
        OSError: If there are no descriptors or memory left, or the process may not read the file.
    """
    blame_the_limit(error, f"reading {path}")
    if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
        raise error


def blame_the_limit(error: BaseException, doing: str) -> None:
    """Raise an ``OSError`` if an error, of whatever type, says that there are no descriptors left."""
    if os.strerror(errno.EMFILE).lower() in str(error).lower():
        raise OSError(
            errno.EMFILE,
            f"too many open files while {doing}: this process may have "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise the limit before the start (ulimit -n, "
            "LimitNOFILE= of a service, --ulimit nofile= of a container)",
        ) from error
