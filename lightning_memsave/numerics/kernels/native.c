/* The CPU kernels of numerics: k-bit codes and bit masks, equal bit for bit to kbit.py and bits.py.
 *
 * Built on first use by native.py with the machine's C compiler. Contraction is off, since a fused multiply-add would
 * round otherwise than the reference; without trapping math, selections of floats become vector instructions. Loops over
 * 16 lanes are written so that the compiler turns them into vector minima and maxima.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define LANES 16
#define SUMMED 4096
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define SMALLEST_STEP 0x1p-126f
#define SMALLEST_POSITIVE 1e-38f
#define LARGEST_BFLOAT16 0x1.fep127f

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352dU;
    x ^= x >> 15; x *= 0x846ca68bU;
    return x ^ (x >> 16);
}

static inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* Round to bfloat16 towards -inf or +inf; returns a float32. -0 becomes 0, as minima of both depend on their order. */
static inline float bfloat16_down(float f) {
    uint32_t u = to_bits(f + 0.0f), t = u & 0xFFFF0000U;
    return from_bits(t != u && (u >> 31) ? t + 0x10000U : t);
}
static inline float bfloat16_up(float f) {
    uint32_t u = to_bits(f + 0.0f), t = u & 0xFFFF0000U;
    return from_bits(t != u && !(u >> 31) ? t + 0x10000U : t);
}
static inline uint16_t high_half(float f) { return (uint16_t)(to_bits(f) >> 16); }
static inline float from_half(uint16_t h) { return from_bits((uint32_t)h << 16); }

static inline uint16_t to_bfloat16(float f) { /* to the nearest, ties to even */
    uint32_t u = to_bits(f);
    return f == f ? (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16) : 0x7FC0;
}

static inline float step_of(float low, float high, float top) {
    float step = bfloat16_up((high - low) / top);
    return step > 0 && step < SMALLEST_STEP ? SMALLEST_STEP : step;
}

/* A tensor is rows of `row` elements; each is cut into blocks of `size` <= 256 elements, the last one of a row may have
 * fewer. See kbit.py. */
typedef struct { long row; int size; long per_row; } Blocks;

static inline long start_of(Blocks blocks, long b) {
    return b / blocks.per_row * blocks.row + b % blocks.per_row * blocks.size;
}
static inline int length_of(Blocks blocks, long b) {
    long left = blocks.row - b % blocks.per_row * blocks.size;
    return left < blocks.size ? (int)left : blocks.size;
}
static inline int in_lanes(int size) { return (size + LANES - 1) / LANES * LANES; }
static inline int coded_bytes(int size, int bits) { return (size * bits + 7) / 8; }

/* The floats of a block, filled up with its last one. Returns a pointer to `padded` of them. */
static inline const float *load(const void *x, int is_bfloat16, long start, int length, int padded, float *buffer) {
    if (!is_bfloat16) {
        const float *from = (const float *)x + start;
        if (length == padded) return from;
        memcpy(buffer, from, length * 4);
    } else {
        const uint16_t *from = (const uint16_t *)x + start;
        for (int i = 0; i < length; i++) buffer[i] = from_half(from[i]);
    }
    for (int i = length; i < padded; i++) buffer[i] = buffer[length - 1];
    return buffer;
}

static inline void store(float *values, void *y, int is_bfloat16, long start, int length) {
    float limit = is_bfloat16 ? LARGEST_BFLOAT16 : FLT_MAX; /* a range rounded outwards may leave it */
    for (int i = 0; i < length; i++) {
        values[i] = values[i] > limit ? limit : values[i];
        values[i] = values[i] < -limit ? -limit : values[i];
    }
    if (!is_bfloat16) { memcpy((float *)y + start, values, length * 4); return; }
    uint16_t *to = (uint16_t *)y + start;
    for (int i = 0; i < length; i++) to[i] = to_bfloat16(values[i]);
}

/* Byte i holds codes i, i + bytes, ...; those beyond `size` are 0. */
static inline void pack(uint8_t *code, uint8_t *out, int size, int bits) {
    int bytes = coded_bytes(size, bits);
    for (int i = size; i < bytes * (8 / bits); i++) code[i] = 0;
    if (bits == 8) memcpy(out, code, size);
    else if (bits == 4) for (int i = 0; i < bytes; i++) out[i] = code[i] | (code[i + bytes] << 4);
    else for (int i = 0; i < bytes; i++)
        out[i] = code[i] | (code[i + bytes] << 2) | (code[i + 2 * bytes] << 4) | (code[i + 3 * bytes] << 6);
}

static inline void unpack(const uint8_t *in, uint8_t *code, int size, int bits) {
    int bytes = coded_bytes(size, bits);
    if (bits == 8) memcpy(code, in, size);
    else if (bits == 4) for (int i = 0; i < bytes; i++) { code[i] = in[i] & 15; code[i + bytes] = in[i] >> 4; }
    else for (int i = 0; i < bytes; i++) {
        code[i] = in[i] & 3; code[i + bytes] = (in[i] >> 2) & 3;
        code[i + 2 * bytes] = (in[i] >> 4) & 3; code[i + 3 * bytes] = in[i] >> 6;
    }
}

