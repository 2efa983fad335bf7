"""How many files and sockets this process may open: asked for in time, and never taken for a damaged file."""

import errno
import math
import os
import resource

# What a job opens beside its connections: files of checkpoints and of data, pipes of loaders, libraries.
_FILES = 40
_CONNECTIONS_A_LEVEL = 4  # of the tree, for two groups; and the neighbours in gloo's rings
# What went wrong with these is the process or its user, and says nothing about the file.
_OF_THE_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})


def open_files_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def make_room_for(world_size: int, *, hosts_store: bool) -> None:
    """Raise the soft limit of open files to what a job of so many ranks needs, if it is lower.

    Args:
        world_size: Number of ranks.
        hosts_store: Whether a rank has the store, to which every other rank connects. All ranks ask for what
            that one needs, so that all of them say at once if they cannot have it.

    Raises:
        OSError: If the hard limit is lower than that.
    """
    needed = _num_open() + _FILES + _CONNECTIONS_A_LEVEL * math.ceil(math.log2(max(world_size, 2)))
    if hosts_store:
        needed += 2 * world_size  # a watchdog connects a second time
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
    except ValueError as error:  # of macOS, whose kernel has a lower one still
        raise too_many_files(f"asking for {needed}, which a job of {world_size} ranks needs") from error


def blame_no_file(error: BaseException, path: object) -> None:
    """Raise an error that any file would have given now; return if it may be the file's.

    For handlers that go on to call ``path`` damaged or missing.

    Raises:
        OSError: If there are no descriptors or memory left, or the file must not be read.
    """
    if says_too_many_files(error):
        raise too_many_files(f"reading {path}") from error
    if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
        raise error


def says_too_many_files(error: BaseException) -> bool:
    """Whether a library without errors of its own says that there are no descriptors left."""
    return os.strerror(errno.EMFILE).lower() in str(error).lower()


def too_many_files(doing: str) -> OSError:
    """The error for having run out of descriptors."""
    return OSError(
        errno.EMFILE,
        f"too many open files while {doing}: this process may have {open_files_limit()}; raise the limit "
        "(ulimit -n) and start again",
    )


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 32
