# SPDX-License-Identifier: Apache-2.0
"""The CUDA libraries behind PyTorch, and the parts of its runtime that ask the driver most."""

import hook
from torch_setup import torch

options = hook.arguments(12)
device = torch.device("cuda")
data = torch.Generator(device="cuda").manual_seed(7)  # cuRAND's generator
# Where a library has no deterministic way, the comparison with the native run says so.
torch.use_deterministic_algorithms(True, warn_only=True)
free, total = torch.cuda.mem_get_info()
if not 0 < free <= total <= torch.cuda.get_device_properties(0).total_memory:
    raise SystemExit("mem_get_info and the properties do not agree")
torch.cuda.memory._record_memory_history(max_entries=1000)
streams = [torch.cuda.Stream(priority=p) for p in (0, -1, 0)]
pinned = torch.empty(1 << 20, dtype=torch.float32, pin_memory=True)


def linear_algebra():
    a = torch.randn(96, 96, generator=data, device=device, dtype=torch.float64)
    symmetric = a @ a.T + 96 * torch.eye(96, device=device, dtype=torch.float64)
    yield torch.linalg.cholesky(symmetric)
    # Not always the same to the last bit, natively either.
    yield torch.linalg.eigvalsh(symmetric).round(decimals=6)
    yield torch.linalg.svdvals(a).round(decimals=6)
    yield torch.linalg.solve(symmetric, a)
    yield torch.linalg.qr(a)[1]


def products():
    a = torch.randn(256, 512, generator=data, device=device)
    b = torch.randn(512, 384, generator=data, device=device)
    yield a @ b
    yield (a.bfloat16() @ b.bfloat16()).float()
    yield (a.half() @ b.half()).float()
    # A bias and an activation: cuBLASLt's epilogue.
    yield torch._addmm_activation(torch.randn(384, generator=data, device=device), a, b)
    yield torch.bmm(a.view(4, 64, 512), b.expand(4, 512, 384))


def others():
    x = torch.randn(8, 1000, generator=data, device=device)
    yield torch.fft.rfft(x).abs()
    yield torch.fft.ifft2(torch.complex(x, x)).real
    dense = torch.where(torch.rand(200, 300, generator=data, device=device) < 0.05, 1.0, 0.0)
    # Whole numbers: cuSPARSE adds in any order.
    whole = torch.randint(-99, 100, (300, 40), generator=data, device=device).float()
    yield torch.sparse.mm(dense.to_sparse_csr(), whole)
    yield torch.sort(x, dim=1).values
    yield torch.cumsum(x.long(), dim=1).float()
    yield torch.nn.functional.conv1d(x.view(8, 1, 1000), torch.randn(16, 1, 9, generator=data, device=device))


for step in range(1, options.steps + 1):
    results = [r.cpu().contiguous().numpy() for part in (linear_algebra, products, others) for r in part()]
    # A pipeline over three streams, ordered by events alone, with copies that do not block.
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    pinned.copy_(torch.arange(1 << 20, dtype=torch.float32) * step)
    chain = None
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if chain is None:
                value = pinned.to(device, non_blocking=True)
            else:
                stream.wait_event(chain)
                value = value * 1.5 + 1
            value.record_stream(stream)
            chain = torch.cuda.Event()
            chain.record(stream)
    torch.cuda.current_stream().wait_event(chain)
    back = torch.empty(1 << 20, dtype=torch.float32, pin_memory=True)
    back.copy_(value, non_blocking=True)
    end.record()
    end.synchronize()
    if not 0 < begin.elapsed_time(end) < 60000:
        raise SystemExit("an impossible time between two events")
    results.append(back.numpy())
    print(step, hook.digest(*results), torch.cuda.memory_allocated() > 0, len(torch.cuda.memory_snapshot()) > 0)
    if step % 4 == 0:
        torch.cuda.empty_cache()
    hook.step(step)