static inline float dither_of(uint32_t seed, int i) {
    return (float)(int32_t)(mix(seed + (uint32_t)i * 0x9E3779B9U) >> 8) * 0x1p-24f;
}

static inline int is_finite(float f) { return (to_bits(f) & 0x7F800000U) != 0x7F800000U; }

/* Each of the four works on blocks [first, last); `quantize*` returns 1, or 0 when a value or a range is not finite.
 * Inlined twice: with blocks of 256, which the compiler then knows, and with any. */
static ALWAYS_INLINE int quantize_blocks(Blocks blocks, const void *x, int is_bfloat16, uint8_t *codes,
                                         uint16_t *ranges, int bits, int stochastic, uint32_t seed, long first,
                                         long last) {
    int all_finite = 1;
    int size = blocks.size, padded = in_lanes(size), bytes = coded_bytes(size, bits);
    for (long b = first; b < last; b++) {
        float buffer[BLOCK], low[LANES], high[LANES], least[LANES], dither[BLOCK];
        uint32_t bad[LANES];
        uint8_t code[BLOCK + 4];
        const float *v = load(x, is_bfloat16, start_of(blocks, b), length_of(blocks, b), padded, buffer);
        for (int k = 0; k < LANES; k++) { low[k] = least[k] = INFINITY; high[k] = -INFINITY; bad[k] = 0; }
        for (int i = 0; i < padded; i += LANES)
            for (int k = 0; k < LANES; k++) {
                float f = v[i + k], p = f > 0 ? f : INFINITY;
                low[k] = f < low[k] ? f : low[k];
                high[k] = f > high[k] ? f : high[k];
                least[k] = p < least[k] ? p : least[k];
                bad[k] |= (to_bits(f) & 0x7F800000U) == 0x7F800000U;
            }
        for (int k = 1; k < LANES; k++) {
            low[0] = low[k] < low[0] ? low[k] : low[0];
            high[0] = high[k] > high[0] ? high[k] : high[0];
            least[0] = least[k] < least[0] ? least[k] : least[0];
            bad[0] |= bad[k];
        }
        int keeps_zero = low[0] == 0 && high[0] > 0;
        float top = (float)(keeps_zero ? (1 << bits) - 2 : (1 << bits) - 1);
        float from = bfloat16_down(keeps_zero ? least[0] : low[0]), step = step_of(from, high[0], top);
        float inverse = step > 0 ? 1 / step : 0;
        all_finite &= !bad[0] && is_finite(from) && is_finite(step);
        ranges[2 * b] = high_half(from);
        ranges[2 * b + 1] = high_half(step) | (keeps_zero ? 0x8000 : 0);
        uint32_t block_seed = mix((uint32_t)b ^ seed);
        if (stochastic) for (int i = 0; i < padded; i++) dither[i] = dither_of(block_seed, i);
        else for (int i = 0; i < padded; i++) dither[i] = 0.5f;
        for (int i = 0; i < padded; i++) {
            float level = (v[i] - from) * inverse + dither[i];
            level = level < 0 ? 0 : level;
            level = level > top ? top : level;
            int c = (int)level;
            code[i] = (uint8_t)(keeps_zero ? (v[i] > 0 ? c + 1 : 0) : c);
        }
        pack(code, codes + b * bytes, size, bits);
    }
    return all_finite;
}

static ALWAYS_INLINE void dequantize_blocks(Blocks blocks, const uint8_t *codes, const uint16_t *ranges, void *y,
                                            int is_bfloat16, int bits, long first, long last) {
    int size = blocks.size, bytes = coded_bytes(size, bits);
    for (long b = first; b < last; b++) {
        float values[BLOCK], low = from_half(ranges[2 * b]), step = from_half(ranges[2 * b + 1] & 0x7FFF);
        uint8_t code[BLOCK + 4];
        unpack(codes + b * bytes, code, size, bits);
        if (ranges[2 * b + 1] >> 15)
            for (int i = 0; i < size; i++) {
                float f = low + step * (float)((int)code[i] - 1);
                f = f < SMALLEST_POSITIVE ? SMALLEST_POSITIVE : f;
                values[i] = code[i] ? f : 0.0f;
            }
        else
            for (int i = 0; i < size; i++) values[i] = low + step * (float)code[i];
        store(values, y, is_bfloat16, start_of(blocks, b), length_of(blocks, b));
    }
}

