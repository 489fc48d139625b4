"""How the parts of the GPU check take time: on a device by replayed graphs and events, in a dry run by a plain clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Row = dict[str, object]
"""One result, as it goes into the JSON."""


@dataclass(frozen=True)
class Clock:
    """
    The device, and its time.

    Args:
        dry_run (`bool`): on the CPU, with kernels interpreted; times say nothing there.
    """

    dry_run: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda")

    def ms(self, run: Callable[[], object]) -> float:
        """
        Milliseconds of the device for `run`, median, with a cold L2: its launches are captured in a graph, and what the host does to make
        them is left out.
        """
        if self.dry_run:
            return self.wall_ms(run)
        from triton.testing import do_bench

        ms = float(do_bench(self.captured(run), warmup=10, rep=50, return_mode="median"))
        # What a graph has used stays its own until then.
        torch.cuda.empty_cache()
        return ms

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """What replays `run`, which must not wait for the device. Its results stay where the capture put them."""
        if self.dry_run:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # Compiles, and lets libraries make their workspaces.
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def wall_ms(self, run: Callable[[], object], repeats: int = 15) -> float:
        """Milliseconds of the host from calling `run` until the device is done with it, median."""
        times = []
        for repeat in range(1 if self.dry_run else repeats + 3):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            if self.dry_run or repeat >= 3:
                times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def wait(self) -> None:
        """Until the device is done."""
        if not self.dry_run:
            torch.cuda.synchronize()
