/* Threads, locks and sleeping on Linux, macOS and Windows. */
#ifndef TIERCEL_OS_THREADS_H
#define TIERCEL_OS_THREADS_H

#include <limits.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <process.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#endif

enum { TC_STACK_BYTES = 2 << 20 };

/* A moment of spinning. The other thread of the core runs meanwhile. */
static inline void tc_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on most cores */
#endif
}

#if defined(_WIN32)

typedef SRWLOCK tc_lock;
static inline void tc_lock_init(tc_lock *lock) { InitializeSRWLock(lock); }
static inline void tc_lock_take(tc_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void tc_lock_leave(tc_lock *lock) { ReleaseSRWLockExclusive(lock); }
static inline void tc_lock_free(tc_lock *lock) { (void)lock; }

static inline int64_t tc_now_ns(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (int64_t)((double)ticks.QuadPart * 1e9 / (double)frequency.QuadPart);
}
static inline void tc_yield(void) { SwitchToThread(); }
static inline void *tc_memory_take(size_t alignment, size_t bytes) {
    return _aligned_malloc(bytes, alignment);
}
static inline void tc_memory_give(void *memory) { _aligned_free(memory); }
static inline int64_t tc_process(void) { return 1; } /* there is no fork */

typedef HANDLE tc_thread;
typedef unsigned tc_thread_result;
#define TC_THREAD_CALL __stdcall
static inline int tc_thread_start(tc_thread *thread, tc_thread_result(TC_THREAD_CALL *run)(void *),
                                  void *arg) {
    *thread = (HANDLE)_beginthreadex(NULL, TC_STACK_BYTES, run, arg, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return *thread != NULL;
}
static inline void tc_thread_join(tc_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}
static inline void tc_thread_name(void) {}

#else

typedef pthread_mutex_t tc_lock;
static inline void tc_lock_init(tc_lock *lock) { pthread_mutex_init(lock, NULL); }
static inline void tc_lock_take(tc_lock *lock) { pthread_mutex_lock(lock); }
static inline void tc_lock_leave(tc_lock *lock) { pthread_mutex_unlock(lock); }
static inline void tc_lock_free(tc_lock *lock) { pthread_mutex_destroy(lock); }

static inline int64_t tc_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
static inline void tc_yield(void) { sched_yield(); }
/* bytes: a multiple of alignment */
static inline void *tc_memory_take(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
static inline void tc_memory_give(void *memory) { free(memory); }
static inline int64_t tc_process(void) { return (int64_t)getpid(); }

typedef pthread_t tc_thread;
typedef void *tc_thread_result;
#define TC_THREAD_CALL
/* Signals of the process are for the threads of Python. Returns 0 if there can be no more threads. */
static inline int tc_thread_start(tc_thread *thread, tc_thread_result (*run)(void *), void *arg) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return 0;
    pthread_attr_setstacksize(&attributes, TC_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &attributes, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error == 0;
}
static inline void tc_thread_join(tc_thread thread) { pthread_join(thread, NULL); }
static inline void tc_thread_name(void) {
#if defined(__linux__)
    prctl(PR_SET_NAME, "tiercel");
#elif defined(__APPLE__)
    pthread_setname_np("tiercel");
#endif
}

#endif

/* What threads sleep on: `value` changes before they are woken. */
typedef struct {
    _Atomic uint32_t value;
    _Atomic int32_t sleepers;
#if defined(__APPLE__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} tc_event;

static inline void tc_event_init(tc_event *event) {
    atomic_init(&event->value, 0);
    atomic_init(&event->sleepers, 0);
#if defined(__APPLE__)
    pthread_mutex_init(&event->mutex, NULL);
    pthread_cond_init(&event->changed, NULL);
#endif
}

static inline void tc_event_free(tc_event *event) {
#if defined(__APPLE__)
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->mutex);
#else
    (void)event;
#endif
}

/* Sleeps while the value is `seen`; may return early. */
static inline void tc_event_sleep(tc_event *event, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &event->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#elif defined(_WIN32)
    WaitOnAddress((volatile void *)&event->value, &seen, sizeof seen, INFINITE);
#else
    pthread_mutex_lock(&event->mutex);
    while (atomic_load(&event->value) == seen) pthread_cond_wait(&event->changed, &event->mutex);
    pthread_mutex_unlock(&event->mutex);
#endif
}

/* Wakes up to `count` threads. */
static inline void tc_event_wake(tc_event *event, int64_t count) {
#if defined(__linux__)
    atomic_fetch_add(&event->value, 1);
    int most = count < INT_MAX ? (int)count : INT_MAX;
    syscall(SYS_futex, &event->value, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
#elif defined(_WIN32)
    atomic_fetch_add(&event->value, 1);
    if (count == 1) WakeByAddressSingle((void *)&event->value);
    else WakeByAddressAll((void *)&event->value);
#else
    pthread_mutex_lock(&event->mutex);
    atomic_fetch_add(&event->value, 1);
    if (count == 1) pthread_cond_signal(&event->changed);
    else pthread_cond_broadcast(&event->changed);
    pthread_mutex_unlock(&event->mutex);
#endif
}

#endif