static ALWAYS_INLINE int quantize_signed_blocks(Blocks blocks, const void *x, int is_bfloat16, uint8_t *codes,
                                                uint16_t *ranges, int bits, int stochastic, uint32_t seed, long first,
                                                long last) {
    int all_finite = 1, num_negative = 1 << (bits - 1);
    int size = blocks.size, padded = in_lanes(size), bytes = coded_bytes(size, bits);
    float top = (float)(num_negative - 1);
    for (long b = first; b < last; b++) {
        float buffer[BLOCK], dither[BLOCK], low_n[LANES], high_n[LANES], low_p[LANES], high_p[LANES];
        uint32_t bad[LANES];
        uint8_t code[BLOCK + 4];
        const float *v = load(x, is_bfloat16, start_of(blocks, b), length_of(blocks, b), padded, buffer);
        for (int k = 0; k < LANES; k++) {
            low_n[k] = low_p[k] = INFINITY; high_n[k] = high_p[k] = -INFINITY; bad[k] = 0;
        }
        for (int i = 0; i < padded; i += LANES)
            for (int k = 0; k < LANES; k++) {
                float f = v[i + k], m = fabsf(f), a = f > 0 ? INFINITY : m, c = f > 0 ? -INFINITY : m;
                float d = f > 0 ? m : INFINITY, e = f > 0 ? m : -INFINITY;
                low_n[k] = a < low_n[k] ? a : low_n[k];
                high_n[k] = c > high_n[k] ? c : high_n[k];
                low_p[k] = d < low_p[k] ? d : low_p[k];
                high_p[k] = e > high_p[k] ? e : high_p[k];
                bad[k] |= (to_bits(f) & 0x7F800000U) == 0x7F800000U;
            }
        for (int k = 1; k < LANES; k++) {
            low_n[0] = low_n[k] < low_n[0] ? low_n[k] : low_n[0];
            high_n[0] = high_n[k] > high_n[0] ? high_n[k] : high_n[0];
            low_p[0] = low_p[k] < low_p[0] ? low_p[k] : low_p[0];
            high_p[0] = high_p[k] > high_p[0] ? high_p[k] : high_p[0];
            bad[0] |= bad[k];
        }
        float lows[2] = {low_n[0], low_p[0]}, highs[2] = {high_n[0], high_p[0]};
        float from[2], step[2], inverse[2]; /* of the magnitudes of the elements <= 0, and of those > 0 */
        for (int side = 0; side < 2; side++) {
            float low = lows[side], high = highs[side];
            if (low > high) low = high = 0; /* none belongs */
            from[side] = bfloat16_down(low);
            step[side] = step_of(from[side], high, top);
            inverse[side] = step[side] > 0 ? 1 / step[side] : 0;
            all_finite &= is_finite(from[side]) && is_finite(step[side]);
            ranges[4 * b + 2 * side] = high_half(from[side]);
            ranges[4 * b + 2 * side + 1] = high_half(step[side]);
        }
        all_finite &= !bad[0];
        uint32_t block_seed = mix((uint32_t)b ^ seed);
        if (stochastic) for (int i = 0; i < padded; i++) dither[i] = dither_of(block_seed, i);
        else for (int i = 0; i < padded; i++) dither[i] = 0.5f;
        float from_n = from[0], from_p = from[1], inverse_n = inverse[0], inverse_p = inverse[1];
        for (int i = 0; i < padded; i++) {
            float f = v[i], m = fabsf(f);
            float level_n = (m - from_n) * inverse_n + dither[i], level_p = (m - from_p) * inverse_p + dither[i];
            float level = f > 0 ? level_p : level_n;
            level = level < 0 ? 0 : level;
            level = level > top ? top : level;
            int c = (int)level;
            code[i] = (uint8_t)(f > 0 ? c + num_negative : c);
        }
        pack(code, codes + b * bytes, size, bits);
    }
    return all_finite;
}

static ALWAYS_INLINE void dequantize_signed_blocks(Blocks blocks, const uint8_t *codes, const uint16_t *ranges, void *y,
                                                   int is_bfloat16, int bits, long first, long last) {
    int half = 1 << (bits - 1);
    int size = blocks.size, bytes = coded_bytes(size, bits);
    for (long b = first; b < last; b++) {
        float values[BLOCK], r[4];
        uint8_t code[BLOCK + 4];
        for (int k = 0; k < 4; k++) r[k] = from_half(ranges[4 * b + k]);
        unpack(codes + b * bytes, code, size, bits);
        for (int i = 0; i < size; i++) {
            int c = code[i];
            float n_value = 0 - (r[0] + r[1] * (float)c), p_value = r[2] + r[3] * (float)(c - half);
            p_value = p_value < SMALLEST_POSITIVE ? SMALLEST_POSITIVE : p_value;
            values[i] = c >= half ? p_value : n_value;
        }
        store(values, y, is_bfloat16, start_of(blocks, b), length_of(blocks, b));
    }
}

/* Call `function` with sizes that the compiler knows where they are usual and fill the row; with any otherwise. */
#define FOR_SIZE(function, ...)                                                                   \
    switch (row % size ? 0 : size) {                                                              \
    case 256: { Blocks blocks = {256, 256, 1}; return function(blocks, __VA_ARGS__); }            \
    case 192: { Blocks blocks = {192, 192, 1}; return function(blocks, __VA_ARGS__); }            \
    case 128: { Blocks blocks = {128, 128, 1}; return function(blocks, __VA_ARGS__); }            \
    case 64: { Blocks blocks = {64, 64, 1}; return function(blocks, __VA_ARGS__); }               \
    default: { Blocks blocks = {row, size, (row + size - 1) / size}; return function(blocks, __VA_ARGS__); } \
    }

int quantize(const void *x, int is_bfloat16, uint8_t *codes, uint16_t *ranges, long row, int size, int bits,
             int is_signed, int stochastic, uint32_t seed, long first, long last) {
    if (is_signed) FOR_SIZE(quantize_signed_blocks, x, is_bfloat16, codes, ranges, bits, stochastic, seed, first, last)
    FOR_SIZE(quantize_blocks, x, is_bfloat16, codes, ranges, bits, stochastic, seed, first, last)
}

