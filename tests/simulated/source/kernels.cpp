// What only CUDA has, made of the CPU's operators: functions of tensors of the host, which `fallback` calls in place of a
// kernel of the CPU.
#include "tensors.h"
#include <ATen/ATen.h>
#include <limits>

namespace sim {
namespace {
using torch::jit::Stack;

struct Arguments {  // by name
  const c10::FunctionSchema& schema;
  const Stack values;
  Arguments(const c10::OperatorHandle& op, Stack* stack)
      : schema(op.schema()), values(torch::jit::pop(*stack, schema.arguments().size())) {}
  const c10::IValue& operator[](const std::string& name) const {
    const auto index = schema.argumentIndexWithName(name);
    TORCH_CHECK(index, "sim: ", schema.name(), " has no argument ", name);
    return values[*index];
  }
  at::Tensor tensor(const std::string& name) const { return (*this)[name].toTensor(); }
};

// ---------------------------------------------------------------- histograms of integers
void histc(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, stack);
  const auto self = given.tensor("self");
  const auto exact = c10::isIntegralType(self.scalar_type(), false) ? self.to(at::kDouble) : self;
  const auto counts = at::histc(exact, given["bins"].toInt(), given["min"].toScalar(), given["max"].toScalar());
  stack->push_back(counts.to(self.scalar_type()));
}

// ---------------------------------------------------------------- convolutions, which torch leaves to a device
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, stack);
  const auto bias = given["bias"].isNone() ? std::optional<at::Tensor>() : given.tensor("bias");
  stack->push_back(at::convolution(
      given.tensor("input"), given.tensor("weight"), bias, given["stride"].toIntVector(),
      given["padding"].toIntVector(), given["dilation"].toIntVector(), given["transposed"].toBool(),
      given["output_padding"].toIntVector(), given["groups"].toInt()));
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, stack);
  const auto weight = given.tensor("weight");
  const auto wanted = given["output_mask"].toBoolList();
  const auto groups = given["groups"].toInt();
  const bool transposed = given["transposed"].toBool();
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [input, of_weight, of_bias] = at::convolution_backward(
      given.tensor("grad_output"), given.tensor("input"), weight, at::OptionalIntArrayRef(bias),
      given["stride"].toIntVector(), given["padding"].toIntVector(), given["dilation"].toIntVector(), transposed,
      given["output_padding"].toIntVector(), groups, {(bool)wanted[0], (bool)wanted[1], (bool)wanted[2]});
  stack->insert(stack->end(), {input, of_weight, of_bias});
}

