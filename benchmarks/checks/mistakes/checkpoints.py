"""Mistakes in saving, resuming and exporting."""

from benchmarks.checks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "old steps deleted unasked",
        "dcp_io/checkpoint.py",
        "keep_last: int | None = None,",
        "keep_last: int | None = 2,",
        ("tests/dcp_io/test_retention.py",),
    ),
    Mistake(
        "an export into a folder that has filled fails",
        "export/target.py",
        "if error.errno in _TAKEN and os.path.lexists(place):",
        "if False:",
        ("tests/export/test_target.py",),
    ),
    Mistake(
        "generation does not stop where an answer was taught to end",
        "export/chat.py",
        "return known if stop in ids else [stop, *ids]",
        "return known",
        ("tests/export/test_chat.py",),
    ),
    Mistake(
        "what modules keep in forms of their own is not given back",
        "_model.py",
        "        model.load_state_dict(state)",
        "        pass",
        ("tests/dcp_io/test_own_state.py",),
    ),
    Mistake(
        "state that an optimizer makes anew is saved",
        "dcp_io/optimizer_content.py",
        "if optimizer.state is not optimizer.state or",
        "if",
        ("tests/dcp_io/test_own_state.py",),
    ),
    Mistake(
        "several optimizers are restored by their place in the list",
        "dcp_io/optimizer_load.py",
        'if entry[0]["parameters"].keys() == own',
        "if True",
        ("tests/dcp_io/test_several_optimizers.py",),
    ),
    Mistake(
        "the position counts rows of batches that a data set gives whole",
        "step/loader.py",
        "if isinstance(loader, DataLoader) and batches is None:",
        "if False:",
        ("tests/test_sampler.py",),
    ),
    Mistake(
        "a loop that counts epochs from 0 after a resume goes back",
        "sampler.py",
        "self.is_passed_over = epoch < self._restored_epoch",
        "self.is_passed_over = False",
        ("tests/test_sampler.py",),
    ),
    Mistake(
        "a step that is pruned while it is read is taken for damaged",
        "dcp_io/choice.py",
        "return folder != path and any(all_gather_objects(not folder.exists()))",
        "return False",
        ("tests/dcp_io/test_pruned.py",),
    ),
    Mistake(
        "a tracker's run is ended by who did not start it",
        "metrics/trackers.py",
        "if self._run is not None and self._is_own:",
        "if self._run is not None:",
        ("tests/metrics/test_watching.py",),
    ),
    Mistake(
        "8-bit state is cut in the middle of its blocks",
        "dcp_io/inner_parts.py",
        "if piece.in_part % block or piece.in_shard % block or piece.size % block:",
        "if False:",
        ("tests/dcp_io/test_inner_tensors.py",),
    ),
    Mistake(
        "a table of values is taken for blocks",
        "dcp_io/inner_parts.py",
        "    if sliced == values:\n        return None\n",
        "",
        ("tests/dcp_io/test_inner_tensors.py",),
    ),
]
