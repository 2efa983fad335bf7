"""A config's model on the meta device: its blocks by kind, and the size of its parameters on each rank."""

import copy
import functools
import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.experts import experts_to_place
from fsdp_sft._model.blocks import decoder_blocks, towers_of
from fsdp_sft._model.configs import config_of
from fsdp_sft._quantised.find import check
from fsdp_sft._quantised.settings import settings_of, without_settings
from fsdp_sft.planner.parameters import Group, group_of, layouts_of
from fsdp_sft.planner.run import Lora, Run
from fsdp_sft.shard.packing import STORED
from fsdp_sft.shard.units import needs_weight_in_backward, own_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Model types whose estimates were compared with measurements; see
# docs/how-to/plan-a-run.md.
CHECKED_FAMILIES = frozenset(
    (
        "gemma",
        "gemma2",
        "gemma3_text",
        "llama",
        "mistral",
        "mixtral",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    )
)
# What loading makes of a checkpoint that is published quantised, by how frozen matrices are kept.
_BECOMES = {
    None: "loading dequantises it, so memory is that of any other",
    STORED: "what of it stays packed is assumed from the config alone",
}


@dataclass(frozen=True, eq=False)
class Skeleton:
    """What the planner knows of a model; as a key of a cache only equal to itself.

    Attributes:
        config: The config that it was built from.
        model: The model on the meta device, in the compute dtype and in ``train()`` mode.
        blocks: The blocks, in forward order.
        kinds: Kind of each block: the index of the first block like it.
        groups: Parameters of each block, in forward order; equal ones are the same object.
        root: Parameters outside of all other groups: the last norm, and embedding and head if they are tied.
        embedding: Parameters of the input embedding; empty if they are in the root.
        head: Parameters of the head, likewise.
        towers: Parameters of each vision or audio tower, frozen, which text never gathers.
        gathers_embedding_again: Whether the embedding's backward gathers its parameters again.
        published: A remark on how the checkpoint is quantised; empty if it is not.
        first_backward: Index of the first block that the backward reaches, the number of blocks if it reaches
            none. Blocks before it have nothing to train in or below them, and keep nothing.
        begins_backward: That block, if no gradient leaves it, as nothing below it is trained; a kind of its
            own, since it keeps less.
        parameters: Number of parameters of the whole model; tied ones count once.
        active_parameters: Number of parameters that one token passes through.
        experts: Number of experts in each layer that expert parallelism can distribute; empty if none.
        adapted: Names of the layers that have adapters.
    """

    config: Any
    model: Any
    blocks: tuple[nn.Module, ...]
    kinds: tuple[int, ...]
    groups: tuple[Group, ...]
    root: Group
    embedding: Group
    head: Group
    first_backward: int
    parameters: int
    active_parameters: int
    experts: tuple[int, ...] = ()
    adapted: tuple[str, ...] = ()
    towers: tuple[Group, ...] = ()
    gathers_embedding_again: bool = False
    begins_backward: nn.Module | None = None
    published: str = ""

    @functools.cached_property
    def traced_tensors(self) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers of one block of each kind, and of everything outside the blocks."""
        silent = {block for i, block in enumerate(self.blocks) if i not in set(self.kinds)}
        modules = [module for _, module in self.model.named_modules(memo=silent)]  # passes over these blocks
        return tuple(t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))

    def run_of_code(self, run: Run) -> Run:
        """The run with what the code of a plan has to say, where the calls' defaults train something else."""
        if self.experts:
            run = run.naming(self.adapted)  # peft's all-linear adapts experts as well
        if run.is_made_in_steps and run.frozen_dtype is None and self.towers:
            run = replace(run, frozen_dtype=run.param_dtype)
        return run

    @functools.cached_property
    def distinct_groups(self) -> tuple[tuple[Group, int], ...]:
        """The distinct groups, each with its number of occurrences."""
        return tuple(Counter([*self.groups, self.root, self.embedding, self.head, *self.towers]).items())


def build_skeleton(config: "PreTrainedConfig | str | os.PathLike[str]", run: Run) -> Skeleton:
    """The skeleton of a config's model, built once per config, dtype and choice of adapters and packing.

    Args:
        config: The config, or the folder or Hub id that has it.
        run: The run; only those fields matter.
    """
    config = config_of(config) if isinstance(config, (str, os.PathLike)) else config
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    # float16 takes as much as bfloat16, of which alone torch's meta kernels multiply groups (2.13).
    dtype = torch.bfloat16 if run.param_dtype == torch.float16 else run.param_dtype
    return _cached_skeleton(_Keyed(key, config), dtype, run.lora, run.packed)


