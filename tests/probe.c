/* The machine's limits, beside which tests/bench.py puts the engine:  probe FILE SECONDS
 *
 * Prints the bandwidth of a plain loop that reads the mapped FILE in 1, 2, 4, 8 or 16 streams a thread, whichever is
 * the fastest just now, in GB/s, and the peak of multiply-adds in registers, in GFLOP/s (2 each), of OMP_NUM_THREADS
 * threads. Build it with -O3 -march=native -ffp-contract=fast -fopenmp. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_num_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
#endif

#if defined __AVX512F__
enum { WIDTH = 16, SUMS = 24 };
#elif defined __AVX__
enum { WIDTH = 8, SUMS = 12 };
#else
enum { WIDTH = 4, SUMS = 24 };
#endif
enum { BLOCK = 1 << 14 };  // floats that a thread reads in streams of equal length, side by side
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef Vec LooseVec __attribute__((aligned(4), may_alias));
static volatile float sink, half = 0.5f;  // nothing that the compiler could leave out or foresee

static double now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Adds up a block's streams, four vectors of each in turn, as a matrix product reads weight rows.
static Vec add_block(const float *p, size_t streams, Vec sum) {
    Vec s[4] = {sum};
    size_t length = BLOCK / streams;
    for (size_t i = 0; i < length; i += 4 * WIDTH)
        for (size_t r = 0; r < streams; r++)
            for (size_t j = 0; j < 4; j++) s[j] += *(const LooseVec *)(p + r * length + i + j * WIDTH);
    return s[0] + s[1] + s[2] + s[3];
}

// Reads n floats once, each thread a part of them; returns the bytes read.
static double read_once(const float *p, size_t n, size_t streams) {
    size_t blocks = n / BLOCK;
    #pragma omp parallel
    {
        size_t threads = (size_t)omp_get_num_threads(), thread = (size_t)omp_get_thread_num();
        Vec sum = {0};
        for (size_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; b++)
            sum = add_block(p + b * BLOCK, streams, sum);
        sink = sum[0];
    }
    return (double)(blocks * BLOCK * sizeof *p);
}

// SUMS independent chains of multiply-adds a thread, in registers; returns the floating-point operations.
static double multiply_add(void) {
    enum { STEPS = 1 << 22 };
    double flops = 0;
    #pragma omp parallel reduction(+ : flops)
    {
        Vec s[SUMS], a = (Vec){0} + half;
        for (int j = 0; j < SUMS; j++) s[j] = a + (float)j;
        for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 24
            for (int j = 0; j < SUMS; j++) s[j] = s[j] * a + a;
        }
        for (int j = 1; j < SUMS; j++) s[0] += s[j];
        sink = s[0][0];
        flops += 2.0 * STEPS * SUMS * WIDTH;
    }
    return flops;
}

int main(int argc, char **argv) {
    struct stat info;
    int fd = argc == 3 ? open(argv[1], O_RDONLY) : -1;
    if (fd < 0 || fstat(fd, &info)) return fprintf(stderr, "usage: probe FILE SECONDS\n"), 2;
    const float *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return perror(argv[1]), 1;
    size_t n = (size_t)info.st_size / sizeof *data;
    double seconds = atof(argv[2]), amount[5] = {0}, took[5] = {0}, best = 0, flops = 0, start;
    read_once(data, n, 1), multiply_add();  // page faults; the clock goes up
    for (double end = now() + seconds; now() < end || amount[4] == 0;)
        for (int i = 0; i < 5; i++) {
            start = now(), amount[i] += read_once(data, n, 1 << i), took[i] += now() - start;
        }
    for (int i = 0; i < 5; i++) best = amount[i] / took[i] > best ? amount[i] / took[i] : best;
    for (start = now(); now() - start < seconds;) flops += multiply_add();
    printf("%.6g %.6g\n", best / 1e9, flops / (now() - start) / 1e9);
    return 0;
}
