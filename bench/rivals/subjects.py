"""The models that memfit and its rivals are set beside each other on: one entry each in `SUBJECTS`, found by name.

Sizes are such that a plain step takes about half a second on one core and that what autograd saves outweighs parameters and optimizer state, as it does where
people run out of memory. Shapes (depth to width, heads, tokens, the share of the vocabulary) follow the models they are named after.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

Built = tuple[nn.Module, Any, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure on.

    Attributes:
        name: as `--models` takes it.
        words: what it is, for the page.
        make: `make(batch)` gives (model, sample, loss function or None); seeds itself.
        batch: samples in a step.
        blocks: paths of what people would wrap in a checkpoint: containers (each child is a block) or single modules, in order of execution.
        chain: blocks hand one tensor on and nothing goes around them, so that neighbours can be joined in a segment.
        hugging_face: a `PreTrainedModel`, with its own gradient checkpointing.
        compiles: `torch.compile` is worth its minutes here.
    """

    name: str
    words: str
    make: Callable[[int], Built]
    batch: int
    blocks: tuple[str, ...] = ()
    chain: bool = False
    hugging_face: bool = False
    compiles: bool = False

    def build(self) -> Built:
        """Model in train mode, one batch, loss function."""
        return self.make(self.batch)

    def with_batch(self, batch: int) -> Subject:
        """The same model on another number of samples."""
        return replace(self, batch=batch)

    def holders(self, model: nn.Module) -> list[nn.Module]:
        """The containers and modules that `blocks` names."""
        return [operator.attrgetter(path)(model) for path in self.blocks]

    def block_list(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, in order of execution."""
        found: list[nn.Module] = []
        for holder in self.holders(model):
            # A subclass of nn.Sequential (U-Net's pairs of convolutions) is one block.
            found += list(holder) if type(holder) in {nn.ModuleList, nn.Sequential} else [holder]  # type: ignore[call-overload]
        return found

    def block_paths(self, model: nn.Module) -> list[str]:
        """Module paths of the blocks."""
        wanted = {id(block) for block in self.block_list(model)}
        return [path for path, module in model.named_modules() if id(module) in wanted]


def _gpt(batch: int) -> Built:
    from models.transformer import build_gpt

    return build_gpt(8, 192, 4, batch, 192, 1000)


def _gpt_dropout(batch: int) -> Built:
    from models.transformer import build_gpt

    return build_gpt(4, 128, 4, batch, 128, 500, 0.1)


def _small_gpt(batch: int) -> Built:
    from models.transformer import build_gpt

    return build_gpt(4, 96, 4, batch, 96, 300)


def _bert(layers: int, hidden: int, heads: int, tokens: int) -> Callable[[int], Built]:
    def make(batch: int) -> Built:
        import transformers

        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=4000,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=tokens,
            attn_implementation="eager",
        )
        model = transformers.BertForSequenceClassification(config).train()
        sample = {
            "input_ids": torch.randint(4000, (batch, tokens)),
            "attention_mask": torch.ones(batch, tokens, dtype=torch.long),
            "labels": torch.randint(2, (batch,)),
        }
        return model, sample, None

    return make


def _vit(batch: int) -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=112,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=100,
        attn_implementation="eager",
    )
    model = transformers.ViTForImageClassification(config).train()
    sample = {"pixel_values": torch.randn(batch, 3, 112, 112), "labels": torch.randint(100, (batch,))}
    return model, sample, None


def _llama(batch: int) -> Built:
    import transformers

    torch.manual_seed(0)
    tokens, vocab = 128, 16000
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(3, vocab, (batch, tokens))
    return model, {"input_ids": ids, "labels": ids.clone()}, None


def _t5(batch: int) -> Built:
    import transformers

    torch.manual_seed(0)
    tokens, vocab = 128, 4000
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=192,
        d_kv=48,
        d_ff=768,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    sample = {
        "input_ids": torch.randint(1, vocab, (batch, tokens)),
        "labels": torch.randint(1, vocab, (batch, tokens // 2)),
    }
    return model, sample, None


class _ResNet50(nn.Module):
    """He et al. 2016 with 3-4-6-3 bottlenecks and the 7 x 7 stem, a quarter as wide."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        from models.convolution import Bottleneck

        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inner = width
        for stage, count in enumerate((3, 4, 6, 3)):
            outer = 4 * width * 2**stage
            for number in range(count):
                blocks.append(Bottleneck(inner, outer, 2 if stage and not number else 1))
                inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inner, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.pool(self.blocks(self.stem(x))).flatten(1))
        return logits


