// What torch asks of a backend: an allocator, a guard for devices and streams, and hooks. Knows no operator.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "random.h"
#include "tensors.h"

namespace sim {

namespace {

size_t extent(const at::Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.element_size();
}

}  // namespace

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

Access access_of(const at::Tensor& tensor, bool write) {
  size_t bytes = extent(tensor);
  auto begin = bytes ? (uintptr_t)tensor.unsafeGetTensorImpl()->data() : 0;
  return {begin, begin + bytes, write};
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  c10::InferenceMode ordinary(false);  // threads of streams write to it
  size_t bytes = extent(tensor);
  TORCH_CHECK(
      !bytes || tensor.storage_offset() * tensor.element_size() + bytes <= tensor.storage().nbytes(),
      "sim: illegal memory access: a tensor of ", tensor.sizes(), " in a storage of ", tensor.storage().nbytes(), " bytes");
  void* data = bytes ? const_cast<void*>(tensor.unsafeGetTensorImpl()->data()) : nullptr;
  auto made = at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

namespace {

void release(void* block) { give_block((Block*)block); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, (c10::DeviceIndex)current_device());
    if (!bytes) return {nullptr, nullptr, &release, device};
    Block* block = take_block(bytes, current_device());
    return {block->base, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "sim: copy_data is not there"); }
};

void unpin(void* block) { unpin_block((Block*)block); }

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device host(c10::DeviceType::CPU);
    if (!bytes) return {nullptr, nullptr, &unpin, host};
    Block* block = pin_block(bytes);
    return {block->base, block, &unpin, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct TorchEvent {
  EventPtr event;
};

c10::Stream as_torch(Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, (c10::DeviceIndex)stream->device), stream->id);
}

Stream* as_ours(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, (c10::DeviceIndex)exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kType, (c10::DeviceIndex)current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::Stream getStream(c10::Device device) const override { return as_torch(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(stream_of(index_of(device), 0)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    streams_of(0);  // default streams come first
    return as_torch(new_stream(index_of(device), ""));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_torch(exchange_stream(as_ours(stream))); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return as_ours(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (TorchEvent*)event; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new TorchEvent;
    ((TorchEvent*)*event)->event = sim::record(as_ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && ((TorchEvent*)event)->event) wait_on_stream(as_ours(stream), ((TorchEvent*)event)->event);
  }
  bool queryEvent(void* event) const override {
    if (!event || !((TorchEvent*)event)->event) return true;
    auto& recorded = *((TorchEvent*)event)->event;
    std::lock_guard lock(recorded.mutex);
    return recorded.done;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    auto* ours = as_ours(stream);
    std::lock_guard lock(ours->mutex);
    return ours->finished == ours->submitted;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(as_ours(stream), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (event && ((TorchEvent*)event)->event) wait_on_host(((TorchEvent*)event)->event, "event.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device, "device.synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use((uintptr_t)data.get(), as_ours(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return (c10::DeviceIndex)exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return (c10::DeviceIndex)(device < 0 ? current_device() : exchange_device(device));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    Block* block = block_at((uintptr_t)data);
    return block && !block->home;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

Hooks hooks;
[[maybe_unused]] bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  int before = exchange_device(storage.device().index());
  c10::DataPtr fresh = allocator.allocate(bytes);
  if (size_t common = std::min(impl->nbytes(), bytes)) {
    auto from = (uintptr_t)impl->data(), to = (uintptr_t)fresh.get();
    launch(current_stream(current_device()), "resize", {{from, from + common, false}, {to, to + common, true}},
        [=] { std::memcpy((void*)to, (const void*)from, common); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
  exchange_device(before);
}

}  // namespace sim
