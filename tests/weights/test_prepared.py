"""A prepared base model is bitwise the loaded one on any ranks; many may prepare it, one may be killed."""

import inspect
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft import dcp_io
from fsdp_sft.weights import prepare as prepared
from fsdp_sft.weights.digest import source_digest
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, state_of, tensors_of
from tests.harness.models import tiny_model
from tests.harness.poison import poisoned
from tests.harness.ranks import RankFailedError, run_distributed

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

HSDP = {"dp_replicate": 2}
FAMILIES = ["llama", "qwen2-tied", "mixtral", "gpt2", "gemma3", "t5"]


def _rank() -> int:
    return torch.distributed.get_rank()


def _prepare(root: str, families: list[str]) -> dict[str, str]:
    mesh = mesh_here()
    paths = {}
    for family in families:
        path = fs.prepare_base(f"{root}/{family}", f"{root}/cache", mesh=mesh)
        paths[family] = str(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(prepared, "load_weights")  # once is enough
            assert fs.prepare_base(f"{root}/{family}", f"{root}/cache", mesh=mesh) == path
    return paths


def _compare(root: str, paths: dict[str, str], mesh_shape: dict[str, int]) -> None:
    mesh = mesh_here(**mesh_shape)
    for family, path in paths.items():
        torch.manual_seed(5)
        rng = torch.get_rng_state()
        policy = MixedPrecisionPolicy()  # as buffers have the dtype that is computed in
        model = fs.load_prepared(path, mesh=mesh, master_dtype=torch.float32, mp_policy=policy)
        assert torch.equal(torch.get_rng_state(), rng)
        assert difference(model, plain(Path(root, family))) == [], family
        direct = fs.load_pretrained(f"{root}/{family}", mesh=mesh, mp_policy=policy)
        assert difference(model, direct) == [], family
        assert type(model).__name__ == type(direct).__name__
        assert model.config.to_dict() == direct.config.to_dict()
        assert model.name_or_path == direct.name_or_path
        assert str(model.load_report.strategy) == "prepared"
        assert model.load_report.job_bytes_read >= model.load_report.bytes_read > 0
        for name, other in (("prepared", model), ("direct", direct)):
            fs.export_hf(
                other, f"{root}/out-{torch.distributed.get_world_size()}-{family}-{name}", dtype=None
            )
        if _rank() == 0:
            exported = [
                tensors_of(Path(root, f"out-{torch.distributed.get_world_size()}-{family}-{name}"))
                for name in ("prepared", "direct")
            ]
            assert exported[0].keys() == exported[1].keys(), family
            assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


@pytest.mark.slow
def test_bitwise_the_loaded_model_on_any_ranks(tmp_path: Path) -> None:
    for family in FAMILIES:
        save_tiny(tmp_path / family, family)
    paths = run_distributed(_prepare, 2, str(tmp_path), FAMILIES)[0]
    assert len(set(paths.values())) == len(FAMILIES)
    run_distributed(_compare, 1, str(tmp_path), paths, {})
    run_distributed(_compare, 2, str(tmp_path), paths, {})
    run_distributed(_compare, 4, str(tmp_path), paths, HSDP)


def _special(root: str) -> None:
    """Kept in float32 under bfloat16 masters, untied though the config ties, with sac, on one replica."""
    mesh = mesh_here()
    for family in ("t5", "untied"):
        path = fs.prepare_base(f"{root}/{family}", f"{root}/cache", mesh=mesh, master_dtype=torch.bfloat16)
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}
        if family == "untied":
            options["sac_ratio"] = "1/2"
        model = fs.load_prepared(path, mesh=mesh, **options)
        direct = fs.load_pretrained(f"{root}/{family}", mesh=mesh, master_dtype=torch.bfloat16, **options)
        assert difference(model, direct) == []
    with torch.no_grad():
        ids = torch.arange(8).reshape(1, 8)
        assert torch.equal(model(input_ids=ids).logits, direct(input_ids=ids).logits)
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" in names


