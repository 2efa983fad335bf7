"""Mistakes that only a device shows which works while the host goes on; the simulated one shows them."""

from tests.mistakes.mistake import Mistake

LOAD = ("tests/weights/test_devices.py",)
SYNCS = ("tests/step/test_host_syncs.py",)
DEVICES = ("tests/process/test_devices.py",)
OFFLOAD = ("tests/sac/test_apply.py",)

MISTAKES: list[Mistake] = [
    Mistake(
        "activations used before they are back",
        "sac/offload.py",
        "        current.wait_event(self.copied)\n",
        "",
        OFFLOAD,
    ),
    Mistake(
        "activations given up while they leave",
        "sac/offload.py",
        "            self.compute.wait_event(self.copied)\n            self.here = None",
        "            self.here = None",
        OFFLOAD,
    ),
    Mistake(
        "activations that leave before they are computed",
        "sac/offload.py",
        "            stream.wait_event(made)\n",
        "",
        OFFLOAD,
    ),
    Mistake(
        "activations changed in place while they leave",
        "sac/offload.py",
        "            self.changed |= self.here._version != self.version\n            self.compute",
        "            self.compute",
        OFFLOAD,
    ),
    Mistake(
        "shards that stay on the host loaded onto the device",
        "_model/sharded.py",
        "        return torch.empty_like(tensor, device=shard_device)",
        "        return torch.empty_like(tensor, device=device)",
        LOAD,
    ),
    Mistake(
        "activations that stay although they have left",
        "sac/offload.py",
        "        for away in _alive(self.latest):\n            away.release()\n",
        "",
        OFFLOAD,
    ),
    Mistake(
        "an event on the stream that is current where it is recorded",
        "_process/streams.py",
        "            stream.record_event()\n",
        "            [made := torch.Event(), made.record()][0]\n",
        DEVICES,
    ),
    Mistake(
        "a thread on device 0, whatever its caller works on",
        "_process/streams.py",
        "torch.accelerator.set_stream(stream)",
        "pass",
        LOAD,
    ),
    Mistake(
        "a buffer read into while it still travels",
        "_tensors/reader.py",
        "part.copy_(values[: len(part)].to(place.device))",
        "part.copy_(values[: len(part)].to(place.device, non_blocking=True))",
        LOAD,
    ),
    Mistake(
        "a snapshot written before it has arrived",
        "dcp_io/saving.py",
        "            torch.accelerator.synchronize(device)",
        "            pass",
        ("tests/dcp_io/test_async.py::test_a_save_beside_training_takes_nothing_of_the_device",),
    ),
    Mistake(
        "buffers of a load in memory that is not pinned",
        "_process/streams.py",
        "        return torch.empty(shape, dtype=dtype, pin_memory=True)",
        "        return torch.empty(shape, dtype=dtype)",
        (
            *LOAD,
            *DEVICES,
            *SYNCS,
            "tests/dcp_io/test_async.py::test_a_save_beside_training_takes_nothing_of_the_device",
        ),
    ),
    Mistake(
        "batches copied from memory that is not pinned",
        "_process/streams.py",
        "        tensor = tensor.pin_memory()\n",
        "        pass\n",
        DEVICES,
    ),
    Mistake(
        "values read before they have arrived",
        "_process/streams.py",
        "            event.synchronize()\n",
        "            pass\n",
        SYNCS,
    ),
    Mistake(
        "the loss asked for between micro-batches",
        "step/objective.py",
        "self.loss + found.summed.detach(), self.correct + found.correct",
        "self.loss + found.summed.detach().item(), self.correct + found.correct",
        SYNCS,
    ),
    Mistake(
        "targets counted on the device",
        "step/window.py",
        "return CheckedBatch(moved, facts_of(targets_of(self.seen).reshape(-1), device))",
        "return moved",
        SYNCS,
    ),
    Mistake(
        "memory of device 0, whichever is meant",
        "_process/devices.py",
        "torch.accelerator.memory_stats(device)",
        "torch.accelerator.memory_stats(0)",
        DEVICES,
    ),
    Mistake(
        "time taken while the device still works",
        "metrics/throughput.py",
        "        synchronize(self._device)\n",
        "",
        DEVICES,
    ),
    Mistake(
        "generators of devices are not put back",
        "_process/generators.py",
        "    before = generator_states(devices)\n",
        "    before = generator_states(())\n",
        (*LOAD, "tests/process/test_random_state.py"),
    ),
    Mistake(
        "the scale of gradients on the host is on the device",
        "step/update.py",
        "        keep_scale_on_host(scaler)",
        "        pass",
        ("tests/step/test_update.py::test_gradients_on_the_host_are_divided_by_the_scale",),
    ),
    Mistake(
        "bfloat16 is multiplied as it is where that takes a hundred times as long",
        "loss/blocks.py",
        'weight.is_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"',
        "False",
        ("tests/process/test_devices.py::test_a_cpu_keeps_the_products_that_are_fast_there",),
    ),
]
