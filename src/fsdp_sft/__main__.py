"""``python -m fsdp_sft``: the same as the console script ``fsdp-sft``."""

from fsdp_sft.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