void dequantize(const uint8_t *codes, const uint16_t *ranges, void *y, int is_bfloat16, long row, int size, int bits,
                int is_signed, long first, long last) {
    if (is_signed) FOR_SIZE(dequantize_signed_blocks, codes, ranges, y, is_bfloat16, bits, first, last)
    FOR_SIZE(dequantize_blocks, codes, ranges, y, is_bfloat16, bits, first, last)
}

/* int8 codes of a row of which the first element has the number `start`, by a power of two; see row_codes.py. */
static inline void encode_row(const float *x, int8_t *codes, long count, long start, float inverse, uint32_t seed) {
    float uniform[BLOCK];
    for (long i = 0; i < count;) {
        long n = start + i, left = BLOCK - n % BLOCK;
        int size = (int)(left < count - i ? left : count - i);
        uint32_t element_seed = mix((uint32_t)(n / BLOCK) ^ seed) + (uint32_t)(n % BLOCK) * 0x9E3779B9U;
        for (int j = 0; j < BLOCK; j++)
            uniform[j] = (float)(int32_t)(mix(element_seed + (uint32_t)j * 0x9E3779B9U) >> 8) * 0x1p-24f;
        for (int j = 0; j < size; j++) {
            float v = x[i + j] * inverse;
            v = v > 127 ? 127 : v < -127 ? -127 : v;
            int32_t cut = (int32_t)v, lower = cut - ((float)cut > v);
            codes[i + j] = (int8_t)(lower + (v - (float)lower > uniform[j]));
        }
        i += size;
    }
}

static inline void encode_row_to_nearest(const float *x, int8_t *codes, long count, float inverse) {
    for (long i = 0; i < count; i++) {
        float v = x[i] * inverse;
        v = v > 127 ? 127 : v < -127 ? -127 : v;
        codes[i] = (int8_t)(int32_t)((v + 0x1.8p23f) - 0x1.8p23f); /* ties to even */
    }
}

void encode_rows(const float *x, int8_t *codes, uint16_t *scales, long columns, int stochastic, uint32_t seed,
                 long first, long last) {
    for (long r = first; r < last; r++) {
        const float *row = x + r * columns;
        uint32_t largest = 0;
        for (long i = 0; i < columns; i++) {
            uint32_t magnitude = to_bits(row[i]) & 0x7FFFFFFFU;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= 0x7F800000U) { /* not finite */
            scales[r] = 0x7FC0;
            memset(codes + r * columns, 0, columns);
            continue;
        }
        int exponent;
        float mantissa = frexpf(from_bits(largest), &exponent); /* of [0.5, 1) */
        exponent -= mantissa * 128 <= 127 ? 7 : 6;
        exponent = exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
        scales[r] = (uint16_t)((exponent + 127) << 7);
        float inverse = from_bits((uint32_t)(127 - exponent) << 23);
        if (stochastic) encode_row(row, codes + r * columns, columns, r * columns, inverse, seed);
        else encode_row_to_nearest(row, codes + r * columns, columns, inverse);
    }
}

void decode_rows(const int8_t *codes, const uint16_t *scales, void *y, int is_bfloat16, long columns, long first,
                 long last) {
    for (long r = first; r < last; r++) {
        const int8_t *code = codes + r * columns;
        float scale = from_half(scales[r]), *whole = (float *)y + r * columns;
        uint16_t *half = (uint16_t *)y + r * columns;
        if (is_bfloat16) for (long i = 0; i < columns; i++) half[i] = high_half(code[i] * scale); /* exact */
        else for (long i = 0; i < columns; i++) whole[i] = code[i] * scale;
    }
}

/* Round block `b` stochastically; what is not finite stays what it is. */
static inline void round_block(const float *whole, uint16_t *values, long count, long b, uint32_t seed) {
    uint32_t block_seed = mix((uint32_t)b ^ seed);
    for (long i = 0; i < count; i++) {
        uint32_t v = to_bits(whole[i]), rounded = v + (mix(block_seed + (uint32_t)i * 0x9E3779B9U) & 0xFFFF);
        uint16_t kept = (uint16_t)(((rounded & 0x7F800000U) == 0x7F800000U ? v : rounded) >> 16);
        values[i] = whole[i] == whole[i] ? kept : 0x7FC0;
    }
}

/* Stochastic rounding to bfloat16; returns 0 when a value is not finite. */
int round_to_bfloat16(const float *x, uint16_t *out, long n, uint32_t seed, long first, long last) {
    uint32_t bad = 0;
    for (long b = first; b < last; b++) {
        long left = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
        for (long i = 0; i < left; i++) bad |= !is_finite(x[b * BLOCK + i]);
        round_block(x + b * BLOCK, out + b * BLOCK, left, b, seed);
    }
    return !bad;
}

