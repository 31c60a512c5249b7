/* fastroof in C: how long one step of an LLM takes on a GPU, from a plan file that fastroof exported.
 *
 * Link fastroof_step.o, or libfastroof_step (pkg-config fastroof_step); neither needs Python. Every call is
 * thread-safe, allocates nothing, and takes or returns microseconds as double. A plan is read-only: processes that
 * open one file share its pages.
 */
#ifndef FASTROOF_STEP_H
#define FASTROOF_STEP_H

#include <math.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fastroof_plan fastroof_plan;

/* The interface that this header is of: the N of libfastroof_step.so.N and of its symbols' version FASTROOF_N.
 * It changes where a program that was built with an older header would go wrong, not where functions are added. */
#define FASTROOF_ABI 1

/* The interface of the object or library that was linked: FASTROOF_ABI, where it is of this header's export. */
int32_t fastroof_abi_version(void);

/* What every int32_t below returns. Where it is not FASTROOF_OK, nothing was written but the times of
 * steps before the one at fault. */
enum {
    FASTROOF_OK = 0,
    FASTROOF_SIZES = 1,     /* a size that no step has, or a step larger than the plan */
    FASTROOF_OFFSETS = 2,   /* offsets that fall or start below 0 */
    FASTROOF_IO = 10,       /* the file cannot be opened or mapped */
    FASTROOF_FOREIGN = 11,  /* not a plan file */
    FASTROOF_VERSION = 12,  /* a plan file of another version of the format */
    FASTROOF_TRUNCATED = 13,/* shorter or longer than it says */
    FASTROOF_CORRUPT = 14,  /* its CRC or its contents are wrong */
    FASTROOF_ABSENT = 15,   /* a plan file of an older version, or exported without what was asked for */
    FASTROOF_ENGINE = 20,   /* an engine that is none, or larger than the plan */
    FASTROOF_REQUEST = 21,  /* a request that is none, or arrivals that fall */
    FASTROOF_TOO_LONG = 22, /* a request that the engine never has room for */
    FASTROOF_MEMORY = 23,   /* less memory than fastroof_simulate_bytes asks for */
    FASTROOF_UNLIKE = 24    /* plans of which one cannot take the other's KV cache */
};

/* Map and check a plan file. */
int32_t fastroof_open(const char *path, const fastroof_plan **plan);

/* Unmap what fastroof_open mapped. */
void fastroof_close(const fastroof_plan *plan);

/* Check a plan file's bytes, aligned to 8, which stay where they are: the plan is their address. */
int32_t fastroof_open_bytes(const void *bytes, int64_t size, const fastroof_plan **plan);

/* The largest step: tokens in all, and requests. */
int64_t fastroof_max_tokens(const fastroof_plan *plan);
int64_t fastroof_max_seqs(const fastroof_plan *plan);

/* What the plan is, as JSON: name, model, gpu, tp, dtype, kv_dtype, engine, method, max_num_batched_tokens,
 * max_num_seqs, tables_hash, version; of files of version 2 also layout, memory and stages; of this version's also
 * ids, the model's on Hugging Face, and front_end, the engine's API server: ns of a request, of it on the server, of
 * a prompt token. */
const char *fastroof_describe(const fastroof_plan *plan);

/* One decode step: batch_size requests, each attending to kv_len tokens, its new one included. */
int32_t fastroof_decode_us(const fastroof_plan *plan, int64_t batch_size, int64_t kv_len, double *step_us);

/* One step of batch_size equal prefill chunks of new_tokens after context_len tokens. */
int32_t fastroof_prefill_us(const fastroof_plan *plan, int64_t new_tokens, int64_t context_len,
                            int64_t batch_size, double *step_us);

/* One step of any requests: new_tokens[i] after context_len[i] tokens in the KV cache. One new token after
 * a context is a decode. A step without requests takes 0. */
int32_t fastroof_step_us(const fastroof_plan *plan, const int64_t *new_tokens, const int64_t *context_len,
                         int64_t num_requests, double *step_us);

/* num_steps decode steps. step_us must not overlap the sizes. */
int32_t fastroof_decode_steps_us(const fastroof_plan *plan, const int64_t *batch_size, const int64_t *kv_len,
                                 int64_t num_steps, double *step_us);

/* num_steps steps of any requests: step i holds requests offsets[i] to offsets[i + 1] - 1, of num_requests
 * in all. step_us must not overlap the sizes. */
