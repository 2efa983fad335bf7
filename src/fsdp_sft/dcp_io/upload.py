"""Uploading an export to the Hub from rank 0, while the other ranks wait without timing out."""

import threading
from pathlib import Path
from typing import Any

from fsdp_sft._agree import agreed, all_gather_objects
from fsdp_sft.dcp_io.folder import this_rank

_ROUND_SECONDS = 10.0  # ranks hear of each other this often; an upload may take hours


def make_repository(repo_id: str) -> None:
    """Make a model repository unless it is there, which shows that the token may write.

    Raises:
        ValueError: If ``repo_id`` is not one.
        OSError: If the Hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"push_to_hub must be a repository such as 'name/model', got {repo_id!r}: {error}"
        ) from None
    try:
        HfApi().create_repo(repo_id, exist_ok=True)
    except Exception as error:
        raise _as_os_error(error, f"making the repository {repo_id} on the Hub") from error


def upload(folder: Path, repo_id: str) -> None:
    """Commit all files of ``folder`` to a repository.

    Raises:
        OSError: If the upload fails, on all ranks; ``folder`` stays.

    Collective: all ranks; rank 0 uploads.
    """
    work = _Upload(folder, repo_id) if this_rank() == 0 else None
    ended = False
    while not ended:
        with agreed(f"uploading {folder} to {repo_id} (the export itself is complete)"):
            ended = work is not None and work.wait(_ROUND_SECONDS)
        ended = all_gather_objects(ended)[0]


class _Upload:
    def __init__(self, folder: Path, repo_id: str) -> None:
        self._arguments: dict[str, Any] = {"folder_path": folder, "repo_id": repo_id}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_sft-upload", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended; raises its error."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().upload_folder(commit_message="Upload from fsdp_sft", **self._arguments)
        except Exception as error:
            self._error = _as_os_error(error, f"uploading {self._arguments['folder_path']}")
            self._error.__cause__ = error


def _as_os_error(error: Exception, doing: str) -> Exception:
    """The Hub's own refusals are OSErrors; those of the connection come as whatever its client raises."""
    return error if isinstance(error, OSError) else ConnectionError(f"{doing} failed: {error!r}")
