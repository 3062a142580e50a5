/* One token through a decoder: an interpreter of the op list that lower.py makes.
 *
 * All threads walk the same list. An op's work is cut into items (rows of a matrix, heads, elements), of
 * which each thread takes a few at a time, and a barrier follows where the next op reads what this wrote.
 * Activations are fp32; weights are read as they lie in memory, fp32, bf16 or GGML's blocks, whose numbers
 * are decoded to fp32 in registers. So a step reads each weight once, in its own size, and computes what the
 * decoded matrix would give.
 *
 * Here: which operation is which, and the threads. The operations are in step.h (one token), rows.h (more),
 * attend.h (their attention, and back) and learn.h (back through the rest).
 */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attend.h"
#include "learn.h"
#include "op.h"
#include "rows.h"
#include "step.h"

static void run_op(const Op *op, const Step *step, int64_t from, int64_t to) {
    switch (op->code) {
    case EMBED: /* weight: the embedding; bias: learned positions, or none; a: added as it is, or none */
        for (int64_t i = from; i < to; i++) {
            float x = load(op->weight, step->token * op->n + i, op->dtype) * op->scale;
            if (op->bias) x += load(op->bias, step->position * op->n + i, op->dtype);
            op->dst[i] = op->a ? x + op->a[i] : x;
        }
        break;
    case NORM: norm(op, from, to); break;
    case LINEAR: linear(op, from, to); break;
    case ROTATE: rotate(op, from, to); break;
    case STORE: store(op, step, from, to); break;
    case ATTEND: attend(op, step, from, to); break;
    case PACK: pack(op, from, to); break;
    case ATTEND_ROWS: attend_rows(op, from, to); break;
    case ACTIVATE:
        for (int64_t i = from; i < to; i++) op->dst[i] = activation(op->a[i], op->kind);
        break;
    case GATE: gate(op, from, to); break;
    case ROTATE_ROWS: rotate_rows(op, from, to); break;
    case LINEAR_ROWS: linear_rows(op, from, to); break;
    case ATTEND_BACK: attend_back(op, from, to); break;
    case NORM_BACK: norm_back(op, from, to); break;
    case GATE_BACK: gate_back(op, from, to); break;
    case ADD:
        for (int64_t i = from; i < to; i++) op->dst[i] += op->a[i] * op->scale;
        break;
    }
}

int64_t openbook_op_size(void) { return sizeof(Op); }
int64_t openbook_step_size(void) { return sizeof(Step); }

/* --- threads ---
 *
 * A step has some 300 barriers a few microseconds apart, and another program may have one of the cores. So
 * nobody waits for a thread that has not begun: whoever is there takes the next portion of the work, and a
 * barrier waits for portions in hand only. With one core left, a step takes as long as with one thread;
 * with fixed shares (as in OpenMP's loops) it took a hundred times as long, each barrier a time slice.
 *
 * A run is shared by those who work on it and freed by the last to leave. The caller leaves as soon as all
 * portions are done; a worker that comes late finds none left, and touches nothing but the run itself.
 *
 * A prompt's operations stand between PyTorch's matrix products, whose OpenMP threads go on spinning for a
 * while and leave no core to others: there the run is handed to those very threads.
 */

enum { MAX_THREADS = 64, SPINS = 2000 };

typedef struct {
    Op op;
    int64_t portion, portions; /* items in one, and how many there are */
    atomic_long taken, done;
} Task;

typedef struct {
    Step step;
    int64_t n;
    atomic_int users;
    Task tasks[];
} Run;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int started; /* workers that exist: numbers 1..started */
    int threads; /* wanted for the present run, the caller included */
    atomic_int number;
    Run *run;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0};

/* Spins a little, then lets others have the core. */
static inline void relax(int spins) {
    if (spins > SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
}

static void walk(Run *run) {
    int64_t first = 0; /* of the ops since the last barrier */
    for (int64_t i = 0; i < run->n; i++) {
        Task *task = run->tasks + i;
        for (;;) {
            int64_t mine = atomic_load(&task->taken) < task->portions ? atomic_fetch_add(&task->taken, 1)
                                                                      : task->portions;
            if (mine >= task->portions) break;
            int64_t from = mine * task->portion, to = from + task->portion;
            run_op(&task->op, &run->step, from, to > task->op.n ? task->op.n : to);
            atomic_fetch_add(&task->done, 1);
        }
        if (!task->op.barrier) continue;
        for (; first <= i; first++) {
            Task *waited = run->tasks + first;
            for (int spins = 0; atomic_load(&waited->done) < waited->portions; spins++) relax(spins);
        }
    }
}

static void leave(Run *run) {
    if (atomic_fetch_sub(&run->users, 1) == 1) free(run);
}

static void *work(void *argument) {
    int me = (int)(intptr_t)argument, seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load(&pool.number) == seen && spins < 2 * SPINS; spins++) relax(spins);
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.number);
        Run *run = me < pool.threads ? pool.run : 0;
        if (run) atomic_fetch_add(&run->users, 1);
        pthread_mutex_unlock(&pool.lock);
        if (run) walk(run), leave(run);
    }
    return 0;
}

/* A child process has only the thread that forked. */
static void forget_workers(void) {
    pool.started = 0;
    pool.run = 0;
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(0, 0, forget_workers); }

static Run *prepare(const Op *ops, int64_t n, const Step *step, int threads) {
    Run *run = calloc(1, sizeof(Run) + n * sizeof(Task));
    if (!run) return 0;
    run->step = *step;
    run->n = n;
    run->users = 1;
    for (int64_t i = 0; i < n; i++) {
        Task *task = run->tasks + i;
        task->op = ops[i];
        /* a few portions a thread; rows go four at a time, and a portion of elements is worth the taking */
        int64_t least = ops[i].code == LINEAR || ops[i].code == LINEAR_ROWS ? 4 : ops[i].width ? 1 : 256, wanted = threads * 4;
        task->portion = (ops[i].n + wanted - 1) / wanted;
        task->portion = (task->portion + least - 1) / least * least;
        task->portions = (ops[i].n + task->portion - 1) / task->portion;
    }
    return run;
}

/* Returns 0, or 1 if there is no memory. The last op must have a barrier. */
int32_t openbook_run(const Op *ops, int64_t n, const Step *step) {
    int threads = step->threads < 1 ? 1 : step->threads > MAX_THREADS ? MAX_THREADS : step->threads;
    Run *run = prepare(ops, n, step, threads);
    if (!run) return 1;
#ifdef _OPENMP
    if (step->with_openmp) {
#pragma omp parallel num_threads(threads)
        walk(run);
        leave(run);
        return 0;
    }
#endif
    if (threads > 1) {
        pthread_mutex_lock(&pool.lock);
        for (pthread_t thread; pool.started < threads - 1; pool.started++) {
            if (pthread_create(&thread, 0, work, (void *)(intptr_t)(pool.started + 1))) break;
            pthread_detach(thread);
        }
        pool.run = run, pool.threads = threads;
        atomic_fetch_add(&pool.number, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    walk(run);
    if (threads > 1) { /* nobody may join a run that its caller has left */
        pthread_mutex_lock(&pool.lock);
        if (pool.run == run) pool.run = 0;
        pthread_mutex_unlock(&pool.lock);
    }
    leave(run);
    return 0;
}
