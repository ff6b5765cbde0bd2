/* The thread pool.
 *
 * One atomic word says what there is to do: the number of the published state in the upper half,
 * and the pieces of the current task that nobody has taken in the lower half. A thread owns a piece
 * once it has lowered the word by one with a compare and swap. The word is all that it reads before,
 * so a thread that comes late can take a piece of the task that is current then, and a thread that
 * was preempted without a piece delays nobody. While it owns a piece the task cannot end: the other
 * fields and the caller's array stay as they are. Whoever finishes the last piece of a task
 * publishes the next one. */
#define _GNU_SOURCE /* sched_yield, syscall */
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "os_threads.h"

/* A thread that finds nothing to do spins, because the next task mostly comes within microseconds.
 * If it does not, the thread that has the last piece has probably been preempted, and the waiting
 * thread sleeps: spinning would use up the time that the scheduler grants this process.
 * 240 tasks of 2 x 10 us beside two endless loops, 2 cores (AMD Zen 3), runs/s: 204 with 5 to 20 us
 * of spinning, 196 with 50, 187 with 200, 189 with 10 us and then sched_yield up to 50; alone 405.
 * A sleep and its end take 3 us. */
enum { SPIN_NS = 20000, SPINS_PER_CLOCK = 16 };

enum { CACHE_LINE = 128 }; /* 64 on x86, where lines come in pairs; 128 on Apple's processors */

/* Lower half of the word: pieces, or between two runs IDLE, and at the end STOP. */
#define WORD_IDLE (UINT64_C(1) << 31)
#define WORD_STOP (UINT64_C(1) << 30)
#define WORD_PIECES (WORD_STOP - 1)
#define WORD_NUMBER (UINT64_C(1) << 32)

typedef struct {
    tc_pool *pool;
    int worker;
} thread_arg;

struct tc_pool {
    _Alignas(CACHE_LINE) _Atomic uint64_t word;
    tc_task task; /* the current one */
    const tc_task *next, *end;
    _Alignas(CACHE_LINE) _Atomic int64_t unfinished; /* pieces of the current task */
    _Alignas(CACHE_LINE) tc_event work;              /* workers sleep on it */
    _Alignas(CACHE_LINE) tc_event caller;            /* the caller does */
    _Alignas(CACHE_LINE) tc_lock lock;               /* of the caller */
    _Atomic int64_t process;                         /* that the threads belong to */
    int num_threads, num_started, has_started;
    tc_thread *threads;
    thread_arg *args;
};

static void wake(tc_pool *pool, uint64_t word) {
    int64_t wanted = word & WORD_IDLE ? 0 : (int64_t)(word & WORD_PIECES) - 1; /* one is for this thread */
    if ((wanted > 0 || word & WORD_IDLE) && atomic_load(&pool->caller.sleepers) > 0) {
        tc_event_wake(&pool->caller, 1);
        --wanted;
    }
    if (word & WORD_STOP) wanted = pool->num_threads;
    if (wanted > 0 && atomic_load(&pool->work.sleepers) > 0) tc_event_wake(&pool->work, wanted);
}

/* Called by the one thread that may: the caller between runs, or the one that finished a task. */
static void publish(tc_pool *pool) {
    uint64_t lower = WORD_IDLE;
    while (pool->next < pool->end && pool->next->num_pieces <= 0) ++pool->next;
    if (pool->next < pool->end) {
        pool->task = *pool->next++;
        lower = (uint64_t)pool->task.num_pieces;
        atomic_store_explicit(&pool->unfinished, pool->task.num_pieces, memory_order_relaxed);
    }
    uint64_t number = atomic_load_explicit(&pool->word, memory_order_relaxed) / WORD_NUMBER + 1;
    uint64_t word = number * WORD_NUMBER + lower;
    atomic_store(&pool->word, word); /* in one order with `sleepers`: see `sleep_until_changed` */
    wake(pool, word);
}

static void run_piece(tc_pool *pool, int64_t pieces_left, int worker) {
    pool->task.fn(pool->task.arg, pool->task.num_pieces - pieces_left, worker);
    if (atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_acq_rel) == 1) publish(pool);
}

/* Announces the sleep before it looks at the word for the last time; `publish` changes the word
 * before it looks for sleepers. So one of the two sees the other. */
static void sleep_until_changed(tc_pool *pool, uint64_t seen, tc_event *event) {
    atomic_fetch_add(&event->sleepers, 1);
    uint32_t value = atomic_load(&event->value);
    if (atomic_load(&pool->word) == seen) tc_event_sleep(event, value);
    atomic_fetch_sub(&event->sleepers, 1);
}

