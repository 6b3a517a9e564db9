// Layers of encoders and decoders on a CPU, for the newest positions of hypotheses or whole sentences, and products.
//
// `library.py` compiles this file for the vectors of the CPU, and checks the length of whatever is passed. All sizes
// are in elements. Weights are in panels: of PANEL outputs, those of one input are adjacent, and then those of the
// next input. Sums are in fp32; NaN and infinity pass through everything.
//
// In int8 a row of inputs is rounded, too, with a scale of its own. Sums are of integers, so they are equal on all CPUs,
// and do not depend on other rows. A row with NaN or infinity becomes NaN.
//
// Rows are hypotheses, those of a sentence adjacent and equally many for each sentence. The positions of a whole
// sentence are hypotheses that see one another, in a decoder up to themselves.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, VECTORS = 2;
#else
constexpr int LANES = 4, VECTORS = 2;
#endif
constexpr int64_t PANEL = LANES * VECTORS;
constexpr int64_t MOST_ROWS = 6;  // that are multiplied together: their sums fill the registers of a CPU
constexpr int64_t BLOCK = 64;     // numbers of which one look tells if any is among the largest
constexpr int64_t AHEAD = 4096;   // bytes that weights are fetched before they are read
constexpr int64_t TOGETHER = 256;  // rows that pass through a product or a layer together, so that they stay in a cache

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

inline Vector load(const float* x) { return *reinterpret_cast<const Unaligned*>(x); }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// Weights are read once, and CPUs that read ahead by themselves stop at the end of each page of 4 KiB.
inline void prefetch(const void* weight) {
    const char* ahead = static_cast<const char*>(weight) + AHEAD;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) __builtin_prefetch(ahead + v * sizeof(Vector));
}

inline int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

inline void store(float* x, Vector y) { *reinterpret_cast<Unaligned*>(x) = y; }

// scale (x W^T) + bias. All three have zeros up to a multiple of PANEL outputs, and in int8 to one of GROUP inputs.
struct Product {
    const void* weight;
    const float* scale;
    const float* bias;
    int64_t inputs, outputs, is_int8;
};

// Rows of inputs by weights, in floats.
struct Floats {
    typedef float Number;
    typedef Vector Sums;
    static constexpr int64_t GROUP = 1;
    const float* numbers;
    int64_t inputs;

    Floats(const float* input, int64_t, int64_t inputs) : numbers(input), inputs(inputs) {}

    static Vector weights(const float* x) { return load(x); }
    static float group(const float* x) { return *x; }
    static Vector add(Vector sums, Vector weights, float input) { return sums + weights * input; }

    const float* of(int64_t row) const { return numbers + row * inputs; }
    Vector total(Vector sums, int64_t) const { return sums; }
};

// The same in bytes from -127 to 127. GROUP inputs of an output are adjacent, and weights have OFFSET added.
struct Bytes {
    typedef int8_t Number;
    static constexpr int64_t GROUP = 4;
    static constexpr int OFFSET = 128;
    int64_t inputs;  // up to a multiple of GROUP
    std::unique_ptr<int8_t[]> numbers;
    std::unique_ptr<float[]> scales;
    std::unique_ptr<int32_t[]> offsets;  // what OFFSET adds to sums

#if defined(__AVX512F__)
    typedef __m512i Sums, Numbers;

    static Numbers group(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, sizeof(four));
        return _mm512_set1_epi32(four);
    }
#if defined(__AVX512VNNI__)
    static constexpr int32_t KEPT_OFFSET = OFFSET;

    static Numbers weights(const int8_t* x) { return _mm512_loadu_si512(x); }
    static Sums add(Sums sums, Numbers weights, Numbers input) { return _mm512_dpbusd_epi32(sums, weights, input); }
#else
    static constexpr int32_t KEPT_OFFSET = 0;

    static Numbers weights(const int8_t* x) {
        return _mm512_xor_si512(_mm512_loadu_si512(x), _mm512_set1_epi8(static_cast<char>(OFFSET)));
    }
    // Two products of a number without sign and one with it fit into 16 bits.
    static Sums add(Sums sums, Numbers weights, Numbers input) {
        const Numbers zero = _mm512_setzero_si512(), one = _mm512_set1_epi16(1);
        const Numbers signed_weights = _mm512_mask_sub_epi8(weights, _mm512_movepi8_mask(input), zero, weights);
        const Numbers pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(input), signed_weights);
        return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, one));
    }
#endif
    Vector total(Sums sums, int64_t row) const {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(offsets[row]))) * scales[row];
    }
#elif defined(__AVX2__)
    typedef __m256i Sums, Numbers;
    static constexpr int32_t KEPT_OFFSET = 0;

    static Numbers group(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, sizeof(four));
        return _mm256_set1_epi32(four);
    }
    static Numbers weights(const int8_t* x) {
        const Numbers loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        return _mm256_xor_si256(loaded, _mm256_set1_epi8(static_cast<char>(OFFSET)));
    }
    // Two products of a number without sign and one with it fit into 16 bits.
    static Sums add(Sums sums, Numbers weights, Numbers input) {
        const Numbers pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(input), _mm256_sign_epi8(weights, input));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    Vector total(Sums sums, int64_t row) const {
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_set1_epi32(offsets[row]))) * scales[row];
    }
