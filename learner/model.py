"""The decoder: a Llama-style transformer, for training and for cached generation.

RMSNorm, rotary positions (half-rotation, as in Llama and Qwen2), grouped-query attention and
SwiGLU. One module serves both sides, so that the trained and the sampled model cannot drift.

Invariant: `forward` over a whole sequence and `prefill` + `decode` over its pieces give the same
hidden states up to floating-point noise, and the hidden state of a token does not depend on
what lies to its right or on padding.

Shapes: B sequences, T tokens, D = `dim`, H = `heads`, K = `kv_heads`, V = `vocab_size`.
"""

from __future__ import annotations

import math

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.kv import KVCache


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a decoder; the defaults are the built-in demo model (about 0.35 M parameters)."""

    vocab_size: int
    eos_token_id: int
    """Sampling this token ends a generation."""
    dim: int = 96
    layers: int = 3
    heads: int = 3
    kv_heads: int = 0
    """Heads of keys and values; divides `heads`. 0 means `heads`."""
    head_dim: int = 0
    """0 means `dim // heads`."""
    ffn_dim: int = 0
    """Width of the SwiGLU; 0 means 8/3 of `dim`, rounded up to a multiple of 32."""
    max_len: int = 160
    """Longest sequence, prompt and generation together, in tokens."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output head is the embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    extra_eos_token_ids: tuple[int, ...] = ()
    """Further tokens that end a generation."""

    def __post_init__(self) -> None:
        """Fills the derived sizes in; ValueError when the sizes contradict each other."""
        fill = msgspec.structs.force_setattr
        fill(self, "kv_heads", self.kv_heads or self.heads)
        fill(self, "head_dim", self.head_dim or self.dim // max(self.heads, 1))
        fill(self, "ffn_dim", self.ffn_dim or 32 * math.ceil(self.dim * 8 / 3 / 32))
        sizes = ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "max_len")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads}: must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even for rotary positions")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_id = {token}: must lie in [0, vocab_size = {self.vocab_size})")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset((self.eos_token_id, *self.extra_eos_token_ids))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D], in the dtype of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention; query, key and value projections are one matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, d], rotated keys and values [B, K, T, d] of `x` [B, T, D]."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        turned = rotate(qkv[:, : self.heads + self.kv_heads], rotary)
        return turned[:, : self.heads], turned[:, self.heads :], qkv[:, self.heads + self.kv_heads :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attention output [B, T, D]; `mask` is True where a query may look."""
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.join(mixed)

    def join(self, mixed: Tensor) -> Tensor:
        """[B, H, T, d] to [B, T, D] through the output projection."""
        batch, _, length, _ = mixed.shape
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """One query per sequence [B, H, 1, d] against [B, K, L, d]: a group's heads share one read of its keys."""
        batch = q.shape[0]
        folded = q.view(batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        projected: Tensor = self.out(mixed.reshape(batch, 1, -1))
        return projected


class SwiGLU(nn.Module):
    """Gated feed-forward layer; gate and up projections are one matrix, the gate first."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)


class Decoder(nn.Module):
    """Token ids to hidden states; `logits` maps those to the vocabulary.

    Parameters are named without regard to any checkpoint format (`learner.hf` translates); tied
    weights appear once in `named_parameters()`, whose order is the layout of published weights.
    """

    def __init__(self, config: DecoderConfig, seed: int | None = 0) -> None:
        """Builds the module; `seed` initialises it, None leaves the weights for a loader to fill."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.max_len, config.head_dim, config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        if seed is not None:
            self.init(seed)

    @property
    def head_weight(self) -> Tensor:
        """The output projection [V, D]."""
        return self.embedding.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Draws every weight anew; the same seed gives the same weights, bit for bit.

        Matrices are normal with variance 1/fan-in, those that write into the residual stream
        smaller by sqrt(2 layers); biases are 0 and gains 1.
        """
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = parameter.shape[1] ** -0.5
            if name.endswith(("attention.out.weight", "ffn.down.weight")):
                scale *= shrink
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to raw [..., V], before any temperature."""
        return F.linear(hidden, self.head_weight)

    def forward(
        self, token_ids: Tensor, positions: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] (after the last norm) of whole sequences.

        Args:
            token_ids: [B, T] int. Padding may hold any valid id.
            positions: [B, T] int positions; by default 0, 1, … over the real tokens of each row.
            attention_mask: [B, T] bool, True on real tokens; needed only when padding lies on the
                left (padding on the right is never seen by the tokens before it) or for packing
                with explicit positions. Hidden states of padding are meaningless.
        """
        length = token_ids.shape[1]
        if positions is None:
            if attention_mask is None:
                positions = torch.arange(length, device=token_ids.device)[None]
            else:
                positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        mask = None if attention_mask is None else padding_mask(attention_mask)
        rotary = self._rotary(positions)
        x: Tensor = self.embedding(token_ids)
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.attention_norm(x), rotary)
            x = x + block.attention.attend(q, k, v, mask, causal=mask is None)
            x = x + block.ffn(block.ffn_norm(x))
        return self.norm(x)  # type: ignore[no-any-return]

    def prefill(self, token_ids: Tensor, cache: KVCache, first_row: int, start: int = 0) -> None:
        """Writes the keys and values of tokens [R, T] at positions `start`… into R rows of the cache.

        Rows are `first_row`, `first_row + 1`, …; their positions before `start` must be filled. Padding on
        the right writes entries that nobody reads, as long as lengths are kept by the caller.
        """
        rows, length = token_ids.shape
        end = start + length
        positions = torch.arange(start, end, device=token_ids.device)
        rotary = self._rotary(positions[None])
        mask = positions[:, None] >= torch.arange(end, device=token_ids.device) if start else None
        x: Tensor = self.embedding(token_ids)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.attention_norm(x), rotary)
            keys, values = cache.write_span(index, first_row, rows, start, k, v)
            if index == len(self.blocks) - 1:
                return  # only the keys and values of a prompt are wanted, not its last hidden states
            x = x + block.attention.attend(q, keys, values, mask, causal=mask is None)
            x = x + block.ffn(block.ffn_norm(x))

    def decode(self, token_ids: Tensor, cache: KVCache, lengths: Tensor, longest: int) -> Tensor:
        """Hidden states [R, D] of one new token in each of the first R rows of the cache.

        Args:
            token_ids: [R] int, the next token of each row.
            lengths: [R] int, tokens already in each row, at most `cache.max_len - 1`; the caller adds one after.
            longest: the greatest of `lengths`, known to the caller without a synchronisation.
        """
        rows = token_ids.shape[0]
        live = longest + 1
        rotary = self._rotary(lengths[:, None])
        mask = (torch.arange(live, device=token_ids.device) <= lengths[:, None]).view(rows, 1, 1, live)
        x: Tensor = self.embedding(token_ids)[:, None]
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.attention_norm(x), rotary)
            keys, values = cache.write_one(index, lengths, live, k, v)
            x = x + block.attention.attend_one(q, keys, values, mask)
            x = x + block.ffn(block.ffn_norm(x))
        hidden: Tensor = self.norm(x[:, 0])
        return hidden

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, T, d] of positions [B, T]."""
        cos, sin = self.rotary_cos, self.rotary_sin
        assert isinstance(cos, Tensor)
        assert isinstance(sin, Tensor)
        return cos[positions][:, None], sin[positions][:, None]


def rotary_tables(max_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables [max_len, head_dim] of rotary positions, both halves alike, computed in float64."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (i, i + d/2) of the last axis of [B, H, T, d] by its position's angle."""
    cos, sin = rotary
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def padding_mask(attention_mask: Tensor) -> Tensor:
    """[B, 1, T, T] bool: causal, real tokens only; every token may see itself, so that no row is empty."""
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return ((causal & attention_mask.bool()[:, None, :]) | itself)[:, None]
