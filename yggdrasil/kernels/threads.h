// The threads that our operators run on: the calling one and its partners, which spin for microseconds and
// then sleep.
#pragma once

#include <cstdint>
#include <memory>

namespace ygg {

// A reference to a function of a range of places [begin, end).
class Body {
 public:
  template <class Function>
  Body(const Function& function)
      : function_(std::addressof(function)), call_([](const void* given, int64_t begin, int64_t end) {
          (*static_cast<const Function*>(given))(begin, end);
        }) {}

  void operator()(int64_t begin, int64_t end) const noexcept { call_(function_, begin, end); }

 private:
  const void* function_;
  void (*call_)(const void*, int64_t, int64_t);
};

// Runs `body` over [0, count) in tasks of at least `min_places` places. Every thread has a share of
// neighbouring tasks, the same in every call of that size, and takes tasks from the other shares when its
// own is done. So the calling thread finishes alone what late partners do not take. A task runs once, on
// any thread; no result may depend on which. Three kinds of calls run on the calling thread alone: a call
// of one task, a call within a task, and a call during that of another thread.
void parallel_for(int64_t count, int64_t min_places, const Body& body);

}  // namespace ygg

// For Python. Most threads of a call, the calling one included; at first torch's number.
extern "C" int64_t ygg_num_threads() noexcept;
extern "C" void ygg_set_num_threads(int64_t count) noexcept;
// From now on the calls of the calling thread run on that thread alone.
extern "C" void ygg_stay_alone() noexcept;
