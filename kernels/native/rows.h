/* Norms, gates, rotary positions and attention of few tokens, for one type of numbers. Included once for each type.

   FLOAT is the type as it lies in memory, LOAD and STORE turn it into a float and back, NAMED gives a function its
   name.
   Sums are of floats. Strides are counted in elements. */

static inline void NAMED(norm_row)(long dim, const FLOAT *x, const FLOAT *residual, const FLOAT *weight, FLOAT *total,
                                   FLOAT *out, float eps, float offset) {
  float square = 0;
  if (residual) {
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < dim; i++) {
      total[i] = STORE(LOAD(x[i]) + LOAD(residual[i]));
      float value = LOAD(total[i]);
      square += value * value;
    }
    x = total;
  } else {
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < dim; i++) square += LOAD(x[i]) * LOAD(x[i]);
  }
  float root = 1 / sqrtf(square / dim + eps);
  if (offset != 0) {
#pragma omp simd
    for (long i = 0; i < dim; i++) out[i] = STORE(LOAD(x[i]) * root * (LOAD(weight[i]) + offset));
  } else {
#pragma omp simd
    for (long i = 0; i < dim; i++) out[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * root)));
  }
}

/* out [rows, heads, dim] from x, whose rows lie `stride` apart; with a residual [rows, heads, dim] also total. */
void NAMED(rms_norm)(long rows, long heads, long dim, long stride, const FLOAT *x, const FLOAT *residual,
                     const FLOAT *weight, FLOAT *total, FLOAT *out, float eps, float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long row = 0; row < rows; row++)
    for (long head = 0; head < heads; head++) {
      long at = (row * heads + head) * dim;
      NAMED(norm_row)(dim, x + row * stride + head * dim, residual ? residual + at : 0, weight, total + at, out + at,
                      eps, offset);
    }
}

/* out [rows, size] = silu(gate) · up for x [rows, 2 size] = (gate, up). */
void NAMED(silu_mul)(long rows, long size, const FLOAT *x, FLOAT *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long row = 0; row < rows; row++) {
    const FLOAT *gate = x + row * 2 * size, *up = gate + size;
    FLOAT *to = out + row * size;
#pragma omp simd
    for (long i = 0; i < size; i++) {
      float value = LOAD(gate[i]);
      to[i] = STORE(LOAD(STORE(value / (1 + exponential(-value)))) * LOAD(up[i]));
    }
  }
}

static inline void NAMED(turn)(long half, const FLOAT *x, const float *table, FLOAT *out) {
#pragma omp simd
  for (long i = 0; i < half; i++) {
    float first = LOAD(x[i]), second = LOAD(x[half + i]);
    float cosine = LOAD(STORE(table[i])), sine = LOAD(STORE(table[half + i]));
    out[i] = STORE(first * cosine - second * sine);
    out[half + i] = STORE(second * cosine + first * sine);
  }
}

/* query [rows, heads, dim] and key [rows, kv_heads, dim] turned by `table` [positions, dim], cosines then sines; the
   halves of a head are pairs. Weights, where given, are those of norms before, the results of which are turned. */
void NAMED(rotary)(long rows, long heads, long kv_heads, long dim, long stride, long key_stride,
                   const int64_t *positions, const float *table, const FLOAT *query, const FLOAT *key,
                   const FLOAT *query_weight, const FLOAT *key_weight, FLOAT *turned, FLOAT *turned_key, float eps,
                   float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long row = 0; row < rows; row++)
    for (long head = 0; head < heads + kv_heads; head++) {
      long other = head - heads;
      const FLOAT *from = other < 0 ? query + row * stride + head * dim : key + row * key_stride + other * dim;
      const FLOAT *weight = other < 0 ? query_weight : key_weight;
      FLOAT *to = other < 0 ? turned + (row * heads + head) * dim : turned_key + (row * kv_heads + other) * dim;
      if (weight) {
        NAMED(norm_row)(dim, from, 0, weight, 0, to, eps, offset);
        from = to;
      }
      NAMED(turn)(dim / 2, from, table + positions[row] * dim, to);
    }
}