#else
    typedef int32_t Sums __attribute__((vector_size(LANES * sizeof(int32_t))));
    static constexpr int32_t KEPT_OFFSET = 0;

    static const int8_t* group(const int8_t* x) { return x; }
    static const int8_t* weights(const int8_t* x) { return x; }
    static Sums add(Sums sums, const int8_t* weights, const int8_t* input) {
        for (int lane = 0; lane < LANES; lane++) {
            for (int i = 0; i < GROUP; i++) {
                sums[lane] += (static_cast<uint8_t>(weights[lane * GROUP + i]) - OFFSET) * input[i];
            }
        }
        return sums;
    }
    Vector total(Sums sums, int64_t row) const {
        Vector y;
        for (int lane = 0; lane < LANES; lane++) y[lane] = scales[row] * (sums[lane] - offsets[row]);
        return y;
    }
#endif

    Bytes(const float* input, int64_t rows, int64_t count)
        : inputs((count + GROUP - 1) / GROUP * GROUP),
          numbers(new int8_t[rows * inputs]),
          scales(new float[rows]),
          offsets(new int32_t[rows]) {
        for (int64_t row = 0; row < rows; row++) round_row(input + row * count, count, row);
    }

    const int8_t* of(int64_t row) const { return &numbers[row * inputs]; }

    void round_row(const float* input, int64_t count, int64_t row) {
        uint32_t most = 0;  // bits of absolute values are in the order of these, then infinity, then NaN
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = bits_of(input[i]) & 0x7fffffff;
            most = bits > most ? bits : most;
        }
        float largest;
        std::memcpy(&largest, &most, sizeof(largest));
        const bool is_zero = largest < 1e-30f;  // its inverse could be infinite
        const bool is_finite = most < 0x7f800000;
        const float inverse = is_zero || !is_finite ? 0.0f : 127.0f / largest;
        int8_t* rounded = &numbers[row * inputs];
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) {
            rounded[i] = static_cast<int8_t>(bits_of(std::fma(input[i], inverse, 12582912.0f)));  // 1.5 2^23: no fraction
            sum += rounded[i];
        }
        std::fill(rounded + count, rounded + inputs, int8_t{0});
        scales[row] = is_finite ? (is_zero ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
        offsets[row] = KEPT_OFFSET * sum;
    }
};

// The residual connection around f: x + f(norm(x)) if `is_pre`, else norm(alpha x + f(x)).
struct Residual {
    const float* weight;
    const float* bias;
    double epsilon, alpha;
    int64_t is_pre;
};

enum Activation : int64_t { RELU, GELU, SWISH };

struct Layer {
    int64_t dim, inner, heads, activation, has_source;
    Residual around_self, around_source, around_network;
    Product keys_values_query, self_out, query, source_out, up, down;
};

// Keys, or values: those of a head at a position are adjacent.
struct States {
    const float* first;
    int64_t of_place, of_head, of_position;

    const float* at(int64_t place, int64_t head) const { return first + place * of_place + head * of_head; }
};

// What all layers of a step share. Masks are null if all is seen.
struct Past {
    int64_t sentences, hypotheses, places;
    const int64_t* place;  // of each sentence in a cache, and among the keys and values of the source; null: in order
    int64_t capacity, positions;  // the last `hypotheses` positions of a sentence are to be written
    const uint8_t* seen;          // (sentences, hypotheses, positions)

    int64_t place_of(int64_t sentence) const { return place == nullptr ? sentence : place[sentence]; }
};

struct Source {
    States keys, values;
    int64_t positions;
    const uint8_t* seen;  // (sentences, positions)
};

// A cache has keys, then values: (2, places, heads, capacity, dim / heads). States, (rows, dim), are input and output.
struct Step {
    const Layer& layer;
    const Past& past;
    const Source& source;
    float* states;
    float* cache;
};

// output = kept output + x W^T + b of rows from `row` on, in a panel of outputs from `first` on.
template <int ROWS, class Rows>
void multiply_panel(const Product& product, const Rows& x, int64_t row, int64_t first, float kept, float* output) {
    const int64_t inputs = x.inputs, outputs = product.outputs;
    const auto* weight = static_cast<const typename Rows::Number*>(product.weight) + first * inputs;
    const auto* input = x.of(row);
    typename Rows::Sums sums[ROWS][VECTORS] = {};
    for (int64_t i = 0; i < inputs; i += Rows::GROUP, weight += PANEL * Rows::GROUP) {
        decltype(Rows::weights(weight)) of_input[VECTORS];
        prefetch(weight);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) of_input[v] = Rows::weights(weight + v * LANES * Rows::GROUP);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const auto group = Rows::group(input + r * inputs + i);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = Rows::add(sums[r][v], of_input[v], group);
        }
    }
    Vector totals[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) totals[r][v] = x.total(sums[r][v], row + r);
    }
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t from = first + v * LANES;
            float* to = output + (row + r) * outputs + from;
            Vector value = totals[r][v] * load(product.scale + from) + load(product.bias + from);
            if (from + LANES <= outputs) {
                store(to, kept == 0.0f ? value : value + kept * load(to));
            } else {
                for (int64_t e = 0; e < outputs - from; e++) {
                    to[e] = kept == 0.0f ? value[e] : value[e] + kept * to[e];
                }
            }
        }
    }
}

