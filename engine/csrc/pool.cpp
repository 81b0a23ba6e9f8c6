// Threads spin while jobs follow each other closely, and sleep otherwise.
//
// Waking a sleeping thread costs some 60 us (measured on a virtual machine), so a thread that has waited that long for
// the next job has lost at most as much as it could have saved: it goes to sleep. Within a step jobs follow each other
// within a few microseconds; between steps of an idle engine nobody spins.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace adapt {
namespace {

constexpr int most = 256;
constexpr auto patience = std::chrono::microseconds(60);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    void run(int parts, Part part, void *job) {
        if (busy_.exchange(true, std::memory_order_acquire)) return serial(parts, part, job);
        struct Held {
            std::atomic<bool> &busy;
            ~Held() { busy.store(false, std::memory_order_release); }
        } held{busy_};
        if (!grow(parts - 1)) return serial(parts, part, job);
        part_ = part;
        job_ = job;
        left_.store(parts - 1, std::memory_order_relaxed);
        // Sequentially consistent: a thread that is about to sleep sees it, or is seen asleep.
        ticket_.store((ticket_.load() / most + 1) * most + static_cast<std::uint64_t>(parts));
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> guard(mutex_);
            wake_.notify_all();
        }
        part(job, 0, parts);
        await([this] { return left_.load(std::memory_order_acquire) == 0; });
    }

  private:
    static void serial(int parts, Part part, void *job) {
        for (int i = 0; i < parts; ++i) part(job, i, parts);
    }

    // The others are nearly done, unless the machine has taken their core away: then give ours up for a moment.
    template <class Done>
    static void await(Done done) {
        for (int spins = 0; !done(); ++spins) {
            if (spins < 20000)
                pause();
            else
                std::this_thread::yield();
        }
    }

    bool grow(int workers) {
        if (workers >= most - 1) return false;
        for (; started_ < workers; ++started_) {
            try {
                std::thread(&Pool::work, this, started_ + 1, ticket_.load()).detach();
            } catch (const std::system_error &) {
                return false;
            }
        }
        return true;
    }

    void work(int index, std::uint64_t seen) {
        for (;;) {
            seen = next(seen);
            // A thread that a job does not need has nothing to report, and may miss several. One that is needed
            // finds the job in place: it is not replaced before all have reported.
            const int parts = static_cast<int>(seen % most);
            if (index >= parts) continue;
            part_(job_, index, parts);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    // The ticket of the next job: spin, then sleep.
    std::uint64_t next(std::uint64_t seen) {
        const auto start = std::chrono::steady_clock::now();
        for (int spins = 1;; ++spins) {
            const std::uint64_t now = ticket_.load(std::memory_order_acquire);
            if (now != seen) return now;
            pause();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() - start > patience) break;
        }
        std::unique_lock<std::mutex> guard(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(guard, [&] { return ticket_.load() != seen; });
        asleep_.fetch_sub(1);
        return ticket_.load(std::memory_order_acquire);
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    // Number of the job times ``most``, plus its parts.
    std::atomic<std::uint64_t> ticket_{0};
    std::atomic<int> left_{0}, asleep_{0};
    Part part_ = nullptr;
    void *job_ = nullptr;
    int started_ = 0;
};

// Never destroyed: its threads outlive every object of static storage.
std::atomic<Pool *> current{nullptr};
std::atomic<int> wanted{1};

Pool &pool() {
    Pool *found = current.load();
    if (found != nullptr) return *found;
    Pool *fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) {
#if defined(__unix__) || defined(__APPLE__)
        // Threads do not survive a fork; what the child needs it starts anew.
        static std::once_flag once;
        std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); }); });
#endif
        return *fresh;
    }
    delete fresh;
    return *found;
}

}  // namespace

void set_threads(int count) { wanted.store(count < 1 ? 1 : count >= most ? most - 1 : count); }
int threads() { return wanted.load(); }

void run_parts(int parts, Part part, void *job) { pool().run(parts, part, job); }

}  // namespace adapt
