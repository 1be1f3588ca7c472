"""The arithmetic of memory: what a model takes on a device, term by term, before it is loaded.

``ingle fit`` and the engine's start use these functions and no others. All sizes in bytes; no
torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ingle.checkpoint.model_config import ModelConfig
from ingle.config import EngineConfig
from ingle.engine.weight_sizes import WeightSizes
from ingle.errors import ConfigError
from ingle.model.compiled_limits import MAX_EXTRA_BYTES, may_compile

GIB: Final = 1024**3
MIB: Final = 1024**2
HEADROOM: Final = GIB // 4
"""Left free on a card: pieces too small to use, and what other programs take while we run."""
DRIVER_SHARE: Final = 35 * GIB // 100
"""Of a card's nominal memory the driver keeps this to itself (a 24 GiB card reports 23.65)."""
RESERVE: Final = HEADROOM + DRIVER_SHARE
"""0.6 GiB: what of a card's nominal memory the plan does not touch, without a desktop."""
DESKTOP_RESERVE: Final = RESERVE + GIB
"""With a desktop on the card: a compositor and a browser take about 1 GiB."""
CUDA_CONTEXT: Final = 45 * GIB // 100
"""CUDA's context and the libraries' kernels on the card."""
CPU_RUNTIME: Final = 48 * MIB
"""On a CPU: the tokenizer, the code of compiled steps, and what the allocator keeps of memory that
was given back (measured: 27 to 75 MiB)."""
CPU_IMPORTS: Final = 192 * MIB
"""On a CPU: anonymous memory of Python, torch and the engine before a plan is made (measured: 161
MiB with the server, and 30 for the demo model's tokenizer). `ingle fit` holds far less, so what is
free to it is not free to them."""
CUDA_WORKSPACE: Final = 64 * MIB
"""cuBLAS' workspace (32 MiB), split-K partial sums and attention's partial results."""
CUDA_GRAPHS: Final = 64 * MIB
"""Captured decode graphs: their buffers share one pool."""
CPU_CACHE_LIMIT: Final = 4 * GIB
"""Default ceiling of the cache on a CPU, as other engines have it; --kv-cache-memory-bytes lifts
it."""
CPU_CACHE_SHARE: Final = 0.4
"""Share of a CPU machine's available memory the cache may take by default."""
BUFFERS: Final = 2
"""Layers of host memory that are on the device at a time: one computes, the next comes over."""
FLOAT32: Final = 4
BFLOAT16: Final = 2
"""Bytes of a value. On a CPU two bytes are bfloat16, unless float16 was asked for, where the plan
counts too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Everything but the size of the cache, which takes what is left.

    Attributes:
        weights: The weights.
        block_bytes: One cache block over all layers and both sides.
        block_size: Tokens per block.
        activation_bytes: Peak of a step of the largest chunk, the logits included.
        workspace_bytes: Kernels' scratch and the rotary tables.
        graphs_bytes: Captured graphs.
        context_bytes: The device's runtime; 0 where it has been measured away.
        compiled_bytes: On a CPU: the plain matrices that compiled decode steps read, beside the
            packed ones that prompts use; taken once they are compiled.
        embeddings_on_host: Token embeddings stay in host memory.
        offloaded_layers: The last layers whose linears stay in host memory.
    """

    weights: WeightSizes
    block_bytes: int
    block_size: int
    activation_bytes: int
    workspace_bytes: int
    graphs_bytes: int = 0
    context_bytes: int = 0
    compiled_bytes: int = 0
    embeddings_on_host: bool = False
    offloaded_layers: int = 0

    @property
    def weights_bytes(self) -> int:
        """Weights on the device, the buffers that layers stream into included."""
        sizes = self.weights
        whole = sizes.without_embeddings if self.embeddings_on_host else sizes.total_bytes
        return whole - self.offloaded_bytes + self.buffer_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Linears of layers that stay in host memory."""
        return sum(self._offloaded)

    @property
    def buffer_bytes(self) -> int:
        """What they stream into: one buffer for every second of them."""
        sizes = self._offloaded
        return sum(max(sizes[slot::BUFFERS]) for slot in range(min(BUFFERS, len(sizes))))

    @property
    def _offloaded(self) -> tuple[int, ...]:
        sizes = self.weights.streamable_bytes
        return sizes[len(sizes) - self.offloaded_layers :]

    @property
    def fixed_bytes(self) -> int:
        """Everything on the device but the cache."""
        return (
            self.weights_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.graphs_bytes
            + self.context_bytes
            + self.compiled_bytes
        )

    @property
    def bytes_per_token(self) -> float:
        """Cache of one token."""
        return self.block_bytes / self.block_size

    def blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks for ``num_sequences`` of ``num_tokens`` each, the null block included."""
        return 1 + num_sequences * -(-num_tokens // self.block_size)

    def cache_bytes(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Cache for ``num_sequences`` of ``num_tokens`` each."""
        return self.blocks(num_tokens, num_sequences) * self.block_bytes

    def longest(self, cache_bytes: int, num_sequences: int = 1) -> int:
        """Tokens that each of ``num_sequences`` can have in a cache of that size."""
        usable = cache_bytes // self.block_bytes - 1
        return max(0, usable // num_sequences) * self.block_size

    def with_embeddings_on_host(self) -> MemoryPlan:
        """The same with the token embeddings in host memory."""
        return replace(self, embeddings_on_host=True)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    weights: WeightSizes,
    block_bytes: int,
    itemsize: int,
    device_type: str,
) -> MemoryPlan:
    """The plan of a model on a device of ``device_type``, embeddings on the device.

    Args:
        config: The options: chunk size, sequences, context, graphs.
        model: The model.
        weights: Its weights.
        block_bytes: One cache block over all layers and both sides.
        itemsize: Bytes of one activation.
        device_type: ``cpu`` or ``cuda``.
    """
    on_card = device_type == "cuda"
    graphs = CUDA_GRAPHS if on_card and not config.enforce_eager else 0
    return MemoryPlan(
        weights=weights,
        block_bytes=block_bytes,
        block_size=config.block_size,
        activation_bytes=activation_bytes(
            model, config.max_num_batched_tokens, config.max_running, itemsize
        ),
        workspace_bytes=rotary_bytes(config, model, itemsize) + (CUDA_WORKSPACE if on_card else 0),
        graphs_bytes=graphs,
        context_bytes=CUDA_CONTEXT if on_card else CPU_RUNTIME,
        compiled_bytes=compiled_bytes(config, model, weights, itemsize, device_type),
        offloaded_layers=offloaded_layers(config, weights) if on_card and _is_own(model) else 0,
        embeddings_on_host=on_card and config.embedding_device == "host" and _is_own(model),
    )


def offloaded_layers(config: EngineConfig, weights: WeightSizes) -> int:
    """How many layers --offload-layers or --cpu-offload-gb puts into host memory, the last ones:
    of the latter so many that they have the size asked for."""
    sizes = weights.streamable_bytes
    count, wanted = config.offload_layers, config.cpu_offload_gb * GIB
    while count < len(sizes) and sum(sizes[len(sizes) - count :]) < wanted:
        count += 1
    return min(count, len(sizes))


def compiled_bytes(
    config: EngineConfig, model: ModelConfig, weights: WeightSizes, itemsize: int, device_type: str
) -> int:
    """What compiled decode steps copy: on a CPU, of models they know, in bfloat16."""
    copied = weights.copied_bytes
    if device_type != "cpu" or config.enforce_eager or itemsize != BFLOAT16:
        return 0
    return copied if may_compile(model) and copied <= MAX_EXTRA_BYTES else 0


def activation_bytes(
    model: ModelConfig, num_tokens: int, num_logit_rows: int, itemsize: int
) -> int:
    """The most that lives at once in a step of ``num_tokens`` tokens.

    Per token either the MLP (residual and normed input, the joined gate and up projection, the
    activated gate and their product), or attention (joined projection; rotated queries and keys
    in three copies; its result; residual and normed input); and after the layers the logits of
    ``num_logit_rows`` rows: once as computed and three times in float32, to sample from.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    mlp = 2 * hidden + 4 * inner
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * hidden + (queries + 2 * keys) + 3 * (queries + keys) + queries
    layer = num_tokens * max(mlp, attention) * itemsize
    logits = num_logit_rows * model.vocab_size * (itemsize + 3 * FLOAT32)
    return max(layer, logits + num_tokens * hidden * itemsize)


def rotary_bytes(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Cosines and sines of every position the context can have."""
    asked = config.max_model_len
    positions = model.max_position_embeddings if isinstance(asked, str) else asked
    return 2 * positions * model.head_dim * itemsize


def length_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens per sequence at most: what was asked for, else what the model was made for.

    Raises:
        ConfigError: When that is more than the model has positions.
    """
    asked = config.max_model_len
    if isinstance(asked, str):
        return model.max_position_embeddings
    longest = model.longest_context
    if asked > longest:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's {longest} positions "
            f"(max_position_embeddings in config.json); use at most {longest}."
        )
    return asked


def cache_limit(config: EngineConfig, plan: MemoryPlan, usable: int, device_type: str) -> int:
    """Bytes the cache may take: what was asked for, else what is left of ``usable``.

    Negative when not even the rest fits.
    """
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes)
    left = usable - plan.fixed_bytes
    if device_type == "cpu":
        # Without activations, which come out of the memory that is not the cache's.
        free = usable - plan.weights_bytes - plan.compiled_bytes
        return min(CPU_CACHE_LIMIT, int(free * CPU_CACHE_SHARE), left)
    return left


def usable_on_card(config: EngineConfig, total: int, free: int) -> int:
    """What of ``free`` bytes a model may use: all but the headroom, or as much as
    --gpu-memory-utilization leaves."""
    share = config.gpu_memory_utilization
    return free - (HEADROOM if share is None else int(total * (1 - share)))


def place_embeddings(
    config: EngineConfig, plan: MemoryPlan, model: ModelConfig, usable: int, num_sequences: int = 1
) -> MemoryPlan:
    """On a card: the plan with the embeddings in host memory, when nothing else makes
    ``num_sequences`` fit (of the length asked for, or of 8,192 tokens) and nobody pinned them."""
    if config.embedding_device != "auto" or plan.embeddings_on_host or not _is_own(model):
        return plan
    asked = config.max_model_len
    wanted = min(model.max_position_embeddings, 8192) if isinstance(asked, str) else asked
    if plan.cache_bytes(wanted, num_sequences) <= cache_limit(config, plan, usable, "cuda"):
        return plan
    return plan.with_embeddings_on_host()


def _is_own(model: ModelConfig) -> bool:
    """Whether the own decoder computes it: transformers' code looks embeddings up on the card."""
    return model.implementation == "ingle"
