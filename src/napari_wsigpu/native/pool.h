// Threads that help the calling thread with a job; shared by all calls of the process.
#pragma once

#include <condition_variable>
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
    // Run `work` in this thread and in up to `helpers` others; return when all have left it.
    // `work` is called once per thread and takes items from a counter of its own.
    void run(const std::function<void()>& work, int helpers) {
        Job job{work, helpers, 0};
        if (helpers > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(&job);
            while (threads_ < helpers && threads_ < MOST && start()) ++threads_;
            if (helpers > 1) wake_.notify_all(); else wake_.notify_one();
        }
        work();
        if (helpers > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            // Helpers that have not started yet would find nothing to do.
            for (auto it = queue_.begin(); it != queue_.end(); ++it)
                if (*it == &job) { queue_.erase(it); break; }
            left_.wait(lock, [&] { return job.active == 0; });
        }
    }

    static Pool& shared() {
        // Never destroyed: detached threads may wait in it while the process ends.
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
    struct Job {
        const std::function<void()>& work;
        int openings, active;
    };

    static Pool*& current() {
        static Pool* pool = nullptr;  // a forked child replaces it: threads don't survive fork
        return pool;
    }

    // Start a thread; false if the system gives no more, and the job has fewer helpers.
    bool start() {
#if !defined(_WIN32)
        // Signals are for the threads of Python, but a crash is reported where it happens.
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
            if (--job->active == 0) left_.notify_all();
        }
    }

    std::mutex mutex_;  // guards all below and the fields of queued jobs
    std::condition_variable wake_, left_;
    std::deque<Job*> queue_;
    int threads_ = 0;
};
