// Tensors of the simulated device.
#pragma once
#include "core.h"
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {
inline bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }
at::Tensor cpu_view(const at::Tensor& t);  // the same memory as a tensor of the CPU, which does not own it

// The device's generator is one of the CPU's, so that its numbers are the CPU's.
const at::Generator& default_generator(int device);
at::Generator cpu_generator(const at::Generator& generator);

using HostKernel = void (*)(const c10::OperatorHandle&, torch::jit::Stack*);
HostKernel host_kernel(const c10::OperatorHandle& op);  // of kernels.cpp; null if the CPU has one itself
}  // namespace sim
