"""Modules that the caller gives dtypes of their own: each becomes a group of its own."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.blocks import is_never_called
from fsdp_sft._model.wrappers import base_of
from fsdp_sft.errors import UnsupportedModelError, abridged
from fsdp_sft.shard.names import all_names

Policies = Mapping[str, MixedPrecisionPolicy]


def check_policies(policies: Any) -> None:
    """Refuse what maps no names to policies.

    Raises:
        TypeError: If it does not.
    """
    if policies is not None and not isinstance(policies, Mapping):
        raise TypeError(f"policies must map names of modules to MixedPrecisionPolicy, got {policies!r}")
    for name, policy in (policies or {}).items():
        if not isinstance(name, str) or not isinstance(policy, MixedPrecisionPolicy):
            raise TypeError(
                f"policies[{name!r}] must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {policy!r}"
            )


def own_policies(model: nn.Module, policies: Policies | None) -> dict[int, MixedPrecisionPolicy]:
    """The policy of each module that has one of its own, by the module's id; of several that fit, the last.

    Args:
        model: The model, before it is sharded.
        policies: Policies by FQN or shell pattern, in the model or in the base within adapters.

    Raises:
        ValueError: If a name fits no module, or the whole model.
        UnsupportedModelError: If a module is never called, has no parameters, or shares some with others.
    """
    found: dict[int, MixedPrecisionPolicy] = {}
    if not policies:
        return found
    modules = dict(model.named_modules())
    base: nn.Module = base_of(model)
    inner: dict[int, str] = {id(module): fqn for fqn, module in base.named_modules()}
    where = all_names(model)
    for pattern, policy in policies.items():
        fits = [
            fqn
            for fqn, module in modules.items()
            if any(fnmatchcase(str(name), pattern) for name in (fqn, inner.get(id(module), fqn)))
        ]
        if not fits or any(inner.get(id(modules[fqn]), "") == "" for fqn in fits):
            wrong = "is the model itself, whose policy is mp_policy" if fits else "fits no module"
            raise ValueError(
                f"policies[{pattern!r}] {wrong}; name modules, such as 'model.layers.*.mlp.gate' (a * stands "
                "for any text, dots included)"
            )
        for fqn in fits:
            module = modules[fqn]
            if is_never_called(module) or next(module.parameters(), None) is None:
                raise UnsupportedModelError(
                    f"policies[{pattern!r}] fits {fqn} ({type(module).__name__}), which is never called or "
                    "has no parameters: a policy is for what gathers its own parameters when it is called"
                )
            names = [name for p in module.parameters() for name in where[id(p)]]
            outside = [name for name in names if not name.startswith(f"{fqn}.")]
            if outside:
                raise UnsupportedModelError(
                    f"policies[{pattern!r}] fits {fqn}, whose parameters are tied to {abridged(outside)}: "
                    "tied parameters are gathered together, with one policy"
                )
            found[id(module)] = policy
    return found