def _resnet50(batch: int) -> Built:
    from models.built import cross_entropy

    torch.manual_seed(0)
    sample = torch.randn(batch, 3, 96, 96), torch.randint(100, (batch,))
    return _ResNet50(16, 100).train(), sample, cross_entropy


class _Residual(nn.Module):
    """Norm, two convolutions on few channels, added to the input: what a thousand-layer ResNet is made of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.conv2(torch.relu(self.conv1(self.norm(x))))
        return y


class _Thousand(nn.Module):
    """A stem, residual blocks all alike, a head."""

    def __init__(self, blocks: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.blocks = nn.Sequential(*(_Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def _thousand(batch: int) -> Built:
    from models.built import cross_entropy

    torch.manual_seed(0)
    return _Thousand(1000, 4, 10).train(), (torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))), cross_entropy


def _unet(batch: int) -> Built:
    from models.built import cross_entropy
    from models.convolution import UNet

    torch.manual_seed(0)
    size, classes = 96, 4
    sample = torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size))
    return UNet((8, 16, 32, 64, 128), classes, nn.BatchNorm2d).train(), sample, cross_entropy


class _Recurrent(nn.Module):
    """Embedding, recurrent layers with dropout between them, head; layers are modules of their own, so that they can be checkpointed."""

    def __init__(self, layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        logits: torch.Tensor = self.head(x)
        return logits


def _lstm(batch: int) -> Built:
    from models.built import cross_entropy, tokens_and_targets

    torch.manual_seed(0)
    return _Recurrent(4, 192, 2000).train(), tokens_and_targets(batch, 96, 2000), cross_entropy


SUBJECTS: Final = (
    Subject(
        "gpt", "GPT, 8 x 192, 4 heads, 192 tokens, explicit attention", _gpt, 8, ("blocks",), chain=True, compiles=True
    ),
    Subject(
        "bert_base",
        "BERT-base's shape (12 layers, 12 heads) at width 192, 96 tokens, dropout 0.1",
        _bert(12, 192, 12, 96),
        8,
        ("bert.encoder.layer",),
        chain=True,
        hugging_face=True,
    ),
    Subject(
        "bert_large",
        "BERT-large's shape (24 layers, 16 heads) at width 128, 96 tokens, dropout 0.1",
        _bert(24, 128, 16, 96),
        6,
        ("bert.encoder.layer",),
        chain=True,
        hugging_face=True,
    ),
    Subject(
        "llama",
        "Llama, 6 x 192, grouped queries, 128 tokens, vocabulary 16,000",
        _llama,
        8,
        ("model.layers",),
        chain=True,
        hugging_face=True,
        compiles=True,
    ),
    Subject("vit", "ViT, 8 x 192, 197 tokens", _vit, 8, ("vit.layers",), chain=True, hugging_face=True),
    Subject(
        "t5",
        "T5, 4 + 4 layers x 192, 128 + 64 tokens, dropout 0.1",
        _t5,
        10,
        ("encoder.block", "decoder.block"),
        hugging_face=True,
    ),
    Subject(
        "resnet50",
        "ResNet-50's blocks a quarter as wide, 96 x 96",
        _resnet50,
        64,
        ("blocks",),
        chain=True,
        compiles=True,
    ),
    Subject("thousand", "1000 residual blocks of 4 channels, 16 x 16", _thousand, 8, ("blocks",), chain=True),
    Subject("unet", "U-Net of 5 levels, 96 x 96, batch norm", _unet, 32, ("first", "down", "merge")),
    Subject("lstm", "4 LSTM layers x 192, 96 tokens, vocabulary 2,000", _lstm, 48, ("layers",)),
)

QUICK: Final = Subject("small_gpt", "GPT, 4 x 96, 96 tokens", _small_gpt, 8, ("blocks",), chain=True)

DROPOUT: Final = Subject("small_gpt_dropout", "GPT, 4 x 128, dropout 0.1", _gpt_dropout, 8, ("blocks",), chain=True)


def subjects(names: str | None = None, *, quick: bool = False) -> list[Subject]:
    """Those named (comma-separated), else all; the small one for `quick`.

    Raises:
        SystemExit: a name is not known.
    """
    known = {each.name: each for each in (*SUBJECTS, QUICK, DROPOUT)}
    if names:
        unknown = set(names.split(",")) - set(known)
        if unknown:
            raise SystemExit(f"no model is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return [known[name] for name in names.split(",")]
    return [QUICK] if quick else list(SUBJECTS)