/* The same to float16: 13 bits are cut off, or what is below multiples of 2^-24 where the value is below 2^-14. */
int round_to_float16(const uint32_t *x, uint16_t *out, long n, uint32_t seed, long first, long last) {
    uint32_t bad = 0;
    for (long b = first; b < last; b++) {
        uint32_t block_seed = mix((uint32_t)b ^ seed);
        long left = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
        for (long i = 0; i < left; i++) {
            uint32_t v = x[b * BLOCK + i], noise = mix(block_seed + (uint32_t)i * 0x9E3779B9U);
            uint32_t magnitude = v & 0x7FFFFFFFU, is_tiny = magnitude < 0x38800000U;
            uint32_t normal = (magnitude - 0x38000000U + (noise & 0x1FFF)) >> 13;
            float multiple = from_bits(is_tiny ? magnitude : 0) * 0x1p24f + (float)(noise >> 8) * 0x1p-24f;
            bad |= (v & 0x7F800000U) == 0x7F800000U;
            normal = normal > 0x7BFF ? 0x7BFF : normal;
            out[b * BLOCK + i] = (uint16_t)((is_tiny ? (uint32_t)multiple : normal) | (v >> 16 & 0x8000));
        }
    }
    return !bad;
}

/* Sums of the elements and of their magnitudes, of each block of 4096: [blocks, 2]. 64 elements to each of 64 sums in
 * float32, which vectorises, and these in float64. */
void block_sums(const float *x, double *sums, long n, long first, long last) {
    for (long b = first; b < last; b++) {
        float sum[64] = {0}, magnitude[64] = {0};
        const float *from = x + b * SUMMED;
        long left = n - b * SUMMED < SUMMED ? n - b * SUMMED : SUMMED;
        for (long i = 0; i + 64 <= left; i += 64)
            for (int lane = 0; lane < 64; lane++) {
                sum[lane] += from[i + lane];
                magnitude[lane] += fabsf(from[i + lane]);
            }
        for (long i = left / 64 * 64, lane = 0; i < left; i++, lane++) {
            sum[lane] += from[i];
            magnitude[lane] += fabsf(from[i]);
        }
        double total = 0, all = 0;
        for (int lane = 0; lane < 64; lane++) {
            total += sum[lane];
            all += magnitude[lane];
        }
        sums[2 * b] = total;
        sums[2 * b + 1] = all;
    }
}

/* Bit masks: bit i of byte j is element 8 j + i. `first` and `last` count bytes. Elements are compared into bytes 0 or
 * 1, 64 at a time, which vectorises; eight bytes then become one by a multiplication that gathers their lowest bits. */
static inline void gather(const uint8_t *mask, uint8_t *out, long num_elements) {
    for (long j = 0; 8 * j < num_elements; j++) {
        uint64_t word = 0;
        memcpy(&word, mask + 8 * j, num_elements - 8 * j >= 8 ? 8 : num_elements - 8 * j);
        out[j] = (uint8_t)((word * 0x0102040810204080ULL) >> 56);
    }
}

static inline long until(long n, long last) { return 8 * last < n ? 8 * last : n; }

void pack_mask(const uint8_t *mask, uint8_t *out, long n, long first, long last) {
    gather(mask + 8 * first, out + first, until(n, last) - 8 * first);
}

void unpack_mask(const uint8_t *packed, uint8_t *mask, long n, long first, long last) {
    long i = 8 * first, end = until(n, last);
    for (; i + 8 <= end; i += 8) {
        uint64_t word = packed[i / 8] * 0x0101010101010101ULL & 0x8040201008040201ULL; /* byte k holds bit k */
        word = ((word + 0x7F7F7F7F7F7F7F7FULL) | word) >> 7 & 0x0101010101010101ULL;   /* not zero -> 1 */
        memcpy(mask + i, &word, 8);
    }
    for (; i < end; i++) mask[i] = packed[i / 8] >> (i % 8) & 1;
}

/* Times `scale` where the mask holds, times 0 elsewhere. */
void scale_where(const uint8_t *mask, const float *x, float *out, float scale, long first, long last) {
    for (long i = first; i < last; i++) out[i] = x[i] * (mask[i] ? scale : 0.0f);
}

/* In place: the entry of a table of `size` at `x * scale + shift`, cut off, or the table's end; NaN for NaN. */
void look_up(float *x, const float *table, int size, float scale, float shift, long first, long last) {
    float top = size - 1;
    for (long i = first; i < last; i++) {
        float place = x[i] * scale;
        place = place + shift;
        float inside = place > 0 ? (place < top ? place : top) : 0; /* 0 for NaN as well */
        x[i] = place == place ? table[(int)inside] : place;
    }
}

/* The ascending positions of the bits that are set; returns how many. Without `out` it counts only. */
long set_bits(const uint8_t *packed, int64_t *out, long num_bytes) {
    long count = 0;
    for (long j = 0; j < num_bytes; j += 8) {
        uint64_t word = 0;
        memcpy(&word, packed + j, num_bytes - j < 8 ? num_bytes - j : 8);
        if (!out) count += __builtin_popcountll(word);
        else for (; word; word &= word - 1) out[count++] = 8 * j + __builtin_ctzll(word);
    }
    return count;
}

/* The mask of float32 values that are not <= 0: NaN, where a ReLU lets the gradient pass, counts as positive. */
void pack_positive(const float *x, uint8_t *out, long n, long first, long last) {
    for (long i = 8 * first, end = until(n, last); i < end; i += 64) {
        uint8_t mask[64];
        long count = end - i < 64 ? end - i : 64;
        if (count == 64) for (int k = 0; k < 64; k++) mask[k] = !(x[i + k] <= 0);
        else for (int k = 0; k < count; k++) mask[k] = !(x[i + k] <= 0);
        gather(mask, out + i / 8, count);
    }
}

