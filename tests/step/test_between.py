"""What people do to a model beside the step, hooks included: the numbers of plain training, or refused."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fsdp_sft as fs
from fsdp_sft._model.view import reshard
from tests import plain
from tests.harness.models import FLOAT32, full, largest_error, ragged_batches, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

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
# Two divides as the ranks do.
REFUSED = {"unshard": "OptimizerError", "set_unshard_in_backward": "RuntimeError: "}
# By torch 2.15, in the first forward, where others than the root were told.
REFUSED |= {
    "set_manual_backward_finalization": "ModelLossError: the own loss of LlamaForCausalLM",
    **dict.fromkeys(("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"), "UnsupportedModel"),
}
# A hook on a parameter sees what FSDP2 gathers of it, which it replaces by the shards.
REFUSED |= {"register_hook": "UnsupportedModelError", "register_post_accumulate_grad_hook before": "Unsupp"}
HERE = [name for name in METHODS if hasattr(FSDPModule, name)]
CALLS = [(name, given) for name in HERE for given in METHODS[name] or []]


def _half(value: Any) -> Any:
    return tuple(map(_half, value)) if isinstance(value, tuple) else None if value is None else value * 0.5


def _halve_gradient(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def _halve_gradients(optimizer: Any, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        _halve_gradient(parameter)


@torch.no_grad()
def _halve_values(optimizer: Any, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.mul_(0.5)


# Each is linear: what a hook sees of one rank's rows has the scale of that rank's loss.
HOOKS: dict[str, Any] = {
    "register_hook": _half,
    "register_post_accumulate_grad_hook": _halve_gradient,
    "register_forward_pre_hook": lambda module, args: _half(args),
    "register_forward_hook": lambda module, args, output: _half(output),
    "register_full_backward_pre_hook": lambda module, gradients: _half(gradients),
    "register_full_backward_hook": lambda module, gradients, of_output: _half(gradients),
    "register_step_pre_hook": _halve_gradients,
    "register_step_post_hook": _halve_values,
}
FORWARDS = ("forward", "forward in inference_mode", "evaluate")
BEFORE, AFTER, LATER, UPDATE = "before sharding", "after sharding", "after a step", "before the update"


class Act(NamedTuple):
    """What somebody does: a method, a hook or a forward, and where."""

    what: str
    when: str = AFTER
    place: str = ""  # a module's name
    given: tuple[Any, ...] = ()
    everywhere: bool = False


Program = tuple[bool, tuple[Act, ...]]  # (whether the loop is the caller's own, what is done)


def _act(act: Act, model: Any, optimizer: Any, *_: Any) -> None:
    if act.what in FORWARDS:
        ids = torch.arange(8, device=device_here())[None]
        with torch.inference_mode() if "inference" in act.what else torch.no_grad():
            fs.evaluate(model, ragged_batches(2)) if act.what == "evaluate" else model(input_ids=ids)
    elif act.what in HOOKS:
        module = optimizer if act.what.startswith("register_step") else model.get_submodule(act.place)
        of_weight = act.what in ("register_hook", "register_post_accumulate_grad_hook")
        getattr(module.weight if of_weight else module, act.what)(HOOKS[act.what])
    else:
        for module in model.modules() if act.everywhere else [model]:
            if isinstance(module, FSDPModule):
                getattr(module, act.what)(*act.given)


def _mine(count: int = 2) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ragged_batches(count * ranks)[rank::ranks]


def _trained(program: Program) -> list[float]:
    """Norms of two clipped steps, and then the parameters' norms."""
    own_loop, acts = program
    model = tiny_model("llama", num_hidden_layers=2)
    for act in acts:
        if act.when == BEFORE:
            _act(act, model, None)
    fs.apply_sac(model, 1)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for act in acts:
        if act.when == AFTER:
            _act(act, model, optimizer)
        if act.when == UPDATE:
            optimizer.register_step_pre_hook(partial(_act, act, model))
    norms = []
    for step in range(2):
        window = _mine(4)[2 * step : 2 * step + 2]
        if not own_loop:
            norms.append(fs.train_step(model, window, optimizer, max_grad_norm=0.01).grad_norm)
        else:
            targets = fs.count_targets(window)
            for batch in window:
                fs.causal_lm_loss(model, batch, num_targets=targets).backward()
            reshard(model)  # parameters that stay gathered have no gradients, and torch would clip none
            norms.append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))))
            optimizer.step()
            optimizer.zero_grad()
        for act in acts if step == 0 else ():
            if act.when == LATER:
                _act(act, model, optimizer)
    reshard(model)
    return [*norms, *(float(full(parameter).norm()) for parameter in model.parameters())]


