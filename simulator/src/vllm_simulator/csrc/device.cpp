// The devices as torch sees them: torch's ops on device memory, in the order of the streams, and the Python module.
//
// Compiled once for each key under which torch can know a device: SIM_KEY is PrivateUse1 (the default), XPU or CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#if defined(SIM_XPU)
#include <ATen/detail/XPUHooksInterface.h>
#elif defined(SIM_CUDA)
#include <ATen/detail/CUDAHooksInterface.h>
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>

#include "queue.h"

namespace sim {
namespace {

using c10::IValue;
constexpr auto kKey = c10::DispatchKey::SIM_KEY;
c10::DeviceIndex num_devices = 0;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  auto index = device && device->has_index() ? device->index() : current_device;
  TORCH_CHECK(index < num_devices, device_name, " error: invalid device ordinal ", int(index), " of ", int(num_devices));
  return index;
}

// ---- streams and events, for torch.Stream and torch.Event

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto old = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return old;
  }
  static Stream& find(const c10::Stream& stream) { return streams[{stream.device_index(), stream.id()}]; }
  bool queryStream(const c10::Stream& stream) const override { return find(stream).queue.empty(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Turn turn;
    finish(find(stream), find(stream).issued);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { finish_device(device); }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Turn turn;
    TORCH_CHECK(!recording, "an event is recorded while work is captured");
    if (!*event) *event = new Mark;
    auto* mark = static_cast<Mark*>(*event);
    *mark = {&find(on), find(on).issued, now()};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    Turn turn;
    if (event) wait_for(find(waiting), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {  // not yet; but the device uses the time until the next question
    Turn turn;
    auto* mark = static_cast<Mark*>(event);
    bool reached = !mark || mark->stream->done >= mark->point;
    if (!reached) advance(*mark->stream, mark->point);
    return reached;
  }
  void synchronizeEvent(void* event) const override {
    Turn turn;
    if (auto* mark = static_cast<Mark*>(event)) finish(*mark->stream, std::max(mark->stream->done, mark->point));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e3 * (static_cast<Mark*>(second)->seconds - static_cast<Mark*>(first)->seconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};
c10::impl::DeviceGuardImplRegistrar guard_registrar(kDevice, new Guard);

// The device's generator: a host's one under another device, which work that the device runs takes its numbers from.
struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();
  explicit Generator(c10::DeviceIndex index) : c10::GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(kKey)) {}
  static c10::DeviceType device_type() { return kDevice; }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) made->push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

at::Generator host_generator(const at::Generator& generator) {
  return generator.device().type() == kDevice ? static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host : generator;
}

void grow(const c10::Storage& storage, size_t size) {
  if (size <= storage.nbytes()) return;
  TORCH_CHECK(storage.nbytes() == 0, "memory of the device does not grow: allocate the output at its size");
  c10::DeviceGuard on(storage.device());
  storage.unsafeGetStorageImpl()->set_data_ptr(allocator.allocate(size));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

#if defined(SIM_XPU)
struct XPUHooks final : at::XPUHooksInterface {
  XPUHooks() = default;
  explicit XPUHooks(at::XPUHooksArgs) {}
  bool hasXPU() const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return sim::current_device; }
  void deviceSynchronize(c10::DeviceIndex device) const override { finish_device(device); }
#elif defined(SIM_CUDA)
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasROCM() const override { return true; }
  int getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return sim::current_device; }
  void deviceSynchronize(c10::DeviceIndex device) const override { finish_device(device); }
#else
struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kDevice, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(sim::current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? sim::current_device : std::exchange(sim::current_device, device);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return c10::Device(kDevice, c10::DeviceIndex((reinterpret_cast<uintptr_t>(pointer) >> 52) - 1));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? sim::current_device : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* pointer) const override { return pinned.contains(pointer); }
};

// ---- memory as tensors

at::Tensor empty_strided_on(c10::DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  c10::DeviceGuard on(c10::Device(kDevice, device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(kKey), dtype);
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard on(c10::Device(kDevice, index_of(device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided_on(index_of(device), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                          c10::dtype_or_default(dtype));
}

at::Tensor view_of(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(),
                                                       tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return view_of(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                 offset ? offset->expect_int() : tensor.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return as_strided(tensor, sizes, strides, std::nullopt);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef shape) {
  auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(shape), tensor.numel());
  auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
  TORCH_CHECK(strides, "this view needs a copy: use reshape");
  return view_of(tensor, sizes, *strides, tensor.storage_offset());
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef shape, std::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(shape);
  grow(tensor.storage(), (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.itemsize());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef shape,
                        c10::SymIntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(shape), steps = C10_AS_INTARRAYREF_SLOW(strides);
  if (steps.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, steps, offset.expect_int());
  }
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, c10::Storage storage) {
  auto* impl = tensor.unsafeGetTensorImpl();
  int64_t count = int64_t(storage.nbytes() / tensor.itemsize());
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  auto like = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta)).unfold(dimension, size, step);
  return view_of(tensor, like.sizes(), like.strides(), tensor.storage_offset());
}

// ---- copies

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (on_device(source) && on_device(target)) {
    bool apart = source.device() != target.device();
    if (apart) finish_device(source.get_device());  // the link has no queue of its own
    launch("copy", target.get_device(), [=] { memory(target).copy_(memory(source)); });
  } else if (on_device(target)) {
    bool later = non_blocking && pinned.contains(source.const_data_ptr());
    TORCH_CHECK(later || !recording, "a copy from memory that is not pinned is captured");
    auto kept = later ? source : source.clone();
    launch("copy", target.get_device(), [=] { memory(target).copy_(kept); });
  } else if (non_blocking && pinned.contains(target.const_data_ptr())) {
    launch("copy", source.get_device(), [=] { auto to = target; to.copy_(memory(source)); });
    if (target.is_contiguous() && !blocking) std::memset(target.mutable_data_ptr(), kGarbage, target.nbytes());
  } else {
    finish_device(source.get_device());
    auto to = target;
    to.copy_(memory(source));
  }
  return target;
}

at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  auto fitting = source.expand_as(target);
  copy_from(fitting, target, non_blocking);
  return target;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  finish_device(tensor.get_device());
  return memory(tensor).item();
}

// ---- every other op of torch: its shape is computed at once, its values when the device comes to it

template <class F>
void replace_tensors(IValue& value, F replace) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = replace(tensor);
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : std::nullopt);
    value = list;
  }
}

