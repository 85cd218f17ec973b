// Streams of the simulated accelerator, their events and clocks, and the detector of unordered accesses. Knows no tensor.
//
// Note [Clocks]
// A stream is a thread with a queue of launches. Each stream counts its launches, and knows how far it has waited for every
// other one (a vector clock). Waiting for an event merges the clock that the event was recorded with. One launch happens before
// another only if clocks say so; which one ran first in real time does not matter. So a missing wait is found every time.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sim {

constexpr int kDevices = 4;

using Clock = std::vector<uint64_t>;  // by stream

// A range of bytes that a launch reads or writes.
struct Access {
  uintptr_t begin, end;
  bool write;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock clock;
  void finish();
  void wait();
};
using EventPtr = std::shared_ptr<Event>;

// Where in the program the host is, innermost first: texts that live as long as the process.
using Place = std::array<const std::string*, 6>;

// What a launch is called, and where it was launched: put together only when it is asked for.
struct Label {
  std::string what;
  Place place{};
  std::string text() const;
};
using LabelPtr = std::shared_ptr<const Label>;

struct Launch {
  std::function<void()> run;
  LabelPtr label;
  bool lags;  // whether it may be delayed
};

struct Stream {
  int index, device;
  int64_t id;  // as torch knows it: 0 is the default stream of every device
  std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Launch> launches;
  uint64_t submitted = 0, finished = 0;
  Clock clock;
  void run();
};

// A launch that the detector remembers.
struct Site {
  LabelPtr label;
  int stream;
};

// Memory of the device, which is reused but never unmapped.
struct Block {
  struct Past {
    Access access;
    uint64_t tick;
    Site site;
  };
  char* base;
  size_t size;
  int device;
  Stream* home;  // the stream that it was allocated on, to which it goes back; none has memory of the host
  std::vector<Past> pasts, writers;
  std::set<Stream*> recorded;
};

Stream* new_stream(int device, const std::string& name);
Stream* stream_of(int device, int64_t id);
Stream* current_stream(int device);
Stream* exchange_stream(Stream* stream);
void name_stream(int64_t id, const std::string& name);
std::vector<Stream*> streams_of(int device);
int current_device();
int exchange_device(int device);

// Runs `run` on `stream` after all that it was given before. `accesses` are noted at once, in the order of the host's calls.
void launch(Stream* stream, std::string what, const std::vector<Access>& accesses, std::function<void()> run, bool lags = true);
EventPtr record(Stream* stream);
void wait_on_stream(Stream* stream, const EventPtr& event);
// Delays a stream until `event`, but leaves its clock alone: an order that is not promised to anybody.
void delay_stream(Stream* stream, const EventPtr& event);
// The host waits, and that is counted under `kind` unless it is empty.
void wait_on_host(Stream* stream, const std::string& kind);
void wait_on_host(const EventPtr& event, const std::string& kind);
void synchronize(int device, const std::string& kind);

Block* take_block(size_t bytes, int device);
void give_block(Block* block);
// Memory of the host that is pinned; see Note [Pinned memory].
Block* pin_block(size_t bytes);
void unpin_block(Block* block);
Block* block_at(uintptr_t address);
void record_use(uintptr_t address, Stream* stream);
// The last write to these bytes; asked when a launch reads them, for the case that it finds poison there.
std::vector<Site> writers_of(const Access& access);
void report_poison(const std::vector<Site>& writers, const Site& reader);

// Tells where the host is; set by the module that knows the language of the program.
extern std::function<Place()> place;
LabelPtr label_here(std::string what);

void shut_down();
void raise_failure();

struct Settings {
  std::atomic<bool> detects{true}, poisons{true}, places{true};
  std::atomic<int> lag_of_default{0}, lag_of_others{0};  // microseconds, at most
  std::atomic<double> lag_probability{0};
  std::atomic<uint64_t> lag_seed{0};
};
extern Settings settings;

std::vector<std::string> findings();
void clear_findings();
std::map<std::string, int64_t> host_waits();
std::vector<std::string> places_of_host_waits();
void clear_host_waits();
std::pair<int64_t, int64_t> memory(int device);  // bytes allocated: now, and at most
void reset_peak(int device);
int64_t launch_count();

}  // namespace sim
