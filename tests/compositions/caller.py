"""The same training as its user writes it with the library: runs on every rank of a draw's mesh."""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.compositions import architectures, options
from tests.compositions.axes import Draw
from tests.compositions.plain import Tensors, Trained
from tests.compositions.rows import Row
from tests.harness.composed import composed
from tests.harness.device import device_here, device_type, mesh_here
from tests.harness.models import full

MESHES: dict[str, dict[str, int]] = {
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "replicas 2": {"dp_replicate": 2, "dp_shard": 1},
    "cp 2": {"cp": 2},
    "cp 2 fsdp 2": {"cp": 2, "dp_shard": 2},
}


class Loop:
    """The caller's loop over epochs: (epoch, window) without end, and where it stands."""

    def __init__(self, draw: Draw, rows: list[Row], mesh: Any) -> None:
        self.draw, self.rows = draw, rows
        shared = mesh is not None and "cp" in mesh.mesh_dim_names
        self.mesh: dict[str, Any] = {"mesh": mesh} if shared else {}
        each = 2 if shared else 1  # ranks that share rows
        self.ranks, self.rank = dist.get_world_size() // each, dist.get_rank() // each
        self.is_first = dist.get_rank() % each == 0
        self.epoch = self.taken = 0
        self.collate = partial(options.collated if draw["batches"] == "padded" else _packed, draw)
        self.sampler: Any = None
        if draw["loader"] != "list":
            self.sampler = self._sampler()
            self.loader = self._loader()

    def _loader(self) -> Any:
        workers = 2 if self.draw["loader"] == "sampler and workers" else 0
        options_of: dict[str, Any] = {"collate_fn": self.collate, "num_workers": workers}
        rows: Any = self.rows
        if self.draw["loader"] == "stream":
            return DataLoader(self.sampler, None, **options_of)
        if self.draw["batches"] != "padded":
            return DataLoader(rows, batch_sampler=self.sampler, **options_of)
        if self.draw["loader"] == "sampler of batches":
            return DataLoader([self.collate([row]) for row in rows], batch_size=None, sampler=self.sampler)
        return DataLoader(rows, options.BATCH_ROWS, sampler=self.sampler, **options_of)

    def _sampler(self) -> Any:
        """Of rows, or of packs."""
        kind, third = self.draw["loader"], len(self.rows) // 3
        mixture = fs.Mixture([third, len(self.rows) - third]) if kind == "sampler of a mixture" else None
        if self.draw["batches"] == "padded":
            return fs.ResumableSampler(len(self.rows) if mixture is None else mixture, **self.mesh)
        given: dict[str, Any] = {"max_length": options.PACK_TOKENS, **self.mesh}
        if kind == "stream":
            return fs.PackedStream(self.rows, buffer_size=9, **given)
        lengths, targets = fs.row_sizes(self.rows)
        cost = (1.0, 0.5) if kind == "sampler by cost" else None
        return fs.PackedSampler(lengths, num_targets=targets, mixture=mixture, cost=cost, **given)

    def state(self) -> Any:
        """For the checkpoint; the same on all ranks."""
        if self.sampler is not None:
            return self.sampler.state_dict()
        return {"epoch": self.epoch, "taken": self.taken}

    def load(self, state: Any) -> None:
        """Go on from a state, at any number of ranks."""
        if self.sampler is not None:
            self.sampler.load_state_dict(state)
        else:
            self.epoch, self.taken = state["epoch"], state["taken"]

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        if self.sampler is None:
            yield from self._by_hand()
        while True:
            own = self.sampler.epoch
            for window in fs.windows(self.loader, options.micro_batches(self.draw), **self.mesh):
                if isinstance(self.sampler, fs.PackedStream):
                    own = self.sampler.epoch  # a stream finds out that it was at its end when it is read
                yield own, [self._twisted(batch) for batch in window]

    def _by_hand(self) -> Iterator[tuple[int, list[Any]]]:
        """Slices of the rows, dealt in turn; an epoch ends where a step would not be full."""
        each, size = options.micro_batches(self.draw) * self.ranks, options.BATCH_ROWS
        while True:
            if self.taken + each * size > len(self.rows):
                self.epoch, self.taken = self.epoch + 1, 0
            chosen = self.rows[self.taken : self.taken + each * size]
            self.taken += each * size
            parts = [chosen[place * size : (place + 1) * size] for place in range(each)]
            yield self.epoch, [self._twisted(self.collate(part)) for part in parts[self.rank :: self.ranks]]

    def _twisted(self, batch: Any) -> Any:
        if self.draw["twist"] == "keys differ" and self.rank == 0:
            return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}
        return batch


