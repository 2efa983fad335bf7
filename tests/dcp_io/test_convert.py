"""Checkpoints of Accelerate, torchtitan, torchtune and torch, converted bit by bit at any number of ranks."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import fsdp_sft as fs
from fsdp_sft import dcp_io
from fsdp_sft._tensors.boxes import whole
from tests.faults.hostile import Marker
from tests.harness import launches
from tests.harness.device import device_here, mesh_here
from tests.harness.forks import Program
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, train

Entries = dict[str, Any]


def _trained(family: str) -> tuple[Any, torch.optim.Optimizer]:
    """By torch alone: blocks and root, two groups of an AdamW, two steps."""
    fs.init_distributed()
    model = tiny_model(family)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh_here())
    fully_shard(model, mesh=mesh_here())
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95))
    train(model, optimizer, 0, 2)
    return model, optimizer


def _state(model: Any, optimizer: torch.optim.Optimizer) -> Entries:
    state = {f"model/{name}": full(p).detach() for name, p in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}/{key}": full(value) for key, value in optimizer.state[parameter].items()}
    for group in optimizer.param_groups:
        decayed = bool(group["weight_decay"])
        state |= {f"{key} {decayed}": group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return state


def _plugin(kind: str) -> Any:
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

    return SimpleNamespace(
        fsdp_version=2,
        state_dict_type=getattr(StateDictType, kind),
        state_dict_config=SimpleNamespace(offload_to_cpu=True, rank0_only=False),
        optim_state_dict_config=None,
        cpu_offload=False,
    )


def _save_accelerate(folder: str, family: str, kind: str) -> Entries:
    """By Accelerate's own functions."""
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    model, optimizer = _trained(family)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, and not used: they have met
    PartialState(cpu=True)
    here = SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank(), is_fsdp2=True)
    save_fsdp_model(_plugin(kind), here, model, folder)
    save_fsdp_optimizer(_plugin(kind), here, optimizer, model, folder)
    if dist.get_rank() == 0:
        Path(folder, "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    return _state(model, optimizer)


# What torchtitan's and torchtune's own converters do, written out: rows of a head, halves or neighbours.
def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, *rest = weight.shape
    return weight.view(heads, 2, rows // heads // 2, *rest).transpose(1, 2).reshape(weight.shape)


TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}
TUNE = {
    **TITAN,
    "model.norm.weight": "norm.scale",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "self_attn.q_norm.weight": "attn.q_norm.scale",
    "self_attn.k_norm.weight": "attn.k_norm.scale",
    "mlp.gate_proj": "mlp.w1",
    "mlp.up_proj": "mlp.w3",
    "mlp.down_proj": "mlp.w2",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}


def _renamed(name: str, words: dict[str, str]) -> str:
    for ours in sorted(words, key=len, reverse=True):
        name = name.replace(ours, words[ours])
    return name


def _theirs(model: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    if model.config.model_type != "llama" or value.ndim < 2:
        return full(value).clone()
    if name.endswith("q_proj.weight"):
        return _neighbours(full(value), model.config.num_attention_heads)
    if name.endswith("k_proj.weight"):
        return _neighbours(full(value), model.config.num_key_value_heads)
    return full(value).clone()


def _save_titan(folder: str, family: str, tune: bool) -> Entries:
    """One folder; options of the optimizer by parameter, as torchtitan flattens them, or by group."""
    model, optimizer = _trained(family)
    words = TUNE if tune else TITAN
    names = {name: _renamed(name, words) for name, _ in model.named_parameters()}
    name_of = {p: name for name, p in model.named_parameters()}
    weights = {names[name]: _theirs(model, name, p.detach()) for name, p in model.named_parameters()}
    groups = [
        {**group, "params": [names[name_of[p]] for p in group["params"]]} for group in optimizer.param_groups
    ]
    states = {
        names[name]: {key: _theirs(model, name, value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }
    if tune:
        everything: Entries = {"model": weights, "optimizer": {"state": states, "param_groups": groups}}
        everything |= {"steps_run": 9, "seed": 7}
    else:
        flat = {f"state.{n}.{key}": value for n, own in states.items() for key, value in own.items()}
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            flat |= {f"param_groups.{n}.{key}": v for n in group["params"] for key, v in options.items()}
        everything = {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(7)}}
        everything |= {"lr_scheduler": {"last_epoch": 7}, "dataloader": {"dp_rank_0": pickle.dumps([1])}}
    dcp.save(everything, checkpoint_id=folder)
    return _state(model, optimizer)


def _save_plain(folder: str, family: str) -> Entries:
    model, optimizer = _trained(family)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return _state(model, optimizer)


class _App(Stateful):
    """What torch's recipe for distributed checkpoints saves as one object."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> Entries:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: Entries) -> None:
        raise NotImplementedError


def _save_recipe(folder: str, family: str) -> Entries:
    model, optimizer = _trained(family)
    dcp.save({"app": _App(model, optimizer)}, checkpoint_id=folder)
    return _state(model, optimizer)


def _save_optimizers(folder: str, family: str) -> Entries:
    model, optimizer = _trained(family)
    state = {"model": get_model_state_dict(model), "optimizers": get_optimizer_state_dict(model, optimizer)}
    dcp.save({**state, "global_step": 3}, checkpoint_id=folder)
    return _state(model, optimizer)


def _convert(source: str, target: str, family: str, options: Entries, on_meta: bool) -> str:
    fs.init_distributed()
    with torch.device("meta" if on_meta else "cpu"):
        model = tiny_model(family, seed=4)
    before = {} if on_meta else {name: p.clone() for name, p in model.state_dict().items()}
    if dist.get_world_size() > 1:
        fs.shard_model(model, mesh=mesh_here())
    path = fs.convert_checkpoint(source, target, model=model, **options)
    if not on_meta:  # only looked at
        assert_same({name: full(p) for name, p in model.state_dict().items()}, before)
    assert dcp_io.verify_checkpoint(path) == []
    return str(path)


def _load(root: str, family: str) -> Entries:
    fs.init_distributed()
    model = tiny_model(family, seed=8)
    fs.shard_model(model, mesh=mesh_here())
    weights = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    loaded = fs.load_checkpoint(root, model=model, optimizer=optimizer)
    assert loaded.rank_state is None
    return _state(model, optimizer)


SOURCES: dict[str, tuple[Any, tuple[Any, ...], Entries, int]] = {
    "accelerate, sharded": (_save_accelerate, ("SHARDED_STATE_DICT",), {}, 500),
    "accelerate, full": (_save_accelerate, ("FULL_STATE_DICT",), {"allow_pickle": True}, 500),
    "torchtitan": (_save_titan, (False,), {}, 7),
    "torchtune": (_save_titan, (True,), {}, 0),
    "torch": (_save_plain, (), {"format": "dcp"}, 0),
    "torch's recipe": (_save_recipe, (), {}, 0),
    "optimizers": (_save_optimizers, (), {}, 3),
}


@pytest.mark.parametrize(
    ("tool", "family", "ranks", "on_meta"),
    [
        *((tool, "llama", 2, False) for tool in SOURCES),
        ("torchtitan", "qwen3", 2, False),
        ("torchtune", "qwen3", 2, True),
        ("torchtitan", "llama", 3, True),
        ("accelerate, sharded", "llama", 1, True),
    ],
)
def test_what_another_tool_wrote_comes_bit_by_bit(
    tool: str, family: str, ranks: int, on_meta: bool, tmp_path: Path
) -> None:
    save, more, options, step = SOURCES[tool]
    source, target = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected = run_distributed(save, 2, source, family, *more)[0]
    assert len(expected) > 60
    paths = run_distributed(_convert, ranks, source, target, family, options, on_meta)
    assert set(paths) == {f"{target}/step-{step}"}
    found = run_distributed(_load, 2, target, family)[0]
    assert_same(found, expected)


def _refused(root: str) -> None:
    fs.init_distributed()
    cases: list[tuple[str, Entries, type[Exception], str]] = [
        ("nothing", {}, fs.CheckpointNotFoundError, "pytorch_model_fsdp_0/.metadata"),
        ("theirs", {"format": "zip"}, ValueError, "format must be one of"),
        ("full", {}, fs.CheckpointFormatError, "allow_pickle=True"),
        ("hostile", {}, fs.CheckpointCorruptError, "which no such metadata needs"),
        ("objects", {}, fs.CheckpointFormatError, "could run any code"),
        ("cut", {}, fs.CheckpointCorruptError, "cannot be read"),
        ("lacking", {}, fs.CheckpointCorruptError, "elements|nowhere"),
    ]
    for name, options, kind, message in cases:
        model = tiny_model("llama")
        with pytest.raises(kind, match=message):
            fs.convert_checkpoint(Path(root, name), Path(root, "ours"), model=model, **options)
    with pytest.raises(fs.CheckpointMismatchError, match=r"are not in it.*are not the model's"):
        fs.convert_checkpoint(Path(root, "theirs"), Path(root, "ours"), model=tiny_model("gpt2"))
    with pytest.raises(fs.CheckpointMismatchError, match=r"torch\.float32"):  # it would be rounded
        fs.convert_checkpoint(Path(root, "theirs"), Path(root, "ours"), model=tiny_model("llama").bfloat16())
    with pytest.raises(ValueError, match="pass key_map"):
        fs.convert_checkpoint(Path(root, "titan"), Path(root, "ours"), model=tiny_model("mixtral"))
    assert not Path(root, "ran").exists()
    assert not list(Path(root, "ours").glob("*step*"))


def test_what_cannot_be_converted_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    import shutil

    run_distributed(_save_plain, 2, str(tmp_path / "theirs"), "llama")
    run_distributed(_save_titan, 2, str(tmp_path / "titan"), "llama", False)
    run_distributed(_save_accelerate, 2, str(tmp_path / "full"), "llama", "FULL_STATE_DICT")
    for name in ("hostile", "objects", "cut", "lacking"):
        shutil.copytree(tmp_path / "theirs", tmp_path / name)
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps(Marker(tmp_path / "ran")))
    metadata = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    key = "optimizer.param_groups.0.lr"
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    path = tmp_path / "objects" / place.relative_path
    data = path.read_bytes()
    torch.save(Marker(tmp_path / "ran"), tmp_path / "saved")
    place.offset, place.length = len(data), (tmp_path / "saved").stat().st_size
    path.write_bytes(data + (tmp_path / "saved").read_bytes())
    (tmp_path / "objects" / ".metadata").write_bytes(pickle.dumps(metadata))
    for path in (tmp_path / "cut").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    lacking = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    lacking.state_dict_metadata["model.lm_head.weight"].chunks.pop()
    (tmp_path / "lacking" / ".metadata").write_bytes(pickle.dumps(lacking))
    run_distributed(_refused, 1, str(tmp_path))


def _with_map(root: str) -> None:
    fs.init_distributed()
    model = tiny_model("llama", seed=4)
    original = tiny_model("llama").state_dict()

    def ours(name: str) -> str | None:
        return None if name == "net.counter" else name.removeprefix("net.")

    fs.convert_checkpoint(Path(root, "named"), Path(root, "ours"), model=model, key_map=ours)
    fs.load_checkpoint(Path(root, "ours"), model=model)
    assert_same(model.state_dict(), original)
    # A mapping adds to the table of a tool that is known, and rows are put in order as without one.
    with pytest.raises(fs.CheckpointMismatchError, match=r"1 are not the model's \(counter\)"):
        fs.convert_checkpoint(Path(root, "titan"), Path(root, "again"), model=model)
    fs.convert_checkpoint(Path(root, "titan"), Path(root, "again"), model=model, key_map={"counter": None})
    again = tiny_model("llama", seed=4)
    fs.load_checkpoint(Path(root, "again"), model=again)
    assert_same(again.state_dict(), original)
    for wrong in (["net"], "net", {"counter": 3}, {3: None}):
        with pytest.raises(TypeError, match="key_map must be"):
            fs.convert_checkpoint(Path(root, "titan"), Path(root, "again"), model=model, key_map=wrong)


def _save_named(root: str) -> None:
    fs.init_distributed()
    model = tiny_model("llama")
    named = {f"net.{name}": p.detach() for name, p in model.named_parameters()}
    dcp.save({**named, "net.counter": torch.tensor(3)}, checkpoint_id=f"{root}/named")
    titan = {_renamed(name, TITAN): _theirs(model, name, p.detach()) for name, p in model.named_parameters()}
    more = {"counter": torch.tensor(3), "freqs_cis": torch.ones(4)}
    dcp.save({**titan, **more}, checkpoint_id=f"{root}/titan")


def test_names_of_any_tool_by_a_map(tmp_path: Path) -> None:
    run_distributed(_save_named, 1, str(tmp_path))
    run_distributed(_with_map, 1, str(tmp_path))


def test_the_command_line(tmp_path: Path) -> None:
    source, target = tmp_path / "theirs", tmp_path / "ours"
    run_distributed(_save_accelerate, 2, str(source), "llama", "SHARDED_STATE_DICT")
    tiny_model("llama").save_pretrained(tmp_path / "model")

    script = tmp_path / "command.py"  # as `fsdp-sft`, without the seconds of its imports
    script.write_text("import sys\nfrom fsdp_sft.commands import main\nsys.exit(main())\n")

    def run(*words: Any) -> tuple[int | None, str]:
        return Program(script, *map(str, words), environment=launches.environment()).wait()

    code, text = run("convert", source, target, "--model", tmp_path / "model")
    assert (code, f"{target / 'step-500'} is written" in text) == (0, True), text
    code, text = run("inspect-checkpoint", target)
    assert (code, "step-500: sound" in text) == (0, True)
    code, text = run("inspect-checkpoint", target / "step-500", "--verify")
    assert code == 0
    assert "AdamW" in text
    assert "contents compared with checksums" in text
    (target / "step-500" / "MANIFEST.json").unlink()
    code, text = run("inspect-checkpoint", target / "step-500")
    assert (code, "load the step before it" in text) == (1, True)
    code, text = run("convert", tmp_path, target, "--model", tmp_path / "model")
    assert (code, "no checkpoint of another tool" in text) == (2, True)
    code, text = run("inspect-checkpoint", tmp_path / "nowhere")
    assert (code, "there is no folder" in text) == (2, True)


def _save_others(root: str) -> None:
    """What is not Adam, or not of one model: each in Accelerate's folders."""
    fs.init_distributed()
    kinds = {
        "radam": lambda own: torch.optim.RAdam(own),
        "momentum": lambda own: torch.optim.SGD(own, momentum=0.9),
        "sgd": lambda own: torch.optim.SGD(own),
        "lion": lambda own: torch.optim.AdamW(own),
        "untied": lambda own: torch.optim.AdamW(own),
        "steps": lambda own: torch.optim.AdamW(own),
        "braces": lambda own: torch.optim.AdamW(own),
    }
    for name, make in kinds.items():
        model = tiny_model("llama", tie_word_embeddings=False).to(device_here())
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        optimizer = make(model.parameters())
        train(model, optimizer, 0, 1)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        state = get_optimizer_state_dict(model, optimizer)
        weights = get_model_state_dict(model)
        if name == "lion":
            for entries in state["state"].values():
                del entries["exp_avg_sq"]
        if name == "braces":
            weights["model.layers.0.a{b}.weight"] = torch.ones(2)
        dcp.save({"model": weights}, checkpoint_id=f"{root}/{name}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": state}, checkpoint_id=f"{root}/{name}/optimizer_0")
    Path(root, "steps", "trainer_state.json").write_text('{"global_step": -3}')


def _refuse_others(root: str) -> None:
    fs.init_distributed()
    for name, message in {
        "radam": "not torch's Adam or AdamW",
        "momentum": "not torch's Adam or AdamW.*momentum",
        "sgd": "not torch's Adam or AdamW.*lacks the options",
        "lion": r"not torch's Adam or AdamW.*\['exp_avg', 'step'\]",
        "untied": "parameters twice",
        "braces": r"a\{b\}",
    }.items():
        model = tiny_model("llama", tie_word_embeddings=name == "untied")
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.convert_checkpoint(Path(root, name), Path(root, "ours"), model=model)
    with pytest.raises(fs.CheckpointCorruptError, match="no number of steps"):
        fs.convert_checkpoint(Path(root, "steps"), Path(root, "ours"), model=tiny_model("llama"))
    model = tiny_model("llama")
    counting = {"get_extra_state": lambda self: {"count": 3}, "set_extra_state": lambda self, state: None}
    model.__class__ = type("Counting", (type(model),), counting)
    with pytest.raises(fs.CheckpointMismatchError, match="state that is no tensor"):
        fs.convert_checkpoint(Path(root, "lion"), Path(root, "ours"), model=model)
    Path(root, "file").touch()
    with pytest.raises(NotADirectoryError):
        fs.convert_checkpoint(Path(root, "lion"), Path(root, "file"), model=tiny_model("llama"))
    assert not Path(root, "ours").exists()


def test_other_optimizers_and_other_models_are_refused(tmp_path: Path) -> None:
    run_distributed(_save_others, 1, str(tmp_path))
    run_distributed(_refuse_others, 1, str(tmp_path))


METADATA_DAMAGE: dict[str, Any] = {
    "a length of a petabyte": lambda info: setattr(info, "length", 10**15),
    "no length": lambda info: setattr(info, "length", None),
    "a length below zero": lambda info: setattr(info, "length", -1),
    "an offset past any": lambda info: setattr(info, "offset", 10**30),
    "no path": lambda info: setattr(info, "relative_path", None),
    "a path outside": lambda info: setattr(info, "relative_path", "../../__0_0.distcp"),
}


def test_damaged_metadata_is_a_typed_error(tmp_path: Path) -> None:
    from fsdp_sft.dcp_io.foreign.open import open_foreign

    source = tmp_path / "named"
    run_distributed(_save_named, 1, str(tmp_path))
    sound = (source / ".metadata").read_bytes()
    wanted = {f"net.{name}" for name, _ in tiny_model("llama").named_parameters()} | {"net.counter"}
    assert open_foreign(source, "auto", allow_pickle=False).model.keys() == wanted
    for name, damage in METADATA_DAMAGE.items():
        metadata = pickle.loads(sound)
        for info in metadata.storage_data.values():
            damage(info)
        (source / ".metadata").write_bytes(pickle.dumps(metadata))
        tensor = open_foreign(source, "auto", allow_pickle=False).model["net.lm_head.weight"]
        if name == "a path outside":  # names of files count, not folders
            assert tensor.read(whole(tensor.shape)).shape == tensor.shape
            continue
        with pytest.raises(fs.CheckpointCorruptError, match="cannot be read"):
            tensor.read(whole(tensor.shape))
    metadata = pickle.loads(sound)
    named = metadata.state_dict_metadata
    named["step"] = named["net.lm_head.weight"]
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == "net.lm_head.weight":
            metadata.storage_data[replace(index, fqn="step")] = info
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fs.CheckpointFormatError, match="'step' has the shape"):
        open_foreign(source, "auto", allow_pickle=False)
    metadata = pickle.loads(sound)
    for entry in metadata.state_dict_metadata.values():
        entry.properties.dtype = None
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fs.CheckpointCorruptError, match="no dtype"):
        open_foreign(source, "auto", allow_pickle=False)