template <class Rows>
void multiply_by(const Product& product, const float* input, int64_t rows, float kept, float* output) {
    const Rows x(input, rows, product.inputs);
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t first = 0; first < product.outputs; first += PANEL) {
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
            switch (count) {
                case 1: multiply_panel<1>(product, x, row, first, kept, output); break;
                case 2: multiply_panel<2>(product, x, row, first, kept, output); break;
                case 3: multiply_panel<3>(product, x, row, first, kept, output); break;
                case 4: multiply_panel<4>(product, x, row, first, kept, output); break;
                case 5: multiply_panel<5>(product, x, row, first, kept, output); break;
                default: multiply_panel<6>(product, x, row, first, kept, output);
            }
        }
    }
}

// output = kept output + x W^T + b; with `kept` 0 the output need not be set.
void multiply(const Product& product, const float* input, int64_t rows, float kept, float* output) {
    for (int64_t first = 0; first < rows; first += TOGETHER) {
        const int64_t count = std::min(TOGETHER, rows - first);
        const float* x = input + first * product.inputs;
        float* y = output + first * product.outputs;
        if (product.is_int8) {
            multiply_by<Bytes>(product, x, count, kept, y);
        } else {
            multiply_by<Floats>(product, x, count, kept, y);
        }
    }
}

void normalise(const Residual& norm, const float* input, int64_t rows, int64_t dim, float* output) {
    for (int64_t row = 0; row < rows; row++, input += dim, output += dim) {
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; d++) sum += input[d];
        const float mean = sum / dim;
#pragma omp simd reduction(+ : squares)
        for (int64_t d = 0; d < dim; d++) squares += (input[d] - mean) * (input[d] - mean);
        const float scale = 1.0f / std::sqrt(squares / dim + static_cast<float>(norm.epsilon));
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) output[d] = (input[d] - mean) * scale * norm.weight[d] + norm.bias[d];
    }
}

// e^x = 2^n e^r with |r| <= ln 2 / 2, to 1e-6 of itself for x from -87 to 88, and constant beyond. Loops of it are
// vectorised, as those of the library's are not.
inline float exponential(float x) {
    const float near_integer = 12582912.0f;  // 1.5 2^23: a sum with it has no fraction
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = (bounded * 1.44269504f + near_integer) - near_integer, r = bounded - n * 0.69314718f;
    const float high = 1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f));
    const float power = 1.0f + r * (1.0f + r * (1 / 2.0f + r * (1 / 6.0f + r * high)));
    const uint32_t exponent = (static_cast<uint32_t>(static_cast<int32_t>(n)) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, sizeof(scale));
    return scale * power;
}

// The error function to 1.5e-7: Abramowitz, Stegun, "Handbook of Mathematical Functions", 1964, 7.1.26.
inline float error_function(float x) {
    const float size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    const float low = 0.254829592f + t * (-0.284496736f + t * 1.421413741f);
    const float sum = t * (low + t * t * t * (-1.453152027f + t * 1.061405429f));
    const float y = 1.0f - sum * exponential(-size * size);
    return x < 0.0f ? -y : y;
}

void activate(int64_t activation, float* x, int64_t count) {
    switch (activation) {
        case RELU:
#pragma omp simd
            for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0.0f ? 0.0f : x[i];
            break;
        case GELU:
#pragma omp simd
            for (int64_t i = 0; i < count; i++) x[i] *= 0.5f * (1.0f + error_function(x[i] * 0.70710678f));
            break;
        case SWISH:
#pragma omp simd
            for (int64_t i = 0; i < count; i++) x[i] /= 1.0f + exponential(-x[i]);
    }
}

inline float dot(const float* x, const float* y, int64_t count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i] * y[i];
    return sum;
}

