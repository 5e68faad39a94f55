// aten's kernels for CUDA tensors, computed on the host: the memory of the simulated device is the host's, so that a CUDA
// tensor is also one of the CPU at the same address.
//
// Every operation with a kernel for both is replaced, below autograd, autocast and dispatch modes. What it returns is
// taken from the caching allocator as a CUDA kernel's output is; what the CPU's kernel takes inside is not counted. Random
// numbers follow from the CUDA generator's seed and offset, which moves on with each operation.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---------------------------------------------------------------------- one memory, two tensors
struct Pair {
  Tensor device, host;
  const void* address;
};

Tensor on_storage(const c10::Storage& storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// The host's tensors of one operation, and the way back.
class OnHost {
 public:
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const auto& pair : pairs_)
      if (pair.device.is_same(tensor)) return pair.host;
    auto* address = const_cast<void*>(tensor.storage().data());
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), at::DataPtr(address, at::kCPU),
                         c10::GetCPUAllocator(), /*resizable=*/true);
    pairs_.push_back({tensor, on_storage(storage, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor), address});
    return pairs_.back().host;
  }

  // Outputs that the operation has resized lie elsewhere now.
  void bring_resized() {
    for (auto& [device, host, address] : pairs_) {
      if (host.sizes() == device.sizes() && host.storage().data() == address) continue;
      device.resize_(host.sizes());
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
      if (host.numel() > 0) std::memcpy(device.mutable_data_ptr(), host.const_data_ptr(), host.nbytes());
    }
  }

  Tensor back(const Tensor& result) {
    if (!result.defined() || result.is_cuda() || result.layout() != at::kStrided) return result;
    for (const auto& pair : pairs_) {
      if (pair.host.is_same(result)) return pair.device;
      if (pair.host.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return on_storage(pair.device.storage(), pair.device.key_set(), result);
    }
    const auto options = result.options().device(c10::Device(c10::kCUDA, 0));
    auto made = at::empty_strided(result.sizes(), result.strides(), options);
    if (result.numel() > 0) std::memcpy(made.mutable_data_ptr(), result.const_data_ptr(), made.storage().nbytes());
    return made;
  }

 private:
  std::vector<Pair> pairs_;
};

const auto ABOVE = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch});

// ---------------------------------------------------------------------- random numbers
uint64_t next_seed(const std::optional<at::Generator>& given) {
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  const auto offset = generator->philox_offset_per_thread();
  generator->set_philox_offset_per_thread(offset + 4);
  uint64_t mixed = generator->current_seed() * 0x9E3779B97F4A7C15ull + offset * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;  // of splitmix64
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return mixed ^ (mixed >> 31);
}

// The CPU's generator with a seed, as it was afterwards; for one thread at a time.
class CpuSeeded {
 public:
  explicit CpuSeeded(uint64_t seed) : alone_(one_at_a_time_), cpu_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    before_ = cpu_.get_state();
    cpu_.set_current_seed(seed);
  }
  ~CpuSeeded() {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.set_state(before_);
  }

 private:
  inline static std::mutex one_at_a_time_;
  std::lock_guard<std::mutex> alone_;
  at::Generator cpu_;
  Tensor before_;
};

// ---------------------------------------------------------------------- any operation
void on_host(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  OnHost host;
  bool is_random = false;
  std::optional<at::Generator> generator;
  size_t place = stack->size() - schema.arguments().size();
  for (const auto& argument : schema.arguments()) {
    auto& value = (*stack)[place++];
    is_random |= argument.name() == "generator";
    if (value.isTensor()) {
      value = host.of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor tensor : value.toTensorList()) list.push_back(host.of(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<OptionalTensor> list;
      for (const OptionalTensor tensor : value.toOptionalTensorList())
        list.push_back(tensor.has_value() ? OptionalTensor(host.of(*tensor)) : tensor);
      value = list;
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    }
  }
  c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
  if (is_random) {
    CpuSeeded seeded(next_seed(generator));
    operation.callBoxed(stack);
  } else {
    operation.callBoxed(stack);
  }
  host.bring_resized();
  for (size_t result = stack->size() - schema.returns().size(); result < stack->size(); ++result) {
    auto& value = (*stack)[result];
    if (value.isTensor()) {
      value = host.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor tensor : value.toTensorList()) list.push_back(host.back(tensor));
      value = list;
    }
  }
}

// ---------------------------------------------------------------------- dropout, whose scale is rounded otherwise on CUDA
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  OnHost host;
  Tensor out, mask;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    const auto x = host.of(input);
    mask = at::ones_like(x, x.options().dtype(at::kBool));
    if (!train.value_or(true)) {
      out = x.clone();
    } else {
      CpuSeeded seeded(next_seed(std::nullopt));
      mask.bernoulli_(1 - p);
      const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
      const double scale = p == 1 ? 0.0 : wide == at::kFloat ? 1.0f / static_cast<float>(1 - p) : 1 / (1 - p);
      out = x.to(wide).mul(mask).mul(scale).to(x.scalar_type());
    }
  }
  return {host.back(out), host.back(mask)};
}