def _packed(draw: Draw, rows: list[Row]) -> Any:
    batch = fs.PackedCollator(max_length=options.PACK_TOKENS)(rows)
    if draw["loss terms"] == "weights":
        weights = [row.get("token_weights", [1.0] * len(row["input_ids"])) for row in rows]
        flat = torch.tensor([weight for of_row in weights for weight in of_row])
        batch["loss_weights"] = torch.ones(batch["labels"].shape)
        batch["loss_weights"][0, : len(flat)] = flat
    if draw["batches"] == "packed with a mask":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


@dataclass
class Told:
    """What a rank saw.

    Attributes:
        trained: As of the oracle; parameters by their plain names, in ``start`` also the buffers.
        epochs: Which epoch each window belongs to.
        windows: This rank's micro-batches, by step.
        steps: The steps that were there at the end.
        exported: The folder, or None.
    """

    trained: Trained = field(default_factory=Trained)
    epochs: list[int] = field(default_factory=list)
    windows: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    exported: str | None = None


def run(draw: Draw, folder: Path, rows: list[Row], held_out: list[Row], first: int, last: int) -> Any:
    """Steps ``first`` to ``last``, from the checkpoint before ``first`` if that is not the first of all.

    Returns:
        What this rank was told, or the typed error that it met as (name, message).
    """
    load: Any = sys.modules["fsdp_sft.weights.load"]
    without_inductor = partial(load.compile_blocks, backend="aot_eager")  # which takes minutes
    try:
        with mock.patch.object(load, "compile_blocks", without_inductor):
            return _run(draw, folder, rows, held_out, first, last)
    except fs.FsdpSftError as error:
        return type(error).__name__, str(error)


def _run(draw: Draw, folder: Path, rows: list[Row], held_out: list[Row], first: int, last: int) -> Told:
    told = Told()
    mesh = _mesh(draw, first)
    model = _model(draw, folder, mesh, seed=first)
    if draw["experts"] == "one by one":
        fs.prepare_experts(model, impl="eager")
    inner = model.module if draw["mesh"] == "torch DDP 2" else model
    options.twist(draw, inner)
    if draw["varlen"] == "yes":
        fs.use_varlen_attention(inner)
    if mesh is not None:
        fs.use_context_parallel(model, mesh=mesh)
    if draw["loss"] in ("chunked", "logits"):
        fs.prepare_loss(model, impl=draw["loss"])  # type: ignore[arg-type]
    told.trained.start = _tensors(inner)
    made = options.optimizers(draw, inner, fs.StochasticAdamW)
    loop = Loop(draw, rows, mesh)
    given: Any = made if len(made) > 1 else made[0]
    if first > 1:
        loaded = fs.load_checkpoint(folder / "checkpoints", model=model, optimizer=given)
        assert loaded.step == first - 1
        loop.load(loaded.train_state["loop"])
        for step in range(1, first):
            _change(draw, step, made, model, inner)
    _train(draw, folder, told, (model, inner, given, made), loop, held_out, first, last)
    told.trained.parameters = _tensors(inner, buffers=False)
    if draw["resume"] != "no":
        told.steps = [info.step for info in fs.find_checkpoints(folder / "checkpoints")]
    if last == options.STEPS and draw["export"] != "no":
        told.exported = str(_export(draw, folder, model))
    return told


