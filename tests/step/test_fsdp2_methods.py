"""What people call on a sharded model between sharding and the step: the undisturbed numbers, or refused."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft._model.sharded import reshard
from tests.harness.device import device_here, mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

# By method: the arguments that are tried, on the root alone and on every sharded module. None: it ends what
# FSDP2 itself does in a backward (finalize_backward), or needs an accelerator's memory or events.
METHODS: dict[str, list[tuple[Any, ...]] | None] = {
    "reshard": [()],
    "unshard": [()],
    "reset_iter_state": None,  # AttributeError of torch before the first forward
    "set_is_last_backward": [(False,)],
    "set_requires_gradient_sync": [(False,)],
    "set_requires_all_reduce": [(False,)],
    "set_reshard_after_forward": [(True,), (False,)],
    "set_reshard_after_backward": [(False,)],
    "set_modules_to_forward_prefetch": [([],)],
    "set_modules_to_backward_prefetch": [([],)],
    "set_custom_all_gather": None,
    "set_custom_reduce_scatter": None,
    "set_all_reduce_hook": [(torch.Tensor.dim,)],
    "set_post_optim_event": None,
    "set_reduce_scatter_divide_factor": [(1.0,)],
    "set_gradient_divide_factor": [(1.0,), (2.0,), (7.0,)],
    "set_force_sum_reduction_for_comms": [(True,)],
    "set_reduce_scatter_unused_params": [(True,)],
    "set_reduce_scatter_max_input_buffers": [(2,)],
    "set_separate_reduce_scatter_group": [()],
    "set_unshard_in_backward": [(False,)],
    "set_allocate_memory_from_process_group_for_comm": None,
    "set_symm_mem_for_comm": None,
    "set_keep_unsharded_storage": [(True,)],  # these three since torch 2.15
    "set_manual_backward_finalization": [(True,)],
    "finalize_backward": None,
}
# In a loop of one's own the others say what its own backward does, or act inside of it alone.
IN_ANY_LOOP = ("reshard", "set_reshard", "set_gradient_divide", "set_all_reduce_hook")
SAMPLES = "a forward between the backward and the update"
# Two divides as the ranks do.
REFUSED = {"unshard": "OptimizerError", "set_unshard_in_backward": "RuntimeError: setStorage"}
# By torch 2.15, in the first forward, where others than the root were told.
REFUSED |= {
    "set_manual_backward_finalization": "ModelLossError: the own loss of LlamaForCausalLM",
    **dict.fromkeys(("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"), "UnsupportedModel"),
}
HERE = [name for name in METHODS if hasattr(FSDPModule, name)]
CALLS = [(name, given) for name in HERE for given in METHODS[name] or []]


def _trained(name: str, given: tuple[Any, ...], everywhere: bool, own_loop: bool) -> list[float]:
    """Norms of two steps, clipped if they are train_step's, and then the loss and the parameters' norms."""
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    for module in model.modules() if everywhere else [model]:
        if name in METHODS and isinstance(module, FSDPModule):
            getattr(module, name)(*given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    @torch.no_grad()
    def sample(*_: Any) -> None:
        model(input_ids=torch.arange(8, device=device_here())[None])

    if name == SAMPLES:
        optimizer.register_step_pre_hook(sample)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    norms = []
    for step in range(2):
        window = ragged_batches(4 * ranks)[rank::ranks][2 * step : 2 * step + 2]
        if not own_loop:
            norms.append(fs.train_step(model, window, optimizer, max_grad_norm=0.01).grad_norm)
            continue
        targets = fs.count_targets(window)
        for batch in window:
            fs.causal_lm_loss(model, batch, num_targets=targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    norms.append(fs.evaluate(model, ragged_batches(2)).loss)
    reshard(model)
    return [*norms, *(float(full(parameter).norm()) for parameter in model.parameters())]


def _tried(cases: list[tuple[str, tuple[Any, ...], bool, bool]]) -> list[list[float] | str]:
    found: list[list[float] | str] = []
    for case in cases:
        try:
            found.append(_trained(*case))
        except (fs.FsdpSftError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_every_public_method_is_tried() -> None:
    names = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert names <= METHODS.keys(), "say above what is tried of it, and see that the numbers hold"


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_step_after_any_method_is_the_undisturbed_one_or_refused(own_loop: bool) -> None:
    tried = [(name, given, all_, own_loop) for name, given in CALLS for all_ in (False, True)]
    cases = [case for case in tried if not own_loop or case[0].startswith(IN_ANY_LOOP)]
    cases.append((SAMPLES, (), False, own_loop))
    expected, *found = run_distributed(_tried, 2, [("", (), False, own_loop), *cases], timeout=240)[0]
    wrong = {}
    for case, one in zip(cases, found, strict=True):
        if isinstance(one, str):
            right = case[1] != (2.0,) and one.startswith(REFUSED.get(case[0], "never"))
        else:
            right = one == pytest.approx(expected, rel=1e-6)
        wrong |= {} if right else {case[:3]: one[:2] if isinstance(one, list) else one}
    assert not wrong, f"{wrong} for {expected[:2]}"