// ---------------------------------------------------------------------- attention, whose kernels have other names on CUDA
std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, bool, double dropout_p,
    bool is_causal, std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0.0, "the simulated attention has no dropout");
  OnHost host;
  Tensor out, log_sums;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    const auto mask = bias.has_value() ? OptionalTensor(host.of(*bias)) : std::nullopt;
    std::tie(out, log_sums) = at::_scaled_dot_product_flash_attention_for_cpu(
        host.of(q), host.of(k), host.of(v), 0.0, is_causal, mask, scale);
  }
  const auto number = q.options().dtype(at::kLong);
  return {host.back(out), host.back(log_sums), at::empty({}, number), at::empty({}, number)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out,
    const Tensor& log_sums, const Tensor&, const Tensor&, double, std::array<bool, 4>, bool is_causal,
    std::optional<double> scale) {
  OnHost host;
  Tensor of_q, of_k, of_v;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    const auto mask = bias.defined() ? OptionalTensor(host.of(bias)) : std::nullopt;
    std::tie(of_q, of_k, of_v) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        host.of(gradient), host.of(q), host.of(k), host.of(v), host.of(out), host.of(log_sums), 0.0, is_causal, mask,
        scale);
  }
  return {host.back(of_q), host.back(of_k), host.back(of_v), Tensor()};
}

// ---------------------------------------------------------------------- RMSNorm, one operation on CUDA alone
std::vector<int64_t> last_dims(at::IntArrayRef normalized_shape) {
  std::vector<int64_t> dims;
  for (size_t i = 1; i <= normalized_shape.size(); ++i) dims.push_back(-static_cast<int64_t>(i));
  return dims;
}

std::tuple<Tensor, Tensor> rms_norm(
    const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight, std::optional<double> eps) {
  OnHost host;
  Tensor out, rstd;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    const auto wide = host.of(input).to(at::promote_types(input.scalar_type(), at::kFloat));
    const double epsilon = eps.value_or(input.scalar_type() == at::kDouble ? 2.220446049250313e-16 : 1.1920928955078125e-07);
    rstd = wide.square().mean(last_dims(normalized_shape), true).add(epsilon).rsqrt();
    out = wide * rstd;
    if (weight.has_value() && weight->defined()) out = out * host.of(*weight);
    out = out.to(input.scalar_type());
  }
  return {host.back(out), host.back(rstd)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& gradient, const Tensor& input, at::IntArrayRef normalized_shape, const Tensor& rstd,
    const OptionalTensor& weight, std::array<bool, 2>) {
  OnHost host;
  Tensor of_input, of_weight;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    const auto normal = host.of(input).to(rstd.scalar_type()) * host.of(rstd);
    auto outer = host.of(gradient).to(rstd.scalar_type());
    if (weight.has_value() && weight->defined()) {
      std::vector<int64_t> first;
      for (int64_t dim = 0; dim < input.dim() - static_cast<int64_t>(normalized_shape.size()); ++dim) first.push_back(dim);
      of_weight = (outer * normal).sum(first).to(weight->scalar_type());
      outer = outer * host.of(*weight);
    }
    const auto mean = (outer * normal).mean(last_dims(normalized_shape), true);
    of_input = ((outer - normal * mean) * host.of(rstd)).to(input.scalar_type());
  }
  return {host.back(of_input), host.back(of_weight)};
}

void refuse(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulated CUDA device has no kernel for ", operation.schema().name());
}

// These launch no kernel, which is torch's own work on the simulated device, or have one below.
const std::unordered_set<std::string> KEPT = {
    "alias", "as_strided", "detach", "empty", "empty_strided", "is_pinned", "record_stream", "resize_", "set_", "unfold",
    "view", "view_as_complex", "view_as_real", "_efficientzerotensor", "_local_scalar_dense", "_pin_memory",
    "_reshape_alias", "_fused_sdp_choice", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "native_dropout"};
// These call kernels by names that the CPU lacks (cuDNN's), or launch one though they are registered for all devices.
const std::unordered_set<std::string> WHOLE = {"convolution", "convolution_backward", "copy_", "ldexp", "ldexp_"};

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto operation = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !operation.has_value() || !operation->hasSchema()) continue;
    const auto base = name.name.substr(6);
    const bool is_whole = WHOLE.count(base) > 0;
    const bool is_replaced = is_whole || operation->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (KEPT.count(base) > 0 || !is_replaced) continue;
    const bool is_known = is_whole || operation->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        operation->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    const auto full = name.overload_name.empty() ? base : base + "." + name.overload_name;
    m.impl(full.c_str(), is_known ? torch::CppFunction::makeFromBoxedFunction<&on_host>()
                                  : torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
  m.impl("native_dropout", dropout);
  m.impl("_fused_rms_norm", rms_norm);
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
}
