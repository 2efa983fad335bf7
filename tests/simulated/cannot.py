"""What cannot run on simulated devices, each with its reason; the run prints them."""

# Beginnings of test ids.
REASONS: dict[str, str] = {}


def reason(nodeid: str) -> str | None:
    """Why a test is not run on simulated devices; None if it is."""
    return next((why for start, why in REASONS.items() if nodeid.startswith(start)), None)