// Sum the lanes of each of four vectors.
inline void sum_lanes(const Vector* x, float* sums) {
#if defined(__AVX512F__)
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const __m512 four = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)) + _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    const __m256 half = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
    _mm_storeu_ps(sums, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    const __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(sums, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
    for (int i = 0; i < 4; i++) {
        sums[i] = 0.0f;
        for (int lane = 0; lane < LANES; lane++) sums[i] += x[i][lane];
    }
#endif
}

// The products of a query and the keys at `count` positions. Up to 3 numbers beyond them are written, too.
void score(const float* query, const float* keys, int64_t of_key, const int64_t* seen, int64_t count, int64_t width,
           float* scores) {
    if (width % LANES != 0) {
        for (int64_t t = 0; t < count; t++) scores[t] = dot(query, keys + seen[t] * of_key, width);
        return;
    }
    for (int64_t t = 0; t < count; t += 4) {
        const float* key[4];
        for (int64_t i = 0; i < 4; i++) key[i] = keys + seen[std::min(t + i, count - 1)] * of_key;
        Vector sums[4] = {};
        for (int64_t d = 0; d < width; d += LANES) {
            const Vector x = load(query + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sums[i] += x * load(key[i] + d);
        }
        sum_lanes(sums, scores + t);
    }
}

// scale times the sum of weighted values at `count` positions.
void mix(const float* weights, const float* values, int64_t of_value, const int64_t* seen, int64_t count, int64_t width,
         float scale, float* output) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vector even = {}, odd = {};
        for (int64_t t = 0; t + 1 < count; t += 2) {
            even += weights[t] * load(values + seen[t] * of_value + d);
            odd += weights[t + 1] * load(values + seen[t + 1] * of_value + d);
        }
        if (count % 2 == 1) even += weights[count - 1] * load(values + seen[count - 1] * of_value + d);
        store(output + d, (even + odd) * scale);
    }
    for (; d < width; d++) {
        float sum = 0.0f;
        for (int64_t t = 0; t < count; t++) sum += weights[t] * values[seen[t] * of_value + d];
        output[d] = sum * scale;
    }
}

// Attention of one head of one hypothesis to the `count` positions that it sees. There is room for whole vectors of
// weights.
void attend(const float* query, const float* keys, int64_t of_key, const float* values, int64_t of_value,
            const int64_t* seen, int64_t count, int64_t width, float* weights, float* output) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(width)), least = -std::numeric_limits<float>::infinity();
    const int64_t whole = whole_vectors(count);
    float most = least, sum = 0.0f;
    score(query, keys, of_key, seen, count, width, weights);
    std::fill(weights + count, weights + whole, least);
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < whole; t++) most = weights[t] > most ? weights[t] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < whole; t++) {
        weights[t] = exponential(scale * (weights[t] - most));  // of what is beyond: some 1e-38
        sum += weights[t];
    }
    mix(weights, values, of_value, seen, count, width, count == 0 ? 0.0f : 1.0f / sum, output);
}

// Write the indices of what a mask shows, and return their number.
int64_t list_seen(const uint8_t* mask, int64_t positions, int64_t* seen) {
    int64_t count = 0;
    for (int64_t p = 0; p < positions; p++) {
        if (mask == nullptr || mask[p]) seen[count++] = p;
    }
    return count;
}

// What rows between two products need, in layers of which `inner` is the widest network.
struct Workspace {
    std::unique_ptr<float[]> normed, projected, attended, inner, weights;
    std::unique_ptr<int64_t[]> seen, counts;

    Workspace(int64_t rows, int64_t dim, int64_t inner, const Past& past, int64_t source_positions)
        : normed(new float[rows * dim]),
          projected(new float[rows * 3 * dim]),
          attended(new float[rows * dim]),
          inner(new float[rows * inner]),
          weights(new float[whole_vectors(std::max(past.positions, source_positions))]),
          seen(new int64_t[std::max(past.hypotheses * past.positions, source_positions)]),
          counts(new int64_t[past.hypotheses]) {}
};

// Write the newest keys and values, which follow one another in the rows of `projected`, into the cache.
void append(const Step& step, int64_t sentence, const float* projected) {
    const Past& past = step.past;
    const int64_t dim = step.layer.dim, heads = step.layer.heads, width = dim / heads;
    for (int64_t hypothesis = 0; hypothesis < past.hypotheses; hypothesis++, projected += 3 * dim) {
        const int64_t position = past.positions - past.hypotheses + hypothesis;
        for (int64_t part = 0; part < 2; part++) {
            for (int64_t head = 0; head < heads; head++) {
                const int64_t of_head = (part * past.places + past.place_of(sentence)) * heads + head;
                std::copy_n(projected + part * dim + head * width, width,
                            step.cache + (of_head * past.capacity + position) * width);
            }
        }
    }
}

// Heads one after another: what the hypotheses of a sentence share is read once.
void attend_to_past(const Step& step, int64_t sentence, const float* projected, Workspace& work, float* attended) {
    const Past& past = step.past;
    const int64_t dim = step.layer.dim, heads = step.layer.heads, width = dim / heads;
    const int64_t of_head = past.capacity * width, of_place = heads * of_head, place = past.place_of(sentence);
    const States keys{step.cache, of_place, of_head, width};
    const States values{step.cache + past.places * of_place, of_place, of_head, width};
    for (int64_t hypothesis = 0; hypothesis < past.hypotheses; hypothesis++) {
        const int64_t row = sentence * past.hypotheses + hypothesis;
        const uint8_t* mask = past.seen == nullptr ? nullptr : past.seen + row * past.positions;
        work.counts[hypothesis] = list_seen(mask, past.positions, &work.seen[hypothesis * past.positions]);
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t hypothesis = 0; hypothesis < past.hypotheses; hypothesis++) {
            const float* query = projected + hypothesis * 3 * dim + 2 * dim + head * width;
            attend(query, keys.at(place, head), width, values.at(place, head), width,
                   &work.seen[hypothesis * past.positions], work.counts[hypothesis], width, work.weights.get(),
                   attended + hypothesis * dim + head * width);
        }
    }
}

