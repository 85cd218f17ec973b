// Memory of the device, and the detector of reads and writes of it that are not ordered. See Note [Clocks].
//
// Note [Freed memory]
// A caching allocator gives freed memory to the next allocation on the same stream, without waiting for any other. So freeing
// counts as a write on the stream that the memory was allocated on, unless `record_stream` named further streams: then that one
// waits for them. With poison on, freed and fresh memory is all ones: NaN in every floating dtype.
//
// Note [Pinned memory]
// Copies read and write it while they run, so it counts as memory of the device does. A caching allocator keeps what was freed
// until the copies that use it are done; here, launches hold it.
#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "state.h"

namespace sim {

namespace {

constexpr size_t kGranularity = 512, kWritersKept = 256;

uint64_t at(const Clock& clock, int index) { return index < (int)clock.size() ? clock[index] : 0; }

bool overlap(const Access& one, const Access& other) { return one.begin < other.end && other.begin < one.end; }

bool covers(const Access& one, const Access& other) { return one.begin <= other.begin && other.end <= one.end; }

Block* find_block(uintptr_t address) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < (uintptr_t)block->base + block->size ? block : nullptr;
}

void report(Finding finding) {
  std::string key = std::to_string(finding.kind) + finding.first.label->text() + '\n' + finding.second.label->text() + '\n' +
      std::to_string(finding.first.stream) + ' ' + std::to_string(finding.second.stream);
  if (state().keys.insert(key).second) state().findings.push_back(std::move(finding));
}

std::function<void()> filler(char* base, size_t size) {
  return [base, size] {
    if (settings.poisons) std::memset(base, 0xFF, size);
  };
}

}  // namespace

void note_accesses(Stream* stream, const LabelPtr& label, const std::vector<Access>& accesses) {
  uint64_t tick = stream->clock[stream->index];
  for (auto& access : accesses) {
    Block* block = access.begin < access.end ? find_block(access.begin) : nullptr;
    if (!block) continue;
    auto& pasts = block->pasts;
    size_t kept = 0;
    for (size_t i = 0; i < pasts.size(); i++) {
      auto& past = pasts[i];
      bool ordered = at(stream->clock, past.site.stream) >= past.tick;
      if (!ordered && overlap(past.access, access) && (past.access.write || access.write))
        report({Finding::kUnordered, past.access.write, access.write, past.site, {label, stream->index}});
      // What is ordered after this one is ordered after what it covers, too.
      bool covered = ordered && covers(access, past.access) && (access.write || !past.access.write);
      if (covered || at(state().host_clock, past.site.stream) >= past.tick) continue;
      if (kept != i) pasts[kept] = std::move(past);
      kept++;
    }
    pasts.resize(kept);
    pasts.push_back({access, tick, {label, stream->index}});
    if (!access.write) continue;
    auto& writers = block->writers;
    std::erase_if(writers, [&](auto& writer) { return covers(access, writer.access); });
    if (writers.size() >= kWritersKept) writers.erase(writers.begin());
    writers.push_back({access, tick, {label, stream->index}});
  }
}

std::vector<Site> writers_of(const Access& access) {
  std::lock_guard lock(state().mutex);
  std::vector<Site> found;
  if (Block* block = find_block(access.begin))
    for (auto& writer : block->writers)
      if (overlap(writer.access, access)) found.push_back(writer.site);
  return found;
}

void report_poison(const std::vector<Site>& writers, const Site& reader) {
  std::lock_guard lock(state().mutex);
  Site writer = writers.empty() ? Site{std::make_shared<Label>(Label{"no launch"}), reader.stream} : writers.back();
  report({Finding::kPoison, true, false, writer, reader});
}

std::vector<std::string> findings() {
  std::lock_guard lock(state().mutex);
  auto text = [](const Site& site) { return "[" + site.label->text() + "] on " + state().streams.at(site.stream)->name; };
  auto kind = [](bool writes) { return writes ? "write" : "read"; };
  std::vector<std::string> made;
  for (auto& each : state().findings) {
    if (each.kind == Finding::kPoison)
      made.push_back("poison reached the host by " + text(each.second) + "; last written by " + text(each.first));
    else
      made.push_back(std::string(kind(each.first_writes)) + " by " + text(each.first) + " is not ordered before " +
          kind(each.second_writes) + " by " + text(each.second));
  }
  return made;
}

void clear_findings() {
  std::lock_guard lock(state().mutex);
  state().findings.clear();
  state().keys.clear();
}

Block* block_at(uintptr_t address) {
  std::lock_guard lock(state().mutex);
  return find_block(address);
}

void record_use(uintptr_t address, Stream* stream) {
  std::lock_guard lock(state().mutex);
  Block* block = find_block(address);
  if (block && block->home != stream) block->recorded.insert(stream);
}

Block* take_block(size_t bytes, int device) {
  Stream* home = current_stream(device);
  size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  Block* block = nullptr;
  {
    std::lock_guard lock(state().mutex);
    auto& idle = state().idle[{home, size}];
    if (!idle.empty()) {
      block = idle.back();
      idle.pop_back();
    } else {
      void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (base == MAP_FAILED) throw std::runtime_error("sim: out of memory");
      block = new Block{(char*)base, size, device, home, {}, {}, {}};
      state().blocks[(uintptr_t)base] = block;
    }
    state().bytes[device] += (int64_t)size;
    state().peak[device] = std::max(state().peak[device], state().bytes[device]);
  }
  auto begin = (uintptr_t)block->base;
  launch(home, "allocation", {{begin, begin + size, true}}, filler(block->base, size), false);
  return block;
}

void give_block(Block* block) {
  if (!block || state().down) return;
  std::set<Stream*> recorded;
  {
    std::lock_guard lock(state().mutex);
    recorded.swap(block->recorded);
    state().bytes[block->device] -= (int64_t)block->size;
  }
  for (auto* other : recorded) wait_on_stream(block->home, record(other));
  auto begin = (uintptr_t)block->base;
  launch(block->home, "free", {{begin, begin + block->size, true}}, filler(block->base, block->size), false);
  std::lock_guard lock(state().mutex);
  state().idle[{block->home, block->size}].push_back(block);
}

Block* pin_block(size_t bytes) {
  size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::runtime_error("sim: out of memory");
  if (settings.poisons) std::memset(base, 0xFF, size);
  auto* block = new Block{(char*)base, size, -1, nullptr, {}, {}, {}};
  std::lock_guard lock(state().mutex);
  return state().blocks[(uintptr_t)base] = block;
}

void unpin_block(Block* block) {
  if (!block || state().down) return;
  std::lock_guard lock(state().mutex);
  state().blocks.erase((uintptr_t)block->base);
  munmap(block->base, block->size);
  delete block;
}

std::pair<int64_t, int64_t> memory(int device) {
  std::lock_guard lock(state().mutex);
  return {state().bytes[device], state().peak[device]};
}

void reset_peak(int device) {
  std::lock_guard lock(state().mutex);
  state().peak[device] = state().bytes[device];
}

}  // namespace sim