/* Puts key and value [rows, size], whose rows lie key_stride and value_stride apart, to their slots: number slot of
   blocks of `block` tokens, which lie block_stride and stride apart. A negative slot is left out. */
void NAMED(store)(long rows, long size, long key_stride, long value_stride, long block, long block_stride, long stride,
                  const FLOAT *key, const FLOAT *value, const int64_t *slots, FLOAT *keys, FLOAT *values) {
  for (long row = 0; row < rows; row++) {
    if (slots[row] < 0) continue;
    long to = slots[row] / block * block_stride + slots[row] % block * stride;
    memcpy(keys + to, key + row * key_stride, size * sizeof(FLOAT));
    memcpy(values + to, value + row * value_stride, size * sizeof(FLOAT));
  }
}

/* One query token against the keys and values of tokens first to last - 1 of its row, which `cached` places:
   softmax(scale · q kᵀ) v for `heads` KV heads, each with `group` query heads of [16 · parts].
   All heads of 16 tokens are done before the next ones, so that memory is read in its order, and the largest score so
   far is taken from all, so that nothing overflows. `space` has room for 2 · heads · group · parts vectors. */
static inline __attribute__((always_inline)) void NAMED(attend_heads)(long heads, long group, long parts, long first,
                                                                      long last, struct cached cached,
                                                                      const FLOAT *query, const FLOAT *keys,
                                                                      const FLOAT *values, vec *space, FLOAT *out,
                                                                      float scale) {
  long all = heads * group;
  vec *q = space, *sums = space + all * parts, products[MOST_GROUP][16];
  float shares[MOST_GROUP][16], most[all], total[all];
  for (long i = 0; i < all * parts; i++) q[i] = LOAD16(query + 16 * i) * scale, sums[i] = (vec){0};
  for (long i = 0; i < all; i++) most[i] = -INFINITY, total[i] = 0;
  long at[16], ahead[16];
  places_of(first, last, cached, ahead);
  for (long start = first; start < last; start += 16) {
    long count = last - start < 16 ? last - start : 16;
    memcpy(at, ahead, sizeof at);
    if (start + 16 < last) places_of(start + 16, last, cached, ahead);
    for (long head = 0; head < heads; head++) {
      const FLOAT *key_head = keys + head * parts * 16, *value_head = values + head * parts * 16;
      vec *q_head = q + head * group * parts, *sums_head = sums + head * group * parts;
      for (long t = 0; t < 16; t++) {
        vec key[MOST_DIM / 16];
        for (unsigned long i = 0; i < parts * 16 * sizeof(FLOAT); i += 64) {
          __builtin_prefetch((const char *)(key_head + ahead[t]) + i);
          __builtin_prefetch((const char *)(value_head + ahead[t]) + i);
        }
        for (long j = 0; j < parts; j++) key[j] = LOAD16(key_head + at[t] + 16 * j);
        for (long g = 0; g < group; g++) {
          vec sum = key[0] * q_head[g * parts];
          for (long j = 1; j < parts; j++) sum += key[j] * q_head[g * parts + j];
          products[g][t] = sum;
        }
      }
      for (long g = 0; g < group; g++) {
        vec scores = sums_of(products[g]);
        float before = most[head * group + g], top = before, sum = 0;
        memcpy(shares[g], &scores, sizeof scores);
        for (long t = count; t < 16; t++) shares[g][t] = -INFINITY;
#pragma omp simd reduction(max : top)
        for (long t = 0; t < 16; t++) top = shares[g][t] > top ? shares[g][t] : top;
#pragma omp simd reduction(+ : sum)
        for (long t = 0; t < 16; t++) sum += shares[g][t] = exponential(shares[g][t] - top);
        if (top > before) {
          float shrink = exponential(before - top);
          total[head * group + g] *= shrink;
          for (long j = 0; j < parts; j++) sums_head[g * parts + j] *= shrink;
          most[head * group + g] = top;
        }
        total[head * group + g] += sum;
      }
      for (long j = 0; j < parts; j++) {
        long g = 0;
        for (; g + 4 <= group; g += 4) {
          vec *to = sums_head + g * parts + j;
          vec one = to[0], two = to[parts], three = to[2 * parts], four = to[3 * parts];
          for (long t = 0; t < 16; t++) {
            vec value = LOAD16(value_head + at[t] + 16 * j);
            one += shares[g][t] * value, two += shares[g + 1][t] * value;
            three += shares[g + 2][t] * value, four += shares[g + 3][t] * value;
          }
          to[0] = one, to[parts] = two, to[2 * parts] = three, to[3 * parts] = four;
        }
        for (; g < group; g++) {
          vec one = sums_head[g * parts + j];
          for (long t = 0; t < 16; t++) one += shares[g][t] * LOAD16(value_head + at[t] + 16 * j);
          sums_head[g * parts + j] = one;
        }
      }
    }
  }
  for (long i = 0; i < all * parts; i++) {
    vec found = sums[i] / total[i / parts];
    for (long k = 0; k < 16; k++) out[16 * i + k] = STORE(found[k]);
  }
}