def _targets(batches: list[Any]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def _plain(acts: tuple[Act, ...]) -> list[float]:
    """The same of one process without shards, where only hooks matter."""
    model = tiny_model("llama", num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ranks = torch.distributed.get_world_size()
    norms = []
    for step in range(2):
        for act in acts:
            if act.what in HOOKS and (act.when == LATER) == (step == 1):
                _act(act, model, optimizer)
        window = ragged_batches(4 * ranks)[2 * step * ranks : 2 * (step + 1) * ranks]
        parts = (window[:ranks], window[ranks:])  # a micro-batch of all ranks each
        losses = (plain.mean_loss(model, part) * _targets(part) / _targets(window) for part in parts)
        norms.append(plain.step(model, losses, [optimizer], max_norm=0.01)[1])
    return [*norms, *(float(parameter.detach().norm()) for parameter in model.parameters())]


def _tried(programs: list[Program]) -> dict[Program, Any]:
    """What is wrong, by program."""
    wrong: dict[Program, Any] = {}
    known: dict[tuple[Act, ...], list[float]] = {}
    for program in programs:
        hooks = tuple(
            act if act.when == LATER else act._replace(when=BEFORE) for act in program[1] if act.what in HOOKS
        )
        if hooks not in known:
            known[hooks] = _plain(hooks)
        try:
            found = _trained(program)
        except (fs.FsdpSftError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
            acts = [act for act in program[1] if act.given != (2.0,)]
            names = [name for act in acts for name in (act.what, f"{act.what} {act.when.split()[0]}")]
            if not said.startswith(tuple(REFUSED.get(name, "never") for name in names)):
                wrong[program] = said
        else:
            if found != pytest.approx(known[hooks], rel=1e-5):
                wrong[program] = found[:3], known[hooks][:3]
    return wrong


def test_every_public_method_is_tried() -> None:
    names = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert names <= METHODS.keys(), "say above what is tried of it, and see that the numbers hold"


def _of_method(own_loop: bool, *everywhere: bool) -> list[Act]:
    calls = [call for call in CALLS if not own_loop or call[0].startswith(IN_ANY_LOOP)]
    return [Act(name, given=given, everywhere=every) for name, given in calls for every in everywhere]


def _of_hooks() -> list[Act]:
    places = {"register_step": [""], "register_hook": ["lm_head"], "register_post": ["lm_head"]}
    inside = ["model.layers.1", "lm_head"]
    return [
        Act(hook, when, place)
        for hook in HOOKS
        for place in next((places[start] for start in places if hook.startswith(start)), inside)
        for when in (BEFORE, AFTER, LATER)
        if not (hook.startswith("register_step") and when == BEFORE)
        # After it the loss is to be prepared anew: docs/explanation/what-went.md.
        and (hook, when, place) != ("register_forward_hook", LATER, "lm_head")
    ]


PROGRAMS: dict[str, list[Program]] = {
    "any method": [(False, (act,)) for act in _of_method(False, True)],
    "any method of the root alone": [(False, (act,)) for act in _of_method(False, False)],
    "any method, in a loop of one's own": [(True, (act,)) for act in _of_method(True, False, True)],
    "a hook": [(number % 2 == 1, (act,)) for number, act in enumerate(_of_hooks())],
    "a forward": [
        (own_loop, (Act(what, when),))
        for own_loop in (False, True)
        for what in FORWARDS
        for when in (AFTER, LATER, UPDATE)
    ],
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_step_beside_it_is_that_of_one_process_or_refused(what: str) -> None:
    wrong = run_distributed(_tried, 2, PROGRAMS[what], timeout=400)[0]
    assert not wrong, wrong


# --- what is trained gets its gradient from the reduction over the ranks alone: right, or refused ----------


Cause = Callable[[Any, Any], Any]  # a dict is of options for the step


def _added_later(model: Any, optimizer: Any) -> None:
    model.value_head = nn.Linear(32, 1, device=device_here())
    optimizer.add_param_group({"params": list(model.value_head.parameters())})


def _replaced(name: str, gathered: bool, model: Any, optimizer: Any) -> None:
    fs.train_step(model, _mine(), optimizer)
    if gathered:
        with torch.no_grad():
            model(input_ids=_mine()[0]["input_ids"].to(device_here()))
    module = model.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _own_rate() -> float:
    return 1e-3 * (1 + dist.get_rank())


# By what is done to a model and its optimizer on each rank: the error, and words of it.
CASES: dict[str, tuple[Cause, type[Exception], str]] = {
    "added after sharding": (
        _added_later,
        fs.UnsupportedModelError,
        r"2 trained parameters are not sharded \(value",
    ),
    "a tied head that was untied": (
        partial(_replaced, "lm_head", False),
        fs.UnsupportedModelError,
        "lm_head.weight were replaced",
    ),
    "a gathered weight that was replaced": (
        partial(_replaced, "model.embed_tokens", True),
        fs.UnsupportedModelError,
        "model.embed_tokens.weight were replaced",
    ),
    "a weight of a block that was replaced": (
        partial(_replaced, "model.layers.0.mlp.up_proj", False),
        fs.UnsupportedModelError,
        "up_proj.weight were replaced",
    ),
    "experts watched by one rank": (
        lambda model, optimizer: dist.get_rank() or fs.watch_experts(model),
        fs.BatchError,
        "watched=True and False",
    ),
    "all frozen": (
        lambda model, optimizer: model.requires_grad_(False),
        fs.OptimizerError,
        "no parameter is trained",
    ),
    "all frozen on one": (
        lambda model, optimizer: model.requires_grad_(dist.get_rank() == 0),
        fs.OptimizerError,
        "no parameter is trained",
    ),
    "another norm in a tensor": (
        lambda model, optimizer: {"max_grad_norm": torch.tensor(1.0 if dist.get_rank() else 0.01)},
        fs.BatchError,
        "max_grad_norm=",
    ),
    "layers frozen by chance": (
        lambda model, optimizer: model.model.layers[dist.get_rank()].requires_grad_(False),
        fs.BatchError,
        r"trained: model.layers.1.*and model.layers.0",
    ),
    "another rate in a tensor": (
        lambda model, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(_own_rate())),
        fs.BatchError,
        r"lr=0.001\d* of group 0 of SGD and",
    ),
    "another number in a tuple": (  # tensors that print alike
        lambda model, optimizer: optimizer.param_groups[0].update(
            lr=(torch.tensor(1 + _own_rate() / 1e3), 0.9)
        ),
        fs.BatchError,
        r"lr=\(1.00000\d*, 0.9\) of group 0 of SGD and",
    ),
    "another rate": (
        lambda model, optimizer: optimizer.param_groups[0].update(lr=_own_rate()),
        fs.BatchError,
        r"lr=0.001 of group 0 of SGD and lr=0.002 of group 0",
    ),
    "another scale": (
        lambda model, optimizer: {
            "scaler": torch.amp.GradScaler(device_here().type, init_scale=2.0 ** (8 + dist.get_rank()))
        },
        fs.BatchError,
        r"scale=256.0 and 512.0",
    ),
}
FAMILIES = {"a tied head that was untied": "qwen2-tied", "experts watched by one rank": "mixtral"}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, timeout=60)
def test_refused_on_all_ranks(case: str) -> None:
    cause, kind, words = CASES[case]
    plain = tiny_model(FAMILIES.get(case, "llama"))
    model = fs.shard_model(plain, mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    options = cause(model, optimizer)
    with pytest.raises(kind, match=words):
        fs.train_step(model, _mine(), optimizer, **(options if isinstance(options, dict) else {}))


def test_one_process_trains_what_it_is_given() -> None:
    model, scale = tiny_model("llama"), nn.Parameter(torch.ones(()))
    model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
    before = model.lm_head.weight.detach().clone()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return scale * fs.loss_sum(model, batch)[0]

    fs.train_step(
        model, ragged_batches(2), torch.optim.SGD([*model.parameters(), scale], lr=0.1), loss_fn=loss
    )
    assert scale != 1.0
    assert torch.equal(before, model.lm_head.weight)


@pytest.mark.parametrize("kept", [True, False])
@on_ranks(2)
def test_what_is_frozen_while_it_is_gathered_stays_frozen(kept: bool) -> None:
    """The caller freezes a layer and a head that its own forward has left gathered, and later thaws them."""
    model, beside = tiny_model("llama"), tiny_model("llama").to(device_here())
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32, reshard_after_forward=kept)
    batches = [{k: v.to(device_here()) for k, v in b.items()} for b in ragged_batches(4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, beside)]
    for trained in (True, False, False, True):
        with torch.no_grad():
            model(input_ids=batches[0]["input_ids"])
        for each in (model, beside):
            each.lm_head.requires_grad_(trained)
            each.model.layers[1].requires_grad_(trained)
        with torch.no_grad():
            model(input_ids=batches[0]["input_ids"])
        fs.train_step(model, batches[dist.get_rank() :: 2], optimizers[0], max_grad_norm=None)
        plain.step(beside, [plain.mean_loss(beside, batches)], [optimizers[1]])
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert largest_error(values, {n: p.detach().cpu() for n, p in beside.named_parameters()}) <= 1e-5