void attend_to_source(const Step& step, int64_t sentence, const float* query, Workspace& work, float* attended) {
    const Source& source = step.source;
    const int64_t dim = step.layer.dim, heads = step.layer.heads, width = dim / heads;
    const int64_t place = step.past.place_of(sentence);
    const uint8_t* mask = source.seen == nullptr ? nullptr : source.seen + sentence * source.positions;
    const int64_t count = list_seen(mask, source.positions, work.seen.get());
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t hypothesis = 0; hypothesis < step.past.hypotheses; hypothesis++) {
            const int64_t at = hypothesis * dim + head * width;
            attend(query + at, source.keys.at(place, head), source.keys.of_position, source.values.at(place, head),
                   source.values.of_position, work.seen.get(), count, width, work.weights.get(), attended + at);
        }
    }
}

// `sublayer` adds its result for the given input to alpha times the states.
template <class Sublayer>
void connect(const Residual& around, float* states, int64_t rows, int64_t dim, float* normed, Sublayer sublayer) {
    if (around.is_pre) {
        normalise(around, states, rows, dim, normed);
        sublayer(normed);
    } else {
        sublayer(states);
        normalise(around, states, rows, dim, states);
    }
}

// The layer for sentences `first` to `end`.
void decode(const Step& step, int64_t first, int64_t end, Workspace& work) {
    const Layer& layer = step.layer;
    const int64_t dim = layer.dim, hypotheses = step.past.hypotheses, rows = (end - first) * hypotheses;
    float* states = step.states + first * hypotheses * dim;
    float *projected = work.projected.get(), *attended = work.attended.get(), *inner = work.inner.get();
    connect(layer.around_self, states, rows, dim, work.normed.get(), [&](const float* input) {
        multiply(layer.keys_values_query, input, rows, 0.0f, projected);
        for (int64_t sentence = first; sentence < end; sentence++) {
            const int64_t row = (sentence - first) * hypotheses;
            append(step, sentence, projected + row * 3 * dim);
            attend_to_past(step, sentence, projected + row * 3 * dim, work, attended + row * dim);
        }
        multiply(layer.self_out, attended, rows, layer.around_self.alpha, states);
    });
    if (layer.has_source) {
        connect(layer.around_source, states, rows, dim, work.normed.get(), [&](const float* input) {
            multiply(layer.query, input, rows, 0.0f, projected);
            for (int64_t sentence = first; sentence < end; sentence++) {
                const int64_t row = (sentence - first) * hypotheses;
                attend_to_source(step, sentence, projected + row * dim, work, attended + row * dim);
            }
            multiply(layer.source_out, attended, rows, layer.around_source.alpha, states);
        });
    }
    connect(layer.around_network, states, rows, dim, work.normed.get(), [&](const float* input) {
        multiply(layer.up, input, rows, 0.0f, inner);
        activate(layer.activation, inner, rows * layer.inner);
        multiply(layer.down, inner, rows, layer.around_network.alpha, states);
    });
}

float log_of_summed_exponentials(const float* x, int64_t entries) {
    float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < entries; i++) most = x[i] > most ? x[i] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < entries; i++) sum += exponential(x[i] - most);
    return most + std::log(sum);
}

// NaN is above all numbers, as in torch.
inline bool is_above(float x, float y) { return x > y || (std::isnan(x) && !std::isnan(y)); }

// The `count` largest of the numbers so far, largest first, of equal ones the first, and their places.
struct Largest {
    float* numbers;
    int64_t* places;
    int64_t count, known;

    void add(float x, int64_t at) {
        if (known == count && !is_above(x, numbers[count - 1])) return;
        int64_t rank = known < count ? known++ : count - 1;
        for (; rank > 0 && is_above(x, numbers[rank - 1]); rank--) {
            numbers[rank] = numbers[rank - 1];
            places[rank] = places[rank - 1];
        }
        numbers[rank] = x;
        places[rank] = at;
    }

    // Add the numbers x + offset.
    void add_all(const float* x, int64_t entries, float offset, int64_t first_place) {
        for (int64_t first = 0; first < entries; first += BLOCK) {
            const int64_t end = std::min(first + BLOCK, entries);
            if (known == count) {
                const float least = numbers[count - 1];
                int any = 0;
#pragma omp simd reduction(| : any)
                for (int64_t i = first; i < end; i++) any |= !(x[i] + offset <= least);
                if (!any) continue;
            }
            for (int64_t i = first; i < end; i++) add(x[i] + offset, first_place + i);
        }
    }
};

}  // namespace

