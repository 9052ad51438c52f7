"""Ways to train: adversaries, contrasts, momentum encoders, penalties."""

from __future__ import annotations

import copy
from typing import Any

import torch
from programs.program import own_loss, program, without_torchvision
from torch.nn import functional
from torch.nn.utils import parametrizations


def _encoder(width: int = 64, out: int = 32) -> Any:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 2, 1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(16, 32, 3, 2, 1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, out),
    )


@program("pytorch-metric-learning", "NT-Xent over two views")
def contrasted() -> tuple[Any, Any, Any]:
    from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss

    objective = SelfSupervisedLoss(NTXentLoss(0.2))
    return (
        _encoder().train(),
        (torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16)),
        lambda m, b: objective(m(b[0]), m(b[1])),
    )


@program("pytorch-metric-learning", "triplets mined from the batch", changing=True)
def mined() -> tuple[Any, Any, Any]:
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    miner, objective = MultiSimilarityMiner(), TripletMarginLoss()

    def loss(m: Any, b: Any) -> Any:
        found = m(b[0])
        return objective(found, b[1], miner(found, b[1]))

    return _encoder().train(), (torch.randn(32, 3, 16, 16), torch.arange(32) % 4), loss


@program("info-nce-pytorch", "momentum encoder and a queue of keys (MoCo)")
def momentum() -> tuple[Any, Any, Any]:
    from info_nce import info_nce

    class Momentum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = _encoder()
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(64, 32), dim=1))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, a: Any, b: Any) -> Any:
            said = self.query(a)
            with torch.no_grad():
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    key.mul_(0.99).add_(query, alpha=0.01)
                known = self.key(b)
            loss = info_nce(said, known, self.queue.clone(), negative_mode="unpaired")
            with torch.no_grad():
                self.queue[(self.place + torch.arange(len(known))) % 64] = functional.normalize(known, dim=1)
                self.place.add_(len(known)).remainder_(64)
            return loss

    return Momentum().train(), (torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16)), own_loss


@program("lightly", "BYOL heads, target by ema in forward")
def byol() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad, update_momentum

    class Byol(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = torch.nn.Sequential(_encoder(64, 64), BYOLProjectionHead(64, 64, 32))
            self.predictor = BYOLPredictionHead(32, 64, 32)
            self.target = copy.deepcopy(self.online)
            deactivate_requires_grad(self.target)
            self.objective = NegativeCosineSimilarity()

        def forward(self, a: Any, b: Any) -> Any:
            update_momentum(self.online, self.target, m=0.99)
            with torch.no_grad():
                known = self.target(b)
            return self.objective(self.predictor(self.online(a)), known)

    return Byol().train(), (torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16)), own_loss


@program("lightly", "Barlow Twins and VICReg")
def twins() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from lightly.loss import BarlowTwinsLoss, VICRegLoss

    first, second = BarlowTwinsLoss(), VICRegLoss()

    def loss(m: Any, b: Any) -> Any:
        x, y = m(b[0]), m(b[1])
        return first(x, y) + second(x, y)

    return _encoder().train(), (torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16)), loss


def _discriminator() -> Any:
    return torch.nn.Sequential(
        *(
            parametrizations.spectral_norm(torch.nn.Conv2d(a, b, 4, 2, 1)) if n % 2 == 0 else torch.nn.LeakyReLU(0.2)
            for n, (a, b) in enumerate(((3, 16), (0, 0), (16, 32), (0, 0)))
        ),
        torch.nn.Flatten(),
        parametrizations.spectral_norm(torch.nn.Linear(32 * 16, 1)),
    )


@program("torch", "critic with spectral norm and a gradient penalty (WGAN-GP)")
def gradient_penalty() -> tuple[Any, Any, Any]:
    class Critic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.nn.Sequential(
                torch.nn.Linear(8, 3 * 256), torch.nn.Tanh(), torch.nn.Unflatten(1, (3, 16, 16))
            )
            self.body = _discriminator()

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                made = self.generator(torch.randn(len(x), 8))
            share = torch.rand(len(x), 1, 1, 1)
            between = (share * x + (1 - share) * made).requires_grad_()
            (slope,) = torch.autograd.grad(self.body(between).sum(), between, create_graph=True)
            return (
                self.body(made).mean() - self.body(x).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
            )

    return Critic().train(), (torch.randn(16, 3, 16, 16),), own_loss


@program("torch", "generator and discriminator in one step, weight norm")
def adversaries() -> tuple[Any, Any, Any]:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.nn.Sequential(
                parametrizations.weight_norm(torch.nn.Linear(8, 256)),
                torch.nn.GELU(),
                parametrizations.weight_norm(torch.nn.Linear(256, 3 * 256)),
                torch.nn.Tanh(),
                torch.nn.Unflatten(1, (3, 16, 16)),
            )
            self.discriminator = _discriminator()

        def forward(self, x: Any) -> Any:
            made = self.generator(torch.randn(len(x), 8))
            real, false = self.discriminator(x), self.discriminator(made.detach())
            own = functional.softplus(-real).mean() + functional.softplus(false).mean()
            frozen = torch.nn.utils.stateless.functional_call(
                self.discriminator, {name: p.detach() for name, p in self.discriminator.named_parameters()}, (made,)
            )
            return own + functional.softplus(-frozen).mean()

    return Both().train(), (torch.randn(16, 3, 16, 16),), own_loss


@program("torch", "embedding bags, a GRU and a CTC loss")
def bags() -> tuple[Any, Any, Any]:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = torch.nn.EmbeddingBag(500, 32, mode="mean")
            self.body = torch.nn.GRU(32, 64, num_layers=2, dropout=0.1, batch_first=True)
            self.head = torch.nn.Linear(64, 20)

        def forward(self, words: Any, said: Any) -> Any:
            x = self.bags(words.flatten(0, 1)).view(*words.shape[:2], -1)
            x = self.head(self.body(x)[0]).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((words.shape[0],), words.shape[1])
            return functional.ctc_loss(x, said, lengths, torch.full_like(lengths, said.shape[1]))

    return Net().train(), (torch.randint(500, (16, 40, 5)), torch.randint(1, 20, (16, 8))), own_loss
