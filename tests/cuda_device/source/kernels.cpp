// Kernels: those of the CPU on the memory of the device, run by its streams.
//
// An operator without a kernel of its own here comes to `fallback`. Where the stream is prompt, the
// CPU's kernel runs at once and its result is copied to memory of the device. Else the shapes of
// results are found by the operator's meta kernel, and the CPU's runs when the stream comes to it.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <shared_mutex>

namespace cuda_device {

uint64_t next_seed(const at::Generator& generator, int device);  // guard.cpp

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

const c10::DispatchKeySet ON_DEVICE(c10::DispatchKey::CUDA), ON_CPU(c10::DispatchKey::CPU);

c10::Stream stream_for(const Tensor& tensor) { return current_stream(tensor.device().index()); }

// -- the same memory, as a tensor of the CPU -------------------------------------------------------

// It owns nothing: work of a stream uses memory that its owner may have given back, as a GPU does.
Tensor on_cpu(const Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::kCPU), nullptr, false);
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), ON_CPU, tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Tensor empty_like_on(int device, const Tensor& like) {
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
  Tensor made = at::detail::empty_strided_generic(
      like.sizes(), like.strides(), device_allocator(), ON_DEVICE, like.scalar_type());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

// A tensor of the memory of `base` that has the form of `form`.
Tensor view_of(const Tensor& base, const Tensor& form) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), ON_DEVICE, form.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes(), form.strides(), form.storage_offset());
  view._set_conj(form.is_conj());
  view._set_neg(form.is_neg());
  return view;
}

void grow(const Tensor& tensor, at::IntArrayRef sizes) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (impl->numel() == 0 || needed <= storage->nbytes()) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr larger = device_allocator()->allocate(needed);
  submit(stream_for(tensor), [to = larger.get(), from = storage->data(), bytes = storage->nbytes()] {
    if (bytes) std::memcpy(to, from, bytes);
  });
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(needed);
}

// -- operators -------------------------------------------------------------------------------------

struct Traits {
  bool is_view = false;      // a result is a view of an argument
  bool reads_values = false;  // results' shapes, or the result itself, need values on the host
  bool has_meta = false;
  int generator = -1, device = -1;   // which argument they are
  std::vector<int> is_argument;      // per result, which argument it is; -1: a new tensor
  std::vector<bool> is_written;      // per argument
};

Traits find_traits(const OperatorHandle& op) {
  Traits found;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  for (const auto& argument : arguments) {
    const int number = int(found.is_written.size());
    const auto* const alias = argument.alias_info();
    found.is_written.push_back(alias != nullptr && alias->isWrite());
    const auto type = argument.type()->str();
    if (type.find("Generator") != std::string::npos) found.generator = number;
    if (type.find("Device") != std::string::npos) found.device = number;
  }
  for (const auto& result : schema.returns()) {
    const auto* const alias = result.alias_info();
    int same = -1;
    for (size_t number = 0; alias != nullptr && number < arguments.size(); ++number) {
      const auto* const other = arguments[number].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) same = int(number);
    }
    found.is_view = found.is_view || (alias != nullptr && !alias->isWrite());
    found.is_argument.push_back(alias != nullptr && alias->isWrite() ? same : -1);
  }
  found.reads_values =
      op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  found.has_meta = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  return found;
}

const Traits& traits_of(const OperatorHandle& op) {
  static auto* const known = new std::map<const c10::FunctionSchema*, Traits>;
  static std::shared_mutex mutex;
  {
    const std::shared_lock<std::shared_mutex> lock(mutex);
    const auto found = known->find(&op.schema());
    if (found != known->end()) return found->second;
  }
  Traits traits = find_traits(op);
  const std::lock_guard<std::shared_mutex> lock(mutex);
  return known->emplace(&op.schema(), std::move(traits)).first->second;
}

template <typename Change>
void change_tensors(IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = std::move(changed);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      changed.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    value = std::move(changed);
  }
}

