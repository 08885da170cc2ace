# SPDX-License-Identifier: Apache-2.0
"""JAX as it is without flags: XLA measures which kernels are best, in pinned memory too. A small convolutional network.

Which kernels win differs from run to run, and the last digits with them, so few digits are printed.
"""

import os

# All of the GPU's memory ahead of need would make images of that size.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import hook  # noqa: E402

options = hook.arguments(20)
if jax.default_backend() != "gpu":
    raise SystemExit(f"jax runs on {jax.default_backend()}, not on the GPU")
keys = jax.random.split(jax.random.key(4), 4)
images = jax.random.normal(keys[0], (16, 32, 32, 8), jnp.float32)
labels = jnp.arange(16) % 10
parameters = {
    "first": jax.random.normal(keys[1], (3, 3, 8, 16)) * 0.1,
    "second": jax.random.normal(keys[2], (3, 3, 16, 16)) * 0.1,
    "last": jax.random.normal(keys[3], (16 * 64, 10)) * 0.02,
}


def loss_of(parameters):
    x = images
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, parameters[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    scores = x.reshape(16, -1) @ parameters["last"]
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(16), labels])


@jax.jit
def train(parameters):
    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    return jax.tree.map(lambda p, g: p - 0.02 * g, parameters, gradients), loss


for step in range(1, options.steps + 1):
    parameters, loss = train(parameters)
    print(step, f"{float(loss):.2f}")
    hook.step(step)
