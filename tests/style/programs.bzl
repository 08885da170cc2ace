# SPDX-License-Identifier: Apache-2.0
"""Targets that several tests look at."""

# All that users get: the programs and libraries.
USERS_GET = [
    "//checkpoint/engine/criu:cr-hold",
    "//checkpoint/engine/criu:libcuda-remote-criu.so",
    "//ckptfmt",
    "//client:libcuda-remote.so",
    "//client/mpi:cr-mpi-agent",
    "//client/mpi:cr-mpirun",
    "//client/nvml:libcuda-remote-nvml.so",
    "//client/preload:libcuda-remote-preload.so",
    "//client/relay:cr-relay",
    "//client/slurm:cr-sbatch",
    "//client/slurm:cr-slurm-run",
    "//client/slurm:cr-srun",
    "//client/tools:cr-checkpoint",
    "//client/tools:cr-drain",
    "//client/tools:cr-migrate",
    "//client/tools:cr-ps",
    "//client/tools:cr-restart",
    "//client/tools:cr-run",
    "//client/tools:cr-trace",
    "//host:cr-hostd",
    "//replay/inspect",
    "//server/nvml:cr-nvml",
    "//server/softgpu:libsoftgpu.so",
    "//server/supervisor:cr-server",
    "//server/worker:cr-worker",
]
