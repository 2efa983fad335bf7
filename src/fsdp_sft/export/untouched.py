"""Stored tensors that an export copies byte for byte."""

from collections.abc import Mapping

import torch

from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._tensors.disk import closing
from fsdp_sft._tensors.safetensors import bytes_of, open_file, read_at
from fsdp_sft._tensors.stored import InFile
from fsdp_sft.export.hf_files import HfFiles
from fsdp_sft.export.own_rows import OwnRows

_PIECE_BYTES = 16 << 20


def copy_stored(copied: Mapping[str, InFile], writer: HfFiles, own: OwnRows | None) -> None:
    """Write stored tensors piece by piece: each rank some, or rank 0 all if it alone has the new files."""
    ranks = world_size() if own is not None else 1
    for number, (name, stored) in enumerate(copied.items()):
        if number % ranks == this_rank():
            write = writer.write_piece if own is None else own.write_piece
            fd, size = open_file(stored.file), stored.entry.num_bytes
            with closing(fd):
                for at in range(0, size, _PIECE_BYTES):
                    piece = torch.empty(min(_PIECE_BYTES, size - at), dtype=torch.uint8)
                    read_at(fd, stored.entry.start + at, bytes_of(piece))
                    write(name, at, piece)
        writer.expect_no_more(name)
