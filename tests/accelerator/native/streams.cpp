// Streams are threads; launches, events and waits of the host.
#include <Python.h>

#include "streams.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <stdexcept>

#include "state.h"

namespace sim {

Settings settings;
std::function<Place()> place;

std::string Label::text() const {
  std::string text = what;
  for (auto* each : place)
    if (each) text += (each == place[0] ? " at " : " < ") + *each;
  return text;
}

LabelPtr label_here(std::string what) {
  return std::make_shared<const Label>(Label{std::move(what), settings.places && place ? place() : Place{}});
}

State& state() {
  static auto* one = new State;  // never destroyed: threads of streams outlive everything
  return *one;
}

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void Event::finish() {
  {
    std::lock_guard lock(mutex);
    done = true;
  }
  changed.notify_all();
}

void Event::wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return done; });
}

void Stream::run() {
  uint64_t seed = 0;
  std::mt19937_64 random;
  while (true) {
    Launch next;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return !launches.empty(); });
      next = std::move(launches.front());
      launches.pop_front();
    }
    if (uint64_t wanted = settings.lag_seed; wanted != seed) {
      seed = wanted;
      random.seed(seed * 7919 + index);
    }
    int most = id == 0 ? settings.lag_of_default : settings.lag_of_others;
    if (next.lags && most > 0 && std::uniform_real_distribution<>(0, 1)(random) < settings.lag_probability)
      std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<>(0, most)(random)));
    try {
      next.run();
    } catch (const std::exception& error) {
      std::string what = error.what();
      what.resize(std::min(what.size(), what.find('\n')));  // torch appends how it came there
      std::lock_guard lock(state().mutex);
      if (state().failure.empty()) state().failure = next.label->text() + ": " + what;
      std::fprintf(stderr, "sim: a launch failed: %s: %s\n", next.label->text().c_str(), what.c_str());
    }
    next.run = nullptr;  // what it holds goes before anybody learns that it is over
    {
      std::lock_guard lock(mutex);
      finished++;
    }
    changed.notify_all();
  }
}

void raise_failure() {
  std::string text;
  {
    std::lock_guard lock(state().mutex);
    std::swap(text, state().failure);
  }
  if (!text.empty()) throw std::runtime_error("sim: a launch failed: " + text);
}

Stream* new_stream(int device, const std::string& name) {
  std::lock_guard lock(state().mutex);
  auto* stream = new Stream;
  auto& all = state().streams;
  stream->index = (int)all.size();
  stream->device = device;
  stream->id = stream->index < kDevices ? 0 : stream->index;
  stream->name = name.empty() ? "stream " + std::to_string(stream->index) : name;
  all.push_back(stream);
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

namespace {

thread_local int device_now = 0;
thread_local Stream* stream_now[kDevices] = {};

void need_streams() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (int d = 0; d < kDevices; d++) new_stream(d, "the default stream of sim:" + std::to_string(d));
  });
}

}  // namespace

int current_device() { return device_now; }

int exchange_device(int device) {
  if (device < 0 || device >= kDevices) throw std::runtime_error("sim: no device has the number " + std::to_string(device));
  return std::exchange(device_now, device);
}

Stream* stream_of(int device, int64_t id) {
  need_streams();
  std::lock_guard lock(state().mutex);
  return state().streams.at(id == 0 ? device : id);
}

Stream* current_stream(int device) {
  if (!stream_now[device]) stream_now[device] = stream_of(device, 0);
  return stream_now[device];
}

Stream* exchange_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  stream_now[stream->device] = stream;
  return before;
}

void name_stream(int64_t id, const std::string& name) {
  std::lock_guard lock(state().mutex);
  state().streams.at(id)->name = name;
}

std::vector<Stream*> streams_of(int device) {
  need_streams();
  std::lock_guard lock(state().mutex);
  std::vector<Stream*> found;
  for (auto* stream : state().streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

void launch(Stream* stream, std::string what, const std::vector<Access>& accesses, std::function<void()> run, bool lags) {
  if (state().down) return;
  auto label = accesses.empty() ? std::make_shared<const Label>(Label{std::move(what)}) : label_here(std::move(what));
  std::lock_guard lock(state().mutex);
  merge(stream->clock, state().host_clock);  // what the host has waited for is over
  if ((int)stream->clock.size() <= stream->index) stream->clock.resize(stream->index + 1);
  stream->clock[stream->index]++;
  if (settings.detects && !accesses.empty()) note_accesses(stream, label, accesses);
  state().launches++;
  {
    std::lock_guard inner(stream->mutex);
    stream->launches.push_back({std::move(run), std::move(label), lags});
    stream->submitted++;
  }
  stream->changed.notify_all();
}

EventPtr record(Stream* stream) {
  auto event = std::make_shared<Event>();
  launch(stream, "record", {}, [event] { event->finish(); }, false);
  std::lock_guard lock(state().mutex);
  event->clock = stream->clock;
  return event;
}

void delay_stream(Stream* stream, const EventPtr& event) {
  launch(stream, "wait", {}, [event] { event->wait(); }, false);
}

void wait_on_stream(Stream* stream, const EventPtr& event) {
  delay_stream(stream, event);
  std::lock_guard lock(state().mutex);
  merge(stream->clock, event->clock);
}

namespace {

// The thread of a stream takes the interpreter's lock where it drops what Python made, a number that an operator was given say.
struct Unlocked {
  PyThreadState* const saved = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Unlocked() {
    if (saved) PyEval_RestoreThread(saved);
  }
};

}  // namespace

void wait_on_host(const EventPtr& event, const std::string& kind) {
  if (!kind.empty()) {
    Label label{kind, place ? place() : Place{}};
    std::lock_guard lock(state().mutex);
    state().host_waits[kind]++;
    state().places_of_host_waits.push_back(std::move(label));
  }
  {
    Unlocked unlocked;
    event->wait();
  }
  {
    std::lock_guard lock(state().mutex);
    merge(state().host_clock, event->clock);
  }
  raise_failure();
}

void wait_on_host(Stream* stream, const std::string& kind) { wait_on_host(record(stream), kind); }

void synchronize(int device, const std::string& kind) {
  for (auto* stream : streams_of(device)) wait_on_host(stream, kind);
}

std::map<std::string, int64_t> host_waits() {
  std::lock_guard lock(state().mutex);
  return state().host_waits;
}

std::vector<std::string> places_of_host_waits() {
  std::lock_guard lock(state().mutex);
  std::vector<std::string> made;
  for (auto& label : state().places_of_host_waits) made.push_back(label.text());
  return made;
}

void clear_host_waits() {
  std::lock_guard lock(state().mutex);
  state().host_waits.clear();
  state().places_of_host_waits.clear();
}

int64_t launch_count() {
  std::lock_guard lock(state().mutex);
  return state().launches;
}

void shut_down() { state().down = true; }

}  // namespace sim
