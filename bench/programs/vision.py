"""Pictures: classification, segmentation, restoration."""

from __future__ import annotations

from typing import Any

import torch
from programs.program import program, without_torchvision
from torch.nn import functional


def _classify(model: Any, batch: Any) -> Any:
    x, classes = batch
    return functional.cross_entropy(model(x), classes)


def _pictures(rows: int = 8, size: int = 32, classes: int = 10) -> tuple[Any, Any]:
    return torch.randn(rows, 3, size, size), torch.randint(classes, (rows,))


def _segmented(rows: int = 2, size: int = 32, channels: int = 1, classes: int = 3) -> tuple[Any, Any]:
    return torch.randn(rows, channels, size, size), torch.randint(classes, (rows, size, size))


@program("vit-pytorch", "ViT")
def vit() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch import ViT

    model = ViT(
        image_size=32, patch_size=4, num_classes=10, dim=64, depth=4, heads=4, mlp_dim=128, dropout=0.1, emb_dropout=0.1
    )
    return model.train(), _pictures(), _classify


@program("vit-pytorch", "CaiT with layer dropout", changing=True)
def cait() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.cait import CaiT

    model = CaiT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=64,
        depth=4,
        cls_depth=1,
        heads=4,
        mlp_dim=128,
        dropout=0.1,
        layer_dropout=0.2,
    )
    return model.train(), _pictures(), _classify


@program("vit-pytorch", "MaxViT with stochastic depth")
def max_vit() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.max_vit import MaxViT

    model = MaxViT(
        num_classes=10,
        dim_conv_stem=16,
        dim=16,
        dim_head=16,
        depth=(1, 1),
        window_size=4,
        mbconv_expansion_rate=2,
        dropout=0.1,
    )
    return model.train(), _pictures(4), _classify


@program("vit-pytorch", "CvT")
def cvt() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.cvt import CvT

    model = CvT(
        num_classes=10,
        s1_emb_dim=16,
        s1_emb_stride=2,
        s2_emb_dim=32,
        s2_depth=1,
        s3_emb_dim=48,
        s3_depth=1,
        s1_mlp_mult=2,
        s2_mlp_mult=2,
        s3_mlp_mult=2,
        s2_heads=2,
        s3_heads=3,
    )
    return model.train(), _pictures(4), _classify


@program("vit-pytorch", "adaptive token sampling", changing=True)
def ats() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.ats_vit import ViT

    model = ViT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=64,
        depth=3,
        max_tokens_per_depth=(48, 32, 16),
        heads=4,
        mlp_dim=128,
        dropout=0.1,
    )
    return model.train(), _pictures(), _classify


@program("vit-pytorch", "patches left out")
def patch_dropout() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.vit_with_patch_dropout import ViT

    model = ViT(image_size=32, patch_size=4, num_classes=10, dim=64, depth=4, heads=4, mlp_dim=128, patch_dropout=0.25)
    return model.train(), _pictures(), _classify


@program("vit-pytorch", "NaViT: pictures of several sizes packed, tokens left out")
def navit() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch.na_vit import NaViT

    model = NaViT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=64,
        depth=3,
        heads=4,
        mlp_dim=128,
        dropout=0.1,
        token_dropout_prob=0.1,
    )
    batch = {
        "a": torch.randn(3, 32, 24),
        "b": torch.randn(3, 16, 32),
        "c": torch.randn(3, 28, 28),
        "classes": torch.randint(10, (3,)),
    }

    def loss(m: Any, b: Any) -> Any:
        return functional.cross_entropy(m([[b["a"], b["b"]], [b["c"]]]), b["classes"])

    return model.train(), batch, loss


@program("vit-pytorch", "looped ViT")
def looped() -> tuple[Any, Any, Any]:
    with without_torchvision():
        from vit_pytorch import LoopedViT

    model = LoopedViT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=64,
        pre_loop_depth=1,
        num_looped_blocks=2,
        post_loop_depth=1,
        loop_depth=3,
        heads=4,
        dim_head=16,
        mlp_dim=128,
    )
    return model.train(), _pictures(), _classify


@program("monai", "U-Net in 3 dimensions, residual units, instance norm")
def unet() -> tuple[Any, Any, Any]:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(8, 16), strides=(2,), num_res_units=1)
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return (
        model.train(),
        (torch.randn(2, 1, 16, 16, 16), torch.randint(3, (2, 1, 16, 16, 16))),
        lambda m, b: loss(m(b[0]), b[1]),
    )


@program("monai", "DynUNet with deep supervision")
def dynunet() -> tuple[Any, Any, Any]:
    from monai.networks.nets import DynUNet

    model = DynUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[8, 16, 32, 32],
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    )

    def loss(m: Any, b: Any) -> Any:
        x, classes = b
        return sum(functional.cross_entropy(out, classes) * 0.5**n for n, out in enumerate(m(x).unbind(1)))

    return model.train(), _segmented(), loss


@program("monai", "DenseNet")
def densenet() -> tuple[Any, Any, Any]:
    from monai.networks.nets import DenseNet

    model = DenseNet(2, 3, 10, init_features=16, growth_rate=8, block_config=(2, 2), dropout_prob=0.1)
    return model.train(), _pictures(), _classify


@program("monai", "EfficientNet with drop connect")
def efficientnet() -> tuple[Any, Any, Any]:
    from monai.networks.nets.efficientnet import EfficientNet

    model = EfficientNet(
        ["r1_k3_s11_e1_i32_o8_se0.25", "r2_k3_s22_e2_i8_o12_se0.25"],
        spatial_dims=2,
        in_channels=3,
        num_classes=10,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        image_size=32,
        drop_connect_rate=0.2,
    )
    return model.train(), _pictures(), _classify


@program("kornia", "random augmentation in forward, then SSIM", changing=True)
def augmented() -> tuple[Any, Any, Any]:
    from kornia import augmentation, losses

    class Restoring(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.changed = augmentation.AugmentationSequential(
                augmentation.RandomHorizontalFlip(p=0.5),
                augmentation.RandomGaussianNoise(p=0.5),
                augmentation.RandomErasing(p=0.5),
            )
            self.body = torch.nn.Sequential(
                *(
                    torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.GELU())
                    for a, b in ((3, 16), (16, 16), (16, 16), (16, 3))
                )
            )

        def forward(self, x: Any) -> Any:
            x = self.changed(x)
            return losses.ssim_loss(self.body(x), x, 5)

    return Restoring().train(), torch.rand(8, 3, 32, 32), lambda m, x: m(x)
