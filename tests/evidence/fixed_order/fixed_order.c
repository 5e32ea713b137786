// Matrix products whose order of summation is written here and nowhere else: an element of the
// result adds its terms in ascending k. Which BLAS, which vector width and which batch compute it
// makes no difference, so a test that rests on these bits has one verdict on every CPU.
// Compiled without contraction: a compiler may vectorise over columns, but not change a rounding.
#include <stddef.h>

enum {
  kColumns = 64,  // of a row of the result at a time: their sums stay in registers or L1
  kBlock = 192,   // terms that fp32 adds up before they join the result: gives the error of MKL's
                  // sgemm with AVX2, 2.5e-7 for normal numbers at K = 768 and at K = 3072
};

#define EACH(n) for (ptrdiff_t n = 0; n < kColumns; ++n)

static ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

// c (M, N) += a (M, K) b (K, N), N a multiple of kColumns. In fp32: each product is rounded, then
// each sum, as plain loops do.
void multiply_add(float* c, const float* a, const float* b, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K) {
  for (ptrdiff_t start = 0; start < K; start += kBlock)
    for (ptrdiff_t first = 0; first < N; first += kColumns)
      for (ptrdiff_t m = 0; m < M; ++m) {
        float* const out = c + m * N + first;
        float sum[kColumns] = {0};
        for (ptrdiff_t k = start; k < least(start + kBlock, K); ++k) {
          const float factor = a[m * K + k];
          const float* const row = b + k * N + first;
          EACH(n) sum[n] += factor * row[n];
        }
        EACH(n) out[n] += sum[n];
      }
}

// The same, `step` terms at a time: their exact products are added up in double and join the fp32
// sum with one rounding, as an instruction of a tensor core adds them.
void accumulate_in_steps(float* c, const float* a, const float* b, ptrdiff_t M, ptrdiff_t N,
                         ptrdiff_t K, ptrdiff_t step) {
  for (ptrdiff_t first = 0; first < N; first += kColumns)
    for (ptrdiff_t m = 0; m < M; ++m) {
      float* const out = c + m * N + first;
      for (ptrdiff_t start = 0; start < K; start += step) {
        double sum[kColumns] = {0};
        for (ptrdiff_t k = start; k < least(start + step, K); ++k) {
          const double factor = a[m * K + k];
          const float* const row = b + k * N + first;
          EACH(n) sum[n] += factor * row[n];
        }
        EACH(n) out[n] = (float)(out[n] + sum[n]);
      }
    }
}