def _train(
    draw: Draw,
    folder: Path,
    told: Told,
    parts: tuple[Any, Any, Any, list[Any]],
    loop: Loop,
    held_out: list[Row],
    first: int,
    last: int,
) -> None:
    model, inner, given, made = parts
    for one in made if first == 1 else []:
        one.register_step_pre_hook(partial(_keep_gradients, told, inner))
    step_options = {
        "max_grad_norm": options.max_norm(draw),
        "grad_sync": draw["accumulation"].partition(" ")[2] or "each",
        **_loss_options(draw),
    }
    if draw["precision"].startswith("float16"):
        step_options["scaler"] = torch.amp.GradScaler(device_type(), init_scale=options.SCALE)
    is_odd = draw["odd rank"] != "none" and dist.get_rank() == dist.get_world_size() - 1
    pending = None
    for step, (epoch, window) in zip(range(first, last + 1), loop, strict=False):
        what = draw[f"before step {step}"]
        _change(draw, step, made, model, inner)
        if what == "evaluate":
            told.trained.evaluations.append(_evaluated(draw, model, held_out, loop))
        elif what.startswith("fail"):
            _fail(what, model, inner, given, options.collated(draw, [held_out[loop.rank]]), step_options)
        elif what == "load" and pending is not None:
            pending.wait()
            assert fs.load_checkpoint(folder / "checkpoints", model=model, optimizer=given).step == step - 1
        told.epochs.append(epoch)
        told.windows.append([dict(batch) for batch in window] if loop.is_first else [])
        if is_odd and step == 2:
            _be_odd(
                draw, folder, parts, window, partial(_evaluated, draw, model, held_out, loop), step_options
            )
            continue
        result = fs.train_step(model, window, given, **step_options)
        assert not result.skipped, result
        told.trained.losses.append(result.loss)
        told.trained.norms.append(result.grad_norm)
        told.trained.router_losses.append(result.router_loss)
        if draw["resume"] != "no":
            pending = fs.save_checkpoint(
                folder / "checkpoints",
                step,
                model=model,
                optimizer=given,
                train_state={"loop": loop.state()},
                async_=draw["save"] == "asynchronous",
                include_base=draw["save"] == "asynchronous",  # of what is packed
            )
    if pending is not None:
        pending.wait()
    if draw["odd rank"] != "none":  # a rank that is a step behind is met in another call at the latest here
        _evaluated(draw, model, held_out, loop)


# --- what the caller does between two steps that train, and one rank in the place of a step ----------------


def _change(draw: Draw, step: int, made: list[Any], model: Any, inner: Any) -> None:
    options.change(draw, step, made, inner)
    if draw[f"before step {step}"] == "a hook on a block" and draw["loss"] != "loss_fn":
        impl = draw["loss"] if draw["loss"] in ("chunked", "logits") else "auto"
        fs.prepare_loss(model, impl=impl)  # type: ignore[arg-type]


class PlantedError(Exception):
    """Raised by the caller's own code."""


