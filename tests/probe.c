/* The machine's limits, beside which tests/bench.py puts the engine:  probe FILE STREAMS SECONDS
 *
 * Prints the bandwidth of a plain streaming loop that reads the mapped FILE, in GB/s, and the peak of fused multiply-adds
 * in registers, in GFLOP/s (2 each); OMP_NUM_THREADS threads. Build with -O3 -march=native -fopenmp -ffp-contract=fast. */
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
enum { MAX_STREAMS = 16, ROW = 1 << 14 };  // ROW: floats that a stream reads before its thread goes on
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef Vec LooseVec __attribute__((aligned(4), may_alias));
static volatile float sink = 1;  // what the compiler cannot foresee, or optimize away

static double now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Adds up `streams` rows of ROW floats side by side, one vector of each in turn, as a matrix product reads weight rows.
static Vec add_rows(const float *p, int streams, Vec sum) {
    Vec s[4] = {sum};
    for (size_t i = 0; i < ROW / (size_t)streams; i += 4 * WIDTH)
        for (int r = 0; r < streams; r++) {
            const float *at = p + (size_t)r * (ROW / (size_t)streams) + i;
            for (int j = 0; j < 4; j++) s[j] += *(const LooseVec *)(at + j * WIDTH);
        }
    return s[0] + s[1] + s[2] + s[3];
}

// Reads n floats once, each thread a part of them; returns the bytes read.
static double read_once(const float *p, size_t n, int streams) {
    size_t blocks = n / ROW;
    #pragma omp parallel
    {
        size_t threads = (size_t)omp_get_num_threads(), thread = (size_t)omp_get_thread_num();
        Vec sum = {0};
        for (size_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; b++)
            sum = add_rows(p + b * ROW, streams, sum);
        sink = sum[0];
    }
    return (double)(blocks * ROW * sizeof *p);
}

// SUMS independent chains of multiply-adds a thread, in registers; returns the floating-point operations.
static double multiply_add(void) {
    enum { STEPS = 1 << 22 };
    double flops = 0;
    #pragma omp parallel reduction(+ : flops)
    {
        Vec s[SUMS], half = (Vec){0} + 0.5f * sink;
        for (int j = 0; j < SUMS; j++) s[j] = half + (float)j;
        for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 24
            for (int j = 0; j < SUMS; j++) s[j] = s[j] * half + half;
        }
        for (int j = 1; j < SUMS; j++) s[0] += s[j];
        sink = s[0][0];
        flops += 2.0 * STEPS * SUMS * WIDTH;
    }
    return flops;
}

int main(int argc, char **argv) {
    struct stat info;
    int fd = argc == 4 ? open(argv[1], O_RDONLY) : -1, streams = argc == 4 ? atoi(argv[2]) : 0;
    if (fd < 0 || fstat(fd, &info) || streams < 1 || streams > MAX_STREAMS || (streams & (streams - 1)))
        return fprintf(stderr, "usage: probe FILE STREAMS SECONDS, streams being 1, 2, 4, 8 or 16\n"), 2;
    const float *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return perror(argv[1]), 1;
    size_t n = (size_t)info.st_size / sizeof *data;
    double seconds = atof(argv[3]), amount = 0, start;
    read_once(data, n, streams);  // page faults
    for (start = now(); now() - start < seconds;) amount += read_once(data, n, streams);
    double bandwidth = amount / (now() - start);
    multiply_add(), amount = 0;
    for (start = now(); now() - start < seconds;) amount += multiply_add();
    printf("%.6g %.6g\n", bandwidth / 1e9, amount / (now() - start) / 1e9);
    return 0;
}
