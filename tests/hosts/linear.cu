// SPDX-License-Identifier: Apache-2.0
// The GPU side of training.py: one layer that predicts a number from a row of numbers, by least squares. The rows, the
// errors between forward and backward, and the velocity of the weights stay in GPU memory.
//
// Each function returns 0, or the number of CUDA's error. The pointers are of host memory. One thread.
#include <cuda_runtime.h>

namespace {

int rows, columns;
float *inputs, *targets, *weights, *errors, *gradient, *velocity;

__global__ void Predict(int rows, int columns, const float* inputs, const float* targets, const float* weights,
                        float* errors) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0;
  for (int i = 0; i < columns; ++i) sum += inputs[row * columns + i] * weights[i];
  errors[row] = sum - targets[row];
}

// Each sum in a fixed order, so that it has the same bits in every run.
__global__ void Differentiate(int rows, int columns, const float* inputs, const float* errors, float* gradient) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int i = 0; i < rows; ++i) sum += inputs[i * columns + column] * errors[i];
  gradient[column] = sum / rows;
}

__global__ void Update(int columns, float rate, const float* gradient, float* velocity, float* weights) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  velocity[column] = 0.9f * velocity[column] + gradient[column];
  weights[column] -= rate * velocity[column];
}

constexpr int kThreads = 32;
int Blocks(int count) { return (count + kThreads - 1) / kThreads; }

}  // namespace

extern "C" {

int linear_open(int row_count, int column_count, const float* all_inputs, const float* all_targets) {
  rows = row_count;
  columns = column_count;
  const size_t words = size_t(rows) * columns;
  cudaMalloc(&inputs, words * sizeof(float));
  cudaMalloc(&targets, rows * sizeof(float));
  cudaMalloc(&errors, rows * sizeof(float));
  cudaMalloc(&weights, columns * sizeof(float));
  cudaMalloc(&gradient, columns * sizeof(float));
  cudaMalloc(&velocity, columns * sizeof(float));
  cudaMemset(velocity, 0, columns * sizeof(float));
  cudaMemcpy(inputs, all_inputs, words * sizeof(float), cudaMemcpyHostToDevice);
  cudaMemcpy(targets, all_targets, rows * sizeof(float), cudaMemcpyHostToDevice);
  return cudaGetLastError();
}

// The error of each row.
int linear_forward(const float* host_weights, float* host_errors) {
  cudaMemcpy(weights, host_weights, columns * sizeof(float), cudaMemcpyHostToDevice);
  Predict<<<Blocks(rows), kThreads>>>(rows, columns, inputs, targets, weights, errors);
  cudaMemcpy(host_errors, errors, rows * sizeof(float), cudaMemcpyDeviceToHost);
  return cudaGetLastError();
}

// The gradient of half the mean square of the errors that linear_forward has found last.
int linear_backward(float* host_gradient) {
  Differentiate<<<Blocks(columns), kThreads>>>(rows, columns, inputs, errors, gradient);
  cudaMemcpy(host_gradient, gradient, columns * sizeof(float), cudaMemcpyDeviceToHost);
  return cudaGetLastError();
}

// A step with momentum.
int linear_step(const float* host_gradient, float rate, float* host_weights) {
  cudaMemcpy(gradient, host_gradient, columns * sizeof(float), cudaMemcpyHostToDevice);
  Update<<<Blocks(columns), kThreads>>>(columns, rate, gradient, velocity, weights);
  cudaMemcpy(host_weights, weights, columns * sizeof(float), cudaMemcpyDeviceToHost);
  return cudaGetLastError();
}
}
