"""Mistakes in what becomes of many rows: weights, encodings on the disk, mixtures, packs, loss terms."""

from tests.mistakes.mistake import Mistake

ENCODED = ("tests/collate/test_encoded.py",)
ORDERS = ("tests/sampling/test_orders.py",)
COST = ("tests/sampling/packing/test_packs.py",)
TERMS = ("tests/loss/test_loss.py",)
MISTAKES = [
    Mistake(
        "rows that a map has left out are not counted as consumed",
        "step/loader.py",
        "_num_consumed(loader, sampler, taken[:length]) if",
        "_num_consumed(loader, sampler, window) if",
        ("tests/step/test_batches.py",),
    ),
    Mistake(
        "a BatchEncoding becomes a dict on its way to the device",
        "step/window.py",
        "        made.data = to_device(batch.data, device)\n        return made\n",
        "        return to_device(batch.data, device)\n",
        ("tests/step/test_own_loss.py",),
    ),
    Mistake(
        "an encoding does not depend on the options",
        "collate/encoded.py",
        '"options": asdict(options),',
        '"options": None,',
        ENCODED,
    ),
    Mistake(
        "an encoding does not depend on the template",
        "collate/encoded.py",
        '"templates": tokenizer.chat_template,',
        '"templates": None,',
        ENCODED,
    ),
    Mistake(
        "the rows of a shard are those of the one before",
        "collate/encoded.py",
        "_encode_shard(path, start, _rows_of(source, section),",
        "_encode_shard(path, start, _rows_of(source, range(len(section))),",
        ENCODED,
    ),
    Mistake(
        "every shard counts its rows from 0",
        "collate/encoded.py",
        "counts, first=first):",
        "counts):",
        ENCODED,
    ),
    Mistake(
        "each epoch of a mixture begins the data sets anew",
        "sampling/sampler.py",
        "rows.append(self._rows_of(number, epoch * count, seed, shuffle))",
        "rows.append(self._rows_of(number, 0, seed, shuffle))",
        ORDERS,
    ),
    Mistake(
        "a data set comes in the same order each time",
        "sampling/sampler.py",
        '_generator("rows", seed, number, turn)',
        '_generator("rows", seed, number, 0)',
        ORDERS,
    ),
    Mistake(
        "a mixture goes on from another one's position",
        "sampling/sampler.py",
        '"sizes": of.sizes, "counts": of.counts}',
        '"sizes": of.sizes}',
        ORDERS,
    ),
    Mistake(
        "a sampler of rows goes on from a position in packs",
        "sampling/sampler.py",
        'for key in (*here, "sizes", "counts", "max_length"):',
        "for key in here:",
        ORDERS,
    ),
    Mistake(
        "a resumed stream goes on by the skip of its rows, which has no epoch",
        "sampling/packing.py",
        "            ordered.set_epoch(self.epoch)\n",
        "            pass\n",
        ("tests/sampling/packing/test_stream.py", "tests/test_positions.py"),
    ),
    Mistake(
        "a pack's cost leaves out its attention",
        "sampling/packing.py",
        "return per_token * length + per_square * length * length",
        "return per_token * length",
        COST,
    ),
    Mistake(
        "rounds of packs are not sorted by cost",
        "sampling/packing.py",
        "            return sum(map(self._weight, pack)), 0",
        "            return 0, 0",
        COST,
    ),
    Mistake(
        "another rounded logit than the largest is computed again",
        "loss/blocks.py",
        "add_(piece, alpha=pieces.shape[2])",
        "add_(piece)",
        ("tests/loss/test_linear_cross_entropy.py",),
    ),
    Mistake(
        "only the first slice of a weight's gradient is rounded",
        "loss/blocks.py",
        'if name == "weight" else (slice(None),)',
        'and [slice(0, 16)] if name == "weight" else (slice(None),)',
        ("tests/loss/test_linear_cross_entropy.py",),
    ),
    Mistake(
        "the z-loss has half its gradient",
        "loss/blocks.py",
        "logits.mul_(1 + 2 * z_loss * (largest - above))",
        "logits.mul_(1 + z_loss * (largest - above))",
        TERMS,
    ),
    Mistake(
        "smoothing has no gradient",
        "loss/blocks.py",
        "            logits.sub_(smoothing / logits.shape[1])",
        "            pass",
        TERMS,
    ),
    Mistake(
        "weights of the loss are left out of its gradient",
        "loss/blocks.py",
        "            logits.mul_(weights)\n",
        "            pass\n",
        TERMS,
    ),
    Mistake(
        "a loss by weights is divided by the count",
        "loss/causal.py",
        "    weight = num_targets if weight is None else weight\n",
        "    weight = num_targets\n",
        TERMS,
    ),
    Mistake(
        "ranks with rows in another order share one encoding",
        "collate/encoded.py",
        '"the rows, the tokenizer or the options (a digest)": digest}',
        '"the rows, the tokenizer or the options (a digest)": ""}',
        ("tests/collate/test_encoded.py",),
    ),
    Mistake(
        "a write that fails leaves its file",
        "collate/encoded.py",
        "        temporary.unlink(missing_ok=True)\n",
        "        pass\n",
        ("tests/collate/test_encoded.py",),
    ),
]