extern "C" {

int64_t panel_outputs() { return PANEL; }

// Return 0, or 1 if there is no memory.
int64_t multiply_rows(const Product* product, const float* input, int64_t rows, float* output) {
    try {
        multiply(*product, input, rows, 0.0f, output);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// Hypotheses of sentences, equally many for each, whose log-probabilities and tokens so far are (rows, length), and the
// logits of their next tokens, (rows, entries), in which those of tokens that are never predicted become -inf. With
// log-sums the logits have been changed since; without, these are computed.
struct Hypotheses {
    float* logits;
    const float *log_sums, *log_probs;
    const int64_t *tokens, *never;
    int64_t sentences, rows, length, entries, nevers;
};

// `beam` hypotheses for each sentence, (sentences, beam, length + 1), and of which they continue; and those that end.
struct Extended {
    int64_t *rows, *tokens, *ended_rows;
    float *log_probs, *ended_log_probs;
};

// Extend each hypothesis by any token. Of the 2 x `beam` most probable extensions of a sentence those by `eos` among the
// first `beam` end, if they are possible; the first `beam` of the others live on. Return how many end, which follow one
// another for all sentences; -1 if there is no memory, -2 if there is no such token.
int64_t extend_hypotheses(const Hypotheses* known, int64_t beam, int64_t eos, const Extended* found) {
    const int64_t hypotheses = known->rows / known->sentences, length = known->length, entries = known->entries;
    const int64_t count = 2 * beam;
    int64_t ended = 0;
    for (int64_t i = 0; i < known->nevers; i++) {
        if (known->never[i] < 0 || known->never[i] >= entries) return -2;
    }
    try {
        const std::unique_ptr<float[]> ranked(new float[count]);
        const std::unique_ptr<int64_t[]> places(new int64_t[count]);
        for (int64_t sentence = 0; sentence < known->sentences; sentence++) {
            const int64_t first = sentence * hypotheses;
            Largest largest{ranked.get(), places.get(), count, 0};
            for (int64_t row = first; row < first + hypotheses; row++) {
                float* x = known->logits + row * entries;
                const float log_sum =
                    known->log_sums == nullptr ? log_of_summed_exponentials(x, entries) : known->log_sums[row];
                for (int64_t i = 0; i < known->nevers; i++) x[known->never[i]] = -std::numeric_limits<float>::infinity();
                const float offset = known->log_probs[(row + 1) * length - 1] - log_sum;
                largest.add_all(x, entries, offset, (row - first) * entries);
            }
            for (int64_t rank = 0, living = 0; living < beam; rank++) {
                const int64_t row = first + places[rank] / entries, token = places[rank] % entries;
                if (token != eos) {
                    const int64_t at = sentence * beam + living++;
                    float* log_probs = found->log_probs + at * (length + 1);
                    int64_t* tokens = found->tokens + at * (length + 1);
                    *std::copy_n(known->log_probs + row * length, length, log_probs) = ranked[rank];
                    *std::copy_n(known->tokens + row * length, length, tokens) = token;
                    found->rows[at] = row;
                } else if (rank < beam && ranked[rank] > -std::numeric_limits<float>::infinity()) {
                    found->ended_rows[ended] = row;
                    found->ended_log_probs[ended++] = ranked[rank];
                }
            }
        }
    } catch (const std::bad_alloc&) {
        return -1;
    }
    return ended;
}

// Rows of a table times `scale`, plus a position of each, or of all if `of_position` is 0. Return 0, or 2 if there is
// no such token.
int64_t embed_tokens(const int64_t* tokens, int64_t rows, int64_t of_token, const float* table, int64_t entries,
                     int64_t dim, double scale, const float* position, int64_t of_position, float* output) {
    const float factor = static_cast<float>(scale);
    for (int64_t row = 0; row < rows; row++, output += dim, position += of_position) {
        const int64_t token = tokens[row * of_token];
        if (token < 0 || token >= entries) return 2;
        const float* x = table + token * dim;
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) output[d] = x[d] * factor + position[d];
    }
    return 0;
}

void log_sums_of_rows(const float* x, int64_t rows, int64_t entries, float* log_sums) {
    for (int64_t row = 0; row < rows; row++) log_sums[row] = log_of_summed_exponentials(x + row * entries, entries);
}

// `count` layers of one width, one after another, then a normalisation unless it is null, for sentences `begin` to
// `end`. Where `adds_input` is set, `input` is added to the states before the layer. Return 0; 1 if there is no memory;
// 2 if a sentence has no place.
int64_t decode_layers(const Layer* const* layers, const Source* const* sources, float* const* caches,
                      const uint8_t* adds_input, int64_t count, const Residual* norm, const Past* past,
                      const float* input, float* states, int64_t begin, int64_t end) {
    for (int64_t sentence = begin; sentence < end; sentence++) {
        const int64_t place = past->place_of(sentence);
        if (place < 0 || place >= past->places) return 2;
    }
    const int64_t together = std::max<int64_t>(1, TOGETHER / past->hypotheses);
    int64_t inner = 0, source_positions = 0;
    for (int64_t number = 0; number < count; number++) {
        inner = std::max(inner, layers[number]->inner);
        source_positions = std::max(source_positions, sources[number]->positions);
    }
    try {
        const int64_t rows = std::min(together, end - begin) * past->hypotheses;
        Workspace work(rows, layers[0]->dim, inner, *past, source_positions);
        const int64_t of_sentence = past->hypotheses * layers[0]->dim;
        for (int64_t number = 0; number < count; number++) {
            if (adds_input[number]) {
#pragma omp simd
                for (int64_t i = begin * of_sentence; i < end * of_sentence; i++) states[i] += input[i];
            }
            const Step step{*layers[number], *past, *sources[number], states, caches[number]};
            for (int64_t first = begin; first < end; first += together) {
                decode(step, first, std::min(first + together, end), work);
            }
        }
        if (norm != nullptr) {
            float* first = states + begin * of_sentence;
            normalise(*norm, first, (end - begin) * past->hypotheses, layers[0]->dim, first);
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// All between tokens and logits: `embed_tokens`, with the positions of the next step and of those after it, then
// `decode_layers`, and a product.
struct Decoder {
    const Layer* const* layers;
    const Source* const* sources;
    float* const* caches;
    const uint8_t* adds_input;
    int64_t count;
    const Residual* norm;
    const float *table, *positions;
    int64_t entries;
    double scale;
    const Product* projection;
};

// What a step changes: it reads one of each pair, beginning with the second, and writes the other one.
struct Changing {
    int64_t* tokens[2];
    float* log_probs[2];
    uint8_t* seen[2];  // (rows, positions), or null if all is seen, which needs a beam of 1
};

// Hypotheses that end: their sentence, their number of tokens before EOS, `longest` places for these and for the
// log-probabilities up to each, and that of all with EOS. `counts` of each sentence are those that ended before.
struct Ended {
    int64_t *sentences, *lengths, *tokens;
    float *log_probs, *totals;
    int64_t *counts, longest, number;
};

// Take steps of a search, in which each sentence has `beam` hypotheses from the second step on: as many as `most`, up
// to one after which `beam` hypotheses of a sentence have ended. `past` is that of the first step, and `known` that of
// none but for what does not change. `found` is what the last step extends. Return the number of steps; -1 if there is
// no memory, -2 if there is no such token or place.
int64_t take_steps(const Decoder* decoder, const Past* past, const Hypotheses* known, const Changing* changing,
                   int64_t beam, int64_t eos, int64_t most, const Extended* found, Ended* ended) {
    const int64_t dim = decoder->layers[0]->dim, widest = known->sentences * beam;
    try {
        const std::unique_ptr<float[]> states(new float[widest * dim]), input(new float[widest * dim]);
        Past now = *past;
        Hypotheses newest = *known;
        for (int64_t step = 0;; step++) {
            const int64_t before = (step + 1) % 2, after = step % 2, rows = newest.rows, positions = now.positions;
            now.seen = changing->seen[after];
            if (now.seen != nullptr) {
                const int64_t known_positions = positions - now.hypotheses;
                uint8_t* seen = changing->seen[after];
                for (int64_t row = 0; row < rows; row++) {
                    const int64_t parent = step == 0 ? row : found->rows[row];
                    const uint8_t* of_parent = changing->seen[before] + parent * known_positions;
                    seen = std::copy_n(of_parent, known_positions, seen);
                    for (int64_t own = 0; own < now.hypotheses; own++) *seen++ = own == row % now.hypotheses;
                }
            }
            newest.tokens = changing->tokens[before];
            newest.log_probs = changing->log_probs[before];
            Extended extended = *found;
            extended.tokens = changing->tokens[after];
            extended.log_probs = changing->log_probs[after];
            if (embed_tokens(newest.tokens + newest.length - 1, rows, newest.length, decoder->table, decoder->entries,
                             dim, decoder->scale, decoder->positions + step * dim, 0, input.get())) {
                return -2;
            }
            std::copy_n(input.get(), rows * dim, states.get());
            const int64_t problem =
                decode_layers(decoder->layers, decoder->sources, decoder->caches, decoder->adds_input, decoder->count,
                              decoder->norm, &now, input.get(), states.get(), 0, now.sentences);
            if (problem) return -problem;
            multiply(*decoder->projection, states.get(), rows, 0.0f, newest.logits);
            const int64_t ending = extend_hypotheses(&newest, beam, eos, &extended);
            if (ending < 0) return ending;
            bool is_last = step + 1 == most;
            for (int64_t i = 0; i < ending; i++) {
                const int64_t row = found->ended_rows[i], sentence = row / now.hypotheses, number = ended->number++;
                ended->sentences[number] = sentence;
                ended->lengths[number] = newest.length;
                std::copy_n(newest.tokens + row * newest.length, newest.length, ended->tokens + number * ended->longest);
                std::copy_n(newest.log_probs + row * newest.length, newest.length,
                            ended->log_probs + number * ended->longest);
                ended->totals[number] = found->ended_log_probs[i];
                is_last |= ++ended->counts[sentence] >= beam;
            }
            if (is_last) return step + 1;
            now.hypotheses = beam;
            now.positions = positions + beam;
            newest.rows = widest;
            newest.length++;
        }
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// One sentence: BOS and its tokens so far, with room for `limit` more than BOS; the number of all these; the
// log-probability of its tokens; and of all passes, how many tokens were drafted, compared, accepted and gained.
struct Drafted {
    int64_t* tokens;
    int64_t count, limit;
    double log_prob;
    int64_t drafted, compared, accepted, gained;
};

// Take passes of greedy decoding, at most `passes`, in which the lower part drafts up to `most` tokens and the upper part
// reads them at once; see search/speculative.py. `past` is that of the next position, and `known` that of none but for
// what does not change. Both parts have the same product; `positions` of the lower part begin with that of BOS. Return
// the number of passes; -1 if there is no memory; -2 if there is no such token or place.
int64_t take_passes(const Decoder* lower, const Decoder* upper, const Past* past, const Hypotheses* known,
                    Drafted* sentence, int64_t most, int64_t eos, int64_t passes) {
    const int64_t dim = lower->layers[0]->dim, entries = known->entries, rows = most + 1;
    for (int64_t i = 0; i < known->nevers; i++) {
        if (known->never[i] < 0 || known->never[i] >= entries) return -2;
    }
    const auto predict = [&](const Decoder* part, float* states, int64_t count) {
        if (part->norm != nullptr) normalise(*part->norm, states, count, dim, states);
        multiply(*part->projection, states, count, 0.0f, known->logits);
    };
    // The most probable token of a row, by its logits from which the tokens that are never predicted are taken.
    const auto best = [&](int64_t row) {
        float *x = known->logits + row * entries, top;
        int64_t token;
        for (int64_t i = 0; i < known->nevers; i++) x[known->never[i]] = -std::numeric_limits<float>::infinity();
        Largest largest{&top, &token, 1, 0};
        largest.add_all(x, entries, 0.0f, 0);
        return token;
    };
    try {
        const std::unique_ptr<float[]> states(new float[rows * dim]), input(new float[rows * dim]), exit(new float[dim]);
        const std::unique_ptr<int64_t[]> draft(new int64_t[rows]);
        const std::unique_ptr<uint8_t[]> seen(new uint8_t[rows * (sentence->limit + 1)]);
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t before = sentence->count - 1;  // positions that are cached
            const int64_t room = sentence->limit - before;  // tokens that may still follow
            int64_t drafted = 0, width = 0;
            Past now = *past;
            while (true) {
                const int64_t token = width == 0 ? sentence->tokens[before] : draft[width - 1];
                float *own = states.get() + width * dim, *embedded = input.get() + width * dim;
                now.hypotheses = 1;
                now.positions = before + ++width;
                if (embed_tokens(&token, 1, 1, lower->table, lower->entries, dim, lower->scale,
                                 lower->positions + (now.positions - 1) * dim, 0, embedded)) {
                    return -2;
                }
                std::copy_n(embedded, dim, own);
                const int64_t problem = decode_layers(lower->layers, lower->sources, lower->caches, lower->adds_input,
                                                      lower->count, nullptr, &now, embedded, own, 0, 1);
                if (problem) return -problem;
                if (drafted == std::min(most, room - 1)) break;
                std::copy_n(own, dim, exit.get());
                predict(lower, exit.get(), 1);
                draft[drafted++] = best(0);
                if (draft[drafted - 1] == eos) break;
            }
            now.hypotheses = width;
            now.positions = before + width;
            for (int64_t row = 0; row < width; row++) {
                uint8_t* of_row = seen.get() + row * now.positions;
                std::fill(of_row, of_row + now.positions, uint8_t{0});
                std::fill(of_row, of_row + before + row + 1, uint8_t{1});
            }
            now.seen = seen.get();
            const int64_t problem = decode_layers(upper->layers, upper->sources, upper->caches, upper->adds_input,
                                                  upper->count, nullptr, &now, input.get(), states.get(), 0, 1);
            if (problem) return -problem;
            predict(upper, states.get(), width);
            int64_t token = 0;
            for (int64_t row = 0; row < width; row++) {
                const float* x = known->logits + row * entries;
                const float log_sum = log_of_summed_exponentials(x, entries), end = x[eos];
                token = best(row);
                const bool is_last = row + 1 == room;
                if (is_last) token = eos;
                sentence->log_prob += (is_last ? end : x[token]) - log_sum;
                sentence->tokens[sentence->count++] = token;
                sentence->gained++;
                if (row < drafted) {
                    sentence->compared++;
                    sentence->accepted += draft[row] == token;
                }
                if (token == eos || row >= drafted || draft[row] != token) break;
            }
            sentence->drafted += drafted;
            if (token == eos) return pass + 1;
        }
    } catch (const std::bad_alloc&) {
        return -1;
    }
    return passes;
}
}