def _refusals(root: str) -> None:
    mesh = mesh_here()
    path = fs.prepare_base(f"{root}/llama", f"{root}/cache", mesh=mesh)
    half = fs.prepare_base(f"{root}/llama", f"{root}/cache", mesh=mesh, master_dtype=torch.bfloat16)
    assert half != path
    with pytest.raises(fs.CheckpointMismatchError, match=r"prepared in torch.float32, not torch.bfloat16"):
        fs.load_prepared(path, mesh=mesh, master_dtype=torch.bfloat16)
    with pytest.raises(fs.CheckpointFormatError, match="is a prepared base already: load_prepared reads it"):
        fs.prepare_base(path, f"{root}/cache", mesh=mesh)
    with pytest.raises(fs.CheckpointFormatError, match="is a prepared base, which has no variant='fp16'"):
        fs.load_weights(fs.shard_model(fs.build_meta_model(path), mesh=mesh), path, variant="fp16")
    with pytest.raises(fs.CheckpointNotFoundError, match="prepare_base makes one"):
        fs.load_prepared(f"{root}/nothing", mesh=mesh)
    fs.save_checkpoint(f"{root}/steps", 1, model=fs.load_prepared(path, mesh=mesh), train_state={"a": 1})
    with pytest.raises(fs.CheckpointMismatchError, match="was not made by prepare_base"):
        fs.load_prepared(f"{root}/steps/step-1", mesh=mesh)
    torch.distributed.barrier()
    if _rank() == 0:
        victim = path / "shards" / "00001.safetensors"
        data = bytearray(victim.read_bytes())
        data[-9] ^= 4
        victim.write_bytes(data)
    torch.distributed.barrier()
    for load in (fs.load_prepared, fs.load_pretrained):
        with pytest.raises(fs.CheckpointCorruptError, match=r"SHA-256 differs.*prepare_base again"):
            load(path, mesh=mesh)
    torch.distributed.barrier()
    if _rank() == 0:
        victim.unlink()
    torch.distributed.barrier()
    assert fs.prepare_base(f"{root}/llama", f"{root}/cache", mesh=mesh) == path  # it is seen to be unsound
    assert dcp_io.verify_checkpoint(path) == []
    changed = Path(root, "llama", "model.safetensors")
    if _rank() == 0:
        tensors = tensors_of(Path(root, "llama"))
        rewrite(Path(root, "llama"), {name: tensor + 1 for name, tensor in tensors.items()})
    torch.distributed.barrier()
    assert changed.exists()
    other = fs.prepare_base(f"{root}/llama", f"{root}/cache", mesh=mesh)
    assert other != path
    assert difference(fs.load_prepared(other, mesh=mesh), plain(Path(root, "llama"))) == []
    left = [name for name in os.listdir(f"{root}/cache") if name.startswith(".tmp")]
    assert left == []


def _failing(root: str) -> None:
    mesh = mesh_here()

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if _rank() == 1:
            patch.setattr("fsdp_sft.dcp_io.folder.write_tensors", full_disk)
        with pytest.raises(OSError, match="No space left"):
            fs.prepare_base(f"{root}/gpt2", f"{root}/cache", mesh=mesh)
    torch.distributed.barrier()
    assert not [name for name in os.listdir(f"{root}/cache") if "gpt2" in name and ".claim" not in name]


def _all_on_two_ranks(root: str) -> None:
    _special(root)
    _failing(root)
    _refusals(root)


def test_special_models_and_refusals(tmp_path: Path) -> None:
    for family in ("llama", "t5", "gpt2"):
        save_tiny(tmp_path / family, family)
    tied = tiny_model("qwen2-tied", dtype=torch.bfloat16)
    tied.save_pretrained(tmp_path / "untied")
    tensors = tensors_of(tmp_path / "untied")
    name = next(name for name in tensors if "embed_tokens" in name)
    rewrite(tmp_path / "untied", {**tensors, "lm_head.weight": tensors[name] + 1})
    run_distributed(_all_on_two_ranks, 2, str(tmp_path))


def _one_of_several_jobs(root: str, number: int, how: str) -> str:
    """A job of one rank; notes when it loads the source."""
    load = prepared.load_weights

    def noted(*args: Any, **kwargs: Any) -> Any:
        Path(root, f"loaded-{number}").touch()
        time.sleep(1.0)
        return load(*args, **kwargs)

    prepared.load_weights = noted
    if how == "killed":
        write = dcp_io.folder.write_tensors

        def killed(path: Path, tensors: Any, metadata: Any) -> Any:
            write(path, dict(list(tensors.items())[:3]), metadata)
            os.kill(os.getpid(), signal.SIGKILL)

        dcp_io.folder.write_tensors = killed
    path = fs.prepare_base(f"{root}/llama", f"{root}/cache", mesh=mesh_here())
    assert dcp_io.verify_checkpoint(path) == []
    model = fs.load_prepared(path, mesh=mesh_here())
    assert difference(model, plain(Path(root, "llama"))) == []
    return str(path)


def _jobs_at_once(root: Path, count: int) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count) as pool:
        started = [
            pool.submit(run_distributed, _one_of_several_jobs, 1, str(root), number, "")
            for number in range(count)
        ]
        return [job.result()[0] for job in started]


