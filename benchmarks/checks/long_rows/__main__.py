"""Rows that ranks share: how exact, beside what others do, what a rank stores and what it sends.

    OMP_NUM_THREADS=1 python -m benchmarks.checks.long_rows [--output FILE]

gloo ranks on this machine, tiny models with random weights. What others say needs
`pip install axolotl-ringmaster accelerate trl`; what is not there is left out.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.checks.long_rows import counted, exact
from benchmarks.checks.long_rows.counted import HEADS, LAYERS, TOKENS, Case, Counts
from benchmarks.checks.long_rows.jobs import FAMILIES, on_ranks, small_model
from benchmarks.checks.long_rows.refusals import CASES, message_of, package_of
from benchmarks.tables import publish, table

SEEDS, ROUNDING_ROWS = 8, [21, 40, 1, 33, 33]
CPS = (1, 2, 4)
COUNTED = [
    Case("varlen"),
    Case("varlen", sac="1/3"),
    Case("varlen", key_heads=2),
    Case("sdpa"),
    Case("sdpa", sac="1/3"),
]


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def exactness() -> list[str]:
    """Our errors and ringmaster's in float64; stops if ours are not rounding."""
    rows = []
    for family in FAMILIES:
        for batch, (loss, gradient) in on_ranks(2, exact.our_errors, family)[0].items():
            rows.append(["fsdp_sft", family, batch, f"{loss:.1e}", f"{gradient:.1e}"])
            if max(loss, gradient) > 1e-12:
                raise SystemExit(f"not exact: {rows[-1]}")
    ringmaster = installed("axolotl-ringmaster")
    for way in exact.RINGMASTER if ringmaster else ():
        for batch, (loss, gradient) in on_ranks(2, exact.ringmaster_errors, "Qwen3", way)[0].items():
            rows.append([f"ringmaster: {way}", "Qwen3", batch, f"{loss:.1e}", f"{gradient:.1e}"])
    return [
        f"## Loss and gradients on 2 ranks in float64, axolotl-ringmaster {ringmaster or 'not installed'}",
        "",
        "Beside every row by itself in one plain process: the loss's relative error, and the largest "
        "error of a parameter's gradient over that parameter's largest entry. ringmaster's raw region is "
        "documented for rows, not for packs. Its context manager makes the number of targets a rounded "
        "mean over ranks (`loss.py`, `round(global_valid.item())`): 27 targets on 2 ranks count as 28.",
        "",
        *table(["", "model", "batch", "loss", "largest of a gradient"], rows),
        "",
    ]


def rounding() -> list[str]:
    """Errors in 32 and 16 bits, beside those of a plain process; stops if there is more of it."""
    rows = []
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            one = on_ranks(2, exact.roundings, family, dtype, ROUNDING_ROWS, SEEDS)[0]
            ratio = one["gradients, shared"] / one["gradients, plain"]
            pairs = [f"{one[f'{what}, shared']:.1e} / {one[f'{what}, plain']:.1e}" for what in WHAT]
            apart = [f"{one['loss, apart']:.1e}", f"{one['largest, apart']:.1e}"]
            rows.append([family, str(dtype).removeprefix("torch."), *pairs, f"{ratio:.3f}", *apart])
            if ratio > 1.15:
                raise SystemExit(f"more rounding than in a plain process: {rows[-1]}")
    head = ["model", "compute", *(f"{what}: shared / plain" for what in WHAT.values()), "ratio of norms"]
    return [
        "## Rounding on 2 ranks",
        "",
        f"Root mean squares over {SEEDS} packs of {len(ROUNDING_ROWS)} rows. Errors from float64 with the "
        "same rounded weights, of ranks that share rows and of one plain process with sdpa; and how far "
        "these two are apart.",
        "",
        *table([*head, "loss apart", "largest apart"], rows),
        "",
    ]


WHAT = {"loss": "loss", "gradients": "norm of gradients", "largest": "largest of a gradient"}