static void NAMED(attend_row)(long heads, long group, long dim, long first, long last, struct cached cached,
                              const FLOAT *query, const FLOAT *keys, const FLOAT *values, FLOAT *out, float scale) {
  if (last <= first) {
    memset(out, 0, heads * group * dim * sizeof(FLOAT));
    return;
  }
  vec space[2 * heads * group * (dim / 16)];
#define OF(group, parts) \
  NAMED(attend_heads)(heads, group, parts, first, last, cached, query, keys, values, space, out, scale)
  if (dim == 64 && group == 4)
    OF(4, 4);
  else if (dim == 64)
    OF(group, 4);
  else if (dim == 128)
    OF(group, 8);
  else
    OF(group, dim / 16);
#undef OF
}

/* query, out [rows, heads, dim] over the last tokens of `lengths` [rows], all or those in a `window`; their blocks are
   in tables [rows, ...]. Tasks are rows, or as many parts of each as there are threads, or as KV heads that have room
   at once. */
void NAMED(attend)(long rows, long heads, long kv_heads, long dim, long query_stride, long block, long block_stride,
                   long stride, long table_stride, long window, const FLOAT *query, const FLOAT *keys,
                   const FLOAT *values, const int32_t *tables, const int32_t *lengths, FLOAT *out, float scale,
                   int threads) {
  long group = heads / kv_heads, room = MOST_FLOATS / (group * dim);
  long parts = rows < threads ? (threads + rows - 1) / rows : 1, each = (kv_heads + parts - 1) / parts;
  each = each < room ? each : room;
  parts = (kv_heads + each - 1) / each;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long task = 0; task < rows * parts; task++) {
    long row = task / parts, head = task % parts * each, count = kv_heads - head < each ? kv_heads - head : each;
    long last = lengths[row], first = window && last > window ? last - window : 0;
    struct cached cached = {tables + row * table_stride, block, block_stride, stride};
    NAMED(attend_row)(count, group, dim, first, last, cached, query + row * query_stride + head * group * dim,
                      keys + head * dim, values + head * dim, out + (row * heads + head * group) * dim, scale);
  }
}

/* out [rows, dim] = table[ids] */
void NAMED(lookup)(long rows, long dim, const FLOAT *table, const int32_t *ids, FLOAT *out) {
  for (long row = 0; row < rows; row++) memcpy(out + row * dim, table + ids[row] * dim, dim * sizeof(FLOAT));
}

/* out [rows, outputs] = x Wᵀ + b for few rows of x and W [outputs, dim] in oneDNN's order: blocks of 64 outputs, in
   each all columns, filled up to `width`, as WORDS vectors of one column, or of two, each of 16 outputs. */
