/* Runs of the thread pool that check themselves: that each piece runs once, after all pieces of the
 * tasks before it, by a worker that does nothing else. With POOL_MAIN it is a program, for the
 * thread sanitizer. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

static int threads_left = 1 << 30;

static int limited_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg) {
    return threads_left-- > 0 ? pthread_create(thread, attributes, run, arg) : 11;
}
#define pthread_create limited_create
#include "pool.c"
#undef pthread_create

enum { MAX_TASKS = 64, MAX_WORKERS = 64 };

typedef struct {
    tc_pool *pool;
    int64_t first, num_pieces; /* pieces of all tasks before, of this one */
    int delays;
    int64_t *values; /* of all pieces, not atomic */
    _Atomic int64_t *done, *faults;
    atomic_flag *is_busy;
} check;

void pool_limit_threads(int num_threads) { threads_left = num_threads; }

static void delay(uint64_t seed) {
    uint64_t dice = seed * UINT64_C(0x9e3779b97f4a7c15) >> 40;
    if (dice % 64 == 0) {
        usleep((useconds_t)(dice / 64 % 128)); /* long enough that others go to sleep */
    } else if (dice % 8 == 0) {
        sched_yield();
    } else {
        for (uint64_t i = 0; i < dice % 256; ++i) tc_pause();
    }
}

static void run_check(const void *arg, int64_t piece, int worker) {
    const check *c = arg;
    int64_t faults = 0, all = c->first + piece;
    faults += piece < 0 || piece >= c->num_pieces || worker < 0 || worker >= tc_pool_size(c->pool);
    faults += atomic_flag_test_and_set(&c->is_busy[worker]);
    faults += atomic_load(c->done) < c->first;
    for (int64_t i = 0; i < c->first; ++i) faults += c->values[i] != i + 1;
    faults += c->values[all] != 0;
    c->values[all] = all + 1;
    if (c->delays) delay((uint64_t)all + (uint64_t)c->delays);
    faults += atomic_load(c->done) >= c->first + c->num_pieces;
    atomic_flag_clear(&c->is_busy[worker]);
    atomic_fetch_add(c->faults, faults);
    atomic_fetch_add(c->done, 1);
}

/* Returns the number of faults. delays: a seed of how long pieces take; 0: as short as can be. */
int64_t pool_check(tc_pool *pool, const int64_t *num_pieces, int num_tasks, int delays) {
    tc_task tasks[MAX_TASKS] = {0};
    check checks[MAX_TASKS];
    _Atomic int64_t done = 0, faults = 0;
    atomic_flag is_busy[MAX_WORKERS] = {0};
    int64_t total = 0;
    for (int i = 0; i < num_tasks; ++i) total += num_pieces[i] > 0 ? num_pieces[i] : 0;
    int64_t *values = calloc((size_t)total + 1, sizeof *values);
    for (int64_t i = 0, first = 0; i < num_tasks; first += num_pieces[i] > 0 ? num_pieces[i] : 0, ++i) {
        checks[i] = (check){pool, first, num_pieces[i], delays, values, &done, &faults, is_busy};
        tasks[i] = (tc_task){run_check, &checks[i], num_pieces[i]};
    }
    tc_pool_run(pool, tasks, num_tasks);
    faults += done != total;
    for (int64_t i = 0; i < total; ++i) faults += values[i] != i + 1;
    free(values);
    return faults;
}

/* Runs with up to 7 tasks of up to 11 pieces, some with none. */
int64_t pool_check_many(tc_pool *pool, int num_runs, int seed) {
    uint64_t state = (uint64_t)seed;
    int64_t faults = 0;
    for (int run = 0; run < num_runs; ++run) {
        int64_t num_pieces[7];
        for (int i = 0; i < 7; ++i) {
            state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
            num_pieces[i] = (int64_t)(state >> 33) % 12;
        }
        faults += pool_check(pool, num_pieces, (int)(state >> 40) % 8, run % 4 == 0 ? run + 1 : 0);
    }
    return faults;
}

#if defined(POOL_MAIN)
static void *run_caller(void *arg) {
    tc_pool *pool = arg;
    return pool_check_many(pool, 2000, 3) == 0 ? NULL : arg;
}

int main(void) {
    int64_t faults = 0;
    for (int num_threads = 1; num_threads < 6; ++num_threads) {
        tc_pool *pool = tc_pool_create(num_threads);
        pthread_t other;
        void *is_wrong;
        pthread_create(&other, NULL, run_caller, pool);
        faults += pool_check_many(pool, 2000, num_threads);
        pthread_join(other, &is_wrong);
        faults += is_wrong != NULL;
        tc_pool_destroy(pool);
    }
    printf("%lld faults\n", (long long)faults);
    return faults != 0;
}
#endif
