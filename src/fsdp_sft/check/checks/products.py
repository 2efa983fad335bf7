"""Whether all devices multiply rightly, and as fast as each other."""

from typing import Any

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.pace import all_at_once, seconds_of, slow_ranks, slow_troubles
from fsdp_sft.check.work import Product, block_shapes, checksum, make_product, said_flops

_FAILS, _WARNS = 0.85, 0.95
_MOST_SHAPES = 4


def _run(cluster: Cluster) -> Outcome:
    shapes = block_shapes(cluster.asked.config)[-_MOST_SHAPES:]
    wide, half = torch.float32, torch.bfloat16
    # On a processor without instructions for bfloat16 a product of it takes a hundred times as long.
    dtype = half if cluster.has_own_clock else wide
    products = [make_product(shape, cluster.device, dtype) for shape in shapes]
    flops, seconds = sum(one.flops for one in products), 0.08 * cluster.scale

    def run_all() -> None:
        for one in products:
            one.run()

    def rate_of(several: list[Product]) -> float:
        least = seconds / len(products)
        spent = sum(seconds_of(one.run, cluster.device, at_least=least) for one in several)
        return sum(one.flops for one in several) / spent

    rates, slow = slow_ranks(cluster, run_all, flops, "timing products", at_least=seconds, warns=_WARNS)
    wrong, sums = _results(cluster, products)
    other = [
        Product(
            one.a.to(wide if dtype == half else half), one.b.to(wide if dtype == half else half), *_kept(one)
        )
        for one in products[-1:]
    ]
    together = all_at_once(lambda: rate_of(products), "timing products of all ranks")
    others = all_at_once(lambda: rate_of(other), "timing products of the other dtype")
    every: list[tuple[float, float]] = all_gather_objects((together, others))
    named = {True: "flops_per_second", False: "float32_flops_per_second"}
    measured: dict[str, Any] = {
        named[dtype == half]: min(one for one, _ in every),
        named[dtype != half]: min(one for _, one in every),
        "alone": max(rates),
        "dtype": str(dtype).removeprefix("torch."),
    }
    troubles = slow_troubles(cluster, slow, "products run", fails=_FAILS)
    said = f"{said_flops(min(rates))} to {said_flops(max(rates))} a rank in {dtype}, checksum {sums:08x}"
    return Outcome(said.replace("torch.", ""), (*wrong, *troubles), measured)


def _kept(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    return product.weights, product.expected


def _results(cluster: Cluster, products: list[Product]) -> tuple[list[Trouble], int]:
    """Troubles of ranks whose results are wrong, and the checksum of the ranks whose results are right."""

    def own() -> tuple[int, int]:
        results = [one.run() for one in products]
        wrong = sum(one.wrong_rows(result) for one, result in zip(products, results, strict=True))
        return wrong, checksum(results[-1])

    found: list[tuple[int, int]] = all_gather_objects(all_at_once(own, "comparing products"))
    right = next((total for wrong, total in found if not wrong), found[0][1])
    troubles = [
        Trouble(
            "fail",
            (rank,),
            f"products are wrong ({wrong} rows"
            + (f", checksum {total:08x}, rightly {right:08x}" if total != right else "")
            + "): the device or its memory is damaged; leave the node out and have it tested",
            leave_out=True,
        )
        for rank, (wrong, total) in enumerate(found)
        if wrong or total != right
    ]
    return troubles, right


CHECK = Check("products", "do all devices multiply rightly, and as fast as each other?", 60, 10, _run)
