// A c10d backend with NCCL's rules: see simccl.cpp.
#pragma once
#include "tensors.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int64_t timeout_ms);
}  // namespace sim