// One call of an operator with tensors of a device.
class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack) : op_(op), traits_(traits_of(op)), stack_(*stack) {
    const size_t count = op.schema().arguments().size();
    arguments_.assign(
        std::make_move_iterator(stack_.end() - count), std::make_move_iterator(stack_.end()));
    stack_.resize(stack_.size() - count);
    find_device();
    draw();
  }

  void run() {
    const c10::DeviceGuard guard(c10::Device(c10::kCUDA, device_));
    const c10::Stream stream = current_stream(device_);
    if (traits_.is_view) return run_view();
    if (traits_.reads_values) host_waits(op_.schema().name().c_str(), true);
    const bool now = traits_.reads_values || has_empty_written() || !traits_.has_meta || is_prompt(stream);
    if (!now && defer(stream)) return;
    run_here(stream, [this] { run_now(); });
    give_back();
  }

 private:
  // Of its tensors, which are on one; of a number on the CPU its value counts.
  void find_device() {
    for (size_t number = 0; number < arguments_.size(); ++number) {
      IValue& value = arguments_[number];
      if (int(number) == traits_.device && value.isDevice() && value.toDevice().has_index()) {
        device_ = value.toDevice().index();
      }
      change_tensors(value, [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_cuda()) see(tensor);
        return tensor;
      });
    }
    if (device_ < 0) device_ = current_device();
    for (IValue& value : arguments_) {
      const bool are_indices = value.isOptionalTensorList();
      change_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined() || tensor.is_cuda() || (tensor.dim() == 0 && !are_indices)) return tensor;
        if (are_indices) return tensor.to(c10::Device(c10::kCUDA, device_));
        TORCH_CHECK(
            !tensor.device().is_cpu() || tensor.dim() == 0 || !seen_,
            "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_,
            " and cpu! (", op_.schema().name(), ")");
        return tensor;
      });
    }
  }

  void see(const Tensor& tensor) {
    TORCH_CHECK(
        !seen_ || tensor.device().index() == device_ || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_,
        " and cuda:", int(tensor.device().index()), "! (", op_.schema().name(), ")");
    if (!seen_) device_ = tensor.device().index();
    seen_ = true;
  }

  // Work has a generator of its own.
  void draw() {
    if (traits_.generator < 0) return;
    IValue& value = arguments_[traits_.generator];
    at::Generator given;
    if (!value.isNone()) given = value.toGenerator();
    value = at::detail::createCPUGenerator(next_seed(given, device_));
  }

  bool has_empty_written() {
    bool found = false;
    for (size_t number = 0; number < arguments_.size(); ++number) {
      if (!traits_.is_written[number]) continue;
      change_tensors(arguments_[number], [&](const Tensor& tensor) {
        found = found || (tensor.defined() && tensor.numel() == 0);
        return tensor;
      });
    }
    return found;
  }

  Stack with(const std::function<Tensor(const Tensor&)>& change, c10::Device device) const {
    Stack changed(arguments_.begin(), arguments_.end());
    for (IValue& value : changed) {
      change_tensors(value, change);
      if (value.isDevice()) value = device;
    }
    return changed;
  }

  void run_view() {
    Stack given = with(
        [](const Tensor& tensor) { return tensor.defined() && tensor.is_cuda() ? on_cpu(tensor) : tensor; },
        c10::kCPU);
    Tensor base;
    for (IValue& value : arguments_) {
      if (!base.defined() && value.isTensor() && value.toTensor().is_cuda()) base = value.toTensor();
    }
    op_.redispatchBoxed(ON_CPU, &given);
    for (IValue& value : given) {
      change_tensors(value, [&](const Tensor& form) { return view_of(base, form); });
      stack_.push_back(std::move(value));
    }
  }

  // -- now --

  void run_now() {
    const at::AutoDispatchBelowADInplaceOrView below;
    results_ = with([this](const Tensor& tensor) { return lent(tensor); }, c10::kCPU);
    op_.redispatchBoxed(ON_CPU, &results_);
  }

  // An empty tensor may be resized by the kernel, so it gets one with memory of its own.
  Tensor lent(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    Tensor alias = tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : on_cpu(tensor);
    lent_.emplace_back(alias, tensor);
    return alias;
  }

  void give_back() {
    for (auto& [alias, tensor] : lent_) {
      if (alias.sizes().equals(tensor.sizes())) continue;
      grow(tensor, alias.sizes());
      fill_from(tensor, alias);
    }
    for (IValue& value : results_) {
      change_tensors(value, [&](const Tensor& result) {
        if (!result.defined()) return result;
        for (auto& [alias, tensor] : lent_) {
          if (alias.is_same(result)) return tensor;
        }
        Tensor made = empty_like_on(device_, result);
        fill_from(made, result);
        return made;
      });
      stack_.push_back(std::move(value));
    }
  }

  void fill_from(const Tensor& tensor, const Tensor& values) {
    if (tensor.numel() == 0) return;
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor alias = on_cpu(tensor);
    run_here(current_stream(device_), [&] { alias.copy_(values); });
  }

  // -- later --

  // False if the shapes of its results are not to be known before.
  bool defer(const c10::Stream& stream) {
    Stack results;
    if (!find_results(results)) return false;
    std::vector<Tensor> places;
    for (IValue& value : results) {
      change_tensors(value, [&](const Tensor& tensor) {
        places.push_back(tensor.defined() && tensor.is_cuda() ? on_cpu(tensor) : Tensor());
        return tensor;
      });
    }
    auto given = std::make_shared<Stack>(with(
        [](const Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          if (tensor.is_cuda()) return on_cpu(tensor);
          Tensor number = tensor.clone();
          number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
          return number;
        },
        c10::kCPU));
    submit(stream, [op = op_, given, places = std::move(places)] {
      const at::AutoDispatchBelowADInplaceOrView below;
      const at::NoGradGuard no_grad;
      op.redispatchBoxed(ON_CPU, given.get());
      size_t number = 0;
      for (IValue& value : *given) {
        change_tensors(value, [&](const Tensor& result) {
          const Tensor& place = places.at(number++);
          if (place.defined() && result.defined() && result.data_ptr() != place.data_ptr()) place.copy_(result);
          return result;
        });
      }
    });
    for (IValue& value : results) stack_.push_back(std::move(value));
    return true;
  }

  bool find_results(Stack& results) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack forms = with(
        [](const Tensor& tensor) -> Tensor {
          if (!tensor.defined() || !tensor.is_cuda()) return tensor;
          return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        },
        c10::kMeta);
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &forms);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
    for (size_t number = 0; number < forms.size(); ++number) {
      const int same = number < traits_.is_argument.size() ? traits_.is_argument[number] : -1;
      if (same >= 0) {
        results.push_back(arguments_[same]);
        continue;
      }
      change_tensors(forms[number], [&](const Tensor& form) {
        return form.defined() ? empty_like_on(device_, form) : form;
      });
      results.push_back(std::move(forms[number]));
    }
    return true;
  }

  const OperatorHandle& op_;
  const Traits& traits_;
  Stack& stack_;
  Stack arguments_, results_;
  std::vector<std::pair<Tensor, Tensor>> lent_;
  int device_ = -1;
  bool seen_ = false;
};

