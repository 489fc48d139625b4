"""How a planned forward is run: as it is, compiled, or replayed as a CUDA graph."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recguide_kernels.work import power_of_two

from .attention import CURRENT, AttentionBackend, PlannedAttention, running
from .attention.base import StaticBackend
from .config import ForwardConfig
from .dense_kv import KVCache
from .errors import MissingDependencyError, RecGuideError, UnsupportedError
from .kernel_support import triton_problem
from .models.draft_adapter import adapter_rows, traced_adapter_rows
from .segments import Plan

MOST_GRAPHS = 64
"""Captured forwards kept at once, the longest unused dropped first. They share their scratch memory, but each keeps its logits."""
MOST_TOKENS = 512
"""Longer forwards are not captured: their launches are hidden behind their work."""
WORTH_CAPTURING = 3
"""The time that a shape comes up at which it is captured, which takes as long as some dozen forwards."""
_WARM_UPS = 2
_MASK_4D = torch.ones((1, 1, 1, 1), dtype=torch.bool)


class Forwards:
    """
    Forwards of one model with one attention backend, run as they are or compiled.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        backend (`AttentionBackend`): computes the segments.
        compiled (`bool`, defaults to `False`): by `torch.compile`, as one program for any number of tokens.
    """

    def __init__(self, model: PreTrainedModel, backend: AttentionBackend, compiled: bool = False) -> None:
        self.model, self.backend, self.compiled = model, backend, compiled
        self.layers: int = model.config.get_text_config().num_hidden_layers

    @property
    def name(self) -> str:
        """For tables of measured times: what else than the model and its device makes a forward as fast as it is."""
        return self.backend.name + ("+compile" if self.compiled else "")

    def prepare(self, plan: Plan, kv: KVCache) -> Callable[[], Tensor]:
        """Prepare a forward: what is returned runs it, and gives the logits of the plan's output rows, `[N, V]`."""
        return partial(self.run, plan, self.backend.plan(plan, kv, self.model.dtype))

    def run(self, plan: Plan, attention: PlannedAttention) -> Tensor:
        """Run a plan with its attention, and see that all layers have used it."""
        before = attention.layers_run
        with torch.no_grad():
            if self.compiled:
                # One program for all forwards: that rows are picked or not is no reason to compile another.
                rows = plan.output_rows
                picked = torch.arange(plan.query_tokens, device=plan.input_ids.device) if rows is None else rows
                with running(attention):
                    logits = _compiled()(self.model, plan.input_ids, plan.position_ids, plan.adapter, picked)
            else:
                with adapter_rows(plan.adapter):
                    logits = _logits(self.model, plan.input_ids, plan.position_ids, plan.output_rows, attention)
        if attention.layers_run - before != self.layers:
            raise UnsupportedError(
                f"{type(self.model).__name__} has {self.layers} layers, but {attention.layers_run - before} asked the attention "
                "backend: the others have attention of their own, which sees neither the cache nor the plan."
            )
        return logits


def _logits(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    output_rows: Tensor | None,
    attention: PlannedAttention | str,
) -> Tensor:
    logits: Tensor = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        # A mask of four dimensions is passed on as it is, so that the model builds none of its own.
        attention_mask=_MASK_4D,
        use_cache=False,
        logits_to_keep=0 if output_rows is None else output_rows,
        recguide_attention=attention,
    ).logits[0]
    return logits


def _program(
    model: Any, input_ids: Tensor, position_ids: Tensor, adapter: Tensor | None, output_rows: Tensor
) -> Tensor:
    """What is compiled."""
    with traced_adapter_rows(adapter):
        return _logits(model, input_ids, position_ids, output_rows, CURRENT)


@lru_cache
def _compiled() -> Callable[..., Tensor]:
    # Made when first used: torch's compiler takes seconds to import. What cannot be compiled as a whole is an error, not a slow way on.
    return torch.compile(_program, dynamic=True, fullgraph=True)


def compile_problem(device: torch.device) -> RecGuideError | None:
    """What keeps `torch.compile` from working for `device`; `None` if nothing does."""
    if device.type != "cpu":
        return triton_problem(device)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return MissingDependencyError(
            f"torch.compile needs a C++ compiler on a CPU, and {compiler!r} is not there: install g++, or set CXX to another"
        )
    return None


# --- CUDA graphs ---------------------------------------------------------------------------------------------------


class Capturer(Protocol):
    """Records what a function does on a device."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The tensor that `run` returns, and what fills it again from the same memory by the same steps."""


