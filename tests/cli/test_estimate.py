"""`memfit estimate` answers from a configuration and a GPU's name, and the Python that it gives runs as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cli.commands import Ran
from memfit.estimating.methods import least_bytes, method_of
from memfit.units import format_bytes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's and torch's own
]

BUILDER = """
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.layers(x)

def build():
    return Toy(), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])

def data():
    return torch.utils.data.TensorDataset(torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration without weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_the_answer_is_true_and_its_python_runs(capsys: pytest.CaptureFixture[str], folder: Path, method: str) -> None:
    ran = Ran(capsys, "estimate", folder / "config.json", "--gpu", "4090", "--method", method, "--batch", 8, "--budget", "32MiB", "--json")  # fmt: skip
    data = ran.data
    assert ran.status == 0
    assert (data["fits"], data["method"], data["gpu"], data["length"]) == (True, method, "rtx4090", 128)
    assert data["peak_bytes"] <= data["budget_bytes"] == 32 << 20
    assert data["seconds_are"] == "estimated"
    assert (data["trained"] == data["parameters"]) == (method == "full")
    exec(compile(data["python"].replace("33554432B", "1GiB"), "estimate", "exec"), {})  # noqa: S102 - as whoever copies it
    losses = capsys.readouterr().out.split()
    assert len(losses) == 3
    assert all(float(loss) > 0 for loss in losses)


@pytest.mark.slow
def test_an_encoder_decoder_is_estimated_and_its_python_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was taken for a causal language model, which transformers has none of for T5."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=256, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    config.save_pretrained(tmp_path / "t5")
    data = Ran(capsys, "estimate", tmp_path / "t5", "--gpu", "4090", "--method", "full", "--length", 32, "--budget", "32MiB", "--json").data  # fmt: skip
    assert data["fits"]
    assert data["largest_batch"] > 1
    exec(compile(data["python"].replace("33554432B", "1GiB"), "estimate", "exec"), {})  # noqa: S102 - as whoever copies it
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.slow  # the search for the largest batch has a test of its own, `test_largest`
@pytest.mark.parametrize("method", ["full", "lora"])
def test_one_sample_more_than_is_told_does_not_fit(
    capsys: pytest.CaptureFixture[str], folder: Path, method: str
) -> None:
    asked = ("estimate", folder, "--gpu", "rtx 4090 24GB", "--method", method, "--budget", "32MiB", "--json", "--batch")
    largest = Ran(capsys, *asked, 8).data["largest_batch"]
    more = Ran(capsys, *asked, largest + 1)
    assert more.status == 1
    assert more.data["largest_batch"] == largest
    assert more.data["minimum_bytes"] > 32 << 20


@pytest.mark.slow
def test_the_largest_batch_is_the_same_whichever_batch_was_asked_for(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """A single sample runs fewer operations than several, and its loss head is not worth dividing: one was told to be the most that fits."""
    asked = ("estimate", folder, "--gpu", "4090", "--method", "full", "--budget", "32MiB", "--json", "--batch")
    told = [Ran(capsys, *asked, batch).data["largest_batch"] for batch in (1, 8)]
    assert told[0] > 8
    assert told[1] == told[0]


def test_the_largest_batch_is_found_from_one_sample_that_takes_other_operations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """GPT-2 runs other operations for one sample than for several, so no line leads from the one to the others."""
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **shape}), encoding="utf-8")
    asked = ("estimate", tmp_path, "--gpu", "4090", "--method", "full", "--length", 32, "--budget", "32MiB", "--json")

    from_one, from_eight = (Ran(capsys, *asked, "--batch", batch).data["largest_batch"] for batch in (1, 8))

    assert from_one == from_eight > 8