/* The first bit pattern of 32-bit values, and the first other one (or the same again). */
void find_two(const uint32_t *x, uint32_t *values, long n) {
    long i = 1;
    while (i < n && x[i] == x[0]) i++;
    values[0] = x[0];
    values[1] = x[i < n ? i : 0];
}

/* The mask `x == values[1]`; returns 0 when an element equals neither value. */
int pack_two(const uint32_t *x, const uint32_t *values, uint8_t *out, long n, long first, long last) {
    uint32_t low = values[0], high = values[1];
    for (long i = 8 * first, end = until(n, last); i < end; i += 64) {
        uint8_t mask[64];
        uint32_t other = 0;
        long count = end - i < 64 ? end - i : 64;
        if (count == 64) for (int k = 0; k < 64; k++) {
            uint32_t v = x[i + k];
            mask[k] = v == high;
            other |= (uint32_t)(v != high) & (uint32_t)(v != low);
        } else for (int k = 0; k < count; k++) {
            mask[k] = x[i + k] == high;
            other |= (uint32_t)(x[i + k] != high) & (uint32_t)(x[i + k] != low);
        }
        if (other) return 0;
        gather(mask, out + i / 8, count);
    }
    return 1;
}

void unpack_two(const uint8_t *packed, const uint32_t *values, uint32_t *x, long n, long first, long last) {
    uint32_t low = values[0], differs = values[0] ^ values[1];
    long i = 8 * first, end = until(n, last);
    for (; i + 8 <= end; i += 8)
        for (int k = 0; k < 8; k++) x[i + k] = low ^ (differs & -((uint32_t)packed[i / 8] >> k & 1));
    for (; i < end; i++) x[i] = low ^ (differs & -((uint32_t)packed[i / 8] >> (i % 8) & 1));
}

/* Where the search for a value in a map begins: one cell for each of 64 steps of an octave, and one for what is smaller
 * than all octaves. A map has hardly more than one value per cell. */
#define OCTAVES 64
#define CELLS (OCTAVES * 64 + 2)
#define FIRST_CELL ((127 - OCTAVES) << 6)

/* A map of `size` values (at most 2^`bits`; of 4, 5 or 8), increasing up to 1, and what finds a value's place in it. */
typedef struct {
    int size, bits;
    int most;                /* how many values of the map one cell has, at most */
    float value[2][BLOCK];   /* of a code, 0 beyond the map; with 4 bits, of a byte's lower and upper half */
    float bound[BLOCK + 1];  /* the value of a code, infinite from the last on: what a search may reach */
    float gap[BLOCK];        /* to the next value */
    int32_t start[2 * CELLS]; /* by sign and cell: the last code whose value is not above anything in the cell */
} Map;

/* The cells are gone through in ascending order of what is in them: of negative numbers from the last to the first. */
static void fill_starts(Map *map, int sign) {
    for (int i = 0, index = 0; i <= CELLS; i++) {
        int cell = sign ? CELLS - 1 - i : i, edge = sign ? cell + 1 : cell, before = index;
        float least = edge > 0 ? from_bits((uint32_t)(edge + FIRST_CELL) << 17) : 0; /* of the cell; at the end, of none */
        if (sign) least = -least;
        while (index + 1 < map->size - 1 && map->bound[index + 1] <= least) index++;
        if (i && index - before > map->most) map->most = index - before;
        if (i < CELLS) map->start[sign * CELLS + cell] = index;
    }
}

long map_bytes(void) { return sizeof(Map); }

void make_map(const float *values, int size, int bits, Map *map) {
    map->size = size;
    map->bits = bits;
    map->most = 0;
    for (int j = 0; j < BLOCK; j++) {
        int lower = bits == 4 ? j & 15 : j;
        map->value[0][j] = lower < size ? values[lower] : 0;
        map->value[1][j] = j >> 4 < size ? values[j >> 4] : 0;
        map->gap[j] = j < size - 1 ? values[j + 1] - values[j] : 1;
    }
    for (int j = 0; j <= BLOCK; j++) map->bound[j] = j < size - 1 ? values[j] : INFINITY;
    fill_starts(map, 0);
    fill_starts(map, 1);
}

/* The place of each of `unit`, in [-1, 1], in a map. */
static ALWAYS_INLINE void find_places(const Map *map, const float *unit, int32_t *place) {
    const int32_t *start = map->start;
    const float *bound = map->bound;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t word = to_bits(unit[i]);
        int cell = (int)((word & 0x7FFFFFFFU) >> 17) - FIRST_CELL;
        cell = cell < 0 ? 0 : cell;
        cell = cell > CELLS - 2 ? CELLS - 2 : cell;
        int at = start[cell + (word >> 31 ? CELLS : 0)];
        place[i] = at + (bound[at + 1] <= unit[i]);
    }
    for (int step = 1; step < map->most; step++) /* hardly ever */
        for (int i = 0; i < BLOCK; i++) place[i] += bound[place[i] + 1] <= unit[i];
}

