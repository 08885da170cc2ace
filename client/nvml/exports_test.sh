#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Our NVML exports NVML's names and nothing else, and needs no library beyond libc's own.
set -euo pipefail
library=$1
exported=$(nm --dynamic --defined-only --format=posix "$library" | awk '{print $1}' | sed 's/@.*//' | sort -u)
other=$(echo "$exported" | grep -v '^nvml' || true)
if [[ -n $other ]]; then
  echo "the library exports names that are not NVML's: $other" >&2
  exit 1
fi
# What PyTorch, NCCL, XLA and pynvml's users look up, old and new.
for name in nvmlInit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlErrorString nvmlSystemGetDriverVersion \
  nvmlSystemGetNVMLVersion nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2 nvmlSystemGetProcessName \
  nvmlDeviceGetCount nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2 \
  nvmlDeviceGetHandleByUUID nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetIndex \
  nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetMinorNumber nvmlDeviceGetBrand nvmlDeviceGetArchitecture \
  nvmlDeviceGetCudaComputeCapability nvmlDeviceGetPciInfo nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo_v3 \
  nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature \
  nvmlDeviceGetTemperatureV nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementLimit \
  nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo nvmlDeviceGetFanSpeed nvmlDeviceGetPersistenceMode \
  nvmlDeviceGetComputeMode nvmlDeviceGetEccMode nvmlDeviceGetMigMode nvmlDeviceGetMigDeviceHandleByIndex \
  nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3 \
  nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlDeviceGetProcessUtilization \
  nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvLinkCapability nvmlDeviceGetNvLinkRemotePciInfo \
  nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetP2PStatus \
  nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetCpuAffinity nvmlDeviceGetCpuAffinityWithinScope \
  nvmlDeviceGetMemoryAffinity nvmlDeviceGetGpuFabricInfo nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetFieldValues \
  nvmlDeviceGetTotalEnergyConsumption nvmlSystemGetConfComputeState nvmlSystemGetConfComputeSettings \
  nvmlDeviceGetPlatformInfo nvmlEventSetCreate nvmlEventSetWait nvmlEventSetWait_v2 nvmlEventSetFree \
  nvmlDeviceRegisterEvents nvmlDeviceSetComputeMode nvmlGpmSampleAlloc nvmlVgpuInstanceGetUUID; do
  if ! grep -qx "$name" <<<"$exported"; then
    echo "the library does not export $name" >&2
    exit 1
  fi
done
count=$(echo "$exported" | wc -l)
if ((count < 420)); then
  echo "only $count names exported; NVML documents 420" >&2
  exit 1
fi
needed=$(readelf --dynamic "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libpthread|libdl|librt|ld-linux-x86-64)\.so' || true)
if [[ -n $needed ]]; then
  echo "the library needs more than libc: $needed" >&2
  exit 1
fi
soname=$(readelf --dynamic "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[[ $soname == libnvidia-ml.so.1 ]] || { echo "its soname is $soname" >&2; exit 1; }
echo "$count names exported"