// The one device of all tensors; numbers of the host may be mixed in, its tensors not.
c10::DeviceIndex common_device(const std::string& op, std::vector<IValue>& arguments) {
  std::optional<c10::Device> found;
  std::vector<at::Tensor> tensors;
  for (auto& argument : arguments) {
    replace_tensors(argument, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
    if (argument.isDevice() && argument.toDevice().type() == kDevice) found = c10::Device(kDevice, index_of(argument.toDevice()));
  }
  for (const auto& tensor : tensors)
    if (on_device(tensor) && !found) found = tensor.device();
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.device() == *found || (!on_device(tensor) && tensor.dim() == 0), "Expected all tensors to be on the same device, "
                "but found at least two devices, ", *found, " and ", tensor.device(), "! (", op, ")");
  return index_of(found);
}

// What reads a tensor in a private format of the vendor: products, which are counted. Everything else would see its bytes in
// another order.
void check_formats(const std::string& op, std::vector<IValue>& arguments) {
  static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear", "aten::matmul"};
  if (!formatted) return;
  for (auto& argument : arguments)
    replace_tensors(argument, [&](const at::Tensor& tensor) {
      auto format = on_device(tensor) ? format_of(tensor) : kPlain;
      TORCH_CHECK(format == kPlain || products.count(op), op, " reads a tensor in format ", format, ": only products do");
      if (format != kPlain) ++counts[op + " in format " + std::to_string(format)];
      return tensor;
    });
}