def test_a_function_with_data_is_estimated_and_told_in_narrow_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "estimate_toy.py").write_text(BUILDER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "40")
    run = {
        "model": {"python": "estimate_toy:build"},
        "data": {"python": "estimate_toy:data"},
        "fit": {"budget": "1MiB", "global_batch": 8},
    }
    Path("run.json").write_text(json.dumps(run), encoding="utf-8")
    largest = Ran(capsys, "plan", "run.json", "--largest", "batch", "--json").data["largest_batch"]
    assert largest > 8
    assert "length along dimension 1" in Ran(capsys, "plan", "run.json", "--largest", "length").err
    arguments = ("estimate", "python:estimate_toy:build", "--gpu", "t4", "--data", "estimate_toy:data", "--batch", 32)
    ran = Ran(capsys, *arguments)
    assert ran.status == 0
    answer, _, code = ran.out.partition("To train so")
    assert "Fits: a batch of 32 takes" in answer
    assert ", with everything recomputed that can be." in " ".join(answer.split())
    assert max(map(len, answer.splitlines())) <= 40
    assert "Longest" not in answer
    exec(compile("import torch\n" + code.partition("import torch\n")[2], "estimate", "exec"), {})  # noqa: S102 - as whoever copies it
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--gpu", "4090"], "nowhere: there is no config.json here. Name a folder"),
        (["{folder}", "--gpu", "4091"], "no device called '4091' is known; did you mean rtx4090"),
        (["{folder}", "--gpu", "4090", "--length", "4096"], "this model has positions for 128 tokens"),
        (["{folder}", "--gpu", "4090", "--length", "0"], "--length 0: a whole number of at least 1 is needed"),
        (["{folder}", "--gpu", "4x4090", "--length", "0"], "--length 0: a whole number of at least 1 is needed"),
        (
            ["{folder}", "--gpu", "mps"],
            "--gpu mps: that is a device of torch, of which there is no data sheet: name a GPU",
        ),
        (["{folder}", "--gpu", "2xh100+2x4090"], "for devices of several kinds"),
        (["{folder}", "--gpu", "4090", "--batch", "0"], "--batch 0: a whole number of at least 1 is needed"),
        (["{folder}", "--gpu", "4090", "--budget", "-3GiB"], "--budget: '-3GiB' is not a number of bytes"),
        (["{folder}", "--gpu", "4090", "--data", "a:b"], "--data goes with python:"),
        (["python:os:getcwd", "--gpu", "4090"], "python:os:getcwd returned str: a model is needed"),
        (["{image}", "--gpu", "4090"], "describes a vit model, which takes more than tokens"),
        (["{speech}", "--gpu", "4090"], "cannot make a seq2seq-lm model of"),
        (["{ctc}", "--gpu", "4090"], "describes a wav2vec2 model, which takes more than tokens: write a function"),
        (["{broken}", "--gpu", "4090"], "is no configuration that transformers"),
        (["{folder}", "--gpu", "4x4091"], "no device called '4091' is known; did you mean rtx4090"),
        (["{folder}", "--gpu", "4x24GiB"], "no device called '24GiB' is known"),
        (["{folder}", "--gpu", "{cpus}"], "machines.yaml: that names no GPU; write how many and which"),
        (["{folder}", "--gpu", "1x4090"], "devices names one device"),
        (["{folder}", "--gpu", "4x4090", "--method", "qlora"], "weights in 4 bits are not shared out among GPUs"),
        (["{folder}", "--gpu", "4x4090", "--longest"], "--longest is of one GPU"),
        (["{folder}", "--gpu", "4x4090", "--length", "4096"], "this model has positions for 128 tokens"),
    ],
)
def test_what_cannot_be_estimated_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], message: str
) -> None:
    image, broken = folder.parent / "image", folder.parent / "broken"
    image.mkdir()
    (image / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    broken.mkdir()
    (broken / "config.json").write_text('{"hidden_size": 3}', encoding="utf-8")
    speech = folder.parent / "speech"
    speech.mkdir()
    (speech / "config.json").write_text('{"model_type": "whisper"}', encoding="utf-8")
    cpus = folder.parent / "machines.yaml"
    cpus.write_text("devices: [{name: small, memory: 1GiB, number: 2}]", encoding="utf-8")
    ctc = folder.parent / "ctc"
    ctc.mkdir()
    (ctc / "config.json").write_text(
        '{"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}', encoding="utf-8"
    )
    named: dict[str, Any] = {
        "folder": folder,
        "image": image,
        "broken": broken,
        "speech": speech,
        "ctc": ctc,
        "cpus": cpus,
    }
    ran = Ran(capsys, "estimate", *(argument.format(**named) for argument in arguments))
    assert ran.status in (2, 3)
    assert message in ran.err


@pytest.mark.slow  # half a minute each; the Python for one GPU is run above
@pytest.mark.parametrize("method", ["full", "lora"])
def test_several_gpus_are_told_way_by_way_and_their_python_runs_on_two_ranks(
    capsys: pytest.CaptureFixture[str], folder: Path, method: str
) -> None:
    asked = ("estimate", folder, "--gpu", "2x4090", "--method", method, "--batch", 4, "--length", 64, "--budget")
    data = Ran(capsys, *asked, "64MiB", "--json").data
    best = min((each for each in data["predictions"] if each["fits"]), key=lambda each: each["step_seconds"])
    assert {each["way"] for each in data["predictions"]} == {"data", "zero1", "zero2", "zero3"}
    assert (data["fits"], data["ranks"], data["peak_bytes"]) == (True, 2, best["peak_bytes"])
    assert (data["trained"] == data["parameters"]) == (method == "full")

    tight = Ran(capsys, *asked, f"{data['minimum_bytes'] - 1}", "--json")
    assert (tight.status, tight.data["fits"]) == (1, False)

    script = folder.parent / "train.py"
    code = data["python"].replace('devices="2x4090"', 'devices="2x1GiB"')
    code = code.replace("print(engine.step(sample).loss)", 'os.write(1, f"{engine.step(sample).loss}\\n".encode())')
    script.write_text(code, encoding="utf-8")
    command = [*data["command"].split()[1:-1], str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = done.stdout.split()
    assert len(losses) == 6
    assert len(set(losses)) == 3  # of the whole batch, alike on both ranks


@pytest.mark.slow
def test_several_gpus_are_told_in_narrow_lines(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ran = Ran(capsys, "estimate", folder, "--gpu", "2x8xh100@360GB/s,400GB/s", "--method", "full", "--length", 16)
    answer, _, code = ran.out.partition("To train so")
    assert "torchrun --nnodes 2" in code
    assert "zero3, every block recomputed:" in answer
    assert max(map(len, answer.splitlines())) <= 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_that_is_not_here_is_told(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    ran = Ran(capsys, "estimate", folder, "--gpu", "cuda")
    assert ran.status == 3
    assert "torch sees no GPU here" in ran.err


def test_help_lists_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rtx4090" in Ran(capsys, "estimate", "--help").out


def test_a_computer_with_less_memory_than_the_weights_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("estimate", folder, "--gpu", "4090", "--method", "full", "--length", 16, "--json")
    assert "this computer has" not in " ".join(Ran(capsys, *arguments).data["notes"])

    monkeypatch.setattr("memfit.estimating.estimate.physical_bytes", lambda: 1024)

    assert "this computer has 1.00 KiB of memory, less than the" in " ".join(Ran(capsys, *arguments).data["notes"])


def test_a_card_that_nobody_knows_is_refused_before_torch_is_imported() -> None:
    code = "import sys; from memfit.cli.main import main; print(main(['estimate', 'x', '--gpu', '4900']), 'torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["3", "False"]
    assert "no device called '4900' is known; did you mean rtx4090" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers"),
    [pytest.param("mamba", 8, marks=pytest.mark.slow), ("mamba2", 2)],  # of many layers PEFT keeps ends of paths
)
def test_layers_that_peft_refuses_get_no_adapters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, layers: int
) -> None:
    """Kernels read the weight of `out_proj` without calling the layer; PEFT refused the model as a whole."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    shape = {"hidden_size": 32, "num_hidden_layers": layers, "state_size": 4, "vocab_size": 64, "n_groups": 1}
    heads = {"num_heads": 4, "head_dim": 16} if kind == "mamba2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **shape, **heads}), encoding="utf-8")
    asked = ("estimate", tmp_path, "--gpu", "4090", "--method", "lora", "--length", 4, "--batch", 2, "--json")

    ran = Ran(capsys, *asked)
    data = ran.data

    assert data["fits"]
    assert "gemm_4bit" not in ran.err  # bitsandbytes', of kernels that nobody asked for
    assert 0 < data["trained"] < data["parameters"]
    assert "exclude_modules=['out_proj']" in data["python"]
    exec(compile(data["python"], "estimate", "exec"), {})  # noqa: S102 - as whoever copies it
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.alternate(0)
@pytest.mark.parametrize("gpu", ["4090", "2x4090"])
def test_a_forward_of_too_many_operations_is_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, gpu: str
) -> None:
    """A loop over the tokens in each of 64 layers was recorded for ten minutes and more."""
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 64, "state_size": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", **shape}), encoding="utf-8")

    ran = Ran(capsys, "estimate", tmp_path, "--gpu", gpu, "--method", "full")

    assert ran.status == 2
    assert "forward of 1 x 1024 tokens runs more than 30,000 operations" in ran.err
    shorter = re.search(r"shorter samples of (\d+) tokens at most", ran.err)
    assert shorter is not None
    assert 8 < int(shorter[1]) < 64
    assert "weights, gradients and optimizer state alone take" in ran.err


def test_a_subclass_of_linear_counts_in_16_bits() -> None:
    """Falcon's layers stay so, and what a step holds at the least was told as if they were packed."""

    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64, bias=False), Own(64, 64, bias=False))
    assert least_bytes(model, method_of("qlora", bf16=True)) == 64 * 64 * 33 // 64 + 2 * 64 * 64


