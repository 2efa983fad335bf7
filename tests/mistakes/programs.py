"""Mistakes that only whole programs, processes, files and pages show."""

from tests.mistakes.mistake import Mistake

EXAMPLES = "../../examples/"
MISTAKES = [
    Mistake(
        "what a template printed yesterday stays beside what it prints today",
        "collate/template.py",
        "if known.get(key, found) != found or len(known) >= _MAX_SKELETONS:",
        "if len(known) >= _MAX_SKELETONS:",
        ("tests/collate/test_options.py",),
    ),
    Mistake(
        "the timer of the caller's profiler is lost",
        "collate/template.py",
        "signal.setitimer(signal.ITIMER_PROF, *timer)",
        "signal.setitimer(signal.ITIMER_PROF, 0)",
        ("tests/collate/test_template_limits.py",),
    ),
    Mistake(
        "a file of JSON that holds one row is read as its keys",
        "commands/data.py",
        "if not isinstance(rows, list):",
        "if not isinstance(rows, (list, dict)):",
        ("tests/commands/test_commands.py",),
    ),
    Mistake(
        "a full state with two values of a tied tensor loads one of them",
        "dcp_io/full_state.py",
        "for part in parts.values()}) > 1:",
        "for part in parts.values()}) > 2:",
        ("tests/dcp_io/test_full_state.py",),
    ),
    Mistake(
        "a loader's workers die of the scheduler's signal",
        "jobs/preemption.py",
        "before = signal.pthread_sigmask(signal.SIG_BLOCK, guarded)",
        "before = signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        ("tests/jobs/test_preemption.py",),
    ),
    Mistake(
        "the program of a plan begins anew after a kill",
        "planner/command.py",
        "        step = loaded.step\n",
        "        step = 0\n",
        ("tests/planner/test_program.py",),
    ),
    Mistake(
        "the worked example of a step's memory is another replay's",
        "planner/replay.py",
        "gather head   171",
        "gather head   172",
        ("tests/planner/test_replay.py",),
    ),
    Mistake(
        "the example computes in the precision of its own CPU, whatever the other ranks have",
        f"{EXAMPLES}minimal_sft.py",
        'fs.aggregate_metrics({"fast": 1 if is_fast else 0}, reduce="min")',
        '{"fast": 1 if is_fast else 0}',
        ("tests/test_example.py",),
    ),
    Mistake(
        "a model is verified with so little padding that a slow dependence is below rounding",
        "sampling/verify.py",
        "max(padded, _TOKENS + 1)",
        "_TOKENS + 1",
        ("tests/sampling/test_padding.py",),
    ),
    Mistake(
        "a pipe in place of a file is waited for",
        "_tensors/safetensors.py",
        "if not stat.S_ISREG(os.fstat(fd).st_mode):",
        "if stat.S_ISDIR(os.fstat(fd).st_mode):",
        ("tests/tensors/test_safetensors.py",),
    ),
    Mistake(
        "what an evaluation has left gathered is saved as it is",
        "_compat/fsdp.py",
        "        type(module).reshard(module)  # of this module",
        "        pass  # of this module",
        ("tests/test_default_path.py",),
    ),
    Mistake(
        "an encoder-decoder is trained as a causal language model",
        "loss/prepare.py",
        '"is_encoder_decoder", False):',
        '"is_a_causal_language_model", False):',
        ("tests/weights/test_architectures.py::test_an_encoder_decoder_is_refused_by_name",),
    ),
    Mistake(
        "an index leads a load out of its folder",
        "weights/resolve.py",
        "    if not is_inside:\n",
        "    if not (is_inside or real.is_file()):\n",
        ("tests/weights/test_faults.py",),
    ),
    Mistake(
        "a load copies 64 MiB at once on each thread",
        "_tensors/stored.py",
        "_COPIED_BYTES = 1 << 18",
        "_COPIED_BYTES = 1 << 26",
        ("tests/weights/test_memory.py",),
    ),
    Mistake(
        "a checkpoint has its name before its manifest",
        "dcp_io/folder.py",
        "    write_bytes(temporary / MANIFEST_NAME, encode_manifest(replace(manifest, files=files)))\n"
        "    publish(temporary, target, aside=unsound_beside(target))\n",
        "    publish(temporary, target, aside=unsound_beside(target))\n"
        "    write_bytes(target / MANIFEST_NAME, encode_manifest(replace(manifest, files=files)))\n",
        ("tests/faults/test_checkpoints.py",),
    ),
    Mistake(
        "a private name of torch is imported where no test asks each version for it",
        "step/update.py",
        "from fsdp_sft._compat.modules import found_infs",
        "from torch.nn.modules.module import _global_forward_hooks\n"
        "from fsdp_sft._compat.modules import found_infs",
        ("tests/test_surface.py",),
    ),
    Mistake(
        "an attribute of FSDP2 is used that no test asks each version for",
        "_compat/__init__.py",
        "_init_mp_dtypes device fsdp_params",
        "device fsdp_params",
        ("tests/compat/test_private_names.py",),
    ),
    Mistake(
        "a simulated rank may use the device of another",
        "../../tests/simulated/device.py",
        "for index in touched if index != self.index]",
        "for index in touched if index < 0]",
        ("tests/simulated/test_harness.py",),
    ),
    Mistake(
        "the page of plans has a figure that the planner does not give",
        "../../docs/how-to/plan-a-run.md",
        "| none | 61.3 | 3.4 s |",
        "| none | 60.3 | 3.4 s |",
        ("tests/test_docs.py",),
    ),
    Mistake(
        "a room has a ceiling above what it holds",
        "../../tests/budget.toml",
        "root = { statements = 90,",
        "root = { statements = 95,",
        ("tests/test_size.py",),
    ),
]