at::Tensor shape_only(const at::Tensor& tensor) {
  return on_device(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta)) : tensor;
}

torch::jit::Stack call(const c10::OperatorHandle& op, std::vector<IValue> arguments, c10::DispatchKey key, c10::DeviceIndex device) {
  const auto& schema = op.schema().arguments();
  bool real = key == c10::DispatchKey::CPU;
  for (size_t i = 0; i < arguments.size(); ++i) {
    replace_tensors(arguments[i], [&](const at::Tensor& t) { return !real ? shape_only(t) : on_device(t) ? memory(t) : t; });
    if (arguments[i].isDevice()) arguments[i] = c10::Device(real ? c10::kCPU : c10::kMeta);
    if (real && schema[i].name() == "generator")
      arguments[i] = host_generator(arguments[i].isNone() ? default_generator(device) : arguments[i].toGenerator());
  }
  op.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  return arguments;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// An output of the caller that has no size yet takes the one that the op found.
void fit_outputs(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, const std::vector<IValue>& found) {
  for (size_t i = 0; i < arguments.size(); ++i)
    if (writes(schema.arguments()[i]) && arguments[i].isTensor() && arguments[i].toTensor().sizes() != found[i].toTensor().sizes())
      resize_(arguments[i].toTensor(), c10::fromIntArrayRefSlow(found[i].toTensor().sizes()), std::nullopt);
}

// What the op returns: the caller's own tensors where it writes to them, else fresh ones like `like`.
std::vector<IValue> make_results(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, std::vector<IValue> like,
                                 c10::DeviceIndex device) {
  size_t written = 0;
  for (size_t i = 0; i < like.size(); ++i) {
    if (writes(schema.returns()[i])) {
      while (!writes(schema.arguments()[written])) ++written;
      like[i] = arguments[written++];
    } else {
      replace_tensors(like[i], [&](const at::Tensor& t) { return empty_strided_on(device, t.sizes(), t.strides(), t.scalar_type()); });
    }
  }
  return like;
}

// Whether all results are tensors of the caller that have a size: then there is nothing to compute beforehand.
bool returns_arguments(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  for (const auto& result : schema.returns())
    if (!writes(result)) return false;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (writes(schema.arguments()[i]) && !(arguments[i].isTensor() && arguments[i].toTensor().numel() > 0)) return false;
  return true;
}

void store(std::vector<IValue>& results, std::vector<IValue>& values, const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (writes(schema.returns()[i])) continue;
    std::vector<at::Tensor> computed;
    replace_tensors(values[i], [&](const at::Tensor& t) { return computed.emplace_back(t); });
    size_t next = 0;
    replace_tensors(results[i], [&](const at::Tensor& t) {
      memory(t).copy_(computed[next++]);
      return t;
    });
  }
}

