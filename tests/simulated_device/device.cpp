// A simulated accelerator: two devices whose memory is the host's and whose operators are the CPU's.
//
// Torch treats its tensors as those of any accelerator: operators refuse operands of two devices, random numbers need a
// generator of the device, and values reach the host by copies only. Results equal the CPU's to the bit. What would
// make a real device wait, or would copy to it, is counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

namespace {

constexpr int DEVICES = 2;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 64;

struct Counts {
  std::atomic<int64_t> waits{0};      // the host waits for the device
  std::atomic<int64_t> uploads{0};    // copies from the host's memory
  std::atomic<int64_t> operators{0};  // launched
};

Counts counts;
std::array<std::atomic<int64_t>, DEVICES> in_use{}, peak{};  // bytes
thread_local c10::DeviceIndex current = 0;
bool has_float64 = true;
std::set<std::string> missing;   // names of operators that the device lacks
std::set<std::string> launched;  // names of operators since they were last asked for
std::mutex launching;

void launch(const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(missing.count(name) == 0, "the simulated device has no '", name, "'");
  counts.operators++;
  std::lock_guard<std::mutex> lock(launching);
  launched.insert(name);
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct Header {  // before each block
  size_t bytes;
  c10::DeviceIndex device;
};

size_t rounded(size_t bytes) {
  return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - ALIGNMENT);
  in_use[header->device] -= static_cast<int64_t>(header->bytes);
  std::free(header);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(KIND, current);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    char* base = static_cast<char*>(std::aligned_alloc(ALIGNMENT, ALIGNMENT + rounded(bytes)));
    TORCH_CHECK(base != nullptr, "the simulated device is out of memory");
    new (base) Header{bytes, current};
    int64_t total = in_use[current] += static_cast<int64_t>(bytes);
    peak[current] = std::max<int64_t>(peak[current], total);
    return {base + ALIGNMENT, base + ALIGNMENT, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

std::mutex pinning;
std::set<const void*> pinned;

void unpin(void* data) {
  std::lock_guard<std::mutex> lock(pinning);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {  // of the host
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(ALIGNMENT, rounded(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> lock(pinning);
    pinned.insert(data);
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinning);
  return pinned.count(data) > 0;
}

// ---- devices, streams and events: every operator has ended when its call returns ------------------------------------

thread_local std::array<c10::StreamId, DEVICES> streams{};
std::atomic<c10::StreamId> last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return KIND;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {KIND, current};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no simulated device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    c10::DeviceIndex index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new char;
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<char*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {
    counts.waits++;
  }
  void synchronizeStream(const c10::Stream&) const override {
    counts.waits++;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    counts.waits++;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {  // draws the CPU's numbers
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(KIND, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  std::array<at::Generator, DEVICES> generators{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};

  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
};

Hooks& hooks() {
  static Hooks* only = new Hooks;  // never destroyed: torch keeps it
  return *only;
}

// ---- tensors ------------------------------------------------------------------------------------------------------

void check(c10::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || type != c10::ScalarType::Double, "the simulated device has no float64");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  check(c10::dtype_or_default(type));
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  check(c10::dtype_or_default(type));
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

// The same memory as a tensor of the CPU.
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  auto options = at::TensorOptions().dtype(tensor.scalar_type());
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  at::Tensor alive = tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [alive](void*) {}, options);
}

// A copy of the CPU's result on the device.
at::Tensor placed(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) {
    return result;
  }
  at::Tensor copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
  host(copy).copy_(result);
  return copy;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool upload = !from.is_privateuseone();
  bool download = !to.is_privateuseone();
  if (upload) {
    counts.uploads++;
  }
  const at::Tensor& of_host = upload ? from : to;
  if ((upload || download) && !(non_blocking && is_pinned(of_host.storage().data()))) {
    counts.waits++;  // the host's memory may be moved or used again, unless it is pinned
  }
  host(to).copy_(host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  counts.waits++;
  return host(tensor).item();
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t size = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, storage, 0, {size}, {});
}

// ---- operators ----------------------------------------------------------------------------------------------------

// The operands of one call: their memory as the CPU's, and back.
struct Operands {
  std::string name;
  std::optional<c10::Device> device;
  bool of_host = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (of the device, the same as the CPU's)

  at::Tensor down(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_privateuseone()) {
      of_host |= tensor.dim() > 0;  // numbers may be the host's, as on other accelerators
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), name, ": expected all tensors on the same device, but found ",
                tensor.device(), " and ", *device);
    device = tensor.device();
    check(tensor.scalar_type());
    pairs.emplace_back(tensor, host(tensor));
    return pairs.back().second;
  }

  at::Tensor up(const at::Tensor& result) const {
    if (!result.defined()) {
      return result;
    }
    for (const auto& [mine, theirs] : pairs) {
      bool same_memory = result.numel() > 0 && theirs.data_ptr() == result.data_ptr();
      if (theirs.is_same(result) || (same_memory && theirs.sizes() == result.sizes())) {
        return mine;
      }
    }
    check(result.scalar_type());
    return placed(result, device.value_or(c10::Device(KIND, current)));
  }

  void check_host() const {
    TORCH_CHECK(!(device && of_host), name, ": expected all tensors on the same device, but found cpu and ", *device);
  }

  void resize() const {  // what was resized, as the result given by "out"
    for (const auto& [mine, theirs] : pairs) {
      if (mine.sizes() != theirs.sizes()) {
        mine.resize_(theirs.sizes());
        host(mine).copy_(theirs);
      }
    }
  }
};

// Within, the CPU's default generator has the state of the device's.
struct BorrowedState {
  at::Generator theirs = at::detail::getDefaultCPUGenerator(), mine;
  at::Tensor before = theirs.get_state().clone();

  explicit BorrowedState(at::Generator generator) : mine(std::move(generator)) {
    theirs.set_state(mine.get_state());
  }
  ~BorrowedState() {
    mine.set_state(theirs.get_state());
    theirs.set_state(before);
  }
};

// Whether a real device would have to tell the host a size or a value before the call can return.
bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  bool indexes = name == "aten::index" || name.find("aten::index_put") == 0 || name == "aten::_index_put_impl_";
  if (!indexes) {
    return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  }
  for (const std::optional<at::Tensor>& index : stack[first + 1].toOptionalTensorVector()) {
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
      return true;  // counts the elements of a mask
    }
  }
  return false;
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  launch(schema.name());
  size_t first = stack->size() - schema.arguments().size();
  if (waits(op, *stack, first)) {
    counts.waits++;
  }
  Operands operands{schema.name()};
  std::optional<at::Generator> generator;
  for (size_t i = first; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = operands.down(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(operands.down(tensor));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(operands.down(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      value = c10::IValue(c10::Device(c10::DeviceType::CPU));
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      value = c10::IValue();  // the default, whose state is borrowed
    }
  }
  operands.check_host();
  c10::Device device = operands.device.value_or(c10::Device(KIND, current));
  TORCH_CHECK(!generator || generator->device() == device, schema.name(), ": expected a generator of ", device,
              ", but found one of ", generator ? generator->device() : device);
  {
    std::optional<BorrowedState> borrowed;
    if (generator || op.hasTag(at::Tag::nondeterministic_seeded)) {
      borrowed.emplace(generator ? *generator : hooks().getDefaultGenerator(device.index()));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  operands.resize();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = operands.up(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(operands.up(tensor));
      }
      value = list;
    }
  }
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                       bool transposed, at::SymIntArrayRef output_padding, c10::SymInt groups) {
  launch("aten::convolution");
  Operands operands{"aten::convolution"};
  at::Tensor x = operands.down(input), w = operands.down(weight);
  std::optional<at::Tensor> b;
  if (bias && bias->defined()) {
    b = operands.down(*bias);
  }
  operands.check_host();
  return operands.up(
      at::convolution_symint(x, w, b, stride, padding, dilation, transposed, output_padding, std::move(groups)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::SymIntArrayRef stride,
    at::SymIntArrayRef padding, at::SymIntArrayRef dilation, bool transposed, at::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  launch("aten::convolution_backward");
  Operands operands{"aten::convolution_backward"};
  at::Tensor g = operands.down(gradient), x = operands.down(input), w = operands.down(weight);
  operands.check_host();
  std::vector<c10::SymInt> bias{weight.size(0)};
  auto [by_input, by_weight, by_bias] =
      at::convolution_backward_symint(g, x, w, at::OptionalSymIntArrayRef(bias), stride, padding, dilation, transposed,
                                      output_padding, std::move(groups), mask);
  return {operands.up(by_input), operands.up(by_weight), operands.up(by_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);  // views share memory, so they have no copies
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward"}) {
    // torch would compose them of others, which round otherwise
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks()); });
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("wait", [] { counts.waits++; });
  m.def("counts", [] {
    return std::make_tuple(counts.waits.load(), counts.uploads.load(), counts.operators.load());
  });
  m.def("take_launched", [] {
    std::lock_guard<std::mutex> lock(launching);
    return std::exchange(launched, {});
  });
  m.def("memory_allocated", [](int index) { return in_use[index].load(); });
  m.def("max_memory_allocated", [](int index) { return peak[index].load(); });
  m.def("reset_peak_memory", [](int index) { peak[index] = in_use[index].load(); });
  m.def("default_generator", [](int index) { return hooks().getDefaultGenerator(index); });
  m.def("set_float64", [](bool has) { has_float64 = has; });
  m.def("set_missing", [](std::set<std::string> names) { missing = std::move(names); });
}
