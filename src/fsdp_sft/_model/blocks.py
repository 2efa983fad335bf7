"""Parts of a model: its repeated blocks, towers that text does not pass through, and configs."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_sft._model.view import T, base_of, kept_of, record_of, unwrapped
from fsdp_sft._ranks.agree import tell
from fsdp_sft.errors import UnsupportedModelError

_logger = logging.getLogger(__name__)
# A module list with a smaller share than this of the largest list's parameters holds no blocks (Gemma3n has a
# list of three projection matrices beside its 35 layers).
_SMALLEST_SHARE = 0.1

# Configs of towers that a decoder may hold itself (Phi-4 multimodal, Chameleon).
_TOWER_CONFIGS = ("vision_config", "audio_config", "vq_config")

BlockClass = type[nn.Module] | str


def find_blocks(
    model: nn.Module,
    *,
    block_cls: BlockClass | Iterable[BlockClass] | None = None,
) -> dict[str, nn.Module]:
    """Find the transformer blocks of a model, encoder and decoder alike.

    By default these are the elements of the model's outermost module lists: of the lists whose elements are,
    or contain, a class named in transformers' ``_no_split_modules``, and of other lists that are not much
    smaller (a vision tower that the attribute does not name). A container that is never called itself is no
    block, so its contents count: ``nn.ModuleDict(wte=..., h=nn.ModuleList(...), ln_f=...)`` gives the
    elements of ``h``. The model may be of any origin, sharded or not, materialised or on the meta device.

    Args:
        model: Any module; ``*ForCausalLM``, encoder-decoders and classifiers are the usual ones.
        block_cls: Class, class name, or several of them: their outermost modules are the blocks.

    Returns:
        Blocks by FQN, in the order of registration, which is forward order in transformers.

    Raises:
        UnsupportedModelError: If nothing matches; the message lists the classes that the model has.

    Example:
        >>> list(fs.find_blocks(model))
        ['model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3']
        >>> list(fs.find_blocks(model, block_cls=torch.nn.Embedding))
        ['model.embed_tokens']
    """
    if block_cls is not None:
        names = {
            entry if isinstance(entry, str) else entry.__name__
            for entry in ([block_cls] if isinstance(block_cls, (str, type)) else block_cls)
        }
        blocks, wanted = _by_class(model, names), f"of class {sorted(names)}"
    else:
        blocks, wanted = _by_module_list(model), "in a repeated module list"
    if not blocks:
        seen = Counter(type(module).__name__ for module in model.modules()).most_common(12)
        raise UnsupportedModelError(
            f"no block {wanted} in {type(model).__name__}; name the class with block_cls= "
            f"of find_blocks, and pass what it returns as blocks=. Seen: "
            + ", ".join(f"{name} x{count}" for name, count in seen)
        )
    return blocks


def _is_one_of(module: nn.Module, names: set[str]) -> bool:
    """Whether the module is of a class with one of these names."""
    # fully_shard replaces a block's class by a subclass of it, so base classes count too.
    return any(base.__name__ in names for base in type(module).__mro__)


def _by_class(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    """The outermost modules of these classes."""
    matching = {fqn: m for fqn, m in model.named_modules() if fqn and _is_one_of(m, names)}
    return {fqn: m for fqn, m in matching.items() if not _inside(fqn, matching)}


def _by_module_list(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of the outermost module lists that hold blocks."""
    lists: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if fqn and not _inside(fqn, lists) and _is_block_list(module):
            lists[fqn] = module
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    named = {fqn for fqn, m in lists.items() if any(_is_one_of(inner, names) for inner in m.modules())}
    if names and not named:
        return _by_class(model, names)
    sizes = {fqn: sum(p.numel() for p in m.parameters()) for fqn, m in lists.items()}
    smallest = _SMALLEST_SHARE * max(sizes.values(), default=0)
    lists = {fqn: m for fqn, m in lists.items() if fqn in named or sizes[fqn] >= smallest}
    return {name: block for fqn, m in lists.items() for name, block in _elements(fqn, m)}


