"""Whether all devices multiply rightly, and as fast as each other."""

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.pace import all_at_once, slow_ranks, slow_troubles
from fsdp_sft.check.work import Product, block_shapes, checksum, make_product, said_flops

_FAILS, _WARNS = 0.85, 0.95
_MOST_SHAPES = 4


def _run(cluster: Cluster) -> Outcome:
    shapes = block_shapes(cluster.asked.config)[-_MOST_SHAPES:]
    # On a processor without instructions for bfloat16 a product of it takes a hundred times as long.
    dtype = torch.bfloat16 if cluster.has_own_clock else torch.float32
    products = [make_product(shape, cluster.device, dtype) for shape in shapes]
    flops, seconds = sum(one.flops for one in products), 0.08 * cluster.scale

    def run_all() -> None:
        for one in products:
            one.run()

    rates, slow = slow_ranks(cluster, run_all, flops, "timing products", at_least=seconds, warns=_WARNS)
    wrong, sums = _results(cluster, products)
    measured = {"flops_per_second": min(rates), "dtype": str(dtype).removeprefix("torch.")}
    troubles = slow_troubles(cluster, slow, "products run", fails=_FAILS)
    said = f"{said_flops(min(rates))} to {said_flops(max(rates))} a rank in {dtype}, checksum {sums:08x}"
    return Outcome(said.replace("torch.", ""), (*wrong, *troubles), measured)


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