static void wait_until_changed(tc_pool *pool, uint64_t seen, int worker) {
    int64_t start = tc_now_ns();
    do {
        for (int i = 0; i < SPINS_PER_CLOCK; ++i) {
            if (atomic_load_explicit(&pool->word, memory_order_relaxed) != seen) return;
            tc_pause();
        }
    } while (tc_now_ns() - start < SPIN_NS);
    sleep_until_changed(pool, seen, worker == 0 ? &pool->caller : &pool->work);
}

/* The caller returns after its run, others when the pool ends. */
static void work(tc_pool *pool, int worker) {
    uint64_t until = worker == 0 ? WORD_IDLE : WORD_STOP;
    for (;;) {
        uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
        if (word & until) return;
        if ((word & WORD_PIECES) == 0) {
            wait_until_changed(pool, word, worker);
        } else if (atomic_compare_exchange_weak_explicit(&pool->word, &word, word - 1, memory_order_acquire,
                                                         memory_order_relaxed)) {
            run_piece(pool, (int64_t)(word & WORD_PIECES), worker);
        }
    }
}

static tc_thread_result TC_THREAD_CALL run_thread(void *arg) {
    thread_arg *self = arg;
    tc_thread_name();
    work(self->pool, self->worker);
    return 0;
}

static void reset(tc_pool *pool) {
    atomic_init(&pool->word, WORD_IDLE);
    tc_event_init(&pool->work);
    tc_event_init(&pool->caller);
    tc_lock_init(&pool->lock);
    pool->num_started = pool->has_started = 0;
}

/* In a child process after `fork` the threads do not exist, and the lock may be of a thread that
 * does not either: the first thread that comes starts afresh, others wait for it. */
static void adopt(tc_pool *pool) {
    int64_t process = tc_process();
    for (;;) {
        int64_t owner = atomic_load(&pool->process);
        if (owner == process) return;
        if (owner != -process && atomic_compare_exchange_strong(&pool->process, &owner, -process)) {
            reset(pool);
            atomic_store(&pool->process, process);
        } else {
            tc_yield();
        }
    }
}

/* With fewer threads than wanted, if the system refuses more. */
static void start_threads(tc_pool *pool) {
    for (int i = 1; i < pool->num_threads; ++i) {
        pool->args[i] = (thread_arg){pool, i};
        if (!tc_thread_start(&pool->threads[i], run_thread, &pool->args[i])) break;
        pool->num_started = i;
    }
    pool->has_started = 1;
}

static void run_alone(const tc_task *tasks, int num_tasks) {
    for (int i = 0; i < num_tasks; ++i)
        for (int64_t piece = 0; piece < tasks[i].num_pieces; ++piece) tasks[i].fn(tasks[i].arg, piece, 0);
}

void tc_pool_run(tc_pool *pool, const tc_task *tasks, int num_tasks) {
    adopt(pool);
    tc_lock_take(&pool->lock);
    if (pool->num_threads == 1) {
        run_alone(tasks, num_tasks);
    } else {
        if (!pool->has_started) start_threads(pool);
        pool->next = tasks;
        pool->end = tasks + num_tasks;
        publish(pool);
        work(pool, 0);
    }
    tc_lock_leave(&pool->lock);
}

TC_EXPORT int tc_pool_size(const tc_pool *pool) { return pool->num_threads; }

TC_EXPORT tc_pool *tc_pool_create(int num_threads) {
    if (num_threads < 1) num_threads = 1;
    tc_pool *pool = tc_memory_take(CACHE_LINE, sizeof *pool);
    if (pool == NULL) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->num_threads = num_threads;
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    pool->args = calloc((size_t)num_threads, sizeof *pool->args);
    reset(pool);
    atomic_init(&pool->process, tc_process());
    if (pool->threads == NULL || pool->args == NULL) {
        tc_pool_destroy(pool);
        return NULL;
    }
    return pool;
}

TC_EXPORT void tc_pool_destroy(tc_pool *pool) {
    if (pool == NULL) return;
    if (atomic_load(&pool->process) == tc_process()) {
        atomic_fetch_or(&pool->word, WORD_STOP);
        wake(pool, WORD_STOP);
        for (int i = 1; i <= pool->num_started; ++i) tc_thread_join(pool->threads[i]);
        tc_event_free(&pool->work);
        tc_event_free(&pool->caller);
        tc_lock_free(&pool->lock);
    }
    free(pool->threads);
    free(pool->args);
    tc_memory_give(pool);
}
