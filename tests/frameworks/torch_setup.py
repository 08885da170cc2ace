# SPDX-License-Identifier: Apache-2.0
"""PyTorch, set up so that a run can be repeated bit by bit."""

import os

# Before the library is loaded: cuBLAS is deterministic only with a workspace of fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Compile in this process: no pool of processes beside the one that is saved.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# NCCL uses no multicast over NVLink: a multicast object spans GPUs of the whole machine, also those of others.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch  # noqa: E402

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
torch.manual_seed(20)
