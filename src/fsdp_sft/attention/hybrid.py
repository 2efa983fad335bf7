"""The layers of hybrid models that are no attention keep the rows of a pack apart.

transformers tells the rows of a pack by its positions, for attention alone. A recurrence or a short
convolution runs on from row to row, unless the forward is given ``seq_idx`` and ``cu_seq_lens_q``: kernels
then begin anew at each row, and where torch alone computes, transformers raises. Here a forward gets both
whenever its positions start again, and a function without such a kernel runs row by row. What a layer's call
is given reaches its recomputation too, so nothing has to be known of threads, checkpointing or other models.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.compile import outside_of_graphs
from fsdp_sft._model.forward import forward_parameters, spread_positions, text_model
from fsdp_sft._process.streams import host_copies, travelling

# Functions of transformers' model files, for each kind of layer: the dimension of time, and the arguments
# that have it. They are causal, so rows can be computed one by one.
_DELTA_RULE = (1, ("query", "key", "value", "g", "beta"))
_ALONG_TIME: dict[str, tuple[int, tuple[str, ...]]] = {
    "causal_conv1d_fn": (2, ("hidden_states",)),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": (1, ("hidden_states", "dt", "B", "C")),
    "mamba2_split_conv1d_scan_combined": (1, ("zxbcdt",)),
}
_ONE_TOKEN = {  # their counterparts in generation, which continue a cache
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
}
_BOUNDARIES = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")
_SEPARATED = "_fsdp_sft_separates_rows"


def separate_rows(model: nn.Module) -> None:
    """Let the recurrences and short convolutions of a hybrid model begin anew at each row of a pack.

    A model stays as it is if any layer calls a function that is not known here, or convolves by itself: its
    rows mix as before, which ``verify_packing`` refuses. So does one whose text model takes no further
    arguments. The functions are replaced in the model's file for the life of the process, and do what they
    did unless a call says where rows begin. A second call adds nothing. Positions of several axes are spread
    first, by ``spread_positions``.
    """
    spread_positions(model)
    inner = text_model(model)
    if inner is None or _SEPARATED in vars(inner):
        return
    found = []
    for layer in {type(layer): layer for layer in inner.modules()}.values():
        forward: Any = inspect.unwrap(getattr(type(layer), "forward", None))  # type: ignore[arg-type]
        if not inspect.isfunction(forward):  # of a script, or a function in C
            continue
        file = getattr(forward, "__globals__", {})
        names = [name for name in forward.__code__.co_names if name in file]
        called = {name for name in names if name in _ALONG_TIME or _with_kernel(file[name])}
        convolves = any(isinstance(child, nn.Conv1d) for child in layer.children())
        if called - _ALONG_TIME.keys() - _ONE_TOKEN or (convolves and called.isdisjoint(_ALONG_TIME)):
            return
        found += [(file, name) for name in called & _ALONG_TIME.keys()]
    takes_more = any(p.kind == p.VAR_KEYWORD for p in forward_parameters(inner).values())
    if not found or not takes_more:
        return
    for file, name in found:
        if not hasattr(file[name], _SEPARATED):
            file[name] = _separated(file[name], *_ALONG_TIME[name])
    vars(inner)[_SEPARATED] = True
    inner.register_forward_pre_hook(_with_boundaries, with_kwargs=True)


def _with_kernel(function: Any) -> tuple[Any, frozenset[str]] | None:
    """(torch's form of a function of a model's file, arguments its kernel takes); None for other functions.

    ``use_kernel_func_from_hub_with_fallback`` computes such a function by the package that has a kernel for
    it, if that is installed, and drops the arguments that the kernel does not take. Which it found is in its
    closure alone. With the package ``kernels`` the function is called by an ``nn.Module``.
    """
    if isinstance(function, nn.Module):
        function = _nonlocals(type(function).forward, "func").get("func")
    held = _nonlocals(function, "is_new_implementation")
    if not held:
        return None
    taken = held["applicable_params"] if held["is_new_implementation"] else ()
    return held["torch_function"], frozenset(taken)


def _nonlocals(function: Any, name: str) -> dict[str, Any]:
    """What is in a function's closure, if that has a variable of this name; others may be empty yet."""
    names = function.__code__.co_freevars if inspect.isfunction(function) else ()
    return dict(inspect.getclosurevars(function).nonlocals) if name in names else {}


@outside_of_graphs
def _with_boundaries(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before the text model's forward: says where the rows of a pack begin."""
    positions = kwargs.get("position_ids")
    if any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values", "cache")):
        return None
    if not isinstance(positions, torch.Tensor) or positions.is_meta:
        return None
    if positions.ndim == 3 and len(positions) == 4:  # of text, before those of three axes
        positions = positions[0]
    if positions.ndim > 2:
        return None
    ids: Any = next(
        (kwargs[n] for n in ("input_ids", "inputs_embeds") if kwargs.get(n) is not None), positions
    )
    positions = positions.expand(len(ids), -1)
    (begins,) = host_copies([torch.diff(positions, prepend=positions[:, :1] - 1) != 1])
    if not begins.any():
        return None
    begins[:, 0] = True  # each sequence of a batch
    flat = begins.flatten()
    seq_idx = flat.cumsum(0, dtype=torch.int32).view(begins.shape) - 1
    edges = torch.cat([flat.nonzero().flatten(), torch.tensor([flat.numel()])]).to(torch.int32)
    device = positions.device
    given = {"seq_idx": travelling(seq_idx, device), "cu_seq_lens_q": travelling(edges, device)}
    return args, {**given, **kwargs}


def _separated(function: Callable[..., Any], time: int, sequences: tuple[str, ...]) -> Callable[..., Any]:
    """A function of a model's file that heeds ``seq_idx``, by its kernel or row by row.

    Args:
        function: The function.
        time: Dimension of time in its sequences and its output.
        sequences: Names of the arguments that are sequences.
    """
    in_torch, taken_by_kernel = _with_kernel(function) or (function, frozenset())
    signature = inspect.signature(in_torch)

    @functools.wraps(in_torch)
    def separated(*args: Any, **kwargs: Any) -> Any:
        seq_idx = kwargs.get("seq_idx")
        if seq_idx is None:
            return function(*args, **kwargs)
        if not taken_by_kernel.isdisjoint(_BOUNDARIES):
            kwargs.setdefault("cu_seqlens", kwargs.get("cu_seq_lens_q"))
            return function(*args, **kwargs)
        call = signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in _BOUNDARIES})
        return _row_by_row(function, call, seq_idx, time, sequences)

    setattr(separated, _SEPARATED, True)
    return separated


@outside_of_graphs
def _row_by_row(
    function: Callable[..., Any],
    call: inspect.BoundArguments,
    seq_idx: torch.Tensor,
    time: int,
    sequences: tuple[str, ...],
) -> Any:
    """What a call gives if each row is computed alone; states at the end of a row are not returned."""
    lengths = [n for row in seq_idx for n in torch.unique_consecutive(row, return_counts=True)[1].tolist()]
    rows = {name: torch.cat(call.arguments[name].split(1), time).split(lengths, time) for name in sequences}
    outs = []
    for row in range(len(lengths)):
        call.arguments.update({name: parts[row] for name, parts in rows.items()})
        out = function(*call.args, **call.kwargs)
        if out is None:  # no kernel for what is computed in parts otherwise
            return None
        outs.append(out[0] if isinstance(out, tuple) else out)
    joined = torch.cat(torch.cat(outs, time).split(seq_idx.shape[1], time))
    return (joined, None) if isinstance(out, tuple) else joined