int32_t fastroof_steps_us(const fastroof_plan *plan, const int64_t *new_tokens, const int64_t *context_len,
                          int64_t num_requests, const int64_t *offsets, int64_t num_steps, double *step_us);

/* One step of batch_size requests that each verify draft tokens: tokens new ones a request, kv_len counts them
 * all. With 1 token it is fastroof_decode_us. */
int32_t fastroof_verify_us(const fastroof_plan *plan, int64_t batch_size, int64_t kv_len, int64_t tokens,
                           double *step_us);

/* What a plan holds in one GPU's memory, bytes: of several pipeline stages, in that with the least room. */
typedef struct fastroof_memory_of {
    int64_t weight_bytes;
    int64_t kv_bytes_per_token;   /* of all its layers, as long as a sequence is within the window */
    int64_t activation_bytes, reserve_bytes, context_bytes; /* a step's; left untouched; CUDA's own */
    int64_t max_kv_tokens;        /* that fit beside all that, of sequences within the window */
    int64_t window;               /* tokens that layers with a window keep at most; 0 without such */
    int64_t window_kv_bytes_per_token; /* their part of kv_bytes_per_token */
    int64_t state_bytes_per_sequence;  /* whatever its length: linear attention */
    int64_t model_kv_bytes_per_token;  /* the same of the whole model, on all GPUs together */
    int64_t model_window_kv_bytes_per_token, model_state_bytes_per_sequence;
} fastroof_memory_of;
int32_t fastroof_memory(const fastroof_plan *plan, fastroof_memory_of *memory);

/* KV cache and state of one sequence of kv_len tokens, bytes: on one GPU, and of the whole model. */
int32_t fastroof_kv_bytes(const fastroof_plan *plan, int64_t kv_len, int64_t *gpu_bytes, int64_t *model_bytes);

/* What it takes to send a sequence's KV cache from an engine of one plan to one of another, us, once it has the
 * link. bytes_per_s is what a GPU sends to a GPU of the other, 0: NVLink's; latency_us is added. Plans of other
 * models or KV dtypes are FASTROOF_UNLIKE. */
int32_t fastroof_kv_transfer_us(const fastroof_plan *prefill, const fastroof_plan *decode, int64_t kv_len,
                                double bytes_per_s, double latency_us, double *transfer_us);

/* How the model is split over GPUs; moe_tp share each expert, cp the new tokens of a prompt. */
typedef struct fastroof_layout_of {
    int64_t tp, pp, dp, ep, moe_tp, cp;
} fastroof_layout_of;
int32_t fastroof_layout(const fastroof_plan *plan, fastroof_layout_of *layout);

/* Pipeline stages, 1 at least, each a plan itself that every function takes: one that has no others is its only
 * stage. It belongs to its plan and is not closed. NULL where there is no such stage. */
int64_t fastroof_num_stages(const fastroof_plan *plan);
const fastroof_plan *fastroof_stage(const fastroof_plan *plan, int64_t stage);

/* num_steps micro-batches, as fastroof_steps_us has steps: from the first one's start to the last one's end
 * through all stages, bubbles included, and one round of micro-batches that keep going round as decodes do. */
int32_t fastroof_pipeline_us(const fastroof_plan *plan, const int64_t *new_tokens, const int64_t *context_len,
                             int64_t num_requests, const int64_t *offsets, int64_t num_steps,
                             double *pipeline_us, double *cycle_us);

/* A serving engine: how it makes steps of requests. fastroof_engine_of sets what is not given. */
typedef struct fastroof_engine {
    int64_t max_num_batched_tokens; /* new tokens of a step; the plan's max_num_batched_tokens at most */
    int64_t max_num_seqs;       /* concurrent requests, up to the plan's max_num_seqs and max_num_batched_tokens,
                                 * and up to max_num_batched_tokens unless prefill_first */
    int64_t num_gpu_blocks;     /* blocks of KV cache that requests can have */
    int64_t block_size;         /* tokens of a block */
    int64_t chunked_prefill;    /* flags, 0 or 1: may a prompt be cut */
    int64_t admit_whole_prompt; /* is a prompt admitted only where all of it has room */
    int64_t reserve_output;     /* are the blocks of the output taken at admission: nothing is preempted */
    int64_t prefill_first;      /* do prompts run ahead of decodes, in steps of their own */
    int64_t async_scheduling;   /* is a step scheduled while the one before it runs */
    int64_t clients;            /* 0: arrivals are given; else so many clients, a request at a time each */
    double think_us;            /* what a client waits for before its next request, us */
    double timeout_us;          /* after which a client gives a request up, us; INFINITY: never */
    double time_scale;          /* what steps take, as a multiple of the plan's */
    int64_t reserved[3];        /* 0 */
} fastroof_engine;