def _elements(fqn: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The elements of a list; those that are never called are replaced by their own elements."""
    for name, element in container.named_children():
        if not is_never_called(element):
            yield f"{fqn}.{name}", element
        else:
            inner = _elements(f"{fqn}.{name}", element)
            yield from ((path, m) for path, m in inner if next(m.parameters(), None) is not None)


def is_never_called(module: nn.Module) -> bool:
    """Whether a module only contains others and, like ``nn.ModuleList``, has no forward."""
    cls = type(module)
    own_call = cls.__call__ is not nn.Module.__call__ or "forward" in module.__dict__
    return cls.forward is nn.Module.forward and not own_call


def _is_block_list(module: nn.Module) -> bool:
    """Whether the module is a list of modules, each with parameters, that may be blocks."""
    children = list(module.children())
    if not children or any(next(child.parameters(), None) is None for child in children):
        return False
    if isinstance(module, nn.ModuleDict) and not _is_numbered(module):
        return False  # a namespace, with parts of the model
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return any(next(child.children(), None) is not None for child in children)
    # An nn.Sequential is a list of blocks only if it repeats one module class that has children.
    return (
        isinstance(module, nn.Sequential)
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and next(children[0].children(), None) is not None
    )


def _is_numbered(module: nn.ModuleDict) -> bool:
    """Whether all entries have numbered names ("0", "1"; "layer_0") or the same class."""
    names = {re.sub(r"\d+", "", name) for name in module}
    return (len(names) == 1 and all(re.search(r"\d", name) for name in module)) or (
        len(module) > 1 and len({type(child) for child in module.values()}) == 1
    )


def _inside(fqn: str, outer: Iterable[str]) -> bool:
    """Whether an FQN is below one of the others."""
    return any(fqn.startswith(f"{prefix}.") for prefix in outer)


def decoder_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that text goes through, by FQN: those of towers left out."""
    unused = tuple(f"{tower}." for tower in towers_of(model))
    return {name: block for name, block in find_blocks(model).items() if not name.startswith(unused)}


def towers_of(model: Any) -> list[str]:
    """FQNs of the outermost modules of a multimodal model that text does not pass through.

    These are the modules of its base model, such as a vision tower and the projector after it, that have no
    parameter of the text decoder or of the embeddings, and the towers within a decoder. Empty for a model of
    text alone, with an encoder or without.

    Args:
        model: The model, without wrappers and adapters around it.
    """
    config: Any = getattr(model, "config", None)
    held = [type(part) for part in (getattr(config, name, None) for name in _TOWER_CONFIGS) if part]
    if (
        not hasattr(config, "get_text_config")
        or not hasattr(model, "get_decoder")
        or getattr(config, "is_encoder_decoder", False)
        or (config.get_text_config(decoder=True) is config and not held)
    ):
        return []
    base, decoder = getattr(model, "base_model", model), model.get_decoder()
    inside = {m for m in decoder.modules() if isinstance(getattr(m, "config", None), tuple(held))}
    text = [
        *(module for module in decoder.children() if inside.isdisjoint(module.modules())),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    ]
    used = {id(p) for module in text if module is not None for p in module.parameters()}
    used.update(map(id, decoder.parameters(recurse=False)))
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    return [prefix + name for name in _outermost(base, used)]


def _outermost(module: nn.Module, used: set[int]) -> Iterator[str]:
    """Names of the outermost modules within one that have parameters, none of them among those used."""
    for name, child in module.named_children():
        own = {id(p) for p in child.parameters()}
        if own and own.isdisjoint(used):
            yield name
        elif own - used:
            yield from (f"{name}.{inner}" for inner in _outermost(child, used))


def freeze_towers(model: nn.Module) -> list[str]:
    """Freeze the vision and audio towers of a multimodal model, which training on text does not use.

    Call it before ``add_adapters``, which then puts no adapters into them, and before ``shard_model``, whose
    ``frozen_dtype`` their shards are stored in. A frozen tower still runs if a batch has images, and their
    loss trains the text model alone. Nothing happens to a model of text alone, and nothing to experts of
    images within the blocks (ERNIE-VL), which text gives no gradients.

    Args:
        model: A transformers model, materialised or on the meta device; not sharded.

    Returns:
        FQNs of what was frozen: towers and the projectors after them.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> fs.freeze_towers(model)  # a LLaVA: ['model.vision_tower', ...]
        []
    """
    inner = base_of(unwrapped(model))
    names = towers_of(inner)
    for name in names:
        inner.get_submodule(name).requires_grad_(False)
    record_of(inner).keep(_FrozenTowers(names))
    if names:
        tell(_logger, "%s: %s frozen", type(inner).__name__, " and ".join(names))
    return names


class _FrozenTowers(tuple[str, ...]):
    """FQNs of the towers that ``freeze_towers`` has frozen, as the model's record keeps them."""


def not_prepared(model: nn.Module) -> str:
    """A regular expression of the FQNs of what is not prepared for training, and of all within it, or "".

    That are the towers that ``freeze_towers`` has frozen: they get no adapters, and are neither checkpointed
    nor packed.
    """
    names = kept_of(base_of(unwrapped(model)), _FrozenTowers)
    return rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?" if names else ""


def to_prepare(model: nn.Module, named: Mapping[str, T]) -> dict[str, T]:
    """Those of a model's modules or parameters, by FQN, that are prepared for training."""
    within = re.compile(not_prepared(model))
    return {name: one for name, one in named.items() if not within.fullmatch(name)}


def configs_of(model: nn.Module) -> list[Any]:
    """Every config of the model's modules, with the nested ones of composite models."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in waiting:  # which grows meanwhile
        if id(config) not in seen and hasattr(config, "__dict__"):
            seen[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(seen.values())


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Context in which ``use_cache`` is off in all configs of the model.

    A forward that fills a cache mixes the rows of a pack: transformers detects packs only without a cache.
    """
    on = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True