// ---------------------------------------------------------------- products of 16-bit matrices with float32 results
template <typename Product>
void wide(const c10::OperatorHandle& op, Stack* stack, const char* first, const char* second, Product product) {
  const Arguments given(op, stack);
  const auto a = given.tensor(first), b = given.tensor(second);
  const auto dtype = given["out_dtype"].toScalarType();
  const bool half = a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected operands of one dtype");
  TORCH_CHECK(
      dtype == a.scalar_type() || (half && dtype == at::kFloat),
      "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  stack->push_back(product(given, a.to(dtype), b.to(dtype)));
}
void mm(const c10::OperatorHandle& op, Stack* stack) {
  wide(op, stack, "self", "mat2", [](auto&, auto a, auto b) { return at::mm(a, b); });
}
void bmm(const c10::OperatorHandle& op, Stack* stack) {
  wide(op, stack, "self", "mat2", [](auto&, auto a, auto b) { return at::bmm(a, b); });
}
void addmm(const c10::OperatorHandle& op, Stack* stack) {
  wide(op, stack, "mat1", "mat2", [](auto& given, auto a, auto b) {
    const auto added = given.tensor("self").to(a.scalar_type());
    return at::addmm(added, a, b, given["beta"].toScalar(), given["alpha"].toScalar());
  });
}
void baddbmm(const c10::OperatorHandle& op, Stack* stack) {
  wide(op, stack, "batch1", "batch2", [](auto& given, auto a, auto b) {
    const auto added = given.tensor("self").to(a.scalar_type());
    return at::baddbmm(added, a, b, given["beta"].toScalar(), given["alpha"].toScalar());
  });
}

// ---------------------------------------------------------------- attention of rows of unequal lengths
// Tensors are (tokens of all rows, heads, head size); row i has the tokens from bounds[i] to bounds[i + 1]. Computed row by
// row in float32, with all scores of a row at once.
struct Attention {
  at::Tensor query, key, value;
  const int64_t *query_bounds, *key_bounds;
  int64_t rows, left, right;  // how far a token sees; -1 is all the way
  double scale;
  at::Tensor kept_query_bounds, kept_key_bounds;

  explicit Attention(const Arguments& given)
      : query(given.tensor("query")), key(given.tensor("key")), value(given.tensor("value")) {
    const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
    TORCH_CHECK(half, "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(query.dim() == 3 && query.size(2) % 8 == 0 && query.size(2) <= 256,
                "sim: attention needs rows of unequal lengths, and a head size of at most 256 and a multiple of 8");
    TORCH_CHECK(query.size(1) % key.size(1) == 0, "heads of the query must be a multiple of the key's");
    TORCH_CHECK(given["dropout_p"].toDouble() == 0, "sim: attention has no dropout");
    kept_query_bounds = given.tensor("cum_seq_q").to(at::kLong);
    kept_key_bounds = given.tensor("cum_seq_k").to(at::kLong);
    query_bounds = kept_query_bounds.const_data_ptr<int64_t>();
    key_bounds = kept_key_bounds.const_data_ptr<int64_t>();
    rows = kept_query_bounds.numel() - 1;
    auto reach = [&](const char* name) { return given[name].isNone() ? -1 : given[name].toInt(); };
    left = reach("window_size_left");
    right = given["is_causal"].toBool() ? 0 : reach("window_size_right");
    scale = given["scale"].isNone() ? 1.0 / std::sqrt((double)query.size(2)) : given["scale"].toDouble();
  }
  int64_t groups() const { return query.size(1) / key.size(1); }
  // (heads, tokens of the row, head size), in float32
  at::Tensor of_queries(const at::Tensor& t, int64_t row) const {
    return t.slice(0, query_bounds[row], query_bounds[row + 1]).to(at::kFloat).transpose(0, 1);
  }
  at::Tensor of_keys(const at::Tensor& t, int64_t row) const {
    return t.slice(0, key_bounds[row], key_bounds[row + 1]).to(at::kFloat).transpose(0, 1).repeat_interleave(groups(), 0);
  }
  at::Tensor scores(int64_t row) const {  // (heads, queries, keys); -inf where a query does not see a key
    auto scores = at::matmul(of_queries(query, row), of_keys(key, row).transpose(1, 2)) * scale;
    const auto queries = scores.size(1), keys = scores.size(2);
    // The last query of a row stands beside its last key.
    const auto distance = at::arange(keys).unsqueeze(0) - at::arange(queries).unsqueeze(1) - (keys - queries);
    auto hidden = at::zeros({queries, keys}, at::kBool);
    if (left >= 0) hidden = hidden.logical_or(distance < -left);
    if (right >= 0) hidden = hidden.logical_or(distance > right);
    return scores.masked_fill(hidden, -std::numeric_limits<float>::infinity());
  }
};

void attention_forward(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, stack);
  const Attention attention(given);
  auto out = at::empty_like(attention.query);
  auto sums = at::empty({attention.query.size(1), attention.query.size(0)}, at::kFloat);  // log-sum-exp of the scores
  for (int64_t row = 0; row < attention.rows; row++) {
    const auto scores = attention.scores(row);
    const auto values = at::matmul(scores.softmax(-1).nan_to_num(0.0), attention.of_keys(attention.value, row));
    const auto from = attention.query_bounds[row], to = attention.query_bounds[row + 1];
    out.slice(0, from, to).copy_(values.transpose(0, 1));
    sums.slice(1, from, to).copy_(scores.logsumexp(-1));
  }
  stack->insert(stack->end(), {out, sums, at::zeros({2}, at::kUInt64), at::empty({0}), at::empty({0})});
}

void attention_backward(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, stack);
  const Attention attention(given);
  const auto grad_out = given.tensor("grad_out"), out = given.tensor("out");
  auto grad_query = at::empty_like(attention.query), grad_key = at::empty_like(attention.key),
       grad_value = at::empty_like(attention.value);
  const auto groups = attention.groups();
  auto sum_groups = [&](const at::Tensor& t) {  // of the query heads that share a key's
    return t.view({t.size(0) / groups, groups, t.size(1), t.size(2)}).sum(1).transpose(0, 1);
  };
  for (int64_t row = 0; row < attention.rows; row++) {
    const auto weights = attention.scores(row).softmax(-1).nan_to_num(0.0);
    const auto upstream = attention.of_queries(grad_out, row);
    const auto along = (upstream * attention.of_queries(out, row)).sum(-1, true);
    const auto of_weights = at::matmul(upstream, attention.of_keys(attention.value, row).transpose(1, 2));
    const auto of_scores = weights * (of_weights - along) * attention.scale;
    const auto of_query = at::matmul(of_scores, attention.of_keys(attention.key, row));
    const auto of_key = at::matmul(of_scores.transpose(1, 2), attention.of_queries(attention.query, row));
    const auto of_value = at::matmul(weights.transpose(1, 2), upstream);
    grad_query.slice(0, attention.query_bounds[row], attention.query_bounds[row + 1]).copy_(of_query.transpose(0, 1));
    const auto from = attention.key_bounds[row], to = attention.key_bounds[row + 1];
    grad_key.slice(0, from, to).copy_(sum_groups(of_key));
    grad_value.slice(0, from, to).copy_(sum_groups(of_value));
  }
  stack->insert(stack->end(), {grad_query, grad_key, grad_value});
}
}  // namespace

HostKernel host_kernel(const c10::OperatorHandle& op) {
  static const std::map<std::string, HostKernel> kernels{
      {"aten::histc", histc},
      {"aten::convolution_overrideable", convolution},
      {"aten::convolution_backward_overrideable", convolution_backward},
      {"aten::mm.dtype", mm},
      {"aten::bmm.dtype", bmm},
      {"aten::addmm.dtype", addmm},
      {"aten::baddbmm.dtype", baddbmm},
      {"aten::_flash_attention_forward", attention_forward},
      {"aten::_flash_attention_backward", attention_backward},
  };
  const auto& schema = op.schema();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto it = kernels.find(name);
  return it == kernels.end() ? nullptr : it->second;
}
}  // namespace sim