class CudaCapturer:
    """Records CUDA graphs, which share their scratch memory: they are replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # What is made, compiled or tuned at a first run cannot be while it is recorded.
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = run()
            self._pool = graph.pool()
        return logits, graph.replay


@dataclass(frozen=True)
class Shape:
    """What a captured forward has fixed: tokens, batch rows and output rows with padding, and whether the adapter is among its work."""

    tokens: int
    rows: int
    outputs: int
    adapter: bool

    @classmethod
    def of(cls, plan: Plan) -> Shape:
        """The smallest shape that holds a plan."""
        tokens = _bucket(plan.query_tokens)
        outputs = plan.query_tokens if plan.output_rows is None else plan.output_rows.shape[0]
        # One row more, whose tokens are the padding.
        rows = power_of_two(len(plan.prefix) + 1)
        return cls(tokens, rows, min(power_of_two(outputs), tokens), plan.adapter is not None)

    def pad(self, plan: Plan) -> Plan:
        """The plan with padding, but for its tensors."""
        missing = self.rows - len(plan.prefix)
        starts, prefix = (*plan.starts, *[self.tokens] * missing), (*plan.prefix, *[0] * missing)
        return replace(plan, starts=starts, prefix=prefix, causal=False)


class StaticTensors:
    """A captured forward's inputs. Padding is token 0 at position 0 that sees itself alone, with the adapter off."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        tokens = shape.tokens
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.position_ids = torch.zeros_like(self.input_ids)
        self.visible = torch.zeros((tokens, 4), dtype=torch.int64, device=device)
        self.adapter = torch.zeros(tokens, dtype=torch.bool, device=device) if shape.adapter else None
        self.output_rows = torch.zeros(shape.outputs, dtype=torch.int64, device=device)
        alone = torch.arange(tokens, device=device)
        self._alone = torch.stack((alone, alone + 1, alone * 0, alone * 0), dim=1)
        self._all_rows = alone[: shape.outputs]

    def fill(self, plan: Plan) -> Plan:
        """Copy a plan's tensors in, so that what the last one has left behind them is padding again; the plan over these tensors."""
        rows = self._all_rows[: plan.query_tokens] if plan.output_rows is None else plan.output_rows
        for static, given, padding in (
            (self.input_ids, plan.input_ids, 0),
            (self.position_ids, plan.position_ids, 0),
            (self.adapter, plan.adapter, 0),
            (self.output_rows, rows, 0),
            (self.visible, plan.visible, self._alone),
        ):
            if static is None:
                assert given is None, "the shape has no adapter"
                continue
            assert given is not None, "the shape has an adapter"
            static[: len(given)].copy_(given)
            static[len(given) :] = padding if isinstance(padding, int) else padding[len(given) :]
        return replace(
            plan,
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            visible=self.visible,
            adapter=self.adapter,
            output_rows=self.output_rows,
        )


class GraphForwards(Forwards):
    """
    Forwards that are replayed as CUDA graphs where their shape has come up before; the others run as ever.

    Args:
        model, backend, compiled: as in [`Forwards`]; the backend must be a [`StaticBackend`].
        capturer (`Capturer`): records on the model's device.
    """

    def __init__(
        self, model: PreTrainedModel, backend: StaticBackend, capturer: Capturer, compiled: bool = False
    ) -> None:
        super().__init__(model, backend, compiled)
        self._static, self._capturer = backend, capturer
        config = model.config.get_text_config()
        self._group = config.num_attention_heads // (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()

    @property
    def name(self) -> str:
        return super().name + "+cuda_graphs"

    def prepare(self, plan: Plan, kv: KVCache) -> Callable[[], Tensor]:
        addresses = kv.addresses(plan)
        # The memory of the caches is made by the first forward.
        if plan.query_tokens > MOST_TOKENS or len(addresses) != 2 * self.layers:
            return super().prepare(plan, kv)
        shape = Shape.of(plan)
        bounds = self._static.bounds(shape.pad(plan), kv.page_size, self._group, self.model.dtype)
        key = shape, bounds, addresses
        graph = self._graphs.get(key)
        if graph is None:
            self._seen[key] += 1
            if self._seen[key] < WORTH_CAPTURING:
                return super().prepare(plan, kv)
            del self._seen[key]
            graph = _Graph(self, shape, bounds, plan, kv)
            self._graphs[key] = graph
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
            graph.load(plan, kv)
        if len(self._seen) > 64 * MOST_GRAPHS:
            # Shapes that come up once, as of prompts; to forget the others too only has them captured later.
            self._seen.clear()
        outputs = plan.query_tokens if plan.output_rows is None else plan.output_rows.shape[0]
        return partial(graph.replay, outputs)


class _Graph:
    """One captured forward: its inputs, its attention and what it leaves."""

    def __init__(self, forwards: GraphForwards, shape: Shape, bounds: Any, plan: Plan, kv: KVCache) -> None:
        model, device = forwards.model, plan.input_ids.device
        self._shape, self._tensors = shape, StaticTensors(shape, device)
        padded = shape.pad(self._tensors.fill(plan))
        self._attention = forwards._static.static(padded, plan, kv, model.dtype, bounds)
        run = partial(forwards.run, padded, self._attention)
        self._logits, self._replay = forwards._capturer.capture(run)

    def load(self, plan: Plan, kv: KVCache) -> None:
        self._attention.load(self._shape.pad(self._tensors.fill(plan)), plan, kv)

    def replay(self, outputs: int) -> Tensor:
        self._replay()
        # The next replay writes over it.
        return self._logits[:outputs].clone()


def _bucket(tokens: int) -> int:
    """Tokens with padding: few shapes, and little of a forward for nothing."""
    step = 16 if tokens <= 128 else 64
    return power_of_two(tokens) if tokens <= 16 else -(-tokens // step) * step


def forwards_of(
    model: PreTrainedModel, backend: AttentionBackend, options: ForwardConfig, device: torch.device
) -> Forwards:
    """
    Forwards as `options` say.

    Raises:
        UnsupportedError, MissingDependencyError: they cannot be run so here; the message says why and what to do.
    """
    if options.compile and (problem := compile_problem(device)):
        raise type(problem)(f"compile=True cannot be honoured: {problem}.")
    if not options.cuda_graphs:
        return Forwards(model, backend, options.compile)
    if device.type != "cuda":
        raise UnsupportedError(
            f"cuda_graphs=True needs a CUDA device, and the model is on {device.type}: move it to one, or leave the option out."
        )
    if not isinstance(backend, StaticBackend):
        raise UnsupportedError(
            f"cuda_graphs=True needs the attention backend 'triton', whose plans can be exchanged in a graph; this is {backend.name!r}."
        )
    if len(places := {str(parameter.device) for parameter in model.parameters()}) > 1:
        raise UnsupportedError(
            f"cuda_graphs=True needs the whole model on one device; this one is on {', '.join(sorted(places))}."
        )
    return GraphForwards(model, backend, CudaCapturer(device), options.compile)
