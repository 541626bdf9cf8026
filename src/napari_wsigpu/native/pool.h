// Pool of threads that help the calling thread with a job; one per process.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

class Pool {
  public:
    // Run `work` in up to `threads` threads, including this one; return once all of them are done.
    // `work` is called once per thread and takes its items from an atomic counter.
    void run(const std::function<void()>& work, int64_t threads) {
        const int helpers = int(std::min<int64_t>(threads, MOST + 1)) - 1;
        Job job{work, helpers, 0};
        if (helpers > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(&job);
            while (threads_ < helpers && start()) ++threads_;
            if (helpers > 1) wake_.notify_all(); else wake_.notify_one();
        }
        work();
        if (helpers > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            // `job` lives on this stack: withdraw it from helpers that have not started, and wait
            // for those that have.
            for (auto it = queue_.begin(); it != queue_.end(); ++it)
                if (*it == &job) { queue_.erase(it); break; }
            finished_.wait(lock, [&] { return job.active == 0; });
        }
    }

    static Pool& shared() {
        // Never destroyed: detached threads may still be waiting in it when the process exits.
        static Pool* pool = [] {
#if !defined(_WIN32)
            pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
#endif
            return current() = new Pool;
        }();
        (void)pool;
        return *current();
    }

  private:
    enum { MOST = 256 };
    // `openings` is the number of helpers that may still join, `active` the number running `work`.
    struct Job {
        const std::function<void()>& work;
        int openings, active;
    };

    static Pool*& current() {
        static Pool* pool = nullptr;  // replaced in a forked child: threads don't survive fork
        return pool;
    }

    // Start a thread. Return false if the system refuses; the job then has fewer helpers.
    bool start() {
#if !defined(_WIN32)
        // Block signals, so that only Python's threads handle them. Crash signals stay unblocked:
        // faulthandler must receive them in the thread that crashed.
        sigset_t signals, before;
        sigfillset(&signals);
        for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, crash);
        pthread_sigmask(SIG_SETMASK, &signals, &before);
#endif
        bool started = true;
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            started = false;
        }
#if !defined(_WIN32)
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
        return started;
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return !queue_.empty(); });
            Job* job = queue_.front();
            if (--job->openings == 0) queue_.pop_front();
            ++job->active;
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->active == 0) finished_.notify_all();
        }
    }

    std::mutex mutex_;  // guards all fields below and those of queued jobs
    std::condition_variable wake_, finished_;
    std::deque<Job*> queue_;
    int threads_ = 0;
};
