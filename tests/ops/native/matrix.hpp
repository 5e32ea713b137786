// A matrix of doubles, and its product by plain loops: what kernels are compared with.
#pragma once
#include "checks.hpp"

namespace native_test {

struct Matrix {
  int64_t rows, columns;
  Doubles v;

  Matrix(int64_t M, int64_t N) : rows(M), columns(N), v(M * N) {}
  Matrix(const Array& a, int64_t M, int64_t N) : Matrix(M, N) {
    for (int64_t i = 0; i < M * N; ++i) v[i] = a[i];
  }
  double& at(int64_t m, int64_t n) { return v[m * columns + n]; }
  double at(int64_t m, int64_t n) const { return v[m * columns + n]; }
  Matrix transposed() const {
    Matrix t(columns, rows);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < columns; ++n) t.at(n, m) = at(m, n);
    return t;
  }
  // Each element by f(element, row, column).
  template <class F>
  Matrix mapped(const F& f) const {
    Matrix y = *this;
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < columns; ++n) y.at(m, n) = f(at(m, n), m, n);
    return y;
  }
  Doubles sums() const {  // over rows
    Doubles sum(columns);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < columns; ++n) sum[n] += at(m, n);
    return sum;
  }
};

inline Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (int64_t m = 0; m < c.rows; ++m)
    for (int64_t k = 0; k < a.columns; ++k)
      for (int64_t n = 0; n < c.columns; ++n) c.at(m, n) += a.at(m, k) * b.at(k, n);
  return c;
}

}  // namespace native_test