/* Code the 256 values of block `b`, of which `left` exist and the others are 0; returns its scale. */
static ALWAYS_INLINE float encode_block(const Map *map, float *unit, uint8_t *codes, int bits, long left, long b,
                                        uint32_t seed, uint32_t shift) {
    int32_t place[BLOCK];
    uint8_t code[BLOCK], packed[BLOCK];
    uint32_t most[LANES] = {0};
    for (int i = 0; i < BLOCK; i += LANES)
        for (int k = 0; k < LANES; k++) { /* as integers, NaN is the largest magnitude */
            uint32_t magnitude = to_bits(unit[i + k]) & 0x7FFFFFFFU;
            most[k] = magnitude > most[k] ? magnitude : most[k];
        }
    for (int k = 1; k < LANES; k++) most[0] = most[k] > most[0] ? most[k] : most[0];
    float scale = from_bits(most[0]), divisor = scale < FLT_MIN ? FLT_MIN : scale;
    uint32_t block_seed = mix((uint32_t)b ^ seed);
    for (int i = 0; i < BLOCK; i++) unit[i] /= divisor;
    find_places(map, unit, place);
    for (int i = 0; i < BLOCK; i++) {
        float fraction = (unit[i] - map->bound[place[i]]) / map->gap[place[i]];
        float noise = (float)(int32_t)((mix(block_seed + (uint32_t)i * 0x9E3779B9U) + shift) >> 8);
        code[i] = (uint8_t)(place[i] + (noise < fraction * 0x1p24f));
    }
    for (long i = left; i < BLOCK; i++) code[i] = 0;
    if (bits == 8) memcpy(packed, code, BLOCK);
    else if (bits == 4) for (int i = 0; i < BLOCK / 2; i++) packed[i] = code[2 * i] | (code[2 * i + 1] << 4);
    else for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t word = 0;
        for (int k = 0; k < 8; k++) word |= (uint64_t)code[8 * i + k] << (bits * k);
        for (int k = 0; k < bits; k++) packed[bits * i + k] = (uint8_t)(word >> (8 * k));
    }
    memcpy(codes + b * (BLOCK / 8) * bits, packed, (left * bits + 7) / 8);
    return scale;
}

static ALWAYS_INLINE void decode_block(const Map *map, const uint8_t *codes, float scale, float *restrict to, int bits,
                                       long left, long b) {
    const uint8_t *from = codes + b * (BLOCK * bits / 8);
    if (bits == 8) for (long i = 0; i < left; i++) to[i] = map->value[0][from[i]] * scale;
    else if (bits == 4) {
        for (long i = 0; i < left / 2; i++) {
            to[2 * i] = map->value[0][from[i]] * scale;
            to[2 * i + 1] = map->value[1][from[i]] * scale;
        }
        if (left % 2) to[left - 1] = map->value[0][from[left / 2]] * scale;
    } else for (long i = 0; i < left; i += 8) {
        uint64_t word = 0;
        for (int k = 0; k < bits && bits * (i / 8) + k < (left * bits + 7) / 8; k++)
            word |= (uint64_t)from[bits * (i / 8) + k] << (8 * k);
        for (int k = 0; k < 8 && i + k < left; k++)
            to[i + k] = map->value[0][word >> (bits * k) & ((1 << bits) - 1)] * scale;
    }
}

/* With a number of bits that the compiler knows. */
static inline float encode_any(const Map *map, float *unit, uint8_t *codes, long left, long b, uint32_t seed,
                               uint32_t shift) {
    if (map->bits == 8) return encode_block(map, unit, codes, 8, left, b, seed, shift);
    if (map->bits == 4) return encode_block(map, unit, codes, 4, left, b, seed, shift);
    return encode_block(map, unit, codes, 5, left, b, seed, shift);
}
static inline void decode_any(const Map *map, const uint8_t *codes, float scale, float *to, long left, long b) {
    if (map->bits == 8) decode_block(map, codes, scale, to, 8, left, b);
    else if (map->bits == 4) decode_block(map, codes, scale, to, 4, left, b);
    else decode_block(map, codes, scale, to, 5, left, b);
}

static inline long left_of(long n, long b) { return n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK; }

/* Codes to a map, rounded stochastically to a neighbour: blockwise.quantize_to_map, bit for bit where values are
 * finite. */
void quantize_to_map(const float *x, const Map *map, uint8_t *codes, float *absmax, long n, uint32_t seed,
                     uint32_t shift, long first, long last) {
    for (long b = first; b < last; b++) {
        float unit[BLOCK] = {0};
        memcpy(unit, x + b * BLOCK, left_of(n, b) * 4);
        absmax[b] = encode_any(map, unit, codes, left_of(n, b), b, seed, shift);
    }
}

void dequantize_from_map(const uint8_t *codes, const Map *map, const float *absmax, float *y, long n, long first,
                         long last) {
    for (long b = first; b < last; b++) decode_any(map, codes, absmax[b], y + b * BLOCK, left_of(n, b), b);
}

/* ---------------------------------------------- steps of optimizers whose moments are codes of a map
 * A block of a parameter is decoded, stepped and coded again at a time, in the first-level cache. Every operation rounds
 * as torch's own step on one tensor does, which multiplies and adds at once where the processor can. */