def test_jobs_that_start_at_once_prepare_once(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama")
    with pytest.raises(RankFailedError, match="exit codes"):
        run_distributed(_one_of_several_jobs, 1, str(tmp_path), 9, "killed")
    left = sorted(os.listdir(tmp_path / "cache"))
    assert [name[:5] for name in left] == [".clai", ".tmp-"]
    (path, *others) = _jobs_at_once(tmp_path, 3)
    assert others == [path, path]
    assert len(list(tmp_path.glob("loaded-[0-2]"))) == 1, "the others wait for the first"
    assert sorted(os.listdir(tmp_path / "cache")) == [f".claim-{Path(path).name}", Path(path).name]


def test_the_digest_is_of_the_source_not_of_its_place(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama")
    shutil.copytree(folder, tmp_path / "elsewhere")  # keeps times of change

    def digest(where: str, dtype: torch.dtype = torch.float32) -> str:
        return source_digest(tmp_path / where, dtype, "error", False, False)

    before = digest("llama")
    assert digest("elsewhere") == before
    assert digest("llama", torch.bfloat16) != before
    weights = sorted(folder.glob("*.safetensors"))[0]
    os.utime(weights)
    assert digest("llama") != before
    times = os.stat(weights)
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    changed = digest("llama")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest("llama") not in (before, changed)
    # The module that an import finds: transformers puts a lazy one in its own place while it is imported.
    for module in (torch, sys.modules["transformers"]):  # an upgrade may make another model of the same files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "__version__", "99.0")
            assert digest("elsewhere") != before
    assert digest("elsewhere") == before
    config = tmp_path / "elsewhere" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert digest("elsewhere") != before
    assert state_of(plain(folder))


def test_all_that_does_not_speak_of_reading_can_be_said_here_too() -> None:
    direct = set(inspect.signature(fs.load_pretrained).parameters) - {"name_or_path", "revision"}
    assert set(inspect.signature(fs.load_prepared).parameters) - direct == {"path", "verify"}


def _with_adapters_and_overrides(root: Path) -> None:
    import peft

    mesh = mesh_here()
    path = fs.prepare_base(root / "gemma3", root / "cache", mesh=mesh)
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    for options in (
        {"peft_config": lora, "adapter_seed": 5},
        {"peft_config": lora, "frozen_dtype": torch.float32, "sac_ratio": "1/3"},
        {
            "config_overrides": {"attention_dropout": 0.25, "rms_norm_eps": 1e-4},
            "frozen_dtype": torch.bfloat16,
        },
        {"new_vocab_size": 110, "peft_config": lora},
    ):
        model = composed(path, mesh=mesh, **options)
        direct = composed(root / "gemma3", mesh=mesh, **options)
        assert difference(model, direct) == [], options
        assert model.config.to_dict() == direct.config.to_dict()
        assert model.name_or_path == direct.name_or_path == str(root / "gemma3")
        sources = dict(direct.load_report.sources)
        assert model.load_report.sources == sources
        if not options.keys() & {"adapter_seed", "config_overrides"}:
            for load in (fs.load_prepared, fs.load_pretrained):
                model = load(path, mesh=mesh, **options)
                assert difference(model, direct) == [], options
                assert model.load_report.strategy == "prepared"
    with pytest.raises(TypeError, match="no_such_field"):
        fs.build_meta_model(path, no_such_field=1)
    with pytest.raises(fs.CheckpointMismatchError, match="lm_head"):
        composed(path, mesh=mesh, config_overrides={"tie_word_embeddings": False})
    with pytest.raises(fs.CheckpointMismatchError, match=r"the model's .*shard it in torch.float32"):
        fs.load_pretrained(path, mesh=mesh, master_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"load_prepared takes no prefetch=: shard_model takes it"):
        fs.load_prepared(path, mesh=mesh, prefetch=2)


def test_adapters_and_overrides_on_a_prepared_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    save_tiny(tmp_path / "gemma3", "gemma3")
    with poisoned():
        run_distributed(_with_adapters_and_overrides, 2, tmp_path)


def test_what_was_prepared_unchecked_is_not_taken_for_checked(tmp_path: Path) -> None:
    tensors = tensors_of(save_tiny(tmp_path / "llama"))
    tensors["model.norm.weight"][3] = float("nan")
    rewrite(tmp_path / "llama", tensors)
    run_distributed(_prepare_unchecked, 1, tmp_path)


def _prepare_unchecked(root: Path) -> None:
    mesh = mesh_here()
    path = fs.prepare_base(root / "llama", root / "cache", mesh=mesh, check_finite=False)
    assert difference(fs.load_prepared(path, mesh=mesh), plain(root / "llama")) == []
    with pytest.raises(fs.CheckpointFormatError, match=r"model\.norm\.weight.*check_finite=False"):
        fs.prepare_base(root / "llama", root / "cache", mesh=mesh)
