"""Language models."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import own_loss, program


def _tokens(rows: int = 8, length: int = 64, words: int = 256) -> torch.Tensor:
    return torch.randint(words, (rows, length))


@program("x-transformers", "decoder: rotary positions, RMSNorm, gated feed-forward")
def decoder() -> tuple[Any, Any, Any]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=4, heads=4, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, attn_dropout=0.1)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers))
    return model.train(), (_tokens(),), own_loss


@program("x-transformers", "encoder and decoder")
def encoder_decoder() -> tuple[Any, Any, Any]:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=64,
        enc_num_tokens=256,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=64,
        dec_num_tokens=256,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=64,
        tie_token_emb=True,
    )
    return model.train(), (_tokens(), _tokens(8, 48)), own_loss


@program("x-transformers", "decoder: ALiBi, talking heads, memories, residual attention")
def talking_heads() -> tuple[Any, Any, Any]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(
        dim=64,
        depth=3,
        heads=4,
        alibi_pos_bias=True,
        attn_pre_talking_heads=True,
        attn_post_talking_heads=True,
        attn_num_mem_kv=4,
        residual_attn=True,
    )
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers))
    return model.train(), (_tokens(),), own_loss


@program("performer-pytorch", "random features, redrawn now and then", changing=True)
def performer() -> tuple[Any, Any, Any]:
    from performer_pytorch import PerformerLM

    model = PerformerLM(
        num_tokens=256, max_seq_len=64, dim=64, depth=3, heads=4, causal=False, feature_redraw_interval=7
    )
    return model.train(), _tokens(), _next_token


@program("linformer", "projected keys")
def linformer() -> tuple[Any, Any, Any]:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=256, dim=64, seq_len=64, depth=3, heads=4, k=16).train(), _tokens(), _next_token


@program("routing-transformer", "attention among clusters of k-means, moved in forward", changing=True)
def routing() -> tuple[Any, Any, Any]:
    from routing_transformer import AutoregressiveWrapper, RoutingTransformerLM

    model = AutoregressiveWrapper(
        RoutingTransformerLM(
            num_tokens=256, dim=64, heads=4, depth=2, max_seq_len=128, window_size=16, n_local_attn_heads=2, causal=True
        )
    )
    return model.train(), _tokens(4, 129), lambda m, x: m(x, return_loss=True)


@program("compressive-transformer-pytorch", "memories passed from stretch to stretch")
def compressive() -> tuple[Any, Any, Any]:
    from compressive_transformer_pytorch import AutoregressiveWrapper, CompressiveTransformer

    model = AutoregressiveWrapper(
        CompressiveTransformer(
            num_tokens=256,
            dim=64,
            depth=2,
            seq_len=32,
            mem_len=32,
            cmem_len=8,
            cmem_ratio=4,
            heads=4,
            memory_layers=[1, 2],
        )
    )

    def loss(m: Any, x: Any) -> Any:
        total = 0.0
        for part, aux, _ in m(x, max_batch_size=x.shape[0], return_loss=True):
            total = total + part + aux
        return total

    return model.train(), _tokens(4, 97), loss


@program("block-recurrent-transformer-pytorch", "a state carried through blocks of tokens")
def block_recurrent() -> tuple[Any, Any, Any]:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=256,
        dim=64,
        depth=3,
        dim_head=16,
        heads=4,
        max_seq_len=64,
        block_width=32,
        num_state_vectors=32,
        recurrent_layers=(2,),
    )
    return model.train(), _tokens(4, 65), lambda m, x: m(x, return_loss=True)[0]


@program("recurrent-memory-transformer-pytorch", "memory tokens from segment to segment")
def recurrent_memory() -> tuple[Any, Any, Any]:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    model = RecurrentMemoryTransformerWrapper(
        RecurrentMemoryTransformer(
            num_tokens=256, num_memory_tokens=8, dim=64, depth=2, causal=True, dim_head=16, heads=4, seq_len=32
        )
    )
    return model.train(), _tokens(4, 97), lambda m, x: m(x, memory_replay_backprop=False, return_loss=True)[0]


@program("gateloop-transformer", "data-controlled linear recurrence by associative scan")
def gateloop() -> tuple[Any, Any, Any]:
    from gateloop_transformer import Transformer

    model = Transformer(num_tokens=256, dim=64, depth=3, use_gate_looped_attn=True)
    return model.train(), _tokens(8, 65), lambda m, x: m(x, return_loss=True)


@program("mambapy", "Mamba with its own parallel scan (an autograd function)")
def mamba() -> tuple[Any, Any, Any]:
    from mambapy.mamba import Mamba, MambaConfig

    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 32), Mamba(MambaConfig(d_model=32, n_layers=3)), torch.nn.Linear(32, 256)
    )
    return model.train(), _tokens(4, 64), _next_token


@program("yet-another-retnet", "RetNet, parallel form")
def another_retnet() -> tuple[Any, Any, Any]:
    from yet_another_retnet.retnet import RetNet

    model = RetNet(num_tokens=256, d_model=64, nhead=4, num_layers=3, dim_feedforward=128, dropout=0.1)
    return model.train(), _tokens(), lambda m, x: _next_token(m.forward_parallel, x)


@program("st-moe-pytorch", "mixture of experts with balance and router losses")
def st_moe() -> tuple[Any, Any, Any]:
    from st_moe_pytorch import MoE, SparseMoEBlock

    model = SparseMoEBlock(MoE(dim=64, num_experts=4, gating_top_n=2), add_ff_before=True, add_ff_after=True)

    def loss(m: Any, x: Any) -> Any:
        out, auxiliary, _, _ = m(x)
        return out.square().mean() + auxiliary

    return model.train(), torch.randn(8, 64, 64), loss


@program("soft-moe-pytorch", "soft mixture of experts")
def soft_moe() -> tuple[Any, Any, Any]:
    from soft_moe_pytorch import SoftMoE

    model = torch.nn.Sequential(*(SoftMoE(dim=64, seq_len=64, num_experts=4) for _ in range(2)))
    return model.train(), torch.randn(8, 64, 64), lambda m, x: m(x).square().mean()


@program("mixture-of-experts", "top-2 gating")
def mixture() -> tuple[Any, Any, Any]:
    from mixture_of_experts import MoE

    def loss(m: Any, x: Any) -> Any:
        out, auxiliary = m(x)
        return out.square().mean() + auxiliary

    return MoE(dim=64, num_experts=4, hidden_dim=128).train(), torch.randn(4, 64, 64), loss


def _next_token(model: Any, tokens: Any) -> Any:
    """Cross entropy of each next token, of a model that returns logits."""
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
