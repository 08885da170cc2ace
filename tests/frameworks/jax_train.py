# SPDX-License-Identifier: Apache-2.0
"""JAX: jit, grad and a small training loop."""

import os

# All of the GPU's memory ahead of need would make images of that size.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import hook  # noqa: E402

options = hook.arguments(30)
if jax.default_backend() != "gpu":
    raise SystemExit(f"jax runs on {jax.default_backend()}, not on the GPU")
key = jax.random.key(4)


def forward(parameters, x):
    for weight, bias in parameters[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = parameters[-1]
    return x @ weight + bias


def loss_of(parameters, x, y):
    return jnp.mean((forward(parameters, x) - y) ** 2)


@jax.jit
def train(parameters, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
    return loss, jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients)


sizes = [16, 128, 128, 1]
parameters = []
for inputs, outputs in zip(sizes, sizes[1:]):
    key, use = jax.random.split(key)
    parameters.append((jax.random.normal(use, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)))
for step in range(1, options.steps + 1):
    key, use = jax.random.split(key)
    x = jax.random.normal(use, (256, 16))
    loss, parameters = train(parameters, x, jnp.sin(x.sum(axis=1, keepdims=True)))
    print(step, hook.exact(loss))
    hook.step(step)