/* vLLM's scheduling in steps of 2048 tokens and 256 requests, synchronous; blocks of 16 tokens. */
static inline fastroof_engine fastroof_engine_of(int64_t num_gpu_blocks)
{
    fastroof_engine engine = {2048, 256, 0, 16, 1, 1, 0, 0, 0, 0, 0.0, 0.0, 1.0, {0, 0, 0}};
    engine.num_gpu_blocks = num_gpu_blocks;
    engine.timeout_us = INFINITY;
    return engine;
}

/* What an engine did, beside its requests. */
typedef struct fastroof_served {
    int64_t steps, mixed_steps, prefill_steps; /* all; prompts with decodes; prompts alone */
    int64_t preemptions;
    int64_t prefill_tokens, decode_tokens, cached_tokens;
    int64_t peak_running, peak_waiting; /* requests */
    int64_t least_free_blocks;
    double busy_us, end_us; /* time in steps; when the last ended */
} fastroof_served;

/* What becomes of a request. */
enum { FASTROOF_FINISHED = 0, FASTROOF_TIMED_OUT = 1 };

/* Bytes of memory that fastroof_simulate needs for num_requests, none with more than longest_output tokens;
 * less than 0 if the engine or a size is invalid. 64 a request, 128 a place of the batch, 8 to 16 a token of the
 * longest output, 4 a token of a block, 69 kB beside. */
int64_t fastroof_simulate_bytes(const fastroof_engine *engine, int64_t num_requests, int64_t longest_output);

/* Serve num_requests by one engine, as fastroof.simulate does, to the last bit. Of a plan with several ranks of
 * attention data parallelism it is one rank, whose fellows have as many tokens in each of its steps.
 *
 * arrival_us rises from 0 on; with clients it is written instead, as they send. A request has a prompt of
 * input_tokens, of which cached_tokens are in the prefix cache (NULL: none are), and an output of
 * output_tokens, its first included. first_us and last_us become when its first and last token came, on the
 * clock of the arrivals, NAN where they never did; preemptions how often it lost its blocks; status
 * FASTROOF_FINISHED or FASTROOF_TIMED_OUT. served may be NULL.
 *
 * memory is memory_bytes that nobody else uses meanwhile, of any contents; the arrays overlap neither it nor
 * each other. Threads may serve at once, each in memory of its own. Where the code is not FASTROOF_OK
 * nothing was served; FASTROOF_TOO_LONG is of a request whose prompt and output never fit num_gpu_blocks, or
 * whose prompt no step holds whole where it may not be cut. */
int32_t fastroof_simulate(const fastroof_plan *plan, const fastroof_engine *engine, int64_t num_requests,
                          double *arrival_us, const int32_t *input_tokens, const int32_t *output_tokens,
                          const int32_t *cached_tokens, void *memory, int64_t memory_bytes,
                          double *first_us, double *last_us, int32_t *preemptions, uint8_t *status,
                          fastroof_served *served);

/* A code in words. */
static inline const char *fastroof_message(int32_t code)
{
    switch (code) {
    case FASTROOF_OK: return "no error";
    case FASTROOF_SIZES: return "a size that no step has, or a step larger than the plan";
    case FASTROOF_OFFSETS: return "offsets that fall or lie outside the requests";
    case FASTROOF_IO: return "the plan file cannot be opened or mapped";
    case FASTROOF_FOREIGN: return "not a plan file";
    case FASTROOF_VERSION: return "a plan file of another version of the format";
    case FASTROOF_TRUNCATED: return "a plan file that is shorter or longer than it says";
    case FASTROOF_CORRUPT: return "a damaged plan file";
    case FASTROOF_ABSENT: return "a plan file without that: an older one, or exported without it";
    case FASTROOF_ENGINE: return "an engine that is none, or larger than the plan";
    case FASTROOF_REQUEST: return "a request that is none, or arrivals that fall";
    case FASTROOF_TOO_LONG: return "a request that the engine never has room for";
    case FASTROOF_MEMORY: return "less memory than fastroof_simulate_bytes asks for";
    case FASTROOF_UNLIKE: return "plans of which one cannot take the other's KV cache";
    default: return "unknown code";
    }
}

#ifdef __cplusplus
}
#endif

#endif
