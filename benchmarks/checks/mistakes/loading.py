"""Mistakes in loading, sharding, finding blocks and activation checkpointing."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES: list[Mistake] = [
    Mistake(
        "buffers of a copied module are left as the memory was",
        "adapters.py",
        "for name, tensor in named_tensors(copied).items():",
        "for name, tensor in copied.named_parameters():",
        ("tests/weights/test_account.py",),
    ),
    Mistake(
        "only the base model is accounted for",
        "weights/account.py",
        "        if id(tensor) not in filled and tensor.is_meta:",
        '        if id(tensor) not in filled and tensor.is_meta and "base_model" not in name:',
        ("tests/weights/test_account.py",),
    ),
    Mistake(
        "tied names compared before a replica has received what it did not read",
        "weights/load.py",
        "        return reads.run(jobs, progress)\n",
        "        read = reads.run(jobs, progress)\n    return read + _compare_duplicates(reads)\n",
        ("tests/weights/test_ties.py",),
    ),
    Mistake(
        "the second name of tied weights is not compared where it is converted",
        "weights/load.py",
        "        check_same(name, local_of(reads.tensors[name]), values)",
        "        del values",
        ("tests/weights/test_ties.py",),
    ),
]