#if defined(__FMA__) || defined(__aarch64__)
static inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
static inline float multiply_add(float a, float b, float c) { return a * b + c; }
#endif

typedef struct { uint8_t *codes; float *absmax; uint32_t seed; } Moment;

/* What a group of parameters has in common in one step. */
typedef struct {
    const Map *first, *second; /* of SGD there is no second one */
    uint32_t shift;
    int has_nesterov;
    float shrink;     /* factor of the weights, of decoupled weight decay */
    float decay;      /* weight decay that is added to the gradient */
    float keep, take; /* of the first moment, or the momentum: its factor (SGD), and that of the gradient */
    float keep_second, take_second, root_correction, eps;
    float step;       /* factor of the change: minus the learning rate, corrected */
} Rule;

enum { FLOAT32, ROUNDED, CORRECTED }; /* weights: as they are, bfloat16 stochastically, or with an int8 correction */

typedef struct {
    const Rule *rule;
    void *weights;
    int8_t *correction;
    const void *gradient;
    Moment first, second;
    long count;
    int kind, is_bfloat16; /* of the weights; whether the gradient is */
    uint32_t seed;         /* of rounded weights */
} Part;

/* Float32 weights of `whole` that were kept in two parts, as master_weights.py does, and back. */
static inline void join(const uint16_t *values, const int8_t *correction, float *whole, long count) {
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)values[i] << 16;
        whole[i] = from_bits(bits << 1 ? bits + (uint32_t)((int32_t)correction[i] * 256) : bits);
    }
}

static inline void split(const float *whole, uint16_t *values, int8_t *correction, long count) {
    for (long i = 0; i < count; i++) {
        uint16_t value = to_bfloat16(whole[i]);
        int32_t missing = (int32_t)(to_bits(whole[i]) - ((uint32_t)value << 16) + 128) >> 8;
        missing = missing < -127 ? -127 : missing > 127 ? 127 : missing;
        values[i] = value;
        correction[i] = (int8_t)((uint16_t)(value << 1) ? missing : 0);
    }
}

static inline void load_weights(const Part *part, long start, float *whole, long count) {
    const uint16_t *values = (const uint16_t *)part->weights + start;
    if (part->kind == FLOAT32) memcpy(whole, (const float *)part->weights + start, count * 4);
    else if (part->kind == CORRECTED) join(values, part->correction + start, whole, count);
    else for (long i = 0; i < count; i++) whole[i] = from_half(values[i]);
}

static inline void store_weights(const Part *part, long b, const float *whole, long count) {
    uint16_t *values = (uint16_t *)part->weights + b * BLOCK;
    if (part->kind == FLOAT32) memcpy((float *)part->weights + b * BLOCK, whole, count * 4);
    else if (part->kind == CORRECTED) split(whole, values, part->correction + b * BLOCK, count);
    else round_block(whole, values, count, b, part->seed);
}

static inline void step_adam(const Rule *r, float *restrict p, const float *restrict g, float *restrict m,
                             float *restrict v, long count) {
    for (long i = 0; i < count; i++) {
        float weight = p[i] * r->shrink, gradient = r->decay != 0 ? multiply_add(r->decay, weight, g[i]) : g[i];
        m[i] = multiply_add(r->take, gradient - m[i], m[i]);
        v[i] = multiply_add(r->take_second * gradient, gradient, v[i] * r->keep_second);
        p[i] = weight + r->step * m[i] / (sqrtf(v[i]) / r->root_correction + r->eps);
    }
}

static inline void step_sgd(const Rule *r, float *restrict p, const float *restrict g, float *restrict m, long count) {
    for (long i = 0; i < count; i++) {
        float gradient = r->decay != 0 ? multiply_add(r->decay, p[i], g[i]) : g[i];
        m[i] = multiply_add(r->take, gradient, m[i] * r->keep);
        p[i] = multiply_add(r->step, r->has_nesterov ? multiply_add(r->keep, m[i], gradient) : m[i], p[i]);
    }
}

/* Step the parts [first, last). */
void step_parts(const Part *const *parts, long first, long last) {
    for (long k = first; k < last; k++) {
        const Part *part = parts[k];
        const Rule *rule = part->rule;
        for (long b = 0; b * BLOCK < part->count; b++) {
            float m[BLOCK] = {0}, v[BLOCK] = {0}, p[BLOCK], buffer[BLOCK];
            long left = left_of(part->count, b);
            load_weights(part, b * BLOCK, p, left);
            const float *g = load(part->gradient, part->is_bfloat16, b * BLOCK, left, left, buffer);
            decode_any(rule->first, part->first.codes, part->first.absmax[b], m, left, b);
            if (rule->second) {
                decode_any(rule->second, part->second.codes, part->second.absmax[b], v, left, b);
                step_adam(rule, p, g, m, v, left);
                part->second.absmax[b] = encode_any(rule->second, v, part->second.codes, left, b, part->second.seed,
                                                    rule->shift);
            } else step_sgd(rule, p, g, m, left);
            store_weights(part, b, p, left);
            part->first.absmax[b] = encode_any(rule->first, m, part->first.codes, left, b, part->first.seed,
                                               rule->shift);
        }
    }
}
