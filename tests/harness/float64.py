"""Models that compute in float64 throughout, also where their code says float32."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class AllFloat64(TorchFunctionMode):
    """While it is on, what would cast a float64 tensor to float32 leaves it as it is.

    Norms, softmaxes and routers of transformers compute in float32 whatever the model's dtype, which leaves
    differences of 1e-7 where two orders of the same sums are compared.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if func is torch.Tensor.float:
            return args[0].double()  # positions and frequencies too, which are multiplied by each other
        if wide:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in kwargs.items()}
        return func(*args, **kwargs)