void fallback(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// -- tensors ---------------------------------------------------------------------------------------

c10::DeviceGuard guard_for(std::optional<at::Device> device) {
  const c10::Device wanted = device.value_or(c10::Device(c10::kCUDA));
  return c10::DeviceGuard(
      wanted.has_index() ? wanted : c10::Device(c10::kCUDA, c10::DeviceIndex(current_device())));
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard = guard_for(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), ON_DEVICE, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard = guard_for(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), ON_DEVICE,
      c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset.has_value()) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  grow(self, C10_AS_INTARRAYREF_SLOW(size));
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_tensor(self, at::detail::empty_generic({0}, device_allocator(), ON_DEVICE, self.scalar_type(), {}));
}

void record_stream_of(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// -- copies ----------------------------------------------------------------------------------------

// Between devices: by the stream of the source, before and after which that of the other one waits.
void copy_between(const Tensor& to, const Tensor& from) {
  const c10::Stream mine = stream_for(from), theirs = stream_for(to);
  order(mine, mark(theirs));
  const Mark copied = submit(mine, [to = on_cpu(to), from = on_cpu(from)] { to.copy_(from); });
  order(theirs, copied);
}

// What is pageable, or has another form, goes through memory of the driver, and so at once.
void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  const bool direct = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() &&
      from.sizes().equals(to.sizes()) && is_pinned(from.storage().data());
  const Tensor source = direct ? on_cpu(from) : from.to(to.scalar_type()).clone();
  const c10::Stream stream = stream_for(to);
  const Mark copied = submit(stream, [to = on_cpu(to), source] { to.copy_(source); });
  if (direct) record_pinned(from.storage().data(), stream);
  if (non_blocking) return;
  host_waits("copy to the device", true);
  wait(copied);
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const c10::Stream stream = stream_for(from);
  const Mark copied = submit(stream, [to = on_cpu(to), from = on_cpu(from)] { to.copy_(from); });
  const bool pinned = is_pinned(to.storage().data());
  if (pinned) record_pinned(to.storage().data(), stream);
  if (non_blocking && pinned) return;
  host_waits(non_blocking ? "copy to pageable memory" : "copy to the host", !non_blocking);
  wait(copied);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(to.is_cuda() ? to.device() : from.device());
  if (!to.is_cuda()) {
    copy_to_host(to, from, non_blocking);
  } else if (!from.is_cuda()) {
    copy_to_device(to, from, non_blocking);
  } else if (to.device() != from.device()) {
    copy_between(to, from);
  } else {
    submit(stream_for(to), [to = on_cpu(to), from = on_cpu(from)] { to.copy_(from); });
  }
  return to;
}

