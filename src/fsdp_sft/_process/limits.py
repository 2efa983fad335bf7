"""Limits on open files and sockets: raised in time, and never mistaken for a damaged file."""

import errno
import math
import os
import resource

# Descriptors beside a job's connections: files of checkpoints and of data, pipes of loaders, libraries.
_FILES = 40
_CONNECTIONS_A_LEVEL = 4  # for each level of the tree, in two groups, with the neighbours in gloo's rings
# Errors whose cause is the process or its user; they say nothing about the file.
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})


def open_files_limit() -> int:
    """The number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def make_room_for(world_size: int, *, hosts_store: bool) -> None:
    """Raise the soft limit of open files to what a job of this many ranks needs, if it is lower.

    Args:
        world_size: Number of ranks.
        hosts_store: Whether the store, to which every rank connects, is in one of the ranks. All ranks then
            ask for what that rank needs, so that all of them raise if they cannot have it.

    Raises:
        OSError: If the hard limit is lower than what is needed.
    """
    needed = _num_open() + _FILES + _CONNECTIONS_A_LEVEL * math.ceil(math.log2(max(world_size, 2)))
    if hosts_store:
        needed += 2 * world_size  # two connections a rank: the process group's and a watchdog's
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"a job of {world_size} ranks needs about {needed} open files in a process, and the hard limit "
            f"is {hard}: raise it before the start (ulimit -n, LimitNOFILE= of a service, --ulimit nofile= "
            "of a container)",
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except ValueError as error:  # macOS: the kernel has another limit below the hard one
        raise too_many_files(f"asking for {needed}, which a job of {world_size} ranks needs") from error


def blame_no_file(error: BaseException, path: object) -> None:
    """Raise an error whose cause is not the file; return if it may be.

    For handlers that would then report ``path`` as damaged or missing.

    Raises:
        OSError: If there are no descriptors or memory left, or the process may not read the file.
    """
    if says_too_many_files(error):
        raise too_many_files(f"reading {path}") from error
    if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
        raise error


def says_too_many_files(error: BaseException) -> bool:
    """Whether an error's text says that there are no descriptors left; some libraries raise no OSError."""
    return os.strerror(errno.EMFILE).lower() in str(error).lower()


def too_many_files(doing: str) -> OSError:
    """The error to raise when descriptors have run out."""
    return OSError(
        errno.EMFILE,
        f"too many open files while {doing}: this process may have {open_files_limit()}; raise the limit "
        "(ulimit -n) and start again",
    )


def _num_open() -> int:
    """Number of descriptors that this process has open, or a guess where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 32
