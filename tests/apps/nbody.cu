// SPDX-License-Identifier: Apache-2.0
// Gravity among n bodies in double precision (leapfrog, softened), positions staged through shared memory.
#include <cmath>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kBlock = 64;
constexpr double kSoftening = 0.0025;

struct Body {
  double x, y, z, mass;
};

struct Velocity {
  double x, y, z;
};

__global__ void Kick(const Body* bodies, Velocity* velocities, int n, double dt) {
  __shared__ Body tile[kBlock];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  Body self = i < n ? bodies[i] : Body{0, 0, 0, 0};
  double ax = 0, ay = 0, az = 0;
  for (int base = 0; base < n; base += kBlock) {
    int j = base + threadIdx.x;
    tile[threadIdx.x] = j < n ? bodies[j] : Body{0, 0, 0, 0};
    __syncthreads();
    for (int k = 0; k < kBlock; ++k) {
      double dx = tile[k].x - self.x, dy = tile[k].y - self.y, dz = tile[k].z - self.z;
      double r2 = dx * dx + dy * dy + dz * dz + kSoftening;
      double inverse = 1.0 / sqrt(r2);
      double pull = tile[k].mass * inverse * inverse * inverse;
      ax += dx * pull;
      ay += dy * pull;
      az += dz * pull;
    }
    __syncthreads();
  }
  if (i < n) {
    velocities[i].x += ax * dt;
    velocities[i].y += ay * dt;
    velocities[i].z += az * dt;
  }
}

__global__ void Drift(Body* bodies, const Velocity* velocities, int n, double dt) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  bodies[i].x += velocities[i].x * dt;
  bodies[i].y += velocities[i].y * dt;
  bodies[i].z += velocities[i].z * dt;
}

static double Energy(const std::vector<Body>& b, const std::vector<Velocity>& v) {
  double energy = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    energy += 0.5 * b[i].mass * (v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z);
    for (size_t j = 0; j < i; ++j) {
      double dx = b[i].x - b[j].x, dy = b[i].y - b[j].y, dz = b[i].z - b[j].z;
      energy -= b[i].mass * b[j].mass / std::sqrt(dx * dx + dy * dy + dz * dz + kSoftening);
    }
  }
  return energy;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 128});
  const int n = options.size, grid = (n + kBlock - 1) / kBlock;
  const double dt = 1.0 / 1024;
  std::vector<Body> bodies(n);
  std::vector<Velocity> velocities(n);
  unsigned seed = 12345;
  auto random = [&seed] {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) / 8388608.0 - 1.0;
  };
  for (int i = 0; i < n; ++i) {
    bodies[i] = {random(), random(), random(), (1.5 + random()) / n};
    velocities[i] = {0.1 * random(), 0.1 * random(), 0.1 * random()};
  }
  Body* db;
  Velocity* dv;
  CUDA_CHECK(cudaMalloc(&db, n * sizeof(Body)));
  CUDA_CHECK(cudaMalloc(&dv, n * sizeof(Velocity)));
  CUDA_CHECK(cudaMemcpy(db, bodies.data(), n * sizeof(Body), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(dv, velocities.data(), n * sizeof(Velocity), cudaMemcpyHostToDevice));
  const double before = Energy(bodies, velocities);

  for (int step = 1; step <= options.steps; ++step) {
    Kick<<<grid, kBlock>>>(db, dv, n, dt);
    Drift<<<grid, kBlock>>>(db, dv, n, dt);
    LAUNCH_CHECK();
    app::Step(step);
  }
  std::vector<Body> result(n);
  std::vector<Velocity> result_velocities(n);
  CUDA_CHECK(cudaMemcpy(result.data(), db, n * sizeof(Body), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(result_velocities.data(), dv, n * sizeof(Velocity), cudaMemcpyDeviceToHost));

  for (int step = 0; step < options.steps && n <= 1024; ++step) {
    for (int i = 0; i < n; ++i) {
      double ax = 0, ay = 0, az = 0;
      for (int j = 0; j < n; ++j) {
        double dx = bodies[j].x - bodies[i].x, dy = bodies[j].y - bodies[i].y, dz = bodies[j].z - bodies[i].z;
        double inverse = 1.0 / std::sqrt(dx * dx + dy * dy + dz * dz + kSoftening);
        double pull = bodies[j].mass * inverse * inverse * inverse;
        ax += dx * pull;
        ay += dy * pull;
        az += dz * pull;
      }
      velocities[i].x += ax * dt;
      velocities[i].y += ay * dt;
      velocities[i].z += az * dt;
    }
    for (int i = 0; i < n; ++i) {
      bodies[i].x += velocities[i].x * dt;
      bodies[i].y += velocities[i].y * dt;
      bodies[i].z += velocities[i].z * dt;
    }
  }
  for (int i = 0; i < n && n <= 1024; ++i) {
    APP_CHECK(app::Near(result[i].x, bodies[i].x, 1e-9) && app::Near(result[i].y, bodies[i].y, 1e-9));
    APP_CHECK(app::Near(result[i].z, bodies[i].z, 1e-9));
  }
  app::Digest digest;
  digest.Add(result.data(), n * sizeof(Body));
  digest.Add(result_velocities.data(), n * sizeof(Velocity));
  const double after = Energy(result, result_velocities);
  printf("nbody n=%d steps=%d energy=%.17g -> %.17g digest=%016" PRIx64 "\n", n, options.steps, before, after,
         digest.value());
  CUDA_CHECK(cudaFree(db));
  CUDA_CHECK(cudaFree(dv));
  return 0;
}
