"""Diffusion, flows, autoencoders, quantisers."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import own_loss, program, without_torchvision
from torch.nn import functional


@program("denoising-diffusion-pytorch", "Gaussian diffusion, U-Net with linear attention")
def diffusion() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=100)
    return model.train(), (torch.rand(4, 3, 16, 16),), own_loss


@program("denoising-diffusion-pytorch", "Gaussian diffusion with self-conditioning", changing=True)
def self_conditioned() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    model = GaussianDiffusion1D(
        Unet1D(dim=8, dim_mults=(1, 2), channels=4, self_condition=True), seq_length=16, timesteps=100
    )
    return model.train(), (torch.rand(16, 4, 16),), own_loss


class _Autoencoder(torch.nn.Module):
    """A convolutional autoencoder around a quantiser."""

    def __init__(self, quantiser: Any, width: int = 32) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Conv1d(1, width, 4, 2, 1),
            torch.nn.GELU(),
            torch.nn.Conv1d(width, width, 4, 2, 1),
            torch.nn.GELU(),
            torch.nn.Conv1d(width, width, 3, 1, 1),
        )
        self.quantiser = quantiser
        self.decoder = torch.nn.Sequential(
            torch.nn.ConvTranspose1d(width, width, 4, 2, 1),
            torch.nn.GELU(),
            torch.nn.ConvTranspose1d(width, 1, 4, 2, 1),
        )

    def forward(self, x: Any) -> Any:
        found = self.quantiser(self.encoder(x).transpose(1, 2))
        said = self.decoder(found[0].transpose(1, 2))
        extra = found[2].sum() if len(found) > 2 else 0.0
        return functional.mse_loss(said, x) + extra


@program("vector-quantize-pytorch", "autoencoder, codebook moved by averages in forward")
def quantised() -> tuple[Any, Any, Any]:
    from vector_quantize_pytorch import VectorQuantize

    return _Autoencoder(VectorQuantize(dim=32, codebook_size=64)).train(), (torch.randn(8, 1, 256),), own_loss


@program("vector-quantize-pytorch", "residual quantiser with dropout of quantisers", changing=True)
def residual_quantised() -> tuple[Any, Any, Any]:
    from vector_quantize_pytorch import ResidualVQ

    quantiser = ResidualVQ(
        dim=32, codebook_size=64, num_quantizers=4, quantize_dropout=True, learnable_codebook=True, ema_update=False
    )
    return _Autoencoder(quantiser).train(), (torch.randn(8, 1, 256),), own_loss


@program("vector-quantize-pytorch", "residual quantiser with dropout, codebooks moved by averages", changing=True)
def residual_average() -> tuple[Any, Any, Any]:
    from vector_quantize_pytorch import ResidualVQ

    quantiser = ResidualVQ(dim=32, codebook_size=64, num_quantizers=4, quantize_dropout=True)
    return _Autoencoder(quantiser).train(), (torch.randn(8, 1, 256),), own_loss


@program("vector-quantize-pytorch", "finite scalar quantisation")
def finite_scalar() -> tuple[Any, Any, Any]:
    from vector_quantize_pytorch import FSQ

    return _Autoencoder(FSQ([8, 5, 5], dim=32)).train(), (torch.randn(8, 1, 256),), own_loss


@program("vector-quantize-pytorch", "lookup-free quantisation with entropy loss")
def lookup_free() -> tuple[Any, Any, Any]:
    from vector_quantize_pytorch import LFQ

    return (
        _Autoencoder(LFQ(codebook_size=64, dim=32, entropy_loss_weight=0.1)).train(),
        (torch.randn(8, 1, 256),),
        own_loss,
    )


@program("zuko", "neural spline flow")
def spline_flow() -> tuple[Any, Any, Any]:
    from zuko.flows import NSF

    model = NSF(6, 4, transforms=1, hidden_features=(64, 64))
    return model.train(), (torch.randn(128, 6), torch.randn(128, 4)), lambda m, b: -m(b[1]).log_prob(b[0]).mean()


@program("monai", "AutoencoderKL with perceptual-free loss")
def autoencoder_kl() -> tuple[Any, Any, Any]:
    from monai.networks.nets import AutoencoderKL

    model = AutoencoderKL(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(16, 32),
        num_res_blocks=1,
        attention_levels=(False, True),
        latent_channels=3,
        norm_num_groups=8,
    )

    def loss(m: Any, x: Any) -> Any:
        said, mean, sigma = m(x)
        return functional.l1_loss(said, x) + 1e-3 * (mean.square() + sigma.square() - sigma.square().log() - 1).mean()

    return model.train(), torch.rand(2, 1, 32, 32), loss


@program("pyro-ppl", "variational autoencoder by Trace_ELBO")
def variational() -> tuple[Any, Any, Any]:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Softplus(), torch.nn.Linear(128, 16))
            self.decoder = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Softplus(), torch.nn.Linear(128, 64))

        def generate(self, x: Any) -> None:
            with pyro.plate("data", x.shape[0]):
                z = pyro.sample("z", dist.Normal(x.new_zeros(x.shape[0], 8), 1.0).to_event(1))
                pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

        def guide(self, x: Any) -> None:
            with pyro.plate("data", x.shape[0]):
                mean, scale = self.encoder(x).chunk(2, -1)
                pyro.sample("z", dist.Normal(mean, functional.softplus(scale) + 0.01).to_event(1))

        def forward(self, x: Any) -> Any:
            return Trace_ELBO().differentiable_loss(self.generate, self.guide, x) / x.shape[0]

    return Model().train(), (torch.rand(256, 64).round(),), own_loss