static inline __attribute__((always_inline)) void NAMED(packed_block)(int rows, long dim, long stride, const FLOAT *x,
                                                                      const FLOAT *block, vec *sums) {
  for (int i = 0; i < 4 * rows; i++) sums[i] = (vec){0};
  for (long k = 0; k + PAIR <= dim; k += PAIR) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __builtin_prefetch((const char *)(block + 64 * k) + 64 * j + FURTHER);
      words found;
      memcpy(&found, block + 64 * k + 16 * PAIR * j, sizeof found);
#pragma GCC unroll 4
      for (int row = 0; row < rows; row++) sums[4 * row + j] += COLUMNS(found, x + row * stride + k);
    }
  }
  if (dim % PAIR)
    for (int j = 0; j < 4; j++) {
      words found;
      memcpy(&found, block + 64 * (dim - 1) + 16 * PAIR * j, sizeof found);
      for (int row = 0; row < rows; row++) sums[4 * row + j] += (vec)(found << 16) * LOAD(x[row * stride + dim - 1]);
    }
}

void NAMED(packed_rows)(long rows, long outputs, long dim, long width, long stride, const FLOAT *x, const FLOAT *weight,
                        const FLOAT *bias, FLOAT *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long first = 0; first < outputs; first += 64) {
    long count = outputs - first < 64 ? outputs - first : 64;
    vec sums[4 * MOST_PACKED];
    switch (rows) {
#define OF(n) case n: NAMED(packed_block)(n, dim, stride, x, weight + first * width, sums); break;
      OF(1) OF(2) OF(3) OF(4)
#undef OF
    }
    for (long row = 0; row < rows; row++)
      for (long i = 0; i < count; i++) {
        float sum = sums[4 * row + i / 16][i % 16];
        out[row * outputs + first + i] = STORE(bias ? sum + LOAD(bias[first + i]) : sum);
      }
  }
}

#ifdef MULTIPLIES_BYTES
/* digits int8 [rows, COUNT, width] with Σ digits[i] / 254^i · own[row] = x [rows, dim] but for the rest of the last
   one, zeros behind dim, and sums int32 [rows, COUNT, width / 4] of four digits each, times -128. */
static void NAMED(digits)(long rows, long dim, long stride, long width, const FLOAT *x, int8_t *digits, int32_t *sums,
                   float *own) {
  for (long row = 0; row < rows; row++) {
    const FLOAT *from = x + row * stride;
    float most = 0, poison = 0;
#pragma omp simd reduction(max : most) reduction(+ : poison)
    for (long i = 0; i < dim; i++) {
      float size = fabsf(LOAD(from[i]));
      most = size > most ? size : most;
      poison += size * 0; /* what is not finite makes all of the row's results NaN */
    }
    float unit = (most > 1e-30f ? most : 1e-30f) / 127;
    own[row] = unit + poison;
    int8_t *to = digits + row * COUNT * width;
    memset(to, 0, COUNT * width);
#pragma omp simd
    for (long i = 0; i < dim; i++) {
      float rest = LOAD(from[i]) / unit;
      for (int place = 0; place < COUNT; place++) {
        float rounded = rintf(rest);
        to[place * width + i] = (int8_t)(int32_t)rounded;
        rest = (rest - rounded) * 254;
      }
    }
    int32_t *sum = sums + row * COUNT * (width / 4);
    for (long i = 0; i < COUNT * width / 4; i++)
      sum[i] = -128 * (to[4 * i] + to[4 * i + 1] + to[4 * i + 2] + to[4 * i + 3]);
  }
}

/* out [rows, outputs] = x Wᵀ of x [rows, dim] and codes [outputs, dim] with float scales of rows, or float16 scales of
   32 columns each where they are `grouped`. `space` has room for bytes [rows, 2 COUNT width + 4]. */
