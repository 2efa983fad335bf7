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
    Mistake(
        "entries of a namespace are blocks",
        "blocks.py",
        "if isinstance(module, nn.ModuleDict) and not _is_numbered(module):",
        "if False:",
        ("tests/test_blocks.py::test_containers_that_are_never_called_are_no_blocks",),
    ),
    Mistake(
        "a block that runs outside of its checkpoint goes unnoticed",
        "sac/proof.py",
        "    if _RUNNING.count:\n        proof.end()",
        "    if True:\n        proof.end()",
        ("tests/sac/test_proof.py",),
    ),
    Mistake(
        "new rows are a mean of what this rank holds",
        "weights/vocabulary.py",
        "mean = torch.tensor(all_reduce_sum(sums.reshape(-1).tolist()), dtype=torch.float64) / old",
        "all_reduce_sum([])\n        mean = sums.reshape(-1) / old",
        ("tests/weights/test_new_tokens.py",),
    ),
    Mistake(
        "every replica's rows count in the mean",
        "weights/vocabulary.py",
        "if held is not None and this_rank() in owner_ranks(tensor):",
        "if held is not None:",
        ("tests/weights/test_new_tokens.py",),
    ),
    Mistake(
        "a prepared base outlives an upgrade",
        "weights/digest.py",
        "    described += [torch.__version__, transformers.__version__]\n",
        "",
        ("tests/test_prepared.py",),
    ),
    Mistake(
        "another class than the one asked for",
        "weights/meta.py",
        'wanted = overrides.get("architectures", config.architectures)',
        "wanted = config.architectures",
        ("tests/weights/test_classes.py",),
    ),
    Mistake(
        "processors shared out twice",
        "_launch.py",
        "1 / sum(mask >> cpu & 1 for mask in neighbours)",
        "1 / len(neighbours)",
        ("tests/weights/test_threads.py",),
    ),
    Mistake(
        "values that are not finite refused though asked for",
        "weights/load.py",
        "return self.check_finite and target.is_parameter and self",
        "return target.is_parameter and self",
        ("tests/weights/test_faults.py",),
    ),
]