def _fail(what: str, model: Any, inner: Any, given: Any, batch: Any, step_options: dict[str, Any]) -> None:
    """A step in which the caller's own code raises, on every rank; what comes after it is compared."""

    def bomb(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if what == "fail in a forward":
            raise PlantedError(what)
        if what == "fail in a backward" and hidden.requires_grad:
            hidden.register_hook(explode)

    def explode(gradient: torch.Tensor) -> None:
        raise PlantedError(what)

    def failing(model: Any, batch: Any) -> torch.Tensor:
        own_loss(model, batch)
        raise PlantedError(what)

    own_loss = step_options.get("loss_fn", fs.loss_sum)
    handle = options.block_of(inner, -1).register_forward_hook(bomb)
    if "loss" in what:
        step_options = {**step_options, "loss_fn": failing}
    # At its first step a model is compared with its own loss, by forwards of the same hooks.
    with pytest.raises((PlantedError, fs.ModelLossError), match=what):
        fs.train_step(model, [batch], given, **step_options)
    handle.remove()


def _be_odd(
    draw: Draw,
    folder: Path,
    parts: tuple[Any, Any, Any, list[Any]],
    window: list[Any],
    evaluate: Callable[[], float],
    step_options: dict[str, Any],
) -> None:
    """What one rank does where the others train."""
    (model, inner, given, made), what = parts, draw["odd rank"]
    if what == "another rate":
        made[0].param_groups[0]["lr"] = 0.5
    if what == "another block frozen":
        options.switch(options.block_of(inner, 1))
    changed = {"another clip": {"max_grad_norm": 0.5}, "another loss": {"loss_fn": architectures.summed_loss}}
    if what == "evaluates":
        evaluate()
    elif what == "saves":
        fs.save_checkpoint(folder / "odd", 2, model=model, optimizer=given)
    elif what != "leaves a step out":
        window = window[:-1] if what == "one batch less" else window
        fs.train_step(model, window, given, **step_options | changed.get(what, {}))


# --- what it is given --------------------------------------------------------------------------------------


def _loss_options(draw: Draw) -> dict[str, Any]:
    if draw["loss"] == "tokens":
        counts = {"count_fn": architectures.weight_of_tokens} if draw["loss terms"] == "weights" else {}
        return {"loss_fn": architectures.loss_of_tokens, **counts}
    if draw["loss"] != "loss_fn":
        terms = options.loss_terms(draw)
        return {"loss_fn": lambda model, batch: fs.loss_sum(model, batch, **terms)[0]} if terms else {}
    return {
        "loss_fn": architectures.summed_loss,
        "count_fn": partial(architectures.count, architecture=draw["architecture"]),
    }


def _evaluated(draw: Draw, model: nn.Module, held_out: list[Row], loop: Loop) -> float:
    batches = [options.collated(draw, [row]) for row in held_out[loop.rank :: loop.ranks]]
    return fs.evaluate(model, batches, **_loss_options(draw)).loss


def _mesh(draw: Draw, first: int) -> Any:
    name = draw["mesh"] if first == 1 else options.resumed_mesh(draw)
    return None if name in ("single", "torch DDP 2") else mesh_here(**MESHES.get(name, {}))


def _sharding(draw: Draw) -> dict[str, Any]:
    dtype = {"float32": torch.float32, "float16 with scaler": torch.float16}.get(draw["precision"])
    policy = None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    manners: dict[str, dict[str, Any]] = {
        "kept after the forward": {"reshard_after_forward": False},
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
    }
    packed = {} if draw["frozen"] == "in its dtype" else {"frozen_dtype": draw["frozen"]}
    return {"mp_policy": policy, **manners.get(draw["sharding"], {}), **packed}


def _model(draw: Draw, folder: Path, mesh: Any, *, seed: int) -> Any:
    source = folder / "base"
    words = draw["sac"].split()
    offload, keeps = "offloaded" in words, options.kept_name(draw) if "operations" in words else None
    ratio: Any = 1 if words[0] == "operations" else int(words[0]) if words[0] in ("0", "1") else words[0]
    # One half with the lengths left open from the start, which spares half of the compiling.
    manner: dict[str, Any] = {"fullgraph": True, "dynamic": True} if draw["compile"] == "fullgraph" else {}
    config = options.adapter_config(draw)
    if draw["start"] == "load_pretrained":
        common: dict[str, Any] = {
            "mesh": mesh,
            "sac_ratio": ratio,
            "compile": draw["compile"] != "no",
            **_sharding(draw),
        }
        shards = mesh["dp_shard"].size() if "dp_shard" in (mesh.mesh_dim_names or ()) else 1
        sharing = int(draw["expert ranks"])
        if sharing > 1 and not shards % sharing:  # on other ranks, perhaps none share
            common["ep_size"] = sharing
        if config is not None:
            common |= {"peft_config": config, "adapter_seed": seed}
        if draw["vocabulary"] == "grown":
            common["new_vocab_size"] = architectures.GROWN
        known = inspect.signature(fs.load_pretrained).parameters.keys()
        if common.keys() <= known and keeps is None and not offload:
            return fs.load_pretrained(source, **common)
        return composed(source, **common, sac={"save": keeps, "offload": offload})
    model: Any
    if draw["start"] == "meta":
        model = fs.build_meta_model(
            source, new_vocab_size=architectures.GROWN if draw["vocabulary"] == "grown" else None
        )
        fs.freeze_towers(model)
    else:
        model = architectures.read(source, draw["architecture"])
    if draw["adapted by"] == "peft":
        from peft import get_peft_model

        torch.manual_seed(seed)  # the same on every rank, as the caller has to see to
        model = get_peft_model(model, config)
    elif config is not None:
        model = fs.add_adapters(model, config, seed=seed)
    if ratio:
        fs.apply_sac(model, ratio, save=keeps, offload=offload)
    if draw["compile"] != "no":
        fs.compile_blocks(model, backend="aot_eager", **manner)
    if draw["mesh"] == "torch DDP 2":
        return nn.parallel.DistributedDataParallel(model.to(device_here()).train())
    if mesh is not None:
        fs.shard_model(model, mesh=mesh, **_sharding(draw))
    if draw["start"] == "meta":
        fs.load_weights(model, source)
    if mesh is None:
        model.to(device_here())
    return model.train()


def _tensors(model: nn.Module, *, buffers: bool = True) -> Tensors:
    return {
        name: full(tensor).detach().clone()
        for name, tensor in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    }


def _keep_gradients(told: Told, model: nn.Module, *_: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in told.trained.gradients and len(told.windows) == 1:
            told.trained.gradients[name] = full(parameter.grad).detach().clone()


def _export(draw: Draw, folder: Path, model: Any) -> Path:
    out = folder / "exported"
    if draw["export"] == "into a full folder":
        if dist.get_rank() == 0:
            out.mkdir()
            (out / "notes.txt").write_text("of the caller")
        dist.barrier()
    return fs.export_hf(model, out, dtype=torch.float32 if draw["export"] == "float32" else torch.bfloat16)
