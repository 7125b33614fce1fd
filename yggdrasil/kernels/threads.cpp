// Bodies of threads.h.
//
//   caller    open a call, ring the partners, take all tasks, close, wait until no partner is inside
//   partner   wait for a ring, go to another core than the caller's, enter, take tasks while the call is
//             open, leave
//
// A wait spins for microseconds and then sleeps, which frees the core. A partner that comes too late finds
// the call closed. The caller waits only for a partner that lost its core within a task, because it needs
// the result. The process that took the core keeps it for milliseconds. So the caller moves the partner to
// its own core and sleeps. The partner leaves that core in the next call; it never takes it by itself. Both
// ask for short time slices: next to other processes they run again as soon as they wake, at the same time.
//
// Not OpenMP: its threads spin at every barrier for milliseconds, and so hold the core that their partner
// needs when other processes run.
#include "threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostThreads = 256;
constexpr int64_t kTasksOfThread = 8;
constexpr auto kSpin = std::chrono::microseconds(200);  // more than between two operators or two forwards
constexpr auto kLate = std::chrono::microseconds(50);   // without running: a partner lost its core
constexpr int kLooks = 32;                              // between two readings of the clock
constexpr uint64_t kResetOnFork = 1;                    // SCHED_FLAG_RESET_ON_FORK

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
int core_of_this_thread() { return sched_getcpu(); }

// Lets the scheduler run this thread when it wakes, not after another process's slice. The thread gets no
// more time for it. Linux before 6.12 has one slice for all.
void ask_for_short_slices() {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline, period;
  } attributes{};  // the kernel's sched_attr, which not every C library has
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) || attributes.policy != SCHED_OTHER)
    return;
  attributes.slice_ns = 100'000;  // the kernel's lower limit
  // processes that this thread starts have the usual slice; they would not inherit a negative nice value
  if (attributes.nice >= 0) attributes.flags |= kResetOnFork;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// Keeps this thread off `core`. Returns false if the process may run on no other core. Its cores are those
// of its main thread.
bool leave_core(int core) {
  cpu_set_t cores;
  if (sched_getaffinity(getpid(), sizeof(cores), &cores)) return true;  // a machine of over 1024 cores
  CPU_CLR(core, &cores);
  return CPU_COUNT(&cores) && !sched_setaffinity(0, sizeof(cores), &cores);
}

// Moves a thread that waits for a core to this one.
void move_here(pthread_t thread) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(sched_getcpu(), &cores);
  pthread_setaffinity_np(thread, sizeof(cores), &cores);
}

// Nanoseconds that a thread has run.
int64_t run_time_of(pthread_t thread) {
  clockid_t clock;
  timespec time{};
  if (!pthread_getcpuclockid(thread, &clock)) clock_gettime(clock, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}
#else
// Cores have no numbers here.
int core_of_this_thread() { return -1; }
void ask_for_short_slices() {}
bool leave_core(int) { return true; }
void move_here(pthread_t) {}
int64_t run_time_of(pthread_t) { return Clock::now().time_since_epoch().count(); }  // it seems to run
#endif

// A number; threads wait until it changes.
class alignas(64) Bell {
 public:
  uint32_t read() const { return number_.load(); }

  void ring() {
    number_.fetch_add(1);
    number_.notify_all();
  }

  // Waits until the number is not `seen`, and returns it.
  uint32_t wait(uint32_t seen) const {
    if (!spin(seen, kSpin)) sleep(seen);
    return read();
  }

  // Returns whether the number changed within `duration`.
  bool spin(uint32_t seen, Clock::duration duration) const {
    const auto end = Clock::now() + duration;
    do {
      for (int look = 0; look < kLooks; ++look, relax())
        if (read() != seen) return true;
    } while (Clock::now() < end);
    return false;
  }

  void sleep(uint32_t seen) const { number_.wait(seen); }

 private:
  std::atomic<uint32_t> number_{0};
};

// The remaining tasks [next, end) of a thread's share. Its owner takes the first one, so that it reads the
// same weights in every call while no thread is late; others take the last one.
class alignas(64) Share {
 public:
  void set(uint32_t next, uint32_t end) { range_.store(pack(next, end), std::memory_order_relaxed); }

  // Returns whether there was a task to take.
  bool take(bool is_own, int64_t& task) {
    uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t next = uint32_t(range);
      const uint32_t end = uint32_t(range >> 32);
      if (next >= end) return false;
      const uint64_t left = is_own ? pack(next + 1, end) : pack(next, end - 1);
      task = is_own ? next : end - 1;
      if (range_.compare_exchange_weak(range, left, std::memory_order_relaxed)) return true;
    }
  }

 private:
  static uint64_t pack(uint32_t next, uint32_t end) { return uint64_t(end) << 32 | next; }

  std::atomic<uint64_t> range_{0};
};

thread_local bool has_asked = false;  // for short slices

