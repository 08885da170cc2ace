#!/usr/bin/env python3
"""Training steps and a decode step with PyTorch, one row after another; prints the same JSON as api_cost.

Usage: pytorch.py [--quick] [--only SUBSTRING]

Rows, in milliseconds (median of several timings, each over some steps, after a warm-up):
  PyTorch: MLP step           12 layers, 64 wide, batch 64, Adam: as many small launches as possible
  PyTorch: transformer step   124M parameters (12 layers, 768 wide, 1024 tokens, batch 4), bf16 autocast, fused attention and AdamW
  PyTorch: one token          the same model in bf16: one forward of 64 tokens and .item() of the next token
  PyTorch: ResNet-50 step     batch 32, 224 x 224, SGD; torchvision's if it is there, else the one defined below

An ordinary program: run it natively and under cr-run and compare.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    """124M parameters: token and position embeddings, 12 blocks, the output shares the embedding's weights."""

    def __init__(self, vocabulary=50304, context=1024, width=768, layers=12, heads=12):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.beside = nn.Identity()
        if stride != 1 or inside != out:
            self.beside = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return functional.relu(self.path(x) + self.beside(x))


def own_resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(inside, width, stride if i == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def resnet50():
    try:
        import torchvision

        return torchvision.models.resnet50()
    except ImportError:
        return own_resnet50()


def mlp_step():
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU()))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def transformer_step():
    model = Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, 50304, (4, 1025), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()

    return step


def one_token():
    model = Transformer().cuda().to(torch.bfloat16).eval()
    tokens = torch.randint(0, 50304, (1, 64), device="cuda")

    def step():
        with torch.no_grad():
            tokens[0, -1] = model(tokens)[0, -1].argmax().item()

    return step


def resnet_step():
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


ROWS = (
    ("PyTorch: MLP step", mlp_step, 50),
    ("PyTorch: transformer step", transformer_step, 10),
    ("PyTorch: one token", one_token, 30),
    ("PyTorch: ResNet-50 step", resnet_step, 10),
)


def measure(make, steps, repetitions):
    """Milliseconds for one step: median, lowest, highest."""
    step = make()
    for _ in range(max(3, steps // 5)):
        step()
    torch.cuda.synchronize()
    values = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        values.append((time.perf_counter() - begin) / steps * 1e3)
    return statistics.median(values), min(values), max(values)


def main():
    quick = "--quick" in sys.argv
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    torch.manual_seed(0)
    rows = []
    for name, make, steps in ROWS:
        if only not in name:
            continue
        row = {"name": name, "unit": "ms"}
        try:
            value, low, high = measure(make, max(2, steps // 10) if quick else steps, 1 if quick else 5)
            row.update(value=value, low=low, high=high)
        except Exception as error:  # a row that fails must not take the others with it
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
        torch.cuda.empty_cache()
    print(json.dumps({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
