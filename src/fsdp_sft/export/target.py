"""The folder of an export: checked before training, and replaced by another if it is taken after it.

A trained model must not be lost because of the name of a folder.
"""

import errno
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank, through_rank_0
from fsdp_sft._tensors.disk import check_room, full_path, publish, sweep, sync_folder, temporary_beside
from fsdp_sft.errors import CheckpointExistsError

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EBUSY}
# Files that an earlier export or save_pretrained may have left and that would be read as part of the new one.
_MODEL = re.compile(
    r"(?:model|pytorch_model|adapter_model)[\w.-]*\.(?:safetensors|bin)(?:\.index\.json)?"
    r"|(?:generation_|adapter_)?config\.json"
)
_ADAPTER = re.compile(r"adapter_model[\w.-]*\.(?:safetensors|bin)|adapter_config\.json")
_TOKENIZER = re.compile(
    r"tokenizer[\w.-]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt"
    r"|chat_template\.(?:jinja|json)|additional_chat_templates|(?:pre)?processor_config\.json"
)


def export_target(out_dir: str | os.PathLike[str]) -> Path:
    """The absolute path of an export's folder, a symbolic link resolved: a rename would replace the link.

    No folder can take the place of a mounted file system, so there it is one below it, with a warning.
    """
    target = full_path(out_dir)
    target = target.resolve() if target.is_symlink() else target
    if os.path.ismount(target):
        target /= "export"
        if this_rank() == 0:
            warn_caller(f"a file system is mounted at {target.parent}: the export is written to {target}")
    return target


def check_target(target: Path, *, overwrite: bool, need: int = 0) -> None:
    """Refuse a target to which an export of ``need`` bytes could not be written.

    Raises:
        OSError: If it is refused; see ``check_export`` for the types.
    """
    if os.path.lexists(target) and not (target.is_dir() and (overwrite or not os.listdir(target))):
        raise CheckpointExistsError(
            f"{target} exists and is not an empty folder; choose another, move it away, or pass "
            "overwrite=True to check_export and to the export: that replaces the files of an earlier export "
            "and leaves the others"
            if target.is_dir()
            else f"{target} exists and is not a folder; choose another name, or move it away"
        )
    there = next(path for path in (target, *target.parents) if os.path.lexists(path))
    for folder in {there, there.parent if there == target else there}:
        try:
            # A real file: for root os.access says yes even on a file system that takes none, such as /proc.
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            raise PermissionError(
                f"{folder} cannot be written to ({error.strerror}), so {target} cannot be made"
            ) from error
    check_room(there, need, f"the export to {target}")


@contextmanager
def new_folder(out_dir: str | os.PathLike[str], *, overwrite: bool) -> Iterator[SimpleNamespace]:
    """A temporary folder for an export, which takes the intended place when the block has ended.

    Args:
        out_dir: Intended folder. If something is there by then, the export is written beside it.
        overwrite: Whether the files of an earlier export in a folder that is not empty are replaced; other
            files there stay.

    Yields:
        A namespace: ``target``, the absolute path of the intended folder; ``temporary``; and after the block
        ``folder``, in which the export is.

    Raises:
        OSError: If the disk fails.

    Collective: all ranks.
    """
    target = export_target(out_dir)

    def make(_: list[None]) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent, target.name)
        temporary = temporary_beside(target)
        temporary.mkdir()
        return temporary

    def put(_: list[None]) -> Path:
        if overwrite and target.is_dir() and os.listdir(target):
            _replace_files(temporary, target)
            return target
        return _publish_beside(temporary, target)

    temporary = through_rank_0(f"making a folder for {target}", lambda: None, make)
    export = SimpleNamespace(target=target, temporary=temporary)
    try:
        yield export
        export.folder = through_rank_0(f"publishing {target}", lambda: None, put)
    finally:
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish_beside(temporary: Path, target: Path) -> Path:
    """Rename a finished folder to ``target``, or to the next name that is free; the name that it has."""
    for number in itertools.count(1):
        place = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            publish(temporary, place)
        except OSError as error:
            if error.errno in _TAKEN and os.path.lexists(place):
                continue
            raise
        if place != target:
            warn_caller(
                f"{target} exists and is not an empty folder: nothing in it was touched, and the export was "
                f"written to {place}. check_export(out_dir) before training finds this at once; "
                "overwrite=True replaces an earlier export"
            )
        return place
    raise AssertionError


def _replace_files(temporary: Path, target: Path) -> None:
    """Replace the files of an earlier export by new ones, one by one.

    The old ``config.json`` goes first and the new one comes last: a folder in which this was interrupted has
    no configuration, so that nobody loads a mixture of two models.
    """
    new = sorted(os.listdir(temporary), key=lambda name: (name == "config.json", name))
    stale = [_MODEL if "config.json" in new else _ADAPTER]
    stale += [_TOKENIZER] if any(_TOKENIZER.fullmatch(name) for name in new) else []
    old = [n for n in os.listdir(target) if n in new or any(kind.fullmatch(n) for kind in stale)]
    aside = temporary_beside(target)
    aside.mkdir()
    for name in sorted(old, key=lambda name: (name != "config.json", name)):
        os.rename(target / name, aside / name)
    for name in new:
        os.rename(temporary / name, target / name)
    sync_folder(target)
    shutil.rmtree(aside, ignore_errors=True)