struct Partner {
  Bell bell;  // rung by the caller
  pthread_t thread{};
  int64_t run_time = 0;                // when the caller last looked
  std::atomic<bool> is_inside{false};  // may be in a task
  std::atomic<bool> is_moved{false};   // the caller moved it to one core
};

class Pool {
 public:
  // Whether the calling thread may `run` now.
  bool enter() { return !is_taken_.test_and_set(); }
  void leave() { is_taken_.clear(); }

  void run(int64_t count, int64_t tasks, int64_t threads, const ygg::Body& body) {
    body_ = &body;
    count_ = count;
    tasks_ = tasks;
    threads_ = threads;
    for (int64_t t = 0; t < threads; ++t) shares_[t].set(t * tasks / threads, (t + 1) * tasks / threads);
    if (!std::exchange(has_asked, true)) ask_for_short_slices();
    core_.store(core_of_this_thread(), std::memory_order_relaxed);
    is_open_.store(true);
    for (int64_t t = 1; t < threads; ++t) partner_of(t).bell.ring();
    take_tasks(0);
    is_open_.store(false);
    wait_for_partners();
  }

 private:
  void take_tasks(int64_t thread) {
    int64_t task;
    for (int64_t step = 0; step < threads_; ++step) {
      Share& share = shares_[(thread + step) % threads_];
      while (share.take(step == 0, task))
        (*body_)(task * count_ / tasks_, (task + 1) * count_ / tasks_);
    }
  }

  // Waits until no partner is in a task.
  void wait_for_partners() {
    for (uint32_t seen = left_.read(); is_partner_inside(); seen = left_.read()) {
      if (left_.spin(seen, kLate)) continue;
      for (Partner* partner : partners_) partner->run_time = run_time_of(partner->thread);
      if (left_.spin(seen, kLate)) continue;
      if (move_stopped_partners())
        left_.sleep(seen);
      else
        left_.wait(seen);
    }
  }

  bool is_partner_inside() const {
    return std::any_of(partners_.begin(), partners_.end(),
                       [](const Partner* partner) { return partner->is_inside.load(); });
  }

  // Moves partners that lost their core in a task to this thread's core. Returns whether there were any.
  bool move_stopped_partners() {
    bool has_moved = false;
    for (Partner* partner : partners_) {
      if (!partner->is_inside.load() || run_time_of(partner->thread) != partner->run_time) continue;
      move_here(partner->thread);
      partner->is_moved.store(true);
      has_moved = true;
    }
    return has_moved;
  }

  // Partner number `thread`, which starts at its first use and never ends.
  Partner& partner_of(int64_t thread) {
    while (int64_t(partners_.size()) < thread) {
      Partner* partner = partners_.emplace_back(new Partner);
      std::thread thread(&Pool::serve, this, partner, int64_t(partners_.size()));
      partner->thread = thread.native_handle();
      thread.detach();
    }
    return *partners_[thread - 1];
  }

  void serve(Partner* self, int64_t thread) {
    ask_for_short_slices();
    for (uint32_t seen = 0;;) {
      seen = self->bell.wait(seen);
      const int core = core_.load();
      if ((self->is_moved.load() || core == core_of_this_thread()) && !leave_core(core)) continue;
      self->is_moved.store(false, std::memory_order_relaxed);
      self->is_inside.store(true);  // before `is_open_` is read: the caller closes, then reads this
      if (is_open_.load() && thread < threads_) take_tasks(thread);
      self->is_inside.store(false);
      if (!is_open_.load()) left_.ring();
    }
  }

  std::atomic_flag is_taken_;
  const ygg::Body* body_ = nullptr;
  int64_t count_ = 0, tasks_ = 0, threads_ = 0;
  Share shares_[kMostThreads];
  std::atomic<int> core_{-1};  // the caller's
  std::atomic<bool> is_open_{false};
  Bell left_;  // rung when a partner leaves a closed call
  std::vector<Partner*> partners_;
};

Pool* pool = new Pool;  // never deleted: partners sleep in it until the process ends

std::atomic<int64_t>& most_threads() {
  static std::atomic<int64_t> count{std::min<int64_t>(at::get_num_threads(), kMostThreads)};
  return count;
}

thread_local bool stays_alone = false;

// A child process has the memory of the pool but none of its threads, nor their slices.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  pool = new Pool;
  has_asked = false;
});

}  // namespace

void ygg::parallel_for(int64_t count, int64_t min_places, const Body& body) {
  if (count <= 0) return;
  const int64_t threads = std::min(stays_alone ? 1 : most_threads().load(), count / min_places);
  if (threads < 2 || !pool->enter()) return body(0, count);
  pool->run(count, threads * std::min(count / min_places / threads, kTasksOfThread), threads, body);
  pool->leave();
}

int64_t ygg_num_threads() noexcept { return most_threads(); }

void ygg_set_num_threads(int64_t count) noexcept {
  most_threads() = std::clamp<int64_t>(count, 1, kMostThreads);
}

void ygg_stay_alone() noexcept { stays_alone = true; }