@dataclass(frozen=True)
class _Keyed:
    """A config as a cache key, compared by its contents."""

    key: str
    config: Any = field(compare=False)


@functools.lru_cache(maxsize=8)
def _cached_skeleton(keyed: _Keyed, dtype: torch.dtype, lora: Lora | None, packed: str | None) -> Skeleton:
    """The skeleton for one config, compute dtype, adapters and way to keep what is frozen."""
    config = keyed.config
    model = build_model(config, dtype)
    settings = settings_of(getattr(config, "name_or_path", "") or f"a {config.model_type} config", config)
    if settings is not None:
        check(settings)
    blocks = tuple(decoder_blocks(model).values())
    adapted: tuple[str, ...] = ()
    if lora is not None:
        model.requires_grad_(False)
        adapted = lora.adapt(blocks)
    towers = tuple(towers_of(model))
    for tower in towers:
        model.get_submodule(tower).requires_grad_(False)
    experts = experts_to_place(model)
    layouts = {} if packed is None else layouts_of(model, blocks, packed, settings)
    take = functools.partial(
        group_of,
        left={id(p): name for name, p in model.named_parameters()},
        towers=towers,
        experts=experts,
        layouts=layouts,
    )
    known: dict[Any, Group] = {}
    groups = tuple(known.setdefault(group.parameters, group) for group in map(take, blocks))
    tower_groups = tuple(take(model.get_submodule(tower)) for tower in towers)
    own = own_vocabulary(model, blocks)
    embedding, head = (Group(()) if module is None else take(module) for module in own)
    root = take(model)
    is_frozen_below = not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    trained = (i for i, group in enumerate(groups) if any(p.trained for p in group.parameters))
    first = next(trained, len(blocks)) if is_frozen_below else 0
    begins = first if is_frozen_below and first < len(blocks) else None
    alike: dict[Any, int] = {}  # the first block of each kind; that block is like no other
    likenesses = [likeness(block) if index != begins else index for index, block in enumerate(blocks)]
    total = sum(parameter.numel() for parameter in model.parameters())
    return Skeleton(
        config=config,
        model=model,
        blocks=blocks,
        kinds=tuple(alike.setdefault(like, index) for index, like in enumerate(likenesses)),
        groups=groups,
        root=root,
        first_backward=first,
        begins_backward=None if begins is None else blocks[begins],
        parameters=total,
        active_parameters=total - _idle_expert_parameters(model, config),
        experts=tuple(experts.values()),
        adapted=adapted,
        embedding=embedding,
        head=head,
        towers=tower_groups,
        gathers_embedding_again=own[0] is not None and needs_weight_in_backward(own[0]),
        published=""
        if settings is None
        else f"the checkpoint is published quantised ({settings.method}): "
        + _BECOMES.get(packed, f"loading dequantises it, and packs frozen matrices anew ({packed})"),
    )


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """The model on the meta device, in ``train()`` mode and without a cache."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} is an encoder-decoder; the planner knows decoder-only models")
    cls, config = auto_class(config), copy.deepcopy(config)
    config.use_cache = False
    without_settings(config)
    with torch.device("meta"):
        return cls.from_config(config, dtype=dtype).train()


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a config's model: with its towers if it has any."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as TOWERS

    return AutoModelForMultimodalLM if config.model_type in TOWERS else AutoModelForCausalLM


def likeness(block: nn.Module) -> Any:
    """A value that is equal for blocks that compute alike: classes, shapes, plain attributes (a window)."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        plain = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if key not in ("layer_idx", "layer_index", "training")
            and (value is None or isinstance(value, (bool, int, float, str)))
        ]
        shapes = [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, tuple(plain), tuple(shapes)))
    return tuple(parts)


def _idle_expert_parameters(model: nn.Module, config: Any) -> int:
    """Number of parameters of the experts that a token is not routed to."""
    chosen = getattr(config.get_text_config(decoder=True), "num_experts_per_tok", None)
    stacks = [p for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3]
    return sum(p.numel() * (len(p) - chosen) // len(p) for p in stacks) if isinstance(chosen, int) else 0
