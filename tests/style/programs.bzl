# SPDX-License-Identifier: Apache-2.0
"""Targets that several tests look at."""

# All that users get: the programs and libraries.
USERS_GET = [
    "//checkpoint/engine/criu:cr-hold",
    "//checkpoint/engine/criu:libcuda-remote-criu.so",
    "//ckptfmt",
    "//client:libcuda-remote.so",
    "//programs/mpi:cr-mpi-agent",
    "//programs/mpi:cr-mpirun",
    "//client/nvml:libcuda-remote-nvml.so",
    "//client/preload:libcuda-remote-preload.so",
    "//client/relay:cr-relay",
    "//programs/slurm:cr-sbatch",
    "//programs/slurm:cr-slurm-run",
    "//programs/slurm:cr-srun",
    "//programs/tools:cr-checkpoint",
    "//programs/tools:cr-drain",
    "//programs/tools:cr-migrate",
    "//programs/tools:cr-ps",
    "//programs/tools:cr-restart",
    "//programs/tools:cr-run",
    "//programs/tools:cr-trace",
    "//host:cr-hostd",
    "//replay/inspect",
    "//server/nvml:cr-nvml",
    "//softgpu:libsoftgpu.so",
    "//server/supervisor:cr-server",
    "//server/worker:cr-worker",
]
