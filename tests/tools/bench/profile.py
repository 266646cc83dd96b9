"""Profile some updates of this package: when the device works, at which kernels, and how often the host waits for it.

    python -m tests.tools.bench profile mlm --size base --batch-size 256 --updates 10

The options are those of the bench `train`; with --compile the layers are compiled. The updates are timed without the
profiler first, because it makes the host slower. On a CPU, operations stand for kernels.
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from bertkit.model.precision import choose_device
from bertkit.training.network import compile_layers
from tests.tools.bench import train
from tests.tools.bench.measure import Record, say

TINY, add_options = train.TINY, train.add_options
WARM_UP = 3  # updates
SHOWN = 40  # kernels with the most time
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # beginnings of the names
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class ProfileUpdates(TrainerCallback):
    """A callback that profiles all updates after the first ones."""

    def __init__(self, on_cuda: bool) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
        self.profiler, self.on_cuda = profile(activities=activities), on_cuda

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == WARM_UP:
            self.synchronize()
            self.profiler.start()
        elif state.global_step == state.max_steps:
            self.synchronize()
            self.profiler.stop()

    def synchronize(self) -> None:
        """Wait for the kernels, so each belongs to the update to which it is counted."""
        if self.on_cuda:
            torch.cuda.synchronize()


def bench(given: argparse.Namespace, record: Record) -> None:
    """Time and profile the updates."""
    on_cuda = choose_device().type == "cuda"
    with TemporaryDirectory() as folder:
        is_pretraining = given.task in train.OBJECTIVES
        given.updates += WARM_UP  # rows of that many
        training = train.make_pretraining(given) if is_pretraining else train.make_finetuning(given, folder)
        given.updates -= WARM_UP
        model = train.load_both(training, training.recipe)[0]
        side = train.Side(training, model, training.recipe)
        if given.compile:
            compile_layers(model)
        start = time.perf_counter()
        side.train(WARM_UP)  # compiles
        first = time.perf_counter() - start
        seconds = side.train(given.updates)[0] / given.updates
        say(f"  {given.batch_size / seconds:,.0f} sequences per second without the profiler")
        callback = ProfileUpdates(on_cuda)
        side.train(given.updates + WARM_UP, callback=callback)
    record.facts = summarize(callback.profiler.events(), given.updates, on_cuda) | {
        "updates": given.updates,
        "precision": side.precision,
        "seconds per update": seconds,
        "seconds of the first updates": first,
        "dropout": [model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob],
    }
    idle, kernels = record.facts["share of time without a kernel"], record.facts["kernels"]
    say(f"  no kernel ran in {idle:.1%} of the time; the host waited {record.facts['waits per update']:.1f} times")
    for name, (spent, calls) in list(kernels.items())[:10]:
        say(f"  {spent:9.3f} ms, {calls:6.1f} calls an update: {name[:90]}")


def summarize(events: Iterable[FunctionEvent], updates: int, on_cuda: bool) -> dict[str, Any]:
    """Return the share of time without a kernel, milliseconds and calls of each kernel per update, and what was seen.

    On a CPU the kernels are the operations of torch, each without those that it calls.
    """
    kernels, spent, calls = [], defaultdict(float), Counter()
    hosts: Counter = Counter()
    for event in events:
        is_on_device = event.device_type != torch.autograd.DeviceType.CPU
        if not is_on_device:
            hosts[event.name] += 1
        if event.is_user_annotation or not (is_on_device if on_cuda else event.name.startswith("aten::")):
            continue  # an annotation spans many kernels
        kernels.append((event.time_range.start, event.time_range.end))
        spent[event.name] += event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total
        calls[event.name] += 1
    order = sorted(spent, key=spent.get, reverse=True)
    names = [*spent, *hosts]
    return {
        "share of time without a kernel": measure_idle(kernels),
        "kernels": {name: (spent[name] / 1e3 / updates, calls[name] / updates) for name in order[:SHOWN]},
        "kernels per update": sum(calls.values()) / updates,
        "launches per update": sum(count for name, count in hosts.items() if name.startswith(LAUNCHES)) / updates,
        "waits per update": sum(hosts[name] for name in WAITS) / updates,
        "copies per update": hosts["cudaMemcpyAsync"] / updates,
        # Each is a claim about this package; indices are made in the collator, so no kernel looks for them
        "has fused AdamW": any("fused_adam" in name.lower() or "FusedAdam" in name for name in names),
        "has flash attention": any("flash_attention_forward" in name or "flash_fwd" in name for name in names),
        "looks for indices on the device": on_cuda
        and any("nonzero" in name or "DeviceSelect" in name for name in spent),
    }


def measure_idle(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end in which no span runs."""
    spans = sorted(spans)
    begin, busy, reached = spans[0][0], 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - begin)
