"""The Llama architecture in plain torch, for training only; parameter names are those of transformers' checkpoints.

Rows hold several documents, so attention takes a mask; positions count from the row's start, which rotary
embedding makes harmless. Serving knows nothing of this file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are those of the shipped one."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    max_length: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, length, head_dim], halves paired as transformers pairs them."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            x_projected.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for x_projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        groups = self.shape.num_heads // self.shape.num_kv_heads
        key = rotate(key, cos, sin).repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(rotate(query, cos, sin), key, value, attn_mask=mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Llama(nn.Module):
    """Decoder with tied input and output embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5 if deep else 0.02)

    def forward(self, ids: Tensor, begin: int) -> Tensor:
        """Logits [rows, length, vocab_size] for ids [rows, length]; no token sees past its document's beginning."""
        length = ids.shape[1]
        document = (ids == begin).cumsum(dim=1)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        seen = (document[:, :, None] == document[:, None, :]) & causal
        x = self.embed_tokens(ids)
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else x.dtype
        x = x.to(dtype)
        mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill(~seen, -torch.inf)[:, None]
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def checkpoint(model: Llama) -> dict[str, Tensor]:
    """The parameters in bf16 under the names of a transformers checkpoint; the tied output embedding is left out."""
    return {f"model.{name}": p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.named_parameters()}
