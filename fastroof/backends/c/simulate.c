/* Serve requests by one engine:  cc -O2 simulate.c fastroof_step.o -lm -o simulate && ./simulate NAME.plan BLOCKS
 *
 * 100,000 requests, or a third argument of them, of 1,024 tokens in and 128 out, 8 a second, in an engine with BLOCKS
 * blocks of KV cache (plan.memory.max_kv_tokens // 16 in Python): by fastroof_simulate, then by serve(), a simulator
 * of your own. It differs if memory is short: requests wait for all of their blocks, and none is preempted. */
#include "fastroof_step.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REQUESTS = 100000, INPUT = 1024, OUTPUT = 128 };

static void check(int32_t code)
{
    if (code == FASTROOF_OK) return;
    fprintf(stderr, "simulate: %s\n", fastroof_message(code));
    exit(1);
}

static int rises(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static void show(const char *what, double ms)
{
    uint64_t bits; /* what Python must agree on */
    memcpy(&bits, &ms, sizeof bits);
    printf("%s: %.3f ms, bits %016" PRIx64 "\n", what, ms, bits);
}

/* Running requests first, then waiting ones as they came, in chunks: tests/examples/toy_simulator.py in C. */
static void serve(const fastroof_plan *plan, const fastroof_engine *engine, int requests, const double *arrival_us,
                  const int32_t *input_tokens, const int32_t *output_tokens, double *first_us, double *last_us)
{
    static int64_t computed[REQUESTS], generated[REQUESTS];
    static int64_t running[REQUESTS], new_tokens[REQUESTS], context_len[REQUESTS];
    int64_t waiting = 0, batch = 0, room = engine->num_gpu_blocks * engine->block_size;
    double now_us = 0, step_us;
    while (waiting < requests || batch > 0) {
        int64_t left = engine->max_num_batched_tokens, kept = 0;
        if (batch == 0 && now_us < arrival_us[waiting]) now_us = arrival_us[waiting];
        for (int64_t i = 0;; i++) {
            if (i == batch) { /* all that run have their tokens: admit another one, or run the step */
                if (waiting == requests || arrival_us[waiting] > now_us || left == 0 || batch == engine->max_num_seqs)
                    break;
                if (room < input_tokens[waiting] + output_tokens[waiting]) break;
                room -= input_tokens[waiting] + output_tokens[waiting];
                running[batch++] = waiting++;
            }
            int64_t one = running[i], rest = input_tokens[one] + generated[one] - computed[one];
            new_tokens[i] = rest < left ? rest : left;
            context_len[i] = computed[one]; /* what is in the KV cache before the step */
            left -= new_tokens[i];
        }
        check(fastroof_step_us(plan, new_tokens, context_len, batch, &step_us));
        now_us += step_us;
        for (int64_t i = 0; i < batch; i++) {
            int64_t one = running[i];
            computed[one] += new_tokens[i];
            if (computed[one] == input_tokens[one] + generated[one]) { /* it has a token */
                if (generated[one]++ == 0) first_us[one] = now_us;
                if (generated[one] == output_tokens[one]) {
                    last_us[one] = now_us;
                    room += input_tokens[one] + output_tokens[one];
                    continue;
                }
            }
            running[kept++] = one;
        }
        batch = kept;
    }
}

int main(int argc, char **argv)
{
    static double arrival_us[REQUESTS], first_us[REQUESTS], last_us[REQUESTS], ttft_ms[REQUESTS];
    static double own_first_us[REQUESTS], own_last_us[REQUESTS];
    static int32_t input_tokens[REQUESTS], output_tokens[REQUESTS], preemptions[REQUESTS];
    static uint8_t status[REQUESTS];
    const fastroof_plan *plan;
    fastroof_served served;
    int requests = argc == 4 ? atoi(argv[3]) : REQUESTS;
    if (argc < 3 || argc > 4 || requests < 1 || requests > REQUESTS) {
        fputs("usage: simulate NAME.plan BLOCKS [REQUESTS, at most 100000]\n", stderr);
        return 2;
    }
    fastroof_engine engine = fastroof_engine_of(atoll(argv[2]));
    check(fastroof_open(argv[1], &plan));

    for (int i = 0; i < requests; i++) {
        arrival_us[i] = 1.25e5 * i;
        input_tokens[i] = INPUT;
        output_tokens[i] = OUTPUT;
    }
    int64_t bytes = fastroof_simulate_bytes(&engine, requests, OUTPUT);
    void *memory = bytes < 0 ? NULL : malloc((size_t)bytes);

    clock_t start = clock();
    check(fastroof_simulate(plan, &engine, requests, arrival_us, input_tokens, output_tokens, NULL, memory,
                            bytes, first_us, last_us, preemptions, status, &served));
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;

    for (int i = 0; i < requests; i++) ttft_ms[i] = (first_us[i] - arrival_us[i]) / 1e3;
    show("TTFT of the last", ttft_ms[requests - 1]);
    qsort(ttft_ms, (size_t)requests, sizeof *ttft_ms, rises);
    show("TTFT, 99 of 100", ttft_ms[requests - 1 - requests / 100]);
    show("the end", served.end_us / 1e3);
    printf("%" PRId64 " steps, %" PRId64 " preemptions\n", served.steps, served.preemptions);
    printf("a step: %.1f ns\n", seconds / (double)served.steps * 1e9);

    serve(plan, &engine, requests, arrival_us, input_tokens, output_tokens, own_first_us, own_last_us);
    bool same = !memcmp(own_first_us, first_us, sizeof first_us) && !memcmp(own_last_us, last_us, sizeof last_us);
    printf("serve() of this file: %s times\n", same ? "the same" : "other");
    free(memory);
    fastroof_close(plan);
    return 0;
}
