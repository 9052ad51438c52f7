"""Tables and time series."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import program
from torch.nn import functional


@program("pytorch-tabnet", "TabNet: sparsemax masks, ghost batch norm")
def tabnet() -> tuple[Any, Any, Any]:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(16, 4, n_d=16, n_a=16, n_steps=3, virtual_batch_size=64, group_attention_matrix=torch.eye(16))

    def loss(m: Any, b: Any) -> Any:
        out, sparse = m(b[0])
        return functional.cross_entropy(out, b[1]) - 1e-3 * sparse

    return model.train(), (torch.randn(256, 16), torch.randint(4, (256,))), loss


@program("tab-transformer-pytorch", "FT-Transformer")
def ft_transformer() -> tuple[Any, Any, Any]:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=(10, 5, 6), num_continuous=5, dim=32, dim_out=1, depth=3, heads=4, attn_dropout=0.1, ff_dropout=0.1
    )
    batch = (torch.randint(5, (32, 3)), torch.randn(32, 5), torch.randn(32, 1))
    return model.train(), batch, lambda m, b: functional.mse_loss(m(b[0], b[1]), b[2])


@program("tab-transformer-pytorch", "TabTransformer")
def tab_transformer() -> tuple[Any, Any, Any]:
    from tab_transformer_pytorch import TabTransformer

    model = TabTransformer(
        categories=(10, 5, 6),
        num_continuous=5,
        dim=32,
        dim_out=1,
        depth=3,
        heads=4,
        attn_dropout=0.1,
        ff_dropout=0.1,
        mlp_act=torch.nn.ReLU(),
    )
    batch = (torch.randint(5, (32, 3)), torch.randn(32, 5), torch.randn(32, 1))
    return model.train(), batch, lambda m, b: functional.mse_loss(m(b[0], b[1]), b[2])


@program("entmax", "attention by entmax (an autograd function)")
def entmax_attention() -> tuple[Any, Any, Any]:
    from entmax import entmax15

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
            self.norm = torch.nn.LayerNorm(32)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            return x + self.out(entmax15(q @ k.transpose(1, 2) / 6.0, dim=-1) @ v)

    return (
        torch.nn.Sequential(*(Block() for _ in range(4))).train(),
        torch.randn(8, 48, 32),
        lambda m, x: m(x).square().mean(),
    )


@program("nbeats-pytorch", "N-BEATS: trend, seasonality, generic")
def nbeats() -> tuple[Any, Any, Any]:
    from nbeats_pytorch.model import NBeatsNet

    model = (
        NBeatsNet(
            stack_types=("trend", "seasonality", "generic"),
            nb_blocks_per_stage=2,
            forecast_length=8,
            backcast_length=32,
            thetas_dim=(4, 8, 8),
            hidden_layer_units=64,
        )
        if False
        else NBeatsNet(
            stack_types=("trend", "seasonality", "generic"),
            nb_blocks_per_stack=2,
            forecast_length=8,
            backcast_length=32,
            thetas_dim=(4, 8, 8),
            hidden_layer_units=64,
        )
    )

    def loss(m: Any, b: Any) -> Any:
        back, forward = m(b[0])
        return functional.mse_loss(forward, b[1]) + 0.1 * back.square().mean()

    return model.train(), (torch.randn(256, 32), torch.randn(256, 8)), loss


@program("chronos-forecasting", "Chronos-Bolt: patches into T5")
def chronos() -> tuple[Any, Any, Any]:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        vocab_size=2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        pad_token_id=0,
        decoder_start_token_id=0,
        reg_token_id=1,
        is_gated_act=False,
    )
    config.chronos_config = {
        "context_length": 128,
        "prediction_length": 16,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    model = ChronosBoltModelForForecasting(config)
    batch = {"context": torch.randn(16, 128), "target": torch.randn(16, 16)}
    return model.train(), batch, None


@program("pytorch-crf", "LSTM tagger with a conditional random field")
def tagger() -> tuple[Any, Any, Any]:
    from torchcrf import CRF

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(200, 32)
            self.body = torch.nn.LSTM(32, 32, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
            self.head, self.crf = torch.nn.Linear(64, 6), CRF(6, batch_first=True)

        def forward(self, words: Any, tags: Any, lengths: Any) -> Any:
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            x, _ = torch.nn.utils.rnn.pad_packed_sequence(
                self.body(packed)[0], batch_first=True, total_length=words.shape[1]
            )
            mask = torch.arange(words.shape[1])[None] < lengths[:, None]
            return -self.crf(self.head(x), tags, mask=mask, reduction="mean")

    batch = (torch.randint(200, (16, 24)), torch.randint(6, (16, 24)), torch.randint(8, 25, (16,)))
    return Tagger().train(), batch, lambda m, b: m(*b)


@program("gpytorch", "exact Gaussian process, marginal likelihood")
def gaussian_process() -> tuple[Any, Any, Any]:
    import gpytorch

    class Process(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=4))

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x, y = torch.rand(128, 4), torch.randn(128)
    model = Process(x, y, gpytorch.likelihoods.GaussianLikelihood())
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return model.train(), (x, y), lambda m, b: -objective(m(b[0]), b[1])