void run_op(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto first = stack->end() - schema.arguments().size();
  std::vector<IValue> arguments(first, stack->end());
  stack->erase(first, stack->end());
  auto device = common_device(schema.name(), arguments);
  check_formats(schema.name(), arguments);
  std::vector<IValue> results;
  bool shaped = true;
  if (returns_arguments(schema, arguments)) {
    results = make_results(schema, arguments, std::vector<IValue>(schema.returns().size()), device);
  } else try {
    auto shapes = arguments;
    for (auto& one : shapes) replace_tensors(one, shape_only);
    auto like = call(op, shapes, c10::DispatchKey::Meta, device);
    fit_outputs(schema, arguments, shapes);
    results = make_results(schema, arguments, std::move(like), device);
    for (auto& result : results) shaped &= result.isTensor() || result.isTensorList();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception&) {  // the shape depends on values, or the arguments are wrong: the call itself says so
    shaped = false;
  }
  if (shaped) {
    launch(schema.name(), device, [op, arguments, results, device]() mutable {
      auto values = call(op, arguments, c10::DispatchKey::CPU, device);
      store(results, values, op.schema());
    });
  } else {
    finish_device(device);
    auto values = call(op, arguments, c10::DispatchKey::CPU, device);
    results = make_results(schema, arguments, values, device);
    store(results, values, schema);
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

// Devices count integers too, which torch's host does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  auto out = empty_strided_on(self.device().index(), {bins}, {1}, self.scalar_type());
  launch("aten::histc", self.device().index(), [out, self, bins, min, max] {
    auto values = memory(self);
    bool counted = at::isIntegralType(values.scalar_type(), false);
    memory(out).copy_(at::histc(counted ? values.to(at::kDouble) : values, bins, min, max));
  });
  return out;
}

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_op>()); }

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("histc", histc);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("unfold", unfold);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
#if defined(SIM_XPU) || defined(SIM_CUDA)
  // Devices that torch has kernels for itself in other builds: here their entries are empty.
  m.impl("copy_", copy_);
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&run_op>());
#endif
}

// ---- what Python asks for

void install(const std::string& name, int devices, size_t bytes, bool at_once, const std::string& when_lost) {
  device_name = name;
  num_devices = c10::DeviceIndex(devices);
  blocking = at_once;
  lost_message = when_lost;
  for (auto& memory : memories) memory.total = bytes;
  finish_all = [] { for (int i = 0; i < num_devices; ++i) finish_device(c10::DeviceIndex(i)); };
  c10::SetAllocator(kDevice, &allocator);
#if !defined(SIM_XPU) && !defined(SIM_CUDA)
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
}

void launch_python(int device, const std::string& op, py::object body, bool urgent) {
  std::shared_ptr<py::object> kept(new py::object(std::move(body)), [](py::object* one) {
    py::gil_scoped_acquire gil;
    delete one;
  });
  launch(op, c10::DeviceIndex(device), [kept] {
    py::gil_scoped_acquire gil;
    (*kept)();
  }, urgent);
}

}  // namespace
}  // namespace sim

#if defined(SIM_XPU)
namespace at {
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, sim::XPUHooks)
}
#elif defined(SIM_CUDA)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, sim::CUDAHooks)
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  py::class_<Graph>(m, "Graph").def("replay", &Graph::replay);
  m.def("install", &install);
  m.def("memory", &memory);
  m.def("launch", &launch_python);
  m.def("synchronize", &finish_device, py::call_guard<py::gil_scoped_release>());
  m.def("begin_capture", [](int device) {
    Turn turn;
    TORCH_CHECK(!recording, "work is captured already");
    recording = new Graph;
    recording->device = c10::DeviceIndex(device);
  });
  m.def("end_capture", [] { return std::unique_ptr<Graph>(std::exchange(recording, nullptr)); });
  m.def("set_format", [](const at::Tensor& tensor, int format) {
    if (auto* block = block_of(tensor)) block->format = format;
    formatted = true;
  });
  m.def("format_of", &format_of);
  m.def("is_capturing", [] { return recording != nullptr; });
  m.def("memory_now", [](int device) { return std::make_tuple(memories[device].used, memories[device].peak, memories[device].total); });
  m.def("reset_peak", [](int device) { memories[device].peak = memories[device].used; });
  m.def("current_stream", [](int device) { return current_stream[device]; });
  m.def("set_stream", [](int device, int64_t id) { current_stream[device] = id; });
  m.def("device_type", [] { return int(kDevice); });
  m.def("fail_allocation", [](int64_t number) { fail_allocation = number; });
  m.def("fail_launch", [](const std::string& kind, const std::string& op, int64_t number) { faults.push_back({kind, op, number}); });
  m.def("counts", [] { return counts; });
  m.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });
  m.def("device_count", [] { return int(num_devices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { current_device = index_of(c10::Device(kDevice, c10::DeviceIndex(device))); });
}