@pytest.mark.parametrize("experts", [4, 64])
def test_experts_that_stay_in_16_bits_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, experts: int
) -> None:
    """They are one tensor of three dimensions; nothing said why a model "in 4 bits" takes four times as much."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_experts=experts, num_experts_per_tok=1, moe_intermediate_size=8,
        num_attention_heads=8, num_key_value_heads=8, head_dim=16, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "routed")
    asked = ("estimate", tmp_path / "routed", "--gpu", "4090", "--method", "qlora", "--length", 8, "--batch", 2)

    data = Ran(capsys, *asked, "--json").data

    frozen = sum(p.numel() for p in transformers.Qwen3MoeForCausalLM(config).parameters()) * 2
    projections = 4 * 64 * 128 * 2 + 64 * 64 * 2  # of attention, and the head
    said = f"{format_bytes(frozen - projections)} of the {format_bytes(frozen)} of frozen weights stay in 16 bits"
    assert any(note.startswith(said) for note in data["notes"]) == (experts == 64)
    assert any("experts" in note and "gate_up_proj" in note for note in data["notes"]) == (experts == 64)


TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
OTHER_VISION = {"embed_dim": 32, "hidden_size": 64, "depth": 1, "num_heads": 4}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}


def composed(folder: Path, kind: str, parts: dict[str, Any]) -> Path:
    """A configuration of several models in one."""
    pytest.importorskip("transformers").AutoConfig.for_model(kind, **parts).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("gemma3", {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}),
        pytest.param("llava", {"text_config": TEXT, "vision_config": {**VISION, "model_type": "clip_vision_model"}}, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", {"text_config": {**TEXT, "rope_parameters": SECTIONS}, "vision_config": OTHER_VISION}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_model_with_a_vision_part_is_estimated_on_text_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, parts: dict[str, Any]
) -> None:
    """Its vocabulary stands in the configuration of its language model; it was refused as one that takes more than tokens."""
    asked = ("estimate", composed(tmp_path, kind, parts), "--gpu", "4090", "--method", "full", "--batch", 2)

    data = Ran(capsys, *asked, "--json").data

    assert data["length"] == 96
    assert any(note.startswith("the step is on text alone") for note in data["notes"])
    exec(compile(data["python"], "estimate", "exec"), {})  # noqa: S102 - as whoever copies it
    assert len(capsys.readouterr().out.split()) == 3


def test_a_model_that_does_not_run_on_text_alone_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = {"vocab_size": 512, "embed_dim": 64, "layers": 1, "ffn_dim": 96, "attention_heads": 4}
    folder = composed(tmp_path, "kosmos-2", {"text_config": text, "vision_config": VISION})

    ran = Ran(capsys, "estimate", folder, "--gpu", "4090", "--method", "full", "--length", 16)

    assert ran.status == 3
    assert "does not run on text alone: write a function that builds it and one that returns data" in ran.err
    assert "You have to specify either `pixel_values`" in ran.err