void NAMED(byte_linear)(long rows, long outputs, long dim, long width, long stride, const FLOAT *x, int8_t *space,
                        const int8_t *codes, const void *scales, FLOAT *out, int grouped, int threads) {
  int32_t *sums = (int32_t *)(space + rows * COUNT * width);
  float *own = (float *)(space + 2 * rows * COUNT * width);
  NAMED(digits)(rows, dim, stride, width, x, space, sums, own);
  if (grouped)
    group_rows(rows, COUNT, outputs, dim, width, space, sums, own, codes, scales, out, sizeof(FLOAT) == 2, threads);
  else
    byte_rows(rows, COUNT, outputs, dim, width, space, sums, own, codes, scales, out, sizeof(FLOAT) == 2, threads);
}
#endif

/* out [rows, outputs] = x Wᵀ of x [rows, dim] and the weight `w`; `space` has room for floats
   [rows, dim + dim / 32]. */
void NAMED(nibble_linear)(long rows, long outputs, long dim, const FLOAT *x, float *space, const struct nibbles *w,
                          FLOAT *out, int threads) {
  float *odd = space + rows * (dim / 2), *sums = odd + rows * (dim / 2);
  for (long i = 0; i < rows * dim / 2; i++) space[i] = LOAD(x[2 * i]), odd[i] = LOAD(x[2 * i + 1]);
  for (long i = 0; i < rows * dim / 32; i++) {
    sums[i] = 0;
    for (long j = 0; j < 16; j++) sums[i] += space[16 * i + j] + odd[16 * i + j];
  }
  nibble_rows_of(rows, outputs, dim, w, space, out, sizeof(FLOAT) == 2, threads);
}

/* best [rows] and value [rows]: the largest number of each row of x [rows, size], the first of equal ones, or its first
   NaN. */
void NAMED(greedy)(long rows, long size, const FLOAT *x, int32_t *best, float *value) {
  for (long row = 0; row < rows; row++) {
    const FLOAT *from = x + row * size;
    vec most;
    words at = {0}, now;
    for (int i = 0; i < 16; i++) most[i] = -INFINITY, now[i] = i;
    long start = 0;
    for (; start + 16 <= size; start += 16, now += 16) {
      vec found = LOAD16(from + start);
      words better = (words)((found > most) | ((found != found) & (most == most)));
      most = (vec)((better & (words)found) | (~better & (words)most));
      at = (better & now) | (~better & at);
    }
    long place = at[0];
    float top = most[0];
    for (int i = 1; i < 16; i++) {
      int both = top != top && most[i] != most[i], nan = top == top && most[i] != most[i];
      if (nan || most[i] > top || ((both || most[i] == top) && at[i] < place)) top = most[i], place = at[i];
    }
    for (; start < size; start++) {
      float found = LOAD(from[start]);
      if (found > top || (found != found && top == top)) top = found, place = start;
    }
    best[row] = place, value[row] = top;
  }
}

WORDS(rms_norm, N(0), N(1), N(2), N(3), P(4), P(5), P(6), P(7), P(8), F(9), F(10), N(11))
WORDS(silu_mul, N(0), N(1), P(2), P(3), N(4))
WORDS(rotary, N(0), N(1), N(2), N(3), N(4), N(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), P(13), F(14), F(15), N(16))
WORDS(store, N(0), N(1), N(2), N(3), N(4), N(5), N(6), P(7), P(8), P(9), P(10), P(11))
WORDS(attend, N(0), N(1), N(2), N(3), N(4), N(5), N(6), N(7), N(8), N(9), P(10), P(11), P(12), P(13), P(14), P(15),
      F(16), N(17))
WORDS(greedy, N(0), N(1), P(2), P(3), P(4))
WORDS(lookup, N(0), N(1), P(2), P(3), P(4))
WORDS(packed_rows, N(0), N(1), N(2), N(3), N(4), P(5), P(6), P(7), P(8), N(9))
WORDS(nibble_linear, N(0), N(1), N(2), P(3), P(4), P(5), P(6), N(7))
#ifdef MULTIPLIES_BYTES
WORDS(byte_linear, N(0), N(1), N(2), N(3), N(4), P(5), P(6), P(7), P(8), P(9), N(10), N(11))
#endif
