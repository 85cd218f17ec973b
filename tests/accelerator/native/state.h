// What streams and detector share, under one lock: everything that is decided when the host launches.
#pragma once

#include "streams.h"

namespace sim {

struct Finding {
  enum Kind { kUnordered, kPoison } kind;
  bool first_writes, second_writes;
  Site first, second;
};

struct State {
  std::mutex mutex;
  std::vector<Stream*> streams;
  Clock host_clock;
  std::atomic<bool> down{false};
  std::string failure;
  std::map<std::string, int64_t> host_waits;
  std::vector<Label> places_of_host_waits;
  std::vector<Finding> findings;
  std::set<std::string> keys;  // of the findings: each is reported once
  std::map<uintptr_t, Block*> blocks;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> idle;
  int64_t launches = 0, bytes[kDevices] = {}, peak[kDevices] = {};
};

State& state();
void merge(Clock& into, const Clock& from);
// With the lock held: compares with what other streams do to the same bytes.
void note_accesses(Stream* stream, const LabelPtr& label, const std::vector<Access>& accesses);

}  // namespace sim
