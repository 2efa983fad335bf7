"""Mistakes in the planner, and in the optimizer of bfloat16 masters."""

from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "a checkpointed block keeps the masks of all",
        "planner/replay.py",
        "trace.arguments[skeleton.kinds[index]] for index in self.checkpointed}",
        "trace.arguments[kind] for kind in skeleton.kinds}",
        ("tests/planner/test_planner.py::test_checkpointed_blocks_keep_the_masks_that_they_get",),
    ),
    Mistake(
        "the products of experts take no time",
        "planner/ledger.py",
        'if packet.__name__ == "_grouped_mm":',
        'if packet.__name__ == "no_product":',
        ("tests/planner/test_speed.py::test_products_are_counted_as_torch_counts_them[mixtral-False]",),
    ),
    Mistake(
        "what routers chose takes no memory",
        "planner/footprint.py",
        "return self.output + self.decisions if checkpointed",
        "return self.output if checkpointed",
        ("tests/planner/test_planner.py::test_checkpointed_blocks_keep_what_their_routers_chose",),
    ),
    Mistake(
        "a single micro-batch is reduced twice",
        "planner/speed.py",
        "(run.grad_accum_steps - 1) * micro_step(early)",
        '(run.grad_accum_steps - (run.grad_sync == "last")) * micro_step(early)',
        ("tests/planner/test_speed.py::test_identical_programs_take_identical_times",),
    ),
    Mistake(
        "NCCL takes nothing",
        "planner/estimate.py",
        "    if num_gpus > 1:  # buffers",
        "    if num_gpus < 0:  # buffers",
        ("tests/planner/test_search.py::test_what_is_taken_is_named",),
    ),
    Mistake(
        "every rank rounds by the same noise",
        "optimizer/adamw.py",
        "return left.add_(sum(box.offset[:1]) * math.prod(shape[1:]))",
        "return left",
        ("tests/optimizer/test_adamw.py::test_the_result_does_not_depend_on_how_a_parameter_is_cut",),
    ),
    Mistake(
        "what is finite is rounded to infinity",
        "optimizer/adamw.py",
        "noise.masked_fill_(values.abs() >= torch.finfo(torch.bfloat16).max, 0)",
        "values.abs()",
        ("tests/optimizer/test_adamw.py::test_what_is_not_finite_stays_so_and_what_is_finite_too",),
    ),
    Mistake(
        "parts of a breakdown below nothing",
        "planner/replay.py",
        "self.hold(HEAD, max(left, 0))",
        "self.hold(HEAD, left)",
        ("tests/planner/test_planner.py::test_no_part_is_less_than_nothing",),
    ),
    Mistake(
        "where nothing fits, the leanest way is of a micro-batch that was not asked for",
        "planner/search.py",
        "        _fused(run, given),\n",
        "        replace(_fused(run, given), micro_batch_size=1),\n",
        ("tests/planner/test_search.py::test_what_would_fit_beside_what_is_given",),
    ),
    Mistake(
        "the fewest GPUs share out no experts",
        "planner/search.py",
        "run.dp_replicate * run.exchange_ranks << doublings",
        "run.dp_replicate * run.cp << doublings",
        ("tests/planner/test_search.py::test_plans_in_which_ranks_share_out_experts",),
    ),
]