// -- kernels of which the CPU's would not do --------------------------------------------------------

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // by matrix products
}

// The CPU's draws from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(kept).mul_(p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

// The CPU's takes no whole numbers.
Tensor count(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Tensor counts = at::empty({bins}, self.options().dtype(at::kDouble));
  return at::histc_out(counts, self.to(at::kDouble), bins, least, most).to(self.scalar_type());
}

// Mean and deviation are in fp32, as CUDA has them and the meta kernel says; the CPU's takes them in
// the input's dtype, unless the weight is in fp32.
void layer_norm_backward(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  constexpr size_t INPUT = 1, MEAN = 3, DEVIATION = 4, WEIGHT = 5, COUNT = 8;
  const size_t first = stack->size() - COUNT;
  const auto input = (*stack)[first + INPUT].toTensor().scalar_type();
  const IValue& weight = (*stack)[first + WEIGHT];
  const bool mixed = weight.isTensor() && weight.toTensor().scalar_type() != input;
  for (const size_t number : {MEAN, DEVIATION}) {
    IValue& value = (*stack)[first + number];
    value = value.toTensor().to(mixed ? at::kFloat : input);
  }
  fallback(op, {}, stack);
}

}  // namespace
}  // namespace cuda_device

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&cuda_device::fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  using namespace cuda_device;
  library.impl("empty.memory_format", &cuda_device::empty);
  library.impl("empty_strided", &cuda_device::empty_strided);
  library.impl("as_strided", &cuda_device::as_strided);
  library.impl("view", &cuda_device::view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &cuda_device::resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream_of);
  library.impl("copy_", &cuda_device::copy_);
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("histc", &cuda_device::count);
  library.impl("native_dropout", &cuda_device::dropout);
  library.impl(
      "native_layer_norm_backward",
      torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
}
