#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps and a decode step with PyTorch, one row after another; prints the same JSON as api_cost.

Usage: pytorch.py [--quick] [--only SUBSTRING]

Rows, in milliseconds (median of several timings, each over some steps, after a warm-up):
  PyTorch: MLP step           12 layers, 64 wide, batch 64, Adam: as many small launches as possible
  PyTorch: transformer step   124M parameters (12 layers, 768 wide, 1024 tokens, batch 4), bf16 autocast, fused attention and AdamW
  PyTorch: one token          the same model in bf16: one forward of 64 tokens and .item() of the next token
  PyTorch: ResNet-50 step     batch 32, 224 x 224, SGD; torchvision's if it is there

An ordinary program: run it natively and under cr-run and compare.
"""

import json
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../tests/frameworks"))
from models import Transformer, resnet50  # noqa: E402


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
