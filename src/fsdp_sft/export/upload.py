"""Upload of an export to the Hub by rank 0, while the other ranks wait without timing out."""

import glob
from pathlib import Path

from fsdp_sft._ranks.agree import this_rank, while_others_wait


def make_repository(repo_id: str) -> None:
    """Make a model repository unless it exists, which shows whether the token may write.

    Raises:
        ValueError: If ``repo_id`` is not the name of a repository.
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


def upload(folder: Path, repo_id: str, files: list[str]) -> None:
    """Commit ``files`` of ``folder`` to a repository; other files in the folder are not uploaded.

    Raises:
        OSError: If the upload fails; raised on all ranks. The folder stays.

    Collective: all ranks; rank 0 uploads.
    """

    def commit() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().upload_folder(
                folder_path=folder,
                repo_id=repo_id,
                commit_message="Upload from fsdp_sft",
                allow_patterns=[glob.escape(file) for file in files],
            )
        except Exception as error:
            raise _as_os_error(error, f"uploading {folder}") from error

    phase = f"uploading {folder} to {repo_id} (the export itself is complete)"
    while_others_wait(this_rank() == 0, commit, phase)


def _as_os_error(error: Exception, doing: str) -> Exception:
    """An error of the Hub's client as an ``OSError``. Refusals are one; broken connections need not be."""
    return error if isinstance(error, OSError) else ConnectionError(f"{doing} failed: {error!r}")