def bytes_and_exchanges() -> list[str]:
    """Stored bytes and exchanged elements; stops if they are not by the formulas."""
    by_cp = {cp: on_ranks(cp, counted.measured, cp, COUNTED)[0] for cp in CPS}
    stored, sent = [], []
    for index, case in enumerate(COUNTED):
        name = [case.attention, f"{HEADS} / {case.key_heads}", case.sac]
        whole = by_cp[1][index].stored
        for cp in CPS:
            one: Counts = by_cp[cp][index]
            ratio = one.stored["activations"] * cp / whole["activations"]
            kinds = [f"{one.stored[kind]:,}" for kind in ("activations", "mask", "ids")]
            stored.append([*name, cp, *kinds, f"{ratio:.3f}"])
            if ratio > 1.10 and case.key_heads % cp == 0:
                raise SystemExit(f"more is stored than a part: {stored[-1]}")
            if cp > 1:
                sent.append([*name, cp, *_sent(cp, case, one)])
    name = ["attention", "query / key heads", "sac"]
    return [
        f"## What a rank stores for the backward of {TOKENS} tokens, {LAYERS} layers, bfloat16",
        "",
        "Distinct storages that autograd is given, parameters apart, in bytes. The mask of sdpa is that "
        "of the whole pack on each rank; ids are views of whole rows. The ratio is of activations, to "
        "cp=1's over cp. What sdpa stores more than a part is its output, which a plain forward shares "
        "with the next product's input.",
        "",
        *table([*name, "cp", "activations", "mask", "ids", "ratio"], stored),
        "",
        "## What a rank hands to `all_to_all_single`",
        "",
        "Elements a layer and forward by formula: (H + 2 K + H) S / cp, where H and K are query and key "
        "heads times their size, key heads repeated as they have to be; 1/cp of them stay on the rank. "
        "With H = K that is 4 S H / cp. The backward is the same again, and a layer that is recomputed "
        "runs its forward's exchanges once more.",
        "",
        *table([*name, "cp", "by formula", "forward: calls, elements", "backward: calls, elements"], sent),
        "",
    ]


def _sent(cp: int, case: Case, one: Counts) -> list[str]:
    each = counted.by_formula(cp, case)
    again = round(LAYERS * _fraction(case.sac))
    expected = {"forward": (2 * LAYERS, each * LAYERS)}
    expected["backward"] = (2 * (LAYERS + again), each * (LAYERS + again))
    if one.sent != expected:
        raise SystemExit(f"{case}, cp={cp}: {one.sent}, expected {expected}")
    return [f"{each:,} a layer", *(f"{calls}, {elements:,}" for calls, elements in one.sent.values())]


def _fraction(text: str) -> float:
    number, _, of = text.partition("/")
    return int(number) / int(of or 1)


def refusals() -> list[str]:
    """What others say, of those that are installed."""
    names = [name for name in CASES if installed(package_of(name))]
    packages = sorted({package_of(name) for name in names})
    versions = ", ".join(f"{package} {installed(package)}" for package in packages)
    rows = [[name, on_ranks(2, message_of, name)[0].replace("\n", " ").replace("|", "\\|")] for name in names]
    return [
        f"## What others say on 2 ranks ({versions})",
        "",
        "accelerate's state was told, after its own start, that its FSDP2 plugin is on, which it turns on "
        "for accelerators only. What ends in torch's attention has not been refused before.",
        "",
        *table(["", "message"], rows),
        "",
        "Read and not run, in accelerate 1.15.0: where a step goes on (on a GPU), a hook sets attention's "
        "mask to None and `is_causal=True` (`big_modeling.py`, 828 to 833), also for the packs that Trainer "
        'lets through. Without FSDP: "`cp_size > 1` specified in the `parallelism_config`, but no '
        '`fsdp_plugin` was provided" (`state.py`, 1000). `sp_size` is taken to DeepSpeed alone: "Deepspeed '
        'ALST/Ulysses requires deepspeed>=0.18.2" (`accelerator.py`, 2404); under it layers with linear '
        'attention are refused: "Sequence parallelism does not support attention layers of type" '
        "(`big_modeling.py`, 779).",
        "",
    ]


PARTS: dict[str, Callable[[], list[str]]] = {
    "exactness": exactness,
    "rounding": rounding,
    "bytes": bytes_and_exchanges,
    "refusals": refusals,
}


def results(parts: Iterable[str]) -> list[str]:
    """The sections, below what they were made with."""
    lines = [
        f"`python -m benchmarks.checks.long_rows`: gloo ranks of one thread on {os.cpu_count()} cores, torch "
        f"{torch.__version__}, transformers {installed('transformers')}.",
        "",
    ]
    for name in parts:
        lines += PARTS[name]()
        print(f"{name} done", flush=True)
    return lines[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    for family in FAMILIES:
        small_model(family)  # imports, once for all ranks
    publish("Rows that ranks share", results(args.parts), args.output)


if __name__ == "__main__":
    main()
